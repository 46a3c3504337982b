"""Plans against real ranks, optimizers and batches; and ``"auto"``, one choice on all ranks."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from kaisa_optim.tools import Plan, plan
from tests.support.cluster import average, batch, network, rank
from tests.support.ranks import RankError, run
from tests.support.training import early
from tests.support.watch import Body

INTERVALS = {"factor_update_steps": 2, "inv_update_steps": 3}


def state_bytes(optimizer: Any) -> int:
    return sum(
        x.nbytes
        for entry in optimizer.state.values()
        for name, x in entry.items()
        if isinstance(x, Tensor) and not name.startswith("kfac_")
    )


def backward_passes(net: nn.Module, optimizer: Any, name: str, count: int) -> Iterator[int]:
    """Train on all ranks, and yield between a backward pass and its step."""
    for step in range(count):
        x, y = batch(name, step, 4, torch.float32)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        yield step
        average(net.parameters())
        optimizer.step()


def trained(kind: Any, name: str, options: dict[str, Any]) -> tuple[int, int, int, float]:
    """Return bytes of a rank: K-FAC's, the base's, those that wait, those received in a step."""
    net = network(name, dtype=torch.float32)
    with early():  # the means of plans leave them out
        optimizer = kind(net, lr=0.01, **INTERVALS, **options)
    kfac = optimizer.preconditioner
    waiting, before = 0, Counter[str]()
    for step in backward_passes(net, optimizer, name, 19):
        waiting = max(waiting, kfac.memory_usage()["pending"])
        if step == 7:
            before = Counter(kfac.ranks.received)
    received = (Counter(kfac.ranks.received) - before).total() / 12  # two intervals
    return kfac.memory_usage()["total"], state_bytes(optimizer), waiting, received


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
        kfac, base, waiting, received = (list(sizes) for sizes in zip(*ranks, strict=True))
        assert kfac == one.kfac and base == [found.case.base + x for x in one.momenta]
        assert received == pytest.approx(one.received, rel=1e-9)
        # An A of ones, of a frozen weight, waits as one number.
        assert max(waiting) <= one.sums


def test_a_plan_says_what_it_found():
    with torch.device("meta"):
        net = network("tokens", dtype=torch.float32)
    found = plan(net, 4, batch=torch.zeros(6, 3, dtype=torch.long), optimizer=KFACAdam, lr=0.1)
    best = found.best
    assert best is not None and best in found.priced
    lines = repr(found).splitlines()
    assert "KFACAdam on 4 ranks of h100, 80 GB each" in lines[0]
    assert "bytes are exact, times estimated within 40 %" in lines[0]
    titles = [line.split("  ")[0].strip() for line in lines[2:5]]
    assert titles == ["layer-wise", "2/4 = 0.5", "opt"]
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


def test_without_a_batch_passes_are_not_priced():
    found = plan(network("chain"), 2)
    needs, received = zip(*((x.needs, -max(x.received)) for x in found.priced), strict=True)
    assert [*needs] == sorted(needs) and [*received] == sorted(received)
    assert found.breakdown["seconds"]["passes"] == 0
    assert any("no batch was given" in text for text in found.assumptions)
    assert found.budget == 80 * 10**9
    assert plan(network("chain"), 2, 0.5).budget == 40 * 10**9  # a share of the device's memory


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


class Strange(torch.optim.SGD):
    """A base whose step fails before it has any state."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no step without a device")


on_two_ranks = partial(plan, world_size=2)
STRANGE, AUTO = {"optimizer": with_kfac(Strange)}, {"grad_worker_fraction": "auto"}
HALF = {"grad_worker_fraction": 0.5}


