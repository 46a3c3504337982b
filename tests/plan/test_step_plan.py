"""Plans from agreed numbers: which factors are renewed in a step, and who checks them when."""

from __future__ import annotations

import dataclasses

import pytest

from kaisa_optim.plan.step_plan import (
    PATIENCE,
    AgreedStep,
    LayerState,
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


def test_a_layer_waits_for_a_first_average_with_patience():
    state = LayerState(unseen=PATIENCE - 1, deferred=True)
    assert state.waits
    state.unseen += 1
    assert not state.waits
    state.reset()
    assert state.waits and state.deferred
