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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from .assignment import Grid
from .facts import FactorFacts, LayerFacts
from .moves import Sizes, gradient_rounds, state_rounds, sum_buckets
from .routes import Bucket, Round, all_reduced, cargo_bytes, grouped, overlaps
from .schedule import HEAD, Schedule

# By kind, "total" too, as the preconditioner's own answers.
Usage = dict[str, int]
Means = dict[str, float]

N = TypeVar("N", int, float)

KEPT = (
    *("factors", "eigenvectors", "eigenvalues", "inverses", "roots", "eigenvalue_products"),
    "counters",
)
_UNIT = 4  # bytes of a unit
MOVED = ("factors", "second_order", "gradients", "status")


class PerSlot(NamedTuple):
    """The bytes that arrive at each rank, lists by rank: in every step, or in a slot's steps."""

    gradients: list[int]  # in every step
    factors: dict[int, list[int]]  # by slot to gather
    state: dict[int, list[int]]  # by slot to refresh
    status: float  # the mean of a step, alike on all ranks

    def per_step(self, factor_update_steps: int, inv_update_steps: int) -> list[Means]:
        """Return the bytes of a step by rank and kind, as a mean over whole intervals."""
        none = [0] * len(self.gradients)
        factors, state = (zip(none, *x.values(), strict=True) for x in (self.factors, self.state))
        kinds = {
            "factors": [sum(sizes) / factor_update_steps for sizes in factors],
            "second_order": [sum(sizes) / inv_update_steps for sizes in state],
            "gradients": [float(size) for size in self.gradients],
            "status": [self.status] * len(none),
        }
        return _by_rank(kinds)


