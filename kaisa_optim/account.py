"""Prices of plans: the bytes that every rank keeps, and the bytes that it receives in a step.

Plain numbers from shapes: nothing here knows a tensor, or needs more than one process. Every byte
that arrives at a rank was sent by another, so the means over the ranks of received and of sent
bytes are equal; a single rank may send more than it receives, or less.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .plan.assignment import Grid
from .plan.facts import LayerFacts, Sizes, cargo_bytes
from .plan.routes import (
    Round,
    all_reduced,
    gradient_rounds,
    grouped,
    overlaps,
    state_rounds,
    sum_buckets,
)
from .plan.schedule import HEAD, Schedule

# By kind, "total" too, as the preconditioner's own answers.
Usage = dict[str, int]
Means = dict[str, float]

KEPT = (
    *("factors", "eigenvectors", "eigenvalues", "inverses", "roots", "eigenvalue_products"),
    "counters",
)
_UNIT = 4  # bytes of a unit


class PerSlot(NamedTuple):
    """The bytes that arrive at each rank, lists by rank: in every step, or in a slot's steps."""

    gradients: list[int]  # in every step
    factors: dict[int, list[int]]  # by slot to gather
    state: dict[int, list[int]]  # by slot to refresh
    status: float  # the mean of a step, alike on all ranks
    intervals: tuple[int, int]  # to gather, to refresh

    def per_step(self) -> list[Means]:
        """Return the bytes of a step by rank and kind, as a mean over whole intervals."""
        steps = []
        for rank, gradients in enumerate(self.gradients):
            means: Means = {
                "factors": sum(x[rank] for x in self.factors.values()) / self.intervals[0],
                "second_order": sum(x[rank] for x in self.state.values()) / self.intervals[1],
                "gradients": float(gradients),
                "status": self.status,
            }
            steps.append(means | {"total": sum(means.values())})
        return steps


