"""The ranks that other tests use: how they fail, and that none stays behind."""

from __future__ import annotations

import os
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
import torch.distributed as dist

from tests.support import ranks
from tests.support.ranks import RankError, fresh, run, start_quickly  # noqa: F401


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("wrong")
    dist.barrier()


def dies(code: int | None) -> None:
    if dist.get_rank() == 1:
        if code is None:
            os.kill(os.getpid(), signal.SIGKILL)
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


@contextmanager
def time_is_up_once(happened: Callable[[], bool]) -> Iterator[None]:
    """Wait for the answers of ranks until this has happened, not for a time."""
    real = ranks.wait

    def wait(pipes: list[Any], left: float) -> list[Any]:
        while not (ready := real(pipes, 0.1)) and not happened():
            pass
        return ready

    with mock.patch.object(ranks, "wait", wait):
        yield


def failing(*args: Any, **options: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        run(*args, **options)
    return caught.value


def assert_works(world: int) -> None:
    assert run(world, place) == [(rank, world) for rank in range(world)]


def test_an_error_is_told_with_its_rank_and_the_next_run_works():
    error = failing(3, fails)
    assert error.errors == {1: "ValueError: wrong"}
    for line in (
        "fails failed on 1 of 3 ranks",
        "rank 1 raised ValueError: wrong",
        "rank 0 was still busy",
        'raise ValueError("wrong")',
    ):
        assert line in str(error)
    assert_works(3)


@pytest.mark.parametrize("code", [None, 3])
def test_a_dead_rank_is_told(code):
    outcomes = fresh(2, dies, code, expect_errors=True)
    assert outcomes[1].error == f"died (exit code {-9 if code is None else code})"
    assert re.search("Connection (closed|reset) by peer", outcomes[0].error)


def test_a_stuck_rank_is_told(tmp_path):
    with time_is_up_once(lambda: len(list(tmp_path.iterdir())) == 2):
        error = failing(2, stuck, tmp_path, timeout=300)
    assert error.errors == dict.fromkeys([0, 1], "has not answered in 300 s")
    assert "rank 0 has not answered in 300 s" in str(error)
    assert " in stuck\n" in str(error)
    assert_works(2)


def test_no_process_outlives_killed_tests():
    """Ranks see it while a collective waits."""
    code = "from tests.comm.test_ranks import *; start_quickly(); run(2, stuck)"
    tests = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert tests.stdout is not None and tests.stdout.readline() == "stuck\n"
    tests.kill()
    # The ranks write to the same pipes, which end when the last process that has them does.
    out, err = tests.communicate(timeout=120)
    assert (out, err) == ("", "")
