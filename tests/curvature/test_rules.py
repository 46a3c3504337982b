"""Rules: new gradients by definition, and what must not change them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.linalg import products
from tests.support import reference as ref
from tests.support.training import ANEW, assert_same, backward, descend, early, network, values
from tests.support.watch import assert_close, matrix_of, normal, seeded, stepped_blocks, taken

widths, seeds = st.integers(1, 5), st.integers(0, 9999)
dampings = st.sampled_from([1e-3, 0.01, 0.3, 30.0])
property_test = settings(max_examples=10)

# The papers' rules have the names of the reference; their steps are the new gradients.
RULES: dict[str, dict[str, Any]] = {"polar": {"momentum": 0.7}}
RULES |= {name: {"kl_clip": None, **how} for name, how in ref.METHODS.items()}
every_rule = pytest.mark.parametrize("rule", RULES)

SGD, ADAM = {"lr": 0.3, "momentum": 0.9, **ANEW}, {"lr": 0.1, **ANEW}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda *given, **how: KFACSGD(*given, **{**SGD, **how}),
    "Adam": lambda *given, **how: KFACAdam(*given, **{**ADAM, **how}),
    "eigen": lambda *given, **how: KFACSGD(*given, **SGD, compute_method="eigen", **how),
    "inverse": lambda *given, **how: KFACSGD(*given, **SGD, compute_method="inverse", **how),
}
bases = pytest.mark.parametrize("base", ["SGD", "Adam"])

# ---- by definition ----


def root_of(factor: Tensor, damping: float) -> Tensor:
    """Return (F / f̄ + λI)^-½, by eigenvectors; I for a zero factor."""
    values, vectors = torch.linalg.eigh(factor)
    if values.abs().max() == 0:
        return torch.eye(len(values), dtype=values.dtype)
    return vectors @ (values / values.mean() + damping).rsqrt().diag() @ vectors.T


def by_svd(matrix: Tensor) -> Tensor:
    """Return U Vᵀ; singular values of zero stay zero."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ (s > 1e-10 * s.max()).to(u.dtype).diag() @ v


def exactly(matrices: Tensor, *, in_half: bool) -> Tensor:
    return torch.stack([by_svd(matrix) for matrix in matrices])


def expected(a: Tensor, g: Tensor, matrices: Tensor, damping: float, rule: str) -> Tensor:
    """Return the dense solutions, or T_G polar(Ĝ^-½ M Â^-½) T_A with T = 0.8 I + 0.2 F̂^-½."""
    if rule != "polar":
        return ref.precondition(a, g, matrices, damping, rule)
    blocks = []
    for block_a, block_g, momentum in zip(ref.dense(a), ref.dense(g), matrices, strict=True):
        of_a, of_g = root_of(block_a, damping), root_of(block_g, damping)
        eye_a, eye_g = (torch.eye(len(root), dtype=root.dtype) for root in (of_a, of_g))
        direction = by_svd(of_g @ momentum @ of_a)
        blocks.append((0.8 * eye_g + 0.2 * of_g) @ direction @ (0.8 * eye_a + 0.2 * of_a))
    return torch.stack(blocks)


