"""The arguments of a K-FAC class: which are the base's, which are K-FAC's, and what they mean."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..core.options import (
    DAMPING,
    MUON_DAMPING,
    OPTIONS,
    PER_GROUP,
    SECTIONS,
    Option,
    differs,
    unexpected,
)
from ..errors import invalid, invalid_because
from . import moments
from .muon import Muon

OF_MOMENTS = "nesterov", "orthogonal"  # names that a base may have, too
# Keys of a parameter group, beside the base's own.
GROUP_KEYS = (*PER_GROUP, "kl_clip_lr")
# Options that a parameter group can't have of its own.
OF_ALL = frozenset(OPTIONS) - {*GROUP_KEYS, "process_group"}

Parameters = Mapping[str, inspect.Parameter]


def parameters_of(base: type[Optimizer]) -> Parameters:
    return inspect.signature(base.__init__).parameters


def is_the_bases(name: str, base: type[Optimizer]) -> bool:
    """Return whether an argument of this name is the base's own, or may be."""
    theirs = parameters_of(base)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in theirs.values())
    return name in theirs or (takes_any and not issubclass(base, moments.BASES))


def options_of(base: type[Optimizer]) -> dict[str, Option]:
    """Return K-FAC's options in the signature of a class over this base."""
    unused = "muon" if base is Muon else ""
    return {
        name: option
        for name, option in OPTIONS.items()
        if unused not in option.unused_by and not (name in OF_MOMENTS and is_the_bases(name, base))
    }


def signature(base: type[Optimizer]) -> inspect.Signature:
    """Return the base's arguments as they are, then the model and K-FAC's options by keyword."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    first = [p for p in parameters_of(base).values() if p.kind not in variadic]
    given = "nn.Module | Iterable[Any] | None"
    first[1:2] = [p.replace(annotation=given) for p in first[1:2]]  # a base of *args has none
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter("model", keyword, default=None, annotation="nn.Module | None")]
    for name, option in options_of(base).items():
        default = MUON_DAMPING if name == "damping" and base is Muon else option.default
        own.append(inspect.Parameter(name, keyword, default=default, annotation=option.annotation))
    return inspect.Signature([*first, *own])


def documentation(base: type[Optimizer]) -> str:
    """Return the docstring's part on K-FAC's options."""
    lines = ["K-FAC's options; those marked (s) may be callables of the step."]
    taken = options_of(base)
    for section, options in SECTIONS.items():
        lines += ["", f"{section}:"]
        for option in (x for x in options if x.name in taken):
            text = f"{option.name}: {option.help}{' (s)' if option.schedulable else ''}"
            lines += textwrap.wrap(text, 92, initial_indent="    ", subsequent_indent=" " * 8)
    return "\n".join(lines)


def table() -> str:
    """Return the table of all options in docs/reference/options.md."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, option in OPTIONS.items():
        default = f'"{option.default}"' if isinstance(option.default, str) else option.default
        meaning = option.help.replace("|", "\\|")
        if option.guide:
            meaning += f" [More](../guides/{option.guide})"
        rows.append(f"| `{name}`{' (s)' if option.schedulable else ''} | {default} | {meaning} |")
    return "\n".join(rows)


