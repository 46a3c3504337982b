"""What goes wrong on one rank: all end alike or learn of it at once; none hangs or drifts."""

from __future__ import annotations

import copy
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
from kaisa_optim.options import SETTABLE
from kaisa_optim.preconditioner import Preconditioner
from tests.support import groups
from tests.support.ranks import fresh, run
from tests.support.training import ANEW, recorded_warnings, warnings_as

# In the error of a rank that waited for others until its group's time-out, or that they left.
LOST = re.compile("lost other ranks|Timed out|Connection closed")


class Ended(NamedTuple):
    """How one rank came out of an attempt."""

    first: Tensor | None  # the model's first weight
    weights: bytes  # all of them: bit for bit, NaN too
    moved: bool  # the attempt has changed them
    error: str | None  # type and text
    warned: str


def net(dtype: torch.dtype = torch.float64, hidden: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 5), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).to(dtype)


def optimizer(model: nn.Module, **options: Any) -> KFACSGD:
    return KFACSGD(model, **{"lr": 0.1, **ANEW, **options})


def mean(model: nn.Module) -> None:
    for p in model.parameters():
        # That of a bias which one rank has frozen counts as zero.
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def learn(model: nn.Module, opt: KFACSGD, i: int, spoil: Any = None, average: Any = mean) -> None:
    """Take the step of this rank's part of batch ``i``, which may be spoilt."""
    generator = torch.Generator().manual_seed(100 * i + dist.get_rank())
    x, y = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (4, 3))
    x = x.to(next(model.parameters()).dtype)
    if spoil:
        spoil(x)
    opt.zero_grad()
    F.mse_loss(model(x), y.to(x.dtype)).backward()
    average(model)
    opt.step()


def attempt(model: nn.Module, work: Callable[[], object], healthy: bool = True) -> Ended:
    """Do ``work``; afterwards, where the group is ``healthy``, the ranks must still be in step."""

    def weights() -> bytes:
        return b"".join(p.detach().numpy().tobytes() for p in model.parameters())

    before, error = weights(), None
    with recorded_warnings() as texts:
        try:
            work()
        except Exception as problem:
            cause = f": {problem.__cause__}" if problem.__cause__ else ""
            error = f"{type(problem).__name__}: {problem}{cause}"
    if healthy:
        together()
    first = next((p.detach().clone() for p in model.parameters()), None)
    return Ended(first, weights(), weights() != before, error, "\n".join(texts))


def together() -> None:
    """Nobody is one collective ahead."""
    word = torch.ones(1)
    dist.all_reduce(word)
    assert word.item() == dist.get_world_size()


def assert_alike(results: list[Ended]) -> None:
    """Equal weights on all ranks, and an error on all or none."""
    assert len({result.weights for result in results}) == 1
    assert len({result.error is None for result in results}) == 1, results
    assert not any(LOST.search(result.error or "") for result in results), results


def on_rank(rank: int, context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    return context if dist.get_rank() == rank else nullcontext()


LAYER_WISE = {"assignment": "layer-wise"}
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "layer-wise": (3, LAYER_WISE),
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

    def work() -> None:
        for i in range(4):
            learn(model, opt, i, spoil if dist.get_rank() == 1 and i in at else None)

    return attempt(model, work)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", SPOILT)
def test_numbers_that_are_not_finite_on_one_rank_change_all_alike(strategy, case):
    world, options = STRATEGIES[strategy]
    results = run(world, spoiled, case, options)
    assert_alike(results)
    spoil, _, more, said = SPOILT[case]
    if more:
        assert {said in (result.error or "") for result in results} == {True}
        return
    assert results[0].error is None and said in results[0].warned
    assert not any(result.warned for result in results[1:])
    first = results[0].first
    assert first.isnan().all() if spoil is put_nan else first.isfinite().all()


PLANTED = mock.Mock(side_effect=ValueError("planted"))
RAISING = {
    "statistics": (layer_base, "second_moment"),
    "comparison": (Witness, "compare"),
    "reading of what was compared": (Witness, "settle"),
}


def raises_in_a_step(place: str, at: int, wrap: bool, options: dict[str, Any]) -> list[Ended]:
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model) if wrap else model
    opt = optimizer(wrapped, **options)
    for i in range(at):
        learn(wrapped, opt, i)
    with on_rank(1, mock.patch.object(*RAISING[place], PLANTED)):
        failed = attempt(model, lambda: learn(wrapped, opt, at))
    return [failed, attempt(model, lambda: learn(wrapped, opt, at))]


