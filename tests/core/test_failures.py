"""What goes wrong on one rank: all end alike or learn of it at once; none hangs or drifts."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam, compiled, exchange
from kaisa_optim.capture.witness import Witness
from kaisa_optim.comm import ranks as comm_ranks
from kaisa_optim.layers import base as layer_base
from kaisa_optim.linalg import products
from kaisa_optim.preconditioner import Preconditioner
from tests.support.cluster import average, weights
from tests.support.ranks import fresh, run
from tests.support.training import ANEW, recorded_warnings, warnings_as

# In the error of a rank that waited for others until its group's time-out, or that they left.
LOST = re.compile("lost other ranks|Timed out|Connection closed")


class Ended(NamedTuple):
    """How one rank came out of an attempt."""

    weights: list[Tensor]
    moved: bool  # the attempt has changed them
    error: str | None  # type and text
    warned: str


def net(dtype: torch.dtype = torch.float64, hidden: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 5), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).to(dtype)


def optimizer(model: nn.Module, **options: Any) -> KFACSGD:
    return KFACSGD(model, **{"lr": 0.1, **ANEW, **options})


def part(i: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """This rank's part of batch ``i``."""
    generator = torch.Generator().manual_seed(100 * i + dist.get_rank())
    x, y = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (4, 3))
    return x.to(dtype), y.to(dtype)


def learn(
    model: nn.Module,
    opt: KFACSGD,
    i: int,
    spoil: Callable[[Tensor], object] = lambda x: None,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    x, y = part(i, next(model.parameters()).dtype)
    spoil(x)
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    average(model.parameters())
    before_step()
    opt.step()


def attempt(model: nn.Module, work: Callable[[], object], healthy: bool = True) -> Ended:
    """Do ``work``; afterwards, where the group is ``healthy``, the ranks must still be in step."""
    before = weights(model)
    error = None
    with recorded_warnings() as texts:
        try:
            work()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    if healthy:
        together()
    after = weights(model)
    moved = any(not same(a, b) for a, b in zip(before, after, strict=True))
    return Ended(after, moved, error, "\n".join(texts))


def together() -> None:
    """Nobody is one collective ahead."""
    word = torch.ones(1)
    dist.all_reduce(word)
    assert word.item() == dist.get_world_size()


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN too."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_alike(results: list[Ended]) -> None:
    """Equal weights on all ranks, and an error on all or none."""
    for result in results[1:]:
        assert all(same(a, b) for a, b in zip(result.weights, results[0].weights, strict=True))
    assert len({result.error is None for result in results}) == 1, results
    assert not any(LOST.search(result.error or "") for result in results), results


def on_rank(rank: int, context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    return context if dist.get_rank() == rank else nullcontext()


# ---- numbers that are not finite on one rank ----

STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "layer-wise": (3, {"assignment": "layer-wise"}),
    "hybrid": (4, {"grad_worker_fraction": 0.5}),
    "opt": (3, {"assignment": "opt"}),
}


def put_nan(x: Tensor) -> None:
    x[2, 1] = torch.nan


def put_outlier(x: Tensor) -> None:
    """Its square overflows in float32; tanh saturates, and so its gradients are zero."""
    x[2] = 1e25


# What spoils the batch of rank 1, in which of the steps, and what all ranks then have in common.
SPOILT: dict[str, tuple[Callable[[Tensor], object], list[int], dict[str, Any], str]] = {
    # The gradient is averaged: so it would be without K-FAC.
    "nan at first": (put_nan, [0], {}, "not finite have been left out for '0'"),
    "nan": (put_nan, [2], {}, "not finite have been left out for '0'"),
    "overflow": (put_outlier, [2], {}, "left out for '0'"),
    "none left": (put_outlier, [0, 1, 2, 3], {"max_failures": 0}, "layer '0' failed, 1 in a row"),
    "no two": (put_outlier, [0, 1, 2, 3], {"max_failures": 1}, "layer '0' failed, 2 in a row"),
}


def spoiled(case: str, options: dict[str, Any]) -> Ended:
    spoil, at, more, _ = SPOILT[case]
    model = net(torch.float32)
    opt = optimizer(model, **options, **more)
    bad = dist.get_rank() == 1

    def work() -> None:
        for i in range(4):
            learn(model, opt, i, spoil if bad and i in at else lambda x: None)

    return attempt(model, work)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", SPOILT)
def test_numbers_that_are_not_finite_on_one_rank_change_all_alike(strategy: str, case: str) -> None:
    world, options = STRATEGIES[strategy]
    results = run(world, spoiled, case, options)
    assert_alike(results)
    spoil, _, more, said = SPOILT[case]
    if more:
        assert {said in (result.error or "") for result in results} == {True}
        return
    assert results[0].error is None and said in results[0].warned
    assert not any(result.warned for result in results[1:])
    first = results[0].weights[0]
    assert first.isnan().all() if spoil is put_nan else first.isfinite().all()


# ---- exceptions in the backward pass ----


PLANTED = mock.Mock(side_effect=ValueError("planted"))


def raises_in_backward(at: int, wrap: bool, options: dict[str, Any]) -> tuple[Ended, Ended]:
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model) if wrap else model
    opt = optimizer(wrapped, **options)
    for i in range(at):
        learn(wrapped, opt, i)
    with on_rank(1, mock.patch.object(layer_base, "second_moment", PLANTED)):
        failed = attempt(model, lambda: learn(wrapped, opt, at))
    return failed, attempt(model, lambda: learn(wrapped, opt, at))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("at", "wrap"), [(0, False), (2, False), (2, True)])
