"""All that is to be known of a GPU, in one run that may be cut off.

    python -m benchmarks.cuda_trial [--minutes 12] [--out FOLDER] [--parts NAME ...]
        [--only PATTERN] [--brief] [--rehearse]

The parts run one after the other, each in a process of its own with its own time limit; one that
fails prints its traceback, and the next one runs; one that the rest of the time is too short for is
skipped. After every result, and after each part, OUT/cuda_trial.json has all that is known so far.
--only is a regular expression: in each contest of step times, the base and the contestants that it
finds take part. --brief times steps alone, in 6 minutes: the bases, Muon, and ours at the defaults.
--rehearse runs all parts in tiny sizes on a CPU.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.machine import keep
from benchmarks.recipes import command_line

from . import proofs, steps
from .parts import Part, Record, Settings, run

PARTS = {
    "proofs": Part(proofs.run, 2.0, 0.7),
    "resnet50": Part(functools.partial(steps.run, steps.resnet50), 3.5, 0.7),
    "gpt2": Part(functools.partial(steps.run, steps.gpt2), 3.0, 0.7),
    "bert-large": Part(functools.partial(steps.run, steps.bert_large), 3.5, 1.0),
}
STEPS = ("resnet50", "gpt2", "bert-large")
BRIEF = r"^(Muon|KFAC(SGD|Adam))$"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the number of parts that failed."""
    parser = command_line("cuda_trial", __doc__)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--only")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --rehearse tries the script out without one")
    brief = options.brief
    end = time.monotonic() + 60 * (options.minutes or (6 if brief else 12))
    device = "cpu" if options.rehearse else "cuda"
    only = options.only or (BRIEF if brief else "")
    settings = Settings(device, options.rehearse, only, brief)
    multiprocessing.get_context("forkserver").set_forkserver_preload([steps.__name__])
    records: dict[str, Record] = {}
    words = ["cuda_trial", *["brief"] * brief, *["rehearsal"] * options.rehearse]
    path = options.out / f"{'_'.join(words)}.json"

    def keep_part(name: str, record: Record) -> None:
        records[name] = record
        keep(path, device=device, parts={name: asdict(one) for name, one in records.items()})

    for name in options.parts or (STEPS if brief else PARTS):
        part, left = PARTS[name], end - time.monotonic()
        if left < 60 * part.least and not options.rehearse:
            print(f"{name}: skipped, as {left:.0f} s are left of {60 * part.least:.0f} at least")
            keep_part(name, Record("skipped"))
            continue
        print(f"{name}:", flush=True)
        limit = min(60 * part.limit, left)
        found = run(part, settings, limit, functools.partial(keep_part, name))
        error = "" if found.error is None else f"\n{found.error}"
        print(f"{name}: {found.state} after {found.seconds:.0f} s{error}", flush=True)
    return sum(record.state == "failed" for record in records.values())


if __name__ == "__main__":
    raise SystemExit(main())
