"""Bases that follow their factors: against dense references, over ranks, across checkpoints."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.linalg.eigen import refine_basis
from kaisa_optim.plan.account import Account
from kaisa_optim.plan.step_plan import StepPlan
from tests.core.test_rank_checkpoints import learn, net
from tests.plan.test_account import Case, build, pick
from tests.support.cluster import average, batch
from tests.support.ranks import run
from tests.support.training import assert_same, refreshed

HALF = {"factor_update_steps": 1, "inv_update_steps": 4, "damping": 0.01, "kl_clip": None}
Key = tuple[str, str]  # a layer's name, "a" or "g"
State = dict[Key, tuple[Tensor, Tensor]]  # eigenvalues and eigenvectors


class Followed(NamedTuple):
    """A factor in a basis that was turned for it, by products of whole matrices."""

    values: Tensor
    vectors: Tensor
    share: float  # outside of the diagonal, of the factor's norm, as far as is looked


def expected(
    factor: Tensor, vectors: Tensor, values: Tensor, turn: int, followed: Tensor
) -> Followed:
    """The leading vectors are those that ``followed`` has: by far nearer to a diagonal than the
    ones that one iteration gives, in what these span."""
    n = len(factor)
    few = max(1, n // 8)
    turned = vectors @ torch.linalg.qr(vectors.T @ factor @ vectors[:, :few], mode="complete").Q
    first, leading = turned[:, :few], followed[:, :few]
    torch.testing.assert_close(leading @ leading.T, first @ first.T, rtol=1e-9, atol=1e-10)
    before, after = (outside(x.T @ factor @ x) for x in (first, leading))
    # One in 2,000 factors, of values that nearly agree, stays farther: none of those drawn here.
    assert after <= 0.03 * before + 1e-12 * factor.norm()
    turned[:, :few] = leading
    inside = turned.T @ factor @ turned
    found, columns = inside.diagonal(), (inside - inside.diagonal().diag()).square().sum(0)
    turns = min(8, n - few)
    picked = range(few + turn % turns, n, turns)
    seen = [*range(few), *picked]
    rest = [i for i in range(n) if i not in seen]
    values = values.clone()
    if rest:
        values[rest] *= (factor.trace() - found[seen].sum()) / values[rest].sum()
    values[seen] = found[seen]
    left = columns[:few].sum() + sum(columns[i] for i in picked) * (n - few) / len(picked)
    return Followed(values, turned, float(left.sqrt() / factor.norm()))


def outside(matrix: Tensor) -> Tensor:
    """The norm outside of the diagonal."""
    return (matrix - matrix.diagonal().diag()).norm()


def moment(rows: int, n: int, generator: torch.Generator) -> Tensor:
    """With eigenvalues that differ: each is about two thirds of the one before."""
    drawn = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    drawn *= 1.2 ** -torch.arange(n)
    turned = drawn @ torch.linalg.qr(torch.randn(n, n, generator=generator).double()).Q
    return turned.T @ turned / rows


def largest_first(factor: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(factor)
    return values.flip(-1), vectors.flip(-1)


@given(st.integers(2, 40), st.integers(0, 9), st.integers(0, 10**6))
@settings(max_examples=40)
def test_a_basis_that_follows_its_factor(n, turn, seed):
    """Two at once, each as by whole matrices."""
    generator = torch.Generator().manual_seed(seed)
    older = [moment(3 * n, n, generator) for _ in range(2)]
    factors = [0.8 * f + 0.2 * moment(3 * n, n, generator) for f in older]
    values, vectors = (torch.stack(x) for x in zip(*map(largest_first, older), strict=True))
    found = refine_basis(torch.stack(factors), vectors, values, turn)
    for i, factor in enumerate(factors):
        right = expected(factor, vectors[i], values[i], turn, found[1][i])
        torch.testing.assert_close(found[0][i], right.values)
        signs = (found[1][i] * right.vectors).sum(0).sign()
        torch.testing.assert_close(found[1][i] * signs, right.vectors)
        torch.testing.assert_close(found[1][i].T @ found[1][i], torch.eye(n).double())
        torch.testing.assert_close(float(found[2][i] / found[3][i]), right.share)
        torch.testing.assert_close(found[3][i], factor.norm())


@given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 10**6))
def test_a_basis_that_fits_stays(n, turn, seed):
    factor = moment(3 * n, n, torch.Generator().manual_seed(seed))
    values, vectors = largest_first(factor)
    found = refine_basis(factor[None], vectors[None], values[None], turn)
    torch.testing.assert_close(found[0][0], values)
    torch.testing.assert_close(found[1][0].abs(), vectors.abs())
    assert found[2] <= 1e-12 * found[3]


def test_leading_vectors_become_eigenvectors():
    """From anywhere; and the others get their values one turn after the other."""
    generator = torch.Generator().manual_seed(0)
    factor = moment(200, 24, generator)
    vectors = torch.linalg.qr(torch.randn(24, 24, generator=generator).double()).Q
    values = torch.ones(1, 24).double()
    basis = vectors[None]
    for turn in range(200):
        values, basis, _, _ = refine_basis(factor[None], basis, values, turn)
    right, _ = largest_first(factor)
    torch.testing.assert_close(values[0, :3].sort(descending=True).values, right[:3])
    inside = basis[0].T @ factor @ basis[0]
    torch.testing.assert_close(values[0], inside.diagonal())
    assert inside[3:, :3].norm() < 1e-8 * right[0]


@given(st.integers(2, 40), st.integers(0, 3), st.sampled_from([0.0, 1e-3, 100.0]))
def test_a_factor_that_is_scaled(n, turn, scale):
    """All eigenvalues go with it, also of vectors that are not looked at; and from nothing up."""
    factor = moment(3 * n, n, torch.Generator().manual_seed(n))
    values, vectors = largest_first(factor)
    found = refine_basis(scale * factor[None], vectors[None], values[None], turn)
    torch.testing.assert_close(found[0][0], scale * values)
    for older in (0 * found[0], 1e-300 * found[0]):  # too small for a proportion
        again = refine_basis(factor[None], vectors[None], older, turn)
        torch.testing.assert_close(again[0].sum(), values.sum())


@pytest.mark.parametrize("coupling", [0.0, 0.5, -1e-30])
def test_leading_values_that_are_equal(coupling):
    """Of 16 vectors two lead; on them F is [[4, c], [c, 4]], which no small turn makes diagonal."""
    values = torch.tensor([4.0, 4.0, *[1.0] * 14])
    factor = values.diag()
    factor[0, 1] = factor[1, 0] = coupling
    # One iteration keeps the span of the two; its own basis is theirs, or a turned one.
    found, vectors, *_ = refine_basis(factor[None], torch.eye(16)[None], values[None], 0)
    right = torch.tensor([4.0 + abs(coupling), 4.0 - abs(coupling)])
    torch.testing.assert_close(found[0, :2].sort(descending=True).values, right)
    assert outside(vectors[0].T @ factor @ vectors[0]) < 1e-5


@pytest.mark.parametrize("rows", [100, 2000])
def test_leading_values_that_are_nearly_equal(rows):
    """White rows leave little to turn to: what stays outside is told, and is less than before."""
    generator = torch.Generator().manual_seed(0)
    older, new = (torch.randn(rows, 64, generator=generator).double() for _ in range(2))
    factor = older.T @ older / rows * 0.9 + new.T @ new / rows * 0.1
    values, vectors = largest_first(older.T @ older / rows)
    before = outside(vectors.T @ factor @ vectors)
    _, found, left, _ = refine_basis(factor[None], vectors[None], values[None], 0)
    inside = found[0].T @ factor @ found[0]
    torch.testing.assert_close(found[0].T @ found[0], torch.eye(64).double())
    assert outside(inside) < before
    assert left[0] == pytest.approx(outside(inside).item(), rel=0.15)  # of others a part is seen


def test_many_turns_leave_vectors_orthonormal():
    generator = torch.Generator().manual_seed(0)
    factor = moment(128, 64, generator).float()
    values, vectors = (x[None] for x in largest_first(factor))
    for turn in range(300):
        factor = 0.95 * factor + 0.05 * moment(128, 64, generator).float()
        values, vectors, _, _ = refine_basis(factor[None], vectors, values, turn)
    assert (vectors[0].T @ vectors[0] - torch.eye(64)).norm() < 5e-4


@pytest.mark.parametrize("n", [1, 5, 30])
def test_what_is_not_a_number_is_told(n):
    factors = torch.arange(n, 0, -1.0).diag().repeat(3, 1, 1)
    factors[1, -1, 0] = math.nan
    factors[2, 0, -1] = math.inf
    vectors, values = torch.eye(n).repeat(3, 1, 1), torch.ones(3, n)
    values, vectors, outside, whole = refine_basis(factors, vectors, values, 1)
    assert (outside + whole).isfinite().tolist() == [True, False, False]
    torch.testing.assert_close(vectors[0].abs(), torch.eye(n))
    few = max(1, n // 8)
    torch.testing.assert_close(values[0, :few], torch.arange(n, n - few, -1.0))


# ---- one process, step by step ----


def state(opt: Any) -> State:
    """What is applied, of the factors that have bases."""
    kfac = opt.preconditioner
    found = {}
    for (layer, side), factor in kfac.applied.by_key.items():
        if "vectors" in factor.tensors:
            found[layer.name, side] = factor["values"].clone(), factor["vectors"].clone()
    return found


def averages(opt: Any) -> dict[Key, Tensor]:
    kfac = opt.preconditioner
    return {
        (name, side): factor.clone()
        for name in kfac.layers
        for side, factor in zip("ag", kfac.factors(name), strict=True)
        if factor.dim() == 3
    }


def turns(kfac: Any) -> dict[int, set[str]]:
    found = kfac.schedule.refresh_slots(kfac.inv_update_steps)
    return {turn: set(names) for turn, names in found.items()}


class Follower:
    """What a refresh should do to every factor, worked out from dense matrices."""

    def __init__(self, opt: Any, tolerance: float) -> None:
        self.opt, self.tolerance = opt, tolerance
        self.stale: set[Key] = set()
        self.fits = self.anew = 0

    def check(self, step: int, before: State) -> None:
        kfac = self.opt.preconditioner
        now, factors = state(self.opt), averages(self.opt)
        turn = turns(kfac).get(step % kfac.inv_update_steps, set())
        stale, self.stale = self.stale, set()
        for key, (values, vectors) in now.items():
            if step == 0 or key in stale:
                self.anew += 1
                right, _ = largest_first(factors[key][0])
                torch.testing.assert_close(values[0], right, rtol=1e-9, atol=1e-12)
                inside = vectors.mT @ factors[key] @ vectors
                torch.testing.assert_close(inside[0], right.diag(), rtol=1e-9, atol=1e-12)
            elif key[0] in turn and not any((key[0], side) in stale for side in "ag"):
                older = (part[0] for part in reversed(before[key]))
                number = step // kfac.inv_update_steps
                one = expected(factors[key][0], *older, number, vectors[0])
                torch.testing.assert_close(values[0], one.values, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(vectors[0], one.vectors, rtol=1e-8, atol=1e-8)
                assert abs(one.share - self.tolerance) > 1e-9  # or rounding would decide
                if one.share > self.tolerance:
                    self.stale.add(key)
                else:
                    self.fits += 1
            elif key[0] not in turn:
                assert torch.equal(vectors, before[key][1])
                assert torch.equal(values, before[key][0])


@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize("tolerance", [1e-9, 0.1, 0.99])
def test_every_refresh_of_one_process(tolerance, staggered):
    model = net()
    options = {**HALF, "staggered": staggered, "basis_tolerance": tolerance}
    opt = KFACAdam(model, lr=0.02, eps=1e-3, early_refreshes=(), **options)
    follower, before = Follower(opt, tolerance), {}
    for step in range(26):
        learn(model, opt, range(step, step + 1))
        follower.check(step, before)
        before = state(opt)
    if tolerance == 0.1:
        assert follower.fits > 5 and follower.anew > 15  # of which 7 in the first step
    else:
        assert (follower.fits == 0) == (tolerance < 0.1)
        assert (follower.anew == 7) == (tolerance > 0.9)


def test_a_tolerance_of_nothing_decomposes_at_every_refresh():
    plain, tracked = net(), net()
    learn(plain, KFACSGD(plain, lr=0.1, **HALF), range(9))
    learn(tracked, KFACSGD(tracked, lr=0.1, basis_tolerance=0, **HALF), range(9))
    assert_same(tracked, plain)


def test_steps_with_a_basis_that_followed():
    """The second step is taken in the basis of the first, turned a little."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    options = {**HALF, "inv_update_steps": 1, "basis_tolerance": 0.999}
    opt = KFACSGD(model, lr=1.0, **options)
    (layer,) = model
    bases: list[tuple[Tensor, Tensor]] = []
    for step in range(2):
        x, y = torch.randn(6, 4).double(), torch.randn(6, 3).double()
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
        old = torch.cat([layer.weight.detach().clone(), layer.bias.detach().clone()[:, None]], 1)
        opt.step()
        a, g = (f[0] for f in opt.preconditioner.factors("0"))
        if step == 0:
            bases = [largest_first(f) for f in (a, g)]
        else:
            now = {side: vectors[0] for (_, side), (_, vectors) in state(opt).items()}
            pairs = zip("ag", (a, g), bases, strict=True)
            bases = [expected(f, q, v, 1, now[side])[:2] for side, f, (v, q) in pairs]
        (va, qa), (vg, qg) = bases
        expected_step = qg @ ((qg.mT @ gradient @ qa) / (vg[:, None] * va + 0.01)) @ qa.mT
        moved = old - torch.cat([layer.weight, layer.bias[:, None]], 1)
        torch.testing.assert_close(moved, expected_step)


