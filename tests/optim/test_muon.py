"""Muon against torch's own and its equations; KFACMuon against dense ones, and other ranks."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from kaisa_optim import (
    LAMB,
    AdaptiveDamping,
    KFACAdam,
    KFACMuon,
    KFACParamScheduler,
    Layer,
    Muon,
    register_layer,
    with_kfac,
)
from kaisa_optim.linalg import kronecker, orthogonal
from tests.support.cluster import (
    Plan,
    assert_alike,
    average,
    batch,
    build,
    error,
    even,
    micro_batches,
    network,
)
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import assert_near, assert_same, values

POLYNOMIAL = (3.4445, -4.7750, 2.0315)
EACH: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 1, "staggered": False}

with_torchs = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon yet")


def polar(matrix: Tensor, steps: int = 5) -> Tensor:
    """The equation of Muon, of one matrix."""
    a, b, c = POLYNOMIAL
    x = matrix / matrix.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def ratio(rows: int, columns: int, adjust: str | None) -> float:
    if adjust == "match_rms_adamw":
        return 0.2 * max(rows, columns) ** 0.5
    return max(1, rows / columns) ** 0.5


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(10 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


# ---- the base ----

SHAPES = [(6, 6), (4, 9), (9, 4), (5, 2, 3, 3), (9, 4), (1, 7)]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_matrices_and_kernels_follow_the_equations(nesterov, adjust, maximize):
    params = weights(*SHAPES)
    options = {"nesterov": nesterov, "adjust_lr_fn": adjust, "maximize": maximize}
    opt = Muon(params, lr=0.1, weight_decay=0.2, momentum=0.8, **options)
    expected = [p.detach().flatten(1).clone() for p in params]
    momenta = [torch.zeros_like(x) for x in expected]
    for step in range(3):
        give_gradients(params, step)
        opt.step()
        for p, weight, momentum in zip(params, expected, momenta, strict=True):
            gradient = p.grad.flatten(1) * (-1 if maximize else 1)
            momentum.mul_(0.8).add_(gradient, alpha=0.2)
            ahead = 0.8 * momentum + 0.2 * gradient if nesterov else momentum
            weight.mul_(1 - 0.1 * 0.2)
            weight.sub_(0.1 * ratio(*weight.shape, adjust) * polar(ahead))
            assert_near(p.detach().flatten(1), weight)


@with_torchs
@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_torchs_muon(nesterov):
    """Of which products are in bfloat16."""
    ours, theirs = (weights(*SHAPES[:3], dtype=torch.float32) for _ in range(2))
    pair = Muon(ours, 0.05, nesterov=nesterov), torch.optim.Muon(theirs, 0.05, nesterov=nesterov)
    for step in range(4):
        for params, opt in zip((ours, theirs), pair, strict=True):
            give_gradients(params, step)
            opt.step()
    assert_near(ours, theirs, rtol=0.02, atol=0.02)
    for p, q in zip(ours, theirs, strict=True):
        assert_near(pair[0].state[p]["momentum_buffer"], pair[1].state[q]["momentum_buffer"], 1e-6)


@with_torchs
def test_it_has_torchs_arguments():
    plain = torch.optim.Muon(weights((2, 2)))
    opt = Muon(weights((2, 2)))
    assert list(opt.defaults)[: len(plain.defaults)] == list(plain.defaults)
    assert {k: opt.defaults[k] for k in plain.defaults} == plain.defaults


@pytest.mark.parametrize("steps", [5, 6, 15])
@pytest.mark.parametrize("in_half", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (48, 300), (300, 48)])
def test_directions_of_low_rank_stay_near_one(shape, in_half, steps):
    """What rounding leaves of X Xᵀ where X has no part must not grow with every polynomial."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 4, generator=generator) for n in shape)
    found = orthogonal.polar(
        (left @ right.T)[None], None, [POLYNOMIAL] * steps, 1e-7, in_half=in_half
    )
    assert torch.linalg.matrix_norm(found, 2) < 1.3


def test_it_steps_so_under_autocast():
    params, others = (weights((48, 48), dtype=torch.float32) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(48, 4, generator=generator) for _ in range(2))
    for own, autocast in ((params, True), (others, False)):
        own[0].grad = left @ right.T
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            Muon(own, 0.1).step()
    assert_same(params, others)


def test_many_of_one_shape_are_taken_some_at_a_time(monkeypatch):
    together, apart = weights(*[(4, 6)] * 5), weights(*[(4, 6)] * 5)
    for own, at_once in ((together, 1 << 20), (apart, 48)):
        monkeypatch.setattr(orthogonal, "_AT_ONCE", at_once)
        give_gradients(own, 0)
        Muon(own, 0.1).step()
    assert_near(together, apart)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_of_adamw(dtype):
    """Squares of small gradients are nothing in float16."""
    ours, theirs = weights((5,), dtype=dtype), weights((5,), dtype=dtype)
    wide = [nn.Parameter(p.detach().float()) for p in theirs]
    opt, plain = Muon(ours, 0.01), torch.optim.AdamW(wide, 0.01, weight_decay=0.1)
    for _ in range(3):
        ours[0].grad = torch.full((5,), 1e-5, dtype=dtype)
        wide[0].grad = ours[0].grad.float()
        opt.step()
        plain.step()
    assert_near(ours[0].float(), wide[0].data, 1e-2, 1e-2)
    assert opt.state[ours[0]]["exp_avg_sq"].dtype == torch.float32
    opt.load_state_dict(opt.state_dict())
    ours[0].grad = torch.full((5,), 1e-5, dtype=dtype)
    opt.step()
    assert ours[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cls", [Muon, KFACMuon])
def test_half_precision_parameters_go_on_bit_for_bit_after_a_load(cls, dtype):
    """Their moments are in float32, to which a load in torch's manner would not bring them back."""

    def built(model):
        return cls(model.parameters(), 0.01, **({} if cls is Muon else {"model": model}))

    def step(model, opt, seed):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
        opt.zero_grad()
        (1e-3 * model(x).float().square().mean()).backward()  # whose squares float16 has not
        opt.step()

    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)
    model = nn.Sequential(*layers).to(dtype)
    opt = built(model)
    for seed in range(5):
        step(model, opt, seed)
    seen = []
    other = copy.deepcopy(model)
    again = built(other)
    again.register_load_state_dict_post_hook(lambda o: seen.append(copy.deepcopy(o.state_dict())))
    saved = io.BytesIO()
    torch.save(opt.state_dict(), saved)
    saved.seek(0)
    again.load_state_dict(torch.load(saved, weights_only=True))
    moments = copy.deepcopy(opt.state_dict()["state"])
    for i, entry in seen[0]["state"].items():
        for name in entry.keys() & {"momentum_buffer", "exp_avg", "exp_avg_sq"}:
            assert torch.equal(entry[name], moments[i][name])
    for seed in range(5, 8):
        step(model, opt, seed)
        step(other, again, seed)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


