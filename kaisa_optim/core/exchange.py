"""The exchanges of factors: sums to owners, and new state to gradient workers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..comm.ranks import Ranks
from ..curvature.group import Side, by_device, device_of
from ..curvature.refresh import Refresher
from ..curvature.rules import Rule
from ..curvature.sums import FactorSums
from ..layers import Layer
from ..linalg.moments import unpack
from ..plan.facts import FactorFacts
from ..plan.routes import Bucket, state_rounds, sum_buckets
from ..plan.schedule import StepPlan
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
        self._ranks, self._groups, self._registry = ranks, groups, registry
        self._rule, self.refresher = rule, Refresher(rule)

    def sums(
        self, sums: FactorSums, layers: Sequence[Layer], plan: StepPlan
    ) -> Iterator[list[tuple[Layer, Side, Tensor]]]:
        """Yield new values of the factors that this rank owns, as they arrive, by their place."""
        ranks, total, group_of = self._ranks, plan.total, self._groups.of
        places = [(x, plan.sections[x.number]) for x in layers if x.tied]
        tied = [x for x, at in places if any(total.rows[at]) and any(total.crossed[at])]
        leveled = tied if ranks.world == 1 else layers
        if sums.units and leveled:
            largest = functools.partial(ranks.reduce_on_device, kind="factors", op="MAX")
            sums.level(leveled, largest)
        if tied:
            sums.mix(tied, plan, functools.partial(ranks.reduce_on_device, kind="factors"))
        arrivals: Iterable[Iterable[tuple[Layer, str, Tensor]]]
        if ranks.world == 1:
            chosen = [(x, side, x.turned) for x in layers for side in "ag"]
            values = zip(chosen, sums.take(chosen, plan), strict=True)
            arrivals = [[(x, side, value) for (x, side, _), value in values]]
        else:
            arrivals = self._reduced(sums, layers, plan)
        for arrived in arrivals:
            factors: dict[Any, list[tuple[Layer, Side, Tensor]]] = {}
            for layer, name, value in arrived:
                group = group_of[layer]
                place = factors.setdefault((value.device, value.dtype), [])
                place.append((layer, group.a if name == "a" else group.g, value))
            yield from factors.values()

    def _reduced(
        self, sums: FactorSums, layers: Sequence[Layer], plan: StepPlan
    ) -> Iterator[list[tuple[Layer, str, Tensor]]]:
        """Reduce sums to the factors' owners; yield those of this rank, some buckets at a time."""
        ranks, layer_of = self._ranks, self._registry.layers
        facts = [self._registry.placements.facts[layer] for layer in layers]
        wire = None if ranks.comm_dtype is None else ranks.comm_dtype.itemsize
        buckets = sum_buckets(facts, wire, ranks.world, ranks.bucket_bytes)

        def terms(bucket: Bucket[FactorFacts]) -> list[Tensor]:
            pairs = [(layer_of[factor.layer.name], factor.side) for factor in bucket.items]
            chosen = [(layer, side, layer.turned) for layer, side in pairs]
            return [term.flatten() for term in sums.take(chosen, plan)]

        loads = ((bucket, terms(bucket)) for bucket in buckets)
        for arrived in ranks.reduce_to_owners(loads, "factors"):
            values = []
            for factor, total in arrived:
                layer = layer_of[factor.layer.name]
                total = total.unflatten(0, (layer.blocks, -1))
                value = total if factor.diagonal else unpack(total, factor.n)
                values.append((layer, factor.side, value))
            yield values

    def share_state(self, layers: Sequence[Layer]) -> None:
        """Bring the owners' new state of these layers to all gradient workers."""
        ranks, rule, layer_of = self._ranks, self._rule, self._registry.layers
        facts = self._registry.placements.facts
        for same in by_device(layers) if ranks.grid.workers > 1 else ():
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
                layer = layer_of[factor.layer.name]
                group = self._groups.of[layer]
                side, slots = group.a if factor.side == "a" else group.g, group.slots[layer]
                return _PackedState(side, slots, rule.outgoing(side, slots))

            cargo = (list(map(packed, content)) for content in contents)
            for state in ranks.broadcast(rounds, cargo, device_of(same[0]), "second_order"):
                rule.incoming(*state)
