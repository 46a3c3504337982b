"""The form of errors about arguments, and checks that need nothing but the standard library."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import Any, TypeGuard


def invalid(name: str, value: Any, must: str) -> ValueError:
    """Return the error for a bad argument: its name, its value, and what it must be instead."""
    return invalid_because(name, f"{value!r}; {must}")


def invalid_because(name: str, why: str) -> ValueError:
    """Return the error for an argument whose value alone does not say what is wrong with it."""
    return ValueError(f"Invalid {name}: {why}")


def is_real(value: Any) -> TypeGuard[float]:
    """Return whether a value is a real number; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_flag(name: str, value: Any, none: bool = False) -> Any:
    """Return True or False, and None where ``none`` allows it; refuse other values."""
    if not isinstance(value, bool) and not (none and value is None):
        rest = ", or None for what follows from other options" if none else ""
        raise invalid(name, value, f"it must be True or False{rest}")
    return value


def check_callable(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Refuse a callable that does not take ``arguments``, before a step calls it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins have none
    try:
        signature.bind(*arguments)
    except TypeError:
        taken = " and ".join(arguments) if arguments else "nothing"
        like = f"lambda {', '.join(arguments)}: ..." if arguments else "lambda: ..."
        raise invalid(name, function, f"it must be a callable of {taken}, such as {like}") from None