class _Large(Tensor):
    def to(self, *args, **kwargs):
        raise torch.OutOfMemoryError("there is no room for it")


@pytest.mark.parametrize("cls", [Muon, KFACMuon])
def test_a_load_for_which_there_is_no_room_changes_nothing(cls):
    model = network("chain")
    opt = cls(model.parameters(), 0.01, **({} if cls is Muon else {"model": model}))
    for i in range(2):
        backward(model, "chain", i)
        opt.step()
    before = copy.deepcopy(opt.state_dict())
    loaded = copy.deepcopy(before)
    entry = next(x for x in reversed(loaded["state"].values()) if "exp_avg" in x)
    entry["exp_avg"] = entry["exp_avg"].as_subclass(_Large)
    with pytest.raises(torch.OutOfMemoryError):
        opt.load_state_dict(loaded)
    assert_same(opt.state_dict(), before)
    opt.step()


def test_a_load_shares_no_moments_with_what_was_loaded():
    mine, other = weights((3, 4), dtype=torch.bfloat16), weights((3, 4), dtype=torch.bfloat16)
    one, two = Muon(mine, 0.1), Muon(other, 0.1)
    mine[0].grad = other[0].grad = torch.ones(3, 4, dtype=torch.bfloat16)
    one.step()
    two.load_state_dict(one.state_dict())
    before = one.state[mine[0]]["momentum_buffer"].clone()
    two.step()
    assert torch.equal(one.state[mine[0]]["momentum_buffer"], before)


def test_schedules_of_the_momentum_are_muons():
    plain = network("chain")
    for model, opt in ((plain, Muon(plain.parameters(), 0.1)), pair("chain")):
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10)
        before = opt.param_groups[0]["adam_betas"]
        backward(model, "chain", 0)
        opt.step()
        schedule.step()
        assert opt.param_groups[0]["momentum"] != 0.95
        assert opt.param_groups[0]["adam_betas"] == before


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD, LAMB])
def test_a_state_of_another_base_loads(base):
    params, others = weights((3, 4), (4,)), weights((3, 4), (4,))
    plain, opt = base(params, 0.1), Muon(others, 0.3, momentum=0.8)
    give_gradients(params, 0)
    plain.step()
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    (group,) = opt.param_groups
    assert (group["lr"], group["eps"], group["ns_steps"]) == (0.1, 1e-7, 5)
    if base is torch.optim.AdamW:
        assert (group["adam_eps"], group["adam_betas"]) == (1e-8, (0.9, 0.999))
        assert_same(opt.state[others[1]]["exp_avg"], plain.state[params[1]]["exp_avg"])
    give_gradients(others, 1)
    opt.step()
    assert all(p.isfinite().all() for p in others)


@with_torchs
def test_a_state_of_torchs_muon_leaves_what_it_lacks():
    params, others = weights((3, 3), (4, 4)), weights((3, 3), (4, 4))
    plain = torch.optim.Muon([{"params": params[:1]}, {"params": params[1:]}], 0.1)
    give_gradients(params, 0)
    plain.step()
    opt = Muon([{"params": others[:1]}, {"params": others[1:], "use_muon": False}], 0.3)
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert [group["use_muon"] for group in opt.param_groups] == [None, False]
    give_gradients(others, 1)
    opt.step()
    assert opt.state[others[1]].keys() == {"step", "exp_avg", "exp_avg_sq"}


@with_torchs
def test_a_state_of_torchs_muon_goes_on():
    params, others = weights(*SHAPES[:3]), weights(*SHAPES[:3])
    plain, opt = torch.optim.Muon(params, 0.1), Muon(others, 0.3)
    give_gradients(params, 0)
    plain.step()
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert opt.param_groups[0]["lr"] == 0.1 and opt.param_groups[0]["use_muon"] is None
    for p, q in zip(params, others, strict=True):
        assert_same(opt.state[q]["momentum_buffer"], plain.state[p]["momentum_buffer"])
    give_gradients(others, 1)
    opt.step()


def test_what_is_no_matrix_takes_adamws_steps():
    ours, theirs = (weights((4,), (), (3, 3), (2, 2)) for _ in range(2))
    common, betas = {"lr": 0.03, "weight_decay": 0.1}, (0.8, 0.9)
    table = {"params": ours[2:3], "use_muon": False, "lr": 0.01}
    first = {"params": [*ours[:2], ours[3]]}
    opt = Muon([first, table], adam_betas=betas, adam_eps=1e-4, **common)
    apart = {"params": theirs[2:3], "lr": 0.01}
    plain = torch.optim.AdamW([{"params": theirs[:2]}, apart], betas=betas, eps=1e-4, **common)
    for step in range(4):
        for params in (ours, theirs):
            give_gradients(params, step)
        opt.step()
        plain.step()
    assert_same(ours[:3], theirs[:3])
    assert not torch.equal(ours[3], theirs[3])
    assert opt.state[ours[0]].keys() == plain.state[theirs[0]].keys()
    assert opt.state[ours[3]].keys() == {"momentum_buffer"}


