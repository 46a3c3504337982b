"""Lengths of steps against their formulas: what the loss falls by, and limits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from kaisa_optim.curvature import lengths
from kaisa_optim.curvature.rules import PolarRule
from tests.support.ranks import run
from tests.support.training import ANEW
from tests.support.watch import assert_close, matrix_of, normal, stepped_blocks, taken

property_test = settings(max_examples=15)
rates = st.sampled_from([1e-3, 0.03, 0.5, 4.0])
sizes = st.sampled_from([0.01, 0.3, 1.0, 3.0])  # of weights
momenta = st.sampled_from([{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])


class Blocks(nn.Module):
    """Four layers: of one and of two blocks, with and without a bias; a vector at the end."""

    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(4, 4, 2, groups=2)
        self.body = nn.Linear(4, 3, bias=False)
        self.head = nn.Linear(3, 3)
        self.last = nn.Linear(3, 1, bias=False)
        self.double()
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(size * normal(*p.shape, seed=i))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.conv(x).mean(2) + x.mean(2)).tanh()
        return self.last(self.head(x) + x)


def backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    model.zero_grad()
    loss = F.mse_loss(model(normal(6, 4, 5, seed=step)), normal(6, 1, seed=99 + step))
    (scale * loss).backward()


class Block(NamedTuple):
    weights: Tensor  # before the step
    gradient: Tensor
    momentum: Tensor
    direction: Tensor  # steps along it have a root mean square of 1
    step: Tensor

    @property
    def entries(self) -> int:
        return self.momentum.numel()

    @property
    def along(self) -> float:
        return float((self.direction * self.momentum).sum())

    def moved_by(self, shares: Tensor) -> Block:
        """Return the same with a direction whose entries move by other rates."""
        moved = self.direction * shares
        return self._replace(direction=self.direction / moved.square().mean().sqrt())

    def limit(self, rate: float | None) -> float:
        """Return the largest root mean square of a step; SGD's goes by the weights alone."""
        if 1 in self.weights.shape:
            return math.inf
        size = float(self.weights.square().mean().sqrt())
        if rate is None:
            free = max(size * lengths._FREE_OF_WEIGHTS_BY_SGD, lengths._FREE_OF_ZEROS_BY_SGD)
            return max(size * lengths._OF_WEIGHTS_BY_SGD, min(free, lengths._FREE))
        most = min(rate * lengths._OF_RATE, size * lengths._OF_WEIGHTS)
        return max(lengths._FREE, most, size * lengths._FREE_OF_WEIGHTS)


