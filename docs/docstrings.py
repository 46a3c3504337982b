"""Docstrings as the site shows them: Sphinx's roles as plain code, options in their own table."""

import re
from typing import Any

import griffe

OPTIONS = "K-FAC's options; those marked"


class Docstrings(griffe.Extension):
    """Rewrite each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
        if OPTIONS in text:
            text = text[: text.index(OPTIONS)] + "K-FAC's options have [a table](options.md)."
        obj.docstring.value = text
