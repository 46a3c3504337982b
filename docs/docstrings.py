"""Docstrings as the site shows them: Sphinx's roles as plain code, options in their own table."""

import importlib
import inspect
import re
from typing import Any

import griffe

OPTIONS = "K-FAC's options; those marked"


def arguments(obj: griffe.Object) -> str:
    """Return a call with the base's arguments, which come before ``model``."""
    module, name = obj.path.rsplit(".", 1)
    signature = inspect.signature(getattr(importlib.import_module(module), name))
    told = []
    for parameter in signature.parameters.values():
        if parameter.name == "model":
            break
        default = parameter.default
        told.append(parameter.name + ("" if default is parameter.empty else f"={default!r}"))
    return f"{name}({', '.join(told)}, *, model=None, ...)"


class Docstrings(griffe.Extension):
    """Rewrite each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
        if OPTIONS in text:
            text = text[: text.index(OPTIONS)] + "K-FAC's options have [a table](options.md)."
            if obj.is_class:
                text += f"\n\n```python\n{arguments(obj)}\n```"
        obj.docstring.value = text
