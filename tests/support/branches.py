"""A model of two branches, and what tests of its statistics share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.watch import normal


class Branches(nn.Module):
    """One of two layers, then a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor, way: str) -> Tensor:
        return self.head(torch.tanh((self.a if way == "a" else self.b)(x)))


def backward(model: nn.Module, i: int, way: str, parts: int = 1) -> None:
    out = model(normal(8, 6, seed=i), way)
    ((out - normal(8, 3, seed=100 + i)).square().mean() / parts).backward()


def gathering(opt: Any) -> set[str]:
    return {layer.name for layer in opt.preconditioner.capture.wanted}


def output_factor(opt: Any, name: str) -> Tensor:
    return opt.preconditioner.factors(name)[1].squeeze(0)
