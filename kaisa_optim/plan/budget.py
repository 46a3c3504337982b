"""Amounts of memory: texts such as "4GiB", and what they mean in bytes."""

from __future__ import annotations

import math
import re
from typing import Any

from ..checks import is_real
from ..errors import invalid

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
MUST = (
    'it must be a number of bytes, a text such as "80GB" or "4GiB", or a share in (0, 1) of what '
    "the device has free"
)


def check_budget(name: str, value: Any) -> int | float | None:
    """Return whole bytes, a share in (0, 1), or ``None``; refuse other values."""
    if value is None:
        return None
    size = _bytes(value) if isinstance(value, str) else value
    if not is_real(size) or not 0 < size < math.inf:
        raise invalid(name, value, MUST)
    return float(size) if size < 1 else int(size)


def _bytes(text: str) -> float:
    """Return the bytes that a text means; 0 if it means none."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?)?b?\s*", text, flags=re.I)
    size = float(found[1]) * _UNITS[(found[2] or "").lower()] if found else 0.0
    return size if size >= 1 else 0.0  # "0.5" might be meant as a share


def shown(size: float) -> str:
    """Return bytes as people write them: ``"1.23 GB"``."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= 0.9995 * one:
            number = size / one
            return f"{number:,.0f} {unit}" if abs(number) >= 99.95 else f"{number:.3g} {unit}"
    return f"{size:.0f} byte{'s' * (round(size) != 1)}"


def mega(size: float) -> str:
    """Return bytes as a number of megabytes, with three digits."""
    number = size / 1e6
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"
