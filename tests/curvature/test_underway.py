"""Decompositions that are begun in one step and in use a fixed number of steps later."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import multiprocessing
import os
import pickle
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent import futures
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.curvature import background
from kaisa_optim.curvature import refresh as second_order
from kaisa_optim.linalg.eigen import eigendecompose
from tests.core.test_rank_checkpoints import average, learn, net, weights
from tests.core.test_rank_checkpoints import rank as here
from tests.support.ranks import run
from tests.support.training import assert_near, assert_same

LAG, EVERY = 2, 4
OPTIONS: dict[str, Any] = {
    "factor_update_steps": 1,
    "inv_update_steps": EVERY,
    "refresh_lag": LAG,
    "kl_clip": None,
}
MAKERS: dict[str, Any] = {
    "sgd": lambda m, **o: KFACSGD(m, lr=0.01, momentum=0.9, **{**OPTIONS, **o}),
    "all at once": lambda m, **o: KFACSGD(
        m, lr=0.05, damping=0.01, staggered=False, **{**OPTIONS, **o}
    ),
    "corrected": lambda m, **o: KFACSGD(
        m, lr=0.05, eigenvalue_correction="gradients", **{**OPTIONS, **o}
    ),
    "stored products": lambda m, **o: KFACSGD(
        m, lr=0.05, damping=0.01, compute_eigenvalue_outer_product=True, **{**OPTIONS, **o}
    ),
    "truncated": lambda m, **o: KFACSGD(m, lr=0.01, truncation=0.5, **{**OPTIONS, **o}),
    "adam": lambda m, **o: KFACAdam(
        m, lr=0.01, eps=1e-2, moments="eigenbasis", basis_tolerance=0, **{**OPTIONS, **o}
    ),
    "followed": lambda m, **o: KFACAdam(
        m, lr=0.01, eps=1e-2, moments="eigenbasis", basis_tolerance=1e-3, **{**OPTIONS, **o}
    ),
}
every_maker = pytest.mark.parametrize("name", MAKERS)


def pair(name: str = "sgd", **options: Any) -> tuple[nn.Sequential, Any]:
    model = net()
    return model, MAKERS[name](model, **options)


def under_way(opt: Any) -> dict[Any, int]:
    return opt.preconditioner.second_order.under_way.begun


def vectors(opt: Any) -> dict[str, Tensor]:
    found = {}
    for name, layer in opt.preconditioner.layers.items():
        for key, view in opt.preconditioner.layout.views(layer):
            if key.endswith("vectors"):
                found[f"{name} {key[0]}"] = view.clone()
    return found


def test_results_are_those_of_the_factors_of_before():
    model, opt = pair("all at once")
    averages: list[dict[str, Tensor]] = []
    for step in range(13):
        learn(model, opt, range(step, step + 1))
        kfac = opt.preconditioner
        both = {name: kfac.factors(name) for name in kfac.layers}
        averages.append(
            {f"{n} {s}": f[i].clone() for n, f in both.items() for i, s in enumerate("ag")}
        )
        # At 0 at once, at 4 for 6, at 8 for 10, at 12 for 14.
        source = 0 if step < EVERY + LAG else (step - LAG) // EVERY * EVERY
        for key, found in vectors(opt).items():
            assert_near(found, eigendecompose(averages[source][key])[1])
    assert set(under_way(opt).values()) == {12}


@every_maker
def test_how_long_they_take_changes_nothing(name, monkeypatch):
    plain, opt = pair(name)
    learn(plain, opt, range(14))
    decompose = second_order._decompose_beside

    def slowly(*tensors: Tensor, **how: bool) -> tuple[Tensor, ...]:
        time.sleep(0.03 * random.random())
        return decompose(*tensors, **how)

    monkeypatch.setattr(second_order, "_decompose_beside", slowly)
    model, opt = pair(name)
    learn(model, opt, range(14))
    assert_same(weights(model), weights(plain))
    at_once = weights(trained_at_once(name, 14))
    assert any(p.ne(q).any() for p, q in zip(weights(model), at_once, strict=True))


def trained_at_once(name: str, steps: int) -> nn.Module:
    model, opt = pair(name, refresh_lag=0)
    learn(model, opt, range(steps))
    return model


def test_steps_go_on_meanwhile(monkeypatch):
    """Nothing is found before the last step that can do without."""
    may_end = threading.Event()
    decompose = second_order._decompose_beside

    def waiting(*tensors: Tensor, **how: bool) -> tuple[Tensor, ...]:
        if not may_end.wait(30):
            raise TimeoutError("a step waited for what is not yet due")
        return decompose(*tensors, **how)

    model, opt = pair("all at once")
    learn(model, opt, range(EVERY))
    monkeypatch.setattr(second_order, "_decompose_beside", waiting)
    learn(model, opt, range(EVERY, EVERY + LAG))
    assert under_way(opt)
    may_end.set()
    learn(model, opt, range(EVERY + LAG, EVERY + LAG + 1))
    assert not under_way(opt)


def held_up(may_end: threading.Event) -> Any:
    """Decompositions wait for an event."""
    decompose = second_order._decompose_beside

    def waiting(*tensors: Tensor, **how: bool) -> tuple[Tensor, ...]:
        assert may_end.wait(60)
        return decompose(*tensors, **how)

    return mock.patch.object(second_order, "_decompose_beside", waiting)


def test_each_optimizer_has_a_thread_of_its_own():
    """One does not wait for another's."""
    may_end = threading.Event()
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY))
    with held_up(may_end):
        learn(model, opt, range(EVERY, EVERY + 1))
    plain, other = pair("all at once")
    learn(plain, other, range(3 * EVERY))
    may_end.set()
    learn(model, opt, range(EVERY + 1, 3 * EVERY))
    assert_same(weights(model), weights(plain))