@pytest.mark.parametrize(
    ("build", "options", "said"),
    [
        (on_two_ranks, {"optimizer": torch.optim.Adam}, "optimizer: .*must be a K-FAC class"),
        (on_two_ranks, STRANGE, "base: the entries of Strange are not known before a step: no"),
        (on_two_ranks, {"batch": torch.zeros(2, 5)}, "batch: the model can't be run with it"),
        (on_two_ranks, {"batch": 32}, "batch: 32; it must be a model's input"),
        (KFACAdam, AUTO, "memory_budget: None .*on cpu, and K-FAC knows the free memory of CUDA"),
        (KFACAdam, AUTO | {"memory_budget": 0.5}, "memory_budget: 0.5 .*on cpu, and K-FAC knows"),
        (KFACAdam, {"memory_budget": "1GB"}, "memory_budget: .*no use for it; give grad_worker_f"),
        (KFACAdam, HALF | {"memory_budget": 5}, "memory_budget: .*=0.5, which has no"),
        (KFACAdam, AUTO | {"assignment": "opt"}, "assignment: .*a plan chooses the strategy"),
        (KFACAdam, {"grad_worker_fraction": "most"}, "grad_worker_f.*'most'; it must be between"),
    ],
)
def test_plans_and_choices_that_can_not_be_are_refused(build, options, said):
    with pytest.raises(ValueError, match=f"Invalid {said}"):
        build(network("chain"), **options)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Embedding(50, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10)
    found = nn.Sequential(*layers)
    found[1].bias.requires_grad_(False)
    found.register_buffer("scale", torch.ones(3))
    return found


BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (KFACSGD, {}),
    "SGD with momentum": (KFACSGD, {"momentum": 0.9}),
    "Adam": (KFACAdam, {}),
    "Adam, AMSGrad": (KFACAdam, {"amsgrad": True}),
    "Adam, eigen": (KFACAdam, {"compute_method": "eigen"}),
    "Adam, a tensor as lr": (KFACAdam, {"lr": torch.tensor(0.01), "foreach": False}),
    "LAMB": (KFACLAMB, {}),
    # Adagrad makes the entries of frozen parameters, too.
    **{
        name: (with_kfac(getattr(torch.optim, name)), {})
        for name in ("AdamW", "RMSprop", "NAdam", "Adafactor", "Rprop", "Adagrad")
    },
}


@pytest.mark.parametrize("name", BASES)
def test_bytes_of_state_are_those_of_the_optimizer(name):
    kind, options = BASES[name]
    net, options = model(), {"lr": 0.01, **options}
    case = plan(net, 1, optimizer=kind, **options).case
    optimizer = kind(net, **options)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randint(50, (8, 5))).square().mean().backward()
        optimizer.step()
    assert case.base + sum(x.size for x in case.momenta) == state_bytes(optimizer)
    assert case.weights == sum(x.nbytes for x in {*net.parameters(), *net.buffers()})
    assert case.gradients == sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
    assert [x.name for x in case.layers] == list(optimizer.preconditioner.layers)
    assert case.sizes == optimizer.preconditioner.groups.sizes


def passes_of(net: nn.Module, x: Any, **options: Any) -> Any:
    return plan(net, 1, batch=x, optimizer=KFACSGD, lr=0.1, **options).case.passes


def test_rows_and_operations_of_layers():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 5))
    x = torch.zeros(8, 2, 5, 5)
    found = passes_of(net, x)
    assert found.rows == {"0": 8 * 9, "2": 8}
    forward = 2 * 8 * 9 * 4 * 18 + 2 * 8 * 36 * 5
    assert found.operations == 3 * forward
    # Inputs, weights, biases and outputs; flattening is a view.
    numbers = [8 * 50 + 72 + 4 + 8 * 36, 8 * 36 + 180 + 5 + 40]
    assert found.touched == 3 * 4 * sum(numbers)
    assert passes_of(net, (x,), statistics_fraction=0.25).rows == {"0": 18, "2": 2}
    assert passes_of(net, {"input": x}) == found
    # Attention has a row for each token.
    rows = passes_of(network("tokens"), torch.zeros(6, 3, dtype=torch.long)).rows
    assert rows.pop("head") == 6
    assert set(rows.values()) == {18}


@pytest.mark.parametrize("whole", [False, True])
def test_scores_of_attention_are_not_written(whole):
    out = nn.Linear(8, 8, bias=False)
    net = Body(lambda m, x: m.out(F.scaled_dot_product_attention(x, x, value=x)), out=out)
    if whole:
        inner = nn.MultiheadAttention(8, 2, batch_first=True)
        net = Body(lambda m, x: m.inner(x, x, x, need_weights=False)[0], inner=inner)
    few, many = (passes_of(net, torch.zeros(2, 3 * n, 8)).touched for n in (100, 1000))
    assert many < 10.1 * few  # scores would take a hundred times the bytes
    if not whole:
        assert few == 3 * 4 * (4 * 2 * 300 * 8 + 2 * 2 * 300 * 8 + 64)
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


