"""Hardware profiles: how long operations take on a device, and bytes between ranks.

A profile is a small TOML file. ``profiles/`` has some, and users can write their own.
"""

from __future__ import annotations

import bisect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import invalid, invalid_because, is_real

PROFILES = Path(__file__).parent / "profiles"
# Operations on matrices whose times a profile lists.
OPERATIONS = ("products", "half_products", "roots", "eigenvectors", "inverses")
_CUBE = 3  # the power by which times grow beyond the largest size that was measured
_NUMBERS = {
    *("memory_gb", "ranks_per_node", "tflops", "memory_gb_per_s"),
    *("host_us", "host_layer_us", "margin"),
}


class Times(NamedTuple):
    """Seconds of one operation: on a first matrix of a batch, and on each further one, by side."""

    sides: tuple[float, ...]
    first: tuple[float, ...]
    further: tuple[float, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Times:
        """Read rows of a side, and milliseconds of the first and of each further matrix."""
        sides, first, further = zip(*sorted(map(tuple, rows)), strict=True)
        return cls(sides, tuple(ms / 1e3 for ms in first), tuple(ms / 1e3 for ms in further))

    def slower(self, by: float) -> Times:
        """Return times on a device whose arithmetic is slower; a call's fixed time stays."""
        pairs = zip(self.first, self.further, strict=True)
        first = tuple(max(0.0, call - ms) + by * ms for call, ms in pairs)
        return Times(self.sides, first, tuple(by * x for x in self.further))

    def seconds(self, side: float, count: int = 1) -> float:
        """Return the seconds of a batch of ``count`` matrices with this side."""
        if not count:
            return 0.0
        return self._at(self.first, side) + (count - 1) * self._at(self.further, side)

    def _at(self, times: tuple[float, ...], side: float) -> float:
        """Interpolate between logarithms; small matrices take the time of the smallest side."""
        place = bisect.bisect_left(self.sides, side)
        if place == 0:
            return times[0]
        if place == len(self.sides):
            return times[-1] * (side / self.sides[-1]) ** _CUBE
        low, high = self.sides[place - 1], self.sides[place]
        share = math.log(side / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(times[place - 1]) + share * math.log(times[place]))


class Link(NamedTuple):
    """The way to other ranks, inside of a node or between nodes."""

    bandwidth: float  # bytes a second that one rank receives while all receive
    latency: float  # seconds of a call
    each: float  # seconds for each other rank of a call


@dataclass(frozen=True)
class Hardware:
    """A device, and the network between the devices."""

    name: str
    title: str
    device: str  # "cuda" or "cpu"
    memory: float  # bytes
    ranks_per_node: int
    flops: float  # operations a second in products of a model's passes
    memory_bandwidth: float  # bytes a second, of a network's operations between its products
    host: float  # seconds on the host for each group of layers of one shape
    host_layer: float  # seconds on the host for each layer
    margin: float  # share by which times may be off
    times: Mapping[str, Times]
    inside: Link
    between: Link
    sources: tuple[str, ...]

    def transfer(self, size: float, members: int, on_node: int, calls: int = 1) -> float:
        """Return the seconds in which a rank receives ``size`` bytes from other members.

        ``on_node`` of the members are on the rank's own node.
        """
        if members <= 1 or not size:
            return 0.0
        away = (members - on_node) / (members - 1)
        seconds = size * ((1 - away) / self.inside.bandwidth + away / self.between.bandwidth)
        far = self.between if away else self.inside
        messages = (on_node - 1) * self.inside.each + (members - on_node) * self.between.each
        return seconds + calls * (far.latency + messages)

    def ring(self, size: float, members: int) -> float:
        """Return the seconds in which a ring of all ranks brings ``size`` bytes to each.

        The ring crosses the line of each node once, so that its ranks need not share the line.
        """
        if members <= 1:
            return 0.0
        inside, between = self.inside, self.between
        if members <= self.ranks_per_node:
            return inside.latency + size / inside.bandwidth
        line = min(inside.bandwidth, self.ranks_per_node * between.bandwidth)
        return between.latency + size / line


def load(source: str | Path) -> Hardware:
    """Return the profile of this name, or the one in this TOML file."""
    known = {path.stem: path for path in sorted(PROFILES.glob("*.toml"))}
    path = known.get(str(source), Path(source))
    if not path.is_file():
        names = ", ".join(map(repr, known))
        raise invalid("device", str(source), f"choose from {names}, or give a TOML file")
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            text = "hardware profiles need tomli on Python 3.10; pip install 'kaisa_optim[tools]'"
            raise ImportError(text) from None
    try:
        return parse(path.stem, tomllib.loads(path.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise invalid_because("device", f"{path} is no TOML file: {error}") from None
    except KeyError as error:
        why = f"{path} lacks {error.args[0]!r}; give all values that {PROFILES} has"
        raise invalid_because("device", why) from None


def parse(name: str, values: Mapping[str, Any]) -> Hardware:
    """Return a profile from the values of its file; a missing one is a KeyError."""
    for key in sorted(_NUMBERS):
        if not is_real(values[key]) or values[key] <= 0:
            why = f"{values[key]!r} in the profile {name!r}; {key} must be a number above 0"
            raise invalid_because("device", why)
    # Data sheets tell how much slower another device is than one that was measured.
    like = load(values["like"]).times if "like" in values else {}
    slower, tables = values.get("slower", {}), values.get("times_ms", {})
    times = {kind: like[kind].slower(by) for kind, by in slower.items()}
    known = {*tables, *times, "half_products"}  # devices without it multiply in float32
    times |= {n: Times.of(tables[n]) for n in OPERATIONS if n in tables or n not in known}
    inside, between = (
        Link(x["gb_per_s"] * 1e9, x["latency_us"] / 1e6, x.get("each_us", 0.0) / 1e6)
        for x in map(values["links"].__getitem__, ("inside", "between"))
    )
    return Hardware(
        name,
        str(values["title"]),
        str(values["device"]),
        values["memory_gb"] * 1e9,
        int(values["ranks_per_node"]),
        values["tflops"] * 1e12,
        values["memory_gb_per_s"] * 1e9,
        values["host_us"] / 1e6,
        values["host_layer_us"] / 1e6,
        float(values["margin"]),
        times,
        inside,
        between,
        tuple(values["sources"]),
    )


def text(values: Mapping[str, Any], comment: str = "") -> str:
    """Return the TOML text of a profile: numbers, texts, lists and one level of tables."""
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{key} = {_written(x)}" for key, x in values.items() if key not in tables]
    for key, table in tables.items():
        lines += ["", f"[{key}]", *(f"{name} = {_written(x)}" for name, x in table.items())]
    return "\n".join([*lines, ""])


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{k} = {_written(v)}' for k, v in value.items())} }}"
    if isinstance(value, list | tuple):
        between = ",\n    " if value and isinstance(value[0], list) else ", "
        return f"[{between.join(map(_written, value))}]"
    # Texts and whole numbers are written as in JSON.
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def named_for(device: str, title: str = "") -> str:
    """Return the profile for a device that torch names so, ``"h100"`` for other GPUs."""
    if device == "cpu":
        return "cpu"
    return next((name for name in ("v100", "a100") if name in title.lower()), "h100")