class FakeStream:
    """Of a GPU that there is not: it notes what is asked of it."""

    def __init__(self, device: Any = None) -> None:
        self.asked: list[Any] = []

    def record_event(self) -> str:
        self.asked.append("record")
        return "event"

    def wait_event(self, event: str) -> None:
        self.asked.append(event)

    def synchronize(self) -> None:
        self.asked.append("synchronize")


def test_the_thread_takes_as_many_threads_as_torch_is_told():
    """With another number decompositions round otherwise, and a restart has a new thread."""
    rows = torch.randn(400, 145)
    factor, before = (rows.mT @ rows / 400)[None], torch.get_num_threads()
    try:
        for count in (2, 1, 3):
            torch.set_num_threads(count)
            for thread in background.Background(), background.Background():
                job = thread.start(lambda: eigendecompose(factor), factor.device)
                expected = eigendecompose(factor)
                assert_same(job.results(), expected)
        thread = background.Background()
        for count in (1, 2):
            torch.set_num_threads(count)
            job = thread.start(lambda: (torch.tensor(torch.get_num_threads()),), factor.device)
            assert job.results()[0] == count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpus_host_waits_for_the_threads_own_stream_alone(fails, monkeypatch):
    main, made, gpus = FakeStream(), [], []

    def new(device: Any) -> FakeStream:
        made.append(FakeStream())
        return made[-1]

    def current(device: Any) -> FakeStream:
        return main

    monkeypatch.setattr(torch.cuda, "Stream", new)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: gpus.append((gpu, on_its_thread())))

    def on_its_thread() -> bool:
        return threading.current_thread() is not threading.main_thread()

    def work() -> tuple[Tensor, ...]:
        made[0].asked.append("work")
        return fail() if fails else (torch.ones(2),)

    thread = background.Background()
    for _ in range(2):
        job = thread.start(work, torch.device("cuda", 1))
        with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
            job.results()
    assert [stream.asked for stream in made] == [2 * ["event", "work", "synchronize"]]
    assert main.asked == ["record", "record"]
    assert gpus == 2 * [(torch.device("cuda", 1), True)]  # where a new thread is not by itself


def test_a_thread_ends_with_its_optimizer():
    """After what it is at; what has not begun is left."""
    may_end = threading.Event()
    threads = set(threading.enumerate())
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY))
    with held_up(may_end):
        learn(model, opt, range(EVERY, EVERY + 1))
    (thread,) = set(threading.enumerate()) - threads
    under_way = opt.preconditioner.second_order.under_way
    work = {job._future for job, _ in under_way._jobs.values()}
    while not any(future.running() for future in work):
        time.sleep(0.01)
    del opt, under_way
    gc.collect()
    may_end.set()
    thread.join(60)
    assert not thread.is_alive()
    assert [future.cancelled() for future in work].count(False) == 1 < len(work)


def push(model: nn.Module, opt: Any, steps: range) -> list[Tensor]:
    """Steps without a backward pass, which torch refuses in a fork."""
    for i in steps:
        generator = torch.Generator().manual_seed(i)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        opt.step()
    return weights(model)


