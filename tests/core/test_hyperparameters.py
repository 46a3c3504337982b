"""Values that may change from step to step: set by hand, or callables of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kaisa_optim import KFACSGD
from kaisa_optim.core.options import FIXED, OPTIONS, SETTABLE
from tests.core.test_options import BAD
from tests.support.training import METHODS, assert_same, backward, network, train


@pytest.mark.parametrize("name", SETTABLE)
def test_an_option_set_to_a_bad_value_stays_as_it_was(name):
    kfac = KFACSGD(network(), lr=0.1).preconditioner
    before, bad = getattr(kfac, name), BAD[name][0][0]
    with pytest.raises(ValueError, match=f"Invalid {name}: {bad!r}"):
        setattr(kfac, name, bad)
    assert getattr(kfac, name) == before


def test_other_names_can_not_be_set_on_the_preconditioner():
    kfac = KFACSGD(network(), lr=0.1).preconditioner
    for name in FIXED:
        text = rf"{name} = 1: it can only be given at construction; .* with {name}=1$"
        with pytest.raises(AttributeError, match=text):
            setattr(kfac, name, 1)
    for name in ("damping", "factor_decay"):
        with pytest.raises(AttributeError, match=f"{name} = 1: it belongs to the parameter groups"):
            setattr(kfac, name, 1)
    with pytest.raises(AttributeError, match=r"loss_term = 5: .* did you mean loss_terms\?"):
        kfac.loss_term = 5
    with pytest.raises(AttributeError, match=f"heat = 1: .*; {', '.join(SETTABLE)} can be set"):
        kfac.heat = 1


SCHEDULABLE = [name for name, option in OPTIONS.items() if option.schedulable]


@pytest.mark.parametrize("option", SCHEDULABLE)
def test_a_callable_is_checked_with_its_arguments_and_at_each_step(option):
    good = {"factor_decay": 0.9, "kl_clip": 1e-3}.get(option, 1)
    bad = BAD[option][0][0]
    method = {"compute_method": "eigen" if OPTIONS[option].of_papers else "polar"}

    def wrong(one, two):
        return good

    with pytest.raises(ValueError, match=f"Invalid {option}: <function .*a callable of step, such"):
        KFACSGD(network(), lr=0.1, **method, **{option: wrong})
    with pytest.raises(ValueError, match=f"Invalid {option}: {bad!r}"):
        KFACSGD(network(), lr=0.1, **method, **{option: lambda step: bad})
    model = network()
    opt = KFACSGD(model, lr=0.1, **method, **{option: lambda step: good if step < 2 else bad})
    train(model, opt, [0])
    with pytest.raises(ValueError, match=f"Invalid {option}: {bad!r}"):
        train(model, opt, [1, 2])


def test_a_loss_scale_that_is_no_number():
    model = network()
    with pytest.raises(ValueError, match="Invalid grad_scaler: 0; a scale must be above 0"):
        KFACSGD(model, lr=0.1, grad_scaler=0)
    with pytest.raises(ValueError, match=r"Invalid grad_scaler: <function .*callable of nothing"):
        KFACSGD(model, lr=0.1, grad_scaler=lambda step: 2.0)
    opt = KFACSGD(model, lr=0.1, grad_scaler=lambda: "2", compute_method="eigen")
    with pytest.raises(ValueError, match="Invalid grad_scaler: '2' from its callable; a scale"):
        backward(model, 0)
    opt.preconditioner.grad_scaler = lambda: torch.tensor(2.0)
    train(model, opt, [0])


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(torch.bfloat16, 1.2e-11), (torch.float32, 1.2e-11), (torch.float64, 2.3e-20)],
)
def test_a_damping_that_rounding_drowns_is_refused(dtype, least):
    """Steps of 1e-12 in float32 were thousands of times too long in their first use."""
    model = network(dtype=dtype)
    KFACSGD(model, lr=0.1, damping=least)
    text = rf"Invalid damping: {least / 2!r}; with torch.float\d\d arithmetic it must be at least"
    with pytest.raises(ValueError, match=text):
        KFACSGD(model, lr=0.1, damping=least / 2)
    opt = KFACSGD(model[0].parameters(), lr=0.1, model=model)
    with pytest.raises(ValueError, match=text):
        opt.add_param_group({"params": model[2].parameters(), "damping": least / 2})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("method", METHODS)
def test_numbers_or_callables_of_the_step(method):
    seen: dict[str, list[int]] = {}
    papers: dict[str, Any] = {}  # options that directions have no use for
    if method == "eigen":
        papers = {"kl_clip": (1e-3, None, 1e-4), "loss_terms": (8, 4, 2)}

    def schedule(name: str, *sequence: Any):
        def of(step: int):
            seen.setdefault(name, []).append(step)
            return sequence[min(step, len(sequence) - 1)]

        return of

    model, expected = network(), network()
    opt = KFACSGD(
        model,
        lr=0.1,
        damping=schedule("damping", 0.1, 0.2, 0.4),
        factor_decay=schedule("factor_decay", 0.9, 0.5, 0.7),
        factor_update_steps=schedule("factor_update_steps", 1, 1, 2),
        inv_update_steps=schedule("inv_update_steps", 1, 2),
        **{name: schedule(name, *sequence) for name, sequence in papers.items()},
        compute_method=method,
    )
    by_hand = KFACSGD(expected, lr=0.1, inv_update_steps=1, compute_method=method)
    for i in range(6):
        at = min(i, 2)
        group, kfac = by_hand.param_groups[0], by_hand.preconditioner
        group["damping"] = (0.1, 0.2, 0.4)[at]
        group["factor_decay"] = (0.9, 0.5, 0.7)[at]
        for name, sequence in papers.items():
            setattr(kfac, name, sequence[at])
        kfac.factor_update_steps = (1, 1, 2)[at]
        kfac.inv_update_steps = (1, 2, 2)[at]
        train(model, opt, [i])
        train(expected, by_hand, [i])
        assert opt.param_groups[0]["damping"] == group["damping"]
        for name in papers:
            assert getattr(opt.preconditioner, name) == getattr(kfac, name)
        assert opt.preconditioner.inv_update_steps == kfac.inv_update_steps
        assert_same(model, expected)
    assert all(set(steps) >= set(range(6)) for steps in seen.values())


def test_a_callable_in_a_group():
    model = network()
    opt = KFACSGD(
        [
            {"params": model[0].parameters(), "damping": lambda step: 0.1 * (step + 1)},
            {"params": model[2].parameters()},
        ],
        lr=0.1,
        model=model,
        damping=0.7,
    )
    for i in range(3):
        train(model, opt, [i])
        assert [g["damping"] for g in opt.param_groups] == [pytest.approx(0.1 * (i + 1)), 0.7]


def test_it_is_known_whether_any_value_comes_from_a_schedule():
    model = network()
    opt = KFACSGD(model[0].parameters(), lr=0.1, model=model)
    values = opt.preconditioner.hyperparameters
    assert values.is_constant
    group = {"params": [*model[2].parameters()], "damping": lambda step: 0.1}
    with pytest.raises(ValueError, match="factor_decay"):
        opt.add_param_group({**group, "factor_decay": 2})
    assert values.is_constant
    opt.add_param_group(group)
    assert not values.is_constant
    opt = KFACSGD(network(), lr=0.1, inv_update_steps=lambda step: 2)
    assert not opt.preconditioner.hyperparameters.is_constant


@pytest.mark.parametrize("by_schedule", [False, True])
def test_a_damping_that_rounding_drowns_is_refused_in_later_steps_too(by_schedule):
    model = network(dtype=torch.float32)
    schedule = lambda step: 1e-3 if step < 2 else 1e-13  # noqa: E731
    opt = KFACSGD(model, lr=0.1, damping=schedule if by_schedule else 1e-3)
    train(model, opt, range(2))
    if not by_schedule:
        opt.param_groups[0]["damping"] = 1e-13
    with pytest.raises(ValueError, match=r"Invalid damping: 1e-13; with torch.float32 arithmetic"):
        train(model, opt, range(2, 3))
