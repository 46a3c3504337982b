"""The form of errors about arguments."""

from __future__ import annotations

from typing import Any


def invalid(name: str, value: Any, must: str) -> ValueError:
    """Return the error for a bad argument: its name, its value, and what it must be instead."""
    return invalid_because(name, f"{value!r}; {must}")


def invalid_because(name: str, why: str) -> ValueError:
    """Return the error for an argument whose value alone does not say what is wrong with it."""
    return ValueError(f"Invalid {name}: {why}")
