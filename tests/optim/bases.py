"""Bases that K-FAC is put over, steps on gradients that are made by hand, and runs to compare."""

from __future__ import annotations

import abc
import pickle
from typing import Any

import torch
from torch import Tensor, nn, optim

from kaisa_optim import LAMB, with_kfac
from tests.support.training import METHODS, assert_same, backward, classes_in, network, train

# Bases that K-FAC does not go over, and what their errors advise.
REFUSED = {"LBFGS": "", "SparseAdam": "", "Muon": "use KFACAdam"}


class Descent(optim.Optimizer):
    """Plain gradient descent, without an argument of the name ``differentiable``."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.move(p, group)

    def move(self, p, group):
        p.sub_(p.grad, alpha=group["lr"])


class LARS(Descent):
    """Layer-wise adaptive rates (You et al., 2017), as a user would write them."""

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=1e-4, trust=0.02):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        optim.Optimizer.__init__(self, params, defaults)

    def move(self, p, group):
        state = self.state[p]
        if len(state) == 0:
            state["buffer"] = torch.zeros_like(p)
        decayed = p.grad + group["weight_decay"] * p
        rate = group["trust"] * p.norm() / (decayed.norm() + 1e-12)
        state["buffer"].mul_(group["momentum"]).add_(decayed * rate)
        p.sub_(group["lr"] * state["buffer"])


class FindsItsRate(Descent):
    """A rate of its own in each step, as transformers' Adafactor has at its defaults."""

    def __init__(self, params, lr=None, weight_decay=0.0):
        optim.Optimizer.__init__(self, params, {"lr": lr, "weight_decay": weight_decay})

    def move(self, p, group):
        size = p.square().mean().sqrt().clamp(min=1e-3)
        p.sub_(p.grad / p.grad.square().mean().sqrt() * size * 0.01)


class AbstractFirst(abc.ABC, Descent):
    """A base as those of pytorch_optimizer."""


class AbstractLast(optim.SGD, abc.ABC):
    """A subclass of torch's SGD."""


ABSTRACT = [AbstractFirst, AbstractLast]
TORCH_BASES = [c for c in classes_in(optim, optim.Optimizer) if c.__name__ not in REFUSED]
BASES = [*TORCH_BASES, LAMB, LARS]
# Each base with a rate at which it learns the task.
CASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (optim.Adam, {"lr": 0.03}),
    "amsgrad": (optim.Adam, {"lr": 0.03, "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.03, "weight_decay": 0.0}),
    "LAMB": (LAMB, {"lr": 0.03, "weight_decay": 0.0}),
    "RAdam": (optim.RAdam, {"lr": 0.03}),
    "NAdam": (optim.NAdam, {"lr": 0.03}),
    "Adamax": (optim.Adamax, {"lr": 0.03}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01}),
    "RMSprop with momentum": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Adadelta": (optim.Adadelta, {"lr": 3.0}),
    "Adafactor": (optim.Adafactor, {"lr": 0.3, "weight_decay": 0.0}),
    "ASGD": (optim.ASGD, {"lr": 0.1}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
    "LARS": (LARS, {"lr": 0.5, "weight_decay": 0.0}),
}


def built(base: str, model: nn.Module, method: str = "polar", **changed: Any) -> Any:
    cls, settings = CASES[base]
    return with_kfac(cls)(model, **{**settings, **METHODS[method], **changed})


def plain(base: str, model: nn.Module, **changed: Any) -> Any:
    cls, settings = CASES[base]
    return cls(model.parameters(), **{**settings, **changed})


def give(model: nn.Module, opt: Any, i: int) -> dict[str, Tensor]:
    """Step on gradients that are made by hand, beside the statistics of a batch."""
    opt.zero_grad()
    backward(model, i)
    generator = torch.Generator().manual_seed(500 + i)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    opt.step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def entries(opt: Any, model: nn.Module) -> dict[str, dict[str, Any]]:
    """The base's own part of each parameter's entry."""
    return {
        name: {k: v for k, v in opt.state.get(p, {}).items() if not k.startswith("kfac")}
        for name, p in model.named_parameters()
    }


def matrix(parts: dict[str, Tensor], layer: str) -> Tensor:
    """A layer's weight with its bias as the last column."""
    return torch.cat([parts[f"{layer}.weight"], parts[f"{layer}.bias"][:, None]], 1)


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def name_of(thing: Any) -> str:
    return getattr(thing, "__name__", str(thing))


def pair(cls: Any, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Any:
    model = network(seed, dtype)
    return model, cls(model, **options)


def assert_equal_runs(steps: Any, *pairs: Any) -> None:
    """Train models with their optimizers; all end with the first one's weights, bit for bit."""
    for model, opt in pairs:
        train(model, opt, steps)
    for model, _ in pairs[1:]:
        assert_same(model, pairs[0][0])
