"""``normalization="kaisa"`` against the papers' equations, simulated on a twin of the network.

By the letter, with a dense solution of each block:

    rows of a (1 appended) and of ∂L/∂s, divided by a convolution's number of output positions
    cov(X) = XᵀX / rows, averaged over micro-batches;  F ← αF + (1 − α) cov, F = I at first
    eigen:   Q_G (Q_Gᵀ ∇ Q_A / (v_G v_Aᵀ + γ)) Q_Aᵀ
    inverse: (G + γI)⁻¹ ∇ (A + γI)⁻¹, formed when refreshed
    ν = min(1, √(κ / |Σ lr² ⟨v, ∇⟩|)) with the current lr, then SGD on νv
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from tests.support import reference as ref
from tests.support.watch import Body, Watch, matrix_of

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

STEPS = 6


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def sequences() -> nn.Module:
    """Linear layers on every position, with a LayerNorm, which the papers' code leaves alone."""

    def use(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.second(m.norm(torch.tanh(m.first(x))))).mean(1))

    parts = {"first": nn.Linear(4, 5), "norm": nn.LayerNorm(5), "second": nn.Linear(5, 3)}
    return Body(use, **parts, head=nn.Linear(3, 2))


def images() -> nn.Module:
    """Convolutions of several geometries; the grouped one is not among the papers' kinds."""

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


# Networks, the shapes of an input, the numbers of classes, and the layers that are covered.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, list[str]]] = {
    "linear": (plain, (4,), 3, ["0", "2"]),
    "sequences": (sequences, (3, 4), 2, ["first", "second", "head"]),
    "convolutions": (images, (2, 5, 6), 3, ["first", "second", "head"]),
}
# Of the optimizer; a value may be a function of the step.
SETTINGS: dict[str, Any] = {
    "damping": 0.003, "factor_decay": 0.95, "kl_clip": 0.001, "factor_update_steps": 1,
    "inv_update_steps": 1, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0,
}  # fmt: skip
FORMS = ["eigen", "eigen-outer", "inverse-full"]


class Simulation:
    """One optimizer on a twin, by the equations above."""

    def __init__(self, net: nn.Module, names: list[str], form: str, settings: dict[str, Any]):
        self.net, self.form, self.settings = copy.deepcopy(net), form, settings
        self.watch = Watch(self.net, *names)
        self.factors: dict[str, list[Tensor]] = {}
        self.solved: tuple[dict[str, list[Tensor]], float] = {}, 0.0
        base = {name: settings[name] for name in ("momentum", "weight_decay")}
        self.base = torch.optim.SGD(self.net.parameters(), lr=1.0, **base)

    def covariances(self, name: str) -> list[Tensor]:
        """Return those of A and G of the last pass."""
        module, (x, g) = self.net.get_submodule(name), self.watch.trained(name)[-1]
        positions = 1
        if isinstance(module, nn.Conv2d):
            positions = g[0, 0].numel()
            geometry = module.dilation, module.padding, module.stride
            x, g = F.unfold(x, module.kernel_size, *geometry).mT, g.flatten(2).mT
        if module.bias is not None:
            x = F.pad(x, (0, 1), value=1.0)
        rows = [part.reshape(1, -1, part.shape[-1]) / positions for part in (x, g)]
        return [part.mT @ part / part.shape[1] for part in rows]

    def step(self, step: int, batches: list[tuple[Tensor, Tensor]]) -> None:
        s = {name: x(step) if callable(x) else x for name, x in self.settings.items()}
        self.base.zero_grad()
        new: dict[str, list[Tensor]] = {}
        for x, target in batches:
            (F.cross_entropy(self.net(x), target) / len(batches)).backward()
            for name in self.watch.calls:
                parts = [x / len(batches) for x in self.covariances(name)]
                new[name] = [a + b for a, b in zip(new.get(name, (0, 0)), parts, strict=True)]
        if step % s["factor_update_steps"] == 0:
            for name, pair in new.items():
                former = self.factors.get(name, [torch.eye(x.shape[1]).double() for x in pair])
                decay = s["factor_decay"]
                mixed = zip(former, pair, strict=True)
                self.factors[name] = [decay * x + (1 - decay) * y for x, y in mixed]
        if step % s["inv_update_steps"] == 0:
            self.solved = dict(self.factors), s["damping"]
        factors, damping = self.solved
        # The product kept at refresh keeps that moment's damping, and inverses have theirs.
        damping = s["damping"] if self.form == "eigen" else damping
        found, product = {}, 0.0
        for name in self.factors:
            module = self.net.get_submodule(name)
            bias = None if module.bias is None else module.bias.grad
            gradient = matrix_of(module, module.weight.grad, bias)
            found[name] = ref.precondition(*factors[name], gradient, damping, self.form)
            product += s["lr"] ** 2 * float((found[name] * gradient).sum())
        clips = s["kl_clip"] is not None and product != 0
        nu = min(1.0, math.sqrt(s["kl_clip"] / abs(product))) if clips else 1.0
        for name, (new_gradient,) in found.items():
            module = self.net.get_submodule(name)
            width = module.weight[0].numel()
            module.weight.grad = nu * new_gradient[:, :width].reshape(module.weight.shape)
            if module.bias is not None:
                module.bias.grad = nu * new_gradient[:, -1]
        self.base.param_groups[0]["lr"] = s["lr"]
        self.base.step()


