"""Simulated steps: a clock for each rank, through one interval of refreshes.

A stage of a rank takes the time that plans price. Where ranks exchange bytes, all of them begin
when the last has come; so a rank's wait for others is seen, which no sum over stages shows.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..account import Account
from ..plan.assignment import Grid
from ..plan.schedule import Schedule
from .choice import Candidate, Case
from .hardware import Hardware
from .prices import Clock

WAIT = "wait"
_MICRO = 1e6  # Chrome's traces count microseconds


class Event(NamedTuple):
    """One stage of one rank."""

    rank: int
    step: int
    stage: str
    start: float
    seconds: float


class Stage(NamedTuple):
    """A part of a step: seconds by rank, and which ranks begin it together."""

    name: str
    seconds: Sequence[float]
    together: Callable[[Grid], Sequence[range]] | None = None


def everyone(grid: Grid) -> list[range]:
    return [range(grid.world)]


def columns(grid: Grid) -> list[range]:
    """Return the ranks that share state: each column of the grid."""
    return [grid.workers_of(column) for column in range(grid.columns)]


def rows(grid: Grid) -> list[range]:
    """Return the ranks that hand gradients to each other: each row of the grid."""
    return [grid.receivers_of(first) for first in range(0, grid.world, grid.columns)]


@dataclass(frozen=True)
class Simulation:
    """One interval of steps."""

    grid: Grid
    steps: list[float]  # seconds of each, of the slowest rank
    events: list[Event]  # of the first ranks
    busy: dict[str, float]  # mean seconds a step and rank, by stage, waits too

    @property
    def mean(self) -> float:
        """Mean seconds of a step."""
        return sum(self.steps) / len(self.steps)

    def trace(self) -> str:
        """Return a trace that chrome://tracing and Perfetto show, a line a rank."""
        events: list[dict[str, Any]] = [
            {
                "name": event.stage,
                "cat": f"step {event.step}",
                "ph": "X",
                "pid": 0,
                "tid": event.rank,
                "ts": _MICRO * event.start,
                "dur": _MICRO * event.seconds,
            }
            for event in self.events
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def run(grid: Grid, steps: Sequence[Sequence[Stage]], shown: int) -> Simulation:
    """Return the times of these steps; events are kept of the ``shown`` first ranks."""
    clocks, ends = [0.0] * grid.world, [0.0]
    events: list[Event] = []
    busy: dict[str, float] = {}

    def note(rank: int, step: int, stage: str, seconds: float) -> None:
        busy[stage] = busy.get(stage, 0.0) + seconds
        if rank < shown and seconds > 0:
            events.append(Event(rank, step, stage, clocks[rank], seconds))
        clocks[rank] += seconds

    for number, stages in enumerate(steps):
        for stage in stages:
            for group in stage.together(grid) if stage.together is not None else ():
                last = max(clocks[rank] for rank in group)
                for rank in group:
                    if clocks[rank] < last:
                        note(rank, number, WAIT, last - clocks[rank])
            for rank, seconds in enumerate(stage.seconds):
                if seconds > 0:
                    note(rank, number, stage.name, seconds)
        ends.append(max(clocks))
    each = [after - before for before, after in itertools.pairwise(ends)]
    count = grid.world * len(steps)
    return Simulation(grid, each, events, {stage: x / count for stage, x in busy.items()})


def simulate(
    case: Case, candidate: Candidate, world: int, hardware: Hardware, shown: int = 64
) -> Simulation:
    """Return one interval of steps under a strategy; ``shown`` ranks have a timeline."""
    account = case.account(candidate.strategy, world)
    clock = Clock(account, hardware, case.work, case.passes, case.gradients)
    schedule = Schedule(account.layers, case.staggered)
    return run(account.grid, [*_steps(account, clock, schedule, case.intervals)], shown)


def _steps(
    account: Account, clock: Clock, schedule: Schedule, intervals: tuple[int, int]
) -> Iterator[list[Stage]]:
    grid, (gather, refresh) = account.grid, intervals
    gathering, due = schedule.gathering_slots(gather), schedule.refresh_slots(gather, refresh)
    quiet, of_column = clock.always(max(account.gradients)), clock.by_column()
    preconditioned = [of_column.get(rank % grid.columns, 0.0) for rank in range(grid.world)]
    # A worker's bytes do not depend on its row, so each rank's wait is that of its group.
    for step in range(refresh):
        added = dict.fromkeys(("statistics", "reduce", "share"), 0.0)
        decomposed = [0.0] * grid.world
        if step % gather in gathering:
            names = gathering[step % gather]
            added |= clock.gathering(names, max(account.sums(names)))
        if step in due:
            arriving = max(account.state(due[step]))
            added["share"] = clock.refreshing(due[step], arriving)["share"]
            for rank, seconds in clock.decompose(due[step]).items():
                decomposed[rank] = seconds

        def on_all(seconds: float) -> list[float]:
            return [seconds] * grid.world

        yield [
            Stage("passes", on_all(quiet["passes"])),
            Stage("statistics", on_all(added["statistics"])),
            Stage("average gradients", on_all(quiet["average gradients"]), everyone),
            Stage("reduce", on_all(added["reduce"]), everyone if added["reduce"] else None),
            Stage("decompose", decomposed),
            Stage("share", on_all(added["share"]), columns if added["share"] else None),
            Stage("precondition", preconditioned),
            Stage("hand out", on_all(quiet["hand out"]), rows if grid.columns > 1 else None),
            Stage("base step", on_all(quiet["base step"])),
        ]