def test_steps_of_one_shape_together_are_those_of_each_alone():
    together, alone = weights((4, 6), (4, 6), (4, 6)), weights((4, 6), (4, 6), (4, 6))
    opts = [Muon(together, 0.1), *(Muon([p], 0.1) for p in alone)]
    for step in range(3):
        for params in (together, alone):
            give_gradients(params, step)
        if step == 1:  # one without a gradient keeps its momentum
            together[1].grad = alone[1].grad = None
        for opt in opts:
            opt.step()
    assert_near(together, alone)


def test_copies_and_closures():
    params = weights((3, 4), (3,))
    opt = Muon(params, 0.1)
    give_gradients(params, 0)
    assert opt.step(lambda: 5.0) == 5.0
    twin: Any = pickle.loads(pickle.dumps(opt))
    for own in (opt, twin):
        give_gradients([p for g in own.param_groups for p in g["params"]], 1)
        own.step()
    assert_same(twin.param_groups[0]["params"], params)
    assert_same(copy.deepcopy(opt).state_dict(), opt.state_dict())


def test_a_tensor_lr_is_as_good_as_a_number():
    params, others = weights((3, 4), (3,)), weights((3, 4), (3,))
    for own, lr in ((params, 0.1), (others, torch.tensor(0.1, dtype=torch.float64))):
        give_gradients(own, 0)
        Muon(own, lr).step()
    assert_near(params, others)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1}, "Invalid learning rate: -1"),
        ({"weight_decay": -1}, "Invalid weight_decay: -1"),
        ({"momentum": 1.0}, r"Invalid momentum: 1.0; it must be a number in \[0, 1\)"),
        ({"adam_betas": (0.9, 1.0)}, "Invalid adam_betas"),
        ({"ns_coefficients": (1.0, 2.0)}, "Invalid ns_coefficients"),
        ({"lr": None}, "Invalid learning rate: None"),
        ({"eps": 0.0}, "Invalid eps: 0.0; it must be a number above 0"),
        ({"adam_betas": (0.9,)}, "Invalid adam_betas"),
        ({"nesterov": "no"}, "Invalid nesterov"),
        ({"ns_steps": 0}, "Invalid ns_steps: 0"),
        ({"ns_steps": 5.0}, "Invalid ns_steps: 5.0"),
        ({"adjust_lr_fn": "matched"}, "Invalid adjust_lr_fn: 'matched'; choose from None"),
        ({"use_muon": "yes"}, "Invalid use_muon: 'yes'"),
        ({"use_muon": 1}, "Invalid use_muon: 1"),
        ({"ns_steps": True}, "Invalid ns_steps: True"),
        ({"use_muon": True}, r"Invalid use_muon: True for a parameter of shape \(3,\)"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Muon(weights((3, 3), (3,)), **options)
    opt = Muon(weights((2, 2)))
    with pytest.raises(ValueError, match=words):
        opt.add_param_group({"params": weights((3, 3), (3,)), **options})
    assert len(opt.param_groups) == 1


def test_adamws_own_names_in_a_group_are_refused():
    """As other packages' groups have them."""
    group = {"params": weights((3,)), "use_muon": False, "betas": (0.9, 0.95)}
    with pytest.raises(ValueError, match=r"Invalid betas: .* are called adam_betas here"):
        Muon([group], 0.1)


def test_it_steps_in_code_without_a_name():
    """As some embedded interpreters run it."""
    code = """
import torch
from kaisa_optim import KFACMuon
model = torch.nn.Linear(4, 3)
opt = KFACMuon(model, lr=0.1)
model(torch.ones(2, 4)).square().sum().backward()
opt.preconditioner.kl_clip = 0.5  # which a warning names, with its caller
opt.step()
"""
    with pytest.warns(UserWarning, match="kl_clip 0.5: of no use"):
        exec(code, {})


def test_sparse_and_complex_are_refused():
    (p,) = weights((3, 3))
    p.grad = torch.eye(3, dtype=torch.float64).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        Muon([p]).step()
    q = nn.Parameter(torch.eye(3, dtype=torch.complex64))
    q.grad = torch.ones_like(q)
    with pytest.raises(RuntimeError, match="complex"):
        Muon([q]).step()


# ---- the algebra ----


def psd(n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rows = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return rows.T @ rows


def dense_metric(g: Tensor, damping: float) -> Tensor:
    """(G / ḡ + λI)^-½, by an eigendecomposition."""
    mean = g.trace() / len(g)
    values_, vectors = torch.linalg.eigh(g / (1 if mean == 0 else mean))
    return vectors @ (values_ + damping).rsqrt().diag() @ vectors.T


sizes = st.integers(1, 9)


@given(sizes, st.integers(0, 99), st.sampled_from([1e-3, 0.1, 10.0]))
def test_a_root_of_the_damped_inverse(n, seed, damping):
    g = torch.stack([psd(n, seed), 1e-6 * psd(n, seed + 1), torch.zeros(n, n).double()])
    root = kronecker.damped_root(g, torch.full((3,), damping, dtype=g.dtype))
    assert_same(root, root.triu())
    for one, factor in zip(root, g, strict=True):
        metric = dense_metric(factor, damping)
        assert_near(one @ one.T, metric @ metric, rtol=1e-6, atol=1e-8)
    diagonals = g.diagonal(0, 1, 2)
    found = kronecker.damped_root_of_diagonal(diagonals, torch.full((3,), damping, dtype=g.dtype))
    for one, diagonal in zip(found, diagonals, strict=True):
        assert_near(one.diag(), dense_metric(diagonal.diag(), damping))


def test_no_root_of_what_is_not_positive():
    bad = torch.eye(4).double()
    bad[0, 0] = -5
    root = kronecker.damped_root(torch.stack([bad, torch.eye(4).double()]), torch.full((2,), 0.1))
    assert root[0].isnan().all() and root[1].isfinite().all()


@given(sizes, sizes, st.integers(0, 99))
def test_any_root_of_the_metric_gives_its_step(g, a, seed):
    """Wide, tall and square: the symmetric root and the triangular one, and no root at all."""
    momentum = torch.randn(g, a, generator=torch.Generator().manual_seed(seed)).double()
    factor, damping = psd(g, seed), torch.tensor([0.1]).double()
    metric = dense_metric(factor, 0.1)
    polynomials = [POLYNOMIAL] * 5

    def found(root: Tensor | None) -> Tensor:
        return orthogonal.polar(momentum[None], root, polynomials, 1e-7, in_half=False)[0]

    expected = metric @ polar(metric @ momentum)
    assert_near(found(kronecker.damped_root(factor[None], damping)), expected, 1e-7, 1e-8)
    assert_near(found(metric[None]), expected, 1e-7, 1e-8)
    assert_near(found(None), polar(momentum), 1e-7, 1e-8)
    scale = torch.rand(g).double() + 0.1
    assert_near(found(scale[None]), found(scale.diag()[None]), 1e-7, 1e-8)


@pytest.mark.parametrize(("g", "a"), [(80, 80), (70, 300), (300, 70)])
def test_in_half_precision_it_is_about_the_same(g, a):
    momentum = torch.randn(2, g, a, generator=torch.Generator().manual_seed(0))
    roots = kronecker.damped_root(torch.stack([psd(g, i, torch.float32) for i in range(2)]),
                                torch.full((2,), 0.1))  # fmt: skip
    for root in (None, roots):
        whole, half = (
            orthogonal.polar(momentum, root, [POLYNOMIAL] * 5, 1e-7, in_half=half)
            for half in (False, True)
        )
        assert half.dtype == torch.float32
        assert 0 < (whole - half).norm() / whole.norm() < 0.03


@pytest.mark.parametrize("in_half", [False, True])
@pytest.mark.parametrize(("rows", "off"), [(32, 1.5), (1024, 0.02)])
def test_rounding_stays_small_where_the_metric_is_large(rows, off, in_half):
    """Of few examples G and M have no part in most directions; there R is largest, and steps of
    half precision are mostly rounding, but no longer for it. R in half precision is good where
    there are enough examples."""
    generator = torch.Generator().manual_seed(0)
    g, a = (torch.randn(rows, n, generator=generator) for n in (256, 128))
    momentum, factor = (g.T @ a)[None], (g.T @ g)[None]
    root = kronecker.damped_root(factor.double(), torch.tensor([0.1]).double())
    polynomials = [POLYNOMIAL] * 5
    expected = orthogonal.polar(momentum.double(), root, polynomials, 1e-7, in_half=False)
    for dtype in (torch.float32, torch.bfloat16) if rows > 256 else (torch.float32,):
        found = orthogonal.polar(momentum, root.to(dtype), polynomials, 1e-7, in_half=in_half)
        assert found.dtype == torch.float32
        assert (found - expected).norm() < (off if in_half else 0.01) * expected.norm()
        most = torch.linalg.matrix_norm(expected, 2)
        assert torch.linalg.matrix_norm(found, 2) < 1.3 * most


# ---- K-FAC's ----


def backward(model: nn.Module, name: str, step: int) -> None:
    x, y = batch(name, step, 24)
    F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("name", ["images", "tokens", "chain"])
def test_steps_follow_the_dense_equations(name, adjust, nesterov):
    model = network(name)
    options = {"momentum": 0.8, "nesterov": nesterov, "adjust_lr_fn": adjust, "damping": 0.3}
    opt = KFACMuon(model, lr=0.1, weight_decay=0.2, **options, **EACH)
    assert len(opt.preconditioner.layers) == 5
    momenta: dict[Any, Tensor] = {}
    for step in range(4):
        opt.zero_grad()
        backward(model, name, step)
        before, gradients = matrices(opt), matrices(opt, of_gradient=True)
        opt.step()
        for (layer, block), after in matrices(opt).items():
            gradient = gradients[layer, block]
            momentum = momenta.setdefault((layer, block), torch.zeros_like(gradient))
            momentum.mul_(0.8).add_(gradient, alpha=0.2)
            ahead = 0.8 * momentum + 0.2 * gradient if nesterov else momentum
            _, g = opt.preconditioner.factors(layer)
            metric = dense_metric(g[block], 0.3)
            moved = metric @ polar(metric @ ahead)
            expected = before[layer, block] * (1 - 0.1 * 0.2)
            expected = expected - 0.1 * ratio(*gradient.shape, adjust) * moved
            assert_near(after, expected, 1e-7, 1e-9)


def matrices(opt: Any, of_gradient: bool = False) -> dict[tuple[str, int], Tensor]:
    """The blocks of all covered weights, or of their gradients, by layer and number."""
    found = {}
    for name, layer in opt.preconditioner.layers.items():
        whole = layer.weight.grad if of_gradient else layer.weight.detach().clone()
        for i, part in enumerate(whole.view(layer.blocks, len(whole) // layer.blocks, -1)):
            found[name, i] = part
    return found


def momenta_of(opt: Any) -> dict[str, Tensor]:
    layout = opt.preconditioner.applied
    return {
        x.name: group.tensors["momentum"][group.slots[x]].clone()
        for x, group in layout.group_of.items()
    }


def steps_of(model: nn.Module, opt: Any, steps: Any, name: str = "tokens") -> None:
    for step in steps:
        opt.zero_grad()
        backward(model, name, step)
        opt.step()


def pair(name: str = "tokens", cls: Any = KFACMuon, **options: Any) -> Any:
    model = network(name)
    common = {"lr": 0.03, "factor_update_steps": 2, "inv_update_steps": 3}
    return model, cls(model, **{**common, **options})


def test_inputs_are_neither_kept_nor_known():
    model, opt = pair("images")
    backward(model, "images", 0)
    with_inputs = KFACAdam(network("images"), lr=0.01)
    opt.step()
    for layer in opt.preconditioner.layers.values():
        a, g = opt.preconditioner.factors(layer.name)
        assert_same(a, torch.ones_like(a))
        assert (a.dim(), g.dim()) == (2, 3)
    ours, theirs = (x.preconditioner.account.memory()[0] for x in (opt, with_inputs))
    assert ours["factors"] < theirs["factors"] / 2


def test_what_is_not_covered_takes_the_bases_steps():
    """Biases, norms, tables and what a group says, AdamW's; a matrix without a layer, Muon's."""
    options = {"lr": 0.03, "weight_decay": 0.1}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.loose = network("tokens"), nn.Parameter(torch.eye(4).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) @ self.loose

    def groups(model: Net) -> list[dict[str, Any]]:
        head = list(model.body.head.parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in head)]
        return [{"params": rest}, {"params": head, "use_muon": False, "lr": 0.001}]

    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="raw gradients:\n  loose: a parameter of Net's own"):
        opt = KFACMuon(groups(model), model=model, **options)
    base = Muon(groups(plain), **options)
    assert set(opt.preconditioner.layers) == {
        "body.attention.in_proj", "body.attention.out_proj", "body.wide", "body.narrow"
    }  # fmt: skip
    listed = repr(opt.preconditioner).split("AdamW:\n")[1]
    assert "    body.words.weight: of an embedding or a norm\n" in listed
    assert "    body.wide.bias: fewer than two dimensions\n" in listed
    assert "    body.head.weight: use_muon=False" in listed
    assert "body.wide.weight" not in listed
    table = torch.optim.AdamW([copy.deepcopy(model.body.words.weight)], **options)
    (words,) = table.param_groups[0]["params"]
    for step in range(3):
        for one, own in ((model, opt), (plain, base)):
            own.zero_grad()
            backward(one, "tokens", step)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        words.grad = model.body.words.weight.grad.clone()
        for own in (opt, base, table):
            own.step()
    covered = {id(x.weight) for x in opt.preconditioner.layers.values()}
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name == "body.words.weight":
            assert_same(p.data, words.data)
        elif id(p) in covered:
            assert not torch.allclose(p, q)
        else:
            assert_same(p.data, q.data)


def test_a_table_is_muons_where_it_is_given_to_it():
    model = network("tokens")
    rest = [p for n, p in model.named_parameters() if n != "words.weight"]
    groups = [{"params": rest}, {"params": [model.words.weight], "use_muon": True}]
    with pytest.warns(UserWarning, match="words.weight: no matrix"):
        opt = KFACMuon(groups, model=model, lr=0.1)
    steps_of(model, opt, range(1))
    assert "momentum_buffer" in opt.state[model.words.weight]


def test_without_statistics_it_is_muon():
    """A skipped layer's step is Muon's own, as the base takes it."""
    model, opt = pair("chain", skip_layers="middle", weight_decay=0.0)
    plain = network("chain")
    base = Muon(plain.parameters(), lr=0.03, weight_decay=0.0)
    backward(model, "chain", 0)
    backward(plain, "chain", 0)
    for own in (opt, base):
        own.step()
    for one, other in zip(model.middle, plain.middle, strict=True):
        assert_near(one.weight, other.weight)
    assert not torch.allclose(model.head.weight, plain.head.weight, atol=1e-4)


def test_a_damping_far_above_g_is_muon():
    model, opt = pair("chain", damping=1e5, weight_decay=0.0, lr=0.03 * 1e5**0.5)
    plain = network("chain")
    base = Muon(plain.parameters(), lr=0.03, weight_decay=0.0)
    steps_of(model, opt, range(1), "chain")
    steps_of(plain, base, range(1), "chain")
    for layer in opt.preconditioner.layers.values():
        assert_near(layer.weight, plain.get_parameter(f"{layer.name}.weight"), 1e-3, 1e-5)


def test_settings_of_groups():
    """Layers of one shape with momenta of their own step as if each were alone with its own."""
    model = network("chain")
    slow, rest = (
        model.middle[1].weight,
        [p for p in model.parameters() if p is not model.middle[1].weight],
    )
    groups = [{"params": rest}, {"params": [slow], "momentum": 0.2, "nesterov": False, "lr": 0.1}]
    opt = KFACMuon(groups, model=model, lr=0.03, momentum=0.7, **EACH)
    twins = []
    for options in ({"momentum": 0.7, "lr": 0.03}, {"momentum": 0.2, "nesterov": False, "lr": 0.1}):
        twin = network("chain")
        twins.append((twin, KFACMuon(twin, **options, **EACH)))
    for step in range(3):
        for one, own in ((model, opt), *twins):
            one.load_state_dict(model.state_dict())
            own.zero_grad()
            backward(one, "chain", step)
        for _, own in ((model, opt), *twins):
            own.step()
        (a, _), (b, _) = twins
        for name, p in model.named_parameters():
            assert_near(p.data, (b if p is slow else a).get_parameter(name).data)


def test_damping_may_be_scheduled():
    model, opt = pair("chain", damping=lambda step: 0.1 if step < 3 else 10.0, inv_update_steps=1)
    plain, other = pair("chain", damping=0.1, inv_update_steps=1)
    for own, optimizer in ((model, opt), (plain, other)):
        steps_of(own, optimizer, range(3), "chain")
    assert_same(model, plain)
    for own, optimizer in ((model, opt), (plain, other)):
        steps_of(own, optimizer, range(3, 4), "chain")
    assert not torch.allclose(model.head.weight, plain.head.weight)
    KFACParamScheduler(other, damping=lambda epoch: 0.5).step()
    assert other.param_groups[0]["damping"] == 0.05


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kl_clip": 1e-3}, "Invalid kl_clip: 0.001; KFACMuon has no use for it, leave it out"),
        ({"compute_method": "inverse"}, "Invalid compute_method"),
        ({"moments": "eigenbasis"}, "Invalid moments: 'eigenbasis'; KFACMuon has no use"),
        ({"orthogonal": True}, "Invalid orthogonal"),
        ({"basis_tolerance": 0.1}, "Invalid basis_tolerance"),
        ({"truncation": 0.1}, "Invalid truncation"),
        ({"grafting": True}, "Invalid grafting"),
        ({"warmup_steps": 5}, "Invalid warmup_steps"),
        ({"eigenvalue_correction": True}, "Invalid eigenvalue_correction"),
        ({"normalization": "kaisa"}, "Invalid normalization"),
        ({"weight_sharing": "reduce"}, "Invalid weight_sharing"),
        ({"damping": 0.0}, "Invalid damping: 0.0"),
        ({"use_muon": False}, "it has no layer that K-FAC covers"),
    ],
)
def test_what_has_no_meaning_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        pair("chain", **options)


