"""The form of errors about arguments."""

from __future__ import annotations

from typing import Any


def invalid(name: str, value: Any, must: str) -> ValueError:
    """Return the error for a bad argument: its name, its value, and what it must be instead."""
    return ValueError(f"Invalid {name}: {value!r}; {must}")
