"""Hosts that are network namespaces of this machine; they need root, and the tools of Linux."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

CABLE = "cable"  # the interface's name on every host


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


def inside(name: str, *command: str) -> list[str]:
    """A command that runs on this host."""
    return ["ip", "netns", "exec", name, *command]


def arrived() -> Arrived:
    """On this host."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
    return next(Arrived(int(x[1]), int(x[2])) for x in lines if x[0] == f"{CABLE}:")


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


def plugged_in(name: str, address: str) -> None:
    """Give a host's cable its address."""
    ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
    ip("-n", name, "link", "set", CABLE, "up")
    ip("-n", name, "link", "set", "lo", "up")


@contextlib.contextmanager
def joined(addresses: Sequence[str]) -> Iterator[list[str]]:
    """Two hosts with one cable between them."""
    with namespaces(2) as names:
        first, second = names
        ip("-n", first, "link", "add", CABLE, "type", "veth", "peer", CABLE, "netns", second)
        for name, address in zip(names, addresses, strict=True):
            plugged_in(name, address)
        yield names


@contextlib.contextmanager
def switched(addresses: Sequence[str], mbit: float) -> Iterator[list[str]]:
    """Hosts behind one switch, each with a line that carries ``mbit`` a second each way."""
    with namespaces(len(addresses) + 1) as (switch, *names):
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for i, (name, address) in enumerate(zip(names, addresses, strict=True)):
            port = f"port{i}"
            ip("link", "add", CABLE, "netns", name, "type", "veth", "peer", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "bridge")
            ip("-n", switch, "link", "set", port, "up")
            plugged_in(name, address)
            for host, device in ((name, CABLE), (switch, port)):
                # More may wait than is ever under way, so that no packet is dropped.
                rate = ("rate", f"{mbit}mbit", "burst", "64kb", "limit", "64mb")
                words = inside(host, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)
                subprocess.run(words, check=True)
        yield names
