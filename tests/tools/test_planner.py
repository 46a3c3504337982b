"""Plans against real ranks: bytes to the byte. And what a plan says of itself."""

from __future__ import annotations

import json
from collections import Counter
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam
from kaisa_optim.tools import plan
from tests.support.cluster import average, batch, network
from tests.support.ranks import run
from tests.support.training import early

INTERVALS = {"factor_update_steps": 2, "inv_update_steps": 3}


class Seen(NamedTuple):
    """What one rank keeps and received."""

    kfac: int
    base: int
    waiting: int
    received: float  # a step, over two intervals


def trained(kind: Any, name: str, options: dict[str, Any]) -> Seen:
    net = network(name, dtype=torch.float32)
    with early():  # the means of plans leave them out
        optimizer = kind(net, lr=0.01, **INTERVALS, **options)
    kfac = optimizer.preconditioner
    waiting, before = 0, Counter[str]()
    for step in range(19):
        x, y = batch(name, step, 4, torch.float32)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        waiting = max(waiting, kfac.memory_usage()["pending"])
        average(net.parameters())
        if step == 7:
            before = Counter(kfac.ranks.received)
        optimizer.step()
    received = (Counter(kfac.ranks.received) - before).total() / 12
    state = {
        id(x): x.nbytes
        for entry in optimizer.state.values()
        for key, x in entry.items()
        if isinstance(x, Tensor) and not key.startswith("kfac_")
    }
    return Seen(kfac.memory_usage()["total"], sum(state.values()), waiting, received)


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "Adam": (KFACAdam, "tokens", {}),
    "SGD, convolutions": (KFACSGD, "images", {"momentum": 0.9}),
    "LAMB, bfloat16": (KFACLAMB, "tokens", {"comm_dtype": torch.bfloat16}),
    "Adam, chain": (KFACAdam, "chain", {}),
    "Adam, eigen": (KFACAdam, "images", {"compute_method": "eigen"}),
}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.maintainer)])
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_real_ranks(world, name):
    kind, title, options = CASES[name]
    with torch.device("meta"):
        net = network(title, dtype=torch.float32)
    found = plan(net, world, "1GB", optimizer=kind, device="cpu", lr=0.01, **INTERVALS, **options)
    assert len(found.priced) == (2 if world == 2 else 3)
    for one in found.priced:
        ranks = run(world, trained, kind, title, options | dict(one.options))
        assert [rank.kfac for rank in ranks] == one.kfac
        assert [rank.base for rank in ranks] == [found.case.base + x for x in one.momenta]
        assert [rank.received for rank in ranks] == pytest.approx(one.received, rel=1e-9)
        # An A of ones, of a frozen weight, waits as one number.
        assert max(rank.waiting for rank in ranks) <= one.sums


def test_a_plan_says_what_it_found():
    with torch.device("meta"):
        net = network("tokens", dtype=torch.float32)
    tokens = torch.zeros(6, 3, dtype=torch.long)
    found = plan(net, 4, batch=tokens, optimizer=KFACAdam, lr=0.1)
    best = found.best
    assert best is not None and best in found.priced
    lines = repr(found).splitlines()
    assert "KFACAdam on 4 ranks of h100, 80 GB each" in lines[0]
    assert "bytes are exact, times estimated within 40 %" in lines[0]
    assert [line.split("  ")[0].strip() for line in lines[2:5]] == [
        *("layer-wise", "2/4 = 0.5", "opt"),
    ]
    assert sum(line.endswith("best") for line in lines) == 1
    assert lines[-1] == found.reason and found.reason.startswith(best.candidate.title)
    values = json.loads(found.to_json())
    assert values["options"] == dict(best.options)
    assert [one["needs"] for one in values["strategies"]] == [x.needs for x in found.priced]
    parts = found.breakdown
    assert sum(parts["memory"].values()) == best.needs
    assert sum(parts["seconds"].values()) == pytest.approx(best.step)
    assert parts["received"]["mean rank"] == fmean(best.received)
    assert all("batch" not in text for text in found.assumptions)
    KFACAdam(network("tokens"), **best.options)


def test_without_a_batch_passes_are_not_priced():
    found = plan(network("chain"), 2)
    needs, received = zip(*((x.needs, -max(x.received)) for x in found.priced), strict=True)
    assert [*needs] == sorted(needs) and [*received] == sorted(received)
    assert found.breakdown["seconds"]["passes"] == 0
    assert any("no batch was given" in text for text in found.assumptions)


def test_a_share_is_of_the_devices_memory():
    net = network("chain")
    assert plan(net, 2, 0.5).budget == 40 * 10**9
    assert plan(net, 2).budget == 80 * 10**9


@pytest.mark.parametrize(
    ("options", "titles"),
    [
        ({"grad_worker_fraction": 0.5}, ["0.5"]),
        ({"assignment": "opt"}, ["opt"]),
        ({"grad_worker_fraction": "auto"}, ["layer-wise", "2/4 = 0.5", "opt"]),
        ({"colocate_factors": False}, ["2/4 = 0.5", "opt"]),
    ],
)
def test_options_name_the_strategies(options, titles):
    found = plan(network("chain"), 4, **options)
    assert [one.candidate.title for one in found.priced] == titles
    for one in found.priced:
        settled = KFACAdam(network("chain"), **one.options).preconditioner.options
        assert settled.strategy == one.candidate.strategy
    with pytest.raises(ValueError, match=r"Invalid optimizer: .*it must be a K-FAC class"):
        plan(network("chain"), 4, optimizer=torch.optim.Adam, **options)
