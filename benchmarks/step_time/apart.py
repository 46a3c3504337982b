"""Contestants in processes of their own.

In one process, what one contestant leaves of its memory is what the next one gets, and the base
optimizer alone among others waits less for fresh pages than it does alone. Here everybody has its
own memory and keeps what is freed of it, as allocators made for such work do: nobody waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

import torch

from .contestants import Seconds, Trainer, contestants
from .tasks import tasks

# What glibc's mallopt is told, by its numbers: how much may stay free at the end of the heap, and
# how many blocks may be mapped apart from it.
_KEEPING = {-1: 2**31 - 1, -4: 0}
Result = TypeVar("Result")


def forkserver() -> ForkServerContext:
    """Torch, and what processes of this benchmark need, is imported once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.step_time.steps"])
    return context


class Apart:
    """A trainer in a process of its own; called with a function, it applies that there."""

    def __init__(
        self,
        task: str,
        short: bool,
        contestant: str,
        device: str,
        intervals: tuple[int, int],
        threads: int,
    ) -> None:
        context = forkserver()
        self._pipe, other = context.Pipe()
        arguments = other, task, short, contestant, device, intervals, threads
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()

    def __call__(self, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            self._pipe.send((function, arguments))
            found, error = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"a contestant's process ended with code {code}") from None
        if error is not None:
            raise RuntimeError(f"in a contestant's process:\n{error}")
        result: Result = found
        return result

    def run(self, steps: int) -> list[Seconds]:
        return self(Trainer.run, steps)

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(
    pipe: Connection,
    task: str,
    short: bool,
    contestant: str,
    device: str,
    intervals: tuple[int, int],
    threads: int,
) -> None:
    keep_memory()
    torch.set_num_threads(threads)
    own = tasks(short)[task]
    makers, _ = contestants(own, device)
    trainer = Trainer(own, device, makers[contestant], intervals)
    with contextlib.suppress(EOFError, OSError):  # whoever asked is done
        while True:
            function, arguments = pipe.recv()
            found, error = None, None
            try:
                found = function(trainer, *arguments)
            except Exception:
                error = traceback.format_exc()
            pipe.send((found, error))


def keep_memory() -> None:
    """Of this process, where its C library can be told to."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc's
    if not all(mallopt(name, value) for name, value in _KEEPING.items()):
        warnings.warn("the C library does not keep what is freed: it refused", stacklevel=2)
