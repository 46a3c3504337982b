"""Parameters covered by their use: on several ranks, in checkpoints, frozen and unfrozen."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from tests.core.test_coverage import Tied
from tests.core.test_distribution import assert_as_alone
from tests.support.cluster import CLASSES, INPUTS, NETWORKS, Plan, Trained, even, train, train_alone
from tests.support.ranks import run
from tests.support.training import ANEW, assert_same, descend
from tests.support.watch import normal


class Uses(nn.Module):
    """A transposed product, experts, a scale, a matrix used either way, and an unknown use."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(INPUTS, 4) / 2)
        self.experts = nn.Parameter(torch.randn(3, 4, 4) / 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.odd = nn.Parameter(torch.eye(2))
        self.matrix = nn.Parameter(torch.randn(4, 3) / 2)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        x = torch.addmm(inputs.new_zeros(4), inputs, self.turned).tanh() * self.scale
        x = (x.unflatten(1, (2, 2)) @ self.odd.exp()).flatten(1)
        # A rank may meet one of the experts alone, and the last of them comes late.
        chosen = torch.where(inputs[:, 1] > 2, 2, (x[:, 0] > 0).long())
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            (at,) = torch.where(chosen == expert)
            out = out.index_add(0, at, x[at] @ self.experts[expert])
        return self.head((x + out) @ self.matrix)


class Words(Tied):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.abs().mul(3).long().clamp(max=6)).mean(1)


NETWORKS.update(uses=Uses, words=partial(Words, bias=True))


def train_here(plan: Plan) -> Trained:
    """Train in a process that has these networks."""
    return train(plan)


PARTED = {"assignment": "opt", "colocate_factors": False}
EIGEN = {"compute_method": "eigen"}


@pytest.mark.parametrize(
    ("name", "optimizer", "options", "spread"),
    [
        *(("uses", x, {}, {"assignment": "layer-wise"}) for x in ("sgd", "adam")),
        *(("uses", x, {}, {"assignment": "opt"}) for x in ("sgd", "adam")),
        ("words", "sgd", EIGEN, {}),
        ("words", "sgd", {}, PARTED),
    ],
)
def test_ranks_take_the_steps_of_one_process(name, optimizer, options, spread):
    """They meet other experts, and other words of a tied table."""
    wrapper = {"find_unused_parameters": name == "uses"}
    how: dict[str, Any] = {"options": ANEW | options, "spread": spread, "wrapper": wrapper}
    plan = Plan(even(2, 12), name, optimizer, steps=4, **how)
    assert_as_alone(run(2, train_here, plan), train_alone(plan), 1e-8)


@pytest.mark.parametrize("name", ["uses", "words"])
@pytest.mark.parametrize(
    ("options", "spread"), [({}, {}), ({}, PARTED), (EIGEN | {"max_factor_size": 4}, {})]
)
def test_ranks_with_unequal_batches_have_the_factors_of_the_joined_batch(name, options, spread):
    how: dict[str, Any] = {"base": {"lr": 0.0}, "wrapper": None, "weighs": False, "steps": 1}
    plan = Plan(((9,), (3,)), name, options=ANEW | options, spread=spread, **how)
    alone = train_alone(plan)
    assert len(alone.factors) == (10 if name == "uses" else 4)
    assert_as_alone(run(2, train_here, plan), alone, 1e-9)


class Around(nn.Module):
    """Uses a layer's weight beside its calls, or without any, as a fused block does."""

    def __init__(self, calls: bool = False) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).tanh() if self.calls else x
        return self.head(F.linear(x, self.inner.weight, self.inner.bias).tanh())


@pytest.mark.parametrize(
    ("way", "cls", "make", "interval"),
    [
        ("file", KFACSGD, Uses, 2),
        ("file", KFACAdam, Uses, 2),
        *((way, KFACSGD, Around, 1) for way in ("file", "copy", "frozen before")),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(way, cls, make, interval, tmp_path):
    """Uses that were found around a module are found again."""

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = nn.Sequential(make()).double()
        how = {"factor_update_steps": interval, "inv_update_steps": interval}
        return net, cls(net, lr=0.01, **how)

    def learn(model: nn.Module, opt: Any, i: int) -> None:
        x = normal(12, INPUTS if make is Uses else 4, seed=i)
        descend(opt, (model(x) - 1).square().mean())

    model, opt = build()
    for i in range(3):
        if way == "frozen before":
            model[0].inner.requires_grad_(i != 1)
        learn(model, opt, i)
    if way == "copy":
        other, again = copy.deepcopy((model, opt))
    else:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "run")
        loaded = torch.load(tmp_path / "run", weights_only=True)
        other, again = build()
        other.load_state_dict(loaded["model"])
        again.load_state_dict(loaded["opt"])
    usage = [x.preconditioner.memory_usage()["total"] for x in (opt, again)]
    assert usage[0] == usage[1]
    for i in range(3, 7):
        learn(model, opt, i)
        learn(other, again, i)
        assert make is Uses or not again.preconditioner.registry.states["0.inner"].missed
    assert_same(model, other)
    report = opt.preconditioner.coverage()
    assert list(report.left) == (["0.scale", "0.odd"] if make is Uses else [])
