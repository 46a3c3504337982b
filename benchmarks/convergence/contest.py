"""A contest: the search for each one's settings, the finals, and what is told of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib

from benchmarks.machine import keep

from .contestants import CONTESTANTS, Config, Contestant
from .search import Run, Store, search, shortest
from .tasks import Task

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PARTS = (1.0, 0.9, 0.85, 0.8, 0.65, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06, 0.05)


@dataclass(frozen=True)
class Reached:
    """What an optimizer needs to come to where a baseline ends; None where it never does."""

    baseline: str
    optimizer: str
    steps: int | None
    seconds: float | None
    of_its_steps: float | None  # over the baseline's
    of_its_seconds: float | None


@dataclass(frozen=True)
class Outcome:
    best: dict[str, Config]
    final: dict[str, list[Run]]  # one a seed
    reached: list[Reached]


def kept(path: Path, names: Collection[str]) -> dict[str, Config]:
    """Return the settings of some whom an earlier contest searched for."""
    rows = json.loads(path.read_text())["final"] if path.exists() else []
    best = {row["optimizer"]: row["settings"] for row in rows}
    if missing := set(names).difference(best):
        raise SystemExit(f"--kept {', '.join(sorted(missing))}: not in {path}")
    return {name: best[name] for name in names}


def picked(names: Sequence[str]) -> tuple[list[Contestant], list[str]]:
    """Those who take part, and a line on each of the others."""
    present, lines = [], []
    for name in names:
        one = CONTESTANTS[name]
        if one.absent:
            lines.append(f"{name}: absent, as {one.needs} is not installed")
        else:
            present.append(one)
    if not present:
        raise SystemExit(f"nobody is left to train: {'; '.join(lines)}")
    return present, lines


def contest(
    task: Task,
    contestants: Sequence[Contestant],
    data: Any,
    store: Store,
    trials: int,
    seeds: Sequence[int],
    targets: Collection[str] | None = None,
    known: Mapping[str, Config] = MappingProxyType({}),
    rated: Mapping[str, Config] = MappingProxyType({}),
) -> Outcome:
    """Search with as many trials for all, then train each seed, then shorter horizons.

    Who has ``known`` settings is not searched for. Who has ``rated`` settings, too, takes those
    whose whole horizons end lower in the median.
    ``targets`` names those to whose ends the others are to come; all unless given.
    """
    names = [one.name for one in contestants]
    for option, asked in (("--targets", targets or ()), ("--kept", known)):
        if strangers := set(asked).difference(names):
            wrong, right = ", ".join(sorted(strangers)), ", ".join(names)
            raise SystemExit(f"{option} {wrong}: not among those who train, {right}")
    tried: dict[str, list[Config]] = {}
    for one in contestants:
        first = known.get(one.name) or search(task, data, one, store, trials)
        other = rated.get(one.name, first)
        tried[one.name] = [first] if other == first else [first, other]
    whole: dict[str, list[list[Run]]] = {name: [[] for _ in x] for name, x in tried.items()}
    # They take turns, so that a machine that slows down slows all of them.
    for seed in seeds:
        for one in contestants:
            for runs, config in zip(whole[one.name], tried[one.name], strict=True):
                runs.append(store.run(task, data, one, config, seed, task.steps))
    final = {name: min(x, key=_median) for name, x in whole.items()}
    best = {name: runs[0].config for name, runs in final.items()}
    reached = []
    for base in contestants:
        if targets is not None and base.name not in targets:
            continue
        own = final[base.name]
        target = _median(own)
        seconds = statistics.median(run.seconds for run in own)
        for one in _rivals(base, contestants) if target < math.inf else ():
            config = best[one.name]
            part, runs = shortest(task, data, one, config, tuple(seeds), target, store, PARTS)
            found = Reached(base.name, one.name, None, None, None, None)
            if part < math.inf:
                needed, steps = statistics.median(run.seconds for run in runs), runs[0].steps
                ratios = steps / task.steps, needed / seconds
                found = Reached(base.name, one.name, steps, needed, *ratios)
            reached.append(found)
    return Outcome(best, final, reached)


def _median(runs: Sequence[Run]) -> float:
    return statistics.median(run.loss for run in runs)


def _rivals(base: Contestant, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Who is to come to where ``base`` ends: of one of ours, the same with default settings."""
    if base.name.startswith("KFAC"):
        return [one for one in contestants if one.tuned == base.name]
    return [one for one in contestants if one is not base]


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    """The finals, the lowest loss first."""
    found = []
    for name, runs in outcome.final.items():
        losses = [run.loss for run in runs]
        row: dict[str, Any] = {
            "optimizer": name,
            "loss": statistics.median(losses),
            "spread": [min(losses), max(losses)],
        }
        scores = [score for run in runs if (score := run.curve[-1][3]) is not None]
        if scores:
            row["score"] = statistics.median(scores)
        row["ms per step"] = 1e3 * statistics.median(r.seconds / r.curve[-1][0] for r in runs)
        row["settings"] = outcome.best[name]
        found.append(row)
    return sorted(found, key=lambda row: row["loss"])


def report(outcome: Outcome, score: str | None) -> None:
    for row in rows(outcome):
        low, high = row["spread"]
        second = f" {score} {row['score']:.4g}" if score else ""
        print(
            f"{row['optimizer']:24} {row['loss']:.5g} [{low:.5g}, {high:.5g}]{second} "
            f"{row['ms per step']:.2f} ms  {row['settings']}"
        )
    for one in outcome.reached:
        what = "not within the horizon"
        if one.steps is not None:
            what = (
                f"{one.steps} steps, {one.of_its_steps:.2f} of its; "
                f"{one.seconds:.1f} s, {one.of_its_seconds:.2f} of its"
            )
        print(f"to {one.baseline}'s loss: {one.optimizer:24} {what}")


def save(
    stem: Path, about: str, outcome: Outcome, store: Store, lines: list[str], **more: Any
) -> None:
    """``stem``.json and ``stem``.png."""
    result = {
        "task": about,
        **more,
        "final": rows(outcome),
        "to the baseline's loss": [vars(one) for one in outcome.reached],
        "left out": lines,
    }
    keep(stem.with_suffix(".json"), device=store.device, **result)
    plot(stem.with_suffix(".png"), about, outcome.final)
    print(f"{store.seconds:.0f} s of training in all; saved as {stem}.json and .png", flush=True)


def plot(path: Path, about: str, final: dict[str, list[Run]]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for i, (label, runs) in enumerate(final.items()):
        middle = sorted(runs, key=lambda run: run.loss)[len(runs) // 2]
        points = [point for point in middle.curve if math.isfinite(point[2])]
        for axis, column in zip(axes, (0, 1), strict=True):
            axis.plot(
                [p[column] for p in points],
                [p[2] for p in points],
                label=label,
                color=plt.colormaps["tab20"](i % 20),
                ls="-" if label.startswith("KFAC") else "--",
            )
    for axis, text in zip(axes, ("steps", "seconds"), strict=True):
        axis.set(xlabel=text, yscale="log")
    axes[0].set_ylabel("loss")
    axes[1].legend(fontsize=7)
    figure.suptitle(about)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
