"""Polar directions against dense factors, and what must not change them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.curvature import lengths, rules
from kaisa_optim.linalg import products
from tests.support.training import ANEW, descend, early
from tests.support.watch import assert_close, normal, seeded, stepped_blocks, taken

EVEN = 0.53  # singular values that polynomials make equal are so near to 1
widths = st.integers(1, 5)
seeds = st.integers(0, 9999)
dampings = st.sampled_from([1e-3, 0.01, 0.3])
property_test = settings(max_examples=15)

SGD, ADAM = {"lr": 0.3, "momentum": 0.9, **ANEW}, {"lr": 0.1, **ANEW}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda *given, **how: KFACSGD(*given, **SGD, **how),
    "Adam": lambda *given, **how: KFACAdam(*given, **ADAM, **how),
    "eigen": lambda *given, **how: KFACSGD(*given, **SGD, compute_method="eigen", **how),
    "inverse": lambda *given, **how: KFACSGD(*given, **SGD, compute_method="inverse", **how),
}
bases = pytest.mark.parametrize("base", ["SGD", "Adam"])

# ---- by definition ----


def dense(factor: Tensor) -> Tensor:
    return factor.diag() if factor.dim() == 1 else factor


def root_of(factor: Tensor, damping: float) -> Tensor:
    """Return (F / f̄ + λI)^-½, by eigenvectors; I for a zero factor."""
    values, vectors = torch.linalg.eigh(dense(factor))
    if values.abs().max() == 0:
        return torch.eye(len(values), dtype=values.dtype)
    return vectors @ (values / values.mean() + damping).rsqrt().diag() @ vectors.T


def outer(root: Tensor) -> Tensor:
    return rules._KEPT * torch.eye(len(root), dtype=root.dtype) + (1 - rules._KEPT) * root


def by_svd(matrix: Tensor) -> Tensor:
    """Return U Vᵀ; singular values of zero stay zero."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ (s > 1e-10 * s.max()).to(u.dtype).diag() @ v


def exactly(matrices: Tensor, *, in_half: bool) -> Tensor:
    return torch.stack([by_svd(one) for one in matrices])


def white(a: Tensor, g: Tensor, momentum: Tensor, damping: float) -> Tensor:
    return root_of(g, damping) @ momentum @ root_of(a, damping)


def expected(a: Tensor, g: Tensor, momentum: Tensor, damping: float) -> Tensor:
    """Return T_G polar(Ĝ^-½ M Â^-½) T_A of one block."""
    found = by_svd(white(a, g, momentum, damping))
    return outer(root_of(g, damping)) @ found @ outer(root_of(a, damping))


def loss_of(out: Tensor) -> Tensor:
    mix = torch.linspace(-0.7, 1.3, out[0].numel(), dtype=out.dtype).view(out[0].shape)
    return torch.sin(out + mix).mul(1 + mix).sum() / len(out)


class Kinds(nn.Module):
    """Layers of one and of several blocks, with and without a bias, a table among them."""

    def __init__(self, wide: int, narrow: int, bias: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 4)
        self.conv = nn.Conv1d(4, 2 * wide, 2, groups=2, bias=bias)
        self.body = nn.Linear(2 * wide, narrow, bias)
        self.head = nn.Linear(narrow, wide)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.words(x).mT).tanh().mean(2)
        return self.head(self.body(x).tanh())


def tokens(n: int, seed: int) -> Tensor:
    return torch.randint(4, (n, 3), generator=torch.Generator().manual_seed(seed))


@property_test
@given(
    wide=widths, narrow=widths, n=widths, seed=seeds, damping=dampings, bias=st.booleans(),
    widest=st.sampled_from([3, 100]), exact=st.booleans(),
)  # fmt: skip
def test_directions_of_dense_factors(wide, narrow, n, seed, damping, bias, widest, exact):
    """Exactly if singular values become equal, and else as polynomials make them nearly so."""
    torch.manual_seed(seed)
    model = Kinds(wide, narrow, bias).double()
    opt = KFACSGD(model, lr=0.1, damping=damping, max_factor_size=widest, momentum=0.7, **ANEW)
    known = products.orthogonalized
    with mock.patch.object(products, "orthogonalized", exactly if exact else known):
        for step in range(3):
            opt.zero_grad()
            loss_of(model(tokens(n, seed + step))).backward()
            with stepped_blocks() as found:
                opt.step()
            assert found.keys() == {"words", "conv", "body", "head"}
            for name, (momenta, directions) in found.items():
                blocks = zip(*opt.preconditioner.factors(name), momenta, directions, strict=True)
                for a, g, momentum, direction in blocks:
                    if exact:
                        wanted = expected(a, g, momentum, damping)
                        assert_close(direction, wanted, 1e-7, name, floor=1e-12)
                    else:
                        check_evened(a, g, momentum, direction, damping)


