"""The papers' protocol: ResNet-32 on CIFAR-10, epochs to 92.49 % of the test images.

    python -m benchmarks.convergence.paper --data FOLDER [--device cuda] [--only ROW ...]
        [--seed N] [--out FOLDER] [--short]
    torchrun --standalone --nproc-per-node N -m benchmarks.convergence.paper ...

128 images a rank, lr 0.1 × ranks after a warm-up of five epochs, momentum 0.9, weight decay 5e-4.
SGD trains 200 epochs, with a tenth of the lr from 100 on and a hundredth from 150 on; K-FAC trains
100 epochs, with steps at 35, 75 and 90 (Pauloski et al., SC '20 and SC '21). KFACSGD has a row at
its defaults, 10/20, and one for each of the papers' two pairs of intervals; then come rows with the
papers' own method, scaling and settings.
Each epoch ends with a checkpoint in FOLDER, from which a run that was broken off goes on. Seconds
on CPUs are of CPU time, without waiting for other ranks. --short: eight layers, a fiftieth of the
images and of the epochs, to try it out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import data as sets
from benchmarks.machine import describe
from benchmarks.networks import CifarResNet
from kaisa_optim import KFACSGD
from kaisa_optim.optim.mixin import KFACMixin

from .search import now
from .tasks import Pairs, augmented, epochs, normalized, right

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCH = 128  # of a rank
TARGET = 0.9249
WARMUP = 5.0  # epochs
SHORT = 50  # this part of the epochs and the images


@dataclass(frozen=True)
class Row:
    epochs: int
    decays: tuple[int, ...]
    kfac: dict[str, Any] | None  # None: plain SGD

    def build(self, model: nn.Module, lr: float) -> Optimizer:
        options: dict[str, Any] = {"lr": lr, "momentum": 0.9, "weight_decay": 5e-4}
        if self.kfac is None:
            return torch.optim.SGD(model.parameters(), **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the base optimizer updates these")
            return KFACSGD(model, **options, **self.kfac)

    def rate(self, epoch: float, world: int, part: int) -> float:
        """Over the peak: from one rank's rate up to all ranks' together, then down in tenths."""
        warm = min(1.0, epoch * part / WARMUP)
        return (1 + (world - 1) * warm) / world * 0.1 ** sum(epoch * part >= d for d in self.decays)


def _kfac(factors: int, bases: int, **options: Any) -> Row:
    intervals = {"factor_update_steps": factors, "inv_update_steps": bases}
    return Row(100, (35, 75, 90), {**intervals, **options})


_PAPERS: dict[str, Any] = {
    **{"compute_method": "eigen", "normalization": "kaisa"},
    **{"damping": 0.003, "kl_clip": 0.001},
}
ROWS = {
    "SGD": Row(200, (100, 150), None),
    "KFACSGD, 10/20": _kfac(10, 20),
    "KFACSGD, 1/10": _kfac(1, 10),
    "KFACSGD, 10/100": _kfac(10, 100),
    "KFACSGD, papers', 1/10": _kfac(1, 10, **_PAPERS),
    "KFACSGD, papers', 10/100": _kfac(10, 100, **_PAPERS),
}


@dataclass
class Place:
    rank: int
    world: int
    device: str

    @classmethod
    def join(cls, device: str) -> Place:
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if world > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        return cls(rank, world, device)


Point = tuple[int, float, float, float]  # epoch, seconds, training loss, test accuracy


def train(
    row: Row, data: tuple[Pairs, Pairs], place: Place, seed: int, part: int, kept: Path
) -> list[Point]:
    """All epochs that ``kept`` does not have yet."""
    (images, labels), test = data
    torch.manual_seed(seed)
    model = CifarResNet(32 if part == 1 else 8).to(place.device)
    optimizer = row.build(model, 0.1 * place.world)
    passed = DistributedDataParallel(model) if place.world > 1 else model
    batch = BATCH * place.world
    steps = len(images) // batch
    schedule = LambdaLR(optimizer, lambda step: row.rate(step / steps, place.world, part))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    curve: list[Point] = []
    if kept.exists():
        state = torch.load(kept, weights_only=True, map_location=place.device)
        curve = state.pop("curve")
        for name, value in state.items():
            parts[name].load_state_dict(value)
    for epoch in range(len(curve), max(1, row.epochs // part)):
        # Ranks share the order and have their own augmentation; both follow from the epoch.
        order = epochs(len(images), batch, torch.Generator().manual_seed(1000 * seed + epoch))
        own = torch.Generator().manual_seed(1000 * (seed + 1 + place.rank) + epoch)
        total, start = torch.zeros((), device=place.device), now(place.device)
        for _ in range(steps):
            picked = next(order)[place.rank :: place.world]
            x = normalized(augmented(images[picked], own)).to(place.device)
            optimizer.zero_grad()
            loss = F.cross_entropy(passed(x), labels[picked].to(place.device))
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        seconds = now(place.device) - start + (curve[-1][1] if curve else 0.0)
        curve.append((epoch + 1, seconds, (total / steps).item(), accuracy(model, test, place)))
        _keep(kept, parts, curve, place)
    return curve


def _keep(path: Path, parts: dict[str, Any], curve: list[Point], place: Place) -> None:
    if isinstance(parts["optimizer"], KFACMixin):
        parts["optimizer"].consolidate_state_dict(to=0)
    if place.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".part")
        torch.save({n: part.state_dict() for n, part in parts.items()} | {"curve": curve}, written)
        written.replace(path)
    if place.world > 1:
        dist.barrier()  # nobody looks for a file that is still being written


def accuracy(model: nn.Module, test: Pairs, place: Place) -> float:
    """Of all test images, shared by the ranks; with the first one's averages in the batch norms."""
    if place.world > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
    model.eval()
    correct = torch.zeros((), device=place.device)
    images, labels = (part[place.rank :: place.world] for part in test)
    with torch.no_grad():
        for x, y in zip(images.split(500), labels.split(500), strict=True):
            out = model(normalized(x).to(place.device))
            correct += len(y) * right(out, y.to(place.device))
    model.train()
    if place.world > 1:
        dist.all_reduce(correct)
    return correct.item() / len(test[0])


