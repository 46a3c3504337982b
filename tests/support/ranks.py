"""Ranks of ``torch.distributed`` on one machine: processes that stay and run functions of tests.

The function comes from a module that the ranks can import, and finds its process group (gloo) made.
All else that it leaves behind in the process, its groups too, the next one finds there.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import gc
import io
import multiprocessing
import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Seconds.
GROUP_TIMEOUT = 20.0  # of collectives
START = 180.0  # for the processes: two cores may have many to start
GRACE = 2.0  # for other ranks to say what went wrong with them, after the first has
LEAVE = 10.0  # for ranks to end by themselves, which leaves them time to write what they measured


class Outcome(NamedTuple):
    value: Any
    error: str | None  # type and text


class RankError(Exception):
    """Some ranks have failed; ``errors`` has type and text by rank, the earliest first.

    Ranks that were still busy two seconds later are not in it.
    """

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.errors = errors


# Torch 2.6 has no streams on CPUs, of which its fully_shard asks for events.
CAN_SHARD = hasattr(torch.cpu.current_stream(), "record_event")


def run(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    expect_errors: bool = False,
    own: bool = False,
) -> list[Any]:
    """What ``function(*args)`` returns on each rank of a pool that other calls use too.

    Where a rank fails, the pool ends, and the next call starts another. With ``expect_errors``
    all ranks may take their time, and the list is one of ``Outcome``.
    """
    job = _packed((function, args))  # fails here, before there are ranks to be disturbed
    pool = _Pool(world) if own else _POOLS.get(world) or _POOLS.setdefault(world, _Pool(world))
    try:
        return pool.run(job, function, timeout, expect_errors)
    finally:
        if own:
            pool.end()
        elif pool.ended:
            del _POOLS[world]


def fresh(world: int, function: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
    """Like ``run``, in processes of its own."""
    return run(world, function, *args, own=True, **how)


# ---- the process of the tests ----


class _Reply(NamedTuple):
    value: Any = None
    error: str | None = None
    trace: str = ""


# Ranks are forks of one process that has imported what they need: a rank that imports torch and the
# package itself takes two seconds to start. Coverage starts in the ranks only, because lines that
# the forking process had measured would be counted again.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch.distributed.checkpoint.state_dict", "kaisa_optim", "hypothesis", "pytest"]
)


def start_quickly() -> None:
    """Import only torch before ranks fork: for a process whose ranks run one small function."""
    _CONTEXT.set_forkserver_preload(["torch.distributed"])


_TRACE = "COVERAGE_PROCESS_CONFIG"  # makes coverage start in processes that find it


class _Pool:
    def __init__(self, world: int) -> None:
        self.ended = False
        # A file has no port that another process may have taken.
        self.directory = tempfile.mkdtemp(prefix="ranks-")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        trace = os.environ.pop(_TRACE, None)
        try:
            for rank in range(world):
                here, there = _CONTEXT.Pipe()
                # One rank is enough: all run nearly the same lines, and tracing is slow.
                args = rank, world, self.directory, there, trace if rank == 0 else None
                process = _CONTEXT.Process(target=_serve, args=args, name=f"rank {rank}")
                process.start()
                there.close()  # so that the end of the process is the end of the pipe
                self.pipes.append(here)
                self.processes.append(process)
            self._outcomes("the start", START, expect_errors=False)
        except BaseException:
            self.kill()
            raise
        finally:
            if trace is not None:
                os.environ[_TRACE] = trace

    def run(
        self, job: bytes, function: Callable[..., Any], timeout: float, expect_errors: bool
    ) -> list[Any]:
        try:
            for pipe in self.pipes:
                with contextlib.suppress(OSError):  # a dead rank; reading tells
                    pipe.send_bytes(job)
            outcomes = self._outcomes(function.__name__, timeout, expect_errors)
        except BaseException:  # an interrupt too: answers to this job must not meet the next
            self.kill()
            raise
        if any(outcome.error is not None for outcome in outcomes):
            self.kill()
        return outcomes if expect_errors else [outcome.value for outcome in outcomes]

    def _outcomes(self, name: str, timeout: float, expect_errors: bool) -> list[Outcome]:
        replies = self._replies(timeout, patient=expect_errors)
        failed = {rank: reply for rank, reply in replies.items() if reply.error is not None}
        missing = [rank for rank in range(len(self.pipes)) if rank not in replies]
        traces = [f"Rank {rank}:\n{reply.trace}" for rank, reply in failed.items() if reply.trace]
        stacks = []
        if missing and (expect_errors or not failed):
            late = _Reply(error=f"has not answered in {timeout:g} s")
            failed.update((rank, late) for rank in missing)
            stacks = self._stacks(missing)
        if failed and not expect_errors:
            lines = [f"{name} failed on {len(failed)} of {len(self.pipes)} ranks"]
            raised = {rank: "raised " if reply.trace else "" for rank, reply in failed.items()}
            lines += [f"rank {rank} {raised[rank]}{x.error}" for rank, x in failed.items()]
            lines += [f"rank {rank} was still busy" for rank in missing if rank not in failed]
            errors = {rank: str(reply.error) for rank, reply in failed.items()}
            raise RankError("\n".join([*lines, "", *traces[:1], *stacks]), errors)
        replies |= failed
        return [Outcome(*replies[rank][:2]) for rank in range(len(self.pipes))]

    def _replies(self, timeout: float, patient: bool) -> dict[int, _Reply]:
        replies: dict[int, _Reply] = {}
        until = time.monotonic() + timeout
        while len(replies) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in replies}
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe, rank in waiting.items():
                if pipe in ready:
                    replies[rank] = reply = self._read(rank)
                    if reply.error is not None and not patient:
                        until = min(until, time.monotonic() + GRACE)
        return replies

    def _read(self, rank: int) -> _Reply:
        try:
            answer = self.pipes[rank].recv_bytes()
        except (EOFError, OSError):
            self.processes[rank].join(LEAVE)
            return _Reply(error=f"died (exit code {self.processes[rank].exitcode})")
        return _unpacked(answer)

    def _stacks(self, ranks: list[int]) -> list[str]:
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        files = [_stack_file(self.directory, rank) for rank in ranks]
        until = time.monotonic() + 10  # on a busy machine even a signal takes its time
        while time.monotonic() < until and not all(f.exists() and f.stat().st_size for f in files):
            time.sleep(0.05)
        time.sleep(0.3)  # the rest of what has begun to be written
        texts = [file.read_text() if file.exists() else "no stack\n" for file in files]
        return [f"Rank {rank}:\n{text}" for rank, text in zip(ranks, texts, strict=True)]

    def end(self) -> None:
        if not self.ended:
            for pipe in self.pipes:
                with contextlib.suppress(OSError):
                    pipe.send_bytes(b"")
            until = time.monotonic() + LEAVE
            for process in self.processes:
                process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        if self.ended:
            return
        self.ended = True
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)


_POOLS: dict[int, _Pool] = {}


@atexit.register
def end_all() -> None:
    while _POOLS:
        _POOLS.popitem()[1].end()


# ---- a rank ----


def _serve(rank: int, world: int, directory: str, pipe: Connection, trace: str | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the tests, which then end the ranks
    with _measured(trace), _stack_file(directory, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        jobs: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=_listen, args=(pipe, jobs, directory), daemon=True).start()
        pipe.send_bytes(_answer(partial(_meet, rank, world, directory)))
        while job := jobs.get():
            gc.freeze()  # what is here now stays, and collecting need not go through it
            pipe.send_bytes(_answer(partial(_call, job)))
            gc.collect()  # nothing of this job ends in the middle of the next
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


@contextlib.contextmanager
def _measured(setting: str | None) -> Iterator[None]:
    """Coverage, as it starts by itself in processes that are no forks; saved however it ends."""
    if setting is None:
        yield
        return
    from coverage import process_startup

    os.environ[_TRACE] = setting
    coverage = process_startup()
    try:
        yield
    finally:
        if coverage is not None:
            coverage.stop()
            coverage.save()


def _listen(pipe: Connection, jobs: SimpleQueue[bytes], directory: str) -> None:
    """Its own thread: it sees the end of the tests' process while a collective waits."""
    try:
        while True:
            jobs.put(pipe.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)


def _meet(rank: int, world: int, directory: str) -> None:
    torch.set_num_threads(1)
    # Otherwise gloo looks up the host's name, which may lead anywhere.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    store = dist.FileStore(os.path.join(directory, "store"), world)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _call(job: bytes) -> Any:
    random.seed(0)
    torch.manual_seed(0)
    function, args = _unpacked(job)
    return function(*args)


def _answer(work: Callable[[], Any]) -> bytes:
    try:
        return _packed(_Reply(work()))
    except BaseException as error:  # pytest.fail raises no Exception
        text = f"{type(error).__name__}: {error}"
        return _packed(_Reply(error=text, trace=traceback.format_exc()))


# The pipe's own pickling puts tensors into shared memory; pickle alone gives views memory of their
# own. The old format takes a quarter of a millisecond less each time.


def _packed(thing: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer, pickle_protocol=5, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _stack_file(directory: str, rank: int) -> Path:
    return Path(directory, f"stack{rank}")
