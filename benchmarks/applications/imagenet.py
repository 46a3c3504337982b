"""ResNet-50, 101 and 152 on ImageNet, with the accuracy on the validation images.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.applications.imagenet --data FOLDER
        --optimizer KFACSGD --preset paper --amp fp16

FOLDER has ``train`` and ``val``, each with a folder of images for each class, or with webdataset's
shards (``*.tar``). The loss has label smoothing 0.1. ``--preset paper``: 32 images a rank, lr
0.0125 × ranks after a warm-up of five epochs; K-FAC trains 55 epochs with steps at 25, 35, 40, 45
and 50, factors every 10 steps and inverses every 100; SGD trains 90 with steps at 30, 60 and 80
(Pauloski et al., SC '20 and SC '21).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from .arguments import Defaults, kaisa
from .common import Job, Order, Ranks, accuracy, by_preset, entry, seeded
from .shards import Shards
from .vision import torchvision

DEFAULTS: Defaults = {
    "all": {"batch": 32, "epochs": 55, "every": 5000, "save_every": 1000, "lr": 0.0125},
    "SGD": {"momentum": 0.9, "weight_decay": 5e-5},
    "KFACSGD": {"momentum": 0.9, "weight_decay": 5e-5},
    "KFACAdam": {"lr": 0.01},
}
PRESETS: dict[str, Defaults] = {
    "paper": {"SGD": {"epochs": 90}, "KFACSGD": kaisa(0.001, 10, 100)},
}
SMOKE: Defaults = {
    "all": {"network": "resnet18", "size": 32, "batch": 4, "steps": 2, "every": 2, "save_every": 2},
    "KFAC": {"max_factor_size": 300},
}
DECAYS = {False: (30, 60, 80), True: (25, 35, 40, 45, 50)}  # epochs; True: with K-FAC
SMOOTHING = 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    networks = ("resnet18", "resnet50", "resnet101", "resnet152")
    parser.add_argument("--network", choices=networks, default="resnet50")
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")


class Generated(Dataset[tuple[Tensor, int]]):
    """Noise, brighter by class."""

    classes = tuple("abcd")

    def __init__(self, count: int) -> None:
        self.images = torch.randint(60, (count, 3, 40, 40), generator=seeded(1)).byte()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return self.images[place] + 40 * (place % 4), place % 4


class Views(Dataset[tuple[Tensor, int]]):
    """Transformed images; a view's random numbers depend on its key alone, so also after a restart.

    A key is a number and a place in the data set.
    """

    def __init__(self, data: Any, transform: Any, seed: int) -> None:
        self.data, self.transform, self.seed = data, transform, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        image, label = self.data[key[1]]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=seeded(self.seed, *key))))
            return self.transform(image), label


def loaded(options: argparse.Namespace) -> tuple[Any, Any]:
    if options.smoke:
        return Generated(32), Generated(10)
    if options.data is None:
        raise SystemExit("--data: a folder with train and val is needed")
    return images(options.data / "train"), images(options.data / "val")


def images(folder: Path) -> Any:
    """Return the images of a folder of shards, or of a folder with one for each class."""
    shards = any(folder.glob("*.tar"))
    return Shards(folder) if shards else torchvision.datasets.ImageFolder(str(folder))


def transforms(size: int) -> tuple[Any, Any]:
    from torchvision.transforms import v2  # after .vision has made it importable

    ends = (
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    )
    random = (v2.ToImage(), v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *ends)
    centre = (v2.ToImage(), v2.Resize(size * 8 // 7), v2.CenterCrop(size), *ends)
    return v2.Compose(random), v2.Compose(centre)


def job(options: argparse.Namespace, ranks: Ranks) -> Job:
    train, held = loaded(options)
    random, centre = transforms(options.size)
    torch.manual_seed(options.seed)
    model = torchvision.models.get_model(options.network, num_classes=len(train.classes))
    order = Order(len(train), ranks, options)
    more: dict[str, Any] = {"num_workers": options.workers, "pin_memory": ranks.device == "cuda"}

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        keys = ([(number, p) for p in places.tolist()] for number, places in order(step))
        views = Views(train, random, options.seed)
        for images, labels in DataLoader(views, batch_sampler=keys, **more):
            yield tuple(t.to(ranks.device, non_blocking=True) for t in (images, labels))

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], label_smoothing=SMOOTHING)

    def evaluate(net: nn.Module) -> dict[str, float]:
        mine = [(0, place) for place in ranks.share(len(held))]
        parts = [mine[i : i + 100] for i in range(0, len(mine), 100)]
        batches = DataLoader(Views(held, centre, 0), batch_sampler=parts, **more)
        return accuracy(net, batches, ranks)

    return Job(
        model, order.steps, by_preset(options, ranks, order, DECAYS), batches, loss, evaluate
    )


main = entry(__doc__, job, DEFAULTS, PRESETS, SMOKE, arguments)

if __name__ == "__main__":
    main()
