"""What is trained: data, network, loss, horizon, and how the loss is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks import Autoencoder, Transformer

Batch = tuple[Tensor, Tensor]  # inputs and what they are compared with


@dataclass(frozen=True)
class Task:
    """One thing to train; ``load`` gives the data to train on and to measure on."""

    name: str
    about: str
    network: Callable[[], nn.Module]
    load: Callable[[Path | None], tuple[Tensor, Tensor]]
    batch: Callable[[Tensor, torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    measured: Callable[[Tensor], Iterator[Batch]]
    steps: int  # the horizon
    every: int  # steps between two measurements
    kfac: dict[str, Any]  # what K-FAC has to know of the loss

    def measure(self, model: nn.Module, data: Tensor) -> float:
        model.eval()
        with torch.no_grad():
            parts = [(self.loss(model(x), y).item(), len(x)) for x, y in self.measured(data)]
        model.train()
        return sum(loss * n for loss, n in parts) / sum(n for _, n in parts)


def _squares(out: Tensor, target: Tensor) -> Tensor:
    """Half the squared error of an example, averaged over examples."""
    return (out - target).square().sum(1).mean() / 2


def _whole(data: Tensor) -> Iterator[Batch]:
    yield data, data


def _images(size: int | None) -> Callable[[Tensor, torch.Generator], Batch]:
    def draw(data: Tensor, generator: torch.Generator) -> Batch:
        if size is None:
            return data, data
        picked = data[torch.randint(len(data), (size,), generator=generator)]
        return picked, picked

    return draw


def _digits(folder: Path | None) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    return data, data


def _autoencoder(name: str, size: int | None, steps: int) -> Task:
    return Task(
        name,
        f"digits autoencoder 64-128-64-32-8, tanh, {'full batch' if size is None else size}",
        lambda: Autoencoder((64, 128, 64, 32, 8)),
        _digits,
        _images(size),
        _squares,
        _whole,
        steps,
        10,
        {},
    )


_LENGTH = 64


def _text(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Characters of ``shakespeare.txt``; the last tenth is measured on."""
    if folder is None:
        raise FileNotFoundError("this task needs --data, a folder with shakespeare.txt")
    raw = (folder / "shakespeare.txt").read_bytes()
    known = sorted(set(raw))
    codes = torch.tensor([known.index(c) for c in range(256) if c in known])
    table = torch.zeros(256, dtype=torch.long)
    table[torch.tensor(known)] = codes
    data = table[torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()]
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def _passages(data: Tensor, generator: torch.Generator) -> Batch:
    starts = torch.randint(len(data) - _LENGTH, (32,), generator=generator)
    rows = data[starts[:, None] + torch.arange(_LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


def _some_passages(data: Tensor) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        yield _passages(data, generator)


def _characters(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


TASKS = {
    task.name: task
    for task in (
        _autoencoder("digits-full", None, 2000),
        _autoencoder("digits-256", 256, 2000),
        Task(
            "characters",
            "GPT of 4 layers, d = 128, on Shakespeare's characters, 32 passages of 64",
            lambda: Transformer(65, _LENGTH, 128, 4, 4, 512),
            _text,
            _passages,
            _characters,
            _some_passages,
            600,
            10,
            {"loss_terms": "positions"},
        ),
    )
}