@pytest.mark.parametrize(
    ("place", "strategy", "at", "wrap"),
    [
        *(("statistics", x, at, False) for x in STRATEGIES for at in (0, 2)),
        *(("statistics", x, 2, True) for x in STRATEGIES),
        ("comparison", "layer-wise", 0, True),
        ("reading of what was compared", "layer-wise", 0, True),
    ],
)
def test_an_exception_on_one_rank_is_raised_on_all(place, strategy, at, wrap):
    world, options = STRATEGIES[strategy]
    results = run(world, raises_in_a_step, place, at, wrap, options)
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


@contextmanager
def broken_decompositions(error: Exception) -> Iterator[None]:
    solvers = ("eigendecompose", "damped_inverse", "inverse_root")
    with mock.patch.multiple(products, **dict.fromkeys(solvers, mock.Mock(side_effect=error))):
        yield


def undecomposed(error: Exception, good: int, bad_steps: int, options: dict[str, Any]) -> Any:
    """One rank's decompositions fail in ``bad_steps`` steps, after ``good`` ones, and in the next.

    In that one, all ranks hear of the last of the others. Return the rank, the layers of which it
    has a factor, and what is applied on this one; by key, also whether it is as it was before.
    """
    model = net()
    opt = optimizer(model, **options)
    for i in range(good):
        learn(model, opt, i)
    kfac, before = opt.preconditioner, applied(opt)
    owners = [(x, kfac.registry.owner(x, side)) for x in kfac.layers.values() for side in "ag"]
    bad = max(owner for _, owner in owners)

    def work() -> None:
        for i in range(good, good + bad_steps + 1):
            learn(model, opt, i)

    with on_rank(bad, broken_decompositions(error)):
        ended = attempt(model, work)
    after = applied(opt)
    older = {key: torch.equal(after[key], before[key]) for key in after}
    return ended, bad, {layer.name for layer, owner in owners if owner == bad}, older, after


def applied(opt: KFACSGD) -> dict[tuple[str, int, str], Tensor]:
    """What this rank preconditions with, by layer, owner and name."""
    kfac = opt.preconditioner
    return {
        (name, kfac.registry.owner(layer, side), f"{side} {key}"): state.clone()
        for name, layer in kfac.layers.items()
        for side in "ag"
        for key, state in groups.state(opt, name, side).items()
    }


@every_placement
@pytest.mark.parametrize("good", [2, 0])
def test_a_failed_decomposition_leaves_the_older_state_or_the_identity(placement, method, good):
    """In the steps after ``good`` ones; of the owner that failed, on all of its workers."""
    options = {**PLACEMENTS[placement], "compute_method": method}
    results = run(4, undecomposed, torch.linalg.LinAlgError("planted"), good, 1, options)
    assert_alike([ended for ended, *_ in results])
    ended, bad, layers, _, _ = results[0]
    assert ended.error is None and ended.moved and ended.first.isfinite().all()
    failed = set()
    for *_, older, after in results:
        for (layer, owner, name), state in after.items():
            one = torch.eye(state.shape[-1]) if state.dim() == 3 else torch.ones(state.shape[-1])
            identity = torch.equal(state[0], one.to(state.dtype))
            stays = older[layer, owner, name] if good else identity
            assert stays == (owner == bad), (layer, name)
            failed |= {layer} if stays else set()
    assert failed == layers
    for layer in layers:
        assert f"layer '{layer}' failed, 1 in a row; the state before it" in ended.warned
    assert not any(result[0].warned for result in results[1:])


