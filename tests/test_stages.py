"""A profiler sees the stages of a step by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.ranks import run
from tests.support.training import network, train

PREFIX = "kaisa::"
STAGES = {"capture", "agree", "reduce", "average", "decompose", "share"}
STAGES |= {"precondition", "length", "hand out", "base step"}


def stages(cls: type, options: dict[str, Any], step: int = 0) -> set[str]:
    """Return the stages of one step; the first one gathers and refreshes everything."""
    model = network()
    opt = cls(model, lr=0.1, **options)
    train(model, opt, range(step))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(model, opt, [step])
    events = [x for x in profiler.events() if x.name.startswith(PREFIX)]
    for event in events:
        # Averages are not labelled as the way of their sums, too.
        above = event.cpu_parent if event.name == f"{PREFIX}average" else None
        while above is not None:
            assert not above.name.startswith(PREFIX)
            above = above.cpu_parent
    return {event.name.removeprefix(PREFIX) for event in events}


@pytest.mark.parametrize(
    ("cls", "options", "without"),
    [
        (KFACAdam, {}, {"hand out"}),
        (KFACSGD, {"compute_method": "eigen"}, {"hand out", "length"}),
    ],
)
def test_one_process_has_all_stages_but_those_of_other_ranks(cls, options, without):
    assert stages(cls, options) == STAGES - without


def test_ranks_have_all_stages():
    assert run(2, stages, KFACAdam, {"assignment": "layer-wise"}) == [STAGES] * 2


def test_a_quiet_step_has_its_own_stages_alone():
    every = {"factor_update_steps": 100, "inv_update_steps": 100}
    assert stages(KFACAdam, every, 1) == {"precondition", "length", "base step"}
