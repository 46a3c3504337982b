"""Simulated ranks: waits by hand, and means that agree with plans."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kaisa_optim.plan.assignment import Grid
from kaisa_optim.tools.choice import candidates, price
from kaisa_optim.tools.prices import Passes
from kaisa_optim.tools.simulation import Stage, columns, everyone, rows, run, simulate
from tests.tools.test_choice import CASE
from tests.tools.test_prices import HARDWARE

CASE_WITH_PASSES = dataclasses.replace(
    CASE, passes=Passes(1e9, {layer.name: 500 for layer in CASE.layers})
)


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
        found = simulate(CASE_WITH_PASSES, candidate, world, HARDWARE)
        planned = price(CASE_WITH_PASSES, candidate, world, HARDWARE).step
        assert 0.8 * planned < found.mean <= planned * (1 + 1e-9)
        assert len(found.steps) == CASE.intervals[1]
        assert ("hand out" in found.busy) == (found.grid.columns > 1)
        assert ("share" in found.busy) == (found.grid.workers > 1)


def test_a_trace_has_a_line_for_each_rank_without_overlaps():
    found = simulate(CASE_WITH_PASSES, candidates(4)[1], 4, HARDWARE, shown=3)
    events = json.loads(found.trace())["traceEvents"]
    assert {one["tid"] for one in events} == {0, 1, 2}
    for rank in range(3):
        own = sorted((one["ts"], one["dur"]) for one in events if one["tid"] == rank)
        ends = [start + length for start, length in own]
        assert all(
            end <= start * (1 + 1e-9) for end, (start, _) in zip(ends, own[1:], strict=False)
        )
        assert ends[-1] == pytest.approx(1e6 * sum(found.steps), rel=1e-6)
