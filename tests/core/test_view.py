"""Names of the preconditioner's parts, which users read and set on the preconditioner itself."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD
from kaisa_optim.core.options import OPTIONS, SETTABLE, Hyperparameters
from kaisa_optim.core.preconditioner import Preconditioner
from kaisa_optim.core.view import View


def built(**options: Any) -> Preconditioner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return KFACSGD(model, lr=0.1, compute_method="eigen", **options).preconditioner


def answers() -> list[str]:
    return [name for name in vars(View) if not name.startswith("_") and name != "account"]


def test_every_setting_and_every_answer_is_forwarded_with_its_text() -> None:
    for name in SETTABLE:
        text = inspect.getdoc(getattr(Preconditioner, name))
        assert text == OPTIONS[name].help == inspect.getdoc(vars(Hyperparameters)[name])
    for name in answers():
        assert getattr(Preconditioner, name) is getattr(View, name)


@pytest.mark.parametrize("name", answers())
def test_an_answer_is_never_set(name: str) -> None:
    kfac = built()
    with pytest.raises(AttributeError, match=name):
        setattr(kfac, name, None)
    with pytest.raises(AttributeError, match="layrs = 1: the preconditioner has no layrs"):
        kfac.layrs = 1  # type: ignore[attr-defined]
