"""Checks of arguments."""

from __future__ import annotations

import pytest

from kaisa_optim import KFACSGD, errors
from tests.support.training import network, train


def test_callables_that_keep_their_arguments_to_themselves():
    model = network()
    callables = {"damping": {0: 0.5}.get, "statistics_fraction": lambda *steps: 0.5}
    opt = KFACSGD(model, lr=0.1, **callables)
    train(model, opt, [0])
    assert opt.param_groups[0]["damping"] == 0.5


def test_flags_and_callables_are_named_with_what_they_must_be():
    assert errors.check_flag("x", False) is False and errors.check_flag("x", None, True) is None
    for none, rest in ((False, "$"), (True, ", or None for what follows from other options$")):
        with pytest.raises(ValueError, match=f"^Invalid x: 1; it must be True or False{rest}"):
            errors.check_flag("x", 1, none)
    errors.check_callable("x", lambda a, b=0: a, "step")
    with pytest.raises(ValueError, match=r"it must be a callable of step, such as lambda step: "):
        errors.check_callable("x", lambda: 0, "step")
