"""``grad_worker_fraction="auto"``: one choice on all ranks, and what it says of itself."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kaisa_optim import KFACAdam
from kaisa_optim.tools import automatic
from kaisa_optim.tools.choice import Choice
from tests.support.cluster import average, batch, network
from tests.support.ranks import RankError, run


def build(net: nn.Module, budget: Any, **options: Any) -> Any:
    return KFACAdam(net, grad_worker_fraction="auto", memory_budget=budget, **options)


def choice(budget: int, world: int) -> Choice:
    """The plan of the tests' network on so many ranks, as the constructor makes it."""
    net = network("tokens", dtype=torch.float32)
    return automatic.choice_of(KFACAdam(net), world, budget)


def trained(budget: int, steps: int) -> tuple[str, int, str, list[float]]:
    net = network("tokens", dtype=torch.float32)
    optimizer = build(net, budget, lr=0.01)
    for step in range(steps):
        x, y = batch("tokens", step, 4)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        average(net.parameters())
        optimizer.step()
    kfac = optimizer.preconditioner
    weights = [float(p.sum()) for p in net.parameters()]
    return repr(kfac.options.assignment), kfac.ranks.grid.workers, repr(kfac), weights


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_take_the_fastest_that_fits(world):
    plan = choice(10**9, world)
    for one in plan.priced:
        # Exactly as much as one needs: it fits, and so does what needs less.
        expected = choice(one.needs, world).best
        assert expected is not None
        found = run(world, trained, one.needs, 2)
        for strategy, workers, text, weights in found:
            assert strategy == repr(expected.candidate.strategy)
            assert workers == expected.grid.workers
            assert "has the shortest step of those that fit into" in text
            assert weights == found[0][3]


def refused(budget: int) -> None:
    build(network("tokens", dtype=torch.float32), budget)


def test_nothing_fits_and_all_ranks_hear_what_the_smallest_needs():
    least = choice(1, 2).nearest
    with pytest.raises(RankError) as caught:
        run(2, refused, least.needs - 1)
    assert set(caught.value.errors) == {0, 1}
    for error in caught.value.errors.values():
        assert re.search("no strategy fits into .*needs .* on its fullest rank, 1 byte more", error)


def differing() -> None:
    net = network("chain", dtype=torch.float32)
    if torch.distributed.get_rank():
        KFACAdam(net, grad_worker_fraction=0.5)
    else:
        build(net, "1GB")


def test_a_rank_with_another_fraction_is_named():
    with pytest.raises(RankError) as caught:
        run(2, differing)
    for error in caught.value.errors.values():
        assert "0.5 on rank 1, 'auto' on rank 0" in error


def test_the_choice_is_logged_once_and_stays_in_copies(caplog):
    net = network("chain", dtype=torch.float32)
    with caplog.at_level(logging.INFO, "kaisa_optim"):
        optimizer = build(net, "1GB")
    said = [one.message for one in caplog.records if "only strategy" in one.message]
    assert len(said) == 1 and said[0] in repr(optimizer.preconditioner)
    caplog.clear()
    other = copy.deepcopy(optimizer)
    assert not [one for one in caplog.records if "strategy" in one.message]
    assert other.preconditioner.options == optimizer.preconditioner.options


@pytest.mark.parametrize("budget", [None, 0.5])
def test_a_cpu_wants_bytes(budget):
    with pytest.raises(
        ValueError,
        match=r"Invalid memory_budget: .*on cpu, and K-FAC knows the free memory of CUDA",
    ):
        build(network("chain"), budget)


def test_the_rest_of_the_memory_counts_beside_the_weights(monkeypatch):
    """A stand-in for a GPU's free bytes: a share of these, and what weights take already."""
    net = network("chain", dtype=torch.float32)
    optimizer = KFACAdam(net)
    device = torch.device("cuda:0")
    monkeypatch.setattr(type(optimizer), "device", device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (10_000, 99_999))
    options = optimizer.preconditioner.options
    for budget, share in ((None, 5_000), (0.25, 2_500)):
        optimizer._kfac_options = options.having({"memory_budget": budget})
        assert automatic.budget_of(optimizer) == share  # no weight is on this device
    optimizer._kfac_options = options.having({"memory_budget": 7})
    assert automatic.budget_of(optimizer) == 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_budget": "1GB"}, "memory_budget: .*no use for it; give grad_worker_fraction"),
        ({"memory_budget": 5, "grad_worker_fraction": 0.5}, "memory_budget: .*=0.5, which has no"),
        (
            {"grad_worker_fraction": "auto", "assignment": "opt"},
            "assignment: .*a plan chooses the strategy",
        ),
        ({"grad_worker_fraction": "most"}, "grad_worker_fraction: 'most'; it must be between"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, said):
    with pytest.raises(ValueError, match=f"Invalid {said}"):
        KFACAdam(network("chain"), **options)
