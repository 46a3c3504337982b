"""When layers gather statistics and are refreshed: slots of an interval, and the work of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .facts import LayerFacts, grouped

# The active layers of each slot by its place in an interval; a slot of frozen layers is empty.
Slots = dict[int, frozenset[str]]
_MOST = 4  # sums that one step gathers, as a multiple of the weights; more slots hold larger sums

PATIENCE = 4  # exchanges without a pass, after which a layer without an average waits for its slot
GIVEN_UP = 30  # likewise of a layer with an average: ten intervals of two slots and an extra step


class Schedule:
    """The slots of a model's layers, in the model's order, in both intervals, alike on all ranks.

    ``staggered`` layers gather in two slots of an interval, or in more where sums are large; else
    all gather in one step. Steps in ``early`` gather and refresh everything besides.
    """

    # Frozen layers keep their places: slots must not depend on flags that are compared in slots.

    def __init__(
        self, layers: Sequence[LayerFacts], staggered: bool, early: Sequence[int] = ()
    ) -> None:
        self._layers = layers
        self._early = frozenset(early)
        self._active = frozenset(layer.name for layer in layers if not layer.frozen)
        sums = sum(factor.size for layer in layers for factor in layer.factors)
        weights = sum(layer.gradient for layer in layers)
        self._count = max(2, -(-sums // max(1, _MOST * weights))) if staggered else 1
        self._slots: dict[tuple[int, int], Slots] = {}  # by both intervals

    def at(
        self, step: int, gathering: int, interval: int, *, late: bool = False
    ) -> tuple[frozenset[str] | None, frozenset[str], int]:
        """Return layers that gather (None: no exchange) and refresh, and the next step with any."""
        # With ``late`` layers, each interval has one more gathering step. It must move on by a step
        # from interval to interval, so that it meets layers that are used in a fixed rhythm.
        turn, place = divmod(step, gathering)
        gathers = self.refresh_slots(gathering, gathering)
        refreshes = self.refresh_slots(gathering, interval)
        due, refreshed = gathers.get(place), refreshes.get(step % interval, frozenset())
        if late and due is None and place == (1 + turn) % gathering:
            due = frozenset()
        if step in self._early:  # a refresh takes the statistics of its own step
            due = self._active
        if step == 0 or step in self._early:
            refreshed = self._active
        # Each slot comes again within an interval of the next step.
        first = step + 1
        coming = [early for early in self._early if early >= first]
        coming += [first + (slot - first) % gathering for slot in gathers]
        coming += [first + (slot - first) % interval for slot in refreshes]
        if late:
            for number in (turn, turn + 1):  # this interval's step may be over
                extra = number * gathering + (1 + number) % gathering
                coming += [extra] if extra >= first else []
        return due, refreshed, min(coming)

    def gathering_slots(self, interval: int) -> Slots:
        return self.refresh_slots(interval, interval)

    def refresh_slots(self, gathering: int, interval: int) -> Slots:
        # A refresh is in the step that gathers, if its interval is not the shorter one. Whole
        # shapes are spread by their cost, the costliest first: they gather and refresh together.
        # Only where sums need more than two slots, a shape that costs more than a share is cut.
        if (gathering, interval) in self._slots:
            return self._slots[gathering, interval]
        count = min(self._count, gathering)
        costs: dict[str, int] = {}
        for layer in self._layers:
            costs[layer.name] = sum(factor.operations for factor in layer.factors)
        total = max(1, sum(costs.values()))
        batches: list[tuple[int, list[LayerFacts]]] = []  # layers of one slot, with their cost
        for same in grouped(self._layers, lambda layer: layer.shape).values():
            cost = sum(costs[layer.name] for layer in same)
            parts = min(len(same), -(-cost * count // total)) if count > 2 else 1
            bounds = [len(same) * i // parts for i in range(parts + 1)]
            for start, stop in itertools.pairwise(bounds):
                batch = same[start:stop]
                batches.append((sum(costs[layer.name] for layer in batch), batch))
        # The sort must be stable, in the model's order: else ranks would gather different layers.
        batches.sort(key=lambda batch: -batch[0])
        loads, slots = [0] * count, Slots()
        for cost, batch in batches:
            number = loads.index(min(loads))
            loads[number] += cost
            place = min(gathering, interval) * number // count
            names = [layer.name for layer in batch if not layer.frozen]
            slots[place] = slots.get(place, frozenset()).union(names)
        self._slots[gathering, interval] = slots
        return slots


# ---- the work of a step ----


@dataclass
class LayerState:
    """Facts about one layer from step to step, alike on all ranks."""

    has_average: bool = False
    has_state: bool = False  # a refresh has made state of the averages
    failures: int = 0  # refreshes that failed in a row
    failed: int = 0  # refreshes that failed in all
    refreshes: int = 0  # refreshes that were done
    refreshed: int = -1  # the step of the last one
    before: int = -1  # the step of the one before it
    rejected: int = 0  # refreshes in which statistics that were not finite were left out
    missed: int = 0  # gathering steps since the slot passed without a pass through the layer
    unseen: int = 0  # exchanges since the last pass in which a gradient but no pass came
    elsewhere: float = 0.0  # share of the gradient from other sources than rows, once it was named
    deferred: bool = False  # owners tell in the next exchange whether the last refresh failed

    def reset(self) -> None:
        """Forget averages and state; ``deferred`` stays: ranks exchange equally many answers."""
        self.has_average = self.has_state = False
        self.missed = self.unseen = 0
        self.elsewhere = 0.0


class StepReport(NamedTuple):
    """One rank's numbers before a step, or their sums over all ranks: of flags, how many ranks."""

    failed: float = 0.0  # an error in a hook waits to be raised
    captured: float = 0.0  # a backward pass reached a layer, or capture was paused
    unread: float = 0.0  # the model ran, and no call in it was one that K-FAC reads
    has_gradients: float = 0.0
    drawn: float = 0.0  # labels were drawn for some passes
    trained: float = 0.0  # some statistics are of the gradients that train
    elsewhere: float = 0.0  # a layer's gradient was found to have other sources than its rows
    lacks_half_products: float = 0.0
    terms: float = 0.0  # K
    checksum: float = 0.0  # of values that must be alike on all ranks
    squares: float = 0.0  # of the checksum; both sums together tell whether checksums are equal
    # Lists. All layers have their places in all but one of them, frozen ones, too.
    gradients: Sequence[float] = ()  # whether each layer has a gradient
    stale: Sequence[float] = ()  # flags of A and of G, of layers whose state is deferred
    rows: Sequence[float] = ()  # number of rows of each section of each layer
    crossed: Sequence[float] = ()  # likewise of crossed uses, whose inputs meet G's side
    givers: Sequence[float] = ()  # whether there are rows
    crossed_givers: Sequence[float] = ()


@dataclass
class StepPlan:
    """The work of one step; layers are named in the model's order."""

    number: int  # of the step
    exchanges: bool = False  # ranks hold the exchange of numbers
    average: Sequence[str] = ()  # layers whose sums enter the running averages
    refresh: Sequence[str] = ()  # layers to refresh
    # What the ranks agreed on, where they held the exchange.
    total: StepReport = field(default_factory=StepReport)
    sections: Sequence[slice] = ()  # the places of each layer's sections among those of all
    seen: Sequence[bool] = ()  # for each section, whether some rank has rows of it
    of_gradients: float = 0.0  # the scale of this rank's sums of output gradients
