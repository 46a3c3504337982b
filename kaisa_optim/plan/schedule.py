"""When layers gather statistics and are refreshed: slots of an interval, from shapes alone."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from .facts import LayerFacts

Slots = dict[int, frozenset[str]]  # the layers of each slot of an interval that has any


def even_slots(sizes: Sequence[int], interval: int) -> list[int]:
    """Return the slot of each layer, in the layers' order.

    The sizes of a slot add up to a fair share and at most one layer more. Neighbours mostly share a
    slot: they share inputs, as queries and keys do.
    """
    *starts, total = itertools.accumulate(sizes, initial=0)
    return [interval * start // total for start in starts]


def rounds(costs: Sequence[float], at_once: int) -> list[int]:
    """Return the round in which each layer is refreshed: ``at_once`` layers of like cost in each.

    With as many layers in a round as there are ranks, each rank has about one to decompose. If no
    rank has two layers of a round, all rounds together take no longer than the costliest layer and
    a fair share of all. Owners play no part: all assignments must give the same updates.
    Rounds have the order of their first layers.
    """
    costliest_first = sorted(range(len(costs)), key=lambda i: -costs[i])
    together = [costliest_first[i : i + at_once] for i in range(0, len(costs), at_once)]
    numbers = [0] * len(costs)
    for number, layers in enumerate(sorted(together, key=min)):
        for layer in layers:
            numbers[layer] = number
    return numbers


class Schedule:
    """The slots of a model's layers in both intervals, alike on all ranks.

    ``layers`` are in the model's order. ``at_once`` layers are refreshed together; 0: all of them,
    and then all gather in one step, too. Frozen layers keep their places, so that no slot depends
    on when others are frozen. Steps in ``early`` gather and refresh everything besides.
    """

    def __init__(
        self, layers: Sequence[LayerFacts], at_once: int, early: Sequence[int] = ()
    ) -> None:
        self._layers = layers
        self._at_once = at_once
        self._early = frozenset(early)
        self._active = frozenset(layer.name for layer in layers if not layer.frozen)
        self._gathering: dict[int, Slots] = {}  # by interval
        self._refresh: dict[int, Slots] = {}

    def gathers(self, step: int, interval: int) -> frozenset[str]:
        """Return the layers whose slot to gather statistics is this step."""
        if step in self._early:  # a refresh takes the statistics of its own step
            return self._active
        return self.gathering_slots(interval).get(step % interval, frozenset())

    def refreshes(self, step: int, interval: int) -> frozenset[str]:
        """Return the layers whose slot to be refreshed is this step; the first step has all."""
        if step == 0 or step in self._early:
            return self._active
        return self.refresh_slots(interval).get(step % interval, frozenset())

    def rounds_begun(self, step: int, interval: int) -> int:
        """Return how many slots each layer has had; the step's number alone tells."""
        return step // interval + sum(early <= step for early in self._early)

    def gathering_slots(self, interval: int) -> Slots:
        """Return the layers that gather in each slot; a slot's sums have about equal sizes."""
        if interval not in self._gathering:
            sizes = [sum(factor.size for factor in layer.factors) for layer in self._layers]
            numbers = even_slots(sizes, interval) if self._at_once else [0] * len(sizes)
            self._gathering[interval] = self._by_slot(numbers)
        return self._gathering[interval]

    def refresh_slots(self, interval: int) -> Slots:
        """Return the layers that are refreshed in each slot."""
        if interval not in self._refresh:
            numbers = [0] * len(self._layers)
            if self._at_once:
                costs = [sum(f.operations for f in layer.factors) for layer in self._layers]
                round_of = rounds(costs, self._at_once)
                slot_of = even_slots([1] * len(set(round_of)), interval)
                numbers = [slot_of[number] for number in round_of]
            self._refresh[interval] = self._by_slot(numbers)
        return self._refresh[interval]

    def _by_slot(self, numbers: list[int]) -> Slots:
        slots = defaultdict(list)
        for layer, number in zip(self._layers, numbers, strict=True):
            if not layer.frozen:
                slots[number].append(layer.name)
        return {number: frozenset(names) for number, names in slots.items()}
