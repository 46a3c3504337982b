"""The ranks that other tests use: what they return, how they fail, and that none stays behind."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import ranks
from tests.support.ranks import RankError, fresh, run, start_quickly  # noqa: F401


def place(*args: Any) -> tuple[Any, ...]:
    return dist.get_rank(), dist.get_world_size(), *args


def process() -> int:
    return os.getpid()


def summed(x: Tensor) -> Tensor:
    x = x * (1 + dist.get_rank())
    dist.all_reduce(x)
    return x


def exchanged(dtype: torch.dtype) -> Tensor:
    """Rank ``r`` sends ``r + s`` times its number to rank ``s``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [rank + other for other in range(world)]
    sent = torch.full((sum(sizes),), rank, dtype=dtype)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, sizes, sizes, async_op=True).wait()
    return received


def drawn() -> Tensor:
    return torch.rand(3)


def changed(x: Tensor) -> Tensor:
    x += 1
    return x


def shared() -> tuple[Tensor, Tensor]:
    x = torch.zeros(4)
    return x, x[1:3]


def fails(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"wrong on {rank}")
    dist.barrier()
    return rank


def fails_everywhere() -> None:
    dist.barrier()  # the second error has little time after the first
    raise ValueError(f"rank {dist.get_rank()}")


def fails_alone() -> int:
    if dist.get_rank() == 1:
        raise KeyError("one")
    return dist.get_rank()


def dies(rank: int, code: int | None) -> None:
    if dist.get_rank() == rank and code is None:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == rank:
        os._exit(code or 0)
    dist.barrier()


def stuck(folder: Path | None = None) -> None:
    """Rank 0 waits for a rank that never comes; both leave a note of where they are."""
    if folder is not None:
        (folder / str(dist.get_rank())).touch()
    if dist.get_rank() == 0:
        dist.barrier()
    print("stuck", flush=True)
    time.sleep(600)


def fails_beside(folder: Path) -> None:
    if dist.get_rank() == 1:
        (folder / "1").touch()
        raise ValueError("wrong on 1")
    dist.barrier()


@contextmanager
def time_is_up_once(happened: Callable[[int], bool]) -> Iterator[None]:
    """Wait for the answers of so many ranks until this has happened, not for a time."""
    real = ranks.wait

    def wait(pipes: list[Any], left: float) -> list[Any]:
        while not (ready := real(pipes, 0.1)) and not happened(len(pipes)):
            pass
        return ready

    with mock.patch.object(ranks, "wait", wait):
        yield


def unpicklable() -> Any:
    return lambda: None


def unpicklable_everywhere() -> Any:
    dist.barrier()
    return unpicklable()


def leaves() -> bool:
    dist.destroy_process_group()
    return dist.is_initialized()


def threads() -> int:
    return torch.get_num_threads()