def test_others_have_no_such_momentum():
    with pytest.raises(ValueError, match='Invalid moments: "metric" is KFACMuon\'s own'):
        KFACAdam(network("chain"), moments="metric")
    with pytest.raises(ValueError, match=r"'metrik'; choose from 'parameters', 'eigenbasis'$"):
        KFACAdam(network("chain"), moments="metrik")
    _, opt = pair("chain")
    with pytest.raises(ValueError, match="AdaptiveDamping can't work with KFACMuon"):
        AdaptiveDamping(opt)
    with pytest.raises(ValueError, match="Invalid kl_clip: KFACMuon has no use for it"):
        KFACParamScheduler(opt, kl_clip=lambda epoch: 0.5)
    opt.preconditioner.kl_clip = 0.5
    model, other = pair("chain")
    other.preconditioner.kl_clip = 0.5
    with pytest.warns(UserWarning, match="kl_clip 0.5: of no use to KFACMuon"):
        steps_of(model, other, range(1), "chain")


def test_its_signature_has_what_it_takes():
    _, opt = pair("chain")
    assert opt.param_groups[0]["damping"] == 0.1
    parameters = inspect.signature(KFACMuon).parameters
    assert parameters["damping"].default == 0.1 and "kl_clip" not in parameters
    assert inspect.signature(KFACAdam).parameters["damping"].default == 5e-3
    pair("chain", kl_clip=None, damping=None)  # which is what it does without them


