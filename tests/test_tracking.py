"""Bases that stay at a refresh: against dense references, over ranks, and across checkpoints."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import average, batch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run
from test_account import Case, build, pick
from test_rank_checkpoints import learn, net
from torch import Tensor, nn
from torch.nn import functional as F
from training import assert_same

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.account import Account
from kaisa_optim.algebra import in_basis
from kaisa_optim.layers import Layer

HALF = {"factor_update_steps": 1, "inv_update_steps": 4, "damping": 0.01, "kl_clip": None}
Key = tuple[str, str]  # a layer's name, "a" or "g"
State = dict[Key, tuple[Tensor, Tensor]]  # eigenvalues and eigenvectors


def spread(matrix: Tensor, vectors: Tensor) -> float:
    """How much of QᵀFQ is outside of its diagonal, as a share."""
    turned = vectors.mT @ matrix @ vectors
    diagonal = turned.diagonal(dim1=-2, dim2=-1).diag_embed()
    return float(torch.linalg.norm(turned - diagonal) / torch.linalg.norm(turned))


@given(st.integers(1, 3), st.integers(1, 7), st.integers(0, 10**6))
def test_a_matrix_in_a_basis(count, n, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, n + 2, n, generator=generator, dtype=torch.float64)
    factors = rows.mT @ rows
    basis = torch.linalg.qr(
        torch.randn(count, n, n, generator=generator, dtype=torch.float64)
    ).Q.contiguous()
    values, outside, whole = in_basis(factors, basis)
    turned = basis.mT @ factors @ basis
    diagonal = turned.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(values, diagonal)
    torch.testing.assert_close(outside, (turned - diagonal.diag_embed()).flatten(1).norm(dim=1))
    torch.testing.assert_close(whole, factors.flatten(1).norm(dim=1))
    with_vectors = torch.linalg.eigh(factors)
    _, outside, whole = in_basis(factors, with_vectors.eigenvectors)
    assert (outside <= 1e-12 * whole).all()


# ---- one process, step by step ----


def state(opt: Any) -> State:
    """What is applied, of the factors that have bases."""
    kfac = opt.preconditioner
    found = {}
    for (layer, side), factor in kfac.layout.factors.items():
        if "vectors" in factor.stack.tensors:
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
    staggered = bool(kfac.options.staggered)
    found = kfac.account.refresh_turns(kfac.inv_update_steps, staggered)
    return {turn: set(names) for turn, names in found.items()}


class Follower:
    """What a refresh should do to every factor, worked out from dense matrices."""

    def __init__(self, opt: Any, tolerance: float) -> None:
        self.opt, self.tolerance = opt, tolerance
        self.stale: set[Key] = set()
        self.kept = self.anew = 0

    def check(self, step: int, before: State) -> None:
        kfac = self.opt.preconditioner
        now, factors = state(self.opt), averages(self.opt)
        turn = turns(kfac).get(step % kfac.inv_update_steps, set())
        stale, self.stale = self.stale, set()
        for key, (values, vectors) in now.items():
            turned = vectors.mT @ factors[key] @ vectors
            diagonal = turned.diagonal(dim1=-2, dim2=-1)
            if step == 0 or key in stale:
                self.anew += 1
                assert spread(factors[key], vectors) < 1e-10
                torch.testing.assert_close(values, diagonal, rtol=1e-9, atol=1e-12)
            elif key[0] in turn and not any((key[0], side) in stale for side in "ag"):
                assert torch.equal(vectors, before[key][1])
                torch.testing.assert_close(values, diagonal, rtol=1e-9, atol=1e-12)
                share = spread(factors[key], vectors)
                assert abs(share - self.tolerance) > 1e-9  # or rounding would decide
                if share > self.tolerance:
                    self.stale.add(key)
                else:
                    self.kept += 1
            elif key[0] not in turn:
                assert torch.equal(vectors, before[key][1])
                assert torch.equal(values, before[key][0])


@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize("moments", ["parameters", "eigenbasis"])
@pytest.mark.parametrize("tolerance", [1e-9, 0.1, 0.99])
def test_every_refresh_of_one_process(tolerance, moments, staggered):
    model = net()
    options = {**HALF, "staggered": staggered, "moments": moments, "basis_tolerance": tolerance}
    opt = KFACAdam(model, lr=0.02, eps=1e-3, early_refreshes=(), **options)
    follower, before = Follower(opt, tolerance), {}
    for step in range(26):
        learn(model, opt, range(step, step + 1))
        follower.check(step, before)
        before = state(opt)
    if tolerance == 0.1:
        assert follower.kept > 5 and follower.anew > 15  # of which 7 in the first step
    else:
        assert (follower.kept == 0) == (tolerance < 0.1)
        assert (follower.anew == 7) == (tolerance > 0.9)


def test_a_tolerance_of_nothing_decomposes_at_every_refresh():
    plain, tracked = net(), net()
    learn(plain, KFACSGD(plain, lr=0.1, **HALF), range(9))
    learn(tracked, KFACSGD(tracked, lr=0.1, basis_tolerance=0, **HALF), range(9))
    assert_same(tracked, plain)


def test_steps_with_a_basis_that_stays():
    """The second step is taken in the basis of the first, with eigenvalues of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    options = {**HALF, "inv_update_steps": 1, "basis_tolerance": 0.999}
    opt = KFACSGD(model, lr=1.0, **options)
    (layer,) = model
    bases: list[Tensor] = []
    for step in range(2):
        x, y = torch.randn(6, 4).double(), torch.randn(6, 3).double()
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
        old = torch.cat([layer.weight.detach().clone(), layer.bias.detach().clone()[:, None]], 1)
        opt.step()
        a, g = (f[0] for f in opt.preconditioner.factors("0"))
        if step == 0:
            bases = [torch.linalg.eigh(f).eigenvectors for f in (a, g)]
        qa, qg = bases
        va, vg = ((q.mT @ f @ q).diagonal() for q, f in zip(bases, (a, g), strict=True))
        expected = qg @ ((qg.mT @ gradient @ qa) / (vg[:, None] * va + 0.01)) @ qa.mT
        moved = old - torch.cat([layer.weight, layer.bias[:, None]], 1)
        torch.testing.assert_close(moved, expected)


