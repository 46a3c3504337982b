"""How a step grows from one rank to several (gloo, one thread each), with and without K-FAC.

Every rank has the same batch as a rank alone would have. Processes on one machine also slow each
other down without a word exchanged, as they share its memory bandwidth and its caches. That is no
optimizer's fault, so "one rank" is measured as busy as several are: each process trains a copy of
its own, under DistributedDataParallel over itself alone, while the others train theirs. All
contestants live in the same processes and take turns of ten steps, which begin together.

The growth is a step of several ranks over one of a rank alone. What K-FAC is to be blamed for is
its growth over that of the base optimizer under DistributedDataParallel, in the same interval of
refreshes; the median over the intervals is printed. A rank's share of the decompositions shrinks
as ranks are added, so K-FAC's growth may be the smaller one.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure as Drawing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .contestants import BASES, Maker, Trainer, ours, race
from .report import Figure, Report, Settings
from .tasks import shown, tasks

WANTED = 1.1
# Milliseconds of a step by contestant, alone and together, for each round.
Times = dict[str, tuple[list[float], list[float]]]


class Growth(NamedTuple):
    """Of one contestant."""

    alone: float  # ms
    together: float  # ms
    growth: float
    beside: float  # that, over the base's


def run(settings: Settings) -> Report:
    found: dict[str, dict[str, Growth]] = {}
    figures = []
    for name in settings.tasks:
        task = tasks(settings.short)[name]
        for intervals in task.intervals:
            title = f"{task.title} {shown(intervals)}"
            print(f"{title}, 1 to {settings.ranks} ranks", flush=True)
            found[title] = growths(measure(name, intervals, settings))
            print("\n".join(table(found[title])), end="\n\n", flush=True)
            figures += [
                Figure(f"{title}, {one}, growth beside SGD's", of.beside, wanted=WANTED)
                for one, of in found[title].items()
                if one != "SGD"
            ]
    results = {
        title: {one: of._asdict() for one, of in each.items()} for title, each in found.items()
    }
    return Report(results, figures, functools.partial(plot, found))


def assignments(world: int) -> dict[str, float]:
    """Shares of the ranks that precondition a layer. Two ranks have no hybrid of their own."""
    fractions = {"layer-wise": 1 / world, "opt": 1.0}
    if world % 2 == 0 and world > 2:
        fractions["hybrid 1/2"] = 0.5
    return fractions


def measure(name: str, intervals: tuple[int, int], settings: Settings) -> Times:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        work = functools.partial(
            _rank,
            f"{folder}/store",
            settings.ranks,
            name,
            settings.short,
            intervals,
            settings.rounds(intervals[1]),
        )
        # Each waits for the others to come, so that none takes the work of two.
        with ProcessPoolExecutor(settings.ranks, context) as pool:
            found = list(pool.map(work, range(settings.ranks)))
    return {one: mean_of_ranks([times[one] for times in found]) for one in found[0]}


def mean_of_ranks(
    ranks: Sequence[tuple[list[float], list[float]]],
) -> tuple[list[float], list[float]]:
    """Over the ranks, of each round."""
    alone, together = ([list(r) for r in zip(*of, strict=True)] for of in zip(*ranks, strict=True))
    return [statistics.fmean(r) for r in alone], [statistics.fmean(r) for r in together]


def growths(times: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> dict[str, Growth]:
    """From the times of each round, alone and together; SGD's are what others are held against."""

    def of_rounds(name: str) -> list[float]:
        return [after / before for before, after in zip(*times[name], strict=True)]

    def of_one(name: str) -> Growth:
        alone, together = map(statistics.median, times[name])
        own = of_rounds(name)
        beside = statistics.median(o / b for o, b in zip(own, of_rounds("SGD"), strict=True))
        return Growth(alone, together, statistics.median(own), beside)

    return {name: of_one(name) for name in times}


# ---- a rank ----


def _rank(
    store: str,
    world: int,
    name: str,
    short: bool,
    intervals: tuple[int, int],
    rounds: int,
    rank: int,
) -> Times:
    torch.set_num_threads(1)
    # Otherwise gloo looks up the host's name, which may lead anywhere.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=10),
    )
    try:
        groups = [dist.new_group([one]) for one in range(world)]
        return _times(name, short, intervals, rounds, groups[rank])
    finally:
        dist.destroy_process_group()


def _times(
    name: str, short: bool, intervals: tuple[int, int], rounds: int, own: dist.ProcessGroup
) -> Times:
    task, refreshed = tasks(short)[name], intervals[1]
    whole = dist.group.WORLD
    # Of each contestant, with the group that averages its gradients.
    makers: dict[tuple[str, str], tuple[Maker, dist.ProcessGroup | None]] = {
        ("SGD", "alone"): (BASES["SGD"], own),
        ("SGD", "together"): (BASES["SGD"], whole),
        ("KFACSGD", "alone"): (ours(process_group=own), own),
    }
    names = ["SGD"]
    for strategy, fraction in assignments(dist.get_world_size()).items():
        names.append(f"KFACSGD, {strategy}")
        makers[names[-1], "together"] = (ours(grad_worker_fraction=fraction), whole)
    trainers = {
        key: Trainer(
            task,
            "cpu",
            make,
            intervals,
            functools.partial(_parallel, group),
        )
        for key, (make, group) in makers.items()
    }
    found = race(trainers, refreshed, rounds, dist.barrier)
    ms = {
        key: [1e3 * statistics.fmean(map(sum, round_[key])) for round_ in found] for key in trainers
    }
    return {one: (ms[one.split(",")[0], "alone"], ms[one, "together"]) for one in names}


def _parallel(group: dist.ProcessGroup | None, model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


# ---- output ----


def table(found: Mapping[str, Growth]) -> Iterator[str]:
    yield f"{'':22} {'alone ms':>9} {'ranks ms':>9} {'growth':>7} {'of SGD':>7}"
    for name, of in found.items():
        beside = "" if name == "SGD" else f"{of.beside:.2f}"
        yield f"{name:22} {of.alone:9.1f} {of.together:9.1f} {of.growth:7.2f} {beside:>7}"


def plot(found: Mapping[str, Mapping[str, Growth]], path: Path) -> None:
    bars = [(f"{title}\n{name}", of) for title, each in found.items() for name, of in each.items()]
    figure = Drawing(figsize=(9, 1 + 0.5 * len(bars)), layout="tight")
    axes = figure.subplots()
    axes.barh([title for title, _ in bars], [of.growth for _, of in bars])
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("a step of several ranks, over one of a rank alone")
    figure.savefig(path, dpi=120)
