"""Seconds to the baselines' losses, measured side by side.

    python -m benchmarks.convergence.seconds TASK ... [--data FOLDER] [--out FOLDER]

Runs of a contest are made one after the other, on a machine whose speed wavers. Here a baseline
trains its whole horizon, and all others as many steps as FOLDER's convergence_TASK.json says that
they need, in turns of ten steps. The seconds, CPU time on CPUs, take the place of those in the
file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.recipes import command_line, replace

from .contestants import CONTESTANTS
from .search import Training, now
from .tasks import TASKS, Task

TURN = 10  # steps
SEED = 1


class Racer:
    """A training that is timed in turns; ``left`` steps are to come."""

    def __init__(self, training: Training, steps: int) -> None:
        self.training, self.left, self.seconds = training, steps, 0.0

    def turn(self) -> None:
        start, count = now("cpu"), min(TURN, self.left)
        for _ in range(count):
            self.training.step()
        self.seconds += now("cpu") - start
        self.left -= count


def race(task: Task, data: Any, found: dict[str, Any]) -> None:
    """Measure all seconds of a contest's result, and put them in."""
    settings = {row["optimizer"]: row["settings"] for row in found["final"]}
    reached = [one for one in found["to the baseline's loss"] if one["steps"] is not None]
    needed = {(one["optimizer"], one["steps"]) for one in reached}
    needed |= {(one["baseline"], task.steps) for one in reached}
    racers = {}
    for name, steps in sorted(needed):
        one = CONTESTANTS[name]
        training = Training(task, data, one, settings[name], SEED, steps)
        racers[name, steps] = Racer(training, steps)
    while any(racer.left for racer in racers.values()):
        for racer in racers.values():
            racer.turn()
    for one in reached:
        one["seconds"] = racers[one["optimizer"], one["steps"]].seconds
        own = racers[one["baseline"], task.steps].seconds
        one["of_its_seconds"] = one["seconds"] / own
        row = next(row for row in found["final"] if row["optimizer"] == one["baseline"])
        row["ms per step"] = 1e3 * own / task.steps


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("convergence.seconds", __doc__)
    parser.add_argument("tasks", nargs="+", choices=list(TASKS))
    parser.add_argument("--data", type=Path, default=os.environ.get("KAISA_DATA"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.tasks:
        path = options.out / f"convergence_{name}.json"
        found = json.loads(path.read_text())
        task = TASKS[name]
        race(task, task.load(Path(options.data) if options.data else None), found)
        found["seconds were measured"] = describe("cpu", 1)
        replace(path, found, indent=1)
        for one in found["to the baseline's loss"]:
            if one["steps"] is not None:
                shares = f"{one['of_its_steps']:.2f}, {one['of_its_seconds']:.2f}"
                print(f"{name}: {one['optimizer']} to {one['baseline']}: {shares}", flush=True)


if __name__ == "__main__":
    main()
