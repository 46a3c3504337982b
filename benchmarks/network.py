"""Steps on a slow network, with and without K-FAC, beside kfac-pytorch's; needs root, Linux.

    python -m benchmarks.network [--short] [--hosts N] [--mbit RATE] [--only NAME ...]
        [--out DIRECTORY]

Hosts are network namespaces of this machine behind one switch, with one rank each. Their lines
carry ``--mbit`` a second each way, so little that a step is mostly spent on them, and not on the
cores that all ranks share. The network that is trained has BERT-Large's blocks with an eighth of
their widths, and travels in buckets of a 64th: what takes a second on a line of 20 Mbit/s takes one
for as many of BERT-Large's blocks on a line of 1.3 Gbit/s.

Told are the time of a step under DistributedDataParallel, what came through the fullest host's line
meanwhile, as the kernel counts it, and how much of the time that line needs for it.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import hosts
from benchmarks.hosts import PORT, address, arrived, check, notes_of, switched
from benchmarks.machine import describe
from benchmarks.networks import Transformer
from benchmarks.step_time.contestants import (
    BASES,
    PAPERS,
    Maker,
    Seconds,
    Trainer,
    is_installed,
    kfac_pytorch,
    ours,
    race,
)
from benchmarks.step_time.tasks import LONG, OFTEN, Task, shown, text

SCALE = 64  # of BERT-Large's bytes
BUCKET_MB = 25 / SCALE
BASE = "SGD"
SHARES = {"layer-wise": 0.0, "hybrid 1/2": 0.5, "opt": 1.0}  # of the ranks, as gradient workers
LOOKS = 0.5  # seconds between two at whether a rank has failed


class Told(NamedTuple):
    """Of one contestant's steps."""

    seconds: float
    mb: float  # that came to the host where the most came
    line: float  # seconds that its line needs for them


def task(short: bool) -> Task:
    layers = 1 if short else 2
    return Task(
        "BERT-Large's blocks, an eighth as wide",
        lambda: Transformer(width=128, layers=layers, heads=2, wide=512, causal=False),
        lambda: text(2),
        {},
    )


def contestants() -> tuple[dict[str, Maker], list[str]]:
    """Everyone, the base first, and who is absent."""
    found: dict[str, Maker] = {BASE: BASES[BASE]}
    for name, share in SHARES.items():
        found[f"KFACSGD, {name}"] = ours(grad_worker_fraction=share, bucket_cap_mb=BUCKET_MB)
    if not is_installed(PAPERS):
        return found, [f"{PAPERS} (not installed)"]
    for name, share in SHARES.items():
        found[f"{PAPERS}, {name}"] = functools.partial(_of_world, share)
    return found, []


def _of_world(share: float, model: nn.Module, *rest: Any) -> Sequence[Any]:
    """Their share is of ranks, of which it must be a whole number."""
    fraction = max(share, 1 / dist.get_world_size())
    make = kfac_pytorch(grad_worker_fraction=fraction, allreduce_bucket_cap_mb=BUCKET_MB)
    return make(model, *rest)


# ---- a rank ----