# ---- states ----


def disk(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("stop", [1, 4])
def test_a_state_goes_on_bit_for_bit(stop):
    model, opt = pair()
    steps_of(model, opt, range(stop))
    other, fresh = pair()
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(disk(opt.state_dict()))
    assert_same(momenta_of(fresh), momenta_of(opt))
    for own, optimizer in ((model, opt), (other, fresh)):
        steps_of(own, optimizer, range(stop, 8))
    assert_same(other, model)
    assert_same(fresh.state_dict(), opt.state_dict())


def test_copies_go_on_bit_for_bit():
    model, opt = pair()
    steps_of(model, opt, range(4))
    for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        other, twin = copied((model, opt))
        expected, at = copy.deepcopy((model, opt))
        steps_of(other, twin, range(4, 8))
        steps_of(expected, at, range(4, 8))
        assert_same(other, expected)


def test_a_state_of_the_plain_base_loads():
    model = network("tokens")
    plain = Muon(model.parameters(), lr=0.03)
    steps_of(model, plain, range(3))
    other, opt = pair()
    other.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="holds no K-FAC factors.*their moments begin at zero"):
        opt.load_state_dict(disk(plain.state_dict()))
    before = values(other)
    steps_of(other, opt, range(3, 6))
    assert all(torch.isfinite(p).all() for p in other.parameters())
    assert all(not torch.equal(before[n], p) for n, p in other.named_parameters())


