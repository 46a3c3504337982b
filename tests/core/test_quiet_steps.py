"""Steps that gather nothing ask nobody; layers that come late are met in those that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kaisa_optim import KFACSGD, KFACAdam
from tests.support.cluster import assert_alike, average, batch, error, network, share
from tests.support.ranks import run
from tests.support.training import values

ROWS = 24
BOTH = pytest.mark.parametrize("cls", [KFACAdam, KFACSGD])


def passes(cls: Any, first: int, parts: int, alone: str, steps: int) -> tuple[Any, list[int]]:
    """Train with a branch that is used from step ``first`` on, or in the step's last digit alone.

    One of ``parts`` of the examples goes through the branch. Return weights, and the steps in which
    the branch gathered.
    """
    model = network("branched")
    opt = cls(model, lr=0.01)
    gathered = []
    for step in range(steps):
        used = step % 10 == first if alone else step >= first
        x, y = batch("branched", step, ROWS)
        through = torch.arange(ROWS) >= (ROWS - ROWS // parts if used else ROWS)
        x, y, through = share(x, y, through)
        opt.zero_grad()
        F.cross_entropy(model(x, through), y).backward()
        average(p for n, p in model.named_parameters() if used or "branch" not in n)
        opt.step()
        if "branch" in opt.preconditioner.work.average:
            gathered.append(step)
            assert "branch" in opt.preconditioner.work.refresh or len(gathered) > 1
        has_state = opt.preconditioner.registry.states["branch"].has_state
        assert has_state == bool(gathered)
    return values(model), gathered


@BOTH
@pytest.mark.parametrize("parts", [1, 4])
def test_a_head_that_comes_late_and_an_expert_of_one_rank(cls, parts):
    """Either is first used in step 47; the same weights on any number of ranks."""
    alone, gathered = passes(cls, 47, parts, "", 70)
    assert gathered == [50, 55, 60, 65]  # its slot is in the middle of an interval
    for ranks in (2, 4):
        results = run(ranks, passes, cls, 47, parts, "", 70)
        assert_alike([weights for weights, _ in results])
        assert all(steps == gathered for _, steps in results)
        assert error(results[0][0], alone) < 1e-8


def test_a_layer_in_use_in_one_step_of_ten_is_met_at_last():
    """The extra step of late layers moves on from interval to interval."""
    _, gathered = passes(KFACAdam, 7, 1, "alone", 80)
    assert gathered == [67]


def lacks(cls: Any, step: int, names: tuple[str, ...]) -> tuple[str, int]:
    """Lose a gradient on the last rank in one step; return the error, and the step of it."""
    model = network("chain")
    opt = cls(model, lr=0.01)
    for i in range(64):
        x, y = batch("chain", i, ROWS)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name in names if i == step and dist.get_rank() == dist.get_world_size() - 1 else ():
            model.get_submodule(name).weight.grad = None
        try:
            opt.step()
        except RuntimeError as problem:
            return str(problem), i
    return "", 64


@BOTH
@pytest.mark.parametrize(("step", "named"), [(3, 5), (57, 60), (59, 60)])
def test_a_gradient_that_one_rank_lacks_in_a_quiet_step_is_named(cls, step, named):
    for text, at in run(2, lacks, cls, step, ("middle.1", "head")):
        assert "layer 'middle.1' has no gradient on ranks [1], but has one on other" in text
        assert f"may have drifted apart since step {step}" in text and at == named


@BOTH
def test_a_gradient_that_one_rank_lacks_in_a_gathering_step_stops_it(cls):
    for text, at in run(2, lacks, cls, 55, ("middle.1",)):
        assert "layer 'middle.1' has no gradient on ranks [1]" in text and at == 55
        assert "weights would drift apart" in text


def lives(cls: Any, name: str) -> list[tuple[bool, bool, bool]]:
    """Return of 20 steps whether ranks exchange numbers, take sums, and change factors."""
    model = network(name)
    opt = cls(model, lr=0.001)
    kfac, lived = opt.preconditioner, []
    for step in range(71):
        x, y = batch(name, step, ROWS)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before, sums = kfac.ranks.received["status"], kfac.memory_usage()["pending"] > 0
        opt.step()
        exchanges = kfac.ranks.received["status"] > before
        assert exchanges == (kfac.work.exchanges and dist.is_initialized())
        lived.append((kfac.work.exchanges, sums, bool(kfac.work.average or kfac.work.refresh)))
    return lived[51:]


@BOTH
@pytest.mark.parametrize("name", ["images", "tokens", "chain"])
def test_most_steps_exchange_nothing_and_take_no_sums(cls, name):
    """By default, after the first early ones, on one process and on several ranks."""
    alone = lives(cls, name)
    assert run(2, lives, cls, name) == [alone] * 2
    assert all(step in ((False, False, False), (True, True, step[2])) for step in alone)
    quiet = [not any(step) for step in alone]
    assert sum(quiet[:10]) >= 7 and sum(quiet[10:]) >= 7
