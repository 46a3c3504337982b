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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from .assignment import Grid
from .facts import LayerFacts
from .moves import Sizes, gradient_buckets
from .routes import Bucket, cargo_bytes, grouped, in_buckets
from .schedule import Schedule, Slots
from .step_plan import SIDES, RefreshReport, StepPlan, StepReport

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
        got = {kind: [0.0] * len(self.gradients) for kind in MOVED}
        got["gradients"] = list(map(float, self.gradients))
        got["status"] = [self.status] * len(self.gradients)
        for kind, slots, interval in (
            ("factors", self.factors, factor_update_steps),
            ("second_order", self.state, inv_update_steps),
        ):
            for sizes in slots.values():
                got[kind] = [x + size / interval for x, size in zip(got[kind], sizes, strict=True)]
        return _by_rank(got)


@dataclass(frozen=True)
class Account:
    """The bytes of K-FAC over a grid of ranks; answers are lists by rank.

    ``layers`` are in the model's order, which the buckets follow.
    """

    layers: Sequence[LayerFacts]
    grid: Grid
    sizes: Sizes
    defers: Collection[str] = ()  # layers whose refresh is checked in the step after it
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

    def plan(
        self,
        *,
        average: Collection[str] = (),
        refresh: Collection[str] = (),
        answered: Collection[str] = (),
    ) -> StepPlan:
        """Return the plan of a step in which all layers have a state and are in use."""
        frozen = len(self.active) < len(self.layers)
        taken, renewed = self._names(average), self._names(refresh)
        return StepPlan(
            number=1,
            # As long as some layer has no statistics, every step might bring them.
            exchanges=bool(taken or renewed or answered or frozen),
            answered=self._names(answered),
            average=taken,
            refresh=renewed,
            decompose=frozenset(itertools.product(renewed, SIDES)),
            precondition=self.names,
        )

    def price(self, plan: StepPlan) -> list[Usage]:
        """Return the bytes that arrive at each rank in a step, by kind."""
        got = {kind: [0] * self.grid.world for kind in MOVED}
        got["gradients"] = list(self._gradients(plan.precondition))
        if self.grid.world > 1:
            _add(got["status"], [self._status(plan)] * self.grid.world)
            _add(got["factors"], self._sums(self._chosen(plan.average)))
            _add(got["second_order"], self._renewed(plan))
        return _by_rank(got)

    def per_step(
        self, schedule: Schedule, factor_update_steps: int, inv_update_steps: int
    ) -> list[Means]:
        """Return the bytes that arrive at each rank in a step, as a mean over whole intervals.

        Where ranks learn of a refresh in the step after it, the mean is the most that it can be:
        these steps had no other exchange. Inverses that fail are left out.
        """
        slots = self.per_slot(schedule, factor_update_steps, inv_update_steps)
        return slots.per_step(factor_update_steps, inv_update_steps)

    def per_slot(
        self, schedule: Schedule, factor_update_steps: int, inv_update_steps: int
    ) -> PerSlot:
        """Return the bytes that arrive at each rank in the slots of both intervals."""
        gathering = schedule.gathering_slots(factor_update_steps)
        refresh = schedule.refresh_slots(inv_update_steps)
        several = self.grid.world > 1
        return PerSlot(
            self._gradients(self.names),
            {n: self._sums(self._chosen(names)) for n, names in gathering.items() if several},
            {n: self._renewed(self.plan(refresh=x)) for n, x in refresh.items() if several},
            self._mean_status(gathering, refresh, factor_update_steps, inv_update_steps),
        )

    def _mean_status(
        self, gathering: Slots, refresh: Slots, factor_update_steps: int, inv_update_steps: int
    ) -> float:
        """Return the bytes of numbers that ranks agree on in a step, as a mean."""
        if self.grid.world == 1:
            return 0.0
        both = math.gcd(factor_update_steps, inv_update_steps)
        together = factor_update_steps * inv_update_steps // both
        # A slot of the one kind meets one of the other once in ``together`` steps, or never.
        shares: dict[tuple[int | None, int | None], float]
        shares = {(g, None): 1 / factor_update_steps for g in gathering}
        shares.update({(None, r): 1 / inv_update_steps for r in refresh})
        for g, r in itertools.product(gathering, refresh):
            if (g - r) % both == 0:
                shares[g, r] = 1 / together
                shares[g, None] -= 1 / together
                shares[None, r] -= 1 / together
        shares[None, None] = 1 - sum(shares.values())
        mean = 0.0
        for (at_g, at_r), share in shares.items():
            average = () if at_g is None else gathering[at_g]
            plan = self.plan(average=average, refresh=() if at_r is None else refresh[at_r])
            mean += share * self._status(plan)
        # Add what the step after a refresh exchanges, if the refresh was not checked at once.
        asked = [[name for name in renewed if name in self.defers] for renewed in refresh.values()]
        checks = [self._status(self.plan(answered=x)) - self._status(self.plan()) for x in asked]
        return mean + sum(checks) / inv_update_steps

    def _chosen(self, names: Collection[str]) -> list[LayerFacts]:
        chosen = set(names)
        return [layer for layer in self.active if layer.name in chosen]

    def _names(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the names in the model's order."""
        return tuple(layer.name for layer in self._chosen(names))

    def _status(self, plan: StepPlan) -> int:
        """Return the bytes of the numbers that ranks agree on."""
        size = 0
        if plan.exchanges:
            sections = sum(layer.sections for layer in self.layers)
            report = StepReport.blank(len(self.layers), len(plan.answered), sections)
            size += self._all_reduced(8 * len(report.numbers()))
        if plan.refresh:
            size += self._all_reduced(8 * len(RefreshReport().numbers(plan.refresh)))
        return size

    def _sums(self, average: list[LayerFacts]) -> list[int]:
        """Return the bytes of sums on their way to the factors' owners."""
        world = self.grid.world
        tied = grouped([layer for layer in average if layer.tied], operator.attrgetter("place"))
        traces = [4 * same[0].itemsize * sum(x.task.blocks for x in same) for same in tied.values()]
        got = [sum(map(self._all_reduced, traces))] * world
        if self.sizes.units:
            for same in grouped(average, operator.attrgetter("place")).values():
                _add(got, [self._all_reduced(_UNIT * len(same))] * world)
        factors = itertools.chain(*(layer.factors for layer in average))
        for items in in_buckets(
            factors,
            lambda factor: factor.layer.place,
            lambda factor: self.sizes.wire or factor.layer.itemsize,
            self.bucket_bytes,
        ):
            itemsize = items[0].layer.itemsize
            bucket = Bucket(items, range(world))
            bounds = itertools.pairwise(bucket.pieces), itertools.pairwise(bucket.owned)
            for rank, ((start, stop), (first, last)) in enumerate(zip(*bounds, strict=True)):
                # Every other rank sends its term of this rank's piece, and its sums of this
                # rank's factors.
                got[rank] += (world - 1) * (stop - start) * (self.sizes.wire or itemsize)
                common = max(0, min(stop, last) - max(start, first))
                got[rank] += (last - first - common) * itemsize
        return got

    def _renewed(self, plan: StepPlan) -> list[int]:
        """Return the bytes of a refresh: mean eigenvalues, and new state."""
        refresh = self._chosen(plan.refresh)
        size = sum(map(self._all_reduced, self._means(refresh)))
        return [size + own for own in self._shared(refresh, plan)]

    def _means(self, refresh: list[LayerFacts]) -> Iterator[int]:
        """Yield the bytes of mean eigenvalues that the owners of A and of G tell each other."""
        splits = any(layer.placement.a != layer.placement.g for layer in self.layers)
        if splits and self.sizes.tells_means:
            for layers in grouped(refresh, operator.attrgetter("place")).values():
                yield 2 * layers[0].itemsize * sum(layer.task.blocks for layer in layers)

    def _shared(self, refresh: list[LayerFacts], plan: StepPlan) -> list[int]:
        """Return the bytes of new state on its way from owners to gradient workers."""
        got = [0] * self.grid.world
        columns = [0] * self.grid.columns
        for factor in itertools.chain(*(layer.factors for layer in refresh)):
            if factor.name in plan.decompose or factor.name in plan.attempt:
                size = self.sizes.state(factor)
                columns[factor.owner % self.grid.columns] += size
                got[factor.owner] -= size
        _add(got, [columns[rank % self.grid.columns] for rank in range(self.grid.world)])
        return got

    def _gradients(self, names: tuple[str, ...]) -> list[int]:
        """Return the bytes of preconditioned gradients."""
        if names == self.names:
            return self._all_gradients
        return self._gradients_of(self._chosen(names))

    @functools.cached_property
    def _all_gradients(self) -> list[int]:
        return self._gradients_of(self.active)

    def _gradients_of(self, layers: list[LayerFacts]) -> list[int]:
        got = [0] * self.grid.world
        sizes = [0] * self.grid.columns
        whole = [layer for layer in layers if not layer.shards]
        for same in grouped(whole, operator.attrgetter("device")).values():
            facts = dict(enumerate(same))
            parts = self.sizes, self.grid.columns, self.bucket_bytes
            for column, buckets in gradient_buckets(facts, [*facts], *parts):
                sizes[column] += sum(size for size, _ in buckets)
        received = [sum(sizes) - sizes[rank % self.grid.columns] for rank in range(self.grid.world)]
        _add(got, received)
        for layer in layers:
            if layer.shards and self.grid.world > 1:
                _add(got, self._returned(layer))
        return got

    def _returned(self, layer: LayerFacts) -> list[int]:
        """Return the bytes of a sharded gradient: its shards to the owner, and back as new ones."""
        got, owner = [0] * self.grid.world, layer.placement.g
        others = [rank for rank in range(self.grid.world) if rank != owner]
        for shards, itemsize in layer.shards:
            for rank in others:
                size = cargo_bytes([math.prod(shards.part_shape(rank)) * itemsize])
                got[rank] += size
                got[owner] += size * shards.sends(rank, owner)
        numbers = layer.task.blocks * layer.itemsize
        for rank in others:
            sends = any(shards.sends(rank, owner) for shards, _ in layer.shards)
            got[rank] += cargo_bytes([self.sizes.terms * numbers])
            got[owner] += cargo_bytes([self.sizes.shard_sums * numbers]) * sends
        return got

    def _all_reduced(self, size: int) -> int:
        """Return the bytes that an all-reduce brings to a rank."""
        return 2 * size * (self.grid.world - 1) // self.grid.world


def _add(to: list[int], sizes: list[int]) -> None:
    to[:] = [a + b for a, b in zip(to, sizes, strict=True)]


def _by_rank(got: Mapping[str, Sequence[N]]) -> list[dict[str, N]]:
    """Return lists by rank of each kind as one list, with totals."""
    ranks = [dict(zip(got, sizes, strict=True)) for sizes in zip(*got.values(), strict=True)]
    return [own | {"total": sum(own.values())} for own in ranks]
