"""K-FAC state inside the optimizer's own: flat tensors under ``state[parameter]["kfac_…"]``.

State in other places gets lost: torch.distributed.checkpoint keeps only the entries of parameters.
It loads into them in place, so that names and shapes must be the same in every step.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import is_real
from ..comm.ranks import GatherItem
from ..curvature.group import Specs, specs_of, stack_key
from ..curvature.lengths import SQUARE_SUM
from ..curvature.rules import RULES
from ..errors import invalid_because
from ..layers import Layer
from ..plan.moves import IS_REFRESHED, STARTS_ANEW, TensorSpec
from .coverage import unwrapped
from .preconditioner import Preconditioner

PREFIX = "kfac_"
STEP = f"{PREFIX}step"
_STATUS_SHAPE = (6,)
# Names of a layer's tensors, of any rule.
_NAMES = {"status", *(x.name for rule in RULES for x in rule.sizes.of_gradient)}
_NAMES |= {
    f"{side}_{x.name}"
    for rule in RULES
    for x in (*rule.sizes.of_owner, *rule.sizes.of_factor)
    for side in "ag"
}
_SCALE_FREE = 5  # in a code: G has no scale, and the base's momenta are of raw gradients

State = MutableMapping[Tensor, dict[str, Any]]
Entries = dict[Tensor, dict[str, Tensor]]


def check_form(state: Any, keys: Sequence[str] = ("state", "param_groups")) -> None:
    """Refuse a state that is not an optimizer's, such as a model's."""
    if not isinstance(state, Mapping):
        what = f"it is of type {type(state).__name__}"
    elif missing := [key for key in keys if key not in state]:
        what = f"it has no {' and no '.join(map(repr, missing))}"
    else:
        return
    why = (
        f"{what}; pass what an optimizer's state_dict() has returned, and not its model's, or "
        "the whole of a checkpoint that holds several"
    )
    raise invalid_because("state_dict", why)


def _named(kfac: Preconditioner, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    group = kfac.groups.of.get(layer)  # a frozen layer has none
    for name, view in () if group is None else group.views(layer):
        yield f"{PREFIX}{layer.tag}{name}", view


# ---- in the live state ----


def publish(kfac: Preconditioner, state: State, only: Container[Tensor] | None = None) -> None:
    """Put every layer's tensors into the optimizer's state.

    Until the base has made an entry, the layer's tensors stay out: some bases take an absent entry
    for the sign of a first step. After a load, ``only`` has the parameters that had an entry in the
    loaded state.
    """
    # The tensors of an earlier layout, which has a step count of its own, go: layers may be gone.
    known = set()
    for p, entry in list(state.items()):
        count = entry.get(STEP) if isinstance(entry, dict) else None
        if count is not None and count is not kfac.step_count:
            known.add(p)
            for key in [k for k in entry if str(k).startswith(PREFIX)]:
                del entry[key]
            if not entry:
                del state[p]

    parameters = kfac.registry.parameters
    if only is None:
        begun = [p for p in parameters if p.grad is not None or state.get(p) or p in known]
    else:
        begun = [p for p in parameters if p in only]
    # Every entry has the step count: torch.distributed.checkpoint wants one for every parameter.
    for p in begun:
        state[p][STEP] = kfac.step_count
    homes, convention = set(begun), _convention(kfac)
    for layer in kfac.registry.active:
        home = layer.parameters[0]  # its entry holds the layer's tensors
        if home in homes:
            entry, flags = state[home], kfac.registry.states[layer.name]
            averages = flags.has_average + 2 * flags.missed
            values = [averages, int(flags.has_state), *map(int, layer.covers)]
            values += [flags.failures, convention]
            status = f"{PREFIX}{layer.tag}status"
            if status not in entry:
                entry.update(_named(kfac, layer))
                entry[status] = torch.tensor(values, device="cpu")
            elif kfac.groups.published.get(layer) != values:
                entry[status].copy_(torch.tensor(values, device="cpu"))
            kfac.groups.published[layer] = values


def apart(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return entries with memory of their own: a pickled row would take its whole stack along."""

    def alone(value: Any) -> Any:
        is_row = type(value) is Tensor and value.untyped_storage().nbytes() > value.nbytes
        return value.clone() if is_row else value

    return {
        key: {k: alone(v) for k, v in entry.items()} if isinstance(entry, dict) else entry
        for key, entry in state.items()
    }