def failing(*args: Any, **options: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        run(*args, **options)
    return caught.value


def assert_works(world: int) -> None:
    assert run(world, place) == [(rank, world) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_in_the_order_of_ranks(world):
    given = {"a": [1, None]}
    assert run(world, place, given, "b") == [(rank, world, given, "b") for rank in range(world)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives(world):
    x = torch.arange(3.0)
    for result in run(world, summed, x):
        assert torch.equal(result, x * world * (world + 1) / 2)
    for dtype in torch.float64, torch.uint8:
        for rank, result in enumerate(run(world, exchanged, dtype)):
            expected = [other for other in range(world) for _ in range(rank + other)]
            assert result.dtype == dtype
            assert result.tolist() == expected


def test_many_small_runs_in_the_same_processes():
    processes = run(2, process)
    assert len({os.getpid(), *processes}) == 3
    for i in range(200):
        assert run(2, place, i) == [(0, 2, i), (1, 2, i)]
    assert run(2, process) == processes
    assert fresh(2, process) != processes


def test_every_job_draws_the_same_numbers_on_one_thread():
    first, second = run(2, drawn), run(2, drawn)
    assert all(torch.equal(x, first[0]) for x in first + second)
    assert run(2, threads) == [1, 1]


def test_tensors_pass_by_value():
    x = torch.zeros(1000)
    results = run(2, changed, x)
    assert x.sum() == 0
    results[0] += 1
    assert results[0].mean() == 2
    assert results[1].mean() == 1
    for whole, part in run(2, shared):
        part += 1
        assert whole.tolist() == [0, 1, 1, 0]


def test_an_error_is_told_with_its_rank_and_the_next_run_works():
    error = failing(3, fails, 1)
    assert error.errors == {1: "ValueError: wrong on 1"}
    for line in (
        "fails failed on 1 of 3 ranks",
        "rank 1 raised ValueError: wrong on 1",
        "rank 0 was still busy",
        'raise ValueError(f"wrong on {rank}")',
    ):
        assert line in str(error)
    assert_works(3)


def test_errors_of_all_ranks_are_told():
    assert failing(2, fails_everywhere).errors == {0: "ValueError: rank 0", 1: "ValueError: rank 1"}
    assert_works(2)


def test_a_result_that_cannot_be_pickled_is_an_error():
    errors = failing(2, unpicklable_everywhere).errors
    assert sorted(errors) == [0, 1]
    assert "pickle" in errors[0]


def test_arguments_that_cannot_be_pickled_end_no_rank():
    processes = run(2, process)
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        run(2, place, unpicklable())
    assert run(2, process) == processes


def test_expected_errors():
    processes = run(2, process)
    assert run(2, place, expect_errors=True) == [((0, 2), None), ((1, 2), None)]
    assert run(2, process) == processes
    outcomes = run(2, fails_alone, expect_errors=True)
    assert outcomes == [(0, None), (None, "KeyError: 'one'")]
    assert [outcome.error for outcome in outcomes] == [None, "KeyError: 'one'"]
    assert not set(run(2, process)) & set(processes)


@pytest.mark.parametrize("code", [None, 3])
def test_a_dead_rank_is_told(code):
    outcomes = fresh(2, dies, 1, code, expect_errors=True)
    assert outcomes[1].error == f"died (exit code {-9 if code is None else code})"
    assert re.search("Connection (closed|reset) by peer", outcomes[0].error)
    error = failing(2, dies, 1, code)
    assert error.errors[1] == outcomes[1].error
    assert f"rank 1 {outcomes[1].error}" in str(error)
    assert_works(2)


def test_a_stuck_rank_is_told(tmp_path):
    with time_is_up_once(lambda missing: len(list(tmp_path.iterdir())) == 2):
        error = failing(2, stuck, tmp_path, timeout=300)
    assert error.errors == dict.fromkeys([0, 1], "has not answered in 300 s")
    assert "rank 0 has not answered in 300 s" in str(error)
    assert " in stuck\n" in str(error)
    assert_works(2)


def test_a_rank_that_waits_for_one_that_failed_is_told(tmp_path):
    with time_is_up_once(lambda missing: missing == 1 and (tmp_path / "1").exists()):
        outcomes = fresh(2, fails_beside, tmp_path, timeout=300, expect_errors=True)
    assert outcomes == [(None, "has not answered in 300 s"), (None, "ValueError: wrong on 1")]


def test_fresh_ranks_may_leave_their_group():
    assert fresh(2, leaves) == [False, False]
    assert_works(2)


def python(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    code = f"from tests.comm.test_ranks import *; start_quickly(); {code}"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


# The ranks write to the same pipes, which end when the last process that has them does.


@pytest.mark.parametrize("busy", [False, True])
def test_no_process_outlives_killed_tests(busy):
    idle = "run(2, place); print('idle', flush=True); time.sleep(600)"
    tests = python("run(2, stuck)" if busy else idle)
    assert tests.stdout is not None
    assert tests.stdout.readline() == ("stuck\n" if busy else "idle\n")
    tests.kill()
    out, err = tests.communicate(timeout=120)
    assert (out, err) == ("", "")


def test_ranks_end_with_the_tests_and_write_nothing():
    tests = python("print(run(2, fails, 2))")
    out, err = tests.communicate(timeout=120)
    assert (out, err) == ("[2, 2]\n", "")
    assert tests.returncode == 0
