"""The settings and the answers of the preconditioner, which users read and set."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from kaisa_optim.core.hyperparameters import Hyperparameters
from kaisa_optim.core.options import OPTIONS, SETTABLE
from kaisa_optim.core.preconditioner import Preconditioner
from kaisa_optim.core.reports import Answers
from tests.support.watch import exact

ANSWERS = [name for name in vars(Answers) if not name.startswith("_") and name not in SETTABLE]


def test_every_setting_and_every_answer_has_a_text() -> None:
    for name in SETTABLE:
        text = inspect.getdoc(getattr(Preconditioner, name))
        assert text == OPTIONS[name].help == inspect.getdoc(vars(Hyperparameters)[name])
    assert len(ANSWERS) > 10 and all(inspect.getdoc(getattr(Preconditioner, n)) for n in ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_never_set(name: str) -> None:
    kfac = exact(nn.Linear(3, 2)).preconditioner
    with pytest.raises(AttributeError, match=name):
        setattr(kfac, name, None)
    with pytest.raises(AttributeError, match="layrs = 1: the preconditioner has no layrs"):
        kfac.layrs = 1