def reaches(curve: Sequence[Point], target: float) -> tuple[int, float] | None:
    """The first epoch that ends at the target or above, and its seconds."""
    return next(((epoch, s) for epoch, s, _, found in curve if found >= target), None)


def table(found: dict[str, list[Point]], target: float) -> list[str]:
    lines = [f"{'':26} {'epochs':>7} {'seconds':>8} {'best':>7} {'last':>7}  to {target:.2%}"]
    for name, curve in found.items():
        epoch, seconds = reaches(curve, target) or ("-", None)
        spent = "-" if seconds is None else f"{seconds:.0f}"
        best = max(point[3] for point in curve)
        lines.append(f"{name:26} {epoch!s:>7} {spent:>8} {best:7.2%} {curve[-1][3]:7.2%}")
    return lines


def plot(found: dict[str, list[Point]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for name, curve in found.items():
        for axis, column in zip(axes, (0, 1), strict=True):
            axis.plot([p[column] for p in curve], [p[3] for p in curve], label=name)
    for axis, text in zip(axes, ("epochs", "seconds"), strict=True):
        axis.axhline(TARGET, color="0.7", lw=0.8)
        axis.set(xlabel=text)
    axes[0].set_ylabel("accuracy on test images")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def shortened(data: tuple[Pairs, Pairs], part: int) -> tuple[Pairs, Pairs]:
    def some(group: Pairs) -> tuple[Tensor, Tensor]:
        count = len(group[0]) // part
        return group[0][:count], group[1][:count]

    return some(data[0]), some(data[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args(arguments)
    place = Place.join(options.device)
    part = SHORT if options.short else 1
    data = shortened(sets.cifar10(options.data), part)
    name = f"paper_{options.device}_{place.world}_seed{options.seed}" + "_short" * options.short
    found, began = {}, time.perf_counter()
    for row in options.only:
        kept = options.out / name / f"{list(ROWS).index(row)}.pt"
        found[row] = train(ROWS[row], data, place, options.seed, part, kept)
        if place.rank == 0:
            print(f"{row}: {time.perf_counter() - began:.0f} s so far", flush=True)
    if place.rank == 0:
        print("\n".join(table(found, TARGET)))
        record = {"machine": describe(options.device), "ranks": place.world, "target": TARGET}
        record |= {"epoch, seconds, loss, accuracy": found}
        (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        plot(found, options.out / f"{name}.png")
        print(f"saved as {options.out / name}.json and .png")
    if place.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
