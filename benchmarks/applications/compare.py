"""Runs of one application beside its base: steps and seconds to the base's last loss or score.

    python -m benchmarks.applications.compare runs/Adam runs/KFACAdam --out runs/unet

The first run is the base. Writes OUT.json and OUT.png, and prints a table for a page. A run counts
as there at its first evaluation with that loss or a lower one; with ``--score mask_ap``, with that
score or a higher one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.recipes import command_line

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Record = dict[str, Any]
LOSS = "loss"  # lower is better; scores are the other way round


def reached(record: Record, base: dict[str, float], score: str) -> dict[str, float] | None:
    """Return the first point of the curve that is as good as the base's last one."""
    sign = 1 if score == LOSS else -1
    return next((p for p in record["curve"] if sign * p[score] <= sign * base[score]), None)


def table(records: Sequence[Record], score: str = LOSS) -> list[str]:
    """Return a row for each run: to the base's last loss or score, then at the end."""
    base = records[0]["curve"][-1]
    to = f"steps to the base's last {score}"
    columns = ("optimizer", to, "seconds to it", "all seconds", "last loss")
    metrics = [name for name in base if name not in ("step", "seconds", "train", "loss")]
    lines = [
        "| " + " | ".join([*columns, *metrics]) + " |",
        "|---" * (len(columns) + len(metrics)) + "|",
    ]
    for record in records:
        point, last = reached(record, base, score), record["curve"][-1]
        there = ["-", "-"] if point is None else [f"{point['step']}", f"{point['seconds']:.0f}"]
        told = [f"{last['seconds']:.0f}", *(f"{last[name]:.4g}" for name in ("loss", *metrics))]
        lines.append("| " + " | ".join([record["optimizer"], *there, *told]) + " |")
    return lines


def plot(records: Sequence[Record], path: Path, score: str = LOSS) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for record in records:
        for axis, name in zip(axes, ("step", "seconds"), strict=True):
            xs = [point[name] for point in record["curve"]]
            axis.plot(xs, [point[score] for point in record["curve"]], label=record["optimizer"])
    for axis, text in zip(axes, ("steps", "seconds"), strict=True):
        axis.axhline(records[0]["curve"][-1][score], color="0.7", lw=0.8)
        axis.set(xlabel=text)
    found = [point[score] for record in records for point in record["curve"]]
    if score == LOSS and max(found) > 10 * min(found):
        axes[0].set_yscale("log")
    axes[0].set_ylabel(f"{score} on held-out data")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(given: Sequence[str] | None = None) -> None:
    parser = command_line("applications.compare", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, the base's first")
    parser.add_argument("--out", type=Path, required=True, help="path without a suffix")
    parser.add_argument("--score", default=LOSS, help="that tells when a run is there")
    options = parser.parse_args(given)
    records = [json.loads((folder / "curve.json").read_text()) for folder in options.runs]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(record) for record in records)
    options.out.with_suffix(".json").write_text(f"[\n{lines}\n]\n")
    plot(records, options.out.with_suffix(".png"), options.score)
    print("\n".join(table(records, options.score)))


if __name__ == "__main__":
    main()
