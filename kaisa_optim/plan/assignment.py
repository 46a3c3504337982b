"""Who works for which layer: gradient workers, and the ranks that keep and decompose the factors.

The answer follows from shapes, in plain Python and without a random choice: every rank finds it.
"""

from __future__ import annotations

import heapq
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import invalid, invalid_because, is_real


class Task(NamedTuple):
    """One layer's work, as its shapes tell."""

    name: str
    a: int  # size of its A
    g: int
    diagonal_a: bool = False
    diagonal_g: bool = False
    blocks: int = 1  # Kronecker pairs that the layer consists of


class Grid(NamedTuple):
    """The ranks of one K-FAC world: ``workers`` rows, one column for each share of the layers."""

    # The ranks of a column precondition its layers; each hands the gradients to its row. Rows must
    # be neighbours: gradients travel most often, and so stay on one node.
    world: int
    workers: int  # gradient workers of a layer; divides world

    @property
    def columns(self) -> int:
        return self.world // self.workers

    def workers_of(self, rank: int) -> range:
        """Return the column of a rank: the ranks that precondition a layer together."""
        return range(rank % self.columns, self.world, self.columns)

    def receivers_of(self, rank: int) -> range:
        """Return the row of a rank: the ranks to which one worker hands gradients, with itself."""
        start = rank // self.columns * self.columns
        return range(start, start + self.columns)


class Placement(NamedTuple):
    """The ranks that keep and decompose a layer's factors."""

    a: int
    g: int


class WorkAssignment(ABC):
    """How the work of the layers is spread over the ranks; subclass it for another way.

    A subclass must define ``gradient_workers`` alone. The balance weighs each factor's ``cost``,
    and ``place`` is the balance itself.
    """

    colocate: bool = True  # A and G of a layer on one rank, where the user does not say

    @abstractmethod
    def gradient_workers(self, world: int) -> int:
        """Return how many of ``world`` ranks make a layer's direction: a divisor of ``world``."""

    def cost(self, size: int, diagonal: bool) -> float:
        """Return the cost of one factor, here the time of its decomposition."""
        return float(size) if diagonal else float(size) ** 3

    def place(
        self, tasks: Sequence[Task], grid: Grid, *, colocate: bool, load: Sequence[float]
    ) -> list[Placement]:
        """Return the ranks that own the factors of each task, in the order of ``tasks``.

        ``load`` is the cost that earlier layers have put on each rank. A and G of a layer belong in
        one column of the grid, and on one rank if ``colocate``.
        """
        costs = [_factor_costs(self, task) for task in tasks]
        if colocate:
            owners = balance([a + g for a, g in costs], load)
            return [Placement(rank, rank) for rank in owners]
        # The layers over the columns, then the factors of each column over its ranks.
        totals = []
        for column in range(grid.columns):
            totals.append(math.fsum(load[rank] for rank in grid.workers_of(column)))
        columns = balance([a + g for a, g in costs], totals)
        placements = [Placement(0, 0)] * len(tasks)
        for column in range(grid.columns):
            ranks = grid.workers_of(column)
            layers = [layer for layer, chosen in enumerate(columns) if chosen == column]
            factors = [cost for layer in layers for cost in costs[layer]]  # A, G, A, G, ...
            loads_of = [load[rank] for rank in ranks]
            owners = [ranks[i] for i in balance(factors, loads_of)]
            for layer, a, g in zip(layers, owners[::2], owners[1::2], strict=True):
                placements[layer] = Placement(a, g)
        return placements

    def __repr__(self) -> str:
        # Ranks compare this text, so it must not contain an address.
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"


@dataclass(frozen=True)
class LayerWise(WorkAssignment):
    """One gradient worker a layer: the least memory. It balances memory."""

    def gradient_workers(self, world: int) -> int:
        return 1

    def cost(self, size: int, diagonal: bool) -> float:
        return float(size) if diagonal else float(size) ** 2


@dataclass(frozen=True)
class Hybrid(WorkAssignment):
    """A share of the ranks are a layer's gradient workers."""

    grad_worker_fraction: float = 0.5

    def __post_init__(self) -> None:
        check_fraction(self.grad_worker_fraction)

    def gradient_workers(self, world: int) -> int:
        return max(1, round(self.grad_worker_fraction * world))


@dataclass(frozen=True)
class Opt(WorkAssignment):
    """All ranks are gradient workers: no gradients travel, A and G are decomposed side by side."""

    colocate = False

    def gradient_workers(self, world: int) -> int:
        return world


def check_fraction(value: Any) -> float:
    if not is_real(value) or not 0 <= value <= 1:
        must = "it must be between 0 and 1, the share of the ranks that are gradient workers of a "
        must += "layer, such as 0.5 (0 means one rank)"
        raise invalid("grad_worker_fraction", value, must)
    return float(value)


def choose(
    assignment: str | WorkAssignment | None, grad_worker_fraction: float | None = None
) -> WorkAssignment:
    """Return the strategy that the user's arguments name; `make_grid` checks that they agree."""
    if isinstance(assignment, WorkAssignment):
        return assignment
    fraction = grad_worker_fraction
    hybrid = Hybrid() if fraction is None else Hybrid(fraction)
    strategies = {"layer-wise": LayerWise(), "hybrid": hybrid, "opt": Opt()}
    name = ("layer-wise" if fraction is None else "hybrid") if assignment is None else assignment
    if isinstance(name, str) and name in strategies:
        return strategies[name]
    must = 'choose from "layer-wise", "hybrid", "opt", or pass an instance of a WorkAssignment'
    raise invalid("assignment", assignment, must)