def test_an_exception_in_one_ranks_statistics(strategy: str, at: int, wrap: bool) -> None:
    world, options = STRATEGIES[strategy]
    results = run(world, raises_in_backward, at, wrap, options)
    failed, again = (list(attempts) for attempts in zip(*results, strict=True))
    assert_alike(failed)
    for rank, result in enumerate(failed):
        assert not result.moved and result.error is not None
        if rank == 1:
            assert result.error == "ValueError: planted"
        else:
            assert result.error.startswith("RuntimeError: K-FAC stops on all ranks")
            assert "rank 1: ValueError: planted" in result.error
    assert_alike(again)  # a caught exception does not come again
    assert all(result.error is None and result.moved for result in again)


def raises_in_comparison(method: str, options: dict[str, Any]) -> Ended:
    """One rank alone fails to compare a gradient, or to read what was compared."""
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    opt = optimizer(wrapped, **options)
    with on_rank(1, mock.patch.object(Witness, method, PLANTED)):
        return attempt(model, lambda: learn(wrapped, opt, 0))


@pytest.mark.parametrize("method", ["compare", "settle"])
def test_an_exception_in_one_ranks_comparison(method: str) -> None:
    first, second = run(2, raises_in_comparison, method, STRATEGIES["layer-wise"][1])
    assert_alike([first, second])
    assert second.error == "ValueError: planted" and not second.moved
    assert first.error is not None and "rank 1: ValueError: planted" in first.error


# ---- values of groups that come apart ----


def dampings_part(options: dict[str, Any]) -> Ended:
    model = net()
    last = [model[4].bias]
    groups = [{"params": [p for p in model.parameters() if p is not last[0]]}, {"params": last}]
    opt = KFACSGD(groups, **{"lr": 0.1, **ANEW, **options}, model=model)
    learn(model, opt, 0)
    opt.param_groups[1]["damping"] *= 2
    return attempt(model, lambda: learn(model, opt, 1))


def test_dampings_that_come_apart_are_refused_on_all_ranks():
    """Only one rank preconditions the layer; it would raise alone, and the others would wait."""
    for result in run(3, dampings_part, {"assignment": "layer-wise"}):
        assert not result.moved and result.error is not None
        assert "Invalid damping: layer '4' has its weight and bias in parameter" in result.error


# ---- decompositions ----

PLACEMENTS: dict[str, dict[str, Any]] = {
    "layer-wise": {"assignment": "layer-wise"},
    "hybrid": {"grad_worker_fraction": 0.5},
    "hybrid-parted": {"grad_worker_fraction": 0.5, "colocate_factors": False},
    "opt": {"assignment": "opt", "colocate_factors": True},
    "opt-parted": {"assignment": "opt", "colocate_factors": False},
}
every_placement = pytest.mark.parametrize(
    ("placement", "method"), list(itertools.product(PLACEMENTS, ["polar", "eigen", "inverse"]))
)


class Decomposed(NamedTuple):
    ended: Ended
    bad: int  # the rank that failed
    kept: set[str]  # layers of which it has a factor
    older: dict[str, bool]  # what this rank applies: is it as it was before?
    applied: dict[str, Tensor]


