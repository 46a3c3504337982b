"""Plans from agreed numbers: which layers are renewed in a step."""

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


@pytest.mark.parametrize(
    ("state", "in_slot", "refreshed"),
    [
        (READY, False, False),
        (READY, True, True),
        (dataclasses.replace(READY, failures=1), False, False),
        (dataclasses.replace(READY, failures=1), True, True),
        (LayerState(has_average=True), False, True),
        (LayerState(), True, False),
    ],
)
def test_what_is_renewed(state, in_slot, refreshed):
    plan = plan_step(3, AgreedStep(), {"beside": READY, "x": state}, ["x"] if in_slot else [])
    assert plan.refresh == (("x",) if refreshed else ())
    assert plan.again == ({"x"} if refreshed and state.failures else set())


def test_a_layer_waits_for_a_first_average_with_patience():
    state = LayerState(unseen=PATIENCE - 1, deferred=True)
    assert state.waits
    state.unseen += 1
    assert not state.waits
    state.reset()
    assert state.waits and state.deferred