def stepped(opt: Any, model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Take a step at rate 1; return what a rule takes and makes, ``[blocks, g, a]``, by layer."""
    gradients = ref.gradients_of(model)
    with stepped_blocks() as found, mock.patch.object(products, "orthogonalized", exactly):
        steps = taken(opt, model)
    if not found:  # steps are new gradients
        for name in opt.preconditioner.layers:
            module, keys = model.get_submodule(name), (f"{name}.weight", f"{name}.bias")
            found[name] = tuple(matrix_of(module, *map(x.get, keys)) for x in (gradients, steps))
    return found


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


@every_rule
@property_test
@given(wide=widths, narrow=widths, n=widths, seed=seeds, damping=dampings, bias=st.booleans(),
       widest=st.sampled_from([1, 3, 100]))  # fmt: skip
def test_new_gradients_of_dense_factors(rule, wide, narrow, n, seed, damping, bias, widest):
    """Also of diagonal ones, where sides are too wide."""
    torch.manual_seed(seed)
    model = Kinds(wide, narrow, bias).double()
    how = {"lr": 1.0, "damping": damping, "max_factor_size": widest, **ANEW, **RULES[rule]}
    opt = KFACSGD(model, **how)
    for step in range(2):
        opt.zero_grad()
        loss_of(model(tokens(n, seed + step))).backward()
        blocks = stepped(opt, model)
        assert blocks.keys() == {"words", "conv", "body", "head"}
        for name, (matrices, new) in blocks.items():
            wanted = expected(*opt.preconditioner.factors(name), matrices, damping, rule)
            assert_close(new, wanted, 1e-7, name, floor=1e-12 if rule == "polar" else 1e-4)


@every_rule
def test_each_layer_has_its_own_damping_from_the_next_refresh_on(rule):
    """Layers of one shape, too; division by eigenvalues takes the damping of its own step."""
    model, first = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double(), (0.1, 0.02, 0.5)
    layers = zip(model, first, strict=True)
    groups = [{"params": layer.parameters(), "damping": damping} for layer, damping in layers]
    intervals = {"factor_update_steps": 2, "inv_update_steps": 2, "staggered": False}
    with early():
        opt = KFACSGD(groups, lr=1.0, model=model, **intervals, **RULES[rule])
    for step, times in enumerate((1, 10 if rule == "eigen" else 1, 10)):
        opt.zero_grad()
        loss_of(model(batches(step))).backward()
        blocks = stepped(opt, model)
        for i, damping in enumerate(first):
            pair, (matrices, new) = opt.preconditioner.factors(str(i)), blocks[str(i)]
            assert_close(new, expected(*pair, matrices, times * damping, rule), 1e-7)
            opt.param_groups[i]["damping"] = 10 * damping


@pytest.mark.parametrize("base", ["SGD", "nesterov", "Adam"])
def test_momenta_are_the_bases_own(base):
    """Of SGD the buffer, with nesterov ∇ + μ times the buffer; of Adam β exp_avg + (1 - β) ∇."""
    model = nn.Linear(4, 3).double()
    if base == "Adam":
        opt, key, taken_of_new = KFACAdam(model, lr=0.1, betas=(0.7, 0.9)), "exp_avg", 0.3
    else:
        opt = KFACSGD(model, lr=0.1, momentum=0.7, nesterov=base == "nesterov")
        key, taken_of_new = "momentum_buffer", 1.0
    momentum = torch.zeros(3, 5, dtype=torch.float64)
    for step in range(3):
        opt.zero_grad()
        loss_of(model(batches(step))).backward()
        new = taken_of_new * torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)
        momentum = 0.7 * momentum + new
        ahead = momentum if base == "SGD" else 0.7 * momentum + new
        assert_close(stepped(opt, model)[""][0][0], ahead)
        assert_close(opt.state[model.weight][key], momentum[:, :4])


# ---- what changes nothing ----


def trained(model: nn.Module, opt: Any, x: Callable[[int], Tensor], scale: float = 1.0) -> None:
    for step in range(3):
        descend(opt, scale * loss_of(model(x(step))))


def assert_alike(model: nn.Module, other: nn.Module, start: nn.Module, rtol: float) -> None:
    """The same way from ``start``, and a long enough one to tell."""
    for name, p in model.named_parameters():
        before = start.get_parameter(name)
        assert (p - before).norm() > 1e-3
        assert_close(p - before, other.get_parameter(name) - before, rtol)


def batches(step: int) -> Tensor:
    return normal(6, 4, seed=step)


@bases
@property_test
@given(seed=seeds, exponent=st.integers(-6, 6), lr=st.sampled_from([0.003, 0.1]))
def test_a_scale_of_the_loss_changes_nothing(base, seed, exponent, lr):
    """Adam's eps goes with the loss, and the rate of SGD against it."""
    start, scale = network(seed), 10.0**exponent
    plain, scaled = copy.deepcopy(start), copy.deepcopy(start)
    trained(plain, OPTIMIZERS[base](plain, lr=lr), batches)
    how = {"lr": lr / scale} if base == "SGD" else {"lr": lr, "eps": 1e-8 * scale}
    trained(scaled, OPTIMIZERS[base](scaled, **how), batches, scale)
    assert_alike(plain, scaled, start, 1e-8)


class Beside(nn.Module):
    """Layers of equal and of other shapes and kinds, in any order of construction."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        for i in order:
            torch.manual_seed(i)
            part = nn.Conv1d(1, 2, 2) if i == 4 else nn.Linear(4, 3 if i < 2 else 2)
            setattr(self, f"part{i}", part)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        parts = [getattr(self, f"part{i}")(x * (i + 1)).tanh() for i in range(4)]
        return torch.cat([*parts, self.part4(x[:, None]).tanh().flatten(1)], 1)


@pytest.mark.parametrize("base", OPTIMIZERS)
@pytest.mark.parametrize("of", ["layers", "parameters", "groups", "examples"])
def test_orders_change_nothing(base, of):
    built, order = (0, 1, 2, 3, 4), (3, 1, 4, 0, 2)
    model, other = Beside(built), Beside(order if of == "layers" else built)
    start = copy.deepcopy(model)
    trained(model, OPTIMIZERS[base](model), batches)
    params: Any = [p for i in order for p in reversed([*getattr(other, f"part{i}").parameters()])]
    if of == "groups":
        params = [{"params": [p]} for p in params]
    opt = OPTIMIZERS[base](params if of in ("parameters", "groups") else other, model=other)
    trained(other, opt, (lambda step: batches(step).flip(0)) if of == "examples" else batches)
    assert_alike(model, other, start, 1e-9)


@bases
def test_a_momentum_of_zero_gives_no_step(base):
    """Also beside others: nothing reaches the layers before a head of zeros."""
    model = network()
    nn.init.zeros_(model[2].weight)
    opt = OPTIMIZERS[base](model)
    loss_of(model(batches(0))).backward()
    steps = taken(opt, model)
    assert not steps["0.weight"].any() and not steps["0.bias"].any()
    assert steps["2.weight"].any() and steps["2.bias"].any()
    model, opt = (m := network()), OPTIMIZERS[base](m)
    loss_of(model(batches(0))).mul(0).backward()
    assert not any(step.any() for step in taken(opt, model).values())
    opt.zero_grad()
    loss_of(model(batches(1))).backward()
    assert all(step.any() and step.isfinite().all() for step in taken(opt, model).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["polar", "eigen", "inverse-pi"])
def test_a_step_under_autocast_is_the_step_without_it(rule, dtype):
    """Some call it there; torch's own steps are elementwise, and so have nothing to cast."""
    weights = []
    for under in (False, True):
        model = network(dtype=torch.float32)
        opt = KFACSGD(model, lr=0.1, damping=1e-4, **ANEW, **RULES[rule])
        for i in range(4):
            opt.zero_grad()
            backward(model, i)
            with torch.autocast("cpu", dtype, enabled=under):
                opt.step()
        weights.append(values(model))
    assert_same(*weights)


def test_directions_by_bfloat16_products_are_near(monkeypatch):
    """Where roots differ by a thousand, and gradients have few directions."""
    directions = []
    for has in (False, True):
        monkeypatch.setattr(products, "_multiplies_brain_floats", lambda device, has=has: has)
        net = seeded(lambda: nn.Linear(96, 80, bias=False)).float()
        opt = KFACAdam(net, lr=0.1, damping=1e-4, **ANEW)
        rows = normal(400, 96).float() * torch.arange(1, 97) ** -2.0
        loss_of(net(rows)).backward()
        with stepped_blocks() as blocks:
            opt.step()
        directions.append(blocks[""][1].flatten())
    assert 0.9999 < F.cosine_similarity(*directions, 0) < 1 - 1e-9