def _convention(kfac: Preconditioner) -> int:
    """Return a code of the factors' meaning; factors of another convention do not fit here."""
    o = kfac.options
    scale = 4 * o.kaisa_scaling + (o.loss_reduction == "sum")
    return (_SCALE_FREE if kfac.rule.scale_free else scale) + 2 * (o.weight_sharing == "reduce")


# ---- on several ranks ----


def consolidate(
    kfac: Preconditioner, to: int, momentum: str, momenta: Mapping[Tensor, Tensor]
) -> Entries:
    """Bring other ranks' tensors to rank ``to``; every rank must call.

    ``momenta`` has the base's momentum, of this name, of each parameter that K-FAC steps; on ranks
    that keep none, an empty tensor of the same dtype.
    """
    items = [
        item
        for layer in kfac.registry.active
        if kfac.registry.states[layer.name].has_average
        for _, item in _kept(kfac, layer)
        if item.source != to
    ]
    placements, active = kfac.registry.placements, kfac.registry.active
    sources: dict[Tensor, int] = {p: placements.owner(x, "g") for x in active for p in x.parameters}
    for p, kept in momenta.items():
        if sources[p] != to:
            here = kept if kept.numel() == p.numel() else None
            key = p, momentum
            items.append(GatherItem(key, sources[p], tuple(p.shape), kept.dtype, p.device, here))
    entries: Entries = {}
    for (home, name), tensor in kfac.ranks.gather_to(items, to, "checkpoint").items():
        entries.setdefault(home, {})[name] = tensor
    return entries


def _kept(kfac: Preconditioner, layer: Layer) -> Iterator[tuple[TensorSpec, GatherItem]]:
    """Yield a layer's tensors on all ranks, with the rank that sends each."""
    here, home = dict(_named(kfac, layer)), layer.parameters[0]
    device, placements = stack_key(layer, "g").device, kfac.registry.placements
    for prefix, side, specs in _specs(kfac, layer):
        source = placements.owner(layer, side)
        for spec, (shape, dtype) in specs.items():
            name = f"{PREFIX}{layer.tag}{prefix}{spec.name}"
            yield spec, GatherItem((home, name), source, shape, dtype, device, here.get(name))


def _specs(kfac: Preconditioner, layer: Layer) -> Iterator[tuple[str, str, Specs]]:
    """Yield a layer's tensors: their prefix, and the factor whose owner has them."""
    sizes, blocks = kfac.groups.sizes, layer.blocks
    average, stored = kfac.options.factor_dtype, kfac.rule.dtype
    g, a = stack_key(layer, "g"), stack_key(layer, "a")
    for side, key in (("a", a), ("g", g)):
        owned = specs_of(sizes.of_owner, blocks, key[:2], average, key.dtype)
        applied = specs_of(sizes.of_factor, blocks, key[:2], stored, key.dtype)
        yield f"{side}_", side, owned | applied
    yield "", "g", specs_of(sizes.of_gradient, blocks, (g.size, a.size), stored, g.dtype)


# ---- loading ----


def take_out(kfac: Preconditioner, state_dict: dict[str, Any], groups: list[Any]) -> Entries:
    """Separate K-FAC's tensors from a loaded ``state_dict``, which keeps only the base's.

    ``Optimizer.load_state_dict`` would cast them to the parameters' dtype.
    """
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    parameters = [p for group in groups for p in group["params"]]
    by_index = dict(zip(saved, parameters, strict=False))
    entries: Entries = {}
    base: dict[Any, Any] = {}
    for index, entry in state_dict["state"].items():
        if isinstance(entry, dict) and index in by_index:
            kept = {k: v for k, v in entry.items() if not str(k).startswith(PREFIX)}
            entries[by_index[index]] = {k: v for k, v in entry.items() if k not in kept}
            # An entry of K-FAC's tensors alone must stay absent: bases test for an absent entry.
            if kept or not entry:
                base[index] = kept
        else:
            base[index] = entry
    _check_contents(kfac, entries, [str(key) for key in state_dict])
    foreign = {p for x in foreign_moments(kfac, entries) for p in (x.weight, x.bias)}
    state_dict["state"] = {i: e for i, e in base.items() if by_index.get(i) not in foreign}
    return entries


