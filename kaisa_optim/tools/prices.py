"""The time of steps: products, decompositions and collectives of a plan, priced by a profile.

Times are estimates. They are functions of the same slots, factors and bytes that a step executes,
and need no tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..account import Account
from ..plan.facts import LayerFacts, Work, grouped
from ..plan.schedule import Schedule
from .hardware import Hardware

# The stages of a step, in their order.
STAGES = (
    *("passes", "statistics", "average gradients", "reduce", "decompose", "share"),
    *("precondition", "hand out", "base step"),
)
_BACKWARD = 2 / 3  # share of the passes, under which averaged gradients travel
# Times that each number of a gradient is read or written: by stacks, norms and scales of a
# direction, and by the steps of the base.
_TOUCHED, _TOUCHED_BY_BASE = 12, 6

Seconds = dict[str, float]  # by stage


@dataclass(frozen=True)
class Passes:
    """The passes of a model on one rank, as one batch tells."""

    operations: float = 0.0  # of forward and backward
    rows: Mapping[str, int] = field(default_factory=dict)  # that each layer sees
    touched: float = 0.0  # bytes that operations of both passes read and write


class StepTimes(NamedTuple):
    """Seconds of steps: of a quiet one, and means of those in a slot to gather or to refresh."""

    quiet: Seconds
    gathering: Seconds
    refreshing: Seconds
    mean: Seconds


@dataclass(frozen=True)
class Clock:
    """The seconds of an account's steps on some hardware."""

    account: Account
    hardware: Hardware
    work: Work
    passes: Passes
    parameters: int  # bytes of the gradients that all ranks average

    def times(self, schedule: Schedule, gather: int, refresh: int) -> StepTimes:
        """Return the times of steps, with these intervals to gather and to refresh."""
        account = self.account
        gathers = schedule.gathering_slots(gather)
        refreshes = schedule.refresh_slots(gather, refresh)
        quiet = self.always(max(account.gradients))
        times = StepTimes(quiet, dict(quiet), dict(quiet), dict(quiet))
        for names in gathers.values():
            for stage, seconds in self.gathering(names, max(account.sums(names))).items():
                times.gathering[stage] += seconds / len(gathers)
                times.mean[stage] += seconds / gather
        for names in refreshes.values():
            for stage, seconds in self.refreshing(names, max(account.state(names))).items():
                times.refreshing[stage] += seconds / len(refreshes)
                times.mean[stage] += seconds / refresh
        return times

    # ---- stages ----

    def always(self, arriving: int) -> Seconds:
        """Return the stages of every step; gradients of ``arriving`` bytes are handed out."""
        hardware, grid = self.hardware, self.account.grid
        seconds = dict.fromkeys(STAGES, 0.0)
        seconds["passes"] = self.passes.operations / hardware.flops
        seconds["passes"] += self.passes.touched / hardware.memory_bandwidth
        # Rings bring all but a share of the bytes twice, while the backward pass goes on.
        averaged = 2 * self.parameters * (grid.world - 1) // grid.world
        travels = hardware.ring(averaged, grid.world)
        hidden = _BACKWARD * seconds["passes"]
        seconds["average gradients"] = max(0.0, travels - hidden)
        seconds["precondition"] = max(self.by_column().values(), default=0.0)
        calls = 2 * self._calls(arriving)
        on_node = min(grid.columns, hardware.ranks_per_node)  # rows are neighbours
        seconds["hand out"] = hardware.transfer(arriving, grid.columns, on_node, calls)
        touched = _TOUCHED_BY_BASE * self.parameters
        seconds["base step"] = touched / hardware.memory_bandwidth
        return seconds

    def gathering(self, names: Collection[str], arriving: int) -> Seconds:
        """Return what a slot to gather adds: statistics, and their sums on the way to owners."""
        grid, on_node = self.account.grid, self.hardware.ranks_per_node
        calls = self._calls(arriving)
        sent = self.hardware.transfer(arriving, grid.world, min(grid.world, on_node), calls)
        return {"statistics": self.row_products(names), "reduce": sent}

    def refreshing(self, names: Collection[str], arriving: int) -> Seconds:
        """Return what a slot to refresh adds: decompositions, and their results on the way."""
        grid, hardware = self.account.grid, self.hardware
        on_node = max(1, min(grid.workers, hardware.ranks_per_node // grid.columns))
        calls = 2 * self._calls(arriving)
        sent = hardware.transfer(arriving, grid.workers, on_node, calls)
        return {"decompose": max(self.decompose(names).values(), default=0.0), "share": sent}

    def row_products(self, names: Collection[str]) -> float:
        """Return the seconds of products of these layers' rows, on each rank."""
        chosen, products = frozenset(names), self.hardware.times["products"]
        total = 0.0
        for layer in self.account.active:
            rows = self.passes.rows.get(layer.name, 0)
            if rows and layer.name in chosen:
                for f in layer.factors:
                    if not f.diagonal:
                        side = (f.n * f.n * rows) ** (1 / 3)
                        total += products.seconds(side, layer.task.blocks)
        return total

    def decompose(self, names: Collection[str]) -> dict[int, float]:
        """Return the seconds of each rank that has factors of these layers to decompose."""
        chosen, times = frozenset(names), self.hardware.times[self.work.decomposition]
        counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for layer in self.account.active:
            for f in layer.factors if layer.name in chosen else ():
                if not f.diagonal:
                    counts[f.owner][f.n] += layer.task.blocks
        seconds = {}
        for rank, of_side in counts.items():
            seconds[rank] = sum(times.seconds(n, k) for n, k in of_side.items())
        return seconds

    def by_column(self) -> dict[int, float]:
        """Return the seconds in which the ranks of each column precondition their layers."""
        columns = self.account.grid.columns
        layers = grouped(self.account.active, lambda x: x.placement.g % columns)
        return {column: self.precondition(same) for column, same in layers.items()}

    def precondition(self, layers: Collection[LayerFacts]) -> float:
        """Return the seconds of new gradients of these layers, on one of their workers."""
        hardware, total = self.hardware, 0.0
        floats = hardware.times["products"]
        halves = hardware.times.get("half_products", floats)
        for same in grouped(layers, lambda layer: layer.shape).values():
            task, count = same[0].task, sum(layer.task.blocks for layer in same)
            short, long = sorted((task.a, task.g))
            for n, diagonal in ((task.a, task.diagonal_a), (task.g, task.diagonal_g)):
                if not diagonal:
                    side = (n * task.a * task.g) ** (1 / 3)
                    total += self.work.two_sided * floats.seconds(side, count)
            if self.work.polynomials is not None:
                flat = (short * short * long) ** (1 / 3)
                step = 2 * halves.seconds(flat, count) + halves.seconds(short, count)
                total += self.work.polynomials(short) * step
            size = count * task.a * task.g * same[0].itemsize
            total += hardware.host + len(same) * hardware.host_layer
            total += _TOUCHED * size / hardware.memory_bandwidth
        return total

    def _calls(self, size: int) -> int:
        """Return the calls in which so many bytes travel, about."""
        return -(-size // self.account.bucket_bytes)
