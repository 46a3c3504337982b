"""Runs of one application beside its base: steps and seconds to the base's last loss.

    python -m benchmarks.applications.compare runs/SGD runs/KFACAdam --out runs/cifar

The first run is the base. Writes OUT.json and OUT.png, and prints a table for a page. A run counts
as there at its first evaluation with that loss or a lower one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Record = dict[str, Any]


def reached(record: Record, target: float) -> dict[str, float] | None:
    """Return the first point of the curve at the target or below it."""
    return next((point for point in record["curve"] if point["loss"] <= target), None)


def table(records: Sequence[Record]) -> list[str]:
    """Return a row for each run: to the base's last loss, then at the end."""
    base = records[0]["curve"][-1]
    metrics = [name for name in base if name not in ("step", "seconds", "train", "loss")]
    lines = [
        "| " + " | ".join(["optimizer", "steps", "seconds", "last loss", *metrics]) + " |",
        "|---" * (4 + len(metrics)) + "|",
    ]
    for record in records:
        point, last = reached(record, base["loss"]), record["curve"][-1]
        there = ["-", "-"] if point is None else [f"{point['step']}", f"{point['seconds']:.0f}"]
        told = [f"{last[name]:.4g}" for name in ("loss", *metrics)]
        lines.append("| " + " | ".join([record["optimizer"], *there, *told]) + " |")
    return lines


def plot(records: Sequence[Record], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for record in records:
        for axis, name in zip(axes, ("step", "seconds"), strict=True):
            xs = [point[name] for point in record["curve"]]
            axis.plot(xs, [point["loss"] for point in record["curve"]], label=record["optimizer"])
    for axis, text in zip(axes, ("steps", "seconds"), strict=True):
        axis.axhline(records[0]["curve"][-1]["loss"], color="0.7", lw=0.8)
        axis.set(xlabel=text)
    losses = [point["loss"] for record in records for point in record["curve"]]
    if max(losses) > 10 * min(losses):
        axes[0].set_yscale("log")
    axes[0].set_ylabel("loss on held-out data")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, the base's first")
    parser.add_argument("--out", type=Path, required=True, help="path without a suffix")
    options = parser.parse_args(given)
    records = [json.loads((folder / "curve.json").read_text()) for folder in options.runs]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(record) for record in records)
    options.out.with_suffix(".json").write_text(f"[\n{lines}\n]\n")
    plot(records, options.out.with_suffix(".png"))
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