def check_evened(a: Tensor, g: Tensor, momentum: Tensor, direction: Tensor, damping: float) -> None:
    u, s, v = torch.linalg.svd(white(a, g, momentum, damping), full_matrices=False)
    inner = torch.linalg.solve(outer(root_of(g, damping)), direction)
    inner = torch.linalg.solve(outer(root_of(a, damping)), inner, left=False)
    turned = u.T @ inner @ v.T
    found = turned.diagonal()
    assert (turned - found.diag()).abs().max() < 1e-6
    even = s / s.norm()
    for c1, c3, c5 in products.TOWARDS_ONE:
        even = c1 * even + c3 * even**3 + c5 * even**5
    assert_close(found, even, 1e-6)
    assert ((found - 1).abs() <= EVEN)[s > 0.02 * s.norm()].all()


def test_directions_by_bfloat16_products_are_near(monkeypatch):
    """Where roots differ by a thousand, and gradients have few directions."""
    found = {}
    for has in (False, True):
        monkeypatch.setattr(products, "_multiplies_brain_floats", lambda device, has=has: has)
        net = seeded(lambda: nn.Linear(96, 80, bias=False)).float()
        opt = KFACAdam(net, lr=0.1, damping=1e-4, **ANEW)
        rows = normal(400, 96).float() * torch.arange(1, 97) ** -2.0
        loss_of(net(rows)).backward()
        with stepped_blocks() as blocks:
            opt.step()
        (found[has],) = blocks[""][1]
    cosine = F.cosine_similarity(found[False].flatten(), found[True].flatten(), 0)
    assert 0.9999 < cosine < 1 - 1e-9


def test_momenta_are_the_bases_own():
    """Of SGD the buffer, with nesterov ∇ + μ times the buffer; of Adam β exp_avg + (1 - β) ∇."""
    for nesterov in (False, True):
        model = nn.Linear(4, 3).double()
        opt = KFACSGD(model, lr=0.1, momentum=0.7, nesterov=nesterov)
        buffer = torch.zeros(3, 5, dtype=torch.float64)
        for step in range(3):
            momentum, gradient = momentum_of(model, opt, step)
            buffer = 0.7 * buffer + gradient
            assert_close(momentum, gradient + 0.7 * buffer if nesterov else buffer)
    model = nn.Linear(4, 3).double()
    opt = KFACAdam(model, lr=0.1, betas=(0.8, 0.9))
    average = torch.zeros(3, 5, dtype=torch.float64)
    for step in range(3):
        momentum, gradient = momentum_of(model, opt, step)
        average = 0.8 * average + 0.2 * gradient
        assert_close(momentum, 0.8 * average + 0.2 * gradient)
        assert_close(opt.state[model.weight]["exp_avg"], average[:, :4])


def momentum_of(model: nn.Module, opt: Any, step: int) -> tuple[Tensor, Tensor]:
    opt.zero_grad()
    loss_of(model(normal(6, 4, seed=step))).backward()
    gradient = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)
    with stepped_blocks() as found:
        opt.step()
    return found[""][0][0], gradient


# ---- what changes nothing ----


def trained(
    model: nn.Module, opt: Any, x: Callable[[int], Tensor], scale: float = 1.0, steps: int = 3
) -> nn.Module:
    for step in range(steps):
        descend(opt, scale * loss_of(model(x(step))))
    return model


def assert_alike(one: nn.Module, other: nn.Module, start: nn.Module, rtol: float = 1e-8) -> None:
    """The same way from ``start``, and a long enough one to tell."""
    pairs = zip(one.parameters(), other.parameters(), start.parameters(), strict=True)
    for p, q, before in pairs:
        assert (p - before).norm() > 1e-3
        assert_close(p - before, q - before, rtol)