def foreign_moments(kfac: Preconditioner, entries: Entries) -> list[Layer]:
    """Return layers whose saved moments mean nothing here.

    They are of preconditioned gradients, and K-FAC's now of raw ones, or the other way round; or
    one number a block took the place of second moments that the base reads.
    """
    lacks_second = SQUARE_SUM not in kfac.groups.sizes.of_gradient and any(
        key.endswith(SQUARE_SUM.name) for entry in entries.values() for key in entry
    )

    def kind(code: int) -> bool:
        return code & _SCALE_FREE == _SCALE_FREE

    return [
        layer
        for layer in kfac.registry.layers.values()
        for entry in _entries_of(layer, entries)
        if (status := entry.get(f"{PREFIX}{layer.tag}status")) is not None
        and (lacks_second or kind(int(status[5])) != kind(_convention(kfac)))
    ]


def abridged(names: list[str], limit: int = 10, between: str = "; ") -> str:
    """Return the first names, and how many more there are: a whole model's may be hundreds."""
    rest = len(names) - limit
    return between.join(names[:limit] + ([f"and {rest} more"] if rest > 0 else []))


def _check_contents(kfac: Preconditioner, entries: Entries, keys: Sequence[str]) -> None:
    """Refuse a state whose K-FAC part does not fit; ``keys`` are those of the whole state."""
    named = unwrapped(kfac.model).named_parameters()
    names: dict[Tensor, str] = {p: name for name, p in named}
    problems = [f"{key} is unknown" for key in keys if key.startswith(PREFIX)]
    problems += _malformed(entries, names)
    tags: dict[Tensor | None, list[str]] = {}
    for layer in kfac.registry.layers.values():
        for part in (layer.weight, layer.bias):
            tags.setdefault(part, []).append(layer.tag)
    for p in [p for p in entries if p in tags]:
        known = {STEP, *(f"{PREFIX}{tag}{name}" for tag in tags[p] for name in _NAMES)}
        title = names.get(p, "a parameter")
        problems += [f"{title}: {key} is unknown" for key in sorted(entries[p].keys() - known)]
    for layer in () if problems else kfac.registry.layers.values():
        problems += _misfits(kfac, layer, entries)
    for p, entry in entries.items():
        if entry.keys() - {STEP} and p not in tags:
            name = names.get(p, "a parameter")
            problems.append(f"{name} of shape {tuple(p.shape)} has factors, but no layer")
    if problems:
        why = (
            "its K-FAC factors do not fit the model's layers; load it into a model with the same "
            "layers and options, or remove its kfac_ entries:\n  "
        )
        raise invalid_because("state_dict", why + abridged(problems, 20, "\n  "))


def _malformed(entries: Entries, names: Mapping[Tensor, str]) -> Iterator[str]:
    """Yield entries that are no tensors, and counts that are no numbers."""
    for p, entry in entries.items():
        name, count = names.get(p, "a parameter"), entry.get(STEP)
        for key, value in entry.items():
            if not isinstance(value, Tensor) and not (key == STEP and is_real(value)):
                yield f"{name}: {key} is a {type(value).__name__}, no tensor"
        if isinstance(count, Tensor) and count.numel() != 1:
            yield f"{name}: {STEP} is {tuple(count.shape)}, it must be a number"
        elif (isinstance(count, Tensor) or is_real(count)) and int(count) < 0:
            yield f"{name}: {STEP} is {int(count)}, it must be 0 or more"


