"""ResNet-20 to ResNet-110 on CIFAR-10, with the accuracy on the test images.

    python -m benchmarks.applications.cifar --data FOLDER [--depth 20] [--optimizer KFACSGD]
    torchrun --standalone --nproc-per-node 4 -m benchmarks.applications.cifar --preset paper ...

FOLDER has CIFAR-10's binary version or the one for Python. ``--preset paper``: 128 images a rank,
lr 0.1 × ranks after a warm-up of five epochs; SGD trains 200 epochs with steps at 100 and 150,
K-FAC trains 100 with steps at 35, 75 and 90, factors every step and inverses every ten (Pauloski et
al., SC '20). ``--preset paper-polar``: the same protocol with this package's own method at its
defaults. Without a preset the rate falls along a cosine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import data as sets
from benchmarks.convergence.tasks import Pairs, augmented, normalized
from benchmarks.networks import CifarResNet

from .arguments import Defaults, kaisa
from .common import Job, Order, Ranks, accuracy, by_preset, entry, seeded

DEFAULTS: Defaults = {
    "all": {"lr": 0.1, "batch": 128, "epochs": 3, "every": 130},
    "SGD": {"momentum": 0.9, "weight_decay": 5e-4},
    "KFACSGD": {"momentum": 0.9, "weight_decay": 5e-4},
    "AdamW": {"lr": 0.003, "weight_decay": 0.05},
    "KFACAdam": {"lr": 0.03},
}
PRESETS: dict[str, Defaults] = {
    "paper": {"SGD": {"epochs": 200}, "KFACSGD": {"epochs": 100, **kaisa(0.003, 1, 10)}},
    "paper-polar": {"SGD": {"epochs": 200}, "KFACSGD": {"epochs": 100}},
}
SMOKE: Defaults = {"all": {"depth": 8, "batch": 16, "steps": 6, "every": 3, "save_every": 3}}
DECAYS = {False: (100, 150), True: (35, 75, 90)}  # epochs; True: with K-FAC


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 layers: 20, 32, 34, 56, 110")


def generated(count: int) -> Pairs:
    """Noise around one colour a class."""
    labels = torch.randint(10, (count,), generator=seeded(1))
    noise = torch.randint(156, (count, 3, 32, 32), generator=seeded(2))
    colours = torch.randint(100, (10, 3, 1, 1), generator=seeded(3))
    return (noise + colours[labels]).byte(), labels


def job(options: argparse.Namespace, ranks: Ranks) -> Job:
    torch.manual_seed(options.seed)
    model = CifarResNet(options.depth)
    train, test = (generated(n) for n in (256, 100))
    if not options.smoke:
        train, test = sets.cifar10(options.data)
    order = Order(len(train[0]), ranks, options)

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number, places in order(step):
            own = seeded(options.seed, number, ranks.rank)
            images = normalized(augmented(train[0][places], own)).to(ranks.device)
            yield images, train[1][places].to(ranks.device)

    mine = torch.tensor(ranks.share(len(test[0]))).split(500)
    return Job(
        model,
        order.steps,
        by_preset(options, ranks, order, DECAYS),
        batches,
        lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]),
        lambda net: accuracy(net, ((normalized(test[0][p]), test[1][p]) for p in mine), ranks),
    )


main = entry(__doc__, job, DEFAULTS, PRESETS, SMOKE, arguments)

if __name__ == "__main__":
    main()
