"""The routes of bytes, and their prices: what every rank keeps, and what it receives in a step.

Plain numbers from shapes, without a tensor or a second process; the exchange takes these routes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .comm.ranks import Bucket, CopyItem, overlaps
from .plan.assignment import Grid
from .plan.facts import FactorFacts, LayerFacts, Sizes, T, all_reduced, cargo_bytes, chunks, grouped
from .plan.schedule import Schedule, StepReport

# By kind, "total" too, as the preconditioner's own answers.
Usage = dict[str, int]
Means = dict[str, float]

KEPT = ["factors", "eigenvectors", "eigenvalues", "inverses", "roots"]
KEPT += ["eigenvalue_products", "counters"]
_UNIT = 4  # bytes of a unit


# ---- routes ----

RankGroup = tuple[Sequence[int], dict[int, list[Any]]]  # ranks of a group; each owner's items
# Buckets that travel at the same time: one for each group. Groups have no rank in common.
Round = list[Bucket]


def in_turn(lists: Sequence[Sequence[T]]) -> list[T]:
    """Return the first of each list, then the second of each, and so on."""
    longest = max(map(len, lists), default=0)
    return [items[i] for i in range(longest) for items in lists if i < len(items)]


def sum_buckets(
    layers: Iterable[LayerFacts], wire: int | None, world: int, limit: int
) -> Iterator[Bucket]:
    """Yield buckets of the layers' sums, of one place each; owners take turns."""
    factors = [factor for layer in layers for factor in layer.factors]
    for same in grouped(factors, lambda factor: factor.layer.place).values():
        numbers = limit // (wire or same[0].layer.itemsize)
        turns = in_turn([*grouped(same, lambda factor: factor.owner).values()])
        for chunk in chunks(turns, lambda factor: factor.size, numbers):
            yield Bucket(chunk, range(world), world)


def rounds(
    groups: Sequence[RankGroup], size_of: Callable[[Any], int], world: int, limit: int
) -> list[Round]:
    """Return groups' copies in rounds; the content of a copy is a list of items."""
    # Owners send side by side, and have ``limit`` bytes together at a time.
    lists: list[list[list[CopyItem]]] = []
    for _, by_owner in groups:
        total = sum(sum(map(size_of, items)) for items in by_owner.values())
        share = limit // (len(by_owner) if total > limit else 1)
        turns: list[list[CopyItem]] = []
        for owner, items in by_owner.items():
            parts = chunks(items, size_of, share)
            turns.append([CopyItem(owner, sum(map(size_of, part)), part) for part in parts])
        lists.append([*chunks(in_turn(turns), lambda item: item.size, limit)])
    divided: list[Round] = []
    for number in range(max(map(len, lists), default=0)):
        # A group without copies left takes part with an empty bucket: a round is one collective.
        buckets = []
        for (members, _), copies in zip(groups, lists, strict=True):
            buckets += [Bucket(copies[number] if copies[number:] else [], members, world)]
        # If no member owns more than twice its group's mean, the owners' parts are the pieces:
        # every member has its piece from the start, and all ranks leave the first hop out.
        straight = all(max(b.sizes.values()) * len(b.sizes) <= 2 * b.size for b in buckets)
        for bucket in buckets:
            bucket.straight = straight
        divided.append(buckets)
    return divided


def state_rounds(
    factors: Iterable[FactorFacts], sizes: Sizes, grid: Grid, limit: int
) -> list[Round]:
    """Return the rounds in which owners send new state along the columns; factors are content."""

    def size(factor: FactorFacts) -> int:
        layer, sides = factor.layer, (factor.n, factor.diagonal)
        if sizes.packed:
            return cargo_bytes([factor.size * (sizes.stored or layer.itemsize)])
        return cargo_bytes(spec.bytes(layer, sides, sizes.stored) for spec in sizes.of_factor)

    by_column = grouped(factors, lambda factor: factor.owner % grid.columns)
    groups: list[RankGroup] = []
    # A column without factors takes part, too: each of its ranks must join the collectives.
    for column in range(grid.columns):
        of_owner = grouped(by_column.get(column, []), lambda factor: factor.owner)
        groups.append((grid.workers_of(column), of_owner))
    return rounds(groups, size, grid.world, limit)


