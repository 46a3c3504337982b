"""What a K-FAC step costs beside its base optimizer's, and beside peers' steps.

    python -m benchmarks.step_time [--short] [--parts steps ranks]
        [--tasks resnet32 transformer] [--only NAME ...] [--threads N] [--steps N]
        [--device cpu|cuda] [--out DIRECTORY]

Parts: "steps" compares whole steps, their stages and their memory: each class beside its base at
the default intervals, 10/100, KFACSGD also beside the papers' methods and peers, and at 1/10;
"ranks" their growth from one rank to several. Peers are kfac-pytorch (``import kfac``), SOAP from
pytorch-optimizer, and torch's Muon; those that are not installed are named. With --out, each part
leaves its results with the machine's description as JSON, and a plot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.machine import describe

from . import ranks, steps
from .contestants import EVERYONE
from .report import Settings
from .tasks import FITTING, TASKS

PARTS = {"steps": steps.run, "ranks": ranks.run}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="tiny networks, to try it out")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="all that the device has")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="that are measured")
    parser.add_argument(
        "--only", nargs="+", choices=list(EVERYONE), help="of whole steps, beside the bases"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, help="of each contestant; two intervals at least")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="of the part of that name")
    parser.add_argument("--out", type=Path, help="where to keep the results")
    options = parser.parse_args(arguments)
    possible = ("steps",) if options.device == "cuda" else tuple(PARTS)
    parts = options.parts or possible
    if impossible := set(parts).difference(possible):
        parser.error(f"--device cuda has no part {', '.join(sorted(impossible))}; use --device cpu")
    torch.set_num_threads(options.threads)
    settings = Settings(
        options.short,
        options.threads,
        options.steps or (4 if options.short else 40),
        options.device,
        options.tasks or FITTING[options.device],
        options.ranks,
        options.only,
    )
    where = describe(settings.device, settings.threads)
    print(", ".join(f"{name} {value}" for name, value in where.items()), end="\n\n")
    figures = []
    for part in parts:
        report = PARTS[part](settings)
        if settings.short:  # what is wanted is not wanted of toys
            report.figures = [figure._replace(wanted=None) for figure in report.figures]
        figures += report.figures
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            chosen = [*(options.tasks or ()), *(["short"] if settings.short else [])]
            name = "_".join(["step_time", part, settings.device, *chosen])
            record = {
                "machine": where,
                "settings": asdict(settings),
                "results": report.results,
                "summary": [str(figure) for figure in report.figures],
            }
            stem = options.out / name
            stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
            report.plot(stem.with_suffix(".png"))
            print(f"saved as {stem}.json and {stem}.png\n")
    print("Summary")
    print("\n".join(f"  {figure}" for figure in figures))


if __name__ == "__main__":
    main()
