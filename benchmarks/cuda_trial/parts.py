"""A part of the trial, run in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

Results = Iterator[dict[str, Any]]


class Settings(NamedTuple):
    """What every part is told."""

    device: str
    rehearse: bool  # in tiny sizes
    only: str = ""  # of a contest's contestants: the base, and those that this pattern finds
    brief: bool = False  # each part's first contest alone, and nobody's steps looked into


@dataclass(frozen=True)
class Part:
    run: Callable[[Settings], Results]
    limit: float  # minutes
    least: float  # minutes that must be left, or it is skipped


@dataclass
class Record:
    """What came of a part."""

    state: str = "running"  # then "done", "failed", "cut off" or "skipped"
    seconds: float = 0.0
    results: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def run(part: Part, settings: Settings, limit: float, keep: Callable[[Record], None]) -> Record:
    """Run a part in a process of its own for at most ``limit`` seconds; keep what it finds."""
    context = multiprocessing.get_context("forkserver")
    pipe, other = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(other, part.run, settings))
    began, record = time.monotonic(), Record()
    process.start()
    other.close()
    while record.state == "running":
        left = limit - (time.monotonic() - began)
        if left <= 0 or not pipe.poll(left):
            record.state = "cut off"
            process.kill()
        else:
            _receive(pipe, record)
        record.seconds = round(time.monotonic() - began, 1)
        keep(record)
    process.join()
    return record


def _send(pipe: Connection, part: Callable[[Settings], Results], settings: Settings) -> None:
    try:
        for result in part(settings):
            pipe.send(("result", result))
        pipe.send(("done", None))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


def _receive(pipe: Connection, record: Record) -> None:
    try:
        kind, found = pipe.recv()
    except EOFError:
        kind, found = "failed", "its process ended without a word"
    if kind == "result":
        record.results.append(found)
        print("  " + ", ".join(f"{name} {shown(value)}" for name, value in found.items()))
    else:
        record.state, record.error = kind, found
    print(end="", flush=True)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "".join(f"\n    {line}" for item in value for line in str(item).splitlines())
    return str(value)
