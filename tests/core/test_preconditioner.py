"""A step, on one rank and on several: none hangs, and ranks take the step of one process."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from kaisa_optim import KFACSGD, KFACParamScheduler
from kaisa_optim.linalg import kronecker
from tests.support import training
from tests.support.cluster import taken_by
from tests.support.ranks import run
from tests.support.training import (
    METHODS,
    as_on_a_gpu,
    assert_near,
    assert_same,
    early,
    refreshed,
)
from tests.support.watch import (
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


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


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


def part(i: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """This rank's part of batch ``i``."""
    x, y = whole(i, dtype)
    return x.chunk(world())[rank()], y.chunk(world())[rank()]


def average(model: nn.Module) -> None:
    """What a wrapper would do; a missing gradient counts as zero."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if world() > 1:
            dist.all_reduce(p.grad)
            p.grad /= world()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def learn(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    i: int,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    x, y = part(i, next(model.parameters()).dtype)
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    before_step()
    opt.step()


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
    alone = situation({"staggered": ranks, **options})
    results = run(ranks, situation, {**options, **spread})
    for result in results:
        assert_same(result, results[0])
    assert_near(results[0], alone, *near)


every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


# ---- passes through the model ----


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = net()

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.model[0], self.model[2], self.model[4]
        return last(torch.tanh(middle(torch.tanh(middle(torch.tanh(first(x)))))))


def used_twice(options: dict[str, Any]) -> list[Tensor]:
    model = ddp(Twice())
    opt = optimizer(model, **options)
    for i in range(STEPS):
        learn(model, opt, i)
    return weights(model)


@every_strategy
def test_a_module_used_twice_in_one_forward(strategy: str) -> None:
    compare(used_twice, strategy)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.model[0](x))
        x = checkpoint(self.model[2:4], x, use_reentrant=self.reentrant)
        return self.model[4](x)


def reentrant(options: dict[str, Any]) -> list[Tensor]:
    return _checkpointed(True, options)


def not_reentrant(options: dict[str, Any]) -> list[Tensor]:
    return _checkpointed(False, options)


def _checkpointed(reentrant: bool, options: dict[str, Any]) -> list[Tensor]:
    model = ddp(Checkpointed(reentrant))
    opt = optimizer(model, **options)
    for i in range(STEPS):
        learn(model, opt, i)
    return weights(model)


@every_strategy
@pytest.mark.parametrize("situation", [reentrant, not_reentrant])
def test_activation_checkpointing(situation: Situation, strategy: str) -> None:
    compare(situation, strategy)


def looks_first(options: dict[str, Any]) -> list[Tensor]:
    model = ddp(net())
    opt = optimizer(model, **options)
    for i in range(STEPS):
        with torch.no_grad():
            model(whole(50 + i)[0])
        learn(model, opt, i)
    return weights(model)


@every_strategy
def test_a_training_forward_under_no_grad_before_the_real_one(strategy: str) -> None:
    compare(looks_first, strategy)


def evaluates(options: dict[str, Any]) -> list[Tensor]:
    """One rank evaluates, as most do, between steps and between a backward pass and its step."""
    model = net()
    wrapped = ddp(model)
    opt = optimizer(wrapped, **options)

    def evaluate() -> None:
        if rank() == 0:
            model.eval()
            with torch.no_grad():
                model(whole(77)[0])
            model(whole(78)[0])  # with gradients, by a forgetful user
            model.train()

    for i in range(STEPS):
        learn(wrapped, opt, i, before_step=evaluate)
        evaluate()
    return weights(model)


@every_strategy
def test_one_rank_evaluates_between_steps(strategy: str) -> None:
    compare(evaluates, strategy)


def pauses(options: dict[str, Any]) -> list[Tensor]:
    model = ddp(net())
    opt = optimizer(model, **options)
    for i in range(STEPS):
        with opt.preconditioner.paused() if i in (0, 3) else nullcontext():
            learn(model, opt, i)
    return weights(model)


@every_strategy
@pytest.mark.filterwarnings("ignore:layer .* no statistics")
def test_steps_whose_statistics_are_paused(strategy: str) -> None:
    compare(pauses, strategy)


# ---- steps that are left out ----


def test_a_step_before_any_gradient_is_not_counted():
    """Its count had no entry in the state, so that a resumed run had another schedule."""
    model = training.network()
    opt = KFACSGD(model, lr=0.1, compute_method="eigen")
    opt.step()
    assert opt.preconditioner.steps == 0
    training.train(model, opt, range(3))
    other = training.network()
    resumed = KFACSGD(other, lr=0.1, compute_method="eigen")
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert resumed.preconditioner.steps == opt.preconditioner.steps == 3


def skips(options: dict[str, Any]) -> list[Tensor]:
    model = ddp(net())
    opt = optimizer(model, **options)
    for i in range(STEPS):
        if i == 2:
            F.mse_loss(model(whole(60)[0]), whole(60)[1]).backward()
            opt.zero_grad()
        learn(model, opt, i)
    return weights(model)


@every_strategy
def test_a_backward_pass_without_its_step(strategy: str) -> None:
    compare(skips, strategy)


def scales(options: dict[str, Any]) -> list[Tensor]:
    return _scaled(options)[0]


def scales_and_tells(options: dict[str, Any]) -> list[Tensor]:
    """What all ranks know of the factors where all of them precondition all layers."""
    kfac = _scaled(options)[1].preconditioner
    views = [view for layer in kfac.layers.values() for view in sorted_views(kfac, layer)]
    return [
        view.clone() for name, view in views if name.endswith(("values", "root"))
    ]  # signs may differ


def sorted_views(kfac: Any, layer: Any) -> list[tuple[str, Tensor]]:
    return sorted(kfac.store.applied.views(layer), key=lambda item: item[0])


def _scaled(options: dict[str, Any]) -> tuple[list[Tensor], KFACSGD]:
    """In step 2 one rank's batch has an infinity, and no rank steps."""
    model = ddp(net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    opt = optimizer(model, grad_scaler=scaler, **options)
    for i in range(STEPS):
        x, y = part(i)
        if i == 2 and rank() == world() - 1:
            y[0, 0] = torch.inf
        opt.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert opt.preconditioner.steps == STEPS - 1
    return weights(model), opt


def scales_not(options: dict[str, Any]) -> list[Tensor]:
    model = ddp(net())
    opt = optimizer(model, **options)
    for i in range(STEPS):
        learn(model, opt, i)
    return weights(model)


def scales_in_vain(options: dict[str, Any]) -> list[Tensor]:
    model = ddp(net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    opt = optimizer(model, grad_scaler=scaler, **options)
    for i in range(STEPS):
        x, y = part(i)
        opt.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
    return weights(model)


@every_strategy
def test_a_grad_scaler_that_skips_one_step(strategy: str) -> None:
    compare(scales, strategy)


def test_a_skipped_step_leaves_no_trace_in_the_factors() -> None:
    compare(scales_and_tells, "opt")


@every_strategy
def test_a_scaled_loss_changes_nothing(strategy: str) -> None:
    ranks, spread = STRATEGIES[strategy]
    results = run(ranks, scales_in_vain, spread)
    expected = run(ranks, scales_not, spread)
    for result in results:
        assert_near(result, expected[0])
        assert_same(result, results[0])
    compare(scales_in_vain, strategy)


# ---- state ----


def asks_for_its_state(options: dict[str, Any]) -> list[Tensor]:
    """Only one rank asks: nothing may be exchanged for it."""
    model = ddp(net())
    opt = optimizer(model, **options)
    for i in range(STEPS):
        learn(model, opt, i, before_step=lambda: opt.state_dict() if rank() == 0 else None)
        if rank() == 0:
            opt.state_dict()
    return weights(model)


@every_strategy
@pytest.mark.filterwarnings("ignore:state_dict")
def test_one_rank_saves_between_backward_and_step(strategy: str) -> None:
    compare(asks_for_its_state, strategy)


def resumes(options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Each rank saves its share and loads it; with what would have come without."""
    results = []
    for interrupted in (False, True):
        # Not wrapped: a new wrapper cuts its first buckets otherwise, and sums have other bits.
        model = net()
        opt = optimizer(model, momentum=0.9, **options)
        for i in range(8):
            if interrupted and i == 3:
                saved = copy.deepcopy([model.state_dict(), opt.state_dict()])
                model = net()
                opt = optimizer(model, momentum=0.9, **options)
                model.load_state_dict(saved[0])
                opt.load_state_dict(saved[1])
            learn(model, opt, i, before_step=lambda model=model: average(model))
        results.append(weights(model))
    return results[0], results[1]


@pytest.mark.parametrize("options", [{}, {"factor_update_steps": 2, "inv_update_steps": 4}])
@every_strategy
@pytest.mark.filterwarnings("ignore:state_dict")
def test_each_rank_goes_on_from_its_own_state(strategy: str, options: dict[str, Any]) -> None:
    ranks, spread = STRATEGIES[strategy]
    results = run(ranks, resumes, {**options, **spread})
    for straight, resumed in results:
        assert_same(resumed, straight)
        assert_same(straight, results[0][0])


# ---- layers that a step does not use ----


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor, side: str) -> Tensor:
        return getattr(self, side)(torch.tanh(self.body(x)))


def loss_of(out: Tensor) -> Tensor:
    """Neither linear nor symmetric in its entries; averages the examples."""
    scale = torch.linspace(0.5, 2.0, out[0].numel(), dtype=out.dtype).view_as(out[0])
    return (scale * (out - 0.3).square()).sum() / len(out)


def snapshot(opt, name: str) -> tuple[Tensor, Tensor]:
    a, g = opt.preconditioner.factors(name)
    return a.clone(), g.clone()


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_layer_unused_in_this_batch(method):
    net = seeded(Sides)
    opt = exact(net, factor_update_steps=1, inv_update_steps=1, compute_method=method)
    x = normal(6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The right branch appears in the second step for the first time, unused in the first.
        for side in ("left", "right"):
            opt.zero_grad()
            loss_of(net(x, side)).backward()
            opt.step()
        left = snapshot(opt, "left")
        right_before = net.right.weight.detach().clone()
        left_before = net.left.weight.detach().clone()
        opt.zero_grad()
        loss_of(net(x, "right")).backward()
        opt.step()
    assert torch.equal(net.left.weight, left_before)
    assert not torch.equal(net.right.weight, right_before)
    for kept, now in zip(left, opt.preconditioner.factors("left"), strict=True):
        assert torch.equal(kept, now)
    # Back in use, its average weighs its own two batches only.
    twin = copy.deepcopy(net)
    watch = Watch(twin, "left")
    loss_of(twin(2 * x, "left")).backward()
    opt.zero_grad()
    loss_of(net(2 * x, "left")).backward()
    opt.step()
    new = factors_of(*rows_of(twin.left, watch.trained("left")), 6.0)
    share = 0.05 / (1 - 0.95**2)
    expected = tuple(old + share * (n - old) for old, n in zip(left, new, strict=True))
    assert_factors(opt, "left", expected)


def test_layer_unused_from_now_on():
    net = seeded(Sides)
    opt = exact(net, lr=0.05, factor_update_steps=1, inv_update_steps=2)
    x = normal(6, 4)
    for _ in range(2):
        opt.zero_grad()
        (loss_of(net(x, "left")) + loss_of(net(x, "right"))).backward()
        opt.step()
    before = net.right.weight.detach().clone()
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            opt.zero_grad()
            loss = loss_of(net(x, "left"))
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(net.right.weight, before)


def test_layer_unused_in_this_batch_with_a_zero_gradient():
    net = seeded(Sides)
    opt = exact(net, factor_update_steps=1, inv_update_steps=1)
    x = normal(6, 4)
    (loss_of(net(x, "left")) + loss_of(net(x, "right"))).backward()
    opt.step()
    before, factors = net.right.weight.detach().clone(), snapshot(opt, "right")
    opt.zero_grad(set_to_none=False)
    loss_of(net(x, "left")).backward()
    opt.step()
    assert torch.equal(net.right.weight, before)
    for kept, now in zip(factors, opt.preconditioner.factors("right"), strict=True):
        assert torch.equal(kept, now)


# ---- ranks that do not run the same ----


class Heads(nn.Module):
    """Rank 0 trains one head, all others the other; one process does so with their rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.double()

    def forward(self, x: Tensor, ranks: int) -> Tensor:
        x = torch.tanh(self.body(x))
        if world() > 1:
            return self.heads[min(rank(), 1)](x)
        first, *others = x.chunk(ranks)
        return torch.cat([self.heads[0](first), self.heads[1](torch.cat(others))])


def own_heads(options: dict[str, Any]) -> list[Tensor]:
    return _own_heads(False, options)


def own_heads_wrapped(options: dict[str, Any]) -> list[Tensor]:
    return _own_heads(True, options)


def _own_heads(wrap: bool, options: dict[str, Any]) -> list[Tensor]:
    ranks = options["ranks"]
    options = {name: value for name, value in options.items() if name != "ranks"}
    model: nn.Module = Heads()
    if wrap:
        model = ddp(model, find_unused_parameters=True)
    opt = optimizer(model, **options)
    for i in range(STEPS):
        x, y = part(i)
        opt.zero_grad()
        F.mse_loss(model(x, ranks), y).backward()
        if not wrap:
            average(model)
        opt.step()
    return weights(model)


@every_strategy
@pytest.mark.parametrize("situation", [own_heads, own_heads_wrapped])
def test_ranks_that_use_different_layers(situation: Situation, strategy: str) -> None:
    compare(situation, strategy, ranks=STRATEGIES[strategy][0])


def own_order(options: dict[str, Any]) -> list[Tensor]:
    model = ddp(Crossed())
    opt = optimizer(model, **options)
    for i in range(STEPS):
        learn(model, opt, i)
    return weights(model)


class Crossed(nn.Module):
    """Every other rank runs them the other way round."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.last = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.left, self.right]
        if rank() % 2:
            branches.reverse()
        first, second = (torch.tanh(branch(x)) for branch in branches)
        return self.last(first * second)


@every_strategy
def test_ranks_that_use_the_same_layers_in_another_order(strategy: str) -> None:
    compare(own_order, strategy)


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
        opt.zero_grad()
        ((model(x) - y).square().sum() * world() / (ROWS * 3)).backward()
        opt.step()
    return weights(model)


@every_strategy
def test_an_empty_batch_on_one_rank(strategy: str) -> None:
    compare(without_rows, strategy)


def one_has_nothing(options: dict[str, Any]) -> list[Tensor]:
    """The last rank runs no batch in some steps, and none with statistics in others."""
    model = net()
    opt = optimizer(model, **options)
    for i in range(STEPS):
        x, y = part(i)
        last = rank() == world() - 1
        opt.zero_grad()
        if not (last and i in (0, 2)):
            with opt.preconditioner.paused() if last and i == 3 else nullcontext():
                F.mse_loss(model(x), y).backward()
        average(model)
        opt.step()
    return weights(model)


@every_strategy
def test_a_rank_that_has_nothing_in_some_steps(strategy: str) -> None:
    ranks, spread = STRATEGIES[strategy]
    results = run(ranks, one_has_nothing, spread)
    for result in results:
        assert_same(result, results[0])
        assert all(w.isfinite().all() for w in result)
    assert not torch.equal(results[0][0], weights(net())[0])


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
        plans.append(opt.preconditioner.plan)
        if i % 2:
            scheduler.step()
    assert opt.param_groups[0]["damping"] == damping / 32
    assert [i for i, plan in enumerate(plans) if plan.average] == [0, 1, 2, 4, 6, 8]
    assert [i for i, plan in enumerate(plans) if plan.refresh] == [*range(7), 9]
    return weights(model)


@every_strategy
def test_schedules_on_all_ranks(strategy: str) -> None:
    compare(schedules, strategy, staggered=False)


# ---- inverses of which the host hears in the next step ----


INVERSES: dict[str, Any] = {"compute_method": "inverse", "inv_update_steps": 2}


def inverted(options: dict[str, Any]) -> list[Tensor]:
    unseen, options = options["unseen"], {k: v for k, v in options.items() if k != "unseen"}
    with as_on_a_gpu() if unseen else nullcontext():
        model = ddp(net())
        opt = optimizer(model, **INVERSES, **options)
        for i in range(STEPS + 4):
            learn(model, opt, i)
        assert set(refreshed(opt.preconditioner).values()) == {not unseen}
    return weights(model)


@every_strategy
def test_inverses_that_no_host_waits_for_are_the_same(strategy: str) -> None:
    ranks, spread = STRATEGIES[strategy]
    plain = inverted({"unseen": False, "staggered": ranks})
    assert_same(inverted({"unseen": True, "staggered": ranks}), plain)
    results = run(ranks, inverted, {"unseen": True, **spread})
    for result in results:
        assert_same(result, results[0])
    assert_near(results[0], plain, 1e-9, 1e-11)


def failing(
    attempts: int, options: dict[str, Any], restarts: bool = False
) -> tuple[list[Any], list[str]]:
    """So many attempts at A of the first layer fail from step 4 on, in which it has its turn."""
    left, real, states = 0, kronecker.damped_inverse, []

    def damped_inverse(factors: Tensor, damping: Tensor) -> Tensor:
        nonlocal left
        result = real(factors, damping)
        if left and factors.shape[-1] == 5:
            left -= 1
            result[:] = torch.nan
        return result

    with (
        as_on_a_gpu(),
        mock.patch.object(kronecker, "damped_inverse", damped_inverse),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        model = ddp(net())
        opt = optimizer(model, **INVERSES, staggered=False, **options)
        for i in range(8):
            left = attempts if i == 4 else left
            learn(model, opt, i)
            kfac = opt.preconditioner
            applied = kfac.store.applied.by_key.get((kfac.layers["0"], "a"))
            states.append(None if applied is None else applied["inverse"].clone())
            if restarts and i == 4:
                model, older = copy.deepcopy(model), opt
                opt = optimizer(model, **INVERSES, staggered=False, **options)
                opt.load_state_dict(older.state_dict())
    return [*states, weights(model)], [str(w.message) for w in caught]


@every_strategy
@pytest.mark.parametrize("attempts", [1, 2])
def test_an_inverse_that_fails_unseen_is_named_in_the_next_step(
    strategy: str, attempts: int
) -> None:
    """The layer's next refresh is in step 6; the host waits for it."""
    ranks, spread = STRATEGIES[strategy]
    for rank, (found, said) in enumerate(run(ranks, failing, attempts, spread)):
        *states, ended = found
        assert all(w.isfinite().all() for w in ended)
        said = [text for text in said if "failed" in text]
        assert len(said) == (attempts if rank == 0 else 0)
        for count, text in enumerate(said, 1):
            assert f"layer '0' failed, {count} in a row; its older state" in text
        if states[0] is None:
            continue
        assert torch.equal(states[4], states[2])
        assert torch.equal(states[5], states[4])
        assert torch.equal(states[6], states[5]) == (attempts == 2)


@pytest.mark.parametrize("how", ["moved", "loaded"])
def test_an_inverse_that_failed_unseen_elsewhere_is_worked_out(how: str) -> None:
    """On the CPU, whose hosts wait, the notes are heard that a GPU has left."""
    model = net()
    opt = optimizer(model, **INVERSES, staggered=False)
    failed = functools.partial(torch.full_like, fill_value=torch.nan)
    with as_on_a_gpu():
        for i in range(4):
            learn(model, opt, i)
        with mock.patch.object(
            kronecker, "damped_inverse", lambda factors, damping: failed(factors)
        ):
            learn(model, opt, 4)
    if how == "moved":
        model.float()
    else:
        state, opt = opt.state_dict(), optimizer(model, **INVERSES, staggered=False)
        opt.load_state_dict(state)
    layer = opt.preconditioner.layers["0"]
    older = opt.preconditioner.store.applied.by_key[layer, "a"]["inverse"].clone()
    with pytest.warns(UserWarning, match="failed, 1 in a row; its older state stays"):
        learn(model, opt, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(model, opt, 6)
    newer = opt.preconditioner.store.applied.by_key[layer, "a"]["inverse"]
    assert not torch.allclose(newer.double(), older.double())


def test_a_state_without_notes_on_inverses_goes_on_as_it_was() -> None:
    """Those who looked have left none, as older states have none."""
    models = []
    for drop in (False, True):
        model = net()
        opt = optimizer(model, **INVERSES)
        for i in range(4):
            learn(model, opt, i)
        state, opt = opt.state_dict(), optimizer(model, **INVERSES)
        for entry in state["state"].values() if drop else ():
            for key in [key for key in entry if str(key).endswith("stale")]:
                del entry[key]
        opt.load_state_dict(state)
        for i in range(4, 8):
            learn(model, opt, i)
        models.append(weights(model))
    assert_same(models[1], models[0])


def test_a_restart_knows_of_an_inverse_that_failed_unseen() -> None:
    restarted, plain = failing(1, {}, restarts=True), failing(1, {})
    assert_same([*restarted[0][:-1], *restarted[0][-1]], [*plain[0][:-1], *plain[0][-1]])


# ---- two optimizers, and half precision ----


def two_optimizers(options: dict[str, Any]) -> list[Tensor]:
    """Two models side by side, in one group each, of the same ranks."""
    models = [ddp(net()), ddp(Crossed())]
    groups = [dist.new_group(), dist.new_group()] if world() > 1 else [None, None]
    opts = [optimizer(m, process_group=g, **options) for m, g in zip(models, groups, strict=True)]
    for i in range(STEPS):
        for model, opt in zip(models, opts, strict=True):
            x, y = part(i)
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
        for opt in opts:
            opt.step()
    return [w for model in models for w in weights(model)]


@every_strategy
def test_two_optimizers_side_by_side(strategy: str) -> None:
    compare(two_optimizers, strategy)


def autocast(options: dict[str, Any]) -> list[Tensor]:
    model = ddp(net(torch.float32))
    opt = optimizer(model, **options)
    for i in range(STEPS):
        x, y = part(i, torch.float32)
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        opt.step()
    return weights(model)


@every_strategy
def test_autocast(strategy: str) -> None:
    compare(autocast, strategy, near=(2e-2, 2e-2))


def in_float32(options: dict[str, Any]) -> list[Tensor]:
    model = ddp(net(torch.float32))
    opt = optimizer(model, **options)
    for i in range(STEPS):
        learn(model, opt, i)
    return weights(model)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("polar", torch.bfloat16), ("eigen", torch.bfloat16), ("inverse", torch.float16)],
)
@every_strategy
def test_second_order_state_in_half(strategy: str, method: str, dtype: torch.dtype) -> None:
    options = {"inv_dtype": dtype, "compute_method": method}
    compare(in_float32, strategy, near=(5e-2, 5e-2), **options)
