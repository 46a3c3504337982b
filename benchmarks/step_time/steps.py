"""Whole steps: base optimizers', K-FAC's over each of them and peers', on one device.

All contestants of a task train copies of one network on the same batches, in turns of ten steps,
each in a process of its own. A ratio compares the means of a contestant and of its base over the
same interval of refreshes; what is printed is the median over the intervals. "floor" is the ratio
that floating-point operations alone would give: those of the passes and of ``step()``, were all
equally fast.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure as Drawing
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import peak_mb

from .apart import Apart, forkserver
from .contestants import (
    BRAIN,
    NEVER,
    PAPERS,
    TURN,
    Seconds,
    Trainer,
    base_of,
    contestants,
    race,
    takes_part,
)
from .report import Figure, Settings
from .tasks import Task, shown, tasks

STAGES = ("forward and backward", "gather factors", "update and refresh", "precondition and step")
# What K-FAC may add to a step, and to memory, as a share of what the papers' code adds.
PART_WANTED = {"resnet32": 1 / 5, "transformer": 1 / 2}
MEMORY_WANTED = 1 / 3
SLOWEST_WANTED = 1.5
PEAKS = 3  # of each are measured: what an allocator keeps of freed memory differs by a tenth


@dataclass
class Measured:
    """One contestant at one pair of intervals."""

    name: str
    ms: float  # mean step, the median over the intervals
    ratio: float  # to the base
    part: float  # what it adds to the base's step, in ms
    slowest: float = 0.0  # 95th percentile of the steps, over their median
    beside: float | None = None  # its part, over kfac-pytorch's
    floor: float | None = None  # of the ratio, by counted operations
    stages: dict[str, float] = field(default_factory=dict)
    peak_mb: float | None = None  # above the base's
    host_syncs: str | None = None  # on CUDA: "none", or what torch said of the first


def run(settings: Settings) -> tuple[dict[str, list[Measured]], list[Figure]]:
    """Return all that was measured by task and intervals, and the figures that sum it up."""
    found: dict[str, list[Measured]] = {}
    figures: list[Figure] = []
    for name in settings.tasks:
        task = tasks(settings.short)[name]
        makers, absent = contestants(task, settings.device)
        if settings.only is not None:
            wanted = {*settings.only, *map(base_of, settings.only)}
            makers = {name: make for name, make in makers.items() if name in wanted}
            absent = [name for name in absent if name.startswith(tuple(settings.only))]
        if absent:
            print(f"absent: {', '.join(absent)}")
        for intervals in task.intervals:
            title = f"{task.title} {shown(intervals)}"
            print(f"{title} (steps between statistics / between refreshes)", flush=True)
            some = [one for one in makers if takes_part(one, intervals)]
            results = measure(name, some, intervals, settings)
            if settings.device == "cpu":
                times = 1 if settings.short else PEAKS
                print(f"  timed; {times * len(results)} processes measure memory", flush=True)
                add_peaks(results, functools.partial(peak, name, settings.short, intervals), times)
            print("\n".join(table(results)), end="\n\n", flush=True)
            found[title] = results
            figures += summary(name, task, intervals, results)
    return found, figures


def measure(
    task: str, names: Sequence[str], intervals: tuple[int, int], settings: Settings
) -> list[Measured]:
    every, refreshed = intervals
    with contextlib.ExitStack() as stack:
        trainers = {}
        for name in names:
            at = settings.device, intervals, settings.threads
            trainers[name] = stack.enter_context(
                contextlib.closing(Apart(task, settings.short, name, *at))
            )
        found = race(trainers, refreshed, settings.rounds(refreshed))
        results = []
        for name, trainer in trainers.items():
            own, base = ([round_[x] for round_ in found] for x in (name, base_of(name)))
            one = compared(name, own, base)
            if name.startswith("KFAC"):
                quiet = trainer(Trainer.quiet, TURN)
                # The machine may be faster or slower by now: the base, in the next turn, tells.
                of_base = trainers[base_of(name)]
                quiet = paced(quiet, base, of_base.run(TURN))
                one.stages, one.slowest = stages([t for round_ in own for t in round_], quiet)
                operations = of_base(Trainer.operations)
                one.floor = floor(operations, trainer(preconditioning), of_base(preconditioning))
            if settings.device == "cuda":
                one.host_syncs = trainer(host_syncs, every)
            results.append(one)
    set_beside(results)
    return results


def compared(
    name: str, own: Sequence[Sequence[Seconds]], base: Sequence[Sequence[Seconds]]
) -> Measured:
    """From the steps of each round, its own and the base's."""
    means, bases = ([1e3 * statistics.fmean(map(sum, r)) for r in rounds] for rounds in (own, base))
    pairs = list(zip(means, bases, strict=True))
    return Measured(
        name,
        statistics.median(means),
        statistics.median(mean / other for mean, other in pairs),
        statistics.median(mean - other for mean, other in pairs),
    )


def papers_of(one: Measured, results: Sequence[Measured]) -> Measured | None:
    """The papers' code beside one of ours, in its precision, where that was measured."""
    if not one.name.startswith("KFACSGD"):
        return None
    name = PAPERS + BRAIN if one.name.endswith(BRAIN) else PAPERS
    return next((other for other in results if other.name == name), None)


def set_beside(results: Sequence[Measured]) -> None:
    for one in results:
        papers = papers_of(one, results)
        if papers is not None and papers.part > 0:
            one.beside = one.part / papers.part


def paced(
    quiet: Sequence[Seconds], race: Sequence[Sequence[Seconds]], now: Sequence[Seconds]
) -> list[Seconds]:
    """What steps of now would have taken in the race, of which the base ran both."""
    then = [sum(times) for round_ in race for times in round_]
    pace = statistics.median(then) / statistics.median(map(sum, now))
    return [(pace * passes, pace * applied) for passes, applied in quiet]


