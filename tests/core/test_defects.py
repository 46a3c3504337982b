"""Faults that single runs brought to light, each with the case that showed it."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.linalg import rounding
from tests.support.ranks import CAN_SHARD, run
from tests.support.training import ANEW, METHODS, assert_same, backward, network, train

EIGEN: dict[str, Any] = {"compute_method": "eigen", "kl_clip": None}


def test_a_step_before_any_gradient_is_not_counted():
    """Its count had no entry in the state, so that a resumed run had another schedule."""
    model = network()
    opt = KFACSGD(model, lr=0.1, compute_method="eigen", warmup_steps=4)
    opt.step()
    assert opt.preconditioner.steps == 0
    train(model, opt, range(3))
    other = network()
    resumed = KFACSGD(other, lr=0.1, compute_method="eigen", warmup_steps=4)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert resumed.preconditioner.steps == opt.preconditioner.steps == 3


def test_a_pass_on_the_meta_device_gathers_nothing():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        opt = KFACSGD(model, lr=0.1)
        model(torch.empty(5, 3)).sum().backward()
    assert not opt.preconditioner.sums.of_layer


def test_no_averaging_takes_the_newest_statistics():
    model = nn.Sequential(nn.Linear(3, 2))
    opt = KFACSGD(model, lr=0.0, factor_decay=0, factor_update_steps=1, **EIGEN)
    for x in torch.randn(3, 8, 3):
        opt.zero_grad()
        model(x).square().sum().backward()
        opt.step()
    rows = torch.cat([x, torch.ones(8, 1)], 1)
    torch.testing.assert_close(opt.preconditioner.factors("0")[0][0], rows.T @ rows / 8)


def differs_in_order() -> str:
    model = nn.Sequential()
    rank = torch.distributed.get_rank()
    for name in ("first", "second") if rank == 0 else ("second", "first"):
        model.add_module(name, nn.Linear(3, 3))
    try:
        KFACSGD(model, lr=0.1)
    except ValueError as error:
        return str(error)
    return ""


def test_modules_in_another_order_are_named():
    for text in run(2, differs_in_order):
        assert "'second' stands on rank 1 where rank 0 has" in text.replace("layer ", "").replace(
            '"', ""
        )
        assert "in one order on all ranks" in text


def with_a_scaler_on_one_rank() -> str:
    scaler = 8.0 if torch.distributed.get_rank() == 1 else None
    try:
        KFACSGD(nn.Linear(3, 2), lr=0.1, compute_method="eigen", grad_scaler=scaler)
    except ValueError as error:
        return str(error)
    return ""


def test_a_scaler_on_one_rank_alone_is_named():
    for text in run(2, with_a_scaler_on_one_rank):
        assert text.startswith("Invalid grad_scaler: 'given' on rank 1, None on rank 0")


@pytest.mark.parametrize(
    ("method", "key", "change", "fault"),
    [
        ("polar", "kfac_a_root", lambda t: t.fill_(torch.nan), "not finite"),
        ("inverse", "kfac_g_inverse", lambda t: t.fill_(torch.nan), "not finite"),
        ("eigen", "kfac_a_vectors", lambda t: t.fill_(torch.nan), "not finite"),
        ("eigen", "kfac_a_vectors", lambda t: t.mul_(2), "not orthonormal"),
        ("eigen", "kfac_g_values", lambda t: t.fill_(torch.inf), "not finite"),
        ("polar", "kfac_step", lambda t: t.fill_(-3), "it must be 0 or more"),
    ],
)
def test_broken_numbers_in_a_state_are_refused_by_name(method, key, change, fault):
    model = network()
    opt = KFACAdam(model, lr=0.01, compute_method=method)
    train(model, opt, range(2))
    state = copy.deepcopy(opt.state_dict())
    change(state["state"][0][key])
    with pytest.raises(ValueError, match=f"{key} is .*{fault}"):
        opt.load_state_dict(state)


# ---- parameters that were replaced behind the optimizer's back ----


@pytest.mark.parametrize("optimizer", [KFACSGD, KFACAdam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flat_copies_in_the_groups_are_refused(optimizer, dtype):
    """DeepSpeed's ZeRO puts them there, and its bf16 at any stage: K-FAC was off without a word."""
    model = network(dtype=dtype)
    opt = optimizer(model, lr=0.1)
    flat = nn.Parameter(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
    opt.param_groups[0]["params"] = [flat]
    backward(model, 0)
    flat.grad = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    with pytest.raises(RuntimeError, match=r"Invalid param_groups: .*\(51,\).*DeepSpeed.* bf16"):
        opt.step()


def shards_late() -> str:
    from torch.distributed.fsdp import fully_shard

    model = network()
    opt = KFACSGD(model, lr=0.1)
    fully_shard(model)
    backward(model, 0)
    try:
        opt.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
def test_a_model_that_is_sharded_after_its_optimizer_is_refused():
    for text in run(2, shards_late):
        assert "0.weight is a DTensor" in text and "after fully_shard" in text


@pytest.mark.filterwarnings("ignore:the base optimizer updates these")
def test_weights_that_moved_within_the_model_are_still_its_own():
    """Pruning and parametrizations keep the parameter under another name; a tied one has two."""
    model = network()
    model.append(nn.Linear(3, 6, dtype=torch.float64)).append(nn.Linear(6, 3, dtype=torch.float64))
    model[4].weight = model[2].weight
    opt = KFACSGD(model, lr=0.1, skip_layers="3")
    prune.identity(model[0], "weight")
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())  # is still that of model[4]
    train(model, opt, range(1))
    opt.param_groups[0]["params"].pop()  # on purpose: the base no longer steps this one
    train(model, opt, range(1, 2))


