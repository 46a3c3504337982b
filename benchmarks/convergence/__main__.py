"""Steps and seconds to a loss: K-FAC beside what one would pick instead.

    python -m benchmarks.convergence digits-full fashion-256 ... [--data FOLDER]
        [--only NAME ...] [--targets NAME ...] [--kept NAME ...] [--rated NAME ...] [--out FOLDER]
        [--trials N] [--seeds N] [--device cpu|cuda]

Every optimizer gets the same number of trials, spread over a space of its own, by successive
halving; after the first rung the worse of two seeds decides. Settings that two have in
common fall on the same places of their ranges. The best settings then run on other seeds, over the
whole horizon and over ever shorter ones, each with a schedule of its own. The target is the loss at
which the baseline ends its whole horizon; "steps" is the shortest horizon that ends there, in the
median. --targets names the baselines to come to; otherwise all are. --kept names those whose
settings are taken from the result in FOLDER, in place of a search: so others can join them.
Who has a best rate in FOLDER's rates_TASK.json, which ``python -m benchmarks.convergence.rates``
writes, trains at it, too, and takes the settings that end lower. --rated names those who train at
it in place of a search.
Runs are kept in FOLDER as they end: a search that was broken off goes on.

--data is a folder with what a task needs, or with folders that have it: FashionMNIST/raw (IDX),
cifar-10-batches-bin or -py, nuclei (images, labels: PNG), shakespeare.txt. The digits come with
scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.recipes import command_line

from .contest import contest, kept, picked, report, save
from .contestants import CONTESTANTS
from .rates import best_settings
from .search import TRIALS, Store
from .tasks import TASKS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("convergence", __doc__)
    parser.add_argument("tasks", nargs="+", choices=list(TASKS))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument(
        "--targets", nargs="+", choices=list(CONTESTANTS), help="whose ends are targets"
    )
    parser.add_argument(
        "--kept", nargs="+", choices=list(CONTESTANTS), default=[], help="who is not searched for"
    )
    parser.add_argument(
        "--rated", nargs="+", choices=list(CONTESTANTS), default=[], help="who takes a known rate"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for name in options.tasks:
        compete(name, options)


def compete(name: str, options: argparse.Namespace) -> None:
    task = TASKS[name]
    present, lines = picked(options.only)
    print("\n".join([f"{task.about}; {task.steps} steps", *lines]), flush=True)
    data = task.load(options.data)
    store = Store(options.out / f"convergence_{name}_runs.json", options.device)
    seeds = range(1, 1 + options.seeds)
    stem = options.out / f"convergence_{name}{'' if options.device == 'cpu' else '_cuda'}"
    known = kept(stem.with_suffix(".json"), set(options.kept).difference(options.rated))
    rated = best_settings(options.out, task, CONTESTANTS)
    if missing := sorted(set(options.rated).difference(rated)):
        raise SystemExit(f"--rated {', '.join(missing)}: no rates on {name} in {options.out}")
    known |= {one: rated[one] for one in options.rated}
    outcome = contest(
        task, present, data, store, options.trials, seeds, options.targets, known, rated
    )
    score = task.score.name if task.score else None
    report(outcome, score)
    save(
        stem, task.about, outcome, store, lines,
        steps=task.steps, trials=options.trials, score=score,
    )  # fmt: skip


if __name__ == "__main__":
    main()