def in_a_fork(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What it returns there; a fork that does not come to an end is killed."""
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)
        file = io.BytesIO()
        torch.save(work(), file)
        sending.send_bytes(file.getvalue())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        assert receiving.poll(60)
        found: list[Tensor] = torch.load(io.BytesIO(receiving.recv_bytes()))
    finally:
        process.kill()
        process.join()
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("busy", [True, False])
def test_a_fork_goes_on_without_the_thread(busy):
    """Also where that was at work."""
    may_end = threading.Event()
    model, opt = pair("all at once", factor_update_steps=100)
    learn(model, opt, range(EVERY))
    with held_up(may_end) if busy else contextlib.nullcontext():
        push(model, opt, range(EVERY, EVERY + 1))
    if not busy:
        end_of_jobs(opt)

    def go_on() -> list[Tensor]:
        may_end.set()
        return push(model, opt, range(EVERY + 1, 3 * EVERY))

    assert_same(in_a_fork(go_on), go_on())


def test_what_begins_again_is_left_out_while_it_is_under_way():
    """An early refresh in between would only replace it."""
    model, opt = pair("all at once", early_refreshes=(5,))
    learn(model, opt, range(6))
    assert set(under_way(opt).values()) == {4}
    learn(model, opt, range(6, 7))
    assert not under_way(opt)


def test_first_decompositions_do_not_wait():
    model, opt = pair()
    learn(model, opt, range(1))
    assert not under_way(opt) and opt.preconditioner.second_order.ready
    for found in vectors(opt).values():
        eye = torch.eye(found.shape[-1], dtype=found.dtype).expand_as(found)
        torch.testing.assert_close(found.mT @ found, eye)


def test_bases_that_do_not_fit_are_decomposed_beside():
    model, opt = pair("followed", early_refreshes=())
    followed, begun = 0, 0
    for step in range(12):
        learn(model, opt, range(step, step + 1))
        second = opt.preconditioner.second_order
        followed += sum(not anew for anew in second.tracking.plan.values())
        begun += len(second.under_way.starting)
        # Nothing is decomposed in a step of its own but at first.
        assert step == 0 or second.under_way.landing.issuperset(
            {key for key, anew in second.tracking.plan.items() if anew}
        )
    assert followed and begun


def test_copies_are_pending():
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY))
    assert opt.preconditioner.memory_usage()["pending"] == 0
    learn(model, opt, range(EVERY, EVERY + 1))
    # Each with a count of four bytes; the table's A is diagonal.
    layers = opt.preconditioner.layers.values()
    wanted = sum(8 * (9 if layer.diagonal_a else layer.a_dim**2) + 4 for layer in layers)
    wanted += sum(8 * layer.g_dim**2 + 4 for layer in layers)
    assert opt.preconditioner.memory_usage()["pending"] == wanted
    learn(model, opt, range(EVERY + 1, EVERY + 1 + LAG))
    assert opt.preconditioner.memory_usage()["pending"] == 0


# ---- what goes wrong ----


def test_a_failure_keeps_the_older_state(monkeypatch):
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY))
    before = vectors(opt)
    monkeypatch.setattr(second_order, "_attempts", lambda *given: iter(()))

    def fail(*tensors: Any) -> Any:
        raise second_order.LinAlgError("no convergence")

    monkeypatch.setattr(second_order, "_decompose", fail)
    learn(model, opt, range(EVERY, EVERY + LAG))
    said = "decomposition of layer '1' failed, 1 in a row; its older state"
    with pytest.warns(UserWarning, match=said):
        learn(model, opt, range(EVERY + LAG, EVERY + LAG + 1))
    assert_same(vectors(opt), before)


def test_sums_that_were_left_out_are_named():
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY - 1))
    kept = copy.deepcopy(model.state_dict())
    handle = model[1].register_forward_hook(lambda m, i, out: out * math.nan)
    learn(model, opt, range(EVERY - 1, EVERY))
    handle.remove()
    for p in model.parameters():
        opt.state[p]["momentum_buffer"] = None
    model.load_state_dict(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(model, opt, range(EVERY, EVERY + LAG))
    with pytest.warns(UserWarning, match="not finite have been left out for '0', '1', '3', '4'"):
        learn(model, opt, range(EVERY + LAG, EVERY + LAG + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(model, opt, range(EVERY + LAG + 1, 3 * EVERY))


def test_a_layer_that_starts_anew_takes_nothing_of_before():
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY + 1))
    layer = opt.preconditioner.layers["1"]
    model[1].bias.requires_grad_(False)
    model[1].bias.grad = None
    for _ in range(LAG):
        opt.zero_grad()
        model(torch.randint(9, (8,))).square().mean().backward()
        opt.step()
        assert layer not in {one for one, _ in under_way(opt)}
    assert layer.a_dim == 5  # and so is its basis
    assert opt.preconditioner.layout.factors[layer, "a"]["vectors"].shape == (1, 5, 5)


def test_a_layer_that_has_lost_its_state_does_not_wait():
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY + 1))
    second = opt.preconditioner.second_order
    layer = opt.preconditioner.layers["3"]
    second.ready.discard(layer)
    learn(model, opt, range(EVERY + 1, EVERY + 2))
    assert layer in second.ready and {one.name for one, _ in under_way(opt)} == {"0", "1", "4"}
    now = opt.preconditioner.factors("3")[0]
    assert_near(vectors(opt)["3 a"], eigendecompose(now)[1])
    learn(model, opt, range(EVERY + 2, EVERY + 2 + LAG))
    assert not under_way(opt)


# ---- steps that raise ----


def fail(*tensors: Any, **how: Any) -> Any:
    raise MemoryError("no room")


def averages_of(opt: Any) -> dict[str, Tensor]:
    kfac = opt.preconditioner
    both = {name: kfac.factors(name) for name in kfac.layers}
    return {f"{n} {s}": f[i].clone() for n, f in both.items() for i, s in enumerate("ag")}


def test_what_has_failed_begins_again_in_the_next_step():
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY))
    with mock.patch.object(second_order, "_decompose_beside", fail):
        learn(model, opt, range(EVERY, EVERY + LAG))
        older = vectors(opt)
        with pytest.raises(MemoryError, match="no room"):
            learn(model, opt, range(EVERY + LAG, EVERY + LAG + 1))
    assert not under_way(opt) and not opt.preconditioner.second_order.under_way.bytes()
    assert_same(vectors(opt), older)
    learn(model, opt, range(EVERY + LAG, EVERY + LAG + 1))
    begun, wanted = set(under_way(opt).values()), averages_of(opt)
    assert begun == {EVERY + LAG}
    # Its step is the interval's next turn, too, whose own has to wait for the turn after it.
    learn(model, opt, range(EVERY + LAG + 1, EVERY + 2 * LAG))
    assert_same(vectors(opt), older)
    learn(model, opt, range(EVERY + 2 * LAG, EVERY + 2 * LAG + 1))
    assert not under_way(opt)
    for key, found in vectors(opt).items():
        turned = found.mT @ eigendecompose(wanted[key])[1]  # by signs, which are anyone's
        assert_near(turned.abs(), torch.eye(turned.shape[-1]).expand_as(turned).double())


@pytest.mark.parametrize("at", [EVERY, EVERY + LAG], ids=["beginning", "landing"])
@every_maker
def test_a_step_that_is_broken_off_can_be_taken_again(name, at, monkeypatch):
    model, opt = pair(name)
    learn(model, opt, range(at))
    with monkeypatch.context() as patched:
        patched.setattr(opt.preconditioner.statistics, "update", fail)
        with pytest.raises(MemoryError):
            learn(model, opt, range(at, at + 1))
    learn(model, opt, range(at, at + LAG))
    assert set(under_way(opt).values()) <= set(range(at, at + LAG))
    learn(model, opt, range(at + LAG, 4 * EVERY))
    if name == "all at once" and at == EVERY:  # nothing was lost but time
        straight, other = pair(name)
        learn(straight, other, range(4 * EVERY))
        assert_same(weights(model), weights(straight))


def going_on(rank: int) -> tuple[list[str], list[Tensor]]:
    model, opt = pair("all at once", assignment="opt")
    learn(model, opt, range(EVERY))
    broken = mock.patch.object(second_order, "_decompose_beside", fail)
    with broken if dist.get_rank() == rank else contextlib.nullcontext():
        learn(model, opt, range(EVERY, EVERY + 1))
        end_of_jobs(opt)
    learn(model, opt, range(EVERY + 1, EVERY + LAG))
    with pytest.raises((MemoryError, RuntimeError), match="no room"):
        learn(model, opt, range(EVERY + LAG, EVERY + LAG + 1))
    counts = []
    for step in range(EVERY + LAG, 3 * EVERY):
        learn(model, opt, range(step, step + 1))
        counts.append(len(under_way(opt)))
    return counts, [*weights(model), *vectors(opt).values()]


def following_on(rank: int) -> list[Tensor]:
    model, opt = pair("followed", assignment="opt")
    learn(model, opt, range(3 * EVERY))
    broken = mock.patch.object(second_order, "_decompose_beside", fail)
    raised = 0
    for step in range(3 * EVERY, 6 * EVERY):
        on = dist.get_rank() == rank and step < 4 * EVERY
        with broken if on else contextlib.nullcontext():
            try:
                learn(model, opt, range(step, step + 1))
            except (MemoryError, RuntimeError):
                raised += 1
            end_of_jobs(opt)
    assert raised
    return weights(model)


def test_ranks_follow_alike_after_an_error_of_one():
    """What its owner had renewed when the step was broken off, no other rank has."""
    first, second = run(2, following_on, 1)
    assert_same(first, second)


@pytest.mark.parametrize("raises", [False, True])
def test_what_was_left_out_is_said_even_if_its_decomposition_raises(raises):
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY - 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.zero_grad()
        model(torch.randint(9, (8,))).mul(math.nan).mean().backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        opt.step()
        broken = mock.patch.object(second_order, "_decompose_beside", fail)
        with broken if raises else contextlib.nullcontext():
            learn(model, opt, range(EVERY, EVERY + LAG))
            end_of_jobs(opt)
        if raises:
            with pytest.raises(MemoryError):
                learn(model, opt, range(EVERY + LAG, EVERY + LAG + 1))
        learn(model, opt, range(EVERY + LAG + 1, 2 * EVERY + LAG + 1))
    said = [str(w.message) for w in caught if "left out for" in str(w.message)]
    assert len(said) == 1 and "not finite" in said[0]


def test_a_step_that_raises_leaves_bases_as_moments_are_in_them():
    model, opt = pair("followed")
    learn(model, opt, range(3 * EVERY))
    kfac = opt.preconditioner
    before = vectors(opt)
    with mock.patch.object(kfac, "_settle", fail), pytest.raises(MemoryError):
        learn(model, opt, range(3 * EVERY, 4 * EVERY))
    assert_same(vectors(opt), before)
    learn(model, opt, range(4 * EVERY, 4 * EVERY + 1 + LAG))
    after = vectors(opt)
    assert any(after[name].ne(vector).any() for name, vector in before.items())


def test_ranks_go_on_alike_after_an_error_of_one():
    """What had landed on others is not in use on them alone."""
    first, second = run(2, going_on, 1)
    assert first[0] == second[0] and max(first[0]) == 8
    assert_same(first[1], second[1])


def freeze(model: Any) -> None:
    model[1].bias.requires_grad_(False)
    model[1].bias.grad = None


def step_without_bias(model: nn.Module, opt: Any) -> None:
    opt.zero_grad()
    model(torch.randint(9, (8,))).square().mean().backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad = average(p.grad)
    opt.step()


def dropped() -> tuple[int, list[str]]:
    """Errors of the steps after the only layer of which something fails was dropped, at its owner's
    rank."""
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY))
    decompose = second_order._decompose_beside

    def failing(averages: Tensor, rejected: Tensor, **how: bool) -> tuple[Tensor, ...]:
        if averages.shape[-1] == 6 and averages[0, -1, -1] == 1:  # the layer's A, with its bias
            raise MemoryError("no room")
        return decompose(averages, rejected, **how)

    alone = mock.patch.object(second_order, "_AT_ONCE_ON_CPUS", 1)
    with alone, mock.patch.object(second_order, "_decompose_beside", failing):
        learn(model, opt, range(EVERY, EVERY + 1))
        end_of_jobs(opt)
    freeze(model)
    kfac = opt.preconditioner
    return kfac.owner(kfac.layers["1"], "a"), errors_of(
        lambda step: step_without_bias(model, opt), range(LAG + 2)
    )


def errors_of(step: Callable[[int], object], steps: range) -> list[str]:
    errors = []
    for i in steps:
        try:
            step(i)
            errors.append("")
        except (MemoryError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize("world", [1, 2])
def test_an_error_of_what_has_been_dropped_comes_in_its_step(world):
    for rank, (owner, errors) in enumerate([dropped()] if world == 1 else run(world, dropped)):
        assert [bool(error) for error in errors] == [False] * (LAG - 1) + [True, False, False]
        assert "MemoryError: no room" in errors[LAG - 1]
        assert (f"failed on rank {owner}" in errors[LAG - 1]) == (rank != owner)


def unable(rank: int) -> list[str]:
    """Errors of the steps in which one rank can't begin."""
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY))
    starts = mock.patch.object(opt.preconditioner.second_order.under_way._background, "start", fail)
    with starts if here() == rank else contextlib.nullcontext():
        errors = errors_of(
            lambda step: learn(model, opt, range(step, step + 1)),
            range(EVERY, EVERY + LAG + 1),
        )
    learn(model, opt, range(EVERY + LAG, 3 * EVERY))
    return errors