@every_placement
@pytest.mark.parametrize("error", [torch.linalg.LinAlgError("planted"), MemoryError("planted")])
def test_failed_decompositions_end_all_ranks_alike(placement, method, error):
    """Those of a solver if they are too many, and any other exception at once."""
    options = {**PLACEMENTS[placement], "compute_method": method, "max_failures": 1}
    too_many = not isinstance(error, MemoryError)
    results = run(4, undecomposed, error, 1, 1 + too_many, options)
    assert_alike([ended for ended, *_ in results])
    for rank, (ended, bad, layers, _, _) in enumerate(results):
        text = ended.error or ""
        if too_many:
            (layer,) = re.findall(
                "^RuntimeError: the refresh of layer '(.)' failed, 2 in a row", text
            )
            assert layer in layers
        elif rank == bad:
            assert text == "MemoryError: planted"
            assert "decomposing factors failed on rank" in ended.warned
        else:
            assert text.startswith("RuntimeError") and f"rank {bad}: MemoryError: planted" in text


# ---- ranks that are gone ----

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
def test_a_rank_that_is_killed_in_a_step(place):
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
            opt.step()

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


@pytest.mark.parametrize("place", ["decomposition", "gradients"])
def test_a_rank_that_no_longer_answers(place):
    """One rank's time-out, that of the group, frees the others."""
    errors = [ended.error or "" for ended in fresh(4, waits, place)]
    assert any(f"Timed out waiting {1000 * TIMEOUT:.0f}ms" in error for error in errors)
    for rank in (0, 2, 3):
        assert errors[rank].startswith("RuntimeError: K-FAC lost other ranks while ")


# ---- what differs at construction ----


def _model(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    model = net()
    change(model)
    return model


def strictly(model: nn.Module, **options: Any) -> None:
    """Build on all ranks: one that speaks for all would stop, and the others wait for it."""
    warnings.simplefilter("error")
    optimizer(model, **options)


# What one rank builds instead, and what the error names.
DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "size": (lambda: optimizer(net(hidden=7)), "same stage"),
    "layer": (lambda: optimizer(net().append(nn.Linear(3, 3).double())), "layer '5'"),
    "dtype": (lambda: optimizer(net(torch.float32)), "layer '0'"),
    "frozen": (lambda: optimizer(_model(lambda m: m[2].bias.requires_grad_(False))), "layer '2'"),
    "none": (lambda: optimizer(nn.Sequential(nn.PReLU()).double()), "layer '0'"),
    "damping": (lambda: optimizer(net(), damping=0.2), "damping"),
    "skipped": (lambda: optimizer(net(), skip_layers=["4"]), "skip_layers"),
    "fraction": (lambda: optimizer(net(), grad_worker_fraction=0.5), "grad_worker_fraction"),
    "all workers": (lambda: optimizer(net(), grad_worker_fraction=1.0), "grad_worker_fraction"),
    "foreign": (lambda: KFACSGD([nn.Parameter(torch.zeros(3))], model=net()), "params"),
    "decay": (lambda: optimizer(net(), weight_decay=0.1), "weight_decay of parameter group 0: "),
    "slots": (lambda: optimizer(net(), staggered=False), "staggered: False on rank 1, True on"),
    "base": (lambda: KFACAdam(net(), lr=0.1), "'Adam' on rank 1, 'SGD'"),
    "meta": (lambda: optimizer(_model(lambda m: m[-1].to("meta"))), "on the meta device"),
    # All ranks build these.
    "no match": (lambda: strictly(net(), skip_layers=["nowhere"]), "UserWarning"),
    "no kind": (lambda: strictly(net().append(nn.Bilinear(9, 11, 3).double())), "UserWarning"),
}
STRICT = {"no match", "no kind"}


def built(name: str, odd: int) -> str | None:
    make, _ = DIFFERENT[name]
    different = name in STRICT or dist.get_rank() == odd
    return attempt(nn.Identity(), make if different else lambda: optimizer(net())).error


@pytest.mark.parametrize(
    ("name", "world", "odd"),
    [
        *((name, 3, 1) for name in DIFFERENT),  # a half of three is no grid
        ("all workers", 2, 1),
        ("meta", 2, 0),
    ],
)
def test_ranks_that_differ_at_construction(name, world, odd):
    _, named = DIFFERENT[name]
    results = run(world, built, name, odd)
    for rank, error in enumerate(results):
        assert error is not None, rank
        assert named in error or (name == "foreign" and "parameter" in error), error
        # What is wrong with a rank alone it says as if it were alone.
        alone = name in {"meta", *STRICT} or (name in ("foreign", "fraction") and rank == odd)
        assert f"rank {odd}" in error or alone, error


