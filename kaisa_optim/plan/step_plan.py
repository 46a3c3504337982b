"""Report, agree, plan: from each rank's numbers to one plan of the step, equal on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Flags of refreshed factors: sums were left out; the decomposition failed; no sum was finite.
REJECTED, FAILED, EMPTY = 1, 2, 4

PATIENCE = 4  # exchanges without a pass, after which a layer without an average waits for its slot
_GIVEN_UP = 30  # likewise of a layer with an average: ten intervals of two slots and an extra step


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
    missed_with_gradient: int = 0  # missed steps in which the layer had a gradient
    unseen: int = 0  # exchanges in which a gradient but no pass came, before there is an average
    elsewhere: float = 0.0  # share of the gradient from other sources than rows, once it was named
    deferred: bool = False  # owners tell in the next exchange whether the last refresh failed

    def reset(self) -> None:
        """Forget the layer's averages and state: they are estimated anew.

        ``deferred`` stays, since ranks must agree on how many answers they exchange.
        """
        self.has_average = self.has_state = False
        self.missed = self.missed_with_gradient = self.unseen = 0
        self.elsewhere = 0.0

    @property
    def waits(self) -> bool:
        """Return whether a first average is still expected of any pass, and not of a slot alone."""
        return not self.has_average and self.unseen < PATIENCE

    @property
    def is_late(self) -> bool:
        """Return whether the layer gathers in every gathering step, since its slot met no pass."""
        return self.waits or 0 < self.missed < _GIVEN_UP


class StepReport(NamedTuple):
    """One rank's numbers before a step, or their sums over all ranks."""

    failed: float = False  # an error in a hook waits to be raised
    captured: float = False  # a backward pass reached a layer, or capture was paused
    unread: float = False  # the model ran, and no call in it was one that K-FAC reads
    has_gradients: float = False
    drawn: float = False  # labels were drawn for some passes
    trained: float = False  # some statistics are of the gradients that train
    checksum: float = 0  # of values that must be alike on all ranks
    terms: float = 0.0  # K of this rank
    lacks_half_products: float = False
    elsewhere: float = False  # a layer's gradient was found to have other sources than its rows
    gradients: Sequence[float] = ()  # whether each layer has a gradient
    stale: Sequence[float] = ()  # flags of the deferred layers' factors
    rows: Sequence[float] = ()  # number of rows of each section of each layer
    crossed: Sequence[float] = ()  # likewise of crossed uses, whose inputs meet G's side

    @classmethod
    def blank(cls, layers: int, deferred: int, sections: int) -> StepReport:
        """Return a report of the right length, for counting its bytes."""
        none = [0.0] * sections
        factors = 2 * deferred  # A and G of each
        return cls(gradients=[False] * layers, stale=[0.0] * factors, rows=none, crossed=none)

    def numbers(self) -> list[float]:
        """Return the report as numbers whose sums over the ranks tell all."""
        *head, gradients, stale, rows, crossed = self
        squared = self.checksum**2  # both sums together tell whether checksums are equal
        counts = [*rows, *crossed]
        return [*head, squared, *gradients, *stale, *counts, *[n > 0 for n in counts]]


@dataclass(frozen=True)
class AgreedStep:
    """The ranks' reports together; only layers with rows are in ``rows`` and ``givers``.

    Both are those of crossed uses if a layer has no others: it is ``turned``.
    """

    exchanged: bool = False  # ranks held the exchange; else there was nothing to agree on
    answered: tuple[str, ...] = ()  # the deferred layers that ``total.stale`` is about
    own_terms: float = 0.0  # K of this rank
    # Sums over all ranks of each field; flags become numbers of ranks.
    total: StepReport = field(default_factory=StepReport)
    squares: float = 0.0  # sum of the squares of checksums
    gradients: Mapping[str, float] = field(default_factory=dict)  # ranks with a gradient
    rows: Mapping[str, list[float]] = field(default_factory=dict)  # rows of each section
    givers: Mapping[str, list[float]] = field(default_factory=dict)  # ranks with rows of it
    turned: frozenset[str] = frozenset()  # A's side has output gradients, and G's side inputs
    # Rows and givers of the crossed uses of layers that have uses of both kinds.
    crossed: Mapping[str, tuple[list[float], list[float]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        mine: StepReport,
        totals: Sequence[float],
        sections: Mapping[str, int],
        answered: tuple[str, ...],
    ) -> AgreedStep:
        """Read sums over the ranks of :meth:`StepReport.numbers`; ``sections`` are by layer."""
        lengths = len(mine.gradients), len(mine.stale), *4 * [len(mine.rows)]
        starts = list(itertools.accumulate(lengths, initial=len(totals) - sum(lengths)))
        head, flags, stale, rows, crossed, givers, crossed_givers = [
            list(totals[start:end]) for start, end in itertools.pairwise([0, *starts])
        ]
        *head, squares = head
        ends = list(itertools.accumulate(sections.values()))
        places = dict(zip(sections, map(slice, [0, *ends[:-1]], ends), strict=True))
        plain = {x: (rows[at], givers[at]) for x, at in places.items() if any(rows[at])}
        across = {
            x: (crossed[at], crossed_givers[at]) for x, at in places.items() if any(crossed[at])
        }
        known = across | plain
        seen = {name: known[name] for name in places if name in known}
        return cls(
            exchanged=True,
            answered=answered,
            own_terms=mine.terms,
            total=StepReport._make([*head, flags, stale, rows, crossed]),
            squares=squares,
            gradients=dict(zip(sections, flags, strict=True)),
            rows={name: counts for name, (counts, _) in seen.items()},
            givers={name: ranks for name, (_, ranks) in seen.items()},
            turned=frozenset(across.keys() - plain.keys()),
            crossed={name: counts for name, counts in across.items() if name in plain},
        )

    def has_rows(self, name: str) -> list[bool]:
        """Return for each section of a layer whether some rank has rows of it."""
        rows = self.rows[name]
        crossed, _ = self.crossed.get(name, (rows, []))
        return [max(counts) > 0 for counts in zip(rows, crossed, strict=True)]


@dataclass(frozen=True)
class StepPlan:
    """The work of one step on factors and gradients; layers are named in the model's order."""

    number: int  # of the step
    exchanges: bool = False  # ranks hold the status exchange
    average: tuple[str, ...] = ()  # layers whose sums enter the running averages
    refresh: tuple[str, ...] = ()  # layers to refresh
    again: frozenset[str] = frozenset()  # those of them whose last refresh failed


def plan_step(
    number: int,
    agreed: AgreedStep,
    states: Mapping[str, LayerState],
    slot: Collection[str],
) -> StepPlan:
    """Return the plan of a step that all ranks agree on.

    ``states`` are all layers' states after the exchange, in the model's order. ``slot`` has the
    layers that are refreshed in this step by their slot; layers without a state are due, too.
    """
    has_average = [(name, state) for name, state in states.items() if state.has_average]
    due = tuple([name for name, x in has_average if name in slot or not x.has_state])
    return StepPlan(
        number,
        exchanges=agreed.exchanged,
        average=tuple(agreed.rows),
        refresh=due,
        again=frozenset([name for name in due if states[name].failures]),
    )