@contextlib.contextmanager
def directed(by: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let directions follow from the momenta by this function."""
    with mock.patch.object(PolarRule, "apply", lambda rule, group, m, *rest: by(m).clone()):
        yield


@contextlib.contextmanager
def unlimited() -> Iterator[None]:
    with (
        mock.patch.object(Block, "limit", lambda block, rate: math.inf),
        mock.patch.object(lengths, "_FREE", 1e99),
        mock.patch.object(lengths, "_FREE_OF_ZEROS_BY_SGD", 1e99),
    ):
        yield


def stepped(model: nn.Module, opt: Any) -> dict[tuple[str, int], Block]:
    """Take a step; return all blocks of covered layers, as matrices."""
    modules = {name: model.get_submodule(name) for name in opt.preconditioner.layers}
    before, gradients = {}, {}
    for name, module in modules.items():
        with_bias = len(opt.preconditioner.layers[name].parameters) == 2
        bias = module.bias if with_bias else None
        before[name] = matrix_of(module, module.weight.detach(), bias).detach().clone()
        slope = None if bias is None else bias.grad
        gradients[name] = matrix_of(module, module.weight.grad, slope).clone()
    with stepped_blocks() as seen:
        steps = taken(opt, model)
    found = {}
    for name, (momenta, directions) in seen.items():
        module = modules[name]
        bias = (
            steps.get(f"{name}.bias") if before[name].shape[2] > module.weight[0].numel() else None
        )
        step = matrix_of(module, steps[f"{name}.weight"], bias)
        for i, (m, d) in enumerate(zip(momenta, directions, strict=True)):
            even = d / d.square().mean().sqrt()
            found[name, i] = Block(before[name][i], gradients[name][i], m, even, step[i])
    return found


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# ---- Adam ----


@property_test
@given(
    rate=rates,
    size=sizes,
    beta1=st.sampled_from([0.0, 0.6, 0.9]),
    beta2=st.sampled_from([0.5, 0.99]),
    eps=st.sampled_from([1e-8, 0.1]),
    share=st.sampled_from([1.0, 0.25, 3.0]),
    free=st.booleans(),
)
def test_adams_fall(rate, size, beta1, beta2, eps, share, free):
    """‖m̂‖₁ ‖m̂‖₂ / (√Σv̂ + ε√n) over the length of D along m̂, with one Σv for each block.

    A bias with another rate counts with its share of the weight's in ⟨D, m̂⟩, and with the root
    of that in each norm.
    """
    model = Blocks(size)
    groups, how = groups_of(model, rate, rate * share), {"betas": (beta1, beta2), "eps": eps}
    opt = KFACAdam(groups, model=model, lr=rate, **how, **ANEW)
    squares = dict.fromkeys([("conv", 0), ("conv", 1), ("body", 0), ("head", 0), ("last", 0)], 0.0)
    for count in range(1, 4):
        backward(model, count)
        with unlimited() if free else contextlib.nullcontext():
            blocks = stepped(model, opt)
            assert blocks.keys() == squares.keys()
            for key, block in blocks.items():
                squares[key] = beta2 * squares[key] + (1 - beta2) * block.gradient.square().sum()
                each = rates_of(model, key[0], block, rate, share)
                own, shares = float(each[0, 0]), each / each[0, 0]
                block = block.moved_by(shares)
                ahead = block.momentum / (1 - beta1 ** (count + 1))
                spread = (squares[key] / (1 - beta2**count)).sqrt() + eps * block.entries**0.5
                weighed = ahead * shares.sqrt()
                fall = weighed.abs().sum() * weighed.norm() / spread
                along = (block.direction * shares * ahead).sum()
                assert along > lengths._LEAST_COSINE * block.entries**0.5 * ahead.norm()
                scale = min(fall / along, block.limit(own) / own)
                assert_close(block.step, each * scale * block.direction, 1e-7, str(key))
                if free:  # to first order, the loss falls as by the base's own step
                    assert_close((block.step * ahead).sum(), own * fall, 1e-7)


@property_test
@given(size=sizes, beta1=st.sampled_from([0.0, 0.6, 0.9]))
def test_the_first_step_along_adams_own_direction_is_adams(size, beta1):
    """There the fall is ‖∇‖₁, and so the length is 1."""
    ours, plain = Blocks(size), Blocks(size)
    opt = KFACAdam(ours, lr=0.1, betas=(beta1, 0.99), eps=0.0)
    adam = torch.optim.Adam(plain.parameters(), lr=0.1, betas=(beta1, 0.99), eps=0.0)
    for model in (ours, plain):
        backward(model, 0)
    with unlimited(), directed(torch.sign):
        blocks = stepped(ours, opt)
    adam.step()
    for block in blocks.values():
        fall = (block.step * block.gradient).sum()
        assert_close(fall, 0.1 * block.gradient.abs().sum())
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), 1e-9)


@pytest.mark.parametrize("corrected", [True, False])
def test_lambs_fall_with_and_without_bias_correction(corrected):
    """Before the trust ratio: the shares of two settings follow from Adam's formula."""
    model = Blocks()
    opt = KFACLAMB(
        model, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0, max_grad_norm=None,
        bias_correction=corrected, **ANEW,
    )  # fmt: skip
    squares: dict[Any, Any] = {}
    for count in range(1, 4):
        backward(model, count)
        with unlimited(), stepped_blocks(with_lengths=True) as given:
            blocks = stepped(model, opt)
        for (name, i), block in blocks.items():
            square = block.gradient.square().sum()
            squares[name, i] = 0.9 * squares.get((name, i), 0.0) + 0.1 * square
            rests = (1 - 0.8 ** (count + 1), 1 - 0.9**count) if corrected else (1, 1)
            ahead = block.momentum / rests[0]
            spread = (squares[name, i] / rests[1]).sqrt() + 1e-3 * block.entries**0.5
            fall = ahead.abs().sum() * ahead.norm() / spread
            scale = fall / (block.direction * ahead).sum()
            assert_close(given[name][1][i], scale * block.direction, 1e-7, name)


def sums_of(opt: Any) -> dict[str, Tensor]:
    groups = opt.preconditioner.groups.of
    return {
        x.name: g.tensors["square_sum"][g.slots[x]].clone() for x, g in groups.items() if g.applied
    }


def keeps_sums() -> None:
    model = Blocks()
    opt = KFACAdam(model, lr=0.01, **ANEW)
    for step in range(3):
        before, at = sums_of(opt), model.body.weight.detach().clone()
        backward(model, step)
        if step == 1:
            model.body.weight.grad = None
        opt.step()
        for name, now in sums_of(opt).items():
            still = step == 1 and name == "body"
            assert torch.equal(now, before[name]) == still, name
        assert torch.equal(model.body.weight, at) == (step == 1)


def test_layers_without_a_gradient_keep_their_sums():
    keeps_sums()
    run(2, keeps_sums)  # each rank hands the other its directions, of missing gradients, too


# ---- SGD ----


def groups_of(model: nn.Module, rate: float, other: float) -> list[dict[str, Any]]:
    """Biases and the table of ``body`` have another rate."""
    apart = [p for n, p in model.named_parameters() if n.endswith("bias") or n == "body.weight"]
    rest = [p for p in model.parameters() if all(p is not q for q in apart)]
    return [{"params": rest, "lr": rate}, {"params": apart, "lr": other}]


@property_test
@given(rate=rates, share=st.sampled_from([1.0, 0.25, 3.0, 0.0]), size=sizes, free=st.booleans(),
       how=momenta)  # fmt: skip
def test_sgds_fall_gives_a_length(rate, share, size, free, how):
    """Σ lr ‖M‖² / Σ lr ⟨D, M⟩ in each block, up to its limit; rates of groups weigh."""
    assume(how or not free)  # free steps may end where each gradient is zero
    model = Blocks(size)
    groups = groups_of(model, rate, rate * share)
    opt = KFACSGD(groups, model=model, lr=rate, **how, **ANEW)
    for count in range(3):
        backward(model, count)
        with unlimited() if free else contextlib.nullcontext():
            for key, block in stepped(model, opt).items():
                row = rates_of(model, key[0], block, rate, share)
                of_weight = float(row[0, 0])
                if of_weight == 0:
                    assert not block.step.any()
                    continue
                block = block.moved_by(row / of_weight)
                fall = float((row * block.momentum.square()).sum())
                along = float((row * block.direction * block.momentum).sum())
                scale = min(fall / along, block.limit(None) / of_weight)
                assert_close(block.step, row * scale * block.direction, 1e-7, str(key))
                if free:
                    moved = float((block.step * block.momentum).sum())
                    assert moved == pytest.approx(fall, rel=1e-7)


@pytest.mark.parametrize("cls", [KFACSGD, with_kfac(torch.optim.RMSprop)])
def test_biases_fall_alone_where_their_weights_rest(cls):
    """A bias steps as far as it does where its weight has no momentum."""
    steps = []
    for still in (False, True):
        model = Blocks()
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
        groups = [{"params": weights, "lr": 0.0}, {"params": biases, "lr": 0.1}]
        opt = cls(groups, model=model, lr=0.1, **ANEW)
        backward(model, 0)
        with unlimited(), directed(torch.sign):
            if still:
                for p in weights:
                    p.grad.zero_()
            steps.append(taken(opt, model))
    for name in steps[0]:
        assert_close(steps[0][name], steps[1][name], 1e-6, name)


def rates_of(model: nn.Module, name: str, block: Block, rate: float, share: float) -> Tensor:
    """Return the rate of each entry of a block."""
    found = torch.full_like(block.momentum, rate * share if name == "body" else rate)
    if model.get_submodule(name).bias is not None:
        found[:, -1] = rate * share
    return found


# ---- limits ----


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
@property_test
@given(rate=rates, size=sizes)
def test_steps_of_limited_root_mean_squares(cls, rate, size):
    """A loss of 1e4 pulls as far as the limits let it."""
    model = Blocks(size)
    opt = cls(model, lr=rate, **ANEW)
    backward(model, 0, scale=1e4)
    acted = 0
    for key, block in stepped(model, opt).items():
        found = float(block.step.square().mean().sqrt())
        most = block.limit(None if cls is KFACSGD else rate)
        assert found <= most * (1 + 1e-9), key
        acted += found > most * (1 - 1e-9)
    if rate >= 0.5 and cls is KFACAdam:
        assert acted == 4


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_direction_across_the_momentum_counts_as_having_a_small_cosine(cls):
    def across(momenta: Tensor) -> Tensor:
        """Turn pairs of entries by a right angle."""
        flat = momenta.flatten(1)
        turned = torch.zeros_like(flat)
        even = flat.shape[1] // 2 * 2
        turned[:, 0:even:2], turned[:, 1:even:2] = -flat[:, 1:even:2], flat[:, 0:even:2]
        return turned.view_as(momenta)

    model = Blocks()
    opt = cls(model, lr=0.1, **ANEW)
    backward(model, 0)
    with unlimited(), directed(across):
        blocks = stepped(model, opt)
    floors = {
        key: lengths._LEAST_COSINE * block.entries**0.5 * block.momentum.norm()
        for key, block in blocks.items()
    }
    for key, block in blocks.items():
        assert abs(block.along) < 1e-12
        fall = block.momentum.square().sum()
        if cls is KFACAdam:  # in the first step ahead is ∇, and Σv its square
            fall = block.momentum.abs().sum()
        scale = fall / floors[key]
        assert_close(block.step, 0.1 * scale * block.direction, 1e-6, str(key))


# ---- any other base ----


class Halves(Optimizer):
    """Step by a share of the gradient, other for each parameter; up where the share is negative."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(group["lr"] * self.share(i) * (p.grad + group["weight_decay"] * p))
                    self.state[p]["last"] = p.grad.clone()

    @staticmethod
    def share(i: int) -> float:
        return (0.5, 2.0, -1.0)[i % 3]


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_fall_of_any_base_is_that_of_its_step(free, decay):
    """⟨M, -U⟩ for the step U on the raw gradient; a step up counts as none; decay goes beside."""
    model = Blocks()
    opt = with_kfac(Halves)(model, lr=0.1, weight_decay=decay, **ANEW)
    shares = {n: Halves.share(i) for i, (n, _) in enumerate(model.named_parameters())}
    momenta: dict[Any, Tensor] = {}
    standing = 0
    for count in range(3):
        backward(model, count)
        with unlimited() if free else contextlib.nullcontext():
            for key, block in stepped(model, opt).items():
                own = momenta.get(key, 0.0)
                momenta[key] = 0.9 * own + 0.1 * block.gradient
                assert_close(block.momentum, momenta[key], 1e-9)
                down = 0.1 * shares[f"{key[0]}.weight"] * block.gradient
                if f"{key[0]}.bias" in shares:
                    down[:, -1] = 0.1 * shares[f"{key[0]}.bias"] * block.gradient[:, -1]
                fall = max(0.0, float((block.momentum * down).sum()))
                scale = min(fall / block.along, block.limit(0.1))
                wanted = scale * block.direction + 0.1 * decay * block.weights
                assert_close(block.step, wanted, 1e-7, str(key))
                standing += fall == 0
    assert 0 < standing < 15
    assert all("last" in opt.state[p] for p in model.parameters())


def test_a_sum_of_many_numbers_is_whole():
    """Each further 1 would be lost in a float32 sum of 2²⁴."""
    assert lengths.norms_of([torch.ones(1, 4096, 8192)], 1).item() == 2**25
