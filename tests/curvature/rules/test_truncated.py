"""Preconditioning by leading eigenvectors: these exactly, and the rest a little shorter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from kaisa_optim.curvature.rules import truncated as truncation
from kaisa_optim.curvature.rules.truncated import Counts, Leading, Sides, precondition
from kaisa_optim.linalg import kronecker
from tests.support import reference as ref

# ---- the equation ----


def spectrum(k: int, n: int, decades: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Orthonormal vectors, and values in any order from 1 down by so many powers of ten."""
    vectors, _ = torch.linalg.qr(torch.randn(k, n, n, generator=generator, dtype=torch.float64))
    values = 10 ** -(decades * torch.rand(k, n, generator=generator, dtype=torch.float64))
    return vectors, values


def shares_of(g: int, a: int, counts: Tensor) -> Tensor:
    """Which pairs lead, ``[k, g, a]``."""
    idle_g, idle_a, short, spared = (x[:, None, None] for x in counts.unbind(1))
    i, j = torch.arange(g)[None, :, None], torch.arange(a)[None, None, :]
    rows, columns = g - idle_g, a - idle_a
    return (i < rows) & (j < columns) & ((i < rows - short) | (j < columns - spared))


def listed(counts: Tensor) -> list[Counts]:
    return [Counts(*entry, 0) for entry in counts.tolist()]


