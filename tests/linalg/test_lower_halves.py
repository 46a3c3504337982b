"""Wide moments are multiplied and kept on and under their diagonal; what is above is of no account.

What torch leaves uninitialized is not a number here, so that whatever reads it shows.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam, KFACMuon
from kaisa_optim.linalg import moments, products
from tests.support.cluster import average
from tests.support.ranks import run
from tests.support.training import EVERY_STEP, assert_near, values

TWO = {**EVERY_STEP, "inv_update_steps": 2, "staggered": False}
UNCLIPPED = {name: value for name, value in TWO.items() if name != "kl_clip"}
MAKERS: dict[str, Any] = {
    "eigen": lambda m: KFACSGD(m, lr=0.1, **TWO),
    "followed": lambda m: KFACSGD(m, lr=0.1, basis_tolerance=0.99, **TWO),
    "inverse": lambda m: KFACSGD(m, lr=0.1, compute_method="inverse", **TWO),
    "truncated": lambda m: KFACSGD(m, lr=0.1, truncation=0.1, **TWO),
    "lagging": lambda m: KFACSGD(m, lr=0.1, refresh_lag=1, **TWO),
    "staggered": lambda m: KFACSGD(m, lr=0.1, **{**TWO, "staggered": True}),
    "rounded": lambda m: KFACSGD(m, lr=0.1, factor_dtype=torch.bfloat16, **TWO),
    "corrected": lambda m: KFACSGD(m, lr=0.1, eigenvalue_correction="examples", **TWO),
    "adam": lambda m: KFACAdam(m, lr=0.01, eps=1e-2, **UNCLIPPED),
    "muon": lambda m: KFACMuon(m, lr=0.02, **TWO),
}


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A and G with a border and without one, and a layer whose weight is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(200, 210), nn.Tanh(), nn.Linear(210, 200, bias=False), nn.Linear(200, 192)
    )
    model[3].weight.requires_grad_(False)
    return model.to(dtype)


def learn(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for i in steps:
        x = torch.randn(400, 200, generator=torch.Generator().manual_seed(i)).to(dtype)
        opt.zero_grad()
        F.mse_loss(model(x), x[:, :192].roll(1, 1).sin()).backward()
        opt.step()
        for entry in opt.state.values():
            assert all(t.isfinite().all() for t in entry.values() if torch.is_tensor(t))


@pytest.fixture
def nothing_is_zero():
    before = torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture
def halved(monkeypatch, nothing_is_zero):
    """All that is as wide as that, of however few rows."""
    monkeypatch.setattr(moments, "_HALVED_MUCH", 0)
    monkeypatch.setattr(products, "_onednn", lambda: None)


def skew(average: Tensor) -> float:
    """Rounding alone makes something of the order of 1e-16."""
    return float((average - average.mT).norm() / average.norm())


def averages(opt: Any) -> list[Tensor]:
    return [t for name in ("0", "2") for t in opt.preconditioner.factors(name)]


@pytest.mark.parametrize("maker", MAKERS)
def test_steps_are_those_of_whole_products(maker, halved, monkeypatch):
    model, whole = net(), net()
    opt, reference = MAKERS[maker](model), MAKERS[maker](whole)
    learn(model, opt, range(5))
    with monkeypatch.context() as patch:
        patch.setattr(moments, "_HALVED", 1 << 20)
        patch.setattr(moments, "_LEAST_HALVED", 1 << 20)
        learn(whole, reference, range(5))
    within = 2e-3 if maker == "rounded" else 1e-9
    assert_near(model, whole, within, within)
    assert_near(averages(opt), averages(reference), within, within)


def test_asking_again_disturbs_no_backward_pass(halved):
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200)).double()
    opt = KFACSGD(model, lr=0.1, **TWO)
    x = torch.randn(400, 200).double()
    for _ in range(2):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    opt.zero_grad()
    penalty, expected = torch.zeros((), dtype=torch.float64), []
    for name in ("0", "1"):  # of one shape
        weight = model[int(name)].weight
        a, g = (f[0, :200, :200] for f in opt.preconditioner.factors(name))
        penalty = penalty + (g @ weight @ a * weight).sum()
        expected.append((2 * g @ weight @ a).detach())
    opt.state_dict()
    penalty.backward()
    assert_near([model[0].weight.grad, model[1].weight.grad], expected)


@pytest.mark.parametrize("n", [192, 193, 208, 255, 256, 257, 400])
@pytest.mark.parametrize("append_one", [False, True])
def test_the_lower_parts_are_all_that_is_multiplied(n, append_one, halved):
    rows = torch.randn(2, n, n, dtype=torch.float64)
    whole = moments.second_moment(rows, rows.dtype, diagonal=False, append_one=append_one)
    found = moments.second_moment(
        rows, rows.dtype, diagonal=False, append_one=append_one, lower=True
    )
    above = torch.ones_like(found, dtype=torch.bool).triu(1)
    assert found[above].isnan().any()
    assert not found[~above].isnan().any()
    for part, same in zip(moments.lower_parts(found), moments.lower_parts(whole), strict=True):
        assert torch.equal(part, same)
    assert sum(part.numel() for part in moments.lower_parts(found)) < 0.67 * found.numel()
    assert torch.equal(moments.mirrored(found), whole)


@pytest.mark.parametrize("n", [128, 191, 192, 193, 400, 401])
def test_packing_reads_no_more(n):
    matrices = torch.randn(2, n, n)
    matrices = matrices + matrices.mT
    lower = torch.full_like(matrices, torch.nan)
    for part, own in zip(moments.lower_parts(lower), moments.lower_parts(matrices), strict=True):
        part.copy_(own)
    assert torch.equal(moments.unpack(moments.pack(lower), n), matrices)


def test_whoever_is_given_an_average_gets_all_of_it(halved):
    model = net()
    opt = MAKERS["lagging"](model)
    learn(model, opt, range(3))
    live = opt.state[model[0].weight]["kfac_a_average"]
    assert skew(live) > 1e-4  # else nothing below is shown
    under_way = opt.state_dict()["kfac_under_way"].values()
    begun = [t for entry in under_way for n, t in entry.items() if n.endswith("average")]
    assert len(begun) == 6

    def of(state: Any) -> list[Tensor]:
        entries = state["state"].values()
        found = [e[key] for e in entries for key in e if key.endswith("_average")]
        assert len(found) == 6
        return found

    stream = io.BytesIO()
    torch.save(opt.state_dict(), stream)
    stream.seek(0)
    saved = of(torch.load(stream))
    learn(model, opt, range(3, 4))
    copied = copy.deepcopy((model, opt))[1]
    kept = of({"state": copied.state})
    learn(model, opt, range(4, 5))
    for t in (*begun, *saved, *kept, *averages(opt)):
        assert skew(t) < 1e-14


def spread(options: dict[str, Any]) -> tuple[dict[str, Tensor], bool, Any]:
    much, moments._HALVED_MUCH = moments._HALVED_MUCH, 0
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 200, bias=False), nn.Linear(200, 64)).double()
        opt = KFACSGD(model, lr=0.1, **TWO, **options)
        x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)).double()
        rank, world = (torch.distributed.get_rank(), 2) if options else (0, 1)
        for _ in range(4):
            opt.zero_grad()
            F.mse_loss(model(x[rank::world]), x[rank::world, :64].sin()).backward()
            if world > 1:
                average(model.parameters())
            opt.step()
        live = [t for f in opt.preconditioner.shelf.factors.values() for t in f["average"]]
        halves = any(skew(t) > 1e-4 for t in live)
        if world > 1:
            opt.consolidate_state_dict(to=0)
        return values(model), halves, opt.state_dict()["state"] if rank == 0 else None
    finally:
        moments._HALVED_MUCH = much


@pytest.mark.parametrize("assignment", ["opt", "layer-wise"])
def test_ranks_send_no_more(assignment):
    alone, _, own = spread({})
    (together, one, gathered), (_, other, _) = run(2, spread, {"assignment": assignment})
    assert one or other  # else nothing below is shown
    assert_near(together, alone, 1e-9, 1e-9)
    for index, entry in own.items():
        for key in entry.keys() & {"kfac_a_average", "kfac_g_average"}:
            assert skew(gathered[index][key]) < 1e-14
            assert_near(gathered[index][key], entry[key], 1e-9, 1e-12)