def stages(times: Sequence[Seconds], quiet: Sequence[Seconds]) -> tuple[dict[str, float], float]:
    """Where K-FAC's time goes, in ms a step: beside ``quiet`` steps, which only precondition.

    Also the slowest steps, over the median: as layers take turns, all gather about alike.
    """
    passes, applied = (1e3 * statistics.median(part) for part in zip(*quiet, strict=True))
    all_passes, all_steps = (1e3 * statistics.fmean(part) for part in zip(*times, strict=True))
    whole = sorted(map(sum, times))
    slowest = whole[int(0.95 * (len(whole) - 1))] / statistics.median(whole)
    amounts = (passes, all_passes - passes, all_steps - applied, applied)
    return dict(zip(STAGES, amounts, strict=True)), slowest


def preconditioning(trainer: Trainer) -> int:
    """Floating-point operations of one ``step()`` that only preconditions; those of products."""
    if hasattr(trainer.optimizers[0], "preconditioner"):
        trainer.quiet(1)
    trainer.forward_and_backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration")
        # Alike on all CPUs: where bfloat16 is fast, other products are taken.
        with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
            for optimizer in trainer.optimizers:
                optimizer.step()
    return int(counter.get_total_flops())


def floor(passes: int, applied: int, of_base: int) -> float:
    """Return a step over the base's, by operations."""
    return (passes + applied) / (passes + of_base)


def host_syncs(trainer: Trainer, every: int) -> str:
    """Whether the host waits for the device in steps that gather, but do not refresh."""
    for optimizer in trainer.optimizers:
        if hasattr(optimizer, "preconditioner"):
            optimizer.preconditioner.factor_update_steps = every
            optimizer.preconditioner.inv_update_steps = NEVER
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.run(2 * every)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


# ---- memory ----


def add_peaks(results: Sequence[Measured], peak_of: functools.partial[float], times: int) -> None:
    peaks = {
        one.name: statistics.median(peak_of(one.name) for _ in range(times)) for one in results
    }
    for one in results:
        if base_of(one.name) != one.name:
            one.peak_mb = peaks[one.name] - peaks[base_of(one.name)]


def peak(task_name: str, short: bool, intervals: tuple[int, int], contestant: str) -> float:
    """Peak of a process that trains three steps, in MB; of all its memory."""
    with forkserver().Pool(1) as pool:
        return pool.apply(_peak, (task_name, short, intervals, contestant))


def _peak(task_name: str, short: bool, intervals: tuple[int, int], contestant: str) -> float:
    torch.set_num_threads(1)
    task = tasks(short)[task_name]
    makers, _ = contestants(task, "cpu")
    Trainer(task, "cpu", makers[contestant], intervals).run(3)
    return peak_mb()


# ---- output ----


def table(results: Sequence[Measured]) -> Iterator[str]:
    widest = max(23, *(len(one.name) for one in results))
    yield (
        f"{'':{widest}} {'ms/step':>9} {'ratio':>6} {'floor':>6} {'adds ms':>8} {PAPERS:>14}"
        f" {'slowest':>8} {'peak MB':>8}"
    )
    for one in results:
        added = "" if base_of(one.name) == one.name else f"{one.part:.1f}"
        floor = "" if one.floor is None else f"{one.floor:.2f}"
        beside = "" if one.beside is None else f"{one.beside:.2f} of it"
        slowest = f"{one.slowest:.2f}" if one.slowest else ""
        memory = "" if one.peak_mb is None else f"{one.peak_mb:+.0f}"
        yield (
            f"{one.name:{widest}} {one.ms:9.1f} {one.ratio:6.2f} {floor:>6} {added:>8} {beside:>14}"
            f" {slowest:>8} {memory:>8}"
        )
        if one.host_syncs is not None:
            yield f"{'':{widest}} host syncs: {one.host_syncs}"


def summary(
    name: str, task: Task, intervals: tuple[int, int], results: Sequence[Measured]
) -> Iterator[Figure]:
    title = f"{task.title} {shown(intervals)}"
    for one in results:
        base = base_of(one.name)
        if base == one.name:
            continue
        wanted = task.wanted.get((one.name, intervals))
        yield Figure(f"{title}, {one.name}", one.ratio, f" × {base}'s step", wanted)
        papers = papers_of(one, results)
        if papers is not None and one.beside is not None:
            before = f"{title}, {one.name}, K-FAC part beside {papers.name}'s"
            yield Figure(before, one.beside, wanted=PART_WANTED.get(name))
        if one.slowest:
            before = f"{title}, {one.name}, slowest steps"
            yield Figure(before, one.slowest, " × the median", SLOWEST_WANTED)
        if papers is not None and one.peak_mb is not None and papers.peak_mb:
            before = f"{title}, {one.name}, peak memory above SGD's beside {papers.name}'s"
            yield Figure(before, one.peak_mb / papers.peak_mb, wanted=MEMORY_WANTED)


def plot(found: dict[str, list[Measured]], path: Path) -> None:
    """Stages of our steps, one bar for each task, interval and method."""
    bars = [(f"{title}\n{one.name}", one) for title, all_ in found.items() for one in all_]
    bars = [(title, one) for title, one in bars if one.stages]
    figure = Drawing(figsize=(9, 1 + 0.6 * len(bars)), layout="tight")
    axes = figure.subplots()
    left = [0.0] * len(bars)
    for stage in STAGES:
        widths = [max(0.0, one.stages[stage]) for _, one in bars]
        axes.barh([title for title, _ in bars], widths, left=left, label=stage)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.legend()
    figure.savefig(path, dpi=120)