@contextmanager
def broken_decompositions(error: Exception) -> Iterator[None]:
    solvers = ("eigendecompose", "damped_inverse", "inverse_root")
    with mock.patch.multiple(products, **dict.fromkeys(solvers, mock.Mock(side_effect=error))):
        yield


def undecomposed(
    error: Exception, good: int, bad_steps: int, options: dict[str, Any]
) -> Decomposed:
    """One rank's decompositions fail in ``bad_steps`` steps, after ``good`` ones, and in the next.

    In that one, all ranks hear of the last of the others.
    """
    model = net()
    opt = optimizer(model, **options)
    kfac = opt.preconditioner
    for i in range(good):
        learn(model, opt, i)
    owners = {
        (x, side): kfac.registry.owner(x, side) for x in kfac.layers.values() for side in "ag"
    }
    bad = max(owners.values())
    broken = on_rank(bad, broken_decompositions(error))
    before = applied(kfac)

    def work() -> None:
        for i in range(good, good + bad_steps + 1):
            learn(model, opt, i)

    with broken:
        ended = attempt(model, work)
    after = applied(kfac)
    return Decomposed(
        ended,
        bad,
        {layer.name for (layer, _), owner in owners.items() if owner == bad},
        {key: torch.equal(after[key], before[key]) for key in after},
        after,
    )


def applied(kfac: Preconditioner) -> dict[str, Tensor]:
    """What this rank preconditions with, under ``layer side owner``."""
    found = {}
    for layer in kfac.layers.values():
        for name, view in kfac.groups.of[layer].views(layer):
            if name.split("_")[-1] in ("average", "weight", "rejected", "stale"):
                continue
            side = name.split("_")[0]
            found[f"{layer.name} {kfac.registry.owner(layer, side)} {name}"] = view.clone()
    return found


@every_placement
@pytest.mark.parametrize("good", [2, 0])
def test_a_failed_decomposition_leaves_the_older_state_or_the_identity(
    placement: str, method: str, good: int
) -> None:
    """In the steps after ``good`` ones; of the owner that failed, on all of its workers."""
    options = {**PLACEMENTS[placement], "compute_method": method}
    results = run(4, undecomposed, torch.linalg.LinAlgError("planted"), good, 1, options)
    assert_alike([result.ended for result in results])
    first = results[0]
    assert first.ended.error is None and first.ended.moved
    assert all(result.ended.weights[0].isfinite().all() for result in results)
    failed = set()
    for result in results:
        for key, state in result.applied.items():
            layer, owner, _ = key.split()
            one = torch.eye(state.shape[-1]) if state.dim() == 3 else torch.ones(state.shape[-1])
            stays = result.older[key] if good else torch.equal(state[0], one.to(state.dtype))
            assert stays == (int(owner) == first.bad), key
            failed |= {layer} if stays else set()
    assert failed == first.kept
    for layer in first.kept:
        assert f"layer '{layer}' failed, 1 in a row; the state before it" in first.ended.warned
    assert not any(result.ended.warned for result in results[1:])


@every_placement
@pytest.mark.parametrize("error", [torch.linalg.LinAlgError("planted"), MemoryError("planted")])
def test_failed_decompositions_end_all_ranks_alike(
    placement: str, method: str, error: Exception
) -> None:
    """Those of a solver if they are too many, and any other exception at once."""
    options = {**PLACEMENTS[placement], "compute_method": method, "max_failures": 1}
    too_many = not isinstance(error, MemoryError)
    results = run(4, undecomposed, error, 1, 1 + too_many, options)
    assert_alike([result.ended for result in results])
    bad = results[0].bad
    for rank, result in enumerate(results):
        text = result.ended.error or ""
        if too_many:
            assert any(
                text.startswith(f"RuntimeError: the refresh of layer {x!r} failed, 2 in a row")
                for x in result.kept
            )
        elif rank == bad:
            assert text == "MemoryError: planted"
            assert "decomposing factors failed on rank" in result.ended.warned
        else:
            assert text.startswith("RuntimeError") and f"rank {bad}: MemoryError: planted" in text


# ---- ranks that are gone ----

