"""The final loss over the learning rate: base optimizers and theirs with K-FAC inside.

    python -m benchmarks.convergence.rates TASK ... [--pairs NAME ...] [--seeds N ...]
        [--part P] [--data FOLDER] [--out FOLDER] [--jobs N] [--minutes M] [--device cpu|cuda]

Both of a pair train at the same learning rates, in half decades, over half of the task's horizon
or another part, with one rate for all parameters (Muon's companion keeps a rate of its own). FOLDER
gets ``rates_TASK.json``, written after each run, and ``rates_TASK.png``: runs that are in the file
are not made again. After M minutes the runs in progress are dropped.

--data is as in ``python -m benchmarks.convergence``; it may come from the variable KAISA_DATA.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import queue
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import keep
from benchmarks.recipes import command_line

from .contestants import CONTESTANTS, Config
from .search import train
from .tasks import TASKS, Task

RATES = (0.003, 0.01, 0.001, 0.03, 0.0003, 0.1)  # the most telling ones first
FASTER = (0.1, 0.03, 0.3, 0.01, 1.0, 0.003)  # SGD's and Muon's
NEAR = 1.1  # times the best loss: rates that end below it are about as good
WORTH = 1.5  # times the base's best loss: rates that a user of the base may have
_DEFAULTS = ", defaults"  # ends the names of contestants whose rate alone is searched


@dataclass(frozen=True)
class Pair:
    """A base optimizer and its counterpart, with the settings of both beside the rate."""

    base: str
    ours: str
    settings: Config
    own: Config
    rates: tuple[float, ...] = RATES


_BETAS: Config = {"beta1": 0.9, "beta2": 0.999}
_MUONS: Config = {"momentum": 0.95, "lr_rest": 0.003}
_DECAYED: Config = {"momentum": 0.9, "weight_decay": 5e-4}
_SOAPS: Config = {**_BETAS, "frequency": 10}
PAIRS = {
    "AdamW": Pair("AdamW", "KFACAdam", _BETAS, _BETAS),
    "LAMB": Pair("LAMB", "KFACLAMB", _BETAS, _BETAS),
    "SGD": Pair("SGD", "KFACSGD", {"momentum": 0.9}, {"momentum": 0.9}, FASTER),
    "SGD, decay": Pair("SGD, decay", "KFACSGD, decay", _DECAYED, _DECAYED, (0.1, 0.03)),
    "Muon": Pair("Muon", "KFACAdam", _MUONS, _BETAS, FASTER),
    "SOAP": Pair("SOAP", "KFACAdam", _SOAPS, _BETAS),
}


class Order(NamedTuple):
    """One run to make."""

    task: str
    optimizer: str
    lr: float
    seed: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("convergence.rates", __doc__)
    parser.add_argument("tasks", nargs="+", choices=list(TASKS))
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--rates", nargs="+", type=float, help="others than each pair's own")
    parser.add_argument("--part", type=float, default=0.5, help="of the horizon")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--data", type=Path, default=os.environ.get("KAISA_DATA"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    options.data = Path(options.data) if options.data else None
    kept = {name: Kept.here(options.out, TASKS[name], options.part) for name in options.tasks}
    orders = [one for one in dict.fromkeys(ordered(options)) if not kept[one.task].has(one)]
    for one, loss, seconds in made(orders, options):
        kept[one.task].add(one, loss, seconds, options.device)
        print(f"{one}: {loss:.5g}, {seconds:.1f} s", flush=True)
    for results in kept.values():
        report(results)
        picture(results)


def ordered(options: argparse.Namespace) -> Iterator[Order]:
    """Yield all runs, so that what is cut off is the least telling."""
    for seed in options.seeds:
        for place in range(max(len(options.rates or ()), len(RATES))):
            for name in options.pairs:
                pair = PAIRS[name]
                rates = options.rates or pair.rates
                if place >= len(rates):
                    continue
                for optimizer in (pair.base, pair.ours):
                    for task in options.tasks:
                        yield Order(task, optimizer, rates[place], seed)


# ---- runs ----


def made(
    orders: Sequence[Order], options: argparse.Namespace
) -> Iterator[tuple[Order, float, float]]:
    """Yield each run's loss and seconds as it ends; stop when the time is over."""
    end = time.monotonic() + 60 * options.minutes
    context = multiprocessing.get_context("spawn")
    waiting: Any = context.Queue()
    ended: Any = context.Queue()
    for one in orders:
        waiting.put(one)
    arguments = (waiting, ended, options.part, options.data, options.device)
    count = min(options.jobs, len(orders))
    workers = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(count)]
    for _ in workers:
        waiting.put(None)
    for worker in workers:
        worker.start()
    left = len(orders)
    try:
        while (left and any(worker.is_alive() for worker in workers)) or not ended.empty():
            if time.monotonic() >= end:
                print(f"the time is over: {left} runs are missing", flush=True)
                return
            try:
                yield ended.get(timeout=min(1.0, max(0.01, end - time.monotonic())))
                left -= 1
            except queue.Empty:
                continue
    finally:
        for worker in workers:
            worker.terminate()


