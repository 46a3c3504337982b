"""What is trained: networks with their batches, losses and intervals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks import Bert, CifarResNet, ResNet, Transformer

DEFAULT = (10, 100)  # steps between a layer's statistics, and between its refreshes; as in papers
OFTEN = (1, 10)  # the papers' other pair
LENGTH = 128  # tokens of a sequence


@dataclass(frozen=True)
class Task:
    """A network, its batches, and the intervals to measure."""

    title: str
    network: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    options: dict[str, Any]  # that the papers' methods need for this loss
    intervals: tuple[tuple[int, int], ...] = (DEFAULT, OFTEN)
    passes: int = 1  # micro-batches of a step
    half: torch.dtype | None = None  # under autocast to it
    peers: bool = True  # whether these are measured too
    # The ratios to the base that are to be reached, by contestant and intervals.
    wanted: dict[tuple[str, tuple[int, int]], float] = field(default_factory=dict)


def images(batch: int, size: int = 224, classes: int = 1000) -> tuple[Tensor, Tensor]:
    """Noise: what it costs, whatever is learned."""
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


# Where refreshes are measured, factors have to move as those of real data do.


def digits(batch: int) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, as large as CIFAR-10's images."""
    pixels, labels = _digits()
    picked = torch.randint(len(labels), (batch,))
    images = F.interpolate(pixels[picked], size=32, mode="bilinear")
    return images.expand(-1, 3, -1, -1).contiguous(), labels[picked]


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32)[:, None]
    return (pixels - pixels.mean()) / pixels.std(), torch.tensor(found.target)


def text(batch: int) -> tuple[Tensor, Tensor]:
    """Passages of the source of torch.nn.functional, and what follows each character."""
    characters = _characters()
    starts = torch.randint(len(characters) - LENGTH, (batch, 1))
    passages = characters[starts + torch.arange(LENGTH + 1)]
    return passages[:, :-1], passages[:, 1:]


@functools.cache
def _characters() -> Tensor:
    """Printable ones as 0 to 94, all others as 95."""
    source = Path(F.__file__).read_bytes()
    codes = torch.frombuffer(bytearray(source), dtype=torch.uint8).long() - 32
    return torch.where((codes < 0) | (codes > 94), 95, codes)


def masked(batch: int, vocabulary: int = 30522) -> tuple[Tensor, Tensor]:
    words = torch.randint(vocabulary, (batch, LENGTH))
    return words, words[:, :: Bert.EVERY].clone()


def _bert(
    title: str, network: Callable[[], nn.Module], batch: int, passes: int, **rest: Any
) -> Task:
    terms = batch * len(range(0, LENGTH, Bert.EVERY))
    return Task(
        title,
        network,
        lambda: masked(batch),
        {"loss_terms": passes * terms},
        passes=passes,
        half=torch.bfloat16,
        peers=False,
        **rest,
    )


TASKS = {
    "resnet32": Task(
        "ResNet-32",
        CifarResNet,
        lambda: digits(128),
        {},
        wanted={("KFACSGD", DEFAULT): 1.15, ("KFACSGD", OFTEN): 2.0},
    ),
    "transformer": Task(
        "transformer",
        Transformer,
        lambda: text(16),
        {"loss_terms": "positions"},
        wanted={
            ("KFACSGD", DEFAULT): 1.45,
            ("KFACSGD", OFTEN): 2.0,
            ("KFACSGD, inverse", DEFAULT): 1.25,
            ("KFACSGD, bfloat16", DEFAULT): 1.25,
        },
    ),
    "resnet50": Task(
        "ResNet-50",
        ResNet,
        lambda: images(128),
        {},
        (DEFAULT,),
        half=torch.bfloat16,
        peers=False,
        wanted={("KFACSGD", DEFAULT): 1.25},
    ),
    # 65,536 tokens a step.
    "bert-large": _bert(
        "BERT-Large",
        Bert,
        batch=64,
        passes=8,
        intervals=(DEFAULT,),
        wanted={("KFACSGD", DEFAULT): 1.2},
    ),
}
SHORT = {
    "resnet32": Task("ResNet-8", lambda: CifarResNet(8), lambda: digits(16), {}, ((2, 4),)),
    "transformer": Task(
        "one-layer transformer",
        lambda: Transformer(width=64, layers=1, wide=128),
        lambda: text(2),
        {"loss_terms": "positions"},
        ((2, 4),),
    ),
    "resnet50": Task(
        "ResNet with one bottleneck",
        lambda: ResNet((1,)),
        lambda: images(2, 64),
        {},
        ((2, 4),),
        half=torch.bfloat16,
        peers=False,
    ),
    "bert-large": _bert(
        "one-layer BERT", lambda: Bert(width=64, layers=1), batch=2, passes=2, intervals=((2, 4),)
    ),
}
# What each kind of device trains where nothing else is asked for.
FITTING = {"cpu": ("resnet32", "transformer"), "cuda": ("resnet50", "bert-large")}


def tasks(short: bool) -> dict[str, Task]:
    return SHORT if short else TASKS


def shown(intervals: tuple[int, int]) -> str:
    return "{}/{}".format(*intervals)