@dataclass(frozen=True)
class Account:
    """The bytes of K-FAC over a grid of ranks; answers are lists by rank.

    ``layers`` are in the model's order, which the buckets follow.
    """

    layers: Sequence[LayerFacts]
    grid: Grid
    sizes: Sizes
    bucket_bytes: int = 25 * 2**20

    @functools.cached_property
    def active(self) -> list[LayerFacts]:
        """The layers that are trained."""
        return [layer for layer in self.layers if not layer.frozen]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the layers that are trained."""
        return tuple(layer.name for layer in self.active)

    # ---- memory ----

    def memory(self) -> list[Usage]:
        """Return the bytes that each rank keeps, by kind."""
        sizes, usage = self.sizes, [dict.fromkeys(KEPT, 0) for _ in range(self.grid.world)]
        applied = [dict.fromkeys(KEPT, 0) for _ in range(self.grid.columns)]
        for layer in self.active:
            column = applied[layer.placement.g % self.grid.columns]
            for factor in layer.factors:
                owned, sides = usage[factor.owner], factor.sides
                for spec in sizes.of_owner:
                    owned[spec.kind] += spec.bytes(layer, sides, sizes.average)
                for spec in sizes.of_factor:
                    column[spec.kind] += spec.bytes(layer, sides, sizes.stored)
            for spec in sizes.of_gradient:
                column[spec.kind] += spec.bytes(layer, (layer.task.g, layer.task.a), sizes.stored)
        for rank, kept in enumerate(usage):
            for kind, size in applied[rank % self.grid.columns].items():
                kept[kind] += size
            kept["total"] = sum(kept.values())
        return usage

    def pending(self, names: Collection[str]) -> int:
        """Return the bytes of these layers' sums on each rank, from backward to step, at most."""
        factors = itertools.chain(*(layer.factors for layer in self._chosen(names)))
        alone = self.grid.world == 1
        return sum(
            (f.elements if alone else f.size) * f.layer.itemsize * (1 + f.layer.tied)
            for f in factors
        )

    # ---- communication: the bytes that arrive at each rank, a list by rank ----

    def per_slot(
        self, schedule: Schedule, factor_update_steps: int, inv_update_steps: int
    ) -> PerSlot:
        """Return the bytes that arrive in the slots of both intervals.

        Ranks learn of a refresh in the next exchange.
        """
        gathering = schedule.gathering_slots(factor_update_steps)
        refresh = schedule.refresh_slots(factor_update_steps, inv_update_steps)
        plain, exchanging = self.status(()), len(gathering) / factor_update_steps
        # A refresh is told once, and an exchange tells of each layer once.
        answers = (self.status(self.names) - plain) * min(1 / inv_update_steps, exchanging)
        return PerSlot(
            self.gradients,
            {n: self.sums(names) for n, names in gathering.items()},
            {n: self.state(names) for n, names in refresh.items()},
            exchanging * plain + answers,
            (factor_update_steps, inv_update_steps),
        )

    def _chosen(self, names: Collection[str]) -> list[LayerFacts]:
        chosen = set(names)
        return [layer for layer in self.active if layer.name in chosen]

    def status(self, answered: Collection[str]) -> int:
        """Return the bytes of the numbers that ranks agree on, alike on all ranks.

        Owners tell of earlier refreshes of the layers ``answered``.
        """
        sections = sum(layer.sections for layer in self.layers)
        numbers = HEAD + len(self.layers) + 2 * len(answered) + 4 * sections
        return all_reduced(8 * numbers, self.grid.world)

    def sums(self, names: Collection[str]) -> list[int]:
        """Return the bytes of these layers' sums on their way to the factors' owners."""
        average, world, wire = self._chosen(names), self.grid.world, self.sizes.wire
        reduced = 0
        for same in grouped(average, operator.attrgetter("place")).values():
            tied = [4 * layer.itemsize * layer.task.blocks for layer in same if layer.tied]
            reduced += all_reduced(sum(tied), world)
            reduced += all_reduced(_UNIT * len(same) * self.sizes.units, world)
        received = [reduced] * world
        for bucket in sum_buckets(average, wire, world, self.bucket_bytes):
            itemsize = bucket.items[0].layer.itemsize
            for rank, (start, stop) in enumerate(itertools.pairwise(bucket.pieces)):
                (here,) = overlaps(bucket.owned, rank, (start, stop))  # added up on the owner
                sums = (bucket.sizes[rank] - here) * itemsize
                received[rank] += (world - 1) * (stop - start) * (wire or itemsize) + sums
        return received

    def state(self, names: Collection[str]) -> list[int]:
        """Return the bytes of these layers' refresh: mean eigenvalues, and new state."""
        refresh, reduced = self._chosen(names), 0
        splits = any(layer.placement.a != layer.placement.g for layer in self.layers)
        if splits and self.sizes.tells_means:
            for same in grouped(refresh, operator.attrgetter("place")).values():
                means = 2 * same[0].itemsize * sum(x.task.blocks for x in same)
                reduced += all_reduced(means, self.grid.world)
        factors = itertools.chain.from_iterable([layer.factors for layer in refresh])
        rounds = state_rounds(factors, self.sizes, self.grid, self.bucket_bytes)
        return [reduced + size for size in _copied(rounds, self.grid.world)]

    @functools.cached_property
    def gradients(self) -> list[int]:
        """The bytes of new gradients in every step."""
        columns, limit = self.grid.columns, self.bucket_bytes
        whole, rounds = [layer for layer in self.active if not layer.shards], list[Round]()
        for same in grouped(whole, operator.attrgetter("device")).values():
            rounds += gradient_rounds(same, lambda x: x, self.sizes, range(columns), limit)
        received = _copied(rounds, columns) * self.grid.workers  # rows are alike
        # A rank's shards of a gradient go to the owner, and the new ones back, with numbers.
        for layer in self.active:
            owner, numbers = layer.placement.g, layer.task.blocks * layer.itemsize
            for rank in range(self.grid.world) if layer.shards else ():
                if rank == owner:
                    continue
                sizes = [math.prod(shards.part_shape(rank)) * n for shards, n in layer.shards]
                sends = [shards.sends(rank, owner) for shards, _ in layer.shards]
                sums = self.sizes.shard_sums * numbers * any(sends)
                received[owner] += cargo_bytes([*itertools.compress(sizes, sends), sums])
                received[rank] += cargo_bytes([*sizes, self.sizes.terms * numbers])
        return received


def _copied(rounds: Iterable[Round], world: int) -> list[int]:
    """Return the bytes of copies: a member receives all that it does not own, in both hops."""
    received = [0] * world
    for bucket in itertools.chain.from_iterable(rounds):
        for rank, size in bucket.sizes.items():
            received[rank] += bucket.size - size
    return received
