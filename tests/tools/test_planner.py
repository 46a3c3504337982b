"""Plans against real ranks, optimizers and batches; and what a plan says of itself."""

from __future__ import annotations

import json
from collections import Counter
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from kaisa_optim.tools import plan
from kaisa_optim.tools.passes import passes_of
from kaisa_optim.tools.survey import survey
from tests.support.cluster import average, batch, network
from tests.support.ranks import run
from tests.support.training import early
from tests.support.watch import Body

# ---- plans ----

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


# ---- optimizers ----


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Embedding(50, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10)
    found = nn.Sequential(*layers)
    found[1].bias.requires_grad_(False)
    found.register_buffer("scale", torch.ones(3))
    return found


def state_bytes(optimizer: Any) -> int:
    """The bytes of the base's state."""
    return sum(
        x.nbytes
        for entry in optimizer.state.values()
        for name, x in entry.items()
        if isinstance(x, Tensor) and not name.startswith("kfac_")
    )


OPTIM = torch.optim
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (KFACSGD, {}),
    "SGD with momentum": (KFACSGD, {"momentum": 0.9}),
    "Adam": (KFACAdam, {}),
    "Adam, AMSGrad": (KFACAdam, {"amsgrad": True}),
    "Adam, eigen": (KFACAdam, {"compute_method": "eigen"}),
    "Adam, a tensor as lr": (KFACAdam, {"lr": torch.tensor(0.01), "foreach": False}),
    "LAMB": (KFACLAMB, {}),
    "AdamW": (with_kfac(OPTIM.AdamW), {}),
    "RMSprop": (with_kfac(OPTIM.RMSprop), {}),
    "NAdam": (with_kfac(OPTIM.NAdam), {}),
    "Adafactor": (with_kfac(OPTIM.Adafactor), {}),
    "Rprop": (with_kfac(OPTIM.Rprop), {}),
    "Adagrad": (with_kfac(OPTIM.Adagrad), {}),  # makes the entries of frozen parameters, too
}


@pytest.mark.parametrize("name", BASES)
def test_bytes_of_state_are_those_of_the_optimizer(name):
    kind, options = BASES[name]
    net = model()
    optimizer = kind(net, **{"lr": 0.01, **options})
    case = survey(optimizer)[0]
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randint(50, (8, 5))).square().mean().backward()
        optimizer.step()
    assert case.base + sum(x.size for x in case.momenta) == state_bytes(optimizer)
    held = {*net.parameters(), *net.buffers()}
    assert case.weights == sum(x.nbytes for x in held)
    assert case.gradients == sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
    assert [x.name for x in case.layers] == list(optimizer.preconditioner.layers)
    assert case.sizes == optimizer.preconditioner.groups.sizes


class Strange(OPTIM.SGD):
    """A base whose step fails before it has any state."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no step without a device")


def test_a_base_that_can_not_step_on_meta_is_named():
    with pytest.raises(ValueError, match="the entries of Strange are not known before a step: no"):
        survey(with_kfac(Strange)(model(), lr=0.1))


# ---- batches ----


def test_rows_and_operations_of_convolutions_and_linear_layers():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 5))
    layers = KFACSGD(net, lr=0.1).preconditioner.layers.values()
    batch = torch.zeros(8, 2, 5, 5)
    found = passes_of(net, batch, layers, 1.0)
    assert found.rows == {"0": 8 * 9, "2": 8}
    forward = 2 * 8 * 9 * 4 * 18 + 2 * 8 * 36 * 5
    assert found.operations == 3 * forward
    # Inputs, weights, biases and outputs; flattening is a view.
    numbers = [8 * 50 + 72 + 4 + 8 * 36, 8 * 36 + 180 + 5 + 40]
    assert found.touched == 3 * 4 * sum(numbers)
    assert passes_of(net, (batch,), layers, 0.25).rows == {"0": 18, "2": 2}
    assert passes_of(net, {"input": batch}, layers, 1.0) == found


def test_attention_sees_a_row_for_each_token():
    net = network("tokens")
    layers = KFACSGD(net, lr=0.1).preconditioner.layers.values()
    rows = passes_of(net, torch.zeros(6, 3, dtype=torch.long), layers, 1.0).rows
    assert rows.pop("head") == 6
    assert set(rows.values()) == {18}


@pytest.mark.parametrize("whole", [False, True])
def test_scores_of_attention_are_not_written(whole):
    inner = nn.MultiheadAttention(8, 2, batch_first=True)
    net = Body(lambda m, x: nn.functional.scaled_dot_product_attention(x, x, value=x))
    if whole:
        net = Body(lambda m, x: m.inner(x, x, x, need_weights=False)[0], inner=inner)
    few, many = (passes_of(net, torch.zeros(2, 3 * n, 8), [], 1.0).touched for n in (100, 1000))
    assert many < 10.1 * few  # scores would take a hundred times the bytes
    if not whole:
        assert few == 3 * 4 * 4 * 2 * 300 * 8
    plain = nn.functional.scaled_dot_product_attention
    assert plain.__name__ == "scaled_dot_product_attention"


class Table:
    values = None


class Rotated(nn.Module):
    """A module that makes tables in its first pass, of a module, in a dict and in an object."""

    def __init__(self):
        super().__init__()
        self.inner, self.dict, self.table = nn.Linear(4, 4), {}, Table()
        self.scale, self.cos = nn.Parameter(torch.ones(4)), None

    def forward(self, x):
        if self.cos is None:
            self.cos = self.scale.cos()  # a part of the graph, in a real pass
            self.register_buffer("sin", torch.arange(4.0).sin(), persistent=False)
            self.dict[len(x)] = self.table.values = torch.arange(4.0)
        return self.inner(x) * self.cos + self.sin + self.dict[len(x)] * self.table.values


@pytest.mark.parametrize("first", [False, True])
def test_caches_of_the_model_stay_real(first):
    net, x = Rotated(), torch.ones(3, 4)
    if first:
        net(x)
    before = set(vars(net)), set(net.state_dict()), set(net._buffers)
    layers = KFACSGD(net, lr=0.1).preconditioner.layers.values()
    assert passes_of(net, x, layers, 1.0).rows["inner"] == 3
    assert before == (set(vars(net)), set(net.state_dict()), set(net._buffers))
    assert not net(x).is_meta and not net.cos.is_meta and len(net.inner._forward_hooks) <= 1


def test_a_batch_that_does_not_fit_is_refused():
    net = nn.Sequential(nn.Linear(4, 3))
    layers = KFACSGD(net, lr=0.1).preconditioner.layers.values()
    with pytest.raises(ValueError, match="Invalid batch: the model can't be run with it"):
        passes_of(net, torch.zeros(2, 5), layers, 1.0)
    with pytest.raises(ValueError, match=r"Invalid batch: 32; it must be a model's input"):
        passes_of(net, 32, layers, 1.0)