# ---- what differs later ----


class Case(NamedTuple):
    """What ranks do otherwise, perhaps when they average, and the error of all of them."""

    error: str | None  # a pattern; without one they train on
    event: Callable[..., Callable[[nn.Module], None] | None]  # after ``at`` steps
    args: tuple[Any, ...] = ()  # of the event
    at: int = 1
    taken: int = 0  # steps after it, of which the next one raises
    options: dict[str, Any] = ANEW
    world: int = 3


def sets(model: nn.Sequential, opt: KFACSGD, name: str) -> None:
    if dist.get_rank() == 1 and name in SETTABLE:
        setattr(opt.preconditioner, name, 0.5 if name == "kl_clip" else 1)
    elif dist.get_rank() == 1:
        opt.param_groups[0][name] = 0.5


def prints_otherwise(model: nn.Sequential, opt: KFACSGD) -> None:
    """Put the same values in another order, one of them as a float."""
    group = opt.param_groups[0]
    for name in sorted(group, reverse=True) if dist.get_rank() == 1 else ():
        group[name] = group.pop(name)
        group["momentum"] = float(group["momentum"])


def splits_dampings(model: nn.Sequential, opt: KFACSGD) -> None:
    """Only one rank preconditions the layer: it would raise alone, and the others would wait."""
    opt.add_param_group({"params": [opt.param_groups[0]["params"].pop()]})
    opt.param_groups[1]["damping"] *= 2


def loads_another_step(model: nn.Sequential, opt: KFACSGD) -> None:
    """Load each rank's own share."""
    with warnings_as("ignore"):
        former = copy.deepcopy(opt.state_dict())
        learn(model, opt, 1)
        opt.load_state_dict(opt.state_dict() if dist.get_rank() == 1 else former)


def loads_another_status(model: nn.Sequential, opt: KFACSGD, index: int, number: int) -> None:
    with warnings_as("ignore"):
        state = copy.deepcopy(opt.state_dict())
        for entry in state["state"].values() if dist.get_rank() == 1 else ():
            if "kfac_status" in entry:
                entry["kfac_status"][index] = number
        opt.load_state_dict(state)


def turns_a_bias(model: nn.Sequential, opt: KFACSGD, trained: bool) -> None:
    """Rank 1 alone freezes it, or trains it, which changes the layer's statistics."""
    model[2].bias.requires_grad_(trained)
    learn(model, opt, 0)
    model[2].bias.requires_grad_(trained != (dist.get_rank() == 1))


def drops_gradients(
    model: nn.Sequential, opt: KFACSGD, names: tuple[str, ...] = ("weight", "bias")
) -> Callable[[nn.Module], None]:
    def drop(model: nn.Module) -> None:
        mean(model)
        for name in names if dist.get_rank() > 0 else ():
            model[2].get_parameter(name).grad = None

    return drop


def drifts(model: nn.Sequential, opt: KFACSGD, size: float) -> Callable[[nn.Module], None]:
    """From here on rank 1 goes by a gradient of its own in one parameter."""

    def drift(model: nn.Module) -> None:
        mean(model)
        model[2].bias.grad += size * (dist.get_rank() == 1)

    return drift


def averages_nothing(model: nn.Sequential, opt: KFACSGD) -> Callable[[nn.Module], None]:
    return lambda model: None


def adds(model: nn.Sequential, opt: KFACSGD, name: str, number: float) -> None:
    with torch.no_grad():  # weights were float32: their low bits are zero
        model.get_parameter(name)[3] += number * (dist.get_rank() == 1)


