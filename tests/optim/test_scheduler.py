"""Schedules of K-FAC's hyperparameters: factors of the epoch on the values of the optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kaisa_optim import KFACSGD, KFACParamScheduler, decay_at
from tests.support.training import METHODS, assert_same, network, train

NAMES = ("damping", "factor_decay", "kl_clip", "factor_update_steps", "inv_update_steps")
START: dict[str, Any] = {
    "damping": 0.1,
    "factor_decay": 0.9,
    "kl_clip": 0.01,
    "factor_update_steps": 10,
    "inv_update_steps": 100,
}


def optimizer(**changed: Any) -> KFACSGD:
    """One with a clip, so that all can be scheduled."""
    return KFACSGD(network(), lr=0.1, compute_method="eigen", **{**START, **changed})


def read(opt: Any, name: str) -> Any:
    if name in ("damping", "factor_decay"):
        return opt.param_groups[0][name]
    return getattr(opt.preconditioner, name)


def course(opt: Any, name: str, schedule: Any, epochs: int) -> list[Any]:
    scheduler = KFACParamScheduler(opt, **{name: schedule})
    seen = [read(opt, name)]
    for _ in range(epochs):
        scheduler.step()
        seen.append(read(opt, name))
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_callables_multiply_the_initial_value(name):
    """From epoch zero on."""
    opt = optimizer()
    seen = course(opt, name, lambda epoch: (1.1, 0.5, 0.8)[epoch], 2)
    assert seen == pytest.approx([START[name] * f for f in (1.1, 0.5, 0.8)])
    for other in set(NAMES) - {name}:
        assert read(opt, other) == START[other]


@pytest.mark.parametrize("name", ["damping", "inv_update_steps"])
def test_milestones_multiply_once_their_epoch_has_come(name):
    seen = course(optimizer(), name, {2: 0.5, 4: 0.2}, 5)
    assert seen == pytest.approx([START[name] * f for f in (1, 1, 0.5, 0.5, 0.1, 0.1)])


def test_intervals_are_whole_and_never_below_one():
    name = "factor_update_steps"
    seen = course(optimizer(**{name: 10}), name, lambda epoch: 0.26, 4)
    assert seen == [3] * 5
    assert all(type(value) is int for value in seen)
    opt = optimizer(**{name: 3})
    scheduler = KFACParamScheduler(opt, **{name: {1: 0.01, 2: 100}})
    scheduler.step()
    assert read(opt, name) == 1
    train(opt.preconditioner.model, opt, range(2))
    scheduler.step()
    assert read(opt, name) == 3  # rounding is not remembered


@pytest.mark.parametrize("method", METHODS)
def test_the_values_reach_the_step(method):
    """A scheduled optimizer trains like one with values set by hand."""
    model, expected = network(), network()
    clips = method == "eigen"
    options = {**METHODS[method], "damping": 0.5, "inv_update_steps": 2}
    options |= {"kl_clip": 1e-3} if clips else {}
    opt, by_hand = KFACSGD(model, lr=0.1, **options), KFACSGD(expected, lr=0.1, **options)
    scheduler = KFACParamScheduler(
        opt,
        damping=decay_at([1, 2], 0.1),
        factor_decay=lambda epoch: 0.9**epoch,
        **({"kl_clip": {2: 0.1}} if clips else {}),
        factor_update_steps={1: 2},
        inv_update_steps={2: 2},
    )
    group, kfac = by_hand.param_groups[0], by_hand.preconditioner
    for epoch in range(3):
        group["damping"] = 0.5 * math.prod([0.1] * epoch)
        group["factor_decay"] = 0.95 * 0.9**epoch
        if clips:
            kfac.kl_clip = 1e-3 * (0.1 if epoch == 2 else 1)
        kfac.factor_update_steps = 2 if epoch else 1
        kfac.inv_update_steps = 4 if epoch == 2 else 2
        steps = range(3 * epoch, 3 * epoch + 3)
        train(model, opt, steps)
        train(expected, by_hand, steps)
        assert_same(model, expected)
        scheduler.step()


def test_decay_at():
    assert decay_at([40, 80], 0.5) == {40: 0.5, 80: 0.5}
    assert decay_at(range(2), 3) == {0: 3, 1: 3}


def test_each_group_from_its_own_value_also_one_that_came_later():
    model = network()
    opt = KFACSGD(model[0].parameters(), lr=0.1, model=model, damping=0.1)
    scheduler = KFACParamScheduler(opt, damping=lambda e: 0.5)
    scheduler.step()
    opt.add_param_group({"params": model[2].parameters(), "damping": 0.8})
    scheduler.step()
    expected = [0.05, 0.4]
    assert [g["damping"] for g in opt.param_groups] == pytest.approx(expected)
    again = KFACParamScheduler(opt, damping=lambda e: 0.5)
    again.load_state_dict(scheduler.state_dict())
    assert [g["damping"] for g in opt.param_groups] == pytest.approx(expected)


# ---- state ----


SCHEDULES: dict[str, Any] = {
    "damping": lambda epoch: 0.9**epoch,
    "factor_decay": {2: 0.9},
    "kl_clip": {1: 0.5, 3: 0.5},
    "factor_update_steps": {2: 0.1},
    "inv_update_steps": lambda epoch: 0.7,
}


@pytest.mark.parametrize("taken", [0, 3])
def test_resume(taken, tmp_path):
    opt = optimizer()
    scheduler = KFACParamScheduler(opt, **SCHEDULES)
    for _ in range(taken):
        scheduler.step()
    torch.save(scheduler.state_dict(), tmp_path / "state")
    at_save = {name: read(opt, name) for name in NAMES}
    other = optimizer()
    resumed = KFACParamScheduler(other, **SCHEDULES)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert resumed.last_epoch == taken
    assert {name: read(other, name) for name in NAMES} == at_save
    for _ in range(4):
        scheduler.step()
        resumed.step()
        for name in NAMES:
            assert read(other, name) == read(opt, name)


def test_a_state_of_other_schedules_is_refused():
    saved = KFACParamScheduler(optimizer(), damping={1: 0.5}).state_dict()
    other = KFACParamScheduler(optimizer(), kl_clip={1: 0.5})
    with pytest.raises(ValueError, match=r"Invalid state_dict.*damping.*kl_clip"):
        other.load_state_dict(saved)


# ---- errors ----


def test_another_optimizer_is_refused():
    with pytest.raises(TypeError, match="Invalid optimizer: SGD has no K-FAC"):
        KFACParamScheduler(torch.optim.SGD(network().parameters()), damping={1: 0.5})


def test_what_is_no_schedule_is_refused():
    opt = optimizer()
    for bad in (0.5, "half", [0.5, 0.25]):
        with pytest.raises(ValueError, match=r"Invalid kl_clip: .* must be a callable epoch -> f"):
            KFACParamScheduler(opt, kl_clip=bad)
    with pytest.raises(ValueError, match=r"Invalid kl_clip: .* must be a callable of epoch, such"):
        KFACParamScheduler(opt, kl_clip=lambda: 1.0)
    with pytest.raises(TypeError, match=r"KFACParamScheduler\(\) got .* did you mean damping\?"):
        KFACParamScheduler(opt, dampning=lambda epoch: 1.0)
    with pytest.raises(TypeError, match="'compound'; leave it out: factors multiply the first"):
        KFACParamScheduler(opt, damping=lambda epoch: 0.5, compound=True)
    with pytest.raises(TypeError, match=r"'temperature'; help\(KFACParamScheduler\) lists"):
        KFACParamScheduler(opt, temperature=lambda epoch: 1.0)


def test_a_factor_that_is_out_of_range():
    for name, factor in (("damping", 0.0), ("damping", -1.0), ("factor_decay", 2.0)):
        scheduler = KFACParamScheduler(optimizer(), **{name: {1: factor}})
        with pytest.raises(ValueError, match=f"Invalid {name}"):
            scheduler.step()


@pytest.mark.parametrize("name", NAMES)
def test_a_callable_in_the_optimizer_and_here_is_refused(name):
    opt = optimizer(**{name: lambda step: START[name]})
    with pytest.raises(ValueError, match=f"Invalid {name}: the optimizer was given a callable"):
        KFACParamScheduler(opt, **{name: {1: 0.5}})
    for other in set(NAMES) - {name}:
        KFACParamScheduler(opt, **{other: {1: 0.5}})


def test_what_can_not_be_scheduled_is_refused():
    model, directions = network(), KFACSGD(network(), lr=0.1)
    groups = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "damping": lambda step: 0.1},
    ]
    for opt, name, said in (
        (KFACSGD(groups, model=model), "damping", ": the optimizer was given a callable"),
        (directions, "kl_clip", ""),  # there is none
        (optimizer(kl_clip=None), "kl_clip", ": the optimizer's clip is off"),
    ):
        with pytest.raises(ValueError, match=f"Invalid {name}{said}"):
            KFACParamScheduler(opt, **{name: {1: 0.5}})
    KFACParamScheduler(directions, damping={1: 0.5})