@settings(max_examples=200)
@given(
    k=st.integers(1, 3),
    g=st.integers(2, 12),
    a=st.integers(2, 12),
    diagonal=st.sampled_from(["", "", "g", "a"]),
    decades=st.sampled_from([0.5, 3.0, 8.0]),
    damping=st.sampled_from([1e-6, 1e-2, 10.0]),
    tolerance=st.sampled_from([1e-3, 0.1, 0.9]),
    calls=st.sampled_from([0, 100]),
    in_order=st.booleans(),
    each=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_leads_is_exact_and_the_rest_a_little_shorter(
    k, g, a, diagonal, decades, damping, tolerance, calls, in_order, each, seed
):
    generator = torch.Generator().manual_seed(seed)
    (q_g, v_g), (q_a, v_a) = (spectrum(k, n, decades, generator) for n in (g, a))
    if in_order:
        v_g, v_a = (v.sort(descending=True).values for v in (v_g, v_a))
    bases = None if diagonal == "g" else q_g, None if diagonal == "a" else q_a
    raw = torch.randn(k, g, a, generator=generator, dtype=torch.float64)
    own = damping * (1 + torch.arange(k, dtype=torch.float64)[:, None, None] * each)
    sides = Sides(g, a, diagonal != "g", diagonal != "a")
    counts = truncation.counted(v_g, v_a, tolerance * damping, sides, calls)
    left_out = torch.nn.functional.pad(counts, (0, 1))
    alone, together, as_pays = (
        precondition(
            raw,
            bases,
            (v_g, v_a),
            left_out,
            truncation.runs_of(listed(counts), sides, least),
            own if each else damping,
        )
        for least in (0, 10**9, 200)
    )
    rounding = 1e-14 * raw.norm() / damping  # of the flat part, which all entries have a share in
    for other in (together, as_pays):
        assert ((other - alone).abs() <= 1e-6 * alone.abs() + rounding).all()
    was, now = kronecker.into_basis(raw, *bases), kronecker.into_basis(alone, *bases)
    curvature = v_g[:, :, None] * v_a[:, None, :]
    exact = was / (curvature + own)
    leads = shares_of(g, a, counts)
    assert ((now - exact).abs() <= 1e-6 * exact.abs() + rounding)[leads].all()
    assert (curvature[~leads] <= tolerance * damping * (1 + 1e-9)).all()
    size, most = now * was.sign(), exact.abs()
    assert (size <= most + rounding)[~leads].all()
    assert (size >= most / (1 + tolerance) - rounding)[~leads].all()


@settings(max_examples=60)
@given(
    g=st.integers(1, 9),
    a=st.integers(1, 9),
    decades=st.sampled_from([0.5, 3.0]),
    floor=st.sampled_from([1e-3, 0.03, 0.9]),
    calls=st.sampled_from([0, 40]),
    seed=st.integers(0, 99),
)
def test_the_least_of_such_blocks_is_multiplied(g, a, decades, floor, calls, seed):
    """Of all that hold every pair above the floor, with what a second one costs."""
    generator = torch.Generator().manual_seed(seed)
    v_g, v_a = (spectrum(1, n, decades, generator)[1] for n in (g, a))
    sides = Sides(g, a)
    (counts,) = listed(truncation.counted(v_g, v_a, floor, sides, calls))
    matters = v_g[0, :, None] * v_a[0, None, :] > floor
    rows, columns = (max(matters.any(x).nonzero().tolist(), default=[-1])[0] + 1 for x in (1, 0))
    assert (counts.idle_g, counts.idle_a) == (g - rows, a - columns)

    def work(first: int, few: int) -> int:
        found = Leading(rows, columns, first, few)
        covered = torch.zeros_like(matters)
        for r, c in found.blocks():
            covered[r, c] = True
        if (matters & ~covered).any():
            return 10**9
        return found.work(sides) + calls * max(len(found.blocks()) - 1, 0)

    got = work(rows - counts.short, columns - counts.spared)
    assert got == min(work(i, j) for i in range(rows + 1) for j in range(columns + 1))


def test_what_leads_is_counted_up_to_the_last_that_matters():
    values = torch.tensor([[4.0, 0.1, 2.0, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    others = torch.tensor([[0.5, 1.0], [1.0, 1.0]])

    def idle(floor: float, dense_g: bool, dense_a: bool) -> list[int]:
        sides = Sides(5, 2, dense_g, dense_a)
        return truncation.counted(values, others, floor, sides, 0)[:, 0].tolist()

    assert idle(0.1, True, True) == idle(0.1, True, False) == [2, 5]
    assert idle(0.09, True, True) == [1, 5]
    assert idle(0.1, False, True) == [0, 0]


def test_nothing_is_left_out_where_all_pairs_lead():
    values = torch.tensor([[4.0, 2.0, 1.0]])
    assert not truncation.counted(values, values, 0.5, Sides(3, 3), 0).any()


# Of 100 by 100: two that lead little and alike, one with two blocks, one of which nothing leads.
LITTLE, ALIKE, NONE = Counts(90, 95, 0, 0, 0), Counts(89, 95, 0, 0, 0), Counts(100, 100, 0, 0, 0)
WIDE = Counts(10, 20, 60, 70, 0)


@pytest.mark.parametrize(
    ("counts", "calls", "expected"),
    [
        ([LITTLE, ALIKE, WIDE, LITTLE], 2_000, [(0, 2), (2, 3), (3, 4)]),
        ([LITTLE, ALIKE, WIDE, LITTLE], 10**7, [(0, 4)]),
        ([LITTLE, ALIKE, WIDE, LITTLE], 0, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([LITTLE, LITTLE], 0, [(0, 2)]),
        ([NONE, LITTLE, NONE, LITTLE, NONE], 10**6, [(1, 4)]),
        ([NONE, LITTLE, NONE, LITTLE, NONE], 10**3, [(1, 2), (3, 4)]),
        ([NONE, NONE], 10**6, []),
    ],
)
def test_layers_are_multiplied_together_where_that_takes_no_longer(counts, calls, expected):
    runs = truncation.runs_of(counts, Sides(100, 100), calls)
    assert [(where.start, where.stop) for where, _ in runs] == expected


def test_one_block_is_taken_as_either_of_two():
    """By all its columns as an upper one, or as a lower one, whichever makes both the least."""
    tall, flat, sides = Counts(10, 97, 0, 0, 0), Counts(97, 10, 0, 0, 0), Sides(100, 100)
    for one, columns in ((tall, 80), (flat, 90)):
        for counts in ([WIDE, one], [one, WIDE]):
            runs = truncation.runs_of(counts, sides, 10**9)
            assert runs == [(slice(0, 2), Leading(90, columns, 30, 10))]
            assert len(runs[0][1].blocks()) == 2
    # Together these are two blocks, as they are apart.
    assert len(truncation.runs_of([tall, flat], sides, 10**9)) == 2


def test_two_blocks_of_one_width_are_one():
    whole = [(slice(0, 9), slice(0, 5))]
    assert Leading(9, 5, 9, 0).blocks() == Leading(9, 5, 0, 5).blocks() == whole
    assert Leading(9, 5, 3, 5).blocks() == whole
    assert len(Leading(9, 5, 3, 4).blocks()) == 2


def test_a_basis_that_is_not_multiplied_by_is_no_work():
    assert Sides(50, 7, False).orders(50, 3) == (50 * 3 * 7, 50 * 3 * 7)
    assert Sides(50, 7, True, False).orders(3, 7) == (50 * 3 * 7, 50 * 3 * 7)
    assert Sides(50, 7).orders(4, 3) == (4 * 50 * 7 + 4 * 7 * 3, 50 * 7 * 3 + 4 * 50 * 3)


def test_single_precision_comes_near_double():
    """Curvature is up to 10⁴ times the damping, which the flat part must not drown."""
    generator = torch.Generator().manual_seed(0)
    (q_g, v_g), (q_a, v_a) = (spectrum(1, n, 6.0, generator) for n in (60, 50))
    raw = torch.randn(1, 60, 50, generator=generator, dtype=torch.float64)
    v_g, v_a = v_g.sort(descending=True).values, v_a.sort(descending=True).values
    counts = truncation.counted(v_g, v_a, 1e-5, Sides(60, 50), 0)
    assert counts.min() > 5
    left_out = torch.nn.functional.pad(counts, (0, 1))
    runs = truncation.runs_of(listed(counts), Sides(60, 50), 0)
    assert len(runs[0][1].blocks()) == 2
    double = precondition(raw, (q_g, q_a), (v_g, v_a), left_out, runs, 1e-4)
    floats = (x.float() for x in (q_g, q_a, v_g, v_a))
    f_g, f_a, w_g, w_a = floats
    single = precondition(raw.float(), (f_g, f_a), (w_g, w_a), left_out, runs, 1e-4)
    led = q_g[..., :5].mT @ double @ q_a[..., :5]
    off = q_g[..., :5].mT @ single.double() @ q_a[..., :5] - led
    assert off.abs().max() < 0.02 * led.abs().max()
    assert (single.double() - double).norm() < 1e-4 * double.norm()


# ---- in steps ----


class Net(nn.Module):
    """Two layers of one shape, of which the second has flatter factors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 9, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(0, -4, 9, dtype=torch.float64)
    return x, torch.randn(32, 4, generator=generator, dtype=torch.float64)


def backward(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    x, y = data(step)
    opt.zero_grad()
    (model(x) - y).square().sum(1).mean().backward()


def made(tolerance: float, model: nn.Module, **options: Any) -> KFACSGD:
    own = {"damping": 0.05, "kl_clip": None, "factor_update_steps": 1, "inv_update_steps": 1000}
    return KFACSGD(model, lr=0.01, truncation=tolerance, **{**own, **options})


def steps(tolerance: float, count: int, **options: Any) -> list[dict[str, Tensor]]:
    """What each step took off the weights; all begin at those of the exact one."""
    torch.manual_seed(0)
    model = Net().double()
    exact, found = made(0.0, model, **options), []
    twin = copy.deepcopy(model)
    opt = made(tolerance, twin, **options)
    for step in range(count):
        with torch.no_grad():
            for p, q in zip(twin.parameters(), model.parameters(), strict=True):
                p.copy_(q)
        backward(model, exact, step)
        backward(twin, opt, step)
        exact.step()
        found.append(ref.take_step(opt, twin))
    return found


@pytest.fixture(params=["one block", "two blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Layers as small as these have two blocks, and are multiplied apart, if calls take no time."""
    if request.param == "two blocks":
        monkeypatch.setattr(truncation, "_CALLS_ON_CPU", 0)
    return request.param


def test_it_holds_from_the_step_after_a_refresh_on(blocks):
    exact, cut = steps(0.0, 3), steps(0.9, 3)
    for name, step in exact[0].items():
        assert torch.equal(cut[0][name], step), name
    for before, after in zip(exact[1:], cut[1:], strict=True):
        for layer in ("first", "second"):
            # The preconditioned gradient in the factors' own basis: shorter where damping decides.
            assert not torch.equal(after[f"{layer}.weight"], before[f"{layer}.weight"])
            assert after[f"{layer}.weight"].norm() < before[f"{layer}.weight"].norm()
            assert after[f"{layer}.weight"].norm() > before[f"{layer}.weight"].norm() / 1.9


@pytest.mark.parametrize("tolerance", [0.01, 0.9])
def test_each_layer_by_its_own_count_whatever_it_is_stacked_with(tolerance, blocks):
    """Layers of one shape are multiplied together, by as many as lead in any of them."""

    def after(apart: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Net().double()
        if apart:  # a shape of its own: its last input is 0, and 0 is all that it adds
            wider = nn.Linear(10, 9).double()
            with torch.no_grad():
                wider.weight.zero_()
                wider.weight[:, :9] = model.second.weight
                wider.bias.copy_(model.second.bias)
            model.second = nn.Sequential(nn.ZeroPad1d((0, 1)), wider)
        opt = made(tolerance, model)
        for step in range(4):
            backward(model, opt, step)
            opt.step()
        assert len({len(pair.layers) for pair in opt.preconditioner.applied.groups}) == 2 - apart
        second = model.second[1] if apart else model.second
        return {"first": model.first.weight.detach(), "second": second.weight.detach()[:, :9]}

    together, alone = after(False), after(True)
    for name, weight in together.items():
        torch.testing.assert_close(alone[name], weight, rtol=1e-9, atol=1e-12)


def test_a_new_state_in_an_old_count_is_damped_too_much_not_too_little(blocks):
    """In the step of a refresh the count is the older one, of eigenvalues that have grown since."""
    torch.manual_seed(0)
    model = Net().double()
    opt = made(0.1, model, inv_update_steps=2, factor_decay=0.01, staggered=False)
    for step in range(2):
        backward(model, opt, step)
        opt.step()
    pair = opt.preconditioner.applied.group_of[opt.preconditioner.layers["first"]]
    before = pair.tensors["left_out"].clone()
    x, y = data(2)
    opt.zero_grad()  # curvature a thousand times as large
    (30 * (model(30 * x) - y)).square().sum(1).mean().backward()
    gradients = ref.gradients_of(model)
    taken = ref.take_step(opt, model)
    factors = {
        s: opt.preconditioner.applied.by_key[opt.preconditioner.layers["first"], s] for s in "ag"
    }
    matrix = torch.cat([gradients["first.weight"], gradients["first.bias"][:, None]], 1)
    step = torch.cat([taken["first.weight"], taken["first.bias"][:, None]], 1) / 0.01
    bases = [factors[s]["vectors"][0] for s in "ga"]
    curvature = factors["g"]["values"][0][:, None] * factors["a"]["values"][0][None, :]
    ratio = (bases[0].mT @ step @ bases[1]) / (bases[0].mT @ matrix @ bases[1])
    share = ratio * (curvature + 0.05)
    assert (share < 1 + 1e-6).all()
    assert share.min() < 0.9  # else nothing was left out that counts now
    assert not torch.equal(pair.tensors["left_out"], before)


def test_it_is_counted_anew_as_the_damping_falls(blocks):
    """Else ever more that matters would be left out, until the next refresh."""

    def trained(saves: bool) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        model, shares, splits = Net().double(), [], []
        opt = made(0.1, model, damping=lambda step: 0.5 * 0.9**step)
        for step in range(40):
            if saves and step == 20:
                state = copy.deepcopy(opt.state_dict())
                opt = made(0.1, model, damping=lambda step: 0.5 * 0.9**step)
                opt.load_state_dict(state)
            backward(model, opt, step)
            opt.step()
            kfac = opt.preconditioner
            damping = 0.5 * 0.9 ** (step + 1)
            for name in ("first", "second") if step else ():
                layer = kfac.layers[name]
                pair = kfac.applied.group_of[layer]
                counts = pair.tensors["left_out"][pair.slots[layer], :4]
                splits.append(int(counts[0, 2]) > 0)
                g, a = (kfac.applied.by_key[layer, side]["values"][0] for side in "ga")
                left = (g[:, None] * a[None, :]).masked_fill(shares_of(9, 10, counts)[0], 0.0)
                shares.append(float(left.max()) / damping)
        assert any(splits) == (blocks == "two blocks")
        return [p.detach() for p in model.parameters()], shares

    weights, shares = trained(False)
    assert max(shares) <= 0.1 / 0.9 + 1e-9  # one step of the schedule behind
    assert max(shares) > 0.05
    for straight, resumed in zip(weights, trained(True)[0], strict=True):
        assert torch.equal(straight, resumed)


def test_those_are_multiplied_that_have_gradients():
    torch.manual_seed(0)
    model = Net().double()
    opt = made(0.9, model)
    backward(model, opt, 0)
    opt.step()
    kfac = opt.preconditioner
    first, second = kfac.layers["first"], kfac.layers["second"]
    for members in ([first, second], [first], [first, second], [second]):
        runs = kfac.rule._runs_of(kfac.applied.group_of[first], members)
        assert runs is not None
        assert [(where.start, where.stop) for where, _ in runs] == [(0, len(members))]


def test_it_is_not_counted_anew_for_nothing(monkeypatch):
    torch.manual_seed(0)
    model = Net().double()
    opt = made(0.1, model, damping=lambda step: 0.5 * 0.98**step, early_refreshes=())
    counted, fresh = truncation.counted, []

    def noted(g: Tensor, *rest: Any) -> Tensor:
        fresh.append(len(g))
        return counted(g, *rest)

    monkeypatch.setattr(truncation, "counted", noted)
    for step in range(11):  # the damping passes two notches
        backward(model, opt, step)
        opt.step()
    # Both layers of one shape together, and the last one; then for each notch once more.
    assert fresh == [2, 1] * 3


def test_a_count_is_loaded_and_one_that_is_absent_begins_with_all(blocks):
    torch.manual_seed(0)
    model = Net().double()
    opt = made(0.9, model)
    backward(model, opt, 0)
    opt.step()
    state, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    backward(model, opt, 1)
    wanted = ref.take_step(opt, model)
    without = copy.deepcopy(state)
    for entry in without["state"].values():
        for name in [n for n in entry if n.endswith("left_out")]:
            del entry[name]
            entry[name.replace("left_out", "idle")] = torch.zeros(3, dtype=torch.int32)
    for saved, alike in ((state, True), (without, False)):
        model.load_state_dict(weights)
        loaded = made(0.9, model)
        loaded.load_state_dict(copy.deepcopy(saved))
        backward(model, loaded, 1)
        got = ref.take_step(loaded, model)
        assert torch.equal(got["first.weight"], wanted["first.weight"]) is alike
        if not alike:
            exact = made(0.0, model)
            model.load_state_dict(weights)
            exact.load_state_dict(copy.deepcopy(saved))
            backward(model, exact, 1)
            assert torch.equal(ref.take_step(exact, model)["first.weight"], got["first.weight"])


def test_products_are_taken_of_what_leads_alone(monkeypatch):
    """Of the two layers of one shape together; in the last one all of G's lead."""
    torch.manual_seed(0)
    model = Net().double()
    opt = made(0.9, model)
    backward(model, opt, 0)
    opt.step()
    seen: dict[int, list[tuple[int, int]]] = {}
    into = kronecker.into_basis

    def noted(gradient: Tensor, g: Tensor | None, a: Tensor | None) -> Tensor:
        own = seen.setdefault(len(gradient), [])
        own.extend((q.shape[1], q.shape[2]) for q in (g, a) if q is not None)
        return into(gradient, g, a)

    monkeypatch.setattr(kronecker, "into_basis", noted)
    backward(model, opt, 1)
    opt.step()
    assert sorted(seen) == [1, 2]
    assert len(seen[2]) == 2
    assert all(columns < rows for rows, columns in seen[2])
    assert seen[1][0] == (4, 4)
    assert seen[1][1][1] < seen[1][1][0] == 10