def test_a_state_of_other_moments_is_estimated_anew():
    model = network("tokens")
    adam = KFACAdam(model, lr=0.01)
    steps_of(model, adam, range(3))
    other, opt = pair()
    other.load_state_dict(model.state_dict())
    state = disk(adam.state_dict())
    state["param_groups"] = opt.state_dict()["param_groups"]
    with pytest.raises(ValueError, match="its K-FAC factors do not fit the model's layers"):
        opt.load_state_dict(state)


def test_frozen_and_unfrozen_layers():
    model, opt = pair("chain")
    steps_of(model, opt, range(2), "chain")
    model.middle[1].weight.requires_grad_(False)
    at = model.middle[1].weight.detach().clone()
    steps_of(model, opt, range(2, 4), "chain")
    assert_same(model.middle[1].weight.data, at)
    model.middle[1].weight.requires_grad_(True)
    steps_of(model, opt, range(4, 8), "chain")
    assert not torch.equal(model.middle[1].weight, at)


def test_a_layer_without_a_gradient_keeps_its_momentum():
    model, opt = pair("chain")
    steps_of(model, opt, range(3), "chain")
    before, weight = momenta_of(opt), model.middle[1].weight
    at = weight.detach().clone()
    opt.zero_grad()
    backward(model, "chain", 3)
    weight.grad = None
    opt.step()
    after = momenta_of(opt)
    for name in before:
        assert torch.equal(after[name], before[name]) is (name == "middle.1")
    assert_same(weight.data, at)


# ---- ranks ----


class Spread(NamedTuple):
    parameters: dict[str, Tensor]
    momenta: dict[str, Tensor]
    memory: dict[str, int]
    expected_memory: dict[str, int]
    received: dict[str, float]


def spread(plan: Plan) -> Spread:
    rank = dist.get_rank()
    model = network(plan.network, dtype=plan.dtype)
    opt = build(plan, model, model, **plan.spread)
    for step in range(plan.steps):
        opt.zero_grad()
        for x, y, weight in micro_batches(plan, step, rank):
            (F.cross_entropy(model(x), y) * weight).backward()
        average(model.parameters())
        opt.step()
    kfac = opt.preconditioner
    memory = kfac.account.memory()[rank]
    return Spread(
        values(model), momenta_of(opt), kfac.memory_usage(), memory, kfac.communication_volume()
    )