class Rotated(nn.Module):
    """A module that makes tables in its first pass, of a module, in a dict and in an object."""

    def __init__(self):
        super().__init__()
        self.inner, self.dict, self.table = nn.Linear(4, 4), {}, SimpleNamespace()
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
    assert passes_of(net, x).rows["inner"] == 3
    assert before == (set(vars(net)), set(net.state_dict()), set(net._buffers))
    assert not net(x).is_meta and not net.cos.is_meta and not net.inner._forward_hooks


def build(net: nn.Module, budget: Any, **options: Any) -> Any:
    return KFACAdam(net, grad_worker_fraction="auto", memory_budget=budget, **options)


def choice(budget: int, world: int) -> Plan:
    """Return the plan of the tests' network on so many ranks, as the constructor makes it."""
    return plan(network("tokens", dtype=torch.float32), world, budget, device="cpu")


def trained_by_choice(budget: int) -> tuple[str, int, str, list[float]]:
    net = network("tokens", dtype=torch.float32)
    optimizer = build(net, budget, lr=0.01)
    for _ in backward_passes(net, optimizer, "tokens", 2):
        pass
    kfac = optimizer.preconditioner
    weights = [float(p.sum()) for p in net.parameters()]
    return repr(kfac.options.assignment), kfac.ranks.grid.workers, repr(kfac), weights


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_take_the_fastest_that_fits(world):
    for one in choice(10**9, world).priced:
        # Exactly as much as one needs: it fits, and so does what needs less.
        expected = choice(one.needs, world).best
        assert expected is not None
        found = run(world, trained_by_choice, one.needs)
        for strategy, workers, text, weights in found:
            assert strategy == repr(expected.candidate.strategy)
            assert workers == expected.grid.workers
            assert "has the shortest step of those that fit into" in text
            assert weights == found[0][3]


def build_on_ranks(*options: dict[str, Any]) -> None:
    KFACAdam(network("tokens", dtype=torch.float32), **options[rank()])


def errors_of(*options: dict[str, Any]) -> dict[int, str]:
    with pytest.raises(RankError) as caught:
        run(2, build_on_ranks, *options)
    return caught.value.errors


def test_nothing_fits_and_all_ranks_hear_what_the_smallest_needs():
    short = AUTO | {"memory_budget": choice(1, 2).nearest.needs - 1}
    errors = errors_of(short, short)
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert re.search("no strategy fits into .*needs .* on its fullest rank, 1 byte more", error)


def test_a_rank_with_another_fraction_is_named():
    for error in errors_of(AUTO | {"memory_budget": "1GB"}, HALF).values():
        assert "0.5 on rank 1, 'auto' on rank 0" in error


def test_the_choice_is_logged_once_and_stays_in_copies(caplog):
    with caplog.at_level(logging.INFO, "kaisa_optim"):
        optimizer = build(network("chain", dtype=torch.float32), "1GB")
    said = [one.message for one in caplog.records if "only strategy" in one.message]
    assert len(said) == 1 and said[0] in repr(optimizer.preconditioner)
    caplog.clear()
    other = copy.deepcopy(optimizer)
    assert not [one for one in caplog.records if "strategy" in one.message]
    assert other.preconditioner.options == optimizer.preconditioner.options


@pytest.mark.parametrize(("budget", "bytes_"), [(None, 5_000), (0.25, 2_500)])
def test_a_share_of_free_memory_counts_beside_the_weights(monkeypatch, budget, bytes_):
    """A stand-in for a GPU, which holds no weight yet."""
    monkeypatch.setattr(KFACAdam, "device", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (10_000, 99_999))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "NVIDIA H100")
    with pytest.raises(ValueError, match=f"no strategy fits into {bytes_ / 1000:g} kB"):
        build(network("chain", dtype=torch.float32), budget)