def _misfits(kfac: Preconditioner, layer: Layer, entries: Entries) -> list[str]:
    """Return a layer's entries whose shapes are not the model's."""
    status = f"{PREFIX}{layer.tag}status"
    wrong = [
        f"{layer.name}: {status} is {tuple(entry[status].shape)}, it must be {_STATUS_SHAPE}"
        for entry in _entries_of(layer, entries)
        if status in entry and entry[status].shape != _STATUS_SHAPE
    ]
    if wrong:
        return wrong
    before = layer.covers
    layer.cover(_covers_after(layer, entries))
    entry = entries.get(layer.parameters[0], {}) if any(layer.covers) else {}
    if entry and _fits(kfac, layer, entry):
        for spec, item in _kept(kfac, layer):
            _, name = item.key
            if name in entry and entry[name].shape != item.shape:
                found = tuple(entry[name].shape)
                wrong.append(f"{layer.name}: {name} is {found}, the model needs {item.shape}")
            elif name in entry and status in entry and entry[status][1]:
                faults = kfac.rule.faults(spec, entry[name])
                wrong += [f"{layer.name}: {name} is {why}" for why in faults]
    layer.cover(before)
    return wrong


def _entries_of(layer: Layer, entries: Entries) -> list[dict[str, Tensor]]:
    """Return the entries of weight and bias: the bias's has tensors if the weight was frozen."""
    own = (p for p in (layer.weight, layer.bias) if p is not None)
    return [entries[p] for p in own if p in entries]


def _covers_after(layer: Layer, entries: Entries) -> tuple[bool, bool]:
    """Return the covers of a layer once it has these entries: the saved covers, if possible.

    A wholly frozen layer keeps its factors until it trains again, as in the saved run.
    """
    now = layer.covers_now()
    for entry in _entries_of(layer, entries):
        saved = _saved_covers(layer, entry)
        known = all(own >= theirs for own, theirs in zip(layer.trained, saved, strict=True))
        if any(saved) and known and now in (saved, (False, False)):
            return saved
    return layer.covers


def _saved_covers(layer: Layer, entry: dict[str, Tensor]) -> tuple[bool, bool]:
    """Return whether an entry has factors of weight and of bias; neither without a status."""
    status = entry.get(f"{PREFIX}{layer.tag}status")
    return (False, False) if status is None else (bool(status[2]), bool(status[3]))


def is_frozen_otherwise(layer: Layer, entries: Entries) -> bool:
    """Return whether the saved factors are of other parameters of a layer than it trains now."""
    saved = [_saved_covers(layer, entry) for entry in _entries_of(layer, entries)]
    return any(any(covers) and covers != layer.covers for covers in saved)


def _fits(kfac: Preconditioner, layer: Layer, entry: dict[str, Tensor]) -> bool:
    """Return whether saved factors are of the same parameters and the same convention."""
    status = entry.get(f"{PREFIX}{layer.tag}status")
    if status is None:
        return True
    same = int(status[5]) == _convention(kfac)
    return same and _saved_covers(layer, entry) == layer.covers


def restore(kfac: Preconditioner, entries: Entries) -> list[str]:
    """Continue from loaded tensors; return the names of layers whose factors start anew."""
    kfac.discard()
    for layer in kfac.registry.layers.values():
        layer.cover(_covers_after(layer, entries))
        kfac.registry.states[layer.name].reset()
    kfac.allocate()
    steps = [int(e[STEP]) for e in entries.values() if STEP in e]
    anew = []
    for layer in kfac.registry.active:
        state = kfac.registry.states[layer.name]
        state.failures = state.refreshes = 0
        state.refreshed = state.before = -1
        entry = entries.get(layer.parameters[0], {})
        if not _restore_layer(kfac, layer, entry):
            anew.append(layer.name)
    kfac.resume(max(steps, default=0))
    return anew


def _restore_layer(kfac: Preconditioner, layer: Layer, entry: dict[str, Tensor]) -> bool:
    """Take over one layer's tensors; return False where its factors are not among them."""
    status = entry.get(f"{PREFIX}{layer.tag}status")
    if status is None or not _fits(kfac, layer, entry):
        return False
    averages, has_state, _, _, failures, _ = status.tolist()
    is_complete = True
    for spec, item in _kept(kfac, layer):
        _, name = item.key
        if item.tensor is None:
            continue
        if name in entry:
            item.tensor.copy_(entry[name])
        elif spec.if_absent == STARTS_ANEW:
            return False
        elif spec.if_absent == IS_REFRESHED:
            is_complete = False
    state = kfac.registry.states[layer.name]
    state.has_average, state.missed = bool(averages), averages // 2
    state.has_state = bool(has_state) and is_complete
    state.failures = failures
    return True
