"""What a K-FAC step costs beside its base optimizer's, and beside peers' steps.

    python -m benchmarks.step_time [--short] [--tasks resnet32 transformer] [--only NAME ...]
        [--threads N] [--steps N] [--device cpu|cuda] [--out DIRECTORY]

Whole steps are compared, their stages and their memory: each class beside its base at the default
intervals, 10/100, KFACSGD also beside the papers' methods and peers, and at 1/10. Peers are
kfac-pytorch (``import kfac``), SOAP from pytorch-optimizer, and torch's Muon; those that are not
installed are named. With --out, the results are left with the machine's description as JSON, and a
plot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.machine import describe, keep
from benchmarks.recipes import command_line

from . import steps
from .contestants import EVERYONE
from .report import Settings
from .tasks import FITTING, TASKS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("step_time", __doc__)
    parser.add_argument("--short", action="store_true", help="tiny networks, to try it out")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="that are measured")
    parser.add_argument(
        "--only", nargs="+", choices=list(EVERYONE), help="of whole steps, beside the bases"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, help="of each contestant; two intervals at least")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="where to keep the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    settings = Settings(
        options.short,
        options.threads,
        options.steps or (4 if options.short else 40),
        options.device,
        options.tasks or FITTING[options.device],
        options.only,
    )
    where = describe(settings.device, settings.threads)
    print(", ".join(f"{name} {value}" for name, value in where.items()), end="\n\n")
    found, figures = steps.run(settings)
    if settings.short:  # what is wanted is not wanted of toys
        figures = [figure._replace(wanted=None) for figure in figures]
    if options.out is not None:
        chosen = [*(options.tasks or ()), *(["short"] if settings.short else [])]
        stem = options.out / "_".join(["step_time_steps", settings.device, *chosen])
        keep(
            stem.with_suffix(".json"),
            settings.threads,
            settings.device,
            settings=asdict(settings),
            results={title: [asdict(one) for one in results] for title, results in found.items()},
            summary=[str(figure) for figure in figures],
        )
        steps.plot(found, stem.with_suffix(".png"))
        print(f"saved as {stem}.json and {stem}.png\n")
    print("Summary")
    print("\n".join(f"  {figure}" for figure in figures))


if __name__ == "__main__":
    main()