def plan_of(world: int, name: str, where: dict[str, Any]) -> Plan:
    options = {"factor_update_steps": 1, "inv_update_steps": 2}
    return Plan(even(world, 24 // world), name, "muon", options=options, spread=where)


WHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "layer-wise 2": (2, {"assignment": "layer-wise"}),
    "opt 3": (3, {"assignment": "opt"}),
    "hybrid 4": (4, {"assignment": "hybrid", "grad_worker_fraction": 0.5}),
    "parted 4": (4, {"grad_worker_fraction": 0.5, "colocate_factors": False}),
}


@pytest.mark.parametrize("name", ["images", "tokens"])
@pytest.mark.parametrize("where", WHERE)
def test_ranks_take_the_steps_of_one_process(where, name):
    world, options = WHERE[where]
    plan = plan_of(world, name, options)
    model = network(name)
    opt = build(plan, model, model, staggered=world)
    steps_of(model, opt, range(plan.steps), name)
    ranks = run(world, spread, plan)
    assert_alike([rank.parameters for rank in ranks])
    # Orthogonal directions carry on what rounding makes of singular values near zero.
    assert error(ranks[0].parameters, values(model)) < 1e-7
    whole = {x for rank in ranks for x in rank.momenta}
    assert whole == set(opt.preconditioner.layers)
    for rank in ranks:
        for name_, momentum in rank.momenta.items():
            assert_near(momentum, momenta_of(opt)[name_], 1e-6, 1e-8)
        expected = {kind: size for kind, size in rank.expected_memory.items() if size}
        assert {kind: rank.memory[kind] for kind in expected} == expected
    if "opt" not in where:
        assert max(rank.memory["moments"] for rank in ranks) < sum(
            x.numel() * x.itemsize for x in momenta_of(opt).values()
        )


def consolidated() -> Any:
    model, opt = pair(assignment="layer-wise", staggered=1)
    for step in range(4):
        opt.zero_grad()
        backward(model, "tokens", step)
        opt.step()
    opt.consolidate_state_dict(to=0)
    return copy.deepcopy((model.state_dict(), opt.state_dict())) if dist.get_rank() == 0 else None


@pytest.mark.filterwarnings("ignore:state_dict")
def test_a_consolidated_state_goes_on_alone():
    state, _ = run(2, consolidated)
    model, opt = pair()
    steps_of(model, opt, range(4))
    other, fresh = pair()
    other.load_state_dict(state[0])
    fresh.load_state_dict(state[1])
    assert_near(momenta_of(fresh), momenta_of(opt), 1e-6, 1e-8)
    for own, optimizer in ((model, opt), (other, fresh)):
        steps_of(own, optimizer, range(4, 8))
    assert_near(other, model, 1e-6, 1e-8)


# ---- what Muon's base has to step beside the layers ----


def test_a_replaced_head_stays_in_its_group():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    apart = {"params": [model[2].weight], "use_muon": False}
    rest = [*model[0].parameters(), model[2].bias]
    opt = KFACMuon([{"params": rest}, apart], model=model, lr=0.01)
    gone = model[2]

    def steps() -> None:
        for _ in range(2):
            opt.zero_grad(set_to_none=False)  # the former one's gradients are zeros, and no None
            model(torch.randn(8, 5).double()).square().mean().backward()
            opt.step()

    steps()
    model[2] = nn.Linear(6, 3).double()
    opt.add_param_group({"params": list(model[2].parameters())})
    before = model[2].weight.detach().clone()
    steps()
    assert not torch.equal(before, model[2].weight)
    for p in gone.parameters():
        assert opt.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"} and opt.state[p]["step"] > 2


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(6, 20), nn.LayerNorm((4, 5))
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).tanh().unflatten(1, (4, 5))).flatten(1))


def test_a_norm_of_two_dimensions_is_adamws():
    torch.manual_seed(0)
    model = Norms().double()
    opt = KFACMuon(model, lr=0.01)
    F.mse_loss(model(torch.randn(9, 6).double()), torch.zeros(9, 3).double()).backward()
    opt.step()
    assert set(opt.preconditioner.layers) == {"body", "head"}
    assert "exp_avg" in opt.state[model.norm.weight]