def gradient_rounds(
    layers: Sequence[T],
    facts_of: Callable[[T], LayerFacts],
    sizes: Sizes,
    grid: Grid,
    rank: int,
    limit: int,
) -> list[Round]:
    """Return a row's rounds of new gradients on one device; content are lists of one shape."""

    def size(same: Sequence[T]) -> int:  # in bytes on the wire, with terms
        facts = [facts_of(layer) for layer in same]
        itemsize, blocks = facts[0].itemsize, sum(x.task.blocks for x in facts)
        new = sum(x.gradient for x in facts) * (sizes.wire or itemsize)
        return cargo_bytes([new, sizes.terms * blocks * itemsize])

    row = grid.receivers_of(rank)
    by_column = grouped(layers, lambda layer: facts_of(layer).placement.g % grid.columns)
    is_more = sum(size([layer]) for layer in layers) > limit
    share = limit // len(by_column) if is_more else limit
    of_owner: dict[int, list[Sequence[T]]] = {}
    for column in sorted(by_column):
        shapes = grouped(by_column[column], lambda layer: facts_of(layer).shape).values()
        parts = of_owner.setdefault(row[column], [])
        for same in shapes:
            parts += chunks(same, lambda layer: size([layer]), share)
    return rounds([(row, of_owner)], size, grid.world, limit)


# ---- prices ----