LAYER_WISE = {"assignment": "layer-wise"}
SMALL_BUCKETS = {"bucket_cap_mb": 1e-4}
# Where in a step a rank is lost, and what the other ranks are then waiting for.
GONE: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "exchange": (Preconditioner, "gather", {}, "agreeing on step 1"),
    "sums": (comm_ranks, "_added_up", SMALL_BUCKETS, "ing factors"),
    "passing on": (comm_ranks.Ranks, "_to_owners", SMALL_BUCKETS, "ing factors"),
    "decomposition": (products, "inverse_root", LAYER_WISE, "ing gradients"),
    "state": (exchange.Exchange, "share_state", {"assignment": "opt"}, "ing second_order"),
    "gradients": (compiled.Rows, "exchange", LAYER_WISE, "ing gradients"),
}


def lost(place: str, by: Callable[..., None]) -> AbstractContextManager[Any]:
    owner, name, _, _ = GONE[place]
    return on_rank(1, mock.patch.object(owner, name, by))


def die(*args: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loses(place: str) -> Ended:
    model = net()
    opt = optimizer(model, **GONE[place][2])
    learn(model, opt, 0)
    together()
    with lost(place, die):
        return attempt(model, lambda: learn(model, opt, 1), healthy=False)


@pytest.mark.parametrize("place", GONE)
def test_a_rank_that_is_killed_in_a_step(place: str) -> None:
    results = fresh(3, loses, place, expect_errors=True)
    assert results[1].error == "died (exit code -9)"
    for rank in (0, 2):
        ended = results[rank].value
        assert ended is not None, results[rank].error
        assert ended.error is not None and GONE[place][3] in ended.error
        # Mostly at once; gloo now and then waits for the time-out of the group.
        assert ended.error.startswith("RuntimeError: K-FAC lost other ranks while ")


TIMEOUT = 5.0


def waits(place: str) -> Ended:
    """Rank 1 sleeps in its second step until the others have given up.

    All ranks have the same batch, and so no gradients to average.
    """
    together()  # a new group has its own time to be made, and one may still be importing this
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    model = net()
    opt = optimizer(model, process_group=group, grad_worker_fraction=0.5)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    store = dist.distributed_c10d._get_default_store()

    def steps(count: int) -> None:
        for _ in range(count):
            opt.zero_grad()
            model(x).square().mean().backward()
            try:
                opt.step()
            except RuntimeError as error:
                raise RuntimeError(f"{error}: {error.__cause__}") from error

    def sleep(*args: Any, **options: Any) -> None:
        while store.add(place, 0) < dist.get_world_size() - 1:
            time.sleep(0.05)
        raise RuntimeError("slept")

    steps(1)
    together()
    with lost(place, sleep):
        # Only the second of these steps may need the sleeper.
        ended = attempt(model, lambda: steps(2), healthy=False)
    store.add(place, 1)
    together()
    return ended


def wait_both(places: list[str]) -> list[Ended]:
    return [waits(place) for place in places]


def test_a_rank_that_no_longer_answers() -> None:
    """One rank's time-out, that of the group, frees the others."""
    results = fresh(4, wait_both, ["decomposition", "gradients"])
    late = f"Timed out waiting {1000 * TIMEOUT:.0f}ms"
    for of_place in zip(*results, strict=True):
        errors = [ended.error or "" for ended in of_place]
        assert any(late in error for error in errors)
        for rank in (0, 2, 3):
            assert errors[rank].startswith("RuntimeError: K-FAC lost other ranks while ")


# ---- what differs at construction ----


def _model(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    model = net()
    change(model)
    return model


# What one rank builds instead, and what the error names.
DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "size": (lambda: optimizer(net(hidden=7)), "same stage"),
    "layer": (lambda: optimizer(net().append(nn.Linear(3, 3).double())), "layer '5'"),
    "dtype": (lambda: optimizer(net(torch.float32)), "layer '0'"),
    "frozen": (
        lambda: optimizer(_model(lambda m: m[2].bias.requires_grad_(False))),
        "layer '2'",
    ),
    "none": (lambda: optimizer(nn.Sequential(nn.PReLU()).double()), "layer '0'"),
    "damping": (lambda: optimizer(net(), damping=0.2), "damping"),
    "skipped": (lambda: optimizer(net(), skip_layers=["4"]), "skip_layers"),
    "fraction": (lambda: optimizer(net(), grad_worker_fraction=0.5), "grad_worker_fraction"),
    "all workers": (lambda: optimizer(net(), grad_worker_fraction=1.0), "grad_worker_fraction"),
    "foreign": (
        lambda: KFACSGD([*net().parameters(), nn.Parameter(torch.zeros(3))], model=net()),
        "params",
    ),
    "weight decay": (
        lambda: optimizer(net(), weight_decay=0.1),
        "Invalid weight_decay of parameter group 0",
    ),
    "slots": (
        lambda: optimizer(net(), staggered=False),
        "Invalid staggered: False on rank 1, True on rank 0",
    ),
    "base": (lambda: KFACAdam(net(), lr=0.1), "'Adam' on rank 1, 'SGD'"),
    "meta": (
        lambda: optimizer(_model(lambda m: m[-1].to(device="meta"))),
        "Invalid parameters on the meta device: ",
    ),
}


def built(name: str, odd: int) -> str | None:
    make, _ = DIFFERENT[name]
    different = dist.get_rank() == odd
    return attempt(nn.Identity(), make if different else lambda: optimizer(net())).error


@pytest.mark.parametrize(
    ("name", "world", "odd"),
    [
        *((name, 3, 1) for name in DIFFERENT),  # a half of three is no grid
        ("all workers", 2, 1),
        ("meta", 2, 0),
    ],
)
def test_ranks_that_differ_at_construction(name: str, world: int, odd: int) -> None:
    _, named = DIFFERENT[name]
    results = run(world, built, name, odd)
    for rank, error in enumerate(results):
        assert error is not None, rank
        assert named in error or (name == "foreign" and "parameter" in error), error
        # What is wrong with a rank alone it says as if it were alone.
        alone = name == "meta" or (name in ("foreign", "fraction") and rank == odd)
        assert f"rank {odd}" in error or alone, error


# ---- what differs later ----


def _set(name: str, opt: KFACSGD) -> None:
    if name == "kl_clip":
        opt.preconditioner.kl_clip = 0.5
    else:
        opt.param_groups[0][name] = 0.5


def changed(change: Callable[[KFACSGD], object], options: dict[str, Any]) -> tuple[Ended, int]:
    """Rank 1 changes its mind before step 1 of three quiet steps; how many were still taken."""
    model = net()
    opt = optimizer(model, **options)
    learn(model, opt, 0)
    if dist.get_rank() == 1:
        change(opt)

    def work() -> None:
        for i in range(1, 5):
            learn(model, opt, i)

    return attempt(model, work), opt.preconditioner.steps


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("name", ["damping", "lr", "kl_clip"])
def test_a_hyperparameter_that_one_rank_changes(name: str, interval: int) -> None:
    options = {"factor_update_steps": interval, "inv_update_steps": interval}
    options |= {"compute_method": "eigen", "kl_clip": 1e-3} if name == "kl_clip" else {}
    named = name if name == "kl_clip" else f"{name} of parameter group 0"
    change = functools.partial(_set, name)
    for ended, steps in run(3, changed, change, {**options, "staggered": False}):
        assert ended.error is not None and f"Invalid {named}: " in ended.error
        assert "on rank 1" in ended.error
        assert steps == interval  # the next step that exchanges anything


def _print_otherwise(opt: KFACSGD) -> None:
    """Put the same values in another order, one of them as a float."""
    group = opt.param_groups[0]
    for name in sorted(group, reverse=True):
        group[name] = group.pop(name)
    group["momentum"] = float(group["momentum"])


def test_a_hyperparameter_that_prints_otherwise_is_the_same() -> None:
    for ended, steps in run(2, changed, _print_otherwise, {**ANEW, "momentum": 0}):
        assert ended.error is None, ended.error
        assert steps == 5


def graded(missing: list[int], at: int, options: dict[str, Any]) -> Ended:
    """Some ranks drop a layer's gradient at step ``at``."""
    model = net()
    opt = optimizer(model, **options)

    def drop() -> None:
        if dist.get_rank() in missing:
            for p in model[2].parameters():
                p.grad = None

    for i in range(at):
        learn(model, opt, i)

    return attempt(model, lambda: learn(model, opt, at, before_step=drop))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("at", [0, 2])
def test_a_layer_without_a_gradient_on_some_ranks(strategy: str, at: int) -> None:
    world, options = STRATEGIES[strategy]
    results = run(world, graded, [1, 2], at, options)
    assert_alike(results)
    (error,) = {result.error for result in results}
    assert error is not None and "layer '2' has no gradient on ranks [1, 2]" in error
    assert not results[0].moved


# ---- weights and gradients that nothing has made alike ----


def unlike(what: str) -> Ended:
    """Rank 1 starts with another bias, or nobody averages."""
    model = net()
    if dist.get_rank() == 1:
        with torch.no_grad():  # weights were float32: their low bits are zero
            model[2].bias[3] += {"low bits": 1e-12, "high bits": 1.0}.get(what, 0.0)
    opt = optimizer(model, skip_layers=["0"])

    def work() -> None:
        x, y = part(0)
        F.mse_loss(model(x), y).backward()
        if what != "gradients":
            average(model.parameters())
        if what == "uncovered" and dist.get_rank() == 1:
            with torch.no_grad():  # a part of the model that is each rank's own
                model[0].weight += 1
        opt.step()

    return attempt(model, work)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("low bits", "parameter '2.bias' on ranks [1] differs from rank 0's"),
        ("high bits", "parameter '2.bias' on ranks [1] differs from rank 0's"),
        ("gradients", "the gradient of '2.weight' on ranks [1, 2] differs from rank 0's"),
    ],
)
def test_weights_or_gradients_that_differ_in_the_first_step(what: str, said: str) -> None:
    for ended in run(3, unlike, what):
        assert ended.error is not None and ended.error.startswith(f"RuntimeError: {said}")
        assert not ended.moved


