"""Models from the command line: ``package.module:factory`` with arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import invalid, invalid_because


class FactoryError(RuntimeError):
    """A factory's own failure, whatever it raised."""


def built(target: str, texts: Iterable[str] = ()) -> tuple[nn.Module, Any]:
    """Return a factory's model on the meta device, and its batch or ``None``.

    ``texts`` are arguments such as ``"width=1024"``. The factory returns a model, or a model and
    one rank's input.
    """
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise invalid("factory", target, "it must be package.module:factory")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        factory: Any = importlib.import_module(name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        # An import inside of the module may fail, too.
        away = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        remedy = "run kaisa where Python finds it" if away else f"see python -c 'import {name}'"
        why = f"{target!r} can't be imported: {error}; {remedy}"
        raise invalid_because("factory", why) from None
    arguments = dict(map(_argument, texts))
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        why = f"{target!r}: {error}; give its arguments as --arg name=value"
        raise invalid_because("factory", why) from None
    try:
        with torch.device("meta"):
            made = factory(**arguments)
    except (Exception, SystemExit) as error:  # a factory may exit, too, with any status
        raised = f"the factory {target!r} raised {type(error).__name__}"
        raise FactoryError(f"{raised}; mend what its traceback names") from error
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        must = "it must return a module, or a module and a batch"
        raise invalid_because("factory", f"{target!r} returned {type(made).__name__}; {must}")
    return model, batch


def values(texts: Iterable[str]) -> dict[str, Any]:
    """Return options by name, from texts such as ``"inv_update_steps=100"``."""
    return dict(map(_argument, texts))


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise invalid("argument", text, "it must be name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        is_dtype = value.startswith("torch.") and isinstance(dtype, torch.dtype)
        return name, dtype if is_dtype else value
