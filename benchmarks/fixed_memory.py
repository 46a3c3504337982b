"""Each optimizer with the largest batch that fits into the same memory, to the same loss.

    python -m benchmarks.fixed_memory resnet8 --mb 1500 --data FOLDER
        [--only NAME ...] [--kept NAME ...] [--out FOLDER] [--trials N] [--seeds N]
        [--device cpu|cuda]

As KAISA's second experiment (SC '21): K-FAC's state takes memory from the batch, so it has to win
with a smaller one. A batch fits if a process that trains three steps with it, the data loaded, has
a peak of at most --mb (on CUDA: its tensors). All see as many examples within their horizons.
Settings are then searched at these batches and targets are found as in benchmarks.convergence;
those of --kept are taken from the result in FOLDER.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from .convergence.contest import Entry, Kept, contest, picked, report, save
from .convergence.contestants import CONTESTANTS
from .convergence.search import TRIALS, Store, train
from .convergence.tasks import SIZED, Task
from .machine import peak_mb

WHO = ("SGD", "AdamW", "LAMB", "KFACSGD", "KFACAdam", "KFACLAMB")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fixed_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", choices=list(SIZED))
    parser.add_argument("--mb", type=float, required=True, help="that all may take, in MiB")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(WHO))
    parser.add_argument(
        "--kept", nargs="+", choices=list(CONTESTANTS), default=[], help="who is not searched for"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--horizon", type=float, default=1.0, help="in the task's own")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    run(options)


def run(options: argparse.Namespace) -> None:
    build, size, steps = SIZED[options.task]
    examples = options.horizon * size * steps
    present, lines = picked(options.only)
    data = build(size, steps).load(options.data)
    most = min(_examples(data), int(examples))
    where = options.task, options.device, options.threads, options.data
    about = f"{options.task}, {examples:,.0f} examples, in {options.mb:g} MiB"
    name = f"fixed_memory_{options.task}_{options.mb:g}"
    stem = options.out / f"{name}{'' if options.device == 'cpu' else '_cuda'}"
    # Batches may be others now, so what was reached with them is found anew.
    kept = Kept(Kept.read(stem.with_suffix(".json"), options.kept).best, [])
    print("\n".join([about, *lines]), flush=True)
    entries, batches = [], []
    for one in present:
        peak = cache(partial(measured_peak, one.name, where))
        batch = largest(peak, options.mb, most)
        if batch == 0:
            raise SystemExit(
                f"Invalid --mb: {options.mb:g}; one example with {one.name} takes {peak(1):.0f}"
            )
        entries.append(Entry(one, sized(options.task, batch, examples)))
        batches.append({"optimizer": one.name, "batch": batch, "peak MiB": peak(batch)})
        whole = ", all that the data have" if batch == most else ""
        print(f"{one.name:24} batch {batch}{whole}, {peak(batch):.0f} MiB", flush=True)
    store = Store(options.out / f"{name}_runs.json", options.device)
    seeds = range(1, 1 + options.seeds)
    outcome = contest(entries, data, store, options.trials, seeds, kept=kept)
    score = entries[0].task.score
    report(outcome, score.name if score else None)
    save(stem, about, outcome, store, lines, batches=batches, trials=options.trials)


def sized(name: str, batch: int, examples: float) -> Task:
    """A task at another batch, with the steps in which it sees so many examples."""
    return SIZED[name][0](batch, max(1, round(examples / batch)))


def _examples(data: tuple[Any, ...]) -> int:
    train = data[0]
    return len(train[0] if isinstance(train, tuple) else train)


def largest(peak: Callable[[int], float], limit: float, most: int) -> int:
    """The largest batch within the limit, of ``most`` or less, to a sixteenth; 0 if none is.

    Doubles until one is not, then halves the gap.
    """
    low, high = 0, 1
    while peak(high) <= limit:
        low = high
        if low == most:
            return low
        high = min(2 * low, most)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= limit else (low, middle)
    return low


def measured_peak(name: str, where: tuple[str, str, int, Path | None], batch: int) -> float:
    """Of a process of its own; infinite where the device's memory does not do."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (name, where, batch))


def _peak(name: str, where: tuple[str, str, int, Path | None], batch: int) -> float:
    kind, device, threads, folder = where
    torch.set_num_threads(threads)
    whole, one = SIZED[kind][0](batch, 3), CONTESTANTS[name]
    task = replace(whole, measured=lambda data: islice(whole.measured(data), 1))
    try:
        # The first step gathers and decomposes all; which settings, does not matter.
        train(task, task.load(folder), one, one.draw("0", 1)[0], 0, 3, device)
    except torch.OutOfMemoryError:
        return float("inf")
    return peak_mb(device)


if __name__ == "__main__":
    main()
