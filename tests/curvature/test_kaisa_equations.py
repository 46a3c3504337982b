"""``normalization="kaisa"`` against the papers' equations, simulated with plain tensors.

The simulation trains its own copy of the network: it computes outputs and output gradients with
explicit tensors, builds the covariances, decomposes, clips and applies SGD, all by the letter:

    rows of a (1 appended) and of ∂L/∂s, divided by a convolution's number of output positions
    cov(X) = XᵀX / rows, averaged over micro-batches;  F ← αF + (1 − α) cov, F = I at first
    eigen:   Q_G (Q_Gᵀ ∇ Q_A / (v_G v_Aᵀ + γ)) Q_Aᵀ, eigenvalues clamped at 0
    inverse: (G + γI)⁻¹ ∇ (A + γI)⁻¹, formed when refreshed
    ν = min(1, √(κ / |Σ lr² ⟨v, ∇⟩|)) with the current lr, then SGD on νv
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from tests.support import reference as ref
from tests.support.watch import Body

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

STEPS = 6
Parameters = dict[str, Tensor]


@dataclass
class Tape:
    """Inputs and outputs of the covered layers in one forward pass: name -> (rows a, s, P)."""

    parameters: Parameters
    seen: dict[str, tuple[Tensor, Tensor, int]] = field(default_factory=dict)

    def bias(self, name: str) -> Tensor | None:
        return self.parameters.get(f"{name}.bias")

    def with_one(self, name: str, rows: Tensor) -> Tensor:
        if self.bias(name) is None:
            return rows
        return torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], dim=1)

    def linear(self, name: str, x: Tensor) -> Tensor:
        s = F.linear(x, self.parameters[f"{name}.weight"], self.bias(name))
        rows = self.with_one(name, x.detach().reshape(-1, x.shape[-1]))
        self.seen[name] = (rows, s, 1)
        return s

    def conv(self, name: str, x: Tensor, **geometry: Any) -> Tensor:
        weight = self.parameters[f"{name}.weight"]
        s = F.conv2d(x, weight, self.bias(name), **geometry)
        patches = F.unfold(x.detach(), weight.shape[2:], **geometry).mT
        rows = self.with_one(name, patches.reshape(-1, patches.shape[-1]))
        self.seen[name] = (rows, s, patches.shape[1])
        return s


class Net:
    """The same network twice: as an nn.Module, and as a function of a tape."""

    module: Callable[[], nn.Module]
    forward: Callable[[Tape, Tensor], Tensor]
    shape: tuple[int, ...]
    outputs: int


class Plain(Net):
    shape, outputs = (4,), 3

    @staticmethod
    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return tape.linear("2", torch.tanh(tape.linear("0", x)))


class Sequences(Net):
    """Linear layers on every position, with a LayerNorm, which the papers' code leaves alone."""

    shape, outputs = (3, 4), 2

    @staticmethod
    def module() -> nn.Module:
        def use(m: nn.Module, x: Tensor) -> Tensor:
            return m.head(torch.tanh(m.second(m.norm(torch.tanh(m.first(x))))).mean(1))

        parts = {"first": nn.Linear(4, 5), "norm": nn.LayerNorm(5), "second": nn.Linear(5, 3)}
        return Body(use, **parts, head=nn.Linear(3, 2))

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        x = torch.tanh(tape.linear("first", x))
        norm = [tape.parameters[f"norm.{key}"] for key in ("weight", "bias")]
        x = F.layer_norm(x, (5,), *norm)
        return tape.linear("head", torch.tanh(tape.linear("second", x)).mean(1))


class Images(Net):
    """Convolutions of several geometries; the grouped one is not among the papers' kinds."""

    shape, outputs = (2, 5, 6), 3

    @staticmethod
    def module() -> nn.Module:
        def use(m: nn.Module, x: Tensor) -> Tensor:
            x = torch.tanh(m.grouped(torch.tanh(m.first(x))))
            return m.head(torch.tanh(m.second(x)).flatten(1))

        return Body(
            use,
            first=nn.Conv2d(2, 4, 3, stride=(1, 2), padding=1),
            grouped=nn.Conv2d(4, 4, 1, groups=2),
            second=nn.Conv2d(4, 2, (2, 1), dilation=(2, 1), bias=False),
            head=nn.Linear(18, 3),
        )

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        x = torch.tanh(tape.conv("first", x, stride=(1, 2), padding=1))
        grouped = [tape.parameters[f"grouped.{key}"] for key in ("weight", "bias")]
        x = torch.tanh(F.conv2d(x, *grouped, groups=2))
        x = torch.tanh(tape.conv("second", x, dilation=(2, 1)))
        return tape.linear("head", x.flatten(1))


