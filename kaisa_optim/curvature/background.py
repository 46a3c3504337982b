"""Work beside the training: on a thread of its own and, on a GPU, off the main stream."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor, ...]

logger = logging.getLogger("kaisa_optim")


class Job:
    """One piece of work, and its results when they are wanted."""

    def __init__(
        self, run: Callable[[], Results], future: Future[Results], device: torch.device
    ) -> None:
        self._run = run
        self._future = future
        self._device = device
        self._process = os.getpid()
        self._asked = False

    def __del__(self) -> None:
        if not self._asked and self._process == os.getpid():
            self._future.add_done_callback(_tell)

    def give_up(self) -> None:
        """Nobody will ask, and nobody needs to know what it raises."""
        self._asked = True

    def results(self) -> Results:
        """Waits until the work is done; what it raised is raised here."""
        self._asked = True
        if self._process != os.getpid():
            return self._run()  # a fork has none of its parent's threads
        found = self._future.result()
        if self._device.type == "cuda":
            # They are of the other stream's memory, which must not have it back too early.
            for tensor in found:
                if tensor.device.type == "cuda":
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return found


class Failure:
    """In a job's place, where the work could not begin."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def give_up(self) -> None:
        pass

    def results(self) -> Results:
        raise self._error


def _tell(future: Future[Results]) -> None:
    """Where nobody asks, as of an optimizer that is gone: an error must not pass unsaid."""
    error = None if future.cancelled() else future.exception()
    if error is not None:
        logger.error("work beside the training failed, and nobody has asked for it", exc_info=error)


class Background:
    """One thread, which takes its work in turn, from the first on until its owner ends."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0  # that the pool is of
        self._streams: dict[torch.device, Any] = {}

    def start(self, work: Callable[[], Results], device: torch.device) -> Job:
        """Begin what takes tensors of ``device`` as they are now."""
        if self._pool is None or self._process != os.getpid():
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="kaisa_optim")
            weakref.finalize(self, _end, self._pool, self._process)
        stream = ready = None
        if device.type == "cuda":
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            ready = torch.cuda.current_stream(device).record_event()
        threads = torch.get_num_threads()

        def run() -> Results:
            # In a new thread LAPACK takes a number of threads of its own until torch is asked there
            # for its. With another number it rounds otherwise, and a restart has a new thread.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            beside: AbstractContextManager[Any] = nullcontext()
            if stream is not None:
                # A new thread is on the first GPU, where every rank would leave a context.
                torch.cuda.set_device(device)
                stream.wait_event(ready)
                beside = torch.cuda.stream(stream)
            try:
                with torch.no_grad(), beside:  # both settings are a thread's own
                    return work()
            finally:
                # The device's other streams go on. Nobody else waits for this one: what it reads
                # may have other uses from here on, and its results are taken as they are.
                if stream is not None:
                    stream.synchronize()

        return Job(run, self._pool.submit(run), device)


def _end(pool: ThreadPoolExecutor, process: int) -> None:
    """What has not begun never does; a fork leaves its parent's alone."""
    if process == os.getpid():
        pool.shutdown(wait=False, cancel_futures=True)