def test_a_parameter_that_is_not_covered_may_be_each_ranks_own() -> None:
    for ended in run(3, unlike, "uncovered"):
        assert ended.error is None and ended.moved


# ---- process groups ----


def outside() -> str | None:
    group = dist.new_group([0])
    return attempt(nn.Identity(), lambda: optimizer(net(), process_group=group)).error


def test_an_optimizer_on_a_rank_that_is_not_in_its_process_group() -> None:
    first, second = run(2, outside)
    assert first is None
    assert second is not None and second.startswith("ValueError: Invalid process_group")


# ---- what only one rank knows ----


def biased(freezes: bool, options: dict[str, Any]) -> Ended:
    """After a step, rank 1 alone freezes a bias or trains a frozen one; its statistics change."""
    model = net()
    model[2].bias.requires_grad_(freezes)
    opt = optimizer(model, **options)
    learn(model, opt, 0)
    if dist.get_rank() == 1:
        model[2].bias.requires_grad_(not freezes)
        model[2].bias.grad = None

    def work() -> None:
        for i in (1, 2, 3):
            x, y = part(i)
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            for p in model.parameters():  # that of a frozen bias counts as zero
                dist.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad)
            opt.step()

    return attempt(model, work)


QUIET = {"factor_update_steps": 3, "inv_update_steps": 3, "staggered": False}


