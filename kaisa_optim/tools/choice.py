"""Strategies for one model side by side: their bytes, their times, and the best that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..account import Account
from ..errors import invalid_because
from ..plan.assignment import Grid, Hybrid, LayerWise, Opt, Task, WorkAssignment, assign, make_grid
from ..plan.facts import LayerFacts, Sizes, Work
from ..plan.schedule import Schedule
from .hardware import Hardware
from .prices import Clock, Passes, StepTimes
from .texts import milliseconds, shown


class Candidate(NamedTuple):
    """A way to spread the work, and the options that ask for it."""

    title: str
    strategy: WorkAssignment
    options: Mapping[str, Any]


def candidates(world: int, colocate: bool | None = None) -> list[Candidate]:
    """Return layer-wise, the fractions between for which workers divide the ranks, and opt.

    With ``colocate`` False, all have two gradient workers or more.
    """
    among = []
    if colocate is not False or world == 1:
        among.append(Candidate("layer-wise", LayerWise(), {"assignment": "layer-wise"}))
    for workers in range(2, world):
        if world % workers == 0:
            share = workers / world
            options = {"grad_worker_fraction": share}
            among.append(Candidate(f"{workers}/{world} = {share:.4g}", Hybrid(share), options))
    if world > 1:
        among.append(Candidate("opt", Opt(), {"assignment": "opt"}))
    return among


class Momentum(NamedTuple):
    """A parameter's momentum, which gradient workers of any of its layers keep."""

    layers: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class Case:
    """One model under one optimizer: everything that plans for it depend on.

    ``layers`` have no placement yet, and are in the model's order.
    """

    layers: Sequence[LayerFacts]
    sizes: Sizes
    work: Work
    intervals: tuple[int, int]  # to gather, to refresh
    staggered: bool  # layers gather in slots
    weights: int  # bytes, buffers included
    gradients: int
    base: int  # bytes of the base's state that all ranks keep
    whole: int = 0  # bytes of the base's state without K-FAC
    momenta: Sequence[Momentum] = ()
    # By which ranks are balanced, if these differ from the layers' own: of frozen parameters, too.
    tasks: Sequence[Task] = ()
    colocate: bool | None = None
    bucket_bytes: int = 25 * 2**20
    passes: Passes = Passes()  # noqa: RUF009 (it is frozen)

    @property
    def fixed(self) -> int:
        """The bytes that every rank keeps under any strategy."""
        return self.weights + self.gradients + self.base

    def account(self, strategy: WorkAssignment, world: int) -> Account:
        """Return the account of these layers over so many ranks."""
        grid = make_grid(strategy, world)
        tasks = self.tasks or [layer.task for layer in self.layers]
        colocate = self.colocate if world > 1 else None
        places = assign(strategy, tasks, grid, colocate)
        layers = [layer._replace(placement=places[layer.name]) for layer in self.layers]
        return Account(layers, grid, self.sizes, self.bucket_bytes)

    def momenta_by_column(self, account: Account) -> list[int]:
        """Return the bytes of momenta on the ranks of each column."""
        column_of = {x.name: x.placement.g % account.grid.columns for x in account.layers}
        sizes = [0] * account.grid.columns
        for layers, size in self.momenta:
            for column in {column_of[name] for name in layers}:
                sizes[column] += size
        return sizes


class Priced(NamedTuple):
    """A candidate with its bytes on the ranks, and its times."""

    candidate: Candidate
    grid: Grid
    kfac: list[int]  # bytes of K-FAC's state, by rank
    momenta: list[int]  # bytes, by rank
    sums: int  # bytes that wait between a backward pass and its step, at most, on each rank
    fixed: int
    received: list[float]  # bytes a step, by rank
    times: StepTimes

    @property
    def needs(self) -> int:
        """Bytes on the fullest rank: weights, gradients, the base's state, and all of K-FAC."""
        return self.fixed + self.sums + max(map(sum, zip(self.kfac, self.momenta, strict=True)))

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that ask an optimizer's constructor for this strategy."""
        return self.candidate.options

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return sum(self.times.mean.values())

    @property
    def base(self) -> float:
        """Seconds of a step without K-FAC."""
        return sum(self.times.quiet[x] for x in ("passes", "average gradients", "base step"))


def price(case: Case, candidate: Candidate, world: int, hardware: Hardware) -> Priced:
    """Return a candidate's bytes and times over so many ranks."""
    account = case.account(candidate.strategy, world)
    grid, of_column = account.grid, case.momenta_by_column(account)
    schedule = Schedule(account.layers, case.staggered)
    gather, refresh = case.intervals
    clock = Clock(account, hardware, case.work, case.passes, case.gradients)
    return Priced(
        candidate,
        grid,
        [rank["total"] for rank in account.memory()],
        [of_column[rank % grid.columns] for rank in range(world)],
        account.pending(account.names),
        case.fixed,
        [rank["total"] for rank in account.per_step(schedule, gather, refresh)],
        clock.times(schedule, gather, refresh),
    )


@dataclass(frozen=True)
class Choice:
    """All candidates, the best that fits, and why."""

    case: Case
    hardware: Hardware
    world: int
    budget: int  # bytes on a rank
    priced: Sequence[Priced]

    @property
    def fitting(self) -> list[Priced]:
        return [x for x in self.priced if x.needs <= self.budget]

    @property
    def best(self) -> Priced | None:
        """The candidate with the shortest mean step; of equal ones, the one that needs least."""
        return min(self.fitting, key=lambda x: (x.step, x.needs), default=None)

    @property
    def nearest(self) -> Priced:
        """The candidate that needs least memory."""
        return min(self.priced, key=lambda x: (x.needs, x.step))

    @property
    def reason(self) -> str:
        """One sentence: why the best is the best, or how much memory is missing."""
        best, limit, least = self.best, self.budget, self.nearest
        if best is None:
            return (
                f"no strategy fits into {shown(limit)}: the smallest, {least.candidate.title}, "
                f"needs {shown(least.needs)} on its fullest rank, {shown(least.needs - limit)} more"
            )
        if len(self.priced) == 1:
            return f"{best.candidate.title} is the only strategy, and needs {shown(best.needs)}"
        return (
            f"{best.candidate.title} has the shortest step of those that fit into {shown(limit)}: "
            f"{milliseconds(best.step)} ms on average, with {shown(best.needs)} on the fullest rank"
            f" (estimated within {100 * self.hardware.margin:.0f} %, for {self.hardware.name})"
        )

    def refuse_if_none_fits(self) -> Priced:
        """Return the best; raise an error that says what the smallest needs."""
        if self.best is not None:
            return self.best
        least, fixed = f"{self.nearest.needs:,} bytes", shown(self.case.fixed)
        remedy = f"give at least {least}, use more ranks, or a lower max_factor_size"
        why = f"{self.reason}, where weights, gradients and the base's state take {fixed}"
        raise invalid_because("memory_budget", f"{why}; {remedy}")
