"""Steps and seconds to a loss: K-FAC beside what one would pick instead.

    python -m benchmarks.convergence digits-full digits-256 characters [--data FOLDER]
        [--only NAME ...] [--out FOLDER] [--trials N] [--seeds N]

Every optimizer gets the same number of trials, drawn at random from a space of its own, by
successive halving on seed 0. Its best settings then run on other seeds, over the whole horizon and
over ever shorter ones, each with a schedule of its own. The target is the loss at which the
baseline ends its whole horizon; "steps" is the shortest horizon that ends there, in the median.
Runs are kept in FOLDER as they end: a search that was broken off goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import torch

from benchmarks.machine import describe

from .contestants import CONTESTANTS
from .search import TRIALS, Run, Store, search, shortest
from .tasks import TASKS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PARTS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tasks", nargs="+", choices=list(TASKS))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.tasks:
        compete(name, options)


def compete(name: str, options: argparse.Namespace) -> None:
    task = TASKS[name]
    data = task.load(options.data)
    store = Store(options.out / f"convergence_{name}_runs.json")
    present = [CONTESTANTS[n] for n in options.only if not CONTESTANTS[n].absent]
    absent = [n for n in options.only if CONTESTANTS[n].absent]
    print(f"{task.about}; {task.steps} steps", flush=True)
    if absent:
        print(f"not installed, so absent: {', '.join(absent)}")
    best = {one.name: search(task, data, one, store, options.trials) for one in present}
    seeds = tuple(range(1, 1 + options.seeds))
    final = {
        one.name: [store.get(task, data, one, best[one.name], s, task.steps) for s in seeds]
        for one in present
    }
    losses = {n: statistics.median(run.loss for run in runs) for n, runs in final.items()}
    rows = []
    for baseline in [n for n in losses if not n.startswith("KFAC")]:
        base = final[baseline]
        for one in present:
            if one.name == baseline or losses[one.name] > losses[baseline]:
                continue
            part, runs = shortest(
                task, data, one, best[one.name], seeds, losses[baseline], store, PARTS
            )
            seconds = statistics.median(r.seconds for r in runs)
            rows.append(
                {
                    "baseline": baseline,
                    "optimizer": one.name,
                    "steps": part,
                    "seconds": seconds / statistics.median(r.seconds for r in base),
                }
            )
    table: list[dict[str, Any]] = [
        {
            "optimizer": n,
            "loss": losses[n],
            "spread": [min(r.loss for r in runs), max(r.loss for r in runs)],
            "ms per step": 1e3 * statistics.median(r.seconds / r.steps for r in runs),
            "settings": best[n],
        }
        for n, runs in final.items()
    ]
    for row in sorted(table, key=lambda row: row["loss"]):
        print(
            f"{row['optimizer']:24} {row['loss']:.5g} [{row['spread'][0]:.5g}, "
            f"{row['spread'][1]:.5g}] {row['ms per step']:.2f} ms  {row['settings']}"
        )
    for row in rows:
        print(
            f"to {row['baseline']}'s loss: {row['optimizer']:24} {row['steps']:.2f} of its steps, "
            f"{row['seconds']:.2f} of its seconds"
        )
    print(f"{store.seconds:.0f} s of training in all", flush=True)
    result = {
        "task": task.about,
        "steps": task.steps,
        "machine": describe(),
        "trials": options.trials,
        "final": table,
        "to the baseline's loss": rows,
        "absent": absent,
    }
    (options.out / f"convergence_{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(name, task.about, final, options.out)


def plot(name: str, about: str, final: dict[str, list[Run]], out: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for i, (label, runs) in enumerate(final.items()):
        middle = sorted(runs, key=lambda run: run.loss)[len(runs) // 2]
        points = [(s, t, loss) for s, t, loss in middle.curve if math.isfinite(loss)]
        for axis, column in zip(axes, (0, 1), strict=True):
            axis.plot(
                [p[column] for p in points],
                [p[2] for p in points],
                label=label,
                color=f"C{i}",
                ls="-" if label.startswith("KFAC") else "--",
            )
    for axis, text in zip(axes, ("steps", "seconds"), strict=True):
        axis.set(xlabel=text, yscale="log")
    axes[0].set_ylabel("loss")
    axes[1].legend(fontsize=7)
    figure.suptitle(about)
    figure.tight_layout()
    figure.savefig(out / f"convergence_{name}.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
