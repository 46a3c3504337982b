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


def seen(profiler: Any) -> set[str]:
    names = {event.key for event in profiler.key_averages()}
    return {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}


def of_a_first_step(cls: type, options: dict[str, Any]) -> set[str]:
    """Return the stages of a step that gathers and refreshes everything."""
    model = network()
    opt = cls(model, lr=0.1, **options)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(model, opt, [0])
    return seen(profiler)


@pytest.mark.parametrize(
    ("cls", "options", "without"),
    [
        (KFACAdam, {}, {"hand out"}),
        (KFACSGD, {"compute_method": "eigen"}, {"hand out", "length"}),
    ],
)
def test_one_process_has_all_stages_but_those_of_other_ranks(cls, options, without):
    assert of_a_first_step(cls, options) == STAGES - without


def test_ranks_have_all_stages():
    options = {"assignment": "layer-wise"}
    assert run(2, of_a_first_step, KFACAdam, options) == [STAGES] * 2


def test_a_quiet_step_has_its_own_stages_alone():
    model = network()
    opt = KFACAdam(model, lr=0.1, factor_update_steps=100, inv_update_steps=100)
    for i in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            train(model, opt, [i])
    assert seen(profiler) == {"precondition", "length", "base step"}


def test_averages_are_not_labelled_as_the_way_of_their_sums():
    model = network()
    opt = KFACAdam(model, lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(model, opt, [0])
    (average,) = [x for x in profiler.events() if x.name == PREFIX + "average"]
    above = average.cpu_parent
    while above is not None:
        assert not above.name.startswith(PREFIX)
        above = above.cpu_parent
