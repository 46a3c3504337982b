"""When layers gather statistics and are refreshed: slots of an interval, from shapes alone."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from .facts import LayerFacts
from .routes import grouped

Slots = dict[int, frozenset[str]]  # the layers of each slot of an interval that has any
Turns = list[list[int]]


def even_slots(costs: Sequence[int], slots: int) -> list[int]:
    """Return the slot of each turn, in their order.

    The costs of a slot add up to a fair share and at most one turn more.
    """
    *starts, total = itertools.accumulate(costs, initial=0)
    return [slots * start // max(1, total) for start in starts]


def turns(layers: Sequence[LayerFacts], costs: Sequence[int], at_once: int, slots: int) -> Turns:
    """Return the layers that take their turn together, by their places in ``layers``.

    They have one shape, so that they make few operations. A shape that costs more than a slot's
    fair share has several turns. With as many layers in a turn as there are ranks, each rank has
    about one to decompose: turns have ``at_once`` layers, or a multiple. What a shape has beyond
    that shares a turn with the next cheaper shape. Owners play no part: all assignments must give
    the same updates.
    """
    costliest_first = sorted(range(len(layers)), key=lambda place: -costs[place])
    shapes = grouped(costliest_first, lambda place: layers[place].shape)
    fair = max(1.0, sum(costs) / slots)
    found: Turns = []
    begun: list[int] = []
    for places in shapes.values():
        missing = at_once - len(begun) if begun else 0
        begun, places = begun + places[:missing], places[missing:]
        if len(begun) == at_once:
            found.append(begun)
            begun = []
        whole = len(places) // at_once
        parts = min(whole, max(1, round(sum(costs[i] for i in places) / fair)))
        ends = [at_once * -(-whole * i // parts) for i in range(parts + 1)] if parts else [0]
        found += [places[start:end] for start, end in itertools.pairwise(ends)]
        begun = begun + places[ends[-1] :]
    return [*found, begun] if begun else found


class Schedule:
    """The slots of a model's layers in both intervals, alike on all ranks.

    ``layers`` are in the model's order. Layers of one shape share a slot, and at least ``at_once``
    are refreshed together; 0: all of them, and then all gather in one step, too. Frozen layers keep
    their places, so that no slot depends on when others are frozen. Steps in ``early`` gather and
    refresh everything besides.
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
        return step // interval + sum(map(step.__ge__, self._early))

    def gathering_slots(self, interval: int) -> Slots:
        """Return the layers that gather in each slot; the sums of slots have about equal sizes."""
        if interval not in self._gathering:
            sizes = [sum(factor.size for factor in layer.factors) for layer in self._layers]
            self._gathering[interval] = self._slots(sizes, min(1, self._at_once), interval)
        return self._gathering[interval]

    def refresh_slots(self, interval: int) -> Slots:
        """Return the layers that are refreshed in each slot."""
        if interval not in self._refresh:
            costs = [sum(f.operations for f in layer.factors) for layer in self._layers]
            self._refresh[interval] = self._slots(costs, self._at_once, interval)
        return self._refresh[interval]

    def _slots(self, costs: Sequence[int], at_once: int, interval: int) -> Slots:
        together = [[*range(len(costs))]]
        if at_once:
            together = turns(self._layers, costs, at_once, interval)
        numbers = even_slots([sum(costs[i] for i in turn) for turn in together], interval)
        slots = defaultdict[int, list[str]](list)
        for number, turn in zip(numbers, together, strict=True):
            slots[number] += [self._layers[i].name for i in turn if not self._layers[i].frozen]
        return {number: frozenset(names) for number, names in slots.items() if names}