@pytest.mark.parametrize(("freezes", "options"), [(True, {}), (False, QUIET)])
def test_a_bias_that_one_rank_freezes_or_unfreezes(freezes: bool, options: dict[str, Any]) -> None:
    """That of a frozen one is named at once, also in what would be a quiet step."""
    results = run(2, biased, freezes, options)
    assert all(r.error is not None and "'2'" in r.error for r in results)
    if freezes:
        assert_alike(results)
        assert not any(r.moved for r in results)


# ---- warnings that all ranks would give ----


def strict(patterns: list[str]) -> str | None:
    """Give a pattern that matches nothing, or a module of no kind."""
    model = net()
    if not patterns:
        model.register_module("own", nn.Bilinear(9, 11, 3, dtype=torch.float64))

    def build() -> None:
        warnings.simplefilter("error")
        optimizer(model, skip_layers=patterns)

    return attempt(nn.Identity(), build).error


@pytest.mark.parametrize("patterns", [[], ["nowhere"]])
def test_a_warning_that_is_an_error_is_one_on_all_ranks(patterns: list[str]) -> None:
    """Else the one that speaks for all would stop, and the others wait for it."""
    errors = run(2, strict, patterns)
    assert all(error is not None and error.startswith("UserWarning") for error in errors)


# ---- what only one rank does, or has ----


def other_share() -> str | None:
    """Each rank loads its own share, of another step."""
    model = net()
    opt = optimizer(model, assignment="layer-wise")
    saved = []
    with warnings_as("ignore"):
        for i in range(2):
            learn(model, opt, i)
            saved.append(copy.deepcopy(opt.state_dict()))
    opt.load_state_dict(saved[dist.get_rank()])
    return attempt(nn.Identity(), lambda: learn(model, opt, 2)).error


def test_shares_of_different_steps() -> None:
    for error in run(2, other_share):
        assert error is not None and "Invalid steps: 2 on rank 1, 1 on rank 0" in error
