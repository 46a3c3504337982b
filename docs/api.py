"""The page of the API, made from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

import kaisa_optim
from kaisa_optim.options import OPTIONS
from kaisa_optim.preconditioner import Preconditioner

_OPTIONS = "K-FAC's options; those marked"  # where a docstring begins to list them
_ADDED = "consolidate_state_dict", "base_state_dict"  # methods beside torch.optim's
_ANSWERS = (
    *("layers", "assignment", "coverage", "uncovered", "factors", "metrics", "memory_usage"),
    *("communication_volume", "sample_fisher", "paused", "loss_terms", "grad_scaler"),
    *("statistics_fraction", "factor_update_steps", "inv_update_steps"),
)
# Titles, and what stands under each: names of the package, whose own methods follow if asked for.
_SECTIONS: dict[str, dict[str, bool]] = {
    "Optimizers": dict.fromkeys(("KFACSGD", "KFACAdam", "KFACLAMB", "with_kfac"), False),
    "Schedules": {"KFACParamScheduler": True, "decay_at": False},
    "Bases": {"LAMB": False},
    "Assignment": {
        "WorkAssignment": True,
        **dict.fromkeys(("LayerWise", "Opt", "Hybrid", "Task", "Grid", "Placement"), False),
    },
    "Layers": {"Layer": True, "Moments": False, "register_layer": False},
}


def page() -> str:
    """Return the whole page."""
    parts = ["# API", "Import every name from `kaisa_optim`."]
    for section, names in _SECTIONS.items():
        parts.append(f"## {section}")
        for name, has_methods in names.items():
            thing = getattr(kaisa_optim, name)
            parts += _entry(name, thing, "###")
            for method in _methods(thing) if has_methods else ():
                parts += _entry(f"{name}.{method}", getattr(thing, method), "####")
        if section == "Optimizers":
            parts.append("Beside the base's own methods, each optimizer has:")
            for name in _ADDED:
                parts += _entry(name, getattr(kaisa_optim.KFACSGD, name), "####")
            parts += ["## The preconditioner", "`optimizer.preconditioner` answers questions."]
            for name in _ANSWERS:
                parts += _entry(name, inspect.getattr_static(Preconditioner, name), "####")
    return "\n\n".join(parts) + "\n"


def _methods(cls: type[Any]) -> list[str]:
    return [n for n, x in vars(cls).items() if not n.startswith("_") and inspect.isroutine(x)]


def _entry(title: str, thing: Any, level: str) -> list[str]:
    text = inspect.getdoc(thing) or ""
    is_class = inspect.isclass(thing)
    if _OPTIONS in text:
        text = text[: text.index(_OPTIONS)] + "K-FAC's options have [a table](options.md)."
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    text = re.sub(r"::\n", ":\n", text).replace(":math:", "")
    # Lists of arguments are indented, which Markdown would take for code.
    text = re.sub(r"^    (\w[\w, ]*): ", r"- `\1`: ", text, flags=re.M)
    parts = [f"{level} {title.rpartition('.')[2]}"]
    if is_class or inspect.isroutine(thing):
        parts.append(f"```text\n{title}{_signature(thing)}\n```")
    return [*parts, text] if text else parts


def _signature(thing: Any) -> str:
    told: list[str] = []
    for p in inspect.signature(thing).parameters.values():
        if p.name in OPTIONS and told[-1:] == ["model=None"]:
            told.append("...")
            break
        if p.name in ("self", "cls"):
            continue
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(p.kind.name, "")
        default = "" if p.default is p.empty else f"={p.default!r}"
        told.append(f"{stars}{p.name}{default}")
    return f"({', '.join(told)})"