# ---- ranks that are not alike ----


def builds_a_stage() -> str:
    stage = nn.Sequential(nn.Linear(3, 4 + torch.distributed.get_rank()))
    try:
        KFACSGD(stage, lr=0.1)
    except ValueError as error:
        return str(error)
    return ""


def test_pipeline_stages_without_a_group_are_told_to_give_one():
    for text in run(2, builds_a_stage):
        assert "Invalid layer '0'" in text and "process_group=" in text and "same stage" in text


def changes_an_interval(name: str, ranks: list[int]) -> tuple[str, int, float]:
    """The user's own sum of ones takes in none of K-FAC's numbers."""
    model = network()
    opt = KFACSGD(model, lr=0.0, factor_update_steps=4, inv_update_steps=4, staggered=False)
    for i in range(10):
        opt.zero_grad()
        backward(model, i)
        if i == 2 and torch.distributed.get_rank() in ranks:
            setattr(opt.preconditioner, name, 1)
        total = torch.ones(60)
        torch.distributed.all_reduce(total)
        try:
            opt.step()
        except ValueError as error:
            return str(error), i, total.mean().item()
        if name == "inv_update_steps" and opt.preconditioner.plan.refresh and i > 0:
            return "", i, total.mean().item()
    return "", opt.preconditioner.steps, total.mean().item()


@pytest.mark.parametrize("name", ["factor_update_steps", "inv_update_steps"])
def test_an_interval_that_one_rank_changes_is_named_where_all_exchange(name):
    """That rank entered an exchange alone, which met the others' next collective."""
    for text, step, ones in run(2, changes_an_interval, name, [1]):
        assert f"Invalid {name}: 1 on rank 1" in text
        assert step == 4 and ones == 2


def test_an_interval_that_all_ranks_change_acts_where_all_exchange():
    assert run(2, changes_an_interval, "inv_update_steps", [0, 1]) == [("", 4, 2.0)] * 2


def raises(*args: Any) -> None:
    raise MemoryError("planted")


def fails_alone(what: str) -> tuple[str, int]:
    model = network()
    opt = KFACSGD(model, lr=0.1, **ANEW)
    state: dict[str, Any] = {}
    for i in range(4):
        opt.zero_grad()
        backward(model, i)
        odd = i == 2 and torch.distributed.get_rank() == 1
        if what == "load" and odd:
            opt.load_state_dict(state)
        broken = mock.patch.object(torch.optim.SGD, "step", raises)
        try:
            with broken if what == "base" and odd else nullcontext():
                opt.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}", i
        state = copy.deepcopy(opt.state_dict())
    return "", 4


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_error_of_the_bases_step_is_told_to_all_ranks():
    """The others lost a connection, and did not know why."""
    first, second = run(2, fails_alone, "base")
    text = (
        "RuntimeError: K-FAC stops on all ranks, since the base optimizer's step failed on rank 1"
    )
    assert first == (f"{text}: MemoryError: planted", 3)
    assert second == ("MemoryError: planted", 3)


def test_a_load_on_one_rank_alone_is_named():
    """It ended in gloo's abort of a process."""
    first, second = run(2, fails_alone, "load")
    assert first[0].startswith("RuntimeError: K-FAC stops on all ranks, since loading failed on")
    assert "call load_state_dict() on all of them" in first[0] and first[1] == second[1] == 2