def test_moments_turn_with_the_basis_that_is_new():
    """Where the bases stay, moments stay as they are; where they move, so do the moments."""
    tracked, plain = net(), net()
    options = {**HALF, "moments": "eigenbasis", "early_refreshes": ()}
    runs = {}
    for model, tolerance in ((tracked, 1e-9), (plain, 0.0)):
        opt = KFACAdam(model, lr=0.0, eps=1e-3, **options, basis_tolerance=tolerance)
        learn(model, opt, range(8))
        kfac = opt.preconditioner
        runs[tolerance] = []
        for pair in kfac.layout.pairs:
            bases = [
                s.tensors["vectors"][at] if "vectors" in s.tensors else None
                for s, at in ((pair.g, pair.g_slots), (pair.a, pair.a_slots))
            ]
            first = pair.tensors["exp_avg"]
            first = first if bases[0] is None else bases[0] @ first
            runs[tolerance].append(first if bases[1] is None else first @ bases[1].mT)
    # Without steps, statistics and gradients are the same: so are the moments, turned back.
    for one, other in zip(runs[1e-9], runs[0.0], strict=True):
        torch.testing.assert_close(one, other)


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


def test_an_average_that_overflows_stays_out_of_the_steps():
    """The eigenvalues of before stay in use, as where a decomposition fails."""
    model = nn.Sequential(nn.Linear(4, 3))
    options = {**HALF, "inv_update_steps": 1, "factor_dtype": torch.float16}
    opt = KFACSGD(model, lr=0.1, basis_tolerance=0.5, **options)
    for scale in (1.0, 1.0, 1e4, 1.0):
        opt.zero_grad()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            (model(torch.randn(8, 4) * scale).square().mean() / scale**2).backward()
            opt.step()
        assert all(p.isfinite().all() for p in model.parameters())
    assert "the decomposition of layer '0' failed" in str(said[0].message)


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
        plan = opt.preconditioner.second_order.tracking.plan
        plans.append(Counter("anew" if anew else "kept" for anew in plan.values()))
    return [p.detach().clone() for p in model.parameters()], plans


@pytest.mark.parametrize(("world", "options"), SPREADS)
def test_ranks_decide_as_one_process(world, options):
    alone, plans = follow({}, 14)
    assert sum(p["kept"] for p in plans) > 5 and sum(p["anew"] for p in plans[1:]) > 1
    for weights, theirs in run(world, follow, options, 14):
        assert theirs == plans
        for one, other in zip(weights, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def traffic(case: Case, steps: int) -> tuple[list[tuple[Counter[str], dict[str, Any]]], Account]:
    """What arrived in each step, with what was done in it."""
    model, opt = build(case)
    kfac = opt.preconditioner
    seen = []
    asked: list[str] = []
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
        plan: dict[tuple[Layer, str], bool] = kfac.second_order.tracking.plan
        names = {layer.name for layer, _ in plan}
        kept = {n for n in names if not any(v for (x, _), v in plan.items() if x.name == n)}
        every = case.intervals[0]
        fed = kfac.account.gathering_turns(every).get(step % every, [])
        done = {"factors": fed, "refresh": names, "kept": kept, "asked": asked}
        if len(plan) == 2 * len(names):  # not one side alone
            seen.append((Counter(kfac.ranks.received) - before, done))
        asked = [layer.name for layer in kfac.second_order.tracking.asked]
    used, kept = kfac.memory_usage(), kfac.account.memory()[dist.get_rank()]
    assert {kind: used.get(kind, 0) for kind in kept} == kept
    most = kfac.communication_volume()
    assert all(size <= 6 * most[kind] * (1 + 1e-9) for kind, size in last.items())
    return seen[1:], kfac.account


@pytest.mark.parametrize("tolerance", [1e-6, 0.9])
@pytest.mark.parametrize(("world", "options"), SPREADS)
def test_what_travels_of_bases_that_stay(world, options, tolerance):
    options = {**options, "basis_tolerance": tolerance}
    case = Case("images", options, intervals=(2, 3), dtype=torch.float64)
    for rank, (steps, account) in enumerate(run(world, traffic, case, 12)):
        kinds = Counter()
        for got, done in steps:
            assert got == pick(account.step(**done)[rank])
            kinds["kept"] += len(done["kept"])
            kinds["anew"] += len(done["refresh"]) - len(done["kept"])
        assert kinds["kept"] > 3 and (kinds["anew"] > 3) == (tolerance < 0.1)


# ---- checkpoints ----


def begun(options: dict[str, Any], steps: int) -> tuple[nn.Module, Any]:
    model = net()
    opt = KFACSGD(model, lr=0.1, basis_tolerance=0.1, **HALF, **options)
    learn(model, opt, range(steps))
    return model, opt


@pytest.mark.parametrize("steps", range(5, 9))
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
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


def carried_on(saved: tuple[dict[str, Any], dict[str, Any]] | None, start: int, stop: int) -> Any:
    model, opt = begun({}, start if saved is None else 0)
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
    alone, opt = begun({}, steps)
    learn(alone, opt, range(steps, steps + 5))
    saved = run(2, carried_on, None, steps, steps)[0]
    for own, _ in run(4, carried_on, saved, steps, steps + 5):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-12)