class Recorder:
    """Counts the bytes that arrive at every rank, from the buckets and rounds that ranks take."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.received = [0] * world

    def all_reduce(self, *sizes: int) -> None:
        """Count numbers of these bytes that all ranks add up, or take the largest of."""
        size = sum(all_reduced(size, self.world) for size in sizes)
        self.received = [size + before for before in self.received]

    def reduce_to_owners(self, bucket: Bucket[FactorFacts], wire: int | None) -> None:
        """Count terms, of ``wire`` bytes a number, and sums on the way to their owners."""
        itemsize = bucket.items[0].layer.itemsize
        each = (self.world - 1) * (wire or itemsize)
        for rank, (start, stop) in enumerate(itertools.pairwise(bucket.pieces)):
            self.received[rank] += each * (stop - start)
        for owner in {item.owner for item in bucket.items}:
            (added,) = overlaps(bucket.owned, owner, bucket.pieces[owner : owner + 2])
            self.received[owner] += (bucket.sizes[owner] - added) * itemsize

    def broadcast(self, rounds: Iterable[Round]) -> None:
        """Count copies: a member receives all that it does not own, in both hops together."""
        for bucket in itertools.chain.from_iterable(rounds):
            for rank, size in bucket.sizes.items():
                self.received[rank] += bucket.size - size

    def send(self, source: int, to: int, sizes: Iterable[int]) -> None:
        """Count tensors of these bytes that one rank sends another."""
        self.received[to] += cargo_bytes(sizes) if source != to else 0


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
        usage = [dict.fromkeys(KEPT, 0) for _ in range(self.grid.world)]
        applied = [dict.fromkeys(KEPT, 0) for _ in range(self.grid.columns)]
        for layer in self.active:
            column = applied[layer.placement.g % self.grid.columns]
            for owner, kind, size in self.sizes.kept(layer):
                (column if owner is None else usage[owner])[kind] += size
        for rank, own in enumerate(usage):
            for kind, size in applied[rank % self.grid.columns].items():
                own[kind] += size
            own["total"] = sum(own.values())
        return usage

    def pending(self, names: Collection[str]) -> int:
        """Return the bytes of these layers' sums on each rank, from backward to step, at most."""
        factors = itertools.chain(*(layer.factors for layer in self._chosen(names)))
        alone = self.grid.world == 1
        return sum(
            (f.elements if alone else f.size) * f.layer.itemsize * (1 + f.layer.tied)
            for f in factors
        )

    # ---- communication ----

    def price(
        self,
        *,
        average: Collection[str] | None = None,
        refresh: Collection[str] = (),
        answered: Collection[str] = (),
    ) -> list[Usage]:
        """Return the bytes that arrive at each rank in a step, by kind.

        All layers have a state and are in use. Sums of those to ``average`` travel (None: the step
        gathers nothing, and ranks exchange no numbers), and new state of those to ``refresh``;
        owners tell of earlier refreshes of those ``answered``.
        """
        status = 0 if average is None else self._exchange(answered)
        kinds = self._sums(average or ()), self._state(refresh), self._gradients
        return _by_rank(dict(zip(MOVED, (*kinds, [status] * self.grid.world), strict=True)))

    def per_step(
        self, schedule: Schedule, factor_update_steps: int, inv_update_steps: int
    ) -> list[Means]:
        """Return the bytes that arrive at each rank in a step, as a mean over whole intervals.

        Ranks learn of a refresh in the next exchange.
        """
        slots = self.per_slot(schedule, factor_update_steps, inv_update_steps)
        return slots.per_step(factor_update_steps, inv_update_steps)

    def per_slot(
        self, schedule: Schedule, factor_update_steps: int, inv_update_steps: int
    ) -> PerSlot:
        """Return the bytes that arrive at each rank in the slots of both intervals."""
        gathering = schedule.gathering_slots(factor_update_steps)
        refresh = schedule.refresh_slots(factor_update_steps, inv_update_steps)
        plain, exchanging = self._exchange(()), len(gathering) / factor_update_steps
        # A refresh is told once, and an exchange tells of each layer once.
        answers = (self._exchange(self.names) - plain) * min(1 / inv_update_steps, exchanging)
        status = exchanging * plain + answers
        return PerSlot(
            self._gradients,
            {n: self._sums(names) for n, names in gathering.items()},
            {n: self._state(names) for n, names in refresh.items()},
            status,
        )

    def _chosen(self, names: Collection[str]) -> list[LayerFacts]:
        chosen = set(names)
        return [layer for layer in self.active if layer.name in chosen]

    def _exchange(self, answered: Collection[str]) -> int:
        """Return the bytes of the numbers that ranks agree on before a step."""
        sections = sum(layer.sections for layer in self.layers)
        numbers = HEAD + len(self.layers) + 2 * len(answered) + 4 * sections
        return all_reduced(8 * numbers, self.grid.world)

    def _sums(self, names: Collection[str]) -> list[int]:
        """Return the bytes of sums on their way to the factors' owners."""
        ranks, average = Recorder(self.grid.world), self._chosen(names)
        for same in grouped(average, operator.attrgetter("place")).values():
            tied = [4 * layer.itemsize * layer.task.blocks for layer in same if layer.tied]
            ranks.all_reduce(sum(tied), _UNIT * len(same) * self.sizes.units)
        for bucket in sum_buckets(average, self.sizes.wire, ranks.world, self.bucket_bytes):
            ranks.reduce_to_owners(bucket, self.sizes.wire)
        return ranks.received

    def _state(self, names: Collection[str]) -> list[int]:
        """Return the bytes of a refresh: mean eigenvalues, and new state."""
        ranks, refresh = Recorder(self.grid.world), self._chosen(names)
        splits = any(layer.placement.a != layer.placement.g for layer in self.layers)
        if splits and self.sizes.tells_means:
            for same in grouped(refresh, operator.attrgetter("place")).values():
                ranks.all_reduce(2 * same[0].itemsize * sum(x.task.blocks for x in same))
        factors = itertools.chain.from_iterable([layer.factors for layer in refresh])
        ranks.broadcast(state_rounds(factors, self.sizes, self.grid, self.bucket_bytes))
        return ranks.received

    @functools.cached_property
    def _gradients(self) -> list[int]:
        """The bytes of new gradients in every step."""
        ranks, columns = Recorder(self.grid.world), self.grid.columns
        whole = [layer for layer in self.active if not layer.shards]
        for same in grouped(whole, operator.attrgetter("device")).values():
            ranks.broadcast(
                gradient_rounds(same, lambda x: x, self.sizes, range(columns), self.bucket_bytes)
            )
        ranks.received = ranks.received[:columns] * self.grid.workers  # rows are alike
        for layer in self.active:
            for rank in range(self.grid.world) if layer.shards else ():
                self._return_shards(ranks, layer, rank)
        return ranks.received

    def _return_shards(self, ranks: Recorder, layer: LayerFacts, rank: int) -> None:
        """Send a rank's shards of a gradient to the owner, and the new ones back, with numbers."""
        owner, numbers = layer.placement.g, layer.task.blocks * layer.itemsize
        sizes = [math.prod(shards.part_shape(rank)) * n for shards, n in layer.shards]
        sends = [shards.sends(rank, owner) for shards, _ in layer.shards]
        sums = self.sizes.shard_sums * numbers * any(sends)
        ranks.send(rank, owner, [*itertools.compress(sizes, sends), sums])
        ranks.send(owner, rank, [*sizes, self.sizes.terms * numbers])


def _by_rank(got: Mapping[str, Sequence[N]]) -> list[dict[str, N]]:
    """Return lists by rank of each kind as one list, with totals."""
    ranks = [dict(zip(got, sizes, strict=True)) for sizes in zip(*got.values(), strict=True)]
    return [own | {"total": sum(own.values())} for own in ranks]