def drifts(apart: bool) -> tuple[str, int]:
    """From step 4 on rank 1 goes by a gradient of its own in one parameter."""
    model = network()
    options = {"factor_update_steps": 2, "staggered": False}
    opt = KFACSGD(model, lr=0.1, verify_every=3, **options)
    for i in range(20):
        opt.zero_grad()
        backward(model, i)
        if apart and i >= 4 and torch.distributed.get_rank() == 1:
            assert model[2].bias.grad is not None
            model[2].bias.grad += 1e-6
        try:
            opt.step()
        except RuntimeError as error:
            return str(error), i
    return "", 20


def test_weights_that_drift_apart_are_named():
    """After the first step nobody compared them. Those of step 6 meet the next exchange."""
    assert run(2, drifts, False) == [("", 20)] * 2
    for text, step in run(2, drifts, True):
        assert text.startswith(
            "parameter '2.weight' in step 6 on ranks [1] is not the one of rank 0"
        )
        assert "average gradients" in text and step == 6


# ---- numbers that overflow, or that rounding loses ----


@pytest.mark.parametrize(
    ("optimizer", "method", "spike"),
    [
        *itertools.product([KFACSGD, KFACAdam], ["eigen"], [1e20, 1e28]),
        *itertools.product([KFACSGD, KFACAdam], ["polar"], [1e20, 1e28]),
    ],
)
def test_a_spike_of_the_loss_leaves_weights_finite(optimizer, method, spike):
    """The clip's sum overflowed at once, and Adam's second moment where its basis turned later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = optimizer(model, lr=0.01, compute_method=method)
    for i in range(12):
        x = torch.randn(8, 20)
        x[:, :5] = 0
        opt.zero_grad()
        (model(x).square().mean() * (spike if i == 3 else 1)).backward()
        opt.step()
    assert all(p.abs().max() < 2 for p in model.parameters())


def averaged(decay: float, dtype: torch.dtype | None) -> Tensor:
    """Mean eigenvalues of A and G, 600 steps after inputs have become larger."""
    torch.manual_seed(0)
    model = nn.Linear(48, 48)
    options = {"factor_decay": decay, "factor_dtype": dtype, "factor_update_steps": 1}
    opt = KFACSGD(model, lr=1e-9, inv_update_steps=1000, **EIGEN, **options)
    for i in range(620):
        x = torch.randn(512, 48) * (1 if i < 20 else 1.5)
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    both = opt.preconditioner.factors("")
    assert all(torch.equal(f, f.mT) for f in both)
    return torch.stack([f[0].diagonal().float().mean() for f in both])


@pytest.mark.parametrize("decay", [0.95, 0.99, 0.999])
def test_averages_in_half_precision_do_not_stall(decay):
    """A change below half a unit of the last place was rounded away, in every step."""
    wanted = averaged(decay, None)
    for dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(averaged(decay, dtype), wanted, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_rounding_follows_from_step_and_factor(method, dtype):
    """A resumed run rounds alike, and torch's own generator is left alone."""
    models = network(), network()
    first, second = (KFACSGD(m, lr=0.1, factor_dtype=dtype, **METHODS[method]) for m in models)
    train(models[0], first, range(3))
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, opt in zip(models, (first, second), strict=True):
        before = torch.get_rng_state()
        train(model, opt, range(3, 6))
        assert torch.equal(before, torch.get_rng_state())
    assert_same(models[1], models[0])
    numbers = torch.full((1, 90, 90), 3e-6)  # below float16's least normal number
    kept = rounding.rounded(numbers.clone(), dtype, 1)
    assert len(kept.unique()) == 2 and abs(kept.double().mean() / 3e-6 - 1) < 1e-3


@pytest.mark.parametrize("by_schedule", [False, True])
def test_a_damping_that_rounding_drowns_is_refused_in_later_steps_too(by_schedule):
    model = network(dtype=torch.float32)
    schedule = lambda step: 1e-3 if step < 2 else 1e-13  # noqa: E731
    opt = KFACSGD(model, lr=0.1, damping=schedule if by_schedule else 1e-3)
    train(model, opt, range(2))
    if not by_schedule:
        opt.param_groups[0]["damping"] = 1e-13
    with pytest.raises(ValueError, match=r"Invalid damping: 1e-13; with torch.float32 arithmetic"):
        train(model, opt, range(2, 3))
