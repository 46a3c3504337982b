"""A step, on one rank and on several: none hangs, and ranks take the step of one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from kaisa_optim import KFACSGD, KFACAdam, KFACParamScheduler
from kaisa_optim.linalg import products
from tests.core.test_coverage import loss_of
from tests.support import groups, training
from tests.support.branches import Branches
from tests.support.cluster import average, rank, share, taken_by, weights, world
from tests.support.ranks import run
from tests.support.training import (
    METHODS,
    as_on_a_gpu,
    assert_near,
    assert_same,
    descend,
    early,
    factors,
    recorded_warnings,
    warnings_as,
)
from tests.support.watch import (
    Body,
    Watch,
    assert_factors,
    exact,
    factors_of,
    normal,
    rows_of,
    seeded,
)

STEPS = 5
ROWS = 24  # of a batch, over all ranks


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).to(dtype)


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DDP(model, **options) if world() > 1 else model


def optimizer(model: nn.Module, **options: Any) -> KFACSGD:
    """Of "polar", unless options name a method of the papers, whose steps a clip then limits."""
    options = {**METHODS["polar"], "kl_clip": 1e-2, **options}
    return KFACSGD(model, lr=0.1, **taken_by(options))


def whole(i: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x, y = (torch.randn(ROWS, k, generator=generator, dtype=torch.float64) for k in (4, 3))
    return x.to(dtype), y.to(dtype)


def learn(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    i: int,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    x, y = share(*whole(i, next(model.parameters()).dtype))
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    before_step()
    opt.step()


def trains(options: dict[str, Any]) -> list[Tensor]:
    """Take some steps; of options, ``make`` builds the model, and ``step`` takes a step."""
    options = dict(options)
    model, step = ddp(options.pop("make", net)()), options.pop("step", learn)
    opt = optimizer(model, **options)
    for i in range(STEPS):
        step(model, opt, i)
    return weights(model)


Situation = Callable[[dict[str, Any]], list[Tensor]]


STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "layer-wise": (2, {"assignment": "layer-wise"}),
    "hybrid": (4, {"grad_worker_fraction": 0.5}),
    "opt": (2, {"assignment": "opt"}),
}


def compare(
    situation: Situation, strategy: str, near: tuple[float, float] = (1e-9, 1e-11), **options: Any
) -> None:
    """Ranks have the same bits, and what one process has up to rounding, in both kinds of steps."""
    if "compute_method" not in options:
        for method in ("polar", "eigen"):
            own = (10 * near[0], 10 * near[1]) if method == "polar" else near
            compare(situation, strategy, own, compute_method=method, **options)
        return
    ranks, spread = STRATEGIES[strategy]
    alone = situation(options)
    results = run(ranks, situation, {**options, **spread})
    for result in results:
        assert_same(result, results[0])
    assert_near(results[0], alone, *near)


every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


# ---- passes through the model ----


def crossed() -> nn.Module:
    """Return a model of which every other rank runs the branches the other way round."""

    def use(m: nn.Module, x: Tensor) -> Tensor:
        branches = [m.left, m.right]
        if rank() % 2:
            branches.reverse()
        first, second = (torch.tanh(branch(x)) for branch in branches)
        return m.last(first * second)

    parts = {"left": (4, 6), "right": (4, 6), "last": (6, 3)}
    return seeded(lambda: Body(use, **{name: nn.Linear(*sizes) for name, sizes in parts.items()}))


def checkpointed(reentrant: bool) -> nn.Module:
    def use(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.tanh(m.model[0](x))
        return m.model[4](checkpoint(m.model[2:4], x, use_reentrant=reentrant))

    return Body(use, model=net())


def evaluates(wrapped: nn.Module, opt: Any, i: int) -> None:
    """One rank evaluates, as most do, between steps and between a backward pass and its step."""
    model: Any = getattr(wrapped, "module", wrapped)

    def evaluate() -> None:
        if rank() == 0:
            model.eval()
            with torch.no_grad():
                model(whole(77)[0])
            model(whole(78)[0])  # with gradients, by a forgetful user
            model.train()

    learn(wrapped, opt, i, before_step=evaluate)
    evaluate()


def pauses(model: nn.Module, opt: Any, i: int) -> None:
    """Some steps have no statistics."""
    with opt.preconditioner.paused() if i in (0, 3) else nullcontext():
        learn(model, opt, i)


def asks_for_its_state(model: nn.Module, opt: Any, i: int) -> None:
    """Only one rank saves or copies: nothing may be exchanged for it."""

    def ask() -> None:
        if rank() == 0:
            opt.state_dict()
            copy.deepcopy(opt)

    learn(model, opt, i, before_step=ask)
    ask()


def without_rows(options: dict[str, Any]) -> list[Tensor]:
    """The last rank has no rows; the loss is a share of the mean over all."""
    model = ddp(net())
    opt = optimizer(model, loss_terms=ROWS / world(), **options)
    for i in range(STEPS):
        x, y = whole(i)
        if world() > 1:
            count = world() - 1
            parts = [*zip(x.chunk(count), y.chunk(count), strict=True), (x[:0], y[:0])]
            x, y = parts[rank()]
        descend(opt, (model(x) - y).square().sum() * world() / (ROWS * 3))
    return weights(model)


def one_has_nothing(options: dict[str, Any]) -> list[Tensor]:
    """The last rank runs no batch in some steps, and none with statistics in others."""
    model = net()
    opt = optimizer(model, **options)
    for i in range(STEPS):
        x, y = share(*whole(i))
        last = rank() == world() - 1
        opt.zero_grad()
        if not (last and i in (0, 2)):
            with opt.preconditioner.paused() if last and i == 3 else nullcontext():
                F.mse_loss(model(x), y).backward()
        average(model.parameters())
        opt.step()
    return weights(model)


def schedules(options: dict[str, Any]) -> list[Tensor]:
    model = ddp(net())
    with early():  # else "polar" refreshes everything in step 5
        opt = optimizer(model, **options)
    damping = opt.param_groups[0]["damping"]
    polar = opt.preconditioner.rule.makes_directions
    clip: dict[str, Any] = {} if polar else {"kl_clip": lambda epoch: 1 + epoch}
    scheduler = KFACParamScheduler(
        opt,
        damping=lambda epoch: 0.5**epoch,
        **clip,
        # Ranks may take a new interval a step later than one process does: here both intervals
        # have the step after the change in common, so that it makes no difference.
        factor_update_steps={1: 2},
        inv_update_steps={3: 3},
    )
    plans = []
    for i in range(10):
        learn(model, opt, i)
        plans.append(opt.preconditioner.work)
        if i % 2:
            scheduler.step()
    assert opt.param_groups[0]["damping"] == damping / 32
    assert [i for i, plan in enumerate(plans) if plan.average] == [0, 1, 2, 4, 6, 8]
    assert [i for i, plan in enumerate(plans) if plan.refresh] == [*range(7), 9]
    return weights(model)


INVERSES: dict[str, Any] = {"compute_method": "inverse", "inv_update_steps": 2}


def unseen(options: dict[str, Any]) -> list[Tensor]:
    """No host waits for the device, and ranks hear of failures in the next exchange."""
    with as_on_a_gpu():
        return trains(options | INVERSES)


def stored(method: str, dtype: torch.dtype) -> dict[str, Any]:
    make = functools.partial(net, torch.float32)
    return {"compute_method": method, "inv_dtype": dtype, "make": make, "near": (5e-2, 5e-2)}


SITUATIONS: dict[str, tuple[Situation, dict[str, Any]]] = {
    # Layers that are called otherwise than once in order
    "crossed": (trains, {"make": crossed}),
    "checkpointed": (trains, {"make": functools.partial(checkpointed, False)}),
    "reentrant": (trains, {"make": functools.partial(checkpointed, True)}),
    # Passes and calls beside the steps
    "evaluates": (trains, {"step": evaluates}),
    "pauses": (trains, {"step": pauses}),
    "asks": (trains, {"step": asks_for_its_state}),
    "without rows": (without_rows, {}),
    "schedules": (schedules, {"staggered": False}),
    "unseen": (unseen, {"compute_method": "inverse"}),
    # Half precision
    "polar in bfloat16": (trains, stored("polar", torch.bfloat16)),
    "eigen in bfloat16": (trains, stored("eigen", torch.bfloat16)),
    "inverse in float16": (trains, stored("inverse", torch.float16)),
}


@every_strategy
@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.filterwarnings("ignore:state_dict")
def test_ranks_take_the_steps_of_one_process(name: str, strategy: str) -> None:
    situation, options = SITUATIONS[name]
    compare(situation, strategy, **options)


def test_a_device_that_no_host_waits_for_has_the_same_inverses() -> None:
    assert_same(unseen({}), trains(INVERSES))


@every_strategy
def test_a_rank_that_has_nothing_in_some_steps(strategy: str) -> None:
    ranks, spread = STRATEGIES[strategy]
    results = run(ranks, one_has_nothing, spread)
    for result in results:
        assert_same(result, results[0])
        assert all(w.isfinite().all() for w in result)
    assert not torch.equal(results[0][0], weights(net())[0])


# ---- refreshes of whose failure ranks hear in the next exchange ----


def failing(attempts: int, options: dict[str, Any]) -> tuple[list[Any], list[list[str]]]:
    """So many attempts at A of the first layer fail from step 4 on, in which it has its turn."""
    left, real, states, said = 0, products.damped_inverse, [], []

    def damped_inverse(factors: Tensor, damping: Tensor) -> Tensor:
        nonlocal left
        result = real(factors, damping)
        if left and factors.shape[-1] == 5:
            left -= 1
            result[:] = torch.nan
        return result

    with as_on_a_gpu(), mock.patch.object(products, "damped_inverse", damped_inverse):
        model = ddp(net())
        opt = optimizer(model, **INVERSES, staggered=False, **options)
        for i in range(8):
            left = attempts if i == 4 else left
            with recorded_warnings("failed") as texts:
                learn(model, opt, i)
            said.append(texts)
            inverse = groups.state(opt, "0", "a").get("inverse")
            states.append(None if inverse is None else inverse.clone())
    return [*states, weights(model)], said


@every_strategy
@pytest.mark.parametrize("attempts", [1, 2])
def test_an_inverse_that_fails_is_named_in_the_next_exchange(strategy: str, attempts: int) -> None:
    """Refreshes are in steps 4 and 6; the layer gathers in each step."""
    ranks, spread = STRATEGIES[strategy]
    for i, (found, said) in enumerate(run(ranks, failing, attempts, spread)):
        *states, ended = found
        assert all(w.isfinite().all() for w in ended)
        told = [step for step, texts in enumerate(said) if texts]
        assert told == ([5, 7][:attempts] if i == 0 else [])
        for count, step in enumerate(told, 1):
            assert f"layer '0' failed, {count} in a row" in said[step][0]
        if states[0] is None:
            continue
        assert torch.equal(states[4], states[2])
        assert torch.equal(states[5], states[4])
        assert torch.equal(states[6], states[5]) == (attempts == 2)


# ---- steps on one rank that leave something out ----


def test_a_step_before_any_gradient_is_not_counted():
    """Its count had no entry in the state, so that a resumed run had another schedule."""
    model, other = training.network(), training.network()
    opt, resumed = (KFACSGD(x, lr=0.1, compute_method="eigen") for x in (model, other))
    opt.step()
    assert opt.preconditioner.steps == 0
    training.train(model, opt, range(3))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert resumed.preconditioner.steps == opt.preconditioner.steps == 3


@pytest.mark.parametrize("zeros", [False, True], ids=["without a gradient", "of zeros"])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_layer_unused_in_this_batch(method, zeros):
    net = seeded(Branches)
    opt = exact(net, factor_update_steps=1, inv_update_steps=1, compute_method=method)
    x = normal(6, 6)

    def take(way: str, x: Tensor) -> None:
        opt.zero_grad(set_to_none=not zeros)
        loss_of(net(x, way)).backward()
        opt.step()

    with warnings_as("error"):
        # Branch b appears in the second step for the first time, unused in the first.
        take("a", x)
        take("b", x)
        before = factors(opt)["a"]
        a, b = (x.weight.detach().clone() for x in (net.a, net.b))
        take("b", x)
    assert torch.equal(net.a.weight, a) and not torch.equal(net.b.weight, b)
    assert_same(opt.preconditioner.factors("a"), before)
    # Back in use, its average weighs its own two batches only.
    twin = copy.deepcopy(net)
    twin.zero_grad()
    watch = Watch(twin, "a")
    loss_of(twin(2 * x, "a")).backward()
    take("a", 2 * x)
    new = factors_of(*rows_of(twin.a, watch.trained("a")), 6.0)
    share = 0.05 / (1 - 0.95**2)
    expected = tuple(old + share * (n - old) for old, n in zip(before, new, strict=True))
    assert_factors(opt, "a", expected)


# ---- how training goes, in plain numbers ----


def trained(steps: int, cls: type = KFACAdam, **options: Any):
    model = training.network()
    opt = cls(model, lr=1e-3, **options)
    training.train(model, opt, range(steps))
    return opt.preconditioner


def test_counts_follow_the_steps():
    found = trained(0).metrics(wait=True)
    assert (found["refreshes"], found["layers_without_statistics"]) == (0, 2)
    assert not any(name.startswith(("age", "residual")) for name in found)
    options = {"factor_update_steps": 1, "inv_update_steps": 6, "staggered": False}
    kfac = trained(1, **options)
    layers = len(kfac.layers)
    assert kfac.metrics() == {
        "steps": 1,
        "layers_without_statistics": 0,
        "refreshes": layers,
        "failures": 0,
        "rejected": 0,
        "bytes": kfac.memory_usage()["total"],
        "age_mean": 0.0,
        "age_max": 0,
    }
    for steps, refreshes, age in ((6, 2, 0), (8, 3, 1)):  # steps 0, 5 and 6 refresh
        found = trained(steps, **options).metrics()
        assert (found["refreshes"], found["age_max"]) == (refreshes * layers, age)


def test_no_tensor_is_read_unless_it_is_asked_for(monkeypatch):
    kfac = trained(1)

    def read(*_):
        raise AssertionError("the host waits")

    monkeypatch.setattr(torch.Tensor, "item", read)
    monkeypatch.setattr(torch.Tensor, "tolist", read)
    kfac.metrics()
    with pytest.raises(AssertionError, match="the host waits"):
        kfac.metrics(wait=True)


@pytest.mark.parametrize("widest", [16384, 2])
def test_roots_fit_the_averages_that_they_were_made_of(widest):
    options = {"factor_update_steps": 1, "max_factor_size": widest}
    found = trained(1, **options).metrics(wait=True)
    assert 0 <= found["residual_mean"] <= found["residual_max"] < 1e-5
    # Step 1 gathers, and does not refresh.
    assert trained(2, **options, factor_decay=0.0).metrics(wait=True)["residual_max"] > 1e-2


@pytest.mark.parametrize("method", ["polar", "eigen"])
def test_a_loaded_state_has_its_measures_before_a_step(method):
    options = {"lr": 1e-3, "compute_method": method}
    model, other = training.network(), training.network()
    opt, fresh = KFACAdam(model, **options), KFACAdam(other, **options)
    training.train(model, opt, [0])
    fresh.load_state_dict(opt.state_dict())
    (name,) = {"residual_max", "condition_max"} & opt.preconditioner.metrics(wait=True).keys()
    found, wanted = (x.preconditioner.metrics(wait=True)[name] for x in (fresh, opt))
    assert found == pytest.approx(wanted)


def test_conditions_are_of_factors_with_the_damping():
    kfac = trained(1, KFACSGD, compute_method="eigen", damping=0.5)
    expected = []
    for name in kfac.layers:
        for factor in kfac.factors(name):
            values = torch.linalg.eigvalsh(factor.double()).clamp(min=0) + 0.5
            expected += (values.amax(1) / values.amin(1)).tolist()
    found = kfac.metrics(wait=True)
    assert found["condition_max"] == pytest.approx(max(expected), rel=1e-4)
    assert found["condition_mean"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert 0 < found["clip"] <= 1
    assert trained(1, KFACSGD, compute_method="eigen", kl_clip=1e9).metrics(wait=True)["clip"] == 1
    off = trained(1, KFACSGD, compute_method="eigen", kl_clip=None)
    assert "clip" not in off.metrics(wait=True)


@pytest.mark.filterwarnings("ignore:statistics that were not finite")
def test_rejected_statistics_are_counted():
    model = nn.Linear(3, 2)
    opt = KFACAdam(model, lr=1e-3, factor_update_steps=1, inv_update_steps=1)
    for scale in (1.0, torch.inf, 1.0):
        opt.zero_grad()
        (model(torch.ones(4, 3)).square().mean() * scale).backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        opt.step()
    assert opt.preconditioner.metrics()["rejected"] == 1


def of_rank() -> dict[str, float]:
    return trained(1, assignment="layer-wise").metrics(wait=True)


def test_each_rank_tells_its_own_share_without_a_collective():
    one, other = run(2, of_rank)
    assert one["refreshes"] == other["refreshes"] == 2
    assert one["residual_max"] != other["residual_max"]