def test_sums_that_were_left_out_are_named_a_step_later():
    model = net()
    opt = KFACSGD(model, lr=0.0, basis_tolerance=0.99, **{**HALF, "staggered": False})
    learn(model, opt, range(3))
    before = copy.deepcopy(model.state_dict())
    handle = model[1].register_forward_hook(lambda m, i, out: out * math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(model, opt, range(3, 5))  # of which the last one refreshes
    handle.remove()
    model.load_state_dict(before)  # nothing times a rate of nothing is something here
    with pytest.warns(UserWarning, match="statistics that were not finite have been left out"):
        learn(model, opt, range(5, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(model, opt, range(6, 12))


@pytest.mark.parametrize("widest", [3, 16384])
@pytest.mark.parametrize("how", [{}, {"basis_tolerance": 0.5}, {"compute_method": "inverse"}])
def test_an_average_that_overflows_stays_out_of_the_steps(how, widest):
    """The state of before stays in use, as where a decomposition fails; of a diagonal, too."""
    model = nn.Sequential(nn.Linear(4, 3))
    options = {**HALF, "inv_update_steps": 1, "factor_dtype": torch.float16}
    opt = KFACSGD(model, lr=0.1, max_factor_size=widest, **options, **how)
    for scale in (1.0, 1.0, 1e4, 1.0):
        opt.zero_grad()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            (model(torch.randn(8, 4) * scale).square().mean() / scale**2).backward()
            opt.step()
        assert all(p.isfinite().all() for p in model.parameters())
    assert "the decomposition of layer '0' failed" in str(said[0].message)


def test_early_refreshes_look_at_other_vectors():
    model = net()
    options = {**HALF, "inv_update_steps": 100, "basis_tolerance": 0.99}
    opt = KFACAdam(model, lr=0.01, early_refreshes=(2, 3, 5), **options)
    numbers = []
    for step in range(7):
        learn(model, opt, range(step, step + 1))
        if step in (2, 3, 5):
            numbers.append(opt.preconditioner.plan.round)
    assert numbers == [1, 2, 3]


# ---- several ranks ----

SPREADS = [
    (2, {"assignment": "layer-wise"}),
    (2, {"assignment": "opt"}),
    (4, {"grad_worker_fraction": 0.5, "colocate_factors": False}),
]


def follow(options: dict[str, Any], steps: int) -> tuple[list[Tensor], list[Counter[str]]]:
    """Weights after some steps, and what has been planned in each."""
    model = net()
    opt = KFACSGD(model, lr=0.1, basis_tolerance=0.1, **HALF, **options)
    plans = []
    for step in range(steps):
        learn(model, opt, range(step, step + 1))
        factors = refreshed(opt.preconditioner)
        plans.append(Counter("anew" if anew else "followed" for anew in factors.values()))
    return [p.detach().clone() for p in model.parameters()], plans


@pytest.mark.parametrize(("world", "options"), SPREADS)
def test_ranks_decide_as_one_process(world, options):
    alone, plans = follow({"staggered": world}, 14)
    assert sum(p["followed"] for p in plans) > 5 and sum(p["anew"] for p in plans[1:]) > 1
    for weights, theirs in run(world, follow, options, 14):
        assert theirs == plans
        for one, other in zip(weights, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def traffic(case: Case, steps: int) -> tuple[list[tuple[Counter[str], StepPlan]], Account]:
    """Return the bytes that arrived in each step, with the step's plan."""
    model, opt = build(case)
    kfac = opt.preconditioner
    seen = []
    last: Counter[str] = Counter()
    for step in range(steps):
        x, y = batch(case.network, step, 4, case.dtype)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        average(model.parameters())
        before = Counter(kfac.ranks.received)
        opt.step()
        if step >= steps - 6:  # a whole interval of both
            last += Counter(kfac.ranks.received) - before
        seen.append((Counter(kfac.ranks.received) - before, kfac.plan))
    used, kept = kfac.memory_usage(), kfac.account.memory()[dist.get_rank()]
    assert {kind: used.get(kind, 0) for kind in kept} == kept
    most = kfac.communication_volume()
    assert all(size <= 6 * most[kind] * (1 + 1e-9) for kind, size in last.items())
    return seen[1:], kfac.account


@pytest.mark.parametrize(
    ("world", "options", "tolerance"),
    [(*SPREADS[0], 0.9), (*SPREADS[1], 1e-6), (*SPREADS[2], 1e-6), (*SPREADS[2], 0.9)],
)
def test_what_travels_of_bases_that_follow(world, options, tolerance):
    options = {**options, "basis_tolerance": tolerance}
    case = Case("images", options, intervals=(2, 3), dtype=torch.float64)
    for rank, (steps, account) in enumerate(run(world, traffic, case, 12)):
        kinds = Counter()
        for got, plan in steps:
            assert got == pick(account.price(plan)[rank])
            kinds["followed"] += len(plan.refine)
            kinds["anew"] += len(plan.decompose)
        assert kinds["followed"] > 6 and (kinds["anew"] > 6) == (tolerance < 0.1)


# ---- checkpoints ----


def begun(options: dict[str, Any], steps: int) -> tuple[nn.Module, Any]:
    model = net()
    opt = KFACSGD(model, lr=0.1, basis_tolerance=0.1, **HALF, **options)
    learn(model, opt, range(steps))
    return model, opt


@pytest.mark.parametrize(
    ("way", "steps"),
    [*(("state_dict", steps) for steps in range(5, 9)), ("deepcopy", 6), ("pickle", 6)],
)
def test_going_on_between_a_look_and_what_follows(steps, way):
    """Each step of an interval is stopped at: what was found out in the last one is not lost."""
    model, opt = begun({}, steps)
    if way == "deepcopy":
        other, again = copy.deepcopy((model, opt))
    elif way == "pickle":
        other, again = pickle.loads(pickle.dumps((model, opt)))
    else:
        saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
        other, again = begun({}, 0)
        other.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
    learn(model, opt, range(steps, steps + 6))
    learn(other, again, range(steps, steps + 6))
    assert_same(other, model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bases_of_one_who_decomposes_are_found_anew(dtype):
    """They may be rounded, and what follows rounded ones is not orthonormal."""
    model = net()
    opt = KFACSGD(model, lr=0.1, inv_dtype=dtype, **HALF)
    learn(model, opt, range(5))
    other, again = begun({}, 0)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(opt.state_dict())
    learn(other, again, range(5, 6))
    for key, (values, _) in state(again).items():
        torch.testing.assert_close(values[0], largest_first(averages(again)[key][0])[0])


ONE_AT_A_TIME = {"staggered": 1}  # on any number of ranks


def carried_on(saved: tuple[dict[str, Any], dict[str, Any]] | None, start: int, stop: int) -> Any:
    model, opt = begun(ONE_AT_A_TIME, start if saved is None else 0)
    if saved is not None:
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        learn(model, opt, range(start, stop))
    if saved is None:
        opt.consolidate_state_dict(to=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "state_dict.. holds rank")
        return model.state_dict(), opt.state_dict()


@pytest.mark.parametrize("steps", [5, 6])
def test_going_on_at_another_world(steps):
    alone, opt = begun(ONE_AT_A_TIME, steps)
    learn(alone, opt, range(steps, steps + 5))
    saved = run(2, carried_on, None, steps, steps)[0]
    for own, _ in run(4, carried_on, saved, steps, steps + 5):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-12)