class OnALine:
    """A trainer whose bytes count."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.bytes: list[float] = []  # of a step, in each turn

    def run(self, steps: int) -> list[Seconds]:
        dist.barrier()
        before = arrived().bytes
        seconds = self.trainer.run(steps)
        dist.barrier()
        self.bytes.append((arrived().bytes - before) / steps)
        return seconds


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    makers, _ = contestants()
    found = {}
    for intervals in [(2, 4)] if options.short else [OFTEN, LONG]:
        of = task(options.short)
        parallel = functools.partial(DistributedDataParallel, bucket_cap_mb=BUCKET_MB)
        trainers = {
            name: OnALine(Trainer(of, "cpu", make, intervals, parallel))
            for name, make in makers.items()
            if name == BASE or options.only is None or name in options.only
        }
        (steps,) = race(trainers, intervals[1], 1)
        found[shown(intervals)] = {
            name: {
                "seconds": statistics.fmean(map(sum, steps[name])),
                "bytes": statistics.fmean(one.bytes[1:]),  # not those of the first steps
            }
            for name, one in trainers.items()
        }
    (options.notes / f"rank{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


# ---- the hosts ----


def measure(options: argparse.Namespace) -> dict[str, dict[str, Told]]:
    with notes_of("network") as notes:
        train(options, notes)
        found = [json.loads((notes / f"rank{rank}").read_text()) for rank in range(options.hosts)]
    return {
        title: {
            name: told([x[title][name] for x in found], options.mbit) for name in found[0][title]
        }
        for title in found[0]
    }


def train(options: argparse.Namespace, notes: Path) -> None:
    """A rank on each host, to their ends."""
    command = ["benchmarks.network", "--notes", str(notes)]
    command += ["--short"] if options.short else []
    command += ["--only", *options.only] if options.only else []
    meeting = {"MASTER_ADDR": address(0), "MASTER_PORT": str(PORT)}
    ranks: list[subprocess.Popen[bytes]] = []
    with switched(options.hosts, options.mbit) as names:
        try:
            for rank, name in enumerate(names):
                place = {"RANK": str(rank), "WORLD_SIZE": str(options.hosts)}
                with open(notes / f"log{rank}", "wb") as log:
                    ranks.append(hosts.start(name, command, log, log, **meeting, **place))
            # Where one has failed, the others would wait for it.
            while None in [process.poll() for process in ranks]:
                if any(process.poll() for process in ranks):
                    break
                time.sleep(LOOKS)
            failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        finally:
            hosts.end(ranks)
    if failed:
        said = (notes / f"log{failed[0]}").read_text()
        raise SystemExit(f"network: a rank failed; logs are in {notes}\n{said[-3000:]}")


def told(ranks: Sequence[Mapping[str, Any]], mbit: float) -> Told:
    """From what each rank has seen."""
    fullest = max(rank["bytes"] for rank in ranks)
    seconds = statistics.fmean(rank["seconds"] for rank in ranks)
    return Told(seconds, fullest / 1e6, fullest * 8 / (mbit * 1e6))


def table(found: Mapping[str, Told]) -> list[str]:
    base = found[BASE]
    lines = [f"{'':26} {'s a step':>8} {'of SGD':>7} {'MB':>7} {'line s':>8} {'of it':>7}"]
    for name, of in found.items():
        lines.append(
            f"{name:26} {of.seconds:8.3f} {of.seconds / base.seconds:7.2f} {of.mb:7.2f} "
            f"{of.line:8.3f} {of.line / of.seconds:7.2f}"
        )
    return lines


def host_main(options: argparse.Namespace) -> None:
    check("network", "tc")
    if options.hosts < 2 or options.hosts % 2:
        raise SystemExit(
            f"network: --hosts {options.hosts}; give an even number from 2 on, as hybrid takes half"
        )
    if not options.mbit > 0:
        raise SystemExit(f"network: --mbit {options.mbit:g}; give a rate above 0, such as 20")
    _, absent = contestants()
    where = describe("cpu", 1)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(f"{options.hosts} hosts, {options.mbit:g} Mbit/s each", flush=True)
    if absent:
        print("absent:", ", ".join(absent))
    found = measure(options)
    for title, each in found.items():
        print(f"\n{title}")
        print("\n".join(table(each)))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / ("network_cpu_short" if options.short else "network_cpu")
        results = {t: {n: of._asdict() for n, of in each.items()} for t, each in found.items()}
        settings = {"hosts": options.hosts, "mbit": options.mbit}
        record = {"machine": where, "settings": settings, "results": results}
        stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nsaved as {stem}.json")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    everyone, _ = contestants()
    parser.add_argument(
        "--short", action="store_true", help="tiny, to try it out: its figures say nothing"
    )
    parser.add_argument("--hosts", type=int, default=8, help="an even number; 8")
    parser.add_argument("--mbit", type=float, default=20, help="a second, of each line; 20")
    quoted = ", ".join(f'"{name}"' for name in everyone)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=list(everyone), help=f"beside SGD: {quoted}"
    )
    parser.add_argument("--out", type=Path, help="where to keep the results")
    hosts.main(parser, arguments, host_main, rank_main)


if __name__ == "__main__":
    main()
