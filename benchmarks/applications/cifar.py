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
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import data as sets
from benchmarks.convergence.tasks import Pairs, augmented, normalized
from benchmarks.networks import CifarResNet

from .arguments import Defaults, has_kfac, parse
from .common import Job, Order, Ranks, papers_rate, run, seeded, warm_cosine

DEFAULTS: Defaults = {
    "all": {"lr": 0.1, "batch": 128, "epochs": 3, "every": 130},
    "SGD": {"momentum": 0.9, "weight_decay": 5e-4},
    "KFACSGD": {"momentum": 0.9, "weight_decay": 5e-4},
    "AdamW": {"lr": 0.003, "weight_decay": 0.05},
    "KFACAdam": {"lr": 0.03},
}
_KAISA = {
    **{"compute_method": "eigen", "normalization": "kaisa", "damping": 0.003, "kl_clip": 0.001},
    **{"factor_update_steps": 1, "inv_update_steps": 10},
}
PRESETS: dict[str, Defaults] = {
    "paper": {
        "SGD": {"epochs": 200},
        "KFACSGD": {"epochs": 100, **_KAISA},
    },
    "paper-polar": {"SGD": {"epochs": 200}, "KFACSGD": {"epochs": 100}},
}
SMOKE: Defaults = {
    "all": {"depth": 8, "batch": 16, "steps": 6, "every": 3, "save_every": 3},
}
DECAYS = {False: (100, 150), True: (35, 75, 90)}  # epochs; True: with K-FAC


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 layers: 20, 32, 34, 56, 110")


def generated(count: int) -> Pairs:
    """Noise around one colour a class."""
    labels = torch.randint(10, (count,), generator=seeded(1))
    noise = torch.randint(156, (count, 3, 32, 32), generator=seeded(2))
    colours = torch.randint(100, (10, 3, 1, 1), generator=seeded(3))
    return (noise + colours[labels]).byte(), labels


def accuracy(model: nn.Module, test: Pairs, ranks: Ranks) -> dict[str, float]:
    mine = torch.tensor(ranks.share(len(test[0])))
    loss, right = 0.0, 0.0
    for places in mine.split(500):
        images, labels = (part[places].to(ranks.device) for part in test)
        out = model(normalized(images))
        loss += F.cross_entropy(out, labels, reduction="sum").item()
        right += (out.argmax(1) == labels).sum().item()
    loss, right, count = ranks.sum(loss, right, len(mine))
    return {"loss": loss / count, "accuracy": right / count}


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

    rate = warm_cosine(order.steps)
    if options.preset is not None:
        options.settings["lr"] *= ranks.world
        per_epoch = len(train[0]) // order.batch // options.accumulate
        rate = papers_rate(ranks.world, per_epoch, DECAYS[has_kfac(options.optimizer)])
    return Job(
        model,
        order.steps,
        rate,
        batches,
        lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]),
        lambda net: accuracy(net, test, ranks),
    )


def main(given: Sequence[str] | None = None) -> list[dict[str, float]]:
    options = parse(__doc__, given, DEFAULTS, PRESETS, SMOKE, arguments)
    ranks = Ranks.join(options.device)
    return run(job(options, ranks), options, ranks)


if __name__ == "__main__":
    main()