NETS = {"linear": Plain, "sequences": Sequences, "convolutions": Images}


@dataclass
class Settings:
    method: str = "eigen"
    outer: bool = False
    damping: Callable[[int], float] = lambda step: 0.003
    factor_decay: Callable[[int], float] = lambda step: 0.95
    kl_clip: float | None = 0.001
    factor_update_steps: int = 1
    inv_update_steps: int = 1
    lr: Callable[[int], float] = lambda step: 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0


class Simulation:
    """One optimizer on plain tensors, by the equations above."""

    def __init__(self, parameters: Parameters, net: type[Net], settings: Settings) -> None:
        self.parameters = {name: p.detach().clone() for name, p in parameters.items()}
        self.net = net
        self.settings = settings
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        self.solved: dict[str, Any] = {}
        self.buffers: Parameters = {}
        self.steps = 0

    def gradients(self, batches: list[tuple[Tensor, Tensor]]) -> tuple[Parameters, dict]:
        """Summed gradients of the losses over their number, and each layer's covariances."""
        total = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        moments: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for x, target in batches:
            tape = Tape({name: p.clone().requires_grad_() for name, p in self.parameters.items()})
            loss = F.cross_entropy(self.net.forward(tape, x), target) / len(batches)
            names = list(tape.seen)
            found = torch.autograd.grad(
                loss, [*tape.parameters.values(), *(tape.seen[name][1] for name in names)]
            )
            for name, gradient in zip(total, found[: len(total)], strict=True):
                total[name] += gradient
            for name, g in zip(names, found[len(total) :], strict=True):
                rows, s, positions = tape.seen[name]
                g = g.movedim(1, -1) if positions > 1 or s.dim() == 4 else g
                g = g.reshape(-1, g.shape[-1]) / positions
                rows = rows / positions
                pair = (rows.T @ rows / len(rows), g.T @ g / len(g))
                moments.setdefault(name, []).append(pair)
        return total, {
            name: tuple(sum(side) / len(side) for side in zip(*pairs, strict=True))
            for name, pairs in moments.items()
        }

    def solve(self, name: str, damping: float) -> Any:
        a, g = self.factors[name]
        if self.settings.method == "inverse":
            return tuple(torch.linalg.inv(f + damping * torch.eye(len(f)).to(f)) for f in (a, g))
        (value_a, q_a), (value_g, q_g) = (torch.linalg.eigh(f) for f in (a, g))
        return value_a.clamp(min=0), q_a, value_g.clamp(min=0), q_g, damping

    def precondition(self, name: str, gradient: Tensor, damping: float) -> Tensor:
        if self.settings.method == "inverse":
            inverse_a, inverse_g = self.solved[name]
            return inverse_g @ gradient @ inverse_a
        value_a, q_a, value_g, q_g, then = self.solved[name]
        inner = q_g.T @ gradient @ q_a
        inner = inner / (torch.outer(value_g, value_a) + (then if self.settings.outer else damping))
        return q_g @ inner @ q_a.T

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        s = self.settings
        lr, damping, decay = s.lr(self.steps), s.damping(self.steps), s.factor_decay(self.steps)
        gradients, moments = self.gradients(batches)
        if self.steps % s.factor_update_steps == 0:
            for name, new in moments.items():
                old = self.factors.get(name) or tuple(torch.eye(len(f)).to(f) for f in new)
                self.factors[name] = tuple(
                    decay * one + (1 - decay) * other for one, other in zip(old, new, strict=True)
                )
        if self.steps % s.inv_update_steps == 0:
            self.solved = {name: self.solve(name, damping) for name in self.factors}
        directions = dict(gradients)
        product = 0.0
        for name in self.factors:
            weight, bias = gradients[f"{name}.weight"], gradients.get(f"{name}.bias")
            raw = weight.flatten(1)
            if bias is not None:
                raw = torch.cat([raw, bias[:, None]], dim=1)
            new = self.precondition(name, raw, damping)
            product += lr**2 * float((new * raw).sum())
            directions[f"{name}.weight"] = new[:, : weight[0].numel()].view_as(weight)
            if bias is not None:
                directions[f"{name}.bias"] = new[:, -1]
        nu = 1.0
        if s.kl_clip is not None and product != 0:
            nu = min(1.0, math.sqrt(s.kl_clip / abs(product)))
        for name, p in self.parameters.items():
            covered = name.rsplit(".", 1)[0] in self.factors
            direction = directions[name] * (nu if covered else 1.0) + s.weight_decay * p
            if s.momentum:
                old = self.buffers.get(name)
                direction = direction if old is None else s.momentum * old + direction
                self.buffers[name] = direction
            p -= lr * direction
        self.steps += 1


