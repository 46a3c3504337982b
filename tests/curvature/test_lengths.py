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
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from kaisa_optim.curvature import lengths
from kaisa_optim.curvature.rules import PolarRule
from tests.support import reference as ref
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
    def root(self) -> float:
        return self.momentum.numel() ** 0.5

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


Key = tuple[str, int]  # a layer and the number of a block


@contextlib.contextmanager
def directed(by: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let directions follow from the momenta by this function."""
    with mock.patch.object(PolarRule, "apply", lambda rule, group, m, *rest: by(m).clone()):
        yield


@contextlib.contextmanager
def unlimited(really: bool = True) -> Iterator[None]:
    if not really:
        yield
        return
    with (
        mock.patch.object(Block, "limit", lambda block, rate: math.inf),
        mock.patch.multiple(lengths, _FREE=1e99, _FREE_OF_ZEROS_BY_SGD=1e99),
    ):
        yield


def stepped(model: nn.Module, opt: Any) -> dict[Key, Block]:
    """Take a step; return all blocks of covered layers, as matrices.

    The steps of LAMB are those before its trust ratio.
    """
    before, gradients = ref.parameters_of(model), ref.gradients_of(model)
    with stepped_blocks(with_lengths=True) as lengthened, stepped_blocks() as seen:
        steps = taken(opt, model)
    blocks = {}
    for name, (momenta, directions) in seen.items():
        module, keys = model.get_submodule(name), (f"{name}.weight", f"{name}.bias")
        matrices = [matrix_of(module, *map(x.get, keys)) for x in (before, gradients, steps)]
        if isinstance(opt, KFACLAMB):
            matrices[2] = opt.param_groups[0]["lr"] * lengthened[name][1]
        for i, (weights, gradient, step) in enumerate(zip(*matrices, strict=True)):
            even = directions[i] / directions[i].square().mean().sqrt()
            blocks[name, i] = Block(weights, gradient, momenta[i], even, step)
    assert blocks.keys() == {("conv", 0), ("conv", 1), ("body", 0), ("head", 0), ("last", 0)}
    return blocks


# ---- falls ----

# Of a block in a step, by its number; ``shares`` are rates of entries, of that of the weight.
# Returns the momentum that stands for the gradient, and the base's fall at rate 1.
Fall = Callable[[int, Key, Block, Tensor], tuple[Tensor, Tensor]]


def check_falls(
    model: nn.Module, opt: Any, fall_of: Fall, rate: float, share: float = 1.0, *,
    by_rate: bool = True, free: bool = False, decay: float = 0.0, scale: float = 1.0,
) -> int:  # fmt: skip
    """To first order, the loss falls as by the base's own step, up to the limit of a block.

    Return how many steps end at a limit.
    """
    limited = 0
    for count in range(1, 4):
        backward(model, count, scale)
        with unlimited(free):
            for key, block in stepped(model, opt).items():
                rates = torch.full_like(block.momentum, rate * (share if key[0] == "body" else 1))
                if model.get_submodule(key[0]).bias is not None:
                    rates[:, -1] = rate * share
                own = float(rates[0, 0])
                if own == 0:
                    assert not block.step.any()
                    continue
                shares = rates / own
                direction = block.direction / (block.direction * shares).square().mean().sqrt()
                ahead, fall = fall_of(count, key, block, shares)
                along = (direction * shares * ahead).sum()
                least = lengths._LEAST_COSINE * block.root * (ahead * shares.sqrt()).norm()
                is_across, along = along < least, max(along, least)
                length = min(fall / along, block.limit(own if by_rate else None) / own)
                limited += int(length < fall / along)
                wanted = rates * length * direction + own * decay * block.weights
                assert_close(block.step, wanted, 1e-7, str(key))
                if free and not decay and not is_across:
                    assert_close((block.step * ahead).sum(), own * fall, 1e-7, floor=1e-12)
    return limited


def groups_of(model: nn.Module, rate: float, other: float) -> list[dict[str, Any]]:
    """Biases and the table of ``body`` have another rate."""
    apart = [p for n, p in model.named_parameters() if n.endswith("bias") or n == "body.weight"]
    rest = [p for p in model.parameters() if all(p is not q for q in apart)]
    return [{"params": rest, "lr": rate}, {"params": apart, "lr": other}]


def adams_fall(beta1: float, beta2: float, eps: float, corrected: bool = True) -> Fall:
    """‖m̂‖₁ ‖m̂‖₂ / (√Σv̂ + ε√n), with one Σv for each block; shares count by their roots."""
    squares: dict[Key, Tensor] = {}

    def fall_of(count: int, key: Key, block: Block, shares: Tensor) -> tuple[Tensor, Tensor]:
        square = (1 - beta2) * block.gradient.square().sum()
        squares[key] = beta2 * squares[key] + square if key in squares else square
        rests = (1 - beta1 ** (count + 1), 1 - beta2**count) if corrected else (1.0, 1.0)
        ahead, weighed = block.momentum / rests[0], block.momentum / rests[0] * shares.sqrt()
        spread = (squares[key] / rests[1]).sqrt() + eps * block.root
        return ahead, weighed.abs().sum() * weighed.norm() / spread

    return fall_of


@property_test
@given(
    rate=rates, size=sizes, beta1=st.sampled_from([0.0, 0.6, 0.9]),
    beta2=st.sampled_from([0.5, 0.99]), eps=st.sampled_from([1e-8, 0.1]),
    share=st.sampled_from([1.0, 0.25, 3.0]), free=st.booleans(),
)  # fmt: skip
def test_adams_fall(rate, size, beta1, beta2, eps, share, free):
    assume(beta1 > 0 or not free)  # long steps may end where each gradient is zero
    model = Blocks(size)
    groups, how = groups_of(model, rate, rate * share), {"betas": (beta1, beta2), "eps": eps}
    opt = KFACAdam(groups, model=model, lr=rate, **how, **ANEW)
    limited = check_falls(model, opt, adams_fall(beta1, beta2, eps), rate, share, free=free)
    assert limited >= (4 if not free and rate >= 0.5 and eps < 0.1 else 0)


@pytest.mark.parametrize("corrected", [True, False])
def test_lambs_fall_with_and_without_bias_correction(corrected):
    model, fall = Blocks(), adams_fall(0.8, 0.9, 1e-3, corrected)
    how = {"weight_decay": 0.0, "max_grad_norm": None, "bias_correction": corrected, **ANEW}
    opt = KFACLAMB(model, lr=0.1, betas=(0.8, 0.9), eps=1e-3, **how)
    check_falls(model, opt, fall, 0.1, free=True)


@property_test
@given(rate=rates, share=st.sampled_from([1.0, 0.25, 3.0, 0.0]), size=sizes, how=momenta,
       scale=st.sampled_from([None, 1.0, 1e4]))  # fmt: skip
# Here a direction is nearly across its momentum.
@example(rate=0.5, share=3.0, size=0.01, how={"momentum": 0.9, "nesterov": True}, scale=None)
def test_sgds_fall(rate, share, size, how, scale):
    """‖M‖², where rates of groups weigh; a loss of 1e4 pulls as far as the limits let it."""
    free = scale is None
    assume(how or scale == 1.0)
    model = Blocks(size)
    opt = KFACSGD(groups_of(model, rate, rate * share), model=model, lr=rate, **how, **ANEW)

    def fall_of(count: int, key: Key, block: Block, shares: Tensor) -> tuple[Tensor, Tensor]:
        return block.momentum, (shares * block.momentum.square()).sum()

    limited = check_falls(
        model, opt, fall_of, rate, share, by_rate=False, free=free, scale=scale or 1.0
    )
    assert limited > 0 or scale != 1e4 or share == 0


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
    shares_of = {n: Halves.share(i) for i, (n, _) in enumerate(model.named_parameters())}
    momenta: dict[Key, Tensor] = {}
    falls: list[Tensor] = []

    def fall_of(count: int, key: Key, block: Block, shares: Tensor) -> tuple[Tensor, Tensor]:
        momenta[key] = 0.9 * momenta.get(key, 0.0) + 0.1 * block.gradient
        assert_close(block.momentum, momenta[key], 1e-9)
        down = shares_of[f"{key[0]}.weight"] * block.gradient
        if f"{key[0]}.bias" in shares_of:
            down[:, -1] = shares_of[f"{key[0]}.bias"] * block.gradient[:, -1]
        falls.append((block.momentum * down).sum().clamp(min=0))
        return block.momentum, falls[-1]

    check_falls(model, opt, fall_of, 0.1, free=free, decay=decay)
    assert 0 < sum(fall == 0 for fall in falls) < 15
    assert all("last" in opt.state[p] for p in model.parameters())


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


def test_a_sum_of_many_numbers_is_whole():
    """Each further 1 would be lost in a float32 sum of 2²⁴."""
    assert lengths.norms_of([torch.ones(1, 4096, 8192)], 1).item() == 2**25
