"""Loading a state into a K-FAC optimizer: of its class, of its base's, or of an older version."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm import agreement
from ..core import checkpoint
from ..core.coverage import unwrapped
from ..core.preconditioner import Preconditioner
from ..curvature.lengths import SQUARE_SUM
from ..errors import invalid_because
from ..layers import Layer
from .arguments import GROUP_KEYS

if TYPE_CHECKING:
    from .mixin import KFACMixin


class Load:
    """One call of ``load_state_dict``: the given state, and the outcome of the load."""

    def __init__(self, optimizer: KFACMixin) -> None:
        self._kfac = optimizer.preconditioner
        self.entries: checkpoint.Entries = {}  # K-FAC's part of the state
        self.anew: list[str] = []  # layers whose factors are missing, or do not fit
        self._fresh = False  # the state was taken before any step, so that nothing is missing

    def separate(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        """Return the base's part of a state, with K-FAC's keys of its groups."""
        from .mixin import KFACMixin

        assert isinstance(optimizer, KFACMixin)
        checkpoint.check_form(loaded)
        loaded = loaded.copy()
        groups = optimizer.param_groups
        self.entries = checkpoint.take_out(self._kfac, loaded, groups)
        of_base = any("damping" not in group for group in loaded["param_groups"])
        self._fresh = not (of_base or loaded["state"] or any(self.entries.values()))
        # A base optimizer's groups lack K-FAC's keys: these stay as they are in this optimizer.
        # Another method's groups may have more of them.
        loaded["param_groups"] = [
            {
                **{key: here[key] for key in GROUP_KEYS if key in here},
                **{k: v for k, v in saved.items() if k in here or k not in GROUP_KEYS},
            }
            for saved, here in zip(loaded["param_groups"], groups, strict=False)
        ] + loaded["param_groups"][len(groups) :]
        return loaded

    @property
    def refrozen(self) -> list[Layer]:
        """The layers whose saved factors are of other parameters than they train now."""
        layers = map(self._kfac.registry.layers.__getitem__, self.anew)
        return [x for x in layers if checkpoint.is_frozen_otherwise(x, self.entries)]

    def warn(self, optimizer: KFACMixin) -> None:
        """Warn of layers whose factors or momenta start anew."""
        missing, kfac, base = self.anew, self._kfac, optimizer.base_part
        # Layers that have a state here, or had one, but no momentum
        anew = dict.fromkeys(x.name for x in checkpoint.foreign_moments(kfac, self.entries))
        _, with_momenta = kfac.groups.stepped()
        group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        for layer in kfac.registry.with_state:
            weight = layer.parameters[0]
            keeps = weight in with_momenta and base.keeps(group_of[weight])
            if keeps and base.momentum not in optimizer.state[weight]:
                anew[layer.name] = None
        if anew:
            names = ", ".join(map(repr, anew))
            warnings.warn(
                f"this state lacks the momenta of {names}, or has those of another compute_method "
                "or base, so these momenta start at zero; to continue a run, build the optimizer "
                "like the saved one, and on several ranks call consolidate_state_dict() before a "
                "save",
                stacklevel=3,
            )
        if missing and not self._fresh:
            ranks, layers = kfac.ranks, kfac.registry.layers
            refrozen = {layer.name for layer in self.refrozen}.issuperset(missing)
            share = f", which rank {ranks.rank} keeps" if ranks.world > 1 and not refrozen else ""
            cause = " (was it saved without consolidate_state_dict()?)" if share else ""
            parameters = {p for name in missing for p in layers[name].parameters}
            new = "; where the base steps first, its moments begin anew"
            until = new if optimizer.base_part.stepped & parameters else ""
            if refrozen:
                until += "; other parts of these layers were frozen when they were saved"
            warnings.warn(
                "the checkpoint has no K-FAC factors of this kind for "
                f"{', '.join(map(repr, missing))}{share}{cause}; K-FAC estimates them again, from "
                f"the next step that gathers on{until}",
                stacklevel=3,
            )


def warn_of_share(optimizer: KFACMixin) -> None:
    """Warn that a state is one rank's share, and name what it lacks."""
    kfac = optimizer.preconditioner
    if kfac.ranks.world == 1 or _saves_all_shares():
        return
    states, group_of = kfac.registry.states, kfac.groups.of
    averages = [
        f"{side.name.upper()} of {layer.name!r}"
        for layer in kfac.registry.active
        for side in group_of[layer].sides
        if states[layer.name].has_average and layer not in side.owned
    ]
    absent = [checkpoint.abridged(averages, between=", ")] if averages else []
    elsewhere = {p for p, momentum in optimizer.momenta().items() if momentum.shape != p.shape}
    if elsewhere:
        named = unwrapped(kfac.model).named_parameters()
        names = [repr(name) for name, p in named if p in elsewhere]
        absent.append(f"the momenta of {checkpoint.abridged(names, between=', ')}")
    if absent:
        # With the number of steps, Python's filter takes each save's text for a new one.
        warnings.warn(
            f"state_dict() after {kfac.steps} steps has only rank {kfac.ranks.rank}'s share of the "
            "state; call consolidate_state_dict(to=rank) on all ranks first, or save all ranks' "
            f"shares, as torch.distributed.checkpoint does. Missing are {'; '.join(absent)}; and "
            "the state that K-FAC computes from them",
            stacklevel=3,
        )


