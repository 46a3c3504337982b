"""What a step's exchanges work out once."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.core import exchange


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
@pytest.mark.parametrize("at_once", [1, 1 << 25])
def test_blocks_are_worked_out_once(monkeypatch, cls, at_once):
    """Also where a stack is stepped for itself, and all layers begin with that stack's layer."""
    monkeypatch.setattr(exchange, "_AT_ONCE", at_once)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    opt = cls(model, lr=0.01)
    counts = []
    with mock.patch.object(exchange, "Blocks", side_effect=exchange.Blocks) as made:
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            opt.step()
            counts.append(made.call_count)
    assert counts[0] > 0 and len(set(counts)) == 1
