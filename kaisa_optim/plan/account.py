"""Prices of plans: the bytes that every rank keeps, and the bytes that it receives in a step.

Plain numbers from shapes: nothing here knows a tensor, or needs more than one process. Every byte
that arrives at a rank was sent by another, so the means over the ranks of received and of sent
bytes are equal; a single rank may send more than it receives, or less.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .assignment import Grid
from .facts import FactorFacts, LayerFacts
from .routes import Bucket, cargo_bytes, chunks, side_by_side
from .schedule import Schedule
from .step_plan import SIDES, RefreshReport, StepPlan, StepReport

# By kind, "total" too, as the preconditioner's own answers.
Usage = dict[str, int]
Means = dict[str, float]

N = TypeVar("N", int, float)
T = TypeVar("T")

_STATE = (
    "eigenvectors",
    "eigenvalues",
    "inverses",
    "roots",
    "eigenvalue_products",
)
KEPT = ("factors", *_STATE, "counters")
MOVED = ("factors", "second_order", "gradients", "status")


@dataclass(frozen=True)
class Account:
    """The bytes of K-FAC over a grid of ranks; answers are lists by rank.

    ``layers`` are in the model's order, which the buckets follow. If a size of stored or sent
    numbers is ``None``, the arithmetic's applies.
    """

    layers: Sequence[LayerFacts]
    grid: Grid
    method: str = "eigen"
    split: str | None = "pi"  # the split of the damping, for inverses
    stored_product: bool = False
    square_sums: bool = False  # gradient workers keep a number for each block
    terms: int = 2  # numbers of each block that travel with its new gradient
    shard_sums: int = 0  # numbers of each block that travel with its sharded momentum
    checks: bool = False  # owners keep a flag for each factor that must be decomposed again
    defers: Collection[str] = ()  # layers whose refresh is checked in the step after it
    factor_bytes: int | None = None  # bytes of a number in a running average
    state_bytes: int | None = None  # bytes of a number in eigenvectors, inverses, products
    wire_bytes: int | None = None  # bytes of a number in factors and gradients on their way
    scaled: bool = False  # factors and gradients travel with scales, as float16 needs them
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
            for factor in layer.factors:
                own = usage[factor.owner]
                own["factors"] += factor.elements * (self.factor_bytes or layer.itemsize)
                own["counters"] += layer.task.blocks * (layer.itemsize + 4 + 4 * self.checks)
                for kind, size in self._state(factor).items():
                    column[kind] += size
            for kind, size in self._of_gradient(layer).items():
                column[kind] += size
        for rank, own in enumerate(usage):
            for kind, size in applied[rank % self.grid.columns].items():
                own[kind] += size
            own["total"] = sum(own.values())
        return usage

    def _state(self, factor: FactorFacts) -> Usage:
        """Return the bytes that every gradient worker keeps for a factor."""
        itemsize = factor.layer.itemsize
        stored = self.state_bytes or itemsize
        if self.method != "eigen":
            return {f"{self.method}s": factor.elements * stored}
        values = {"eigenvalues": factor.eigenvalues * itemsize}
        return values if factor.diagonal else values | {"eigenvectors": factor.elements * stored}

    def _of_gradient(self, layer: LayerFacts) -> Usage:
        """Return the bytes that every gradient worker keeps beside the factors."""
        itemsize = layer.itemsize
        usage = {"counters": self.square_sums * layer.task.blocks * itemsize}
        if self.stored_product:
            usage["eigenvalue_products"] = layer.gradient * (self.state_bytes or itemsize)
        return usage

    def pending(self, names: Collection[str]) -> int:
        """Return the bytes of these layers' sums on each rank, from backward to step, at most."""
        alone = self.grid.world == 1
        chosen = self._chosen(names)
        return sum(
            (factor.elements if alone else factor.size) * layer.itemsize
            for layer in chosen
            for factor in layer.factors
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
            average, refresh = self._chosen(plan.average), self._chosen(plan.refresh)
            _add(got["status"], [self._status(plan)] * self.grid.world)
            _add(got["factors"], self._sums(average))
            size = sum(map(self._all_reduced, self._means(refresh)))
            _add(got["second_order"], [size] * self.grid.world)
            _add(got["second_order"], self._shared(refresh, plan))
        return _by_rank(got)

    def per_step(
        self, schedule: Schedule, factor_update_steps: int, inv_update_steps: int
    ) -> list[Means]:
        """Return the bytes that arrive at each rank in a step, as a mean over whole intervals.

        Where ranks learn of a refresh in the step after it, the mean is the most that it can be:
        these steps had no other exchange. Inverses that fail are left out.
        """
        both = math.gcd(factor_update_steps, inv_update_steps)
        together = factor_update_steps * inv_update_steps // both
        gathering = schedule.gathering_slots(factor_update_steps)
        refresh = schedule.refresh_slots(inv_update_steps)
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
        mean = [dict.fromkeys((*MOVED, "total"), 0.0) for _ in range(self.grid.world)]
        for (at_g, at_r), share in shares.items():
            if share > 1e-12:
                average = () if at_g is None else gathering[at_g]
                plan = self.plan(average=average, refresh=() if at_r is None else refresh[at_r])
                _weigh(mean, self.price(plan), share)
        for renewed in refresh.values():
            _weigh(mean, self._checked(renewed), 1 / inv_update_steps)
        return mean

    def _checked(self, renewed: Collection[str]) -> list[Usage]:
        """Return the bytes that a step adds for layers that the step before did not check."""
        asked = [name for name in renewed if name in self.defers]
        plain = self.price(self.plan())
        step = self.price(self.plan(answered=asked)) if asked else plain
        return [
            {kind: size - other[kind] for kind, size in one.items()}
            for one, other in zip(step, plain, strict=True)
        ]

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
        got = [0] * world
        for itemsize, factors, bucket in self._buckets(average):
            wire = self.wire_bytes or itemsize
            scales = self._all_reduced(len(factors) * itemsize) if self.scaled else 0
            # Every other rank sends its term of the part that this rank adds up.
            _add(got, [scales + (world - 1) * wire * size for size in bucket.sizes])
            for owner, size in bucket.passed_on.items():
                got[owner] += size * itemsize
        return got

    def _buckets(
        self, average: list[LayerFacts]
    ) -> Iterator[tuple[int, list[FactorFacts], Bucket[FactorFacts]]]:
        """Yield the itemsize of sums, the factors that travel together, and their bucket."""
        for itemsize, layers in _by_place(average):
            factors = [factor for layer in layers for factor in layer.factors]
            limit = self.bucket_bytes // (self.wire_bytes or itemsize)
            for chunk in chunks(factors, lambda factor: factor.size, limit):
                yield itemsize, chunk, Bucket(chunk, self.grid.world)

    def _means(self, refresh: list[LayerFacts]) -> Iterator[int]:
        """Yield the bytes of mean eigenvalues that the owners of A and of G tell each other."""
        splits = any(layer.placement.a != layer.placement.g for layer in self.layers)
        if splits and self.method == "inverse" and self.split == "pi":
            for itemsize, layers in _by_place(refresh):
                yield 2 * itemsize * sum(layer.task.blocks for layer in layers)

    def _shared(self, refresh: list[LayerFacts], plan: StepPlan) -> list[int]:
        """Return the bytes of new state on its way from owners to gradient workers."""
        got = [0] * self.grid.world
        columns = [0] * self.grid.columns
        for factor in itertools.chain(*(layer.factors for layer in refresh)):
            if plan.renews(*factor.name):
                size = self._sent(factor)
                columns[factor.owner % self.grid.columns] += size
                got[factor.owner] -= size
        _add(got, [columns[rank % self.grid.columns] for rank in range(self.grid.world)])
        return got

    def _sent(self, factor: FactorFacts) -> int:
        """Return the bytes of a factor's state on the wire; inverses and roots go as triangles."""
        if self.method != "eigen":
            itemsize = self.state_bytes or factor.layer.itemsize
            return cargo_bytes([factor.size * itemsize])
        return cargo_bytes(self._state(factor).values())

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
        for _, same in _grouped(whole, lambda layer: layer.device):
            columns = _grouped(same, lambda layer: layer.placement.g % self.grid.columns)
            total = sum(self._wire([layer]) for layer in same)
            limit = side_by_side(total, len(columns), self.bucket_bytes)
            for column, own in columns:
                for _, alike in _grouped(own, lambda layer: (*layer.task[1:5], layer.itemsize)):
                    for part in chunks(alike, lambda layer: self._wire([layer]), limit):
                        sizes[column] += self._wire(part)
        received = [sum(sizes) - sizes[rank % self.grid.columns] for rank in range(self.grid.world)]
        _add(got, received)
        for layer in layers:
            if layer.shards and self.grid.world > 1:
                _add(got, self._returned(layer))
        return got

    def _wire(self, alike: list[LayerFacts]) -> int:
        """Return the bytes of new gradients of one shape, with their terms."""
        own, blocks = alike[0].itemsize, sum(layer.task.blocks for layer in alike)
        sizes = [sum(layer.gradient for layer in alike) * (self.wire_bytes or own)]
        if self.terms:
            sizes.append(self.terms * blocks * own)
        if self.scaled:
            sizes.append(blocks * own)
        return cargo_bytes(sizes)

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
            got[rank] += cargo_bytes([self.terms * numbers])
            got[owner] += cargo_bytes([self.shard_sums * numbers]) * sends
        return got

    def _all_reduced(self, size: int) -> int:
        """Return the bytes that an all-reduce brings to a rank."""
        return 2 * size * (self.grid.world - 1) // self.grid.world


def _add(to: list[int], sizes: list[int]) -> None:
    to[:] = [a + b for a, b in zip(to, sizes, strict=True)]


def _by_place(layers: Sequence[LayerFacts]) -> Iterator[tuple[int, list[LayerFacts]]]:
    """Yield the itemsize, and the layers of one device and itemsize."""
    for (_, itemsize), same in _grouped(layers, lambda layer: (layer.device, layer.itemsize)):
        yield itemsize, same


def _grouped(
    layers: Sequence[LayerFacts], key: Callable[[LayerFacts], T]
) -> list[tuple[T, list[LayerFacts]]]:
    groups: dict[T, list[LayerFacts]] = {}
    for layer in layers:
        groups.setdefault(key(layer), []).append(layer)
    return list(groups.items())


def _by_rank(got: Mapping[str, Sequence[N]]) -> list[dict[str, N]]:
    """Return lists by rank of each kind as one list, with totals."""
    ranks = [dict(zip(got, sizes, strict=True)) for sizes in zip(*got.values(), strict=True)]
    return [own | {"total": sum(own.values())} for own in ranks]


def _weigh(mean: list[Means], step: list[Usage], share: float) -> None:
    for own, sizes in zip(mean, step, strict=True):
        for kind, size in sizes.items():
            own[kind] += share * size
