"""Optimizer classes that K-FAC is put over, and a base that is stepped by hand."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from kaisa_optim import KFACLAMB, KFACSGD, LAMB, KFACAdam, with_kfac
from tests.support.training import EVERY_STEP, Probe, backward, classes_in, network

REFUSED = {"LBFGS", "SparseAdam", "Muon"}
TORCH_BASES = [c for c in classes_in(torch.optim, Optimizer) if c.__name__ not in REFUSED]
# The base sees preconditioned gradients, anew in every step.
AS_THE_BASE = EVERY_STEP
FAMILY = [
    (KFACSGD, torch.optim.SGD),
    (KFACAdam, torch.optim.Adam),
    (KFACLAMB, LAMB),
]


class Descent(Optimizer):
    """Plain gradient descent, without an argument of the name ``differentiable``."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"])


class LARS(Optimizer):
    """Layer-wise adaptive rates (You et al., 2017), as a user would write them."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=1e-4, trust=0.02):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["buffer"] = torch.zeros_like(p)
                decayed = p.grad + group["weight_decay"] * p
                rate = group["trust"] * p.norm() / (decayed.norm() + 1e-12)
                state["buffer"].mul_(group["momentum"]).add_(decayed * rate)
                p.sub_(group["lr"] * state["buffer"])
        return loss


BASES = [*TORCH_BASES, LAMB, LARS]


class ByHand:
    """The base optimizer on its own copy, fed with preconditioned gradients from a probe."""

    def __init__(self, base: type, model: nn.Module, *args: Any, **kwargs: Any):
        self.model = copy.deepcopy(model)
        self.opt = base(self.model.parameters(), *args, **kwargs)
        self.probe = Probe(model, [name for name, _ in model.named_parameters()])

    def step(self, i: int, sign: float = 1.0) -> None:
        scale = (lambda loss: -loss) if sign < 0 else None
        v = self.probe.step(self.model, i, scale)
        for name, p in self.model.named_parameters():
            p.grad = v[name].clone()
        self.opt.step()


def both(base: type, *args: Any, **kwargs: Any) -> tuple[nn.Module, Any, ByHand]:
    """A K-FAC optimizer on a model, and its base by hand on an equal one."""
    model = network()
    hand = ByHand(base, model, *args, **kwargs)
    return model, with_kfac(base)(model, *args, **AS_THE_BASE, **kwargs), hand


def dynamic(*args: Any, **kwargs: Any) -> Any:
    return with_kfac(torch.optim.RAdam)(*args, **kwargs)


def over_lars(*args: Any, **kwargs: Any) -> Any:
    return with_kfac(LARS)(*args, **kwargs)


def gradients(i: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(500 + i)
    shapes = {name: p.shape for name, p in network().named_parameters()}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def give(model: nn.Module, opt: Any, i: int) -> dict[str, Tensor]:
    """Step on gradients that are set by hand, beside the statistics of a batch."""
    opt.zero_grad()
    backward(model, i)
    made = gradients(i)
    for name, p in model.named_parameters():
        p.grad = made[name].clone()
    opt.step()
    return made


def by_name(opt: Any, model: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: opt.state[p] for name, p in model.named_parameters()}
