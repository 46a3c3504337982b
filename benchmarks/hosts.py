"""Hosts that are network namespaces of this machine; they need root, and the tools of Linux."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).parent.parent
CABLE = "cable"  # the interface's name on every host
PORT = 29400  # where ranks meet, on the first one


class Arrived(NamedTuple):
    """What has come through a host's cable, as the kernel counts it."""

    bytes: int
    packets: int


def check(benchmark: str, *tools: str) -> None:
    """End where such hosts can't be made."""
    needed = "ip", *tools
    if os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, needed)):
        commands = " and ".join(needed)
        raise SystemExit(f"{benchmark}: needs root, and Linux with {commands}, for the namespaces")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def address(host: int) -> str:
    return f"10.199.0.{host + 1}"


def inside(name: str, *command: str) -> list[str]:
    """A command that runs on this host."""
    return ["ip", "netns", "exec", name, *command]


def start(
    name: str, module: Sequence[str], out: IO[bytes] | None, log: IO[bytes], **variables: str
) -> subprocess.Popen[bytes]:
    """Run a module of Python, with its arguments, on this host; gloo goes through its cable."""
    command = inside(name, sys.executable, "-m", *module)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=log)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def arrived() -> Arrived:
    """On this host."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
    return next(Arrived(int(x[1]), int(x[2])) for x in lines if x[0] == f"{CABLE}:")


@contextlib.contextmanager
def notes_of(benchmark: str) -> Iterator[Path]:
    """A folder for what ranks tell; it stays where something fails."""
    notes = Path(tempfile.mkdtemp(prefix=f"{benchmark}-"))
    yield notes
    shutil.rmtree(notes)


def main(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    on_hosts: Callable[[argparse.Namespace], None],
    on_rank: Callable[[argparse.Namespace], None],
) -> None:
    """What was called by a user, or as a rank, which is told where its notes go."""
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    (on_hosts if options.notes is None else on_rank)(options)


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    names = [f"kaisa-{os.getpid()}-{i}" for i in range(count)]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def plugged_in(name: str, host: int) -> None:
    """Give a host's cable its address."""
    ip("-n", name, "address", "add", f"{address(host)}/24", "dev", CABLE)
    ip("-n", name, "link", "set", CABLE, "up")
    ip("-n", name, "link", "set", "lo", "up")


@contextlib.contextmanager
def switched(count: int, mbit: float) -> Iterator[list[str]]:
    """Hosts behind one switch, each with a line that carries ``mbit`` a second each way."""
    with namespaces(count + 1) as (switch, *names):
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            port = f"port{host}"
            ip("link", "add", CABLE, "netns", name, "type", "veth", "peer", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "bridge")
            ip("-n", switch, "link", "set", port, "up")
            plugged_in(name, host)
            for end_of_line, device in ((name, CABLE), (switch, port)):
                # More may wait than is ever under way, so that no packet is dropped.
                rate = ("rate", f"{mbit}mbit", "burst", "64kb", "limit", "64mb")
                limit = inside(end_of_line, "tc", "qdisc", "add", "dev", device, "root", "tbf")
                subprocess.run([*limit, *rate], check=True)
        yield names
