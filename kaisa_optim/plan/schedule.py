"""When layers gather statistics and are refreshed: slots of an interval, from shapes alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def turns(sizes: Sequence[int], interval: int) -> list[int]:
    """The step of an interval in which each layer has its turn, in their order.

    A step's sizes add up to a fair share and at most one layer more. Neighbours mostly have their
    turn together: they share inputs, as queries and keys do.
    """
    *starts, total = itertools.accumulate(sizes, initial=0)
    return [interval * start // total for start in starts]


def rounds(costs: Sequence[float], at_once: int) -> list[int]:
    """The round in which each layer is refreshed, ``at_once`` of them in each, of like cost.

    As many at once as there are ranks, and each has about one to decompose: where no two fall to
    one rank, all rounds take together no more than the costliest layer and a rank's fair share of
    all. Whose a layer is has no part in it, as all assignments give the same updates. Rounds have
    the order of their first layers: one at once, that of all.
    """
    costliest_first = sorted(range(len(costs)), key=lambda i: -costs[i])
    together = [costliest_first[i : i + at_once] for i in range(0, len(costs), at_once)]
    numbers = [0] * len(costs)
    for number, layers in enumerate(sorted(together, key=min)):
        for layer in layers:
            numbers[layer] = number
    return numbers
