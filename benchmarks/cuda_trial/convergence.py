"""Loss and accuracy against seconds on the card, at learning rates that were searched on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import data as sets
from benchmarks.convergence.contestants import CONTESTANTS
from benchmarks.convergence.search import train
from benchmarks.convergence.tasks import TASKS, Pairs
from benchmarks.networks import CifarResNet

from .settings import Settings

BATCH = 256
EPOCHS = 10
# Of ResNet-8 at this batch on CPUs (benchmarks/results): the best of six trials each, and of the
# defaults the best of few rates.
RATES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.064, "momentum": 0.99},
    "AdamW": {"lr": 0.0028, "beta1": 0.9, "beta2": 0.999},
    "Muon": {"lr": 0.046, "momentum": 0.9, "lr_rest": 0.021},
    "KFACSGD, defaults": {"lr": 0.1},
    "KFACAdam, defaults": {"lr": 0.03},
    "KFACAdam, defaults, bfloat16": {"lr": 0.03, "inv_dtype": torch.bfloat16},
    "SOAP": {"lr": 0.0094, "beta1": 0.9, "beta2": 0.999, "frequency": 5},
    "KFACSGD, eigen, defaults": {"lr": 0.021},
}
TINY = ("SGD", "KFACAdam, defaults, bfloat16")


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    (images, labels), test = _data(settings)
    epoch = len(images) // BATCH
    task = replace(
        TASKS["resnet8-256"],
        name="resnet20",
        network=lambda: CifarResNet(8 if settings.rehearse else 20),
        every=1 if settings.rehearse else epoch,
    )
    parts = (images, labels), (images[:1000], labels[:1000]), test
    steps = 1 if settings.rehearse else EPOCHS * epoch
    yield {"images": len(images), "drawn at random": settings.data is None, "steps": steps}
    # Kernels are chosen and loaded before anybody is timed.
    some = RATES if not settings.rehearse else {name: RATES[name] for name in TINY}
    train(task, parts, CONTESTANTS["SGD"], RATES["SGD"], 1, min(steps, 20), settings.device)
    for name, rates in some.items():
        contestant = CONTESTANTS[name.removesuffix(", bfloat16")]
        if contestant.absent:
            continue
        found = train(task, parts, contestant, rates, 0, steps, settings.device)
        yield {
            "optimizer": name,
            "seconds": found.seconds,
            "loss": found.loss,
            "accuracy": found.curve[-1][3],
            "curve": [" ".join(f"{value:.4g}" for value in point) for point in found.curve[1:]],
        }


def _data(settings: Settings) -> tuple[Pairs, Pairs]:
    """All on the device; noise of the same shape where there is no folder."""
    if settings.data is not None:
        count = len(list(settings.data.glob("**/data_batch_*")))
        train_, test = sets.cifar10(settings.data, batches=count)
    else:
        count = BATCH if settings.rehearse else 20_000
        pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
        train_ = pixels, torch.randint(10, (count,))
        test = pixels[:1000], train_[1][:1000]

    def there(pair: tuple[Tensor, Tensor]) -> Pairs:
        return pair[0].to(settings.device), pair[1].to(settings.device)

    return there(train_), there(test)
