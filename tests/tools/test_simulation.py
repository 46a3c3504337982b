"""The choice among strategies, and simulated ranks: waits by hand, means as in plans."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from kaisa_optim.plan.assignment import Grid, Hybrid, LayerWise, Opt, Placement, Task
from kaisa_optim.plan.facts import LayerFacts
from kaisa_optim.tools.choice import Case, Choice, Momentum, candidates, price
from kaisa_optim.tools.prices import Passes
from kaisa_optim.tools.simulation import Stage, columns, everyone, rows, run, simulate
from tests.tools.test_prices import HARDWARE, POLAR, SIZES

LAYERS = [LayerFacts(Task(f"{i}", 200 + 10 * i, 300), Placement(0, 0)) for i in range(6)]
CASE = Case(
    LAYERS,
    SIZES,
    POLAR,
    (10, 20),
    lambda world: world,
    weights=10**6,
    gradients=10**6,
    base=500,
    momenta=[Momentum((x.name,), 4 * x.gradient) for x in LAYERS],
    passes=Passes(1e9, {layer.name: 500 for layer in LAYERS}),
)


def choice(budget: int | None = None) -> Choice:
    return Choice(CASE, HARDWARE, 4, budget, [price(CASE, x, 4, HARDWARE) for x in candidates(4)])


def test_candidates_are_all_divisors():
    assert [one.strategy for one in candidates(1)] == [LayerWise()]
    assert [one.strategy for one in candidates(7)] == [LayerWise(), Opt()]
    found = [one.strategy for one in candidates(12)]
    fractions = [Hybrid(n / 12) for n in (2, 3, 4, 6)]
    assert found == [LayerWise(), *fractions, Opt()]
    assert [one.title for one in candidates(4)] == ["layer-wise", "2/4 = 0.5", "opt"]
    assert LayerWise() not in [one.strategy for one in candidates(4, colocate=False)]


def test_a_momentum_of_two_layers_is_kept_wherever_one_of_them_is():
    shared = Momentum(tuple(x.name for x in LAYERS), 1000)
    case = dataclasses.replace(CASE, momenta=[shared])
    assert price(case, candidates(4)[0], 4, HARDWARE).momenta == [1000] * 4


def test_what_is_missing_is_said_where_nothing_fits():
    least = choice().nearest
    none = choice(budget=least.needs - 1000)
    assert none.best is None and none.fitting == []
    said = "no strategy fits into .*layer-wise, needs .*, 1 kB more"
    with pytest.raises(ValueError, match=f"Invalid memory_budget: {said}.*; give at least") as told:
        none.refuse_if_none_fits()
    advised = re.search(r"give at least ([\d,]+) bytes", str(told.value))
    assert advised is not None
    assert choice(budget=int(advised[1].replace(",", ""))).best == least


def test_ranks_wait_for_the_last_of_their_group():
    grid = Grid(4, 2)
    assert columns(grid) == [range(0, 4, 2), range(1, 4, 2)]
    assert rows(grid) == [range(2), range(2, 4)]
    stages = [
        Stage("decompose", [1.0, 0.0, 3.0, 0.0]),
        Stage("share", [0.5] * 4, columns),
        Stage("hand out", [0.25] * 4, rows),
        Stage("average gradients", [0.0] * 4, everyone),
    ]
    found = run(grid, [stages, stages], shown=2)
    # Rank 0 waits for rank 2 of its column, and rank 1 for rank 0 of its row.
    assert found.steps == [3.75, 3.75]
    events = [one[:1] + one[2:] for one in found.events if one.step == 0]
    assert events == [
        *((0, "decompose", 0.0, 1.0), (0, "wait", 1.0, 2.0)),
        *((0, "share", 3.0, 0.5), (1, "share", 0.0, 0.5)),
        *((1, "wait", 0.5, 3.0), (0, "hand out", 3.5, 0.25), (1, "hand out", 3.5, 0.25)),
    ]
    assert found.mean == 3.75
    assert sum(found.busy.values()) == pytest.approx(3.75)
    assert found.busy["wait"] == pytest.approx((2 + 0 + 3 + 3) / 4)


@pytest.mark.parametrize("world", [1, 4, 8])
def test_a_simulated_interval_takes_at_most_what_the_plan_says(world):
    """A plan adds up each stage's slowest rank; ranks that are slow in turns overlap."""
    for candidate in candidates(world):
        found = simulate(CASE, candidate, world, HARDWARE)
        planned = price(CASE, candidate, world, HARDWARE).step
        assert 0.8 * planned < found.mean <= planned * (1 + 1e-9)
        assert len(found.steps) == CASE.intervals[1]
        assert ("hand out" in found.busy) == (found.grid.columns > 1)
        assert ("share" in found.busy) == (found.grid.workers > 1)


def test_a_trace_has_a_line_for_each_rank_without_overlaps():
    found = simulate(CASE, candidates(4)[1], 4, HARDWARE, shown=3)
    events = json.loads(found.trace())["traceEvents"]
    assert {one["tid"] for one in events} == {0, 1, 2}
    for rank in range(3):
        own = sorted((one["ts"], one["dur"]) for one in events if one["tid"] == rank)
        ends = [start + length for start, length in own]
        assert all(
            end <= start * (1 + 1e-9) for end, (start, _) in zip(ends, own[1:], strict=False)
        )
        assert ends[-1] == pytest.approx(1e6 * sum(found.steps), rel=1e-6)