def separate(
    title: str, base: type[Optimizer], known: Parameters, given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the base's keyword arguments and K-FAC's; refuse arguments that neither has.

    ``known`` are the parameters of the class that is built next, which may stand before the base.
    """
    ours = {n: v for n, v in given.items() if n in OPTIONS and not _belongs(n, v, base)}
    theirs = {n: v for n, v in given.items() if n not in ours}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        for name in theirs:
            if name not in known:
                raise unexpected(title, name, options_of(base), known)
    return theirs, ours


def _belongs(name: str, value: Any, base: type[Optimizer]) -> bool:
    """Return whether an argument goes to the base; ``None`` is no value of a base's own."""
    return name in OF_MOMENTS and value is not None and is_the_bases(name, base)


def find_model(title: str, params: Any, model: Any) -> tuple[nn.Module, Any]:
    """Return the model, and the parameters or groups that the base is to take."""
    if params is None:
        raise TypeError(f"{title}() needs the model first: {title}(model, ...)")
    if isinstance(params, nn.Module):
        if model is not None and model is not params:
            raise invalid_because(
                "model", "the first argument is a module already; leave out model="
            )
        model, params = params, list(params.parameters())
        if not params:
            why = (
                f"this {type(model).__name__} has no parameters; pass the module that holds the "
                "layers to be trained"
            )
            raise invalid_because("model", why)
    if not isinstance(model, nn.Module):
        why = (
            f"{_given(params, model)}; K-FAC hooks the model's layers: pass the nn.Module first, "
            f"as {title}(model, ...), or as model="
        )
        raise invalid_because("model", why)
    return model, params


def _given(params: Any, model: Any) -> str:
    """Return a short text for the object that was given in a model's place."""
    listed = isinstance(params, Iterable) and not isinstance(params, str | Mapping)
    if listed and model is None:
        return "no model was given, but parameters"
    given = model if listed or model is not None else params
    if isinstance(given, type):
        return f"the class {given.__name__}"
    text = repr(given)
    return text if len(text) <= 60 and "\n" not in text else f"of type {type(given).__name__}"


# ---- where moments live ----


def settle_moments(
    title: str,
    base: type[Optimizer],
    theirs: dict[str, Any],
    ours: dict[str, Any],
    groups: list[dict[str, Any]],
) -> str:
    """Settle ``ours["moments"]`` and its two switches, in place.

    Return the option that rules out the eigenbasis as the default, if any.
    """
    if base is Muon:
        for name, option in OPTIONS.items():
            value = ours.get(name)
            if "muon" in option.unused_by and value is not None and differs(value, option.default):
                raise invalid(name, value, f"{title} has no use for it, leave it out")
            if "muon" in option.unused_by:
                ours.pop(name, None)
        ours["moments"] = "metric"
        return ""
    asked = ours.get("moments")
    if asked == "metric":
        raise invalid_because("moments", '"metric" is KFACMuon\'s own; leave it out')
    against = moments.argument_against(theirs) or _option_against(ours, groups)
    why = _why_not_in_the_eigenbasis(base, asked, against)
    if asked is None:
        ours["moments"] = "parameters" if why else "eigenbasis"
        if not why:  # moments="eigenbasis", given by name, is Adam itself in another basis
            for name in OF_MOMENTS:
                if ours.get(name) is None:
                    ours[name] = True
    for name in OF_MOMENTS:
        if ours.get(name) and ours["moments"] != "eigenbasis":
            raise invalid_because(name, f'True belongs to moments="eigenbasis", which {why}')
    return against if asked is None and base in moments.BASES else ""


def _why_not_in_the_eigenbasis(base: type[Optimizer], asked: Any, against: str) -> str:
    """Return why moments are not kept in the eigenbasis, as the end of a sentence, or nothing."""
    if not issubclass(base, moments.BASES):
        return "needs Adam, AdamW or LAMB as its base; leave it out"
    if asked is not None:
        return f"moments={asked!r} rules out; leave out one of the two"
    if base not in moments.BASES:  # it may have a step of its own, which would not be called
        return f"must be named over {base.__name__}, a subclass; name it, or leave this out"
    return f"{against} rules out; leave out one of the two" if against else ""


def _option_against(ours: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    """Return an option, of all or of some parameters, that the eigenbasis has no use for."""
    given = [(n, ours[n], "") for n, x in OPTIONS.items() if _unused(x) and n in ours]
    given += [("damping", g["damping"], " in a parameter group") for g in groups if "damping" in g]
    for name, value, where in given:
        if differs(value, DAMPING if name == "damping" else OPTIONS[name].default):
            return f"{name}={value!r}{where}"
    # A number may come from another optimizer, whose group is used again.
    current = any(group.get("kl_clip_lr") == "current" for group in groups)
    return 'kl_clip_lr="current" in a parameter group' if current else ""


def _unused(option: Option) -> bool:
    return "eigenbasis" in option.unused_by
