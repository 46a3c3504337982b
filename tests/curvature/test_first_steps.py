"""Early refreshes: all for the first steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.cluster import (
    Plan,
    Trained,
    assert_alike,
    error,
    even,
    train,
    train_alone,
)
from tests.support.cluster import network as network_of
from tests.support.ranks import run
from tests.support.training import (
    assert_same,
    network,
)
from tests.support.training import early as refreshing_early
from tests.support.training import train as train_plainly

pytestmark = pytest.mark.filterwarnings("ignore:the base optimizer updates these")

EIGEN: dict[str, Any] = {"compute_method": "eigen"}
FREE = {**EIGEN, "kl_clip": None}
EARLY = (2, 5)
INTERVALS = {"factor_update_steps": 3, "inv_update_steps": 4}


# ---- early refreshes ----


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({}, (5, 10, 25, 50)),
        ({"inv_update_steps": 40}, (5, 10, 25, 50)),
        (EIGEN, (5, 10, 25, 50)),
        ({**EIGEN, "inv_update_steps": 40}, ()),
    ],
)
def test_bases_and_roots_are_found_anew_early(options, early):
    """By default, and all of them together; in other steps none or one of the two."""
    model = network()
    opt = KFACAdam(model, lr=0.01, **options)
    name = "a_vectors" if options.get("compute_method") == "eigen" else "a_root"

    def bases() -> list[Tensor]:
        kfac = opt.preconditioner
        return [dict(kfac.store.views(x))[name].clone() for x in kfac.layers.values()]

    before, together = None, []
    for i in range(60):
        train_plainly(model, opt, [i])
        now = bases()
        if before is not None and not any(map(torch.equal, now, before)):
            together.append(i)
        before = now
    assert tuple(together) == early


def test_turns_stay_as_they_are():
    """The same as intervals of one step where all is early, which leave the others their turns."""
    early = (2, 3, 9)
    models = [network_of("chain") for _ in range(3)]
    every, refreshed = 4, 6
    plain = {**EIGEN, "factor_update_steps": every, "inv_update_steps": refreshed}
    scheduled = {
        **EIGEN,
        "factor_update_steps": lambda step: 1 if step in early else every,
        "inv_update_steps": lambda step: 1 if step in early else refreshed,
    }
    with refreshing_early(*early):
        opts: list[Any] = [KFACSGD(models[0], lr=0.1, kl_clip=None, **plain)]
    for model, options in zip(models[1:], (scheduled, plain), strict=True):
        opts.append(KFACSGD(model, lr=0.1, kl_clip=None, **options))
    for i in range(14):
        for model, opt in zip(models, opts, strict=True):
            x = torch.randn(5, 7, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        assert_same(models[0], models[1])
        assert (i < early[0]) == torch.equal(models[0].head.weight, models[2].head.weight)


# ---- several ranks ----


@pytest.mark.parametrize("assignment", ["layer-wise", "opt"])
@pytest.mark.parametrize("name", ["images", "tokens"])
def test_ranks_take_the_steps_of_one_process(name, assignment):
    plan = Plan(
        even(2, 2), name, options={**FREE, **INTERVALS}, spread={"assignment": assignment}, steps=8
    )
    ranks = run(2, train_with_early_steps, plan)
    assert_alike([rank.parameters for rank in ranks])
    assert error(ranks[0].parameters, train_with_early_steps(plan, alone=True).parameters) < 1e-9


def train_with_early_steps(plan: Plan, alone: bool = False) -> Trained:
    with refreshing_early(*EARLY):
        return train_alone(plan) if alone else train(plan)