def _work(waiting: Any, ended: Any, part: float, folder: Path | None, device: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    load = functools.lru_cache(2)(lambda name: TASKS[name].load(folder))
    while (one := waiting.get()) is not None:
        ended.put((one, *_run(one, part, load, device)))


def _run(one: Order, part: float, load: Callable[[str], Any], device: str) -> tuple[float, float]:
    task = TASKS[one.task]
    contestant, steps = CONTESTANTS[one.optimizer], round(part * task.steps)
    config = {"lr": one.lr, **_settings_of(one.optimizer)}
    run = train(task, load(one.task), contestant, config, one.seed, steps, device)
    return run.loss, run.seconds


# ---- results ----


class Kept:
    """A task's runs of one length, in a file; a diverged run's loss is None there."""

    def __init__(self, path: Path, task: Task, steps: int | None = None) -> None:
        self.path, self.task, self.steps = path, task, steps
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            found = json.loads(path.read_text())
            self.rows = found["runs"]
            if steps not in (None, found["steps"]):
                raise SystemExit(f"{path} has runs of {found['steps']} steps, not of {steps}")

    @classmethod
    def here(cls, folder: Path, task: Task, part: float | None = None) -> Kept:
        steps = None if part is None else round(part * task.steps)
        return cls(folder / f"rates_{task.name}.json", task, steps)

    def has(self, one: Order) -> bool:
        return any(_order(row, one.task) == one for row in self.rows)

    def add(self, one: Order, loss: float, seconds: float, device: str) -> None:
        row = {"optimizer": one.optimizer, "lr": one.lr, "seed": one.seed}
        self.rows.append({**row, "loss": loss if loss < math.inf else None, "seconds": seconds})
        rows = sorted(self.rows, key=lambda row: (row["optimizer"], row["lr"], row["seed"]))
        keep(self.path, 1, device, task=self.task.about, steps=self.steps, runs=rows)

    def curves(self) -> dict[str, dict[float, list[float]]]:
        """Return each optimizer's losses over the rate, one a seed."""
        found: dict[str, dict[float, list[float]]] = {}
        for row in self.rows:
            losses = found.setdefault(row["optimizer"], {}).setdefault(row["lr"], [])
            losses.append(math.inf if row["loss"] is None else row["loss"])
        return {name: dict(sorted(curve.items())) for name, curve in sorted(found.items())}


def _order(row: dict[str, Any], task: str) -> Order:
    return Order(task, row["optimizer"], row["lr"], row["seed"])


def means(curve: dict[float, list[float]]) -> dict[float, float]:
    return {lr: statistics.fmean(losses) for lr, losses in curve.items()}


def best(curve: dict[float, float]) -> float:
    """Return the rate of the lowest loss."""
    return min(curve, key=lambda lr: curve[lr])


def best_settings(folder: Path, task: Task, names: Collection[str]) -> dict[str, Config]:
    """Return the settings of each name at its best rate, where ``folder`` has rates of it.

    With settings of their own beside it, or the optimizer's defaults: "KFACAdam, defaults".
    """
    curves = Kept.here(folder, task).curves()
    found: dict[str, Config] = {}
    for name in names:
        if (curve := curves.get(name.removesuffix(_DEFAULTS))) is not None:
            settings = {} if name.endswith(_DEFAULTS) else _settings_of(name)
            found[name] = {"lr": best(means(curve)), **settings}
    return found


def _settings_of(optimizer: str) -> Config:
    pair = next(p for p in PAIRS.values() if optimizer in (p.base, p.ours))
    return pair.settings if optimizer == pair.base else pair.own


def pairs_of(results: Kept) -> Iterator[tuple[Pair, dict[str, dict[float, float]]]]:
    """Yield each pair whose base has runs, with the mean losses of both over the rate."""
    curves = {name: means(curve) for name, curve in results.curves().items()}
    for pair in PAIRS.values():
        if pair.base in curves:
            both = pair.base, pair.ours
            yield pair, {name: curves[name] for name in both if name in curves}


def report(results: Kept) -> None:
    """Print losses over the rate, and where ours is above its base."""
    for pair, curves in pairs_of(results):
        print(f"{results.task.name}: {pair.ours} for {pair.base}")
        base = curves[pair.base]
        for name, curve in curves.items():
            cells = []
            for lr, loss in curve.items():
                worth = base.get(lr, math.inf) <= WORTH * min(base.values())
                worse = loss > 1.02 * base.get(lr, math.inf)
                mark = "!" if worse and worth else "?" if worse else ""
                cells.append(f"{lr:g}: {loss:.4g}{mark}")
            limit = NEAR * curve[best(curve)]
            near = [lr for lr, loss in curve.items() if loss <= limit]
            span = f"{min(near):g}-{max(near):g}" if near else "none"
            print(f"  {name:22} {'  '.join(cells)}; within {NEAR} of the best: {span}")


def picture(results: Kept) -> None:
    """Draw each pair's two curves; a star marks the best rate of each."""
    found = list(pairs_of(results))
    if not found:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        1, len(found), figsize=(4.2 * len(found), 3.6), sharey=True, squeeze=False
    )
    for axis, (pair, curves) in zip(grid[0], found, strict=True):
        for name, curve in curves.items():
            seen = {lr: loss for lr, loss in curve.items() if loss < math.inf}
            if not seen:
                continue
            style = "--" if name == pair.base else "-"
            (line,) = axis.plot(list(seen), list(seen.values()), style, marker=".", label=name)
            top = best(seen)
            axis.plot(top, seen[top], "*", ms=13, color=line.get_color())
        axis.set(xscale="log", yscale="log", xlabel="learning rate")
        axis.legend(fontsize=8)
    grid[0][0].set_ylabel("loss at the end")
    figure.suptitle(results.task.about, fontsize=9)
    figure.tight_layout()
    figure.savefig(results.path.with_suffix(".png"), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
