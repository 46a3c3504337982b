"""Checks of arguments."""

from __future__ import annotations

from kaisa_optim import KFACSGD
from tests.support.training import network, train


def test_callables_that_keep_their_arguments_to_themselves():
    model = network()
    callables = {"damping": {0: 0.5}.get, "statistics_fraction": lambda *steps: 0.5}
    opt = KFACSGD(model, lr=0.1, **callables)
    train(model, opt, [0])
    assert opt.param_groups[0]["damping"] == 0.5
