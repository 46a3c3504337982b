"""Contestants in processes of their own.

In one process, what one contestant leaves of its memory is what the next one gets, and the base
optimizer alone among others waits less for fresh pages than it does alone. Here everybody has its
own memory and keeps what is freed of it, as allocators made for such work do: nobody waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from .contestants import Seconds, Trainer, contestants
from .tasks import tasks

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for them, of its mallopt
_LARGE = 2**31 - 1
Result = TypeVar("Result")


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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is imported once for all of them
        self._pipe, other = context.Pipe()
        arguments = other, task, short, contestant, device, intervals, threads
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()

    def __call__(self, function: Callable[..., Result], *arguments: Any) -> Result:
        self._pipe.send((function, arguments))
        try:
            found = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"a contestant's process ended with code {code}") from None
        if isinstance(found, Exception):
            raise found
        return found

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
    with contextlib.suppress(EOFError):  # whoever asked is done
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send(function(trainer, *arguments))
            except Exception as error:
                pipe.send(error)


def keep_memory() -> None:
    """Of this process, where its C library can be told to."""
    with contextlib.suppress(OSError, AttributeError):
        for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(name, _LARGE)
