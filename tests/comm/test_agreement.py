"""What differs between ranks is named on all of them; what all would say, one says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.ranks import run
from tests.support.training import descend, recorded_warnings


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        work()
    return str(caught.value)


def differs_in_order() -> str:
    model = nn.Sequential()
    rank = torch.distributed.get_rank()
    for name in ("first", "second") if rank == 0 else ("second", "first"):
        model.add_module(name, nn.Linear(3, 3))
    return refusal(lambda: KFACSGD(model, lr=0.1))


def test_modules_in_another_order_are_named():
    for text in run(2, differs_in_order):
        assert "'second' stands on rank 1 where rank 0 has" in text.replace("layer ", "").replace(
            '"', ""
        )
        assert "in one order on all ranks" in text


def with_a_scaler_on_one_rank() -> str:
    scaler = 8.0 if torch.distributed.get_rank() == 1 else None
    options = {"compute_method": "eigen", "grad_scaler": scaler}
    return refusal(lambda: KFACSGD(nn.Linear(3, 2), lr=0.1, **options))


def test_a_scaler_on_one_rank_alone_is_named():
    for text in run(2, with_a_scaler_on_one_rank):
        assert text.startswith("Invalid grad_scaler: 'given' on rank 1, None on rank 0")


def with_a_tensor_rate() -> str:
    model = nn.Linear(3, 2)
    opt = KFACAdam(model, lr=torch.tensor(0.1))
    opt.param_groups[0]["lr"].fill_(0.1 if dist.get_rank() else 0.2)
    model(torch.ones(4, 3)).sum().backward()
    return refusal(opt.step)


def test_a_tensor_rate_that_one_rank_changed_is_named():
    for text in run(2, with_a_tensor_rate):
        assert "lr of parameter group 0" in text and "0.2" in text


def warned() -> list[str]:
    """Of a parameter that no layer covers, and of a pattern that matches nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model.register_module("cell", nn.RNNCell(3, 3, dtype=torch.float64))
    with recorded_warnings() as texts:
        opt = KFACSGD(model, lr=0.1, skip_layers="nothing", compute_method="eigen")
        x = torch.ones(8, 4, dtype=torch.float64)
        descend(opt, model.cell(model(x)).square().mean())
    return texts


def test_what_all_ranks_would_say_one_says():
    first, second = run(2, warned)
    assert second == []
    said = "raw gradients:\n  cell", "'nothing'"
    assert all(any(text in message for message in first) for text in said)
    assert len(first) == len(said)
