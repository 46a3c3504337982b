"""Arguments and surroundings of a K-FAC optimizer: which are refused, and which bring a warning."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import agree, reports
from .errors import invalid, invalid_because, unexpected
from .options import OPTIONS, PER_GROUP
from .plan.schedule import PATIENCE
from .preconditioner import Preconditioner

# Keys of a parameter group, beside the base's own.
GROUP_KEYS = (*PER_GROUP, "kl_clip_lr")
# Options that a parameter group can't have of its own.
OF_ALL = frozenset(OPTIONS) - {*GROUP_KEYS, "process_group"}

ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer"  # torch's module of ZeRO 1

Parameters = Mapping[str, inspect.Parameter]


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
    title: str, known: Parameters, given: dict[str, Any]
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
        listed = isinstance(params, Iterable) and not isinstance(params, str | Mapping)
        given = model if listed or model is not None else params
        what = text = repr(given)
        if listed and model is None:
            what = "no model was given, but parameters"
        elif isinstance(given, type):
            what = f"the class {given.__name__}"
        elif len(text) > 60 or "\n" in text:
            what = f"of type {type(given).__name__}"
        why = (
            f"{what}; K-FAC hooks the model's layers: pass the nn.Module first, "
            f"as {title}(model, ...), or as model="
        )
        raise invalid_because("model", why)
    return model, params


# ---- surroundings ----


def refuse_zero_redundancy(title: str) -> None:
    """Refuse to be built by ZeroRedundancyOptimizer, which gives each rank some parameters only.

    A layer would miss its bias, and ranks would wait for layers that the others do not have.
    """
    if any(caller.f_globals.get("__name__") == ZERO_REDUNDANCY for caller in agree.callers()):
        why = (
            f"ZeroRedundancyOptimizer gives each rank a part of the parameters, and {title} needs "
            f'all; build {title} alone, where assignment="layer-wise" spreads the moments of Adam, '
            "AdamW and LAMB over ranks as ZeRO 1 does"
        )
        raise invalid_because("optimizer_class", why)


def missing_process_group(group: Any) -> None:
    """Warn if a launcher runs a script without a process group: each process trains alone."""
    world = os.environ.get("WORLD_SIZE", "1")
    distributed = torch.distributed
    initialized = distributed.is_available() and distributed.is_initialized()
    if world not in ("", "1") and group is None and not initialized:
        warnings.warn(
            f"WORLD_SIZE is {world}, but there is no process group: this process trains alone; "
            "call torch.distributed.init_process_group() before building model and optimizer",
            stacklevel=4,
        )


def refuse_step(kfac: Preconditioner) -> None:
    """Refuse a step inside a CUDA graph, and a process group that came after the optimizer."""
    distributed = torch.distributed
    if kfac.ranks.group is None and distributed.is_available() and distributed.is_initialized():
        world = distributed.get_world_size()
        if world > 1:
            raise RuntimeError(
                f"Invalid process group: its {world} ranks joined after the optimizer was built, "
                "so the optimizer would exchange nothing; build the optimizer after "
                "init_process_group()"
            )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a K-FAC step can't be captured in a CUDA graph: the host decides in each step which "
            "layers are due; run the training step outside of graphs"
        )


class Notices:
    """The warning of much that is left to the base, which comes once for each optimizer."""

    def __init__(self) -> None:
        self._is_given = False
        # Layers without calls, and who is trained, when coverage was last looked at.
        self._looked: Any = None

    def look(self, kfac: Preconditioner) -> None:
        """Warn if the search for calls of layers has ended, and what is covered is little."""
        if self._is_given:
            return
        states = kfac.registry.states.items()
        unseen = [n for n, x in states if x.unseen >= PATIENCE and not x.has_average]
        trained = [p.requires_grad for p in kfac.registry.parameters]
        former, self._looked = self._looked, (unseen, trained)
        if unseen and self._looked != former:
            text = reports.poor_coverage(kfac.coverage())
            self._is_given = bool(text)
            if text:
                agree.warn(kfac.ranks, text)