def _saves_all_shares() -> bool:
    """Return whether torch.distributed.checkpoint asks for the state, to save every rank's share.

    A full state is different: of plain tensors, torch takes rank 0's alone.
    """
    for caller in agreement.callers():
        module, values = caller.f_globals.get("__name__"), caller.f_locals
        if module == "torch.distributed.checkpoint.state_dict" and "options" in values:
            full = values["options"] is not None and values["options"].full_state_dict
            return not (full and caller.f_code.co_name.startswith("get_"))
    return False


def warn_of_uneven(kfac: Preconditioner, layers: list[Layer]) -> None:
    """Warn of layers whose momenta begin anew on all ranks."""
    names = checkpoint.abridged([repr(layer.name) for layer in layers], between=", ")
    agreement.warn(
        kfac.ranks,
        f"only some ranks have loaded the momenta of {names}, which begin anew on all ranks; call "
        "consolidate_state_dict() before a save, and load the same state on all ranks",
    )


def take_entries(state: Any) -> checkpoint.Entries:
    """Take K-FAC's tensors out of a live state; the base must see its own entries only."""
    entries = {
        p: {k: v for k, v in entry.items() if str(k).startswith(checkpoint.PREFIX)}
        for p, entry in state.items()
        if isinstance(entry, dict)
    }
    for p, ours in entries.items():
        for key in ours:
            del state[p][key]
        if ours and not state[p]:
            del state[p]
    return entries


def set_base_state(
    optimizer: KFACMixin, state: dict[str, Any], set_state: Callable[[dict[str, Any]], None]
) -> None:
    """Let the base set a loaded state; the base completes a state of an older version.

    A state that lacks keys which the base reads is refused: a step would end in a KeyError.
    """
    before = {n: optimizer.__dict__[n] for n in state if n in optimizer.__dict__}
    former = before.get("param_groups", [])
    failed: Exception | None = None
    try:
        set_state(state)
    except Exception as error:
        failed = error
    pairs = list(zip(optimizer.param_groups, former, strict=False))
    read = dict(optimizer.defaults)
    if "differentiable" not in inspect.signature(optimizer._base.__init__).parameters:
        read.pop("differentiable", None)  # a load adds it to any optimizer's defaults
    names = [k for k in read if any(k in old and k not in new for new, old in pairs)]
    if failed is None and not names:
        return
    optimizer.__dict__.update(before)
    if not names and not isinstance(failed, KeyError):
        assert failed is not None
        raise failed
    lacks = f"parameter groups lack {', '.join(names)}" if names else f"entries lack {failed}"
    why = (
        f"its {lacks}, which {optimizer._base.__name__} reads; it is of another optimizer, or of "
        "an older version: load it into one of that class, add what it lacks, or begin without "
        "its state"
    )
    raise invalid_because("state_dict", why) from failed


def of_base(optimizer: KFACMixin, state: dict[str, Any]) -> dict[str, Any]:
    """Return a whole state without K-FAC's part, and with the base's second moments."""
    kfac = optimizer.preconditioner
    registry = kfac.registry
    if registry.placements.sharded:
        raise RuntimeError("base_state_dict() can't gather parameters that fully_shard has sharded")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries: dict[Tensor, dict[str, Any]] = {
        p: dict(state["state"].get(i, {})) for i, p in enumerate(parameters)
    }
    seconds: dict[Tensor, Tensor] = {}
    replaces = SQUARE_SUM in kfac.groups.sizes.of_gradient
    for layer in registry.with_state if replaces else ():
        total = entries[layer.parameters[0]][f"{checkpoint.PREFIX}{layer.tag}{SQUARE_SUM.name}"]
        for weight in layer.parameters:
            seconds.setdefault(weight, torch.zeros(weight.shape, dtype=total.dtype))
        g, a = layer.size_of("g")[0], layer.size_of("a")[0]
        matrix = (total.cpu() / (g * a))[:, None, None].expand(-1, g, a)
        own = [seconds[p] for p in layer.parameters]
        for part, room in zip(layer.matrix_parts(matrix), layer.parameter_parts(own), strict=True):
            room.copy_(part)
    for p, second in seconds.items():
        if optimizer.base_part.momentum in entries[p]:
            entries[p][optimizer.base_part.second[0]] = second.to(p.device, p.dtype)
    # Clone counts: the base counts in place.
    kept = {
        i: {
            key: value.clone() if key == "step" and isinstance(value, Tensor) else value
            for key, value in entries[p].items()
            if not str(key).startswith("kfac")
        }
        for i, p in enumerate(parameters)
    }
    groups = [
        {key: value for key, value in group.items() if key not in GROUP_KEYS}
        for group in state["param_groups"]
    ]
    return {"state": {i: entry for i, entry in kept.items() if entry}, "param_groups": groups}
