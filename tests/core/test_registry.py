"""The layers of a model and their groups, and how both change during training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD
from tests.support.training import (
    EVERY_STEP,
    METHODS,
    Probe,
    assert_near,
    assert_same,
    backward,
    difference,
    network,
    train,
    values,
)


@pytest.mark.parametrize(
    ("name", "values"), [("damping", (0.1, 0.2)), ("factor_decay", (0.9, 0.8))]
)
def test_weight_and_bias_in_groups_that_differ(name, values):
    model, (one, other) = network(), values
    weights, biases = [model[0].weight, *model[2].parameters()], [model[0].bias]
    wanted = rf"Invalid {name}: layer '0' .*\[{min(values)}, {max(values)}\].*the same {name}"
    groups = [{"params": weights, name: one}, {"params": biases}]
    with pytest.raises(ValueError, match=wanted):
        KFACSGD([groups[0], {"params": biases, name: other}], lr=0.1, model=model)
    # Set later, it is an error of the step.
    opt = KFACSGD(groups, lr=0.1, model=model, **{name: one})
    opt.param_groups[1][name] = other
    backward(model, 0)
    with pytest.raises(ValueError, match=wanted):
        opt.step()
    # Other options of the two groups may differ.
    opt.param_groups[1].update({name: one, "lr": 0.05, "weight_decay": 0.1})
    train(model, opt, [0])


def test_an_added_bias_has_the_scheduled_values_of_its_step():
    model = network()
    opt = KFACSGD(
        [model[0].weight, *model[2].parameters()],
        lr=0.1,
        model=model,
        damping=lambda step: 0.1 * 0.9**step,
        factor_decay=lambda step: 0.9 + 0.01 * step,
    )
    train(model, opt, range(3))
    with pytest.raises(ValueError, match="Invalid damping"):
        opt.add_param_group({"params": [model[0].bias], "damping": 0.5})
    opt.add_param_group({"params": [model[0].bias]})
    for now in range(2, 5):
        for group in copy.deepcopy(opt).param_groups + opt.param_groups:
            assert group["damping"] == pytest.approx(0.1 * 0.9**now)
            assert group["factor_decay"] == pytest.approx(0.9 + 0.01 * now)
        train(model, opt, [now + 1])
    assert opt.preconditioner.factors("0")[0].shape == (1, 5, 5)


def test_a_replaced_head():
    model = network()
    opt = KFACSGD(model, lr=1.0, momentum=0.0, **EVERY_STEP)
    probe = Probe(model)
    for i in range(2):
        probe.step(model, i)
        train(model, opt, [i])
    old = model[2]
    model[2] = nn.Linear(6, 3, dtype=torch.float64)
    opt.add_param_group({"params": model[2].parameters()})
    assert list(opt.preconditioner.layers) == ["0", "2"]
    old_values = values(old)
    expected, before = Probe(model).step(model, 2), values(model)
    train(model, opt, [2])
    moved = difference(before, model)
    for name in ("2.weight", "2.bias"):  # the body goes on with its running averages
        assert_near(moved[name], expected[name])
    assert not torch.allclose(moved["0.weight"], expected["0.weight"])
    assert_same(values(old), old_values)
    twin_model, twin = copy.deepcopy((model, opt))
    train(model, opt, [3])
    train(twin_model, twin, [3])
    assert_same(twin_model, model)
    assert not any(str(k).startswith("kfac") for k in opt.state.get(old.weight, {}))


@pytest.mark.parametrize("method", METHODS)
def test_a_head_replaced_without_a_word_is_not_trained(method):
    """As with any torch optimizer; the body trains on."""
    model = network()
    opt = KFACSGD(model, lr=0.1, **METHODS[method])
    train(model, opt, [0])
    model[2] = nn.Linear(6, 3, dtype=torch.float64)
    before = values(model)
    train(model, opt, range(1, 3))
    moved = difference(before, model)
    assert moved["0.weight"].abs().max() > 0
    assert not moved["2.weight"].any()