class Words(nn.Module):
    """Every table that there is: one bag, one tied to the head, one that scales gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.tied = nn.EmbeddingBag(9, 4), nn.Embedding(9, 4)
        self.scaled = nn.Embedding(9, 4, scale_grad_by_freq=True)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        mean = (self.tied(x) + self.scaled(x)).mean(1)
        return self.head(self.body(mean + self.bag(x)))


def test_tables_are_adamws_whatever_reads_them():
    torch.manual_seed(0)
    model = Words().double()
    opt = KFACMuon(model, lr=0.01)
    F.cross_entropy(model(torch.arange(12).view(4, 3) % 9), torch.arange(4)).backward()
    opt.step()
    assert set(opt.preconditioner.layers) == {"body"}
    for table in (model.bag, model.tied, model.scaled):
        assert opt.state[table.weight].keys() >= {"exp_avg"}
    assert "momentum_buffer" not in opt.state[model.tied.weight]


def of_two_groups(use_muon: bool | None) -> tuple[nn.Module, Any]:
    model = network("chain")
    names = ["middle.0.weight", "head.weight"], ["middle.1.weight"]
    groups = [{"params": [model.get_parameter(n) for n in some]} for some in names]
    groups[1]["use_muon"] = use_muon
    return model, KFACMuon(groups, model=model, lr=0.01, **EACH)


def test_a_group_stays_with_whom_it_was_built_for():
    model, opt = of_two_groups(None)
    steps_of(model, opt, range(2), "chain")
    opt.param_groups[1]["use_muon"] = False
    with pytest.raises(ValueError, match="Invalid use_muon: False of parameter group 1, which was"):
        steps_of(model, opt, range(2, 3), "chain")
    opt.param_groups[1]["use_muon"] = None
    steps_of(model, opt, range(3, 4), "chain")


def of_two_ranks(plan: Any) -> str:
    model, opt = of_two_groups(None)
    steps_of(model, opt, range(2), "chain")
    if dist.get_rank() == 1:
        opt.param_groups[1]["use_muon"] = False
    with pytest.raises((ValueError, RuntimeError)) as error:
        steps_of(model, opt, range(2, 3), "chain")
    return str(error.value)


def test_ranks_that_differ_in_it_all_say_so():
    for text in run(2, of_two_ranks, None):
        assert "use_muon of parameter group 1" in text


def test_a_load_leaves_it_as_it_was_built():
    model, opt = of_two_groups(False)
    steps_of(model, opt, range(2), "chain")
    other, fresh = of_two_groups(None)
    with pytest.warns(UserWarning) as found:
        fresh.load_state_dict(disk(opt.state_dict()))
    said = " ".join(str(w.message) for w in found)
    assert "has use_muon=False for a parameter group that was built with None here" in said
    assert "holds no K-FAC factors of this kind for 'middle.1'" in said
    steps_of(other, fresh, range(2, 4), "chain")
    assert set(fresh.preconditioner.layers) == {"middle.0", "middle.1", "head"}
    assert "exp_avg" not in fresh.state[other.middle[1].weight]


@pytest.mark.parametrize("cls", [KFACAdam, torch.optim.SGD])
def test_a_load_of_another_class_leaves_what_is_its_own(cls):
    model = network("chain")
    plain = cls(model if cls is KFACAdam else model.parameters(), lr=0.3)
    _, opt = pair("chain", momentum=0.8)
    state = plain.state_dict()
    opt.load_state_dict({**state, "state": {}})
    (group,) = opt.param_groups
    assert group["lr"] == 0.3
    assert (group["damping"], group["momentum"], group["nesterov"]) == (0.1, 0.8, True)


def test_a_momentum_of_half_precision_parameters():
    """Of gradients that float16 hardly holds."""
    ours, theirs = weights((8, 8), dtype=torch.float16), weights((8, 8), dtype=torch.float16)
    wide = [nn.Parameter(p.detach().float()) for p in theirs]
    opts = Muon(ours, 0.1), Muon(wide, 0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        ours[0].grad = (3e-7 * torch.randn(8, 8, generator=generator)).half()
        wide[0].grad = ours[0].grad.float()
        for opt in opts:
            opt.step()
    assert_near(ours[0].float(), wide[0].data, 1e-2, 1e-2)


def test_of_its_former_stepper_nothing_stays():
    params, others = weights((3, 3)), weights((3, 3))
    plain, opt = torch.optim.AdamW(params, 0.1), Muon(others, 0.1)
    give_gradients(params, 0)
    plain.step()
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    give_gradients(others, 1)
    opt.step()
    assert opt.state[others[0]].keys() == {"momentum_buffer"}
    opt.param_groups[0]["use_muon"] = False
    opt.step()
    assert opt.state[others[0]].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_a_vector_that_is_given_to_it_later_is_refused():
    params = weights((3,))
    opt = Muon(params, 0.1)
    give_gradients(params, 0)
    opt.param_groups[0]["use_muon"] = True
    with pytest.raises(ValueError, match=r"Invalid use_muon: True for a parameter of shape \(3,\)"):
        opt.step()


def test_roots_in_half_precision_of_narrow_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 70), nn.Tanh(), nn.Linear(70, 8))
    opt = KFACMuon(model, lr=0.01, inv_dtype=torch.bfloat16)
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(64, 30)), torch.randint(8, (64,))).backward()
        opt.step()
    assert all(p.isfinite().all() for p in model.parameters())


class OwnLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@register_layer(OwnLinear)
class OwnLinearLayer(Layer):
    """Its rows of gradients go by the shape of the input."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.in_shape, self.outputs = (5,), 4

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return x.reshape(1, len(x), -1, 5)

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        assert x is not None
        return grad.reshape(1, len(x), -1, 4)


def test_a_kind_of_ones_own_may_read_its_input():
    model = nn.Sequential(OwnLinear(), nn.Tanh(), nn.Linear(4, 3))
    opt = KFACMuon(model, lr=0.01)
    F.cross_entropy(model(torch.randn(8, 5)), torch.arange(8) % 3).backward()
    opt.step()
    a, g = opt.preconditioner.factors("0")
    assert_same(a, torch.ones_like(a))
    assert g.shape == (1, 4, 4)


def test_who_has_no_metric_is_refused():
    class Own(Muon):
        pass

    with pytest.raises(ValueError, match="Own, would lose the metric; subclass KFACMuon"):
        with_kfac(Own)
    assert with_kfac(Muon) is KFACMuon


def test_a_model_without_shapes_is_named():
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        KFACMuon(nn.Sequential(nn.LazyLinear(3)), lr=0.1)


class Loose(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.own


class Matrices(nn.Module):
    """Two of one shape that belong to no layer."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.first, self.second = Loose(rows, columns), Loose(rows, columns)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x).tanh()


def uncovered(dtype: torch.dtype, part: str, cls: Any) -> dict[str, Tensor]:
    """Trained on the same batches by all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), Matrices(6, 9), nn.Linear(9, 3)).to(dtype)
    if part == "all":
        fully_shard(model)
    elif part == "some":
        fully_shard(model[2].first)
    kfac = {"model": model, **EACH} if cls is KFACMuon else {}
    opt = cls(model.parameters(), lr=0.05, adam_eps=1e-2, **kfac)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 5, generator=generator).to(dtype)
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
@pytest.mark.parametrize("cls", [Muon, KFACMuon])
@pytest.mark.parametrize("part", ["all", "some"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sharded_matrices_of_no_layer_take_the_steps_of_whole_ones(dtype, part, cls):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the base optimizer updates these")
        expected = uncovered(dtype, "none", cls)
    for found in run(3, uncovered, dtype, part, cls):
        assert error(found, expected) < (1e-9 if dtype == torch.float64 else 1e-3)