def batches_of(net: type[Net], step: int, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        (
            torch.randn(n, *net.shape, generator=generator, dtype=torch.float64),
            torch.randint(net.outputs, (n,), generator=generator),
        )
        for n in sizes
    ]


def compare(
    net: type[Net],
    settings: Settings,
    sizes: tuple[int, ...] = (5,),
    rtol: float = 1e-9,
    dtype: torch.dtype = torch.float64,
    scheduled: bool = False,
) -> None:
    """Six steps of both; every factor and parameter after each. ``rtol`` is of the update."""
    torch.manual_seed(7)
    module = net.module().double()
    simulation = Simulation(dict(module.named_parameters()), net, settings)
    module = module.to(dtype)
    options: dict[str, Any] = {
        "compute_method": settings.method,
        "kl_clip": settings.kl_clip,
        "factor_update_steps": settings.factor_update_steps,
        "inv_update_steps": settings.inv_update_steps,
        "damping": settings.damping if scheduled else settings.damping(0),
        "factor_decay": settings.factor_decay if scheduled else settings.factor_decay(0),
    }
    if settings.method == "eigen":
        options["compute_eigenvalue_outer_product"] = settings.outer
    opt = KFACSGD(
        module,
        lr=settings.lr(0),
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        normalization="kaisa",
        **options,
    )
    moved = False
    for step in range(STEPS):
        before = {name: p.clone() for name, p in simulation.parameters.items()}
        batches = batches_of(net, step, sizes)
        opt.param_groups[0]["lr"] = settings.lr(step)
        opt.zero_grad()
        for x, target in batches:
            (F.cross_entropy(module(x.to(dtype)), target) / len(batches)).backward()
        opt.step()
        simulation.step(batches)
        assert opt.preconditioner.layers.keys() == simulation.factors.keys()
        for name, pair in simulation.factors.items():
            found = opt.preconditioner.factors(name)
            for actual, expected, label in zip(found, pair, "AG", strict=True):
                what = f"step {step}, {name}: {label}"
                ref.assert_close(actual[0].double(), expected, rtol, what)
        for name, p in module.named_parameters():
            expected = simulation.parameters[name]
            update = (expected - before[name]).abs().max()
            moved = moved or update > 1e-3
            error = (p.detach().double() - expected).abs().max()
            # Errors of earlier steps add up; those of float32 parameters are of their own size.
            limit = rtol * max(update, 1e-3 if dtype == torch.float64 else expected.abs().max())
            assert error <= limit * (step + 1), f"step {step}, {name}: off by {error:.3e}"
    assert moved


# Settings of both optimizers, and how these are compared.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every step": ({}, {}),
    "float32": ({}, {"rtol": 1e-5, "dtype": torch.float32}),
    "intervals": (
        # Unclipped steps must stay small, or six of them amplify rounding.
        {"factor_update_steps": 2, "inv_update_steps": 3, "kl_clip": None, "lr": lambda step: 0.01},
        {},
    ),
    "decompositions between sums": ({"factor_update_steps": 3, "inv_update_steps": 2}, {}),
    # Ragged micro-batches weigh alike, unlike in the package's own normalization.
    "accumulation": ({}, {"sizes": (2, 5, 3)}),
    # The product kept at refresh keeps that moment's damping; the others follow each step.
    "schedules": (
        {
            "damping": lambda step: 0.02 / (1 + step),
            "factor_decay": lambda step: (0.95, 0.5, 0.8)[step % 3],
            "inv_update_steps": 2,
        },
        {"scheduled": True},
    ),
    # The clip is active in the first steps, idle in the last ones.
    "rates": ({"lr": lambda step: (0.5, 0.3, 0.1, 1e-3, 1e-4, 1e-4)[step]}, {}),
    "momentum and decay": ({"momentum": 0.9, "weight_decay": 0.01}, {}),
    "large damping, no clip": ({"kl_clip": None, "damping": lambda step: 0.5}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "form",
    [{}, {"outer": True}, {"method": "inverse"}],
    ids=["eigen", "eigenvalue product kept", "inverse"],
)
@pytest.mark.parametrize("net", NETS.values(), ids=list(NETS))
def test_six_steps(net, form, case):
    settings, how = CASES[case]
    compare(net, Settings(**form, **settings), **how)


@pytest.mark.parametrize("outer", [False, True])
def test_a_rank_one_covariance_without_the_identity(outer):
    """Once the identity has decayed, eigenvalues of rounding size lie on both sides of 0."""
    settings = Settings(
        outer=outer, factor_decay=lambda step: 1e-12, damping=lambda step: 1e-3, kl_clip=1e-4
    )
    compare(Plain, settings, sizes=(1,), rtol=1e-6)