def mlp(n: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(n, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@contextmanager
def unlimited() -> Iterator[None]:
    """Steps of any length: limits go by rates, which a test may have to scale."""

    constants = ("_FREE", "_FREE_OF_ZEROS_BY_SGD")
    with mock.patch.multiple(lengths, **dict.fromkeys(constants, math.inf)):
        yield


def batches(step: int) -> Tensor:
    return normal(6, 4, seed=step)


exponents = st.integers(-6, 6)


@bases
@property_test
@given(seed=seeds, exponent=exponents)
def test_a_scale_of_the_loss_changes_nothing(base, seed, exponent):
    """Adam's eps goes with the loss, and the rate of SGD against it."""
    start, scale = mlp(seed=seed).double(), 10.0**exponent
    one, other = copy.deepcopy(start), copy.deepcopy(start)
    with unlimited():
        trained(one, OPTIMIZERS[base](one), batches)
        opt = OPTIMIZERS[base](other)
        for group in opt.param_groups:
            if base == "SGD":
                group["lr"] /= scale
            else:
                group["eps"] *= scale
        trained(other, opt, batches, scale)
    assert_alike(one, other, start)


class Beside(nn.Module):
    """Layers of equal and of other shapes and kinds, in any order of construction."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        for i in order:
            torch.manual_seed(i)
            part = nn.Conv1d(1, 2, 2) if i == 4 else nn.Linear(4, 3 if i < 2 else 2)
            setattr(self, f"part{i}", part)

    def forward(self, x: Tensor) -> Tensor:
        parts = [getattr(self, f"part{i}")(x * (i + 1)).tanh() for i in range(4)]
        return torch.cat([*parts, self.part4(x[:, None]).tanh().flatten(1)], 1)


@pytest.mark.parametrize("base", OPTIMIZERS)
@pytest.mark.parametrize("of", ["layers", "parameters", "groups", "examples"])
def test_orders_change_nothing(base, of):
    built, order = (0, 1, 2, 3, 4), (3, 1, 4, 0, 2)
    one, other = (Beside(x).double() for x in (built, order if of == "layers" else built))
    start = copy.deepcopy(one)
    trained(one, OPTIMIZERS[base](one), batches)
    params: Any = [p for i in order for p in reversed([*getattr(other, f"part{i}").parameters()])]
    if of == "groups":
        params = [{"params": [p]} for p in params]
    named = {"parameters", "groups"}
    opt = OPTIMIZERS[base](*([params] if of in named else [other]), model=other)
    trained(other, opt, (lambda step: batches(step).flip(0)) if of == "examples" else batches)
    for name, p in one.named_parameters():
        before = start.get_parameter(name)
        assert (p - before).norm() > 1e-3
        assert_close(p - before, other.get_parameter(name) - before, 1e-9)


@bases
def test_a_momentum_of_zero_gives_no_step(base):
    """Also beside others: nothing reaches the layers before a head of zeros."""
    model = mlp().double()
    nn.init.zeros_(model[2].weight)
    opt = OPTIMIZERS[base](model)
    loss_of(model(batches(0))).backward()
    steps = taken(opt, model)
    assert not steps["0.weight"].any() and not steps["0.bias"].any()
    assert all(steps[name].any() for name in ("2.weight", "2.bias", "4.weight"))
    model, opt = (m := mlp().double()), OPTIMIZERS[base](m)
    loss_of(model(batches(0))).mul(0).backward()
    assert not any(step.any() for step in taken(opt, model).values())
    opt.zero_grad()
    loss_of(model(batches(1))).backward()
    assert all(step.any() and step.isfinite().all() for step in taken(opt, model).values())


# ---- kinds of layers ----


@bases
@pytest.mark.parametrize(("inside", "outside"), [(1, 1), (1, 4), (4, 1), (300, 1), (1, 300)])
def test_layers_of_one_row_or_column(base, inside, outside):
    """A vector has one singular value: its direction is the metric's own, of any length."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inside, outside, bias=False)).double()
    opt = OPTIMIZERS[base](model, damping=0.1, max_factor_size=400)
    loss_of(model(normal(8, inside))).backward()
    with stepped_blocks() as found:
        step = taken(opt, model)["0.weight"]
    (momentum, direction) = (x[0] for x in found["0"])
    a, g = (x[0] for x in opt.preconditioner.factors("0"))
    wanted = expected(a, g, momentum, 0.1)
    for one in (direction, step):
        assert_close(one / one.norm(), wanted / wanted.norm(), 1e-7)


def test_each_layer_has_its_own_damping_from_the_next_refresh_on():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    dampings = zip(model, (0.1, 0.02, 0.5), strict=True)
    groups = [{"params": layer.parameters(), "damping": damping} for layer, damping in dampings]
    with early():
        opt = KFACSGD(groups, lr=0.1, model=model, inv_update_steps=2, staggered=False)
    for step, times in enumerate((1, 1, 10)):
        opt.zero_grad()
        loss_of(model(batches(step))).backward()
        with stepped_blocks() as found, mock.patch.object(products, "orthogonalized", exactly):
            opt.step()
        for i, first in enumerate((0.1, 0.02, 0.5)):
            (a,), (g,) = opt.preconditioner.factors(str(i))
            (momentum,), (direction,) = found[str(i)]
            assert_close(direction, expected(a, g, momentum, times * first), 1e-7)
            opt.param_groups[i]["damping"] = 10 * first


def test_projections_into_an_attention_are_blocks_of_their_own():
    model = seeded(lambda: nn.MultiheadAttention(4, 2, batch_first=True))
    opt = KFACSGD(model, lr=0.1, damping=0.1)
    x = normal(3, 5, 4)
    loss_of(model(x, x.flip(1), x.square(), need_weights=False)[0]).backward()
    with stepped_blocks() as found, mock.patch.object(products, "orthogonalized", exactly):
        opt.step()
    momenta, directions = found["in_proj"]
    assert len(momenta) == 3
    raw = torch.cat([model.in_proj_weight.grad, model.in_proj_bias.grad[:, None]], 1)
    assert_close(momenta.flatten(0, 1), raw)
    blocks = zip(*opt.preconditioner.factors("in_proj"), momenta, directions, strict=True)
    for a, g, momentum, direction in blocks:
        assert_close(direction, expected(a, g, momentum, 0.1), 1e-7)
