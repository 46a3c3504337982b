"""Faults that single runs brought to light, each with the case that showed it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.linalg import eigen
from tests.support.ranks import run
from tests.support.training import network, train


def test_a_step_before_any_gradient_is_not_counted():
    """Its count had no entry in the state, so that a resumed run had another schedule."""
    model = network()
    opt = KFACSGD(model, lr=0.1, warmup_steps=4)
    opt.step()
    assert opt.preconditioner.steps == 0
    train(model, opt, range(3))
    other = network()
    resumed = KFACSGD(other, lr=0.1, warmup_steps=4)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert resumed.preconditioner.steps == opt.preconditioner.steps == 3


def test_a_pass_on_the_meta_device_gathers_nothing():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        opt = KFACSGD(model, lr=0.1)
        model(torch.empty(5, 3)).sum().backward()
    assert not opt.preconditioner.sums.of_layer


def test_no_averaging_takes_the_newest_statistics():
    model = nn.Sequential(nn.Linear(3, 2))
    opt = KFACSGD(model, lr=0.0, factor_decay=0, factor_update_steps=1, kl_clip=None)
    for x in torch.randn(3, 8, 3):
        opt.zero_grad()
        model(x).square().sum().backward()
        opt.step()
    rows = torch.cat([x, torch.ones(8, 1)], 1)
    torch.testing.assert_close(opt.preconditioner.factors("0")[0][0], rows.T @ rows / 8)


def differs_in_order() -> str:
    model = nn.Sequential()
    rank = torch.distributed.get_rank()
    for name in ("first", "second") if rank == 0 else ("second", "first"):
        model.add_module(name, nn.Linear(3, 3))
    try:
        KFACSGD(model, lr=0.1)
    except ValueError as error:
        return str(error)
    return ""


def test_modules_in_another_order_are_named():
    for text in run(2, differs_in_order):
        assert "'second' stands on rank 1 where rank 0 has" in text.replace("layer ", "").replace(
            '"', ""
        )
        assert "in one order on all ranks" in text


def with_a_scaler_on_one_rank() -> str:
    scaler = 8.0 if torch.distributed.get_rank() == 1 else None
    try:
        KFACSGD(nn.Linear(3, 2), lr=0.1, grad_scaler=scaler)
    except ValueError as error:
        return str(error)
    return ""


def test_a_scaler_on_one_rank_alone_is_named():
    for text in run(2, with_a_scaler_on_one_rank):
        assert text.startswith("Invalid grad_scaler: 'given' on rank 1, None on rank 0")


@pytest.mark.parametrize(
    ("key", "change", "fault"),
    [
        ("kfac_a_vectors", lambda t: t.fill_(torch.nan), "not finite"),
        ("kfac_a_vectors", lambda t: t.mul_(2), "not orthonormal"),
        ("kfac_g_values", lambda t: t.fill_(torch.inf), "not finite"),
        ("kfac_step", lambda t: t.fill_(-3), "it must be 0 or more"),
    ],
)
def test_broken_numbers_in_a_state_are_refused_by_name(key, change, fault):
    model = network()
    opt = KFACAdam(model, lr=0.01)
    train(model, opt, range(2))
    state = copy.deepcopy(opt.state_dict())
    change(state["state"][0][key])
    with pytest.raises(ValueError, match=f"{key} is .*{fault}"):
        opt.load_state_dict(state)


def test_a_solver_that_fails_in_a_refinement_leads_to_a_decomposition(monkeypatch):
    model = network()
    opt = KFACSGD(model, lr=0.1, basis_tolerance=0.5, factor_update_steps=1, inv_update_steps=1)
    train(model, opt, range(1))

    def fails(*args: Any) -> Tensor:
        raise torch.linalg.LinAlgError("planted")

    monkeypatch.setattr(eigen, "refine_basis", fails)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt, range(1, 2))
        assert opt.preconditioner.plan.refine and not opt.preconditioner.plan.decompose
        train(model, opt, range(2, 3))
    assert opt.preconditioner.plan.decompose and not opt.preconditioner.plan.refine
