"""Train a small convolutional network on scikit-learn's digits, with and without K-FAC.

    python -m benchmarks.demo [--short] [--epochs N] [--seeds N] [--target A] [--out PNG] ...

KFACSGD runs beside torch.optim.SGD, KFACAdam beside torch.optim.Adam. All see the same batches from
the same initial weights, with the same cosine schedule. Each optimizer's learning rate is picked
from one grid for it and its rival, by the loss on validation images with seed 0; what is reported
are fresh seeds on test images.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from kaisa_optim import KFACSGD, KFACAdam

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCH = 64
EVALUATE_EVERY = 5
# Picked by hand from about ten settings tried on these digits; the output says so.
KFAC: dict[str, Any] = {
    "damping": 0.03,
    "kl_clip": 0.01,
    "factor_update_steps": 5,
    "inv_update_steps": 20,
}
SGD_GRID = (0.01, 0.03, 0.1, 0.3)
ADAM_GRID = (0.001, 0.003, 0.01, 0.03)


@dataclass(frozen=True)
class Recipe:
    """An optimizer as it is trained here; rivals share a colour and a grid."""

    name: str
    build: Callable[[nn.Module, float], Optimizer]
    learning_rates: tuple[float, ...]
    color: str
    line: str


RECIPES = (
    Recipe(
        "SGD",
        lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9),
        SGD_GRID,
        "tab:blue",
        "--",
    ),
    Recipe(
        "KFACSGD",
        lambda model, lr: KFACSGD(model, lr, momentum=0.9, **KFAC),
        SGD_GRID,
        "tab:blue",
        "-",
    ),
    Recipe(
        "Adam",
        lambda model, lr: torch.optim.Adam(model.parameters(), lr),
        ADAM_GRID,
        "tab:orange",
        "--",
    ),
    Recipe(
        "KFACAdam",
        lambda model, lr: KFACAdam(model, lr, **KFAC),
        ADAM_GRID,
        "tab:orange",
        "-",
    ),
)


@dataclass(frozen=True)
class Split:
    images: Tensor  # [n, 1, 8, 8]
    labels: Tensor  # [n]


@dataclass(frozen=True)
class Digits:
    train: Split
    validation: Split
    test: Split

    @classmethod
    def load(cls, device: torch.device) -> Digits:
        """1,200 images to train on, 240 to choose with, 357 to report."""
        pixels, digits = load_digits(return_X_y=True)
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        images = (torch.tensor(pixels, dtype=torch.float32) / 16).view(-1, 1, 8, 8)[order]
        labels = torch.tensor(digits)[order]
        sizes = [1200, 240, len(digits) - 1440]
        parts = zip(images.to(device).split(sizes), labels.to(device).split(sizes), strict=True)
        return cls(*(Split(*part) for part in parts))

    def batches(self, seed: int, epoch: int) -> Iterator[Split]:
        """The epoch's full batches; the order depends on seed and epoch alone."""
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(len(self.train.labels), generator=generator)
        for indices in order.to(self.train.labels.device).split(BATCH):
            if len(indices) == BATCH:
                yield Split(self.train.images[indices], self.train.labels[indices])


@dataclass
class Curve:
    """What one training run measured, on the images that it was given to evaluate on."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # training alone, evaluations left out
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)

    def reaches(self, target: float) -> tuple[int, float] | None:
        """Steps and seconds at the first evaluation with at least this accuracy."""
        for step, seconds, accuracy in zip(self.steps, self.seconds, self.accuracy, strict=True):
            if accuracy >= target:
                return step, seconds
        return None


class Progress:
    """One line that is rewritten on a terminal; elsewhere one line a run."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self.run = 0
        self.live = sys.stdout.isatty()
        self.title = ""

    def start(self, title: str) -> None:
        self.run += 1
        self.title = f"[{self.run:2}/{self.runs}] {title}"

    def update(self, step: int, steps: int, loss: float, accuracy: float) -> None:
        text = f"{self.title}  step {step:4}/{steps}  loss {loss:.4f}  accuracy {accuracy:6.1%}"
        if self.live:
            print(f"\r{text:<98}", end="\n" if step == steps else "", flush=True)
        elif step == steps:
            print(text, flush=True)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Mean loss and accuracy."""
    outputs = model(split.images)
    hits = (outputs.argmax(dim=1) == split.labels).float().mean()
    return F.cross_entropy(outputs, split.labels).item(), hits.item()


def train(
    recipe: Recipe,
    lr: float,
    seed: int,
    epochs: int,
    data: Digits,
    held_out: Split,
    progress: Progress,
) -> Curve:
    device = data.train.images.device
    torch.manual_seed(seed)
    model = network().to(device)
    optimizer = recipe.build(model, lr)
    steps = epochs * (len(data.train.labels) // BATCH)
    schedule = CosineAnnealingLR(optimizer, T_max=steps)
    curve = Curve()
    spent, step, start = 0.0, 0, now(device)
    for epoch in range(epochs):
        for batch in data.batches(seed, epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % EVALUATE_EVERY == 0 or step == steps:
                spent += now(device) - start
                loss, accuracy = evaluate(model, held_out)
                curve.steps.append(step)
                curve.seconds.append(spent)
                curve.loss.append(loss)
                curve.accuracy.append(accuracy)
                progress.update(step, steps, loss, accuracy)
                start = now(device)
    return curve


@dataclass
class Result:
    recipe: Recipe
    lr: float
    curves: list[Curve] = field(default_factory=list)  # on the test images, one a seed


def compare(
    recipes: Sequence[Recipe], data: Digits, epochs: int, seeds: Sequence[int]
) -> list[Result]:
    """Pick each recipe's learning rate, then train it once a seed."""
    progress = Progress(sum(len(recipe.learning_rates) + len(seeds) for recipe in recipes))

    def final_loss(recipe: Recipe, lr: float) -> float:
        progress.start(f"{recipe.name:8} lr {lr:<5g} choosing")
        loss = train(recipe, lr, 0, epochs, data, data.validation, progress).loss[-1]
        return loss if loss == loss else float("inf")  # a diverged run is never the best

    results = []
    for recipe in recipes:
        losses = {lr: final_loss(recipe, lr) for lr in recipe.learning_rates}
        results.append(Result(recipe, min(losses, key=losses.__getitem__)))
    # Rivals take turns, so that a machine that slows down slows all of them.
    for seed in seeds:
        for result in results:
            recipe, lr = result.recipe, result.lr
            progress.start(f"{recipe.name:8} lr {lr:<5g} seed {seed}  ")
            result.curves.append(train(recipe, lr, seed, epochs, data, data.test, progress))
    return results


