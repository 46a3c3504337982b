"""The exchanges of factors: sums to owners, and new state to gradient workers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ..comm.ranks import Ranks
from ..curvature.group import Key, Side, by_device, device_of, stack_key
from ..curvature.refresh import Refresher
from ..curvature.rules import Rule
from ..curvature.sums import FactorSums
from ..layers import Layer
from ..linalg.moments import unpack
from ..plan.facts import FactorFacts
from ..plan.routes import Bucket, state_rounds, sum_buckets
from ..plan.step_plan import AgreedStep
from ..stages import stage
from .plan import Groups
from .registry import Registry


class _PackedState(NamedTuple):
    """One factor's state as it travels."""

    side: Side
    slots: slice
    tensors: list[Tensor]


class Exchange:
    """Brings sums to owners and state to gradient workers."""

    def __init__(self, ranks: Ranks, registry: Registry, rule: Rule, groups: Groups) -> None:
        self._ranks, self._groups = ranks, groups
        self._registry, self._placements = registry, registry.placements
        self._rule, self.refresher = rule, Refresher(rule)

    # ---- sums ----

    def sums(
        self, sums: FactorSums, layers: Sequence[Layer], agreed: AgreedStep
    ) -> Iterator[dict[Key, Tensor]]:
        """Yield new values of the factors that this rank owns, as they arrive."""
        ranks, registry = self._ranks, self._registry
        tied = [layer for layer in layers if layer.name in agreed.crossed]
        leveled = tied if ranks.world == 1 else layers
        if sums.units and leveled:
            largest = functools.partial(ranks.reduce_on_device, kind="factors", op="MAX")
            sums.level(leveled, largest)
        sums.mix(tied, agreed, functools.partial(ranks.reduce_on_device, kind="factors"))
        if ranks.world == 1:
            keys = [(layer, side) for layer in layers for side in "ag"]
            yield dict(zip(keys, sums.take(keys, agreed), strict=True))
            return
        facts = [self._placements.facts[layer] for layer in layers]
        wire = None if ranks.comm_dtype is None else ranks.comm_dtype.itemsize
        buckets = sum_buckets(facts, wire, ranks.world, ranks.bucket_bytes)

        def terms(bucket: Bucket[FactorFacts]) -> list[Tensor]:
            keys = [(registry.layers[factor.layer.name], factor.side) for factor in bucket.items]
            return [term.flatten() for term in sums.take(keys, agreed)]

        loads = ((bucket, terms(bucket)) for bucket in buckets)
        for arrived in ranks.reduce_to_owners(loads, "factors"):
            values = {}
            for factor, total in arrived:
                layer = registry.layers[factor.layer.name]
                key = stack_key(layer, factor.side)
                total = total.unflatten(0, (layer.blocks, -1))
                values[layer, factor.side] = total if key.diagonal else unpack(total, key.size)
            yield values

    def damping_shifts(
        self, layers: Sequence[Layer], damping_of: Callable[[Layer], float]
    ) -> dict[Key, Tensor]:
        """Return the damping of each factor's diagonal, on all ranks."""
        means = self._rule.means(self._groups.of, layers)
        if self._placements.splits_owners:  # each owner needs the other owner's mean
            means = [self._ranks.reduce_on_device(both, "second_order") for both in means]
        return self._rule.shifts(layers, damping_of, means)

    # ---- state ----

    def share_state(self, layers: list[Layer], damping_of: Callable[[Layer], float]) -> None:
        """Bring the owners' new state of these layers to all gradient workers."""
        with stage("share"):
            if self._ranks.grid.workers > 1:
                for same in by_device(layers):
                    self._broadcast_state(same)
            self._rule.renew(self._groups.of, layers, damping_of)

    def _broadcast_state(self, same: list[Layer]) -> None:
        """Broadcast the state of layers on one device along their columns."""
        ranks, rule, layers = self._ranks, self._rule, self._registry.layers
        facts = self._placements.facts
        renewed = [factor for layer in same for factor in facts[layer].factors]
        rounds = state_rounds(renewed, self._groups.sizes, ranks.grid, ranks.bucket_bytes)
        contents = [
            item.content
            for bucket in itertools.chain(*rounds)
            if ranks.rank in bucket.sizes
            for item in bucket.items
        ]

        # Generators, so that a packed triangle lives only until it has arrived.
        def packed(factor: FactorFacts) -> _PackedState:
            group = self._groups.of[layers[factor.layer.name]]
            side = group.a if factor.side == "a" else group.g
            slots = group.slots[layers[factor.layer.name]]
            return _PackedState(side, slots, rule.outgoing(side, slots))

        cargo = (list(map(packed, content)) for content in contents)
        for state in ranks.broadcast(rounds, cargo, device_of(same[0]), "second_order"):
            rule.incoming(*state)
