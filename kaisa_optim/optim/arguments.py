"""The arguments of a K-FAC class: which are the base's, which are K-FAC's, and what they mean."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.options import OPTIONS, PER_GROUP, SECTIONS, unexpected
from ..errors import invalid, invalid_because

# Keys of a parameter group, beside the base's own.
GROUP_KEYS = (*PER_GROUP, "kl_clip_lr")
# Options that a parameter group can't have of its own.
OF_ALL = frozenset(OPTIONS) - {*GROUP_KEYS, "process_group"}

Parameters = Mapping[str, inspect.Parameter]


def parameters_of(base: type[Optimizer]) -> Parameters:
    return inspect.signature(base.__init__).parameters


def signature(base: type[Optimizer]) -> inspect.Signature:
    """Return the base's arguments as they are, then the model and K-FAC's options by keyword."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    first = [p for p in parameters_of(base).values() if p.kind not in variadic]
    given = "nn.Module | Iterable[Any] | None"
    first[1:2] = [p.replace(annotation=given) for p in first[1:2]]  # a base of *args has none
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter("model", keyword, default=None, annotation="nn.Module | None")]
    for name, option in OPTIONS.items():
        own.append(
            inspect.Parameter(name, keyword, default=option.default, annotation=option.annotation)
        )
    return inspect.Signature([*first, *own])


def documentation() -> str:
    """Return the docstring's part on K-FAC's options."""
    lines = ["K-FAC's options; those marked (s) may be callables of the step."]
    for section, options in SECTIONS.items():
        lines += ["", f"{section}:"]
        for option in options:
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
    ours = {n: v for n, v in given.items() if n in OPTIONS}
    theirs = {n: v for n, v in given.items() if n not in ours}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        for name in theirs:
            if name not in known:
                raise unexpected(title, name, OPTIONS, known)
    return theirs, ours


def refuse_misplaced(
    title: str, known: Parameters, rest: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Refuse parameters in the learning rate's place, and a rate that is a text or a function."""
    second = rest[0] if rest and list(known)[1:2] == ["lr"] else None
    if isinstance(second, Iterable) and not isinstance(second, Tensor | str):
        why = (
            f"parameters come first, and the model by name: {title}(parameters, model=model, ...); "
            f"{title}(model, ...) takes all of the model's"
        )
        raise invalid_because("second argument", why)
    lr = named.get("lr", second)
    if isinstance(lr, str) or callable(lr):
        must = "it must be a number or a tensor; torch.optim.lr_scheduler.LambdaLR takes a function"
        raise invalid("lr", lr, must)


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