GROUP_0 = "of parameter group 0"
EIGEN = {"compute_method": "eigen", "kl_clip": 1e-3}
SAVE = r".*call consolidate_state_dict\(\) before a save"
OTHER_STATUS = f"Invalid missed slots, failures of '0': .*on rank 1{SAVE}"
OTHER_WEIGHTS = r"^RuntimeError: parameter '2.bias' on ranks \[1\] differs from rank 0's"
OTHER_GRADIENTS = r"^RuntimeError: the gradient of '0.weight' on ranks \[1, 2\] differs from rank 0"
CASES = {
    "a value that prints otherwise": Case(None, prints_otherwise, taken=4, options={"momentum": 0}),
    "dampings": Case(
        "damping: layer '4' has its weight and bias in", splits_dampings, options=LAYER_WISE
    ),
    "shares": Case(
        f"Invalid steps: 2 on rank 1, 1 on rank 0{SAVE}", loads_another_step, options=LAYER_WISE
    ),
    "failures": Case(OTHER_STATUS, loads_another_status, (4, 1)),
    "missed slots": Case(OTHER_STATUS, loads_another_status, (0, 5)),
    "a frozen bias": Case("'2'", turns_a_bias, (True,), at=0),
    "low bits": Case(OTHER_WEIGHTS, adds, ("2.bias", 1e-12), at=0),
    "high bits": Case(OTHER_WEIGHTS, adds, ("2.bias", 1.0), at=0),
    "skipped weights": Case(
        None, adds, ("0.bias", 1.0), at=0, taken=1, options={"skip_layers": ["0"]}
    ),
    "gradients": Case(OTHER_GRADIENTS, averages_nothing, at=0),
    "a bias's gradient": Case(
        OTHER_GRADIENTS.replace("0.weight", "2.bias"), drops_gradients, (("bias",),), at=0
    ),
}
for at, (strategy, (world, options)) in itertools.product((0, 2), STRATEGIES.items()):
    text = rf"layer '2' has no gradient on ranks \{[*range(1, world)]}"
    CASES[f"no gradient, {strategy}, {at}"] = Case(text, drops_gradients, (), at, 0, options, world)
for often in (1, 3):  # ranks learn of it in the next step that exchanges anything
    rare = {"factor_update_steps": often, "inv_update_steps": often, "staggered": False}
    for name, more in ((f"damping {GROUP_0}", {}), (f"lr {GROUP_0}", {}), ("kl_clip", EIGEN)):
        text, args = f"Invalid {name}: .*on rank 1", (name.split()[0],)
        CASES[f"{name}, {often}"] = Case(text, sets, args, taken=often - 1, options=rare | more)
CASES["a trained bias"] = Case("'2'", turns_a_bias, (False,), at=0, taken=2, options=rare)
rare = {"factor_update_steps": 4, "inv_update_steps": 4, "staggered": False}
for name in ("factor_update_steps", "inv_update_steps"):  # they act where all exchange
    text = f"Invalid {name}: 1 on rank 1"
    CASES[name] = Case(text, sets, (name,), at=2, taken=2, options=rare)
# Weights of step 6 meet the next exchange.
rare = {"factor_update_steps": 2, "inv_update_steps": 100, "staggered": False, "verify_every": 3}
rare["assignment"] = "opt"
text = r"parameter '2.weight' in step 6 on ranks \[1\] differs from rank 0's.*average gradients"
CASES["a drift"] = Case(text, drifts, (1e-6,), at=4, taken=2, options=rare, world=2)
CASES["no drift"] = Case(None, drifts, (0.0,), at=4, taken=16, options=rare, world=2)


def happens(name: str) -> tuple[Ended, int]:
    """Return how the steps end that follow the event, and how many are taken."""
    case, model = CASES[name], net()
    opt = optimizer(model, **case.options)
    for i in range(case.at):
        learn(model, opt, i)
    average = case.event(model, opt, *case.args) or mean
    before = opt.preconditioner.steps

    def work() -> None:
        for i in range(before, before + case.taken + (case.error is not None)):
            learn(model, opt, i, average=average)

    return attempt(model, work), opt.preconditioner.steps - before


@pytest.mark.parametrize("name", CASES)
def test_what_ranks_do_otherwise_is_named_on_all_of_them(name):
    case = CASES[name]
    results = run(case.world, happens, name)
    assert len({ended.error for ended, _ in results}) == 1
    for ended, taken in results:
        assert taken == case.taken and ended.moved == (taken > 0)
        assert (ended.error is None) == (case.error is None)
        assert case.error is None or re.search(case.error, ended.error)


def outside() -> str | None:
    group = dist.new_group([0])
    return attempt(nn.Identity(), lambda: optimizer(net(), process_group=group)).error


def test_an_optimizer_on_a_rank_that_is_not_in_its_process_group():
    first, second = run(2, outside)
    assert first is None
    assert second is not None and second.startswith("ValueError: Invalid process_group")