def compare(
    name: str, form: str, *, sizes: tuple[int, ...] = (5,), rtol: float = 1e-9,
    dtype: torch.dtype = torch.float64, **settings: Any,
) -> None:  # fmt: skip
    """Six steps of both; every factor and parameter after each. ``rtol`` is of the update."""
    make, shape, classes, names = NETS[name]
    settings = {**SETTINGS, **settings}
    torch.manual_seed(7)
    module = make().double()
    simulation = Simulation(module, names, form, settings)
    module = module.to(dtype)
    how = {**settings, "lr": 0.1, **ref.METHODS[form]}
    opt = KFACSGD(module, normalization="kaisa", **how)
    moved = False
    for step in range(STEPS):
        before = ref.parameters_of(simulation.net)
        torch.manual_seed(step)
        batches = [
            (torch.randn(n, *shape, dtype=torch.float64), torch.randint(classes, (n,)))
            for n in sizes
        ]
        lr = settings["lr"]
        opt.param_groups[0]["lr"] = lr(step) if callable(lr) else lr
        opt.zero_grad()
        for x, target in batches:
            (F.cross_entropy(module(x.to(dtype)), target) / len(batches)).backward()
        opt.step()
        simulation.step(step, batches)
        assert list(opt.preconditioner.layers) == list(simulation.factors) == names
        for layer, pair in simulation.factors.items():
            factors = opt.preconditioner.factors(layer)
            for actual, expected, side in zip(factors, pair, "AG", strict=True):
                ref.assert_close(actual.double(), expected, rtol, f"step {step}, {layer}: {side}")
        for key, p in module.named_parameters():
            expected = simulation.net.get_parameter(key).detach()
            update = (expected - before[key]).abs().max()
            moved = moved or update > 1e-3
            error = (p.detach().double() - expected).abs().max()
            # Errors of earlier steps add up; those of float32 parameters are of their own size.
            limit = rtol * max(update, 1e-3 if dtype == torch.float64 else expected.abs().max())
            assert error <= limit * (step + 1), f"step {step}, {key}: off by {error:.3e}"
    assert moved


CASES: dict[str, dict[str, Any]] = {
    "every step": {},
    "float32": {"rtol": 1e-5, "dtype": torch.float32},
    # Unclipped steps must stay small, or six of them amplify rounding.
    "intervals": {"factor_update_steps": 2, "inv_update_steps": 3, "kl_clip": None, "lr": 0.01},
    "decompositions between sums": {"factor_update_steps": 3, "inv_update_steps": 2},
    # Ragged micro-batches weigh alike, unlike in the package's own normalization.
    "accumulation": {"sizes": (2, 5, 3)},
    "schedules": {
        "damping": lambda step: 0.02 / (1 + step),
        "factor_decay": lambda step: (0.95, 0.5, 0.8)[step % 3],
        "inv_update_steps": 2,
    },
    # The clip is active in the first steps, idle in the last ones.
    "rates": {"lr": lambda step: (0.5, 0.3, 0.1, 1e-3, 1e-4, 1e-4)[step]},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.01},
    "large damping, no clip": {"kl_clip": None, "damping": 0.5},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("net", NETS)
def test_six_steps(net, form, case):
    compare(net, form, **CASES[case])


@pytest.mark.parametrize("form", ["eigen", "eigen-outer"])
def test_a_rank_one_covariance_without_the_identity(form):
    """Once the identity has decayed, eigenvalues of rounding size lie on both sides of 0."""
    compare("linear", form, sizes=(1,), rtol=1e-6, factor_decay=1e-12, damping=1e-3, kl_clip=1e-4)
