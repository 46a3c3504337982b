"""Schedules of K-FAC's hyperparameters: factors of the epoch on the values of the optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from kaisa_optim import KFACSGD, KFACParamScheduler, decay_at
from tests.support.training import network, train

START: dict[str, Any] = {
    "damping": 0.1,
    "factor_decay": 0.9,
    "kl_clip": 0.01,
    "factor_update_steps": 20,
    "inv_update_steps": 100,
}


def optimizer(**changed: Any) -> KFACSGD:
    """One with a clip, so that all can be scheduled."""
    return KFACSGD(network(), lr=0.1, compute_method="eigen", **{**START, **changed})


def read(opt: Any) -> dict[str, Any]:
    group, kfac = opt.param_groups[0], opt.preconditioner
    return {name: group[name] if name in group else getattr(kfac, name) for name in START}


def course(opt: Any, epochs: int, **schedules: Any) -> list[dict[str, Any]]:
    scheduler = KFACParamScheduler(opt, **schedules)
    seen = [read(opt)]
    for _ in range(epochs):
        scheduler.step()
        seen.append(read(opt))
    return seen


@pytest.mark.parametrize("name", START)
@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (lambda epoch: (1.1, 0.5, 0.8)[epoch], (1.1, 0.5, 0.8)),  # from epoch zero on
        ({2: 0.5, 4: 0.2}, (1, 1, 0.5, 0.5, 0.1, 0.1)),  # once the milestone's epoch has come
        (decay_at(range(1, 4, 2), 0.5), (1, 0.5, 0.5, 0.25)),
    ],
    ids=["callable", "milestones", "decay_at"],
)
def test_factors_multiply_the_initial_value(name, schedule, factors):
    seen = course(optimizer(), len(factors) - 1, **{name: schedule})
    for values, factor in zip(seen, factors, strict=True):
        assert values == pytest.approx({**START, name: factor * START[name]})


def test_intervals_are_whole_and_never_below_one():
    name = "factor_update_steps"
    seen = [values[name] for values in course(optimizer(), 4, **{name: lambda epoch: 0.13})]
    assert seen == [3] * 5 and all(type(value) is int for value in seen)
    opt = optimizer(**{name: 3})
    scheduler = KFACParamScheduler(opt, **{name: {1: 0.01, 2: 100}})
    scheduler.step()
    assert read(opt)[name] == 1
    train(opt.preconditioner.model, opt, range(2))
    scheduler.step()
    assert read(opt)[name] == 3  # rounding is not remembered


def test_each_group_from_its_own_value_also_one_that_came_later():
    model = network()
    opt = KFACSGD(model[0].parameters(), lr=0.1, model=model, damping=0.1)
    scheduler = KFACParamScheduler(opt, damping=lambda e: 0.5)
    scheduler.step()
    opt.add_param_group({"params": model[2].parameters(), "damping": 0.8})
    scheduler.step()
    expected = pytest.approx([0.05, 0.4])
    assert [g["damping"] for g in opt.param_groups] == expected
    again = KFACParamScheduler(opt, damping=lambda e: 0.5)
    again.load_state_dict(scheduler.state_dict())
    assert [g["damping"] for g in opt.param_groups] == expected


def stepped(**schedules: Any) -> None:
    KFACParamScheduler(optimizer(), **schedules).step()


def of_another() -> None:
    """Load the state of other schedules."""
    saved = KFACParamScheduler(optimizer(), damping={1: 0.5}).state_dict()
    KFACParamScheduler(optimizer(), kl_clip={1: 0.5}).load_state_dict(saved)


def with_a_callable_in_a_group() -> KFACSGD:
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    groups[1]["damping"] = lambda step: 0.1
    return KFACSGD(groups, model=model)


HALF, NONE = {1: 0.5}, "Invalid kl_clip: .* must be a callable "
GIVEN = "Invalid {}: the optimizer was given a callable"
# fmt: off
CALLS: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "Invalid optimizer: SGD has no K-FAC",
     lambda: KFACParamScheduler(torch.optim.SGD(network().parameters()), damping=HALF)),
    *((ValueError, NONE + "epoch -> f", partial(stepped, kl_clip=bad))
      for bad in (0.5, "half", [0.5, 0.25])),
    (ValueError, NONE + "of epoch, such", lambda: stepped(kl_clip=lambda: 1.0)),
    (TypeError, r"KFACParamScheduler\(\) got .* did you mean damping\?",
     lambda: stepped(dampning=HALF)),
    (TypeError, "'compound'; leave it out: factors multiply the first",
     lambda: stepped(damping=HALF, compound=True)),
    (TypeError, r"'temperature'; help\(KFACParamScheduler\) lists",
     lambda: stepped(temperature=HALF)),
    *((ValueError, f"Invalid {name}", partial(stepped, **{name: {1: factor}}))
      for name, factor in (("damping", 0.0), ("damping", -1.0), ("factor_decay", 2.0))),
    *((ValueError, GIVEN.format(name), lambda name=name: KFACParamScheduler(
        optimizer(**{name: lambda step: START[name]}), **{name: HALF})) for name in START),
    (ValueError, GIVEN.format("damping"),
     lambda: KFACParamScheduler(with_a_callable_in_a_group(), damping=HALF)),
    (ValueError, "Invalid kl_clip",  # there is none
     lambda: KFACParamScheduler(KFACSGD(network(), lr=0.1), kl_clip=HALF)),
    (ValueError, "Invalid kl_clip: the optimizer's clip is off",
     lambda: KFACParamScheduler(optimizer(kl_clip=None), kl_clip=HALF)),
    (ValueError, "Invalid state_dict.*damping.*kl_clip", of_another),
]
# fmt: on


@pytest.mark.parametrize(("error", "said", "call"), CALLS)
def test_what_is_refused(error, said, call):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize("name", START)
def test_a_callable_in_the_optimizer_leaves_the_others_to_schedules(name):
    opt = optimizer(**{name: lambda step: START[name]})
    for other in START.keys() - {name}:
        KFACParamScheduler(opt, **{other: {1: 0.5}})
