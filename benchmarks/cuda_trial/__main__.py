"""All that is to be known of a GPU, in one run that may be cut off.

    python -m benchmarks.cuda_trial [--minutes 12] [--out FOLDER] [--data FOLDER] [--parts NAME ...]
        [--only PATTERN] [--rehearse]

The parts run one after the other, each in a process of its own with its own time limit; one that
fails prints its traceback, and the next one runs; one that the rest of the time is too short for is
skipped. After every result, and after each part, OUT/cuda_trial.json has all that is known so far.
--data is a folder with CIFAR-10 in the binary version; without it, labels are drawn over noise, and
the convergence part says so. --only is a regular expression: in each contest of step times, the
base and the contestants that it finds take part. --rehearse runs all parts in tiny sizes on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.machine import describe

from . import convergence, proofs, steps
from .parts import Part, Record, run
from .settings import Settings

PARTS = {
    "proofs": Part(proofs.run, 2.0, 0.7),
    "resnet50": Part(steps.resnet50, 2.5, 0.7),
    "gpt2": Part(steps.gpt2, 2.0, 0.7),
    "bert-large": Part(steps.bert_large, 2.5, 1.0),
    "convergence": Part(convergence.run, 3.0, 1.0),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the number of parts that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_trial",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--only", default="")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --rehearse tries the script out without one")
    end = time.monotonic() + 60 * options.minutes
    device = "cpu" if options.rehearse else "cuda"
    settings = Settings(device, options.rehearse, options.data, options.only)
    multiprocessing.get_context("forkserver").set_forkserver_preload([steps.__name__])
    records: dict[str, Record] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ("cuda_trial_rehearsal.json" if options.rehearse else "cuda_trial.json")
    head = {"machine": describe(settings.device)}

    def keep(name: str, record: Record) -> None:
        records[name] = record
        whole = head | {"parts": {name: asdict(one) for name, one in records.items()}}
        written = path.with_suffix(".part")
        written.write_text(json.dumps(whole, indent=1) + "\n")
        written.replace(path)

    for name in options.parts:
        part, left = PARTS[name], end - time.monotonic()
        if left < 60 * part.least and not options.rehearse:
            print(f"{name}: skipped, as {left:.0f} s are left of {60 * part.least:.0f} at least")
            keep(name, Record("skipped"))
            continue
        print(f"{name}:", flush=True)
        limit = min(60 * part.limit, left)
        found = run(part, settings, limit, functools.partial(keep, name))
        error = "" if found.error is None else f"\n{found.error}"
        print(f"{name}: {found.state} after {found.seconds:.0f} s{error}", flush=True)
    return sum(record.state == "failed" for record in records.values())


if __name__ == "__main__":
    raise SystemExit(main())