def make_grid(
    strategy: WorkAssignment, world: int, grad_worker_fraction: float | None = None
) -> Grid:
    """Return the grid that a strategy asks for; a fraction given beside it must mean the same."""
    if not _is_count(world) or world < 1:
        raise invalid("world", world, "it must be a number of ranks, at least 1")
    if world == 1:
        return Grid(1, 1)  # a script for many ranks must also run on one
    workers = strategy.gradient_workers(world)
    near: list[int] = []  # the nearest divisors, below and above
    if _is_count(workers) and 1 <= workers <= world:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        near = [max(n for n in divisors if n <= workers), min(n for n in divisors if n >= workers)]
    if near and isinstance(strategy, Hybrid) and workers not in near:
        fractions = " or ".join(f"{n}/{world} = {n / world:.4g}" for n in near)
        why = f"{strategy.grad_worker_fraction} makes {workers} of {world} ranks gradient workers, "
        why += f"and {workers} does not divide {world}; use {fractions}"
        raise invalid_because("grad_worker_fraction", why)
    if workers not in near:
        such_as = f", such as {near[0]} or {near[1]}" if near else ""
        why = f"{type(strategy).__name__}.gradient_workers({world}) returned {workers!r}; it must "
        why += f"be a whole number from 1 to {world} that divides {world}{such_as}"
        raise invalid_because("assignment", why)
    fraction = grad_worker_fraction
    wanted = workers if fraction is None else Hybrid(fraction).gradient_workers(world)
    if wanted != workers:
        why = f"{fraction!r} makes {wanted} of {world} ranks gradient workers, "
        why += f"but assignment {strategy!r} makes {workers}; leave out one of the two"
        raise invalid_because("grad_worker_fraction", why)
    return Grid(world, int(workers))


def assign(
    strategy: WorkAssignment,
    tasks: Sequence[Task],
    grid: Grid,
    colocate: bool | None = None,
    load: Sequence[float] | None = None,
) -> dict[str, Placement]:
    """Return the strategy's placement of each task, by the task's name, after checks.

    ``load`` is the cost of earlier tasks on each rank (see `loads`); these tasks keep their ranks.
    """
    if colocate is False and grid.workers == 1 < grid.world:
        why = f"False needs two gradient workers or more, and {strategy!r} means one of "
        why += f"{grid.world} ranks; leave it out, or use a larger grad_worker_fraction"
        raise invalid_because("colocate_factors", why)
    together = bool(strategy.colocate if colocate is None else colocate) or grid.workers == 1
    load = [0.0] * grid.world if load is None else list(load)
    answer = strategy.place(tuple(tasks), grid, colocate=together, load=load)
    author = f"{type(strategy).__name__}.place"
    if not isinstance(answer, Sequence) or len(answer) != len(tasks):
        why = f"{author} returned {answer!r} for {len(tasks)} layers; return a list with one "
        why += "Placement(a, g) of each, in their order"
        raise invalid_because("assignment", why)
    placements: dict[str, Placement] = {}
    for task, placement in zip(tasks, answer, strict=True):
        if fault := _fault(placement, grid, together):
            raise invalid_because("assignment", f"{author} put {task.name!r} {fault}")
        a, g = placement
        placements[task.name] = Placement(int(a), int(g))
    return placements


def loads(
    strategy: WorkAssignment, tasks: Iterable[Task], placements: Mapping[str, Placement], world: int
) -> list[float]:
    total = [0.0] * world
    for task in tasks:
        placement = placements[task.name]
        a, g = _factor_costs(strategy, task)
        total[placement.a] += a
        total[placement.g] += g
    return total


def balance(costs: Sequence[float], load: Sequence[float]) -> list[int]:
    """Return the rank of each cost, from each rank's load before: the largest to the emptiest."""
    # From an empty load, no rank gets over 4/3 of the best balance's fullest one (Graham 1969).
    queue = [(before, rank) for rank, before in enumerate(load)]
    heapq.heapify(queue)
    owners = [0] * len(costs)
    # Among equal costs, and among equal ranks, the first is taken first. Without a stable sort,
    # ranks would find different owners, and wait for each other.
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        before, owners[i] = queue[0]
        heapq.heapreplace(queue, (before + costs[i], owners[i]))
    return owners


def _factor_costs(strategy: WorkAssignment, task: Task) -> tuple[float, float]:
    costs = []
    for size, diagonal in ((task.a, task.diagonal_a), (task.g, task.diagonal_g)):
        value = strategy.cost(size, diagonal)
        if not is_real(value) or not 0 <= value < math.inf:
            why = f"{type(strategy).__name__}.cost({size}, {diagonal}) returned {value!r} for "
            why += f"{task.name!r}; it must be a finite number, 0 or more"
            raise invalid_because("assignment", why)
        costs.append(task.blocks * float(value))  # of all blocks together
    return costs[0], costs[1]


def _fault(placement: Any, grid: Grid, together: bool) -> str:
    # What is wrong with a placement, as the end of a sentence; nothing if it is right.
    ranks = placement if isinstance(placement, tuple) else ()
    if len(ranks) != 2 or not all(_is_count(rank) and 0 <= rank < grid.world for rank in ranks):
        return f"at {placement!r}; return Placement(a, g), two ranks from 0 to {grid.world - 1}"
    a, g = placement
    text = f"on ranks {a} and {g}, "
    if together and a != g:
        text += "but colocate is True; place both on one rank, or set colocate_factors=False"
    elif a % grid.columns != g % grid.columns:
        text += f"which share no layer; G must be with A among grid.workers_of({a})"
    else:
        return ""
    return text


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
