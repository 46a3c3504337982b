"""Train an autoencoder on scikit-learn's digits, with Adam and with K-FAC inside of Adam.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.demo [--short] [--plot PNG] [--json FILE]
    torchrun --standalone --nproc-per-node 2 -m benchmarks.demo --search

Both optimizers start from the same weights, see the same batches and end a schedule of their own:
Adam after 400 steps, KFACAdam after 80. The question is when KFACAdam comes to the loss at which
Adam ends. ``--search`` finds the learning rates, both from one grid with three seeds of its own,
and keeps them in benchmarks/results/demo_rates.json. Everything else is at its default.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import machine
from benchmarks.convergence.search import share_of_rate
from benchmarks.networks import Autoencoder
from benchmarks.ranks import Place
from kaisa_optim import KFACAdam

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BASE, OURS = "Adam", "KFACAdam"
BUILD: dict[str, Callable[[nn.Module, float], Optimizer]] = {
    BASE: lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr),
    OURS: lambda model, lr: KFACAdam(model, lr=lr),
}
STEPS = {BASE: 400, OURS: 80}
COLORS = {BASE: "tab:gray", OURS: "tab:red"}
GRID = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SEEDS = (1, 2, 3)
SEARCH_SEEDS = (101, 102, 103)
RATES = Path(__file__).parent / "results" / "demo_rates.json"
IMAGES = 1792  # of 1,797, so that powers of two ranks get equal parts
TASK = "digits autoencoder 64-128-64-32-8"


@dataclass(frozen=True)
class Run:
    """One training run: means over the ranks, of the loss and of CPU time."""

    loss: list[float]  # before each step, and after the last one
    seconds: list[float]  # of wall-clock time, at the same moments
    cpu: list[float]

    def reached(self, target: float) -> int | None:
        """Return the first step after which the loss is at most ``target``."""
        return next((step for step, loss in enumerate(self.loss) if loss <= target), None)


def digits() -> Tensor:
    """Return the images, and the images moved by a pixel in four directions: ``[8960, 64]``."""
    images = torch.tensor(load_digits().images[:IMAGES], dtype=torch.float32) / 16
    wide = F.pad(images, (1, 1, 1, 1))
    corners = ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))
    moved = [wide[:, top : top + 8, left : left + 8] for top, left in corners]
    return torch.stack(moved, 1).flatten(0, 1).flatten(1)


def train(
    name: str, lr: float, seed: int, place: Place, report: Callable[[int, float], None]
) -> Run:
    """Train on the full batch, each rank on its part of it."""
    torch.manual_seed(seed)
    images = place.share(digits()).to(place.device)
    model: nn.Module = Autoencoder((64, 128, 64, 32, 8)).to(place.device)
    if place.world > 1:
        model = DistributedDataParallel(model)
    optimizer = BUILD[name](model, lr)
    steps = STEPS[name]
    scheduler = LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
    losses, seconds, cpu = [], [], []
    if place.world > 1:
        dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for step in range(steps + 1):
        loss = (model(images) - images).square().sum(1).mean() / 2
        losses.append(loss.item())  # waits for a GPU, too
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
        report(step, losses[-1])
        if step < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    ranks = place.gather((losses, cpu))  # the parts are of equal size
    losses, cpu = (means(lists) for lists in zip(*ranks, strict=True))
    return Run(losses, seconds, cpu)


def means(lists: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each place's values."""
    return [statistics.fmean(values) for values in zip(*lists, strict=True)]


class Trainer:
    """Make runs under a progress bar that only the first rank shows."""

    def __init__(self, place: Place, runs: int, console: Console) -> None:
        self.place, self.runs, self.done = place, runs, 0
        columns = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[at]}")
        self.progress = Progress(*columns, TimeElapsedColumn(), console=console)

    def __call__(self, name: str, lr: float, seed: int) -> Run:
        self.done += 1
        text = f"{self.done:2}/{self.runs} {name:8} lr {lr:<5g} seed {seed}"
        bar = self.progress.add_task(text, total=STEPS[name], at="")

        def report(step: int, loss: float) -> None:
            self.progress.update(bar, completed=step, at=f"step {step:3} loss {loss:.3f}")

        return train(name, lr, seed, self.place, report)


def search(place: Place, console: Console) -> None:
    """Train at each rate of the grid; keep the rate of the lowest mean loss."""
    trainer = Trainer(place, len(BUILD) * len(GRID) * len(SEARCH_SEEDS), console)
    losses: dict[str, dict[str, list[float]]] = {name: {} for name in BUILD}
    with trainer.progress:
        for lr in GRID:
            for name in BUILD:
                runs = (trainer(name, lr, seed) for seed in SEARCH_SEEDS)
                losses[name][f"{lr:g}"] = [run.loss[-1] for run in runs]
    rates = {name: best(found) for name, found in losses.items()}
    keep(RATES, place, steps=STEPS, seeds=SEARCH_SEEDS, losses=losses, rates=rates)
    console.print(f"{rates}, kept in {RATES}")


def best(losses: dict[str, list[float]]) -> float:
    """Return the rate of the lowest mean loss; a diverged run's loss counts as infinite."""

    def mean(rate: str) -> float:
        return statistics.fmean(x if math.isfinite(x) else math.inf for x in losses[rate])

    return float(min(losses, key=mean))


