"""Plans from agreed numbers: which factors are renewed in a step, and who checks them when."""

from __future__ import annotations

import dataclasses

import pytest

from kaisa_optim.plan.step_plan import (
    PATIENCE,
    AgreedStep,
    LayerState,
    RefreshReport,
    StepReport,
    plan_step,
)

READY = LayerState(has_average=True, has_state=True)


def both(name: str) -> set[tuple[str, str]]:
    return {(name, "a"), (name, "g")}


@pytest.mark.parametrize(
    ("state", "in_slot", "defers", "waits_for", "attempts"),
    [
        (READY, False, False, "", ""),
        (READY, True, False, "ag", ""),
        (READY, True, True, "", "ag"),
        (dataclasses.replace(READY, failures=1), True, True, "ag", ""),
        (dataclasses.replace(READY, stale={"g"}), False, True, "g", ""),
        (dataclasses.replace(READY, stale={"g"}), True, True, "g", "a"),
        (LayerState(has_average=True), False, True, "ag", ""),
        (LayerState(), True, True, "", ""),
    ],
)
def test_what_is_renewed(state, in_slot, defers, waits_for, attempts):
    states = {"beside": READY, "x": state}
    names = ["x"] if in_slot else []
    defer = ["x"] if defers else []
    plan = plan_step(3, AgreedStep(), states, slot=names, defers=defer)
    assert plan.decompose == {("x", side) for side in waits_for}
    assert plan.attempt == {("x", side) for side in attempts}
    assert plan.refresh == plan.refresh[: bool(waits_for or attempts)]
    assert plan.deferred == (("x",) if attempts else ())
    assert plan.precondition == (("beside", "x") if state.has_average else ("beside",))
    assert plan.changes_factors == bool(waits_for or attempts)


def test_sums_of_reports_are_read_back():
    """Of two ranks, one without rows of the second layer; "x" is tied, "z" is turned."""
    sections = {"x": 1, "y": 2, "z": 1, "unused": 1}
    one = StepReport(
        terms=2.0,
        checksum=5,
        gradients=[True, True, True, True],
        stale=[0, 1],
        rows=[3, 4, 0, 0, 0],
        crossed=[6, 0, 0, 7, 0],
    )
    other = one._replace(
        terms=1.0,
        gradients=[True, False, True, False],
        stale=[0, 0],
        rows=[2, 0, 0, 0, 0],
        crossed=[0, 0, 0, 1, 0],
    )
    totals = [x + y for x, y in zip(one.numbers(), other.numbers(), strict=True)]
    assert len(totals) == len(StepReport.blank(4, 1, 5).numbers())
    agreed = AgreedStep.of(one, totals, sections, ("x",))
    assert (agreed.own_terms, agreed.terms) == (2.0, 3.0)
    assert agreed.checksums == (10, 50)  # equal: 2 · 50 is 10²
    assert agreed.gradients == {"x": 2, "y": 1, "z": 2, "unused": 1}
    assert [*agreed.stale] == [0, 1]
    assert agreed.rows == {"x": [5], "y": [4, 0], "z": [8]}
    assert agreed.givers == {"x": [2], "y": [1, 0], "z": [2]}
    assert agreed.turned == {"z"} and agreed.crossed == {"x": ([6], [1])}
    assert agreed.has_rows("y") == [True, False]


def test_reports_of_refreshes_are_read_back():
    names = ["x", "y", "z"]
    one, other = RefreshReport(failed={"x"}, empty={"z"}), RefreshReport(rejected={"x", "z"})
    pairs = zip(one.numbers(names), other.numbers(names), strict=True)
    found = RefreshReport.of(names, [x + y for x, y in pairs][1:])
    assert (found.failed, found.empty, found.rejected) == ({"x"}, {"z"}, {"x", "z"})


def test_a_layer_waits_for_a_first_average_with_patience():
    state = LayerState(unseen=PATIENCE - 1, deferred=True)
    assert state.waits
    state.unseen += 1
    assert not state.waits
    state.reset()
    assert state.waits and state.deferred