@dataclass(frozen=True)
class Account:
    """The bytes of K-FAC over a grid of ranks; answers are lists by rank."""

    layers: Sequence[LayerFacts]  # in the model's order, which the buckets follow
    grid: Grid
    sizes: Sizes
    bucket_bytes: int = 25 * 2**20

    @functools.cached_property
    def active(self) -> list[LayerFacts]:
        return [layer for layer in self.layers if not layer.frozen]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        return frozenset(layer.name for layer in self.active)

    def _chosen(self, names: Collection[str]) -> list[LayerFacts]:
        return [layer for layer in self.active if layer.name in names]

    def memory(self) -> list[Usage]:
        """Return the bytes that each rank keeps, by kind."""
        sizes, columns = self.sizes, self.grid.columns
        usage = [dict.fromkeys(KEPT, 0) for _ in range(self.grid.world)]
        applied = [dict.fromkeys(KEPT, 0) for _ in range(columns)]  # on each rank of a column
        for layer in self.active:
            column, task = applied[layer.placement.g % columns], layer.task
            for factor in layer.factors:
                owned, sides = usage[factor.owner], (factor.n, factor.diagonal)
                for spec in sizes.of_owner:
                    owned[spec.kind] += spec.bytes(layer, sides, sizes.average)
                for spec in sizes.of_factor:
                    column[spec.kind] += spec.bytes(layer, sides, sizes.stored)
            for spec in sizes.of_gradient:
                column[spec.kind] += spec.bytes(layer, (task.g, task.a), sizes.stored)
        for rank, kinds in enumerate(usage):
            for kind, size in applied[rank % columns].items():
                kinds[kind] += size
            kinds["total"] = sum(kinds.values())
        return usage

    def pending(self, names: Collection[str]) -> int:
        """Return the bytes of these layers' sums on each rank, from backward to step, at most."""
        total = 0
        for layer in self._chosen(names):
            numbers = [f.elements if self.grid.world == 1 else f.size for f in layer.factors]
            total += sum(numbers) * layer.itemsize * (1 + layer.tied)
        return total

    # ---- communication: the bytes that arrive at each rank, a list by rank ----

    def per_step(
        self, schedule: Schedule, factor_update_steps: int, inv_update_steps: int
    ) -> list[Means]:
        """Return the bytes of a step by rank and kind, as a mean over whole intervals."""
        gathering = schedule.gathering_slots(factor_update_steps).values()
        refreshing = schedule.refresh_slots(factor_update_steps, inv_update_steps).values()
        sums = [self.sums(names) for names in gathering]
        state = [self.state(names) for names in refreshing]
        # The next exchange tells of a refresh, and tells of each layer once.
        plain, exchanging = self.status(()), len(gathering) / factor_update_steps
        answers = (self.status(self.names) - plain) * min(1 / inv_update_steps, exchanging)
        steps = []
        for rank, gradients in enumerate(self.gradients):
            means: Means = {
                "factors": sum(x[rank] for x in sums) / factor_update_steps,
                "second_order": sum(x[rank] for x in state) / inv_update_steps,
                "gradients": float(gradients),
                "status": exchanging * plain + answers,
            }
            steps.append(means | {"total": sum(means.values())})
        return steps

    def status(self, answered: Collection[str]) -> int:
        """Return the bytes of agreed numbers; owners tell of refreshes of layers ``answered``."""
        sections = sum(layer.sections for layer in self.layers)
        single = [number for number in StepReport() if isinstance(number, float)]
        numbers = len(single) + len(self.layers) + 2 * len(answered) + 4 * sections
        return all_reduced(8 * numbers, self.grid.world)

    def sums(self, names: Collection[str]) -> list[int]:
        """Return the bytes of these layers' sums on their way to the factors' owners."""
        average, world, wire = self._chosen(names), self.grid.world, self.sizes.wire
        reduced = 0
        for same in grouped(average, lambda layer: layer.place).values():
            tied = sum(4 * layer.itemsize * layer.task.blocks for layer in same if layer.tied)
            reduced += all_reduced(tied, world)
            reduced += all_reduced(_UNIT * len(same) * self.sizes.units, world)
        received = [reduced] * world
        for bucket in sum_buckets(average, wire, world, self.bucket_bytes):
            itemsize = bucket.items[0].layer.itemsize
            for rank, (start, stop) in enumerate(itertools.pairwise(bucket.pieces)):
                received[rank] += (world - 1) * (stop - start) * (wire or itemsize)
                # Of its own sums, a rank has those in its own piece.
                (present,) = overlaps(bucket.owned, rank, (start, stop))
                received[rank] += (bucket.sizes[rank] - present) * itemsize
        return received

    def state(self, names: Collection[str]) -> list[int]:
        """Return the bytes of these layers' refresh: mean eigenvalues, and new state."""
        refresh, reduced = self._chosen(names), 0
        splits = any(layer.placement.a != layer.placement.g for layer in self.layers)
        if splits and self.sizes.tells_means:
            for same in grouped(refresh, lambda layer: layer.place).values():
                means = 2 * same[0].itemsize * sum(x.task.blocks for x in same)
                reduced += all_reduced(means, self.grid.world)
        factors = [factor for layer in refresh for factor in layer.factors]
        buckets = state_rounds(factors, self.sizes, self.grid, self.bucket_bytes)
        return [reduced + size for size in _copied(buckets, self.grid.world)]

    @functools.cached_property
    def gradients(self) -> list[int]:
        """The bytes of new gradients in every step."""
        sizes, row = self.sizes, Grid(self.grid.columns, 1)  # each row receives the same
        whole, copies = [layer for layer in self.active if not layer.shards], list[Round]()
        for same in grouped(whole, lambda layer: layer.device).values():
            copies += gradient_rounds(same, lambda x: x, sizes, row, 0, self.bucket_bytes)
        received = _copied(copies, row.world) * self.grid.workers
        # A rank's shards of a gradient go to the owner, and the new ones back, with numbers.
        for layer in [layer for layer in self.active if layer.shards]:
            owner, numbers = layer.placement.g, layer.task.blocks * layer.itemsize
            for rank in [rank for rank in range(self.grid.world) if rank != owner]:
                parts = [(shards, shards.count(rank) * size) for shards, size in layer.shards]
                sent = [size for shards, size in parts if shards.sends(rank, owner)]
                received[owner] += cargo_bytes([*sent, sizes.shard_sums * numbers * bool(sent)])
                received[rank] += cargo_bytes([*[x for _, x in parts], sizes.terms * numbers])
        return received


def _copied(copies: Iterable[Round], world: int) -> list[int]:
    # A member receives all that it does not own, in both hops together.
    received = [0] * world
    for buckets in copies:
        for bucket in buckets:
            for rank, size in bucket.sizes.items():
                received[rank] += bucket.size - size
    return received