def table(results: Sequence[Result], target: float) -> str:
    """Means over the seeds; a target that only some seeds reach is not averaged."""
    lines = [
        f"{'':10}{'':>8}{f'to {target:.0%} accuracy':>21}{'':>10}{'at the end':>20}",
        f"{'':10}{'lr':>8}{'steps':>11}{'seconds':>10}{'ms/step':>10}{'loss':>10}{'accuracy':>10}",
    ]
    for result in results:
        curves = result.curves
        reached = [hit for curve in curves if (hit := curve.reaches(target))]
        if len(reached) == len(curves):
            steps = f"{statistics.mean(hit[0] for hit in reached):.0f}"
            seconds = f"{statistics.mean(hit[1] for hit in reached):.2f}"
        else:
            steps, seconds = f"{len(reached)} of {len(curves)}", "-"
        milliseconds = statistics.mean(1e3 * c.seconds[-1] / c.steps[-1] for c in curves)
        loss = statistics.mean(curve.loss[-1] for curve in curves)
        accuracy = statistics.mean(curve.accuracy[-1] for curve in curves)
        lines.append(
            f"{result.recipe.name:10}{result.lr:>8g}{steps:>11}{seconds:>10}{milliseconds:>10.1f}"
            f"{loss:>10.4f}{accuracy:>10.1%}"
        )
    return "\n".join(lines)


def plot(results: Sequence[Result], path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for result in results:
        recipe, curves = result.recipe, result.curves
        loss = [statistics.mean(values) for values in zip(*(c.loss for c in curves), strict=True)]
        seconds = [
            statistics.mean(values) for values in zip(*(c.seconds for c in curves), strict=True)
        ]
        for panel, x in zip(panels, (curves[0].steps, seconds), strict=True):
            panel.plot(
                x, loss, recipe.line, color=recipe.color, label=f"{recipe.name}, lr {result.lr:g}"
            )
    for panel, label in zip(panels, ("steps", "seconds of training"), strict=True):
        panel.set(xlabel=label, yscale="log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("test loss, mean over seeds")
    panels[0].legend()
    figure.suptitle("A small convolutional network on 8×8 digits")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="K-FAC beside its base optimizers on scikit-learn's digits.",
    )
    parser.add_argument("--epochs", type=positive, help="of 18 steps each (default 10; short 4)")
    parser.add_argument("--seeds", type=positive, help="runs to average (default 3; short 1)")
    parser.add_argument("--target", type=float, help="test accuracy to time (0.96; short 0.9)")
    parser.add_argument("--short", action="store_true", help="a look in seconds: SGD's pair only")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="where the plot goes")
    parser.add_argument("--device", type=torch.device, help="default: cuda if present, else cpu")
    options = parser.parse_args(arguments)
    defaults = (4, 1, 0.9) if options.short else (10, 3, 0.96)
    for name, value in zip(("epochs", "seeds", "target"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    # The tensors are small: one thread is as fast as many, and its timings are steadier.
    torch.set_num_threads(1)
    data = Digits.load(options.device)
    recipes = RECIPES[:2] if options.short else RECIPES
    print(
        f"A small convolutional network on {len(data.train.labels):,} digits, on {options.device}: "
        f"{options.epochs} epochs of {len(data.train.labels) // BATCH} batches of {BATCH}.\n"
        "First each optimizer's learning rate is chosen, on validation images with seed 0."
    )
    results = compare(recipes, data, options.epochs, range(1, options.seeds + 1))
    print(
        f"\nOn {len(data.test.labels)} test images, fresh seeds ({options.seeds} averaged). Rivals "
        "share batches, initial weights, schedule\nand the grid of learning rates. K-FAC's own "
        "settings were picked by hand beforehand, from about ten\ntried on these digits; the base "
        "optimizers keep their usual momentum and betas. K-FAC:\n"
        f"{', '.join(f'{name}={value}' for name, value in KFAC.items())}.\n"
    )
    print(table(results, options.target))
    plot(results, options.out)
    print(f"\nplot: {options.out.resolve()}")


if __name__ == "__main__":
    main()