def test_what_can_not_begin_on_one_rank_is_told_to_all():
    for rank, errors in enumerate(run(2, unable, 1)):
        assert errors[:LAG] == [""] * LAG
        assert "MemoryError: no room" in errors[LAG] and ("on rank 1" in errors[LAG]) == (rank == 0)
    assert unable(0)[0] == "MemoryError: no room"


@pytest.mark.parametrize("ending", ["load", "end"])
def test_an_error_that_nobody_waits_for_is_logged(ending, caplog):
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY))
    with mock.patch.object(second_order, "_decompose_beside", fail):
        state = copy.deepcopy(opt.state_dict())
        learn(model, opt, range(EVERY, EVERY + 1))
        count = end_of_jobs(opt)
    assert count and not caplog.records
    if ending == "load":
        opt.load_state_dict(state)
    else:
        del opt
        gc.collect()
    told = [r for r in caplog.records if "nobody has asked for it" in r.getMessage()]
    assert len(told) == count
    assert all(r.exc_info and r.exc_info[0] is MemoryError for r in told)


# ---- checkpoints ----


def saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@every_maker
@pytest.mark.parametrize("stop", range(EVERY, EVERY + LAG + 2))
def test_a_run_goes_on_bit_for_bit(name, stop):
    model, opt = pair(name)
    learn(model, opt, range(stop))
    if name == "all at once":
        assert bool(under_way(opt)) == (stop in (EVERY + 1, EVERY + 2))
    other = net(seed=1)
    other.load_state_dict(model.state_dict())
    again = MAKERS[name](other)
    again.load_state_dict(saved(opt.state_dict()))
    twin, copied = pickle.loads(pickle.dumps((model, opt)))
    for one in (again, copied):
        assert sorted(under_way(one).values()) == sorted(under_way(opt).values())
    learn(model, opt, range(stop, 12))
    learn(other, again, range(stop, 12))
    learn(twin, copied, range(stop, 12))
    assert_same(weights(other), weights(model))
    assert_same(weights(twin), weights(model))
    assert_same(saved(again.state_dict()), saved(opt.state_dict()))


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))).double()