def keep(path: Path, place: Place, **result: Any) -> None:
    if place.rank == 0:
        machine.keep(path, device=place.device.type, task=TASK, ranks=str(place), **result)


def summary(runs: dict[str, list[Run]], rates: dict[str, float]) -> list[dict[str, Any]]:
    """Return a row for each optimizer: the means to the target, which is Adam's mean last loss.

    Adam's row counts its whole runs. Means are left out where a run misses the target.
    """
    target = statistics.fmean(run.loss[-1] for run in runs[BASE])
    rows = []
    for name, found in runs.items():
        ends = [run.loss[-1] for run in found]
        row = {"optimizer": name, "lr": rates[name], "target": target}
        row |= {"loss": statistics.fmean(ends), "lowest": min(ends), "highest": max(ends)}
        hits = [len(run.loss) - 1 if name == BASE else run.reached(target) for run in found]
        pairs = [(run, hit) for run, hit in zip(found, hits, strict=True) if hit is not None]
        if len(pairs) == len(found):
            row["steps"] = statistics.fmean(hit for _, hit in pairs)
            row["seconds"] = statistics.fmean(run.seconds[hit] for run, hit in pairs)
            row["cpu seconds"] = statistics.fmean(run.cpu[hit] for run, hit in pairs)
        rows.append(row)
    return rows


def verdict(rows: Sequence[dict[str, Any]], of: str) -> str:
    """Return what share of Adam's steps or seconds KFACAdam takes, in words."""
    base, ours = rows
    if of not in ours:
        return f"{OURS} misses {BASE}'s last loss"
    return f"{OURS} comes to {BASE}'s last loss in {ours[of] / base[of]:.2f} of its {of}"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title=f"To {BASE}'s last loss, {rows[0]['target']:.3f}")
    for title in ("", "lr", "steps", "seconds", "CPU seconds", "last loss"):
        shown.add_column(title, justify="right" if title else "left")
    forms = {"steps": ".0f", "seconds": ".2f", "cpu seconds": ".2f"}
    for row in rows:
        cells = [f"{row[key]:{form}}" if key in row else "-" for key, form in forms.items()]
        spread = f"{row['loss']:.3f} ({row['lowest']:.3f}-{row['highest']:.3f})"
        shown.add_row(row["optimizer"], f"{row['lr']:g}", *cells, spread)
    return shown


def plot(runs: dict[str, list[Run]], rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss, a mean over seeds, against steps and against seconds."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for name, row in zip(runs, rows, strict=True):
        loss, seconds = (
            means([getattr(run, of) for run in runs[name]]) for of in ("loss", "seconds")
        )
        times = {"steps": range(len(loss)), "seconds": seconds}
        for panel, (of, x) in zip(panels, times.items(), strict=True):
            panel.plot(x, loss, color=COLORS[name], lw=2, label=f"{name}, lr {row['lr']:g}")
            if of in row:
                panel.plot(row[of], row["target"], "o", color=COLORS[name])
    for panel, of in zip(panels, ("steps", "seconds"), strict=True):
        panel.axhline(rows[0]["target"], color="black", lw=0.8, ls=":")
        panel.set(xlabel=of, yscale="log")
        panel.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        panel.set_title(verdict(rows, of), fontsize=10)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("loss")
    panels[1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def compare(options: argparse.Namespace, place: Place, console: Console) -> None:
    """Train both optimizers once a seed, in turns, so that a slower machine slows both."""
    rates = json.loads(RATES.read_text())["rates"]
    seeds = SEEDS[:1] if options.short else SEEDS
    console.print(
        f"A {TASK}, full batch of {len(digits()):,} images, {place}.\n"
        f"Learning rates: found on one grid for both, {', '.join(f'{lr:g}' for lr in GRID)}, with "
        f"three other seeds (--search; {RATES.name}).\nThe initial weights, the batches and the "
        "shape of the schedule are the same, all other options are at their defaults.",
        highlight=False,
    )
    trainer = Trainer(place, len(BUILD) * len(seeds), console)
    runs: dict[str, list[Run]] = {name: [] for name in BUILD}
    with trainer.progress:
        for seed in seeds:
            for name in BUILD:
                runs[name].append(trainer(name, rates[name], seed))
    rows = summary(runs, rates)
    console.print(table(rows))
    for of in ("steps", "seconds"):
        console.print(verdict(rows, of), style="bold", highlight=False)
    if place.rank == 0:
        plot(runs, rows, options.plot)
    if options.json:
        keep(options.json, place, seeds=seeds, rows=rows)
    console.print(f"plot: {options.plot.resolve()}", soft_wrap=True, highlight=False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=about)
    parser.add_argument("--short", action="store_true", help="one seed in place of three")
    parser.add_argument("--search", action="store_true", help="search the learning rates anew")
    parser.add_argument("--plot", type=Path, default=Path("demo.png"))
    parser.add_argument("--json", type=Path, help="keep the result and the machine there")
    options = parser.parse_args(arguments)
    options.place = Place.find()
    if IMAGES % options.place.world:
        parser.error(f"{options.place.world} ranks can't share {IMAGES} images evenly; start 2")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    place: Place = options.place
    place.join()
    torch.set_num_threads(1)  # ranks share the cores
    console = Console(quiet=place.rank > 0)
    if options.search:
        search(place, console)
    else:
        compare(options, place, console)
    place.leave()


if __name__ == "__main__":
    main()