def regress(model: nn.Module, opt: Any, steps: range) -> None:
    """Alike on all ranks."""
    for i in steps:
        opt.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        model(x).square().mean().backward()
        opt.step()


def batches(stop: int, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What is decomposed together, of what is under way at a stop: at first, and after a load."""
    found: list[Any] = []
    decompose = second_order._decompose_beside

    def noted(averages: Tensor, rejected: Tensor, **how: bool) -> tuple[Tensor, ...]:
        found.append(averages)
        return decompose(averages, rejected, **how)

    with mock.patch.object(second_order, "_decompose_beside", noted):
        model = tower()
        opt = KFACSGD(model, lr=0.01, **OPTIONS, **options)
        regress(model, opt, range(stop - 1))
        end_of_jobs(opt)
        found.clear()
        regress(model, opt, range(stop - 1, stop))
        end_of_jobs(opt)
        first, state = found.copy(), copy.deepcopy(opt.state_dict())
        found.clear()
        again = KFACSGD(model, lr=0.01, **OPTIONS, **options)
        again.load_state_dict(state)
        end_of_jobs(again)
    return first, found


def end_of_jobs(opt: Any) -> int:
    """How many there were."""
    jobs = {job for job, _ in opt.preconditioner.second_order.under_way._jobs.values()}
    ended, others = futures.wait([job._future for job in jobs], 60)
    assert not others
    return len(ended)


@pytest.mark.parametrize("cap", [25.0, 1e-4])
def test_what_goes_together_goes_together_after_a_load(cap):
    """Sums that come in one after the other do not part it: a GPU's solvers take a batch at once,
    and their bits may depend on it."""
    options = {"staggered": False, "assignment": "layer-wise", "bucket_cap_mb": cap}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "state_dict")
        for first, again in run(2, batches, EVERY + 1, options):
            assert first and len(first) <= 2
            assert_same(again, first)


@pytest.mark.parametrize("interval", [1, LAG])
def test_a_copy_of_an_interval_that_has_become_as_short_as_the_lag(interval):
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY + 1))
    opt.preconditioner.inv_update_steps = interval
    learn(model, opt, range(EVERY + 1, EVERY + 2))
    twin, copied = copy.deepcopy((model, opt))
    again, unpickled = pickle.loads(pickle.dumps((model, opt)))
    assert copied.preconditioner.inv_update_steps == interval
    assert copied.preconditioner.options.refresh_lag == LAG
    learn(model, opt, range(EVERY + 2, 12))
    learn(twin, copied, range(EVERY + 2, 12))
    learn(again, unpickled, range(EVERY + 2, 12))
    assert_same(weights(twin), weights(model))
    assert_same(weights(again), weights(model))


def test_a_state_holds_copies_while_they_are_needed():
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY + 1))
    keys = {k for entry in opt.state_dict()["kfac_under_way"].values() for k in entry}
    assert keys == {f"kfac_{s}_begun_{name}" for s in "ag" for name in ("average", "rejected")}
    learn(model, opt, range(EVERY + 1, EVERY + 1 + LAG))
    assert opt.state_dict().keys() == {"state", "param_groups"}


COPY = "kfac_a_begun_average"
MISREAD: dict[str, tuple[Any, str]] = {
    "no dict": (lambda s: s.update(kfac_under_way=[3]), r"its kfac_under_way is \[3\]; it must be"),
    "no dict of tensors": (lambda s: s["kfac_under_way"].update({1: 3}), "its kfac_under_way is "),
    "no tensor": (lambda s: s["kfac_under_way"][1].update({COPY: "x"}), f"{COPY} is a str, no ten"),
    "a copy of another size": (
        lambda s: s["kfac_under_way"][1].update({COPY: torch.ones(1, 2, 2)}),
        rf"1: {COPY} is \(1, 2, 2\), the model needs \(1, 6, 6\)",
    ),
    "a short status": (
        lambda s: s["state"][1].update(kfac_status=torch.ones(3)),
        r"1: kfac_status is \(3,\), it must be \(8,\)",
    ),
    "many steps": (
        lambda s: s["state"][1].update(kfac_step=torch.ones(2)),
        r"1\.weight: kfac_step is \(2,\), it must be a number",
    ),
}


@pytest.mark.parametrize("case", MISREAD)
def test_what_is_misread_is_named(case):
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY + 1))
    state = copy.deepcopy(opt.state_dict())
    spoil, said = MISREAD[case]
    spoil(state)
    with pytest.raises(ValueError, match=f"(?s)Invalid state_dict: .*{said}"):
        opt.load_state_dict(state)
    learn(model, opt, range(EVERY + 1, 2 * EVERY))  # the refused load has changed nothing
    assert opt.preconditioner.steps == 2 * EVERY


def test_without_a_lag_what_was_under_way_is_done_at_once():
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY + 1))
    again = MAKERS["all at once"](model, refresh_lag=0)
    again.load_state_dict(saved(opt.state_dict()))
    learn(model, again, range(EVERY + 1, EVERY + 2))
    kfac = again.preconditioner
    for key, found in vectors(again).items():
        name, side = key.split()
        assert_near(found, eigendecompose(kfac.factors(name)["ag".index(side)])[1])


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("into", [0, EVERY + 1, EVERY + 1 + LAG])
def test_a_distributed_checkpoint_begins_once_more(into, tmp_path, group):
    """It leaves out the copies: the factors as saved are decomposed. It loads at any moment."""
    model, opt = pair("all at once")
    learn(model, opt, range(EVERY + 2))
    wanted = {name: opt.preconditioner.factors(name)[0].clone() for name in ("1", "3")}
    dcp.save({"o": get_optimizer_state_dict(model, opt)}, checkpoint_id=tmp_path)
    other, again = pair("all at once")
    learn(other, again, range(into))
    assert bool(under_way(again)) == (into == EVERY + 1)
    template = {"o": get_optimizer_state_dict(other, again)}
    dcp.load(template, checkpoint_id=tmp_path)
    with pytest.warns(UserWarning, match=r"being decomposed of '0' \(A\), '0' \(G\), '1'.* begins"):
        set_optimizer_state_dict(other, again, template["o"])
    assert set(under_way(again).values()) == {EVERY}
    learn(other, again, range(EVERY + 2, EVERY + 3))
    assert not under_way(again)
    found = vectors(again)
    for name, factor in wanted.items():
        assert_near(found[f"{name} a"], eigendecompose(factor)[1])


@pytest.mark.parametrize("saving", [0, LAG])
@pytest.mark.parametrize("moment", [EVERY, EVERY + 1])
def test_a_distributed_checkpoint_loads_with_another_lag(saving, moment, tmp_path, group):
    """In place, which leaves no room for other shapes or keys."""
    model, opt = pair("all at once", refresh_lag=saving)
    learn(model, opt, range(moment))
    dcp.save({"o": get_optimizer_state_dict(model, opt)}, checkpoint_id=tmp_path)
    other, again = pair("all at once", refresh_lag=LAG - saving)
    learn(other, again, range(EVERY + 1))
    template = {"o": get_optimizer_state_dict(other, again)}
    dcp.load(template, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, again, template["o"])
    assert again.preconditioner.steps == moment and not under_way(again)
    learn(other, again, range(moment, 2 * EVERY))


# ---- several ranks ----

SPREADS: list[tuple[int, dict[str, Any]]] = [
    (2, {"assignment": "layer-wise"}),
    (2, {"assignment": "opt"}),
    (4, {"grad_worker_fraction": 0.5, "colocate_factors": False}),
]


def trained(name: str, options: dict[str, Any], steps: int) -> tuple[list[Tensor], list[int]]:
    model, opt = pair(name, **options)
    counts = []
    for step in range(steps):
        learn(model, opt, range(step, step + 1))
        counts.append(len(under_way(opt)))
    return weights(model), counts


@pytest.mark.parametrize(("world", "options"), SPREADS)
@pytest.mark.parametrize("name", ["sgd", "adam", "followed"])
def test_ranks_are_as_one_process(world, options, name):
    alone, counts = trained(name, {"staggered": world}, 12)
    assert max(counts) > 0
    for found, theirs in run(world, trained, name, options, 12):
        assert theirs == counts
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def consolidated(steps: int, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]] | None:
    model, opt = pair("all at once", **options)
    learn(model, opt, range(steps))
    opt.consolidate_state_dict(to=0)
    return (weights(model), saved(opt.state_dict())) if dist.get_rank() == 0 else None


def resumed(
    state: tuple[list[Tensor], dict[str, Any]], steps: range, options: dict[str, Any]
) -> list[Tensor]:
    model, opt = pair("all at once", **options)
    with torch.no_grad():
        for p, value in zip(model.parameters(), state[0], strict=True):
            p.copy_(value)
    opt.load_state_dict(state[1])
    assert under_way(opt)
    learn(model, opt, steps)
    return weights(model)


@pytest.mark.parametrize(("world", "options"), SPREADS)
def test_a_consolidated_state_goes_on_at_any_number_of_ranks(world, options):
    middle = EVERY + 1
    wanted, _ = trained("all at once", {}, 12)
    state = run(world, consolidated, middle, options)[0]
    assert state is not None
    for found in (resumed(state, range(middle, 12), {}), *run(
        world, resumed, state, range(middle, 12), options
    )):  # fmt: skip
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def breaking(rank: int) -> None:
    model, opt = pair("all at once", assignment="layer-wise")
    learn(model, opt, range(EVERY))
    former = second_order._decompose_beside
    if dist.get_rank() == rank:

        def broken(*tensors: Tensor, **how: bool) -> tuple[Tensor, ...]:
            raise MemoryError("no room")

        second_order._decompose_beside = broken
    try:
        learn(model, opt, range(EVERY, EVERY + LAG + 1))
    finally:
        second_order._decompose_beside = former


def test_an_error_of_one_rank_reaches_all_in_the_step_of_the_result():
    found = [str(one.error) for one in run(2, breaking, 1, expect_errors=True)]
    assert "decomposing factors failed on rank 1: MemoryError: no room" in found[0]
    assert found[1] == "MemoryError: no room"
