"""K-FAC state inside the optimizer's own: flat tensors under ``state[parameter]["kfac_…"]``.

Other homes get lost: torch.distributed.checkpoint keeps only what is in a parameter's entry. There,
what there is must not depend on the moment, as it loads into a state in place: copies of factors
under decomposition are apart, in ``state_dict["kfac_under_way"]``. Where they get lost, the factors
as saved are decomposed in their place.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.ranks import GatherItem
from ..curvature.stacks import Specs, stack_key
from ..curvature.underway import COPIED
from ..layers import Layer
from ..plan.assignment import is_real
from .coverage import unwrapped
from .preconditioner import Preconditioner

PREFIX = "kfac_"
STEP = f"{PREFIX}step"
UNDER_WAY = f"{PREFIX}under_way"

State = MutableMapping[Tensor, dict[str, Any]]
Entries = dict[Tensor, dict[str, Tensor]]


def check_form(state: Any, keys: Sequence[str] = ("state", "param_groups")) -> None:
    """Refuse what is no optimizer's state at all, such as a model's."""
    if not isinstance(state, Mapping):
        what = f"it is of type {type(state).__name__}"
    elif missing := [key for key in keys if key not in state]:
        what = f"it has no {' and no '.join(map(repr, missing))}"
    else:
        return
    raise ValueError(
        f"Invalid state_dict: {what}; pass what an optimizer's state_dict() has returned, and not "
        "its model's, or the whole of a checkpoint that holds several"
    )


def _home(layer: Layer) -> Tensor:
    return layer.parameters[0]


def _named(kfac: Preconditioner, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    for name, view in kfac.views(layer):
        yield f"{PREFIX}{layer.tag}{name}", view


def under_way(kfac: Preconditioner) -> Entries:
    """What this rank has of decompositions that are under way."""
    found: Entries = {}
    for layer in kfac.active:
        found.setdefault(_home(layer), {}).update(_begun(kfac, layer))
    return {home: entry for home, entry in found.items() if entry}


def _begun(kfac: Preconditioner, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    for side in "ag":
        copies = kfac.second_order.under_way.copies.get((layer, side), {})
        for name, tensor in copies.items():
            yield _begun_name(layer, side, name), tensor


def _begun_name(layer: Layer, side: str, name: str) -> str:
    return f"{PREFIX}{layer.tag}{side}_begun_{name}"


_APART = tuple(f"_begun_{name}" for name in COPIED)


def publish(kfac: Preconditioner, state: State, only: Container[Tensor] | None = None) -> None:
    """Put every layer's tensors, as they stand, beside the base optimizer's.

    A layer waits for the base to have made its entry: some bases take a first step by its absence.
    After a load, those in ``only`` had one where the state comes from.
    """
    if only is None and kfac.published_by == _facts(kfac, state):
        return  # as in most steps: what entries have are views, which go with the tensors
    known = _take_back(kfac, state)

    def has_entry(p: Tensor) -> bool:
        if only is not None:
            return p in only
        return p.grad is not None or bool(state.get(p)) or p in known

    # The count is in all entries: torch.distributed.checkpoint wants one for every parameter.
    for p in kfac.parameters:
        if has_entry(p):
            state[p][STEP] = kfac.step_count
    convention = _convention(kfac)
    for layer in kfac.active:
        home = _home(layer)
        if has_entry(home):
            entry, values = state[home], _status(kfac, layer, convention)
            status = f"{PREFIX}{layer.tag}status"
            if status not in entry:
                entry.update(_named(kfac, layer))
                entry[status] = torch.tensor(values, device="cpu")
            elif kfac.published.get(layer) != values:
                entry[status].copy_(torch.tensor(values, device="cpu"))
            kfac.published[layer] = values
    kfac.published_by = _facts(kfac, state) if only is None else None


def _facts(kfac: Preconditioner, state: State) -> tuple[Any, ...]:
    """All that entries follow from; with which of them are there, as a user may empty some."""
    second = kfac.second_order
    return (
        [isinstance(e, dict) and e.get(STEP) is kfac.step_count for e in state.values()],
        [p.grad is not None for p in kfac.parameters],
        [layer.covers for layer in kfac.layers.values()],
        set(kfac.fed),
        dict(kfac.overdue),
        set(second.ready),
        dict(second.failures),
        dict(second.under_way.begun),
    )


def make_room(state: State, stepped: Container[Tensor]) -> None:
    """Before the base's step: let it begin its entry where only ours is, and it has to step.

    That is a parameter whose moments were in the eigenbasis, until its layer lost its state or was
    loaded elsewhere. Those in ``stepped`` take no step of the base, which starts anew if they ever
    come back to it.
    """
    for p, entry in state.items():
        if p.grad is None or not isinstance(entry, dict):
            continue
        bases = [key for key in entry if not str(key).startswith(PREFIX)]
        if p in stepped:
            for key in bases:
                del entry[key]
        elif not bases:
            entry.clear()


def _take_back(kfac: Preconditioner, state: State) -> set[Tensor]:
    """Remove the tensors of an earlier layout, whose layers may be gone; the entries they were in.

    Each layout has a step count of its own.
    """
    stale = set()
    for p, entry in list(state.items()):
        count = entry.get(STEP) if isinstance(entry, dict) else None
        if count is not None and count is not kfac.step_count:
            stale.add(p)
            for key in [k for k in entry if str(k).startswith(PREFIX)]:
                del entry[key]
            if not entry:
                del state[p]
    return stale


def _status(kfac: Preconditioner, layer: Layer, convention: int) -> list[int]:
    """First whether there are factors, and twice how long they are overdue; last in which steps
    what is under way of A and of G has begun, else -1."""
    second = kfac.second_order
    fed = (layer in kfac.fed) + 2 * kfac.overdue.get(layer, 0)
    flags = (fed, layer in second.ready, *layer.covers)
    begun = [second.under_way.begun.get((layer, side), -1) for side in "ag"]
    return [*map(int, flags), second.failures.get(layer, 0), convention, *begun]


def _convention(kfac: Preconditioner) -> int:
    """A code of what the factors mean; those of another convention are no factors here."""
    o = kfac.options
    return 4 * o.kaisa_scaling + 2 * (o.weight_sharing == "reduce") + (o.loss_reduction == "sum")


def absent(kfac: Preconditioner) -> list[str]:
    """The running averages that other ranks keep and this one does not."""
    return [
        f"{side.upper()} of {layer.name!r}"
        for layer in kfac.active
        if layer in kfac.fed
        for side in "ag"
        if (layer, side) not in kfac.shelf.factors
    ]


def consolidate(kfac: Preconditioner, to: int) -> Entries:
    """Bring what other ranks keep to rank ``to``; every rank must call."""
    things = [
        thing
        for layer in kfac.active
        if layer in kfac.fed
        for thing in _everywhere(kfac, layer)
        if thing.source != to
    ]
    gathered = kfac.ranks.gather_to(things, to, "checkpoint")
    entries: Entries = {}
    for (home, name), tensor in gathered.items():
        entries.setdefault(home, {})[name] = tensor
    return entries


def complete(
    kfac: Preconditioner, state_dict: dict[str, Any], parameters: list[Tensor], gathered: Entries
) -> None:
    """Add what is under way, and what came from other ranks; a state's own entries stay as is."""
    begun = under_way(kfac)
    for index, p in enumerate(parameters):
        theirs = gathered.get(p, {})
        apart = {k: v for k, v in theirs.items() if k.endswith(_APART)}
        if len(theirs) > len(apart):
            rest = {k: v for k, v in theirs.items() if k not in apart}
            state_dict["state"][index] = {**state_dict["state"].get(index, {}), **rest}
        apart |= begun.get(p, {})
        if apart:
            state_dict.setdefault(UNDER_WAY, {})[index] = apart


def _everywhere(kfac: Preconditioner, layer: Layer) -> Iterator[GatherItem]:
    """A layer's tensors on all ranks, with the rank that sends each."""
    here = {**dict(_named(kfac, layer)), **dict(_begun(kfac, layer))}
    specs = _kept(kfac, layer)
    for side in "ag":
        if (layer, side) in kfac.second_order.under_way.begun:
            copied = kfac.second_order.under_way.specs(stack_key(layer, side), layer.blocks)
            specs.append((f"{side}_begun_", kfac.owner(layer, side), copied))
    device = stack_key(layer, "g").device
    for prefix, source, tensors in specs:
        for kind, (shape, dtype) in tensors.items():
            name = f"{PREFIX}{layer.tag}{prefix}{kind}"
            yield GatherItem((_home(layer), name), source, shape, dtype, device, here.get(name))


def _kept(kfac: Preconditioner, layer: Layer) -> list[tuple[str, int, Specs]]:
    """What ranks keep of a layer: how names begin, the rank that sends these, and their shapes."""
    keys = {side: stack_key(layer, side) for side in "ag"}
    specs: list[tuple[str, int, Specs]] = []
    for side, key in keys.items():
        kept = kfac.statistics.specs(key, layer.blocks)
        kept |= kfac.second_order.tracking.specs(layer.blocks)
        kept |= kfac.second_order.specs(key, layer.blocks)
        specs.append((f"{side}_", kfac.owner(layer, side), kept))
    g, a = keys["g"], keys["a"]
    products = kfac.second_order.pair_specs(layer.blocks, g.size, a.size, g.dtype)
    return [*specs, ("", kfac.owner(layer, "g"), products)]


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
            # An entry that was ours alone must stay absent: bases test for that.
            if kept or not entry:
                base[index] = kept
        else:
            base[index] = entry
    state_dict["state"] = base
    apart = state_dict.pop(UNDER_WAY, {})
    if not isinstance(apart, dict) or not all(isinstance(x, dict) for x in apart.values()):
        raise ValueError(
            f"Invalid state_dict: its {UNDER_WAY} is {apart!r}; it must be a dict of tensors for "
            "each parameter, or absent"
        )
    for index, entry in apart.items():
        if index in by_index:
            entries.setdefault(by_index[index], {}).update(entry)
    _check_shapes(kfac, entries)
    return entries


def abridged(names: list[str], limit: int = 10, between: str = "; ") -> str:
    """The first ones, and how many more: a whole model's may be hundreds."""
    rest = len(names) - limit
    return between.join(names[:limit] + ([f"and {rest} more"] if rest > 0 else []))


def _check_shapes(kfac: Preconditioner, entries: Entries) -> None:
    named = unwrapped(kfac.model).named_parameters()
    names: dict[Tensor, str] = {p: name for name, p in named}
    problems = [
        f"{names.get(p, 'a parameter')}: {key} is a {type(value).__name__}, no tensor"
        for p, entry in entries.items()
        for key, value in entry.items()
        if not isinstance(value, Tensor) and not (key == STEP and is_real(value))
    ]
    problems += [
        f"{names.get(p, 'a parameter')}: {STEP} is {tuple(e[STEP].shape)}, it must be a number"
        for p, e in entries.items()
        if isinstance(e.get(STEP), Tensor) and e[STEP].numel() != 1
    ]
    for layer in () if problems else kfac.layers.values():
        status = f"{PREFIX}{layer.tag}status"
        wrong = [
            f"{layer.name}: {status} is {tuple(entry[status].shape)}, it must be "
            f"{_STATUS_SHAPES[0]}"
            for entry in _entries_of(layer, entries)
            if status in entry and entry[status].shape not in _STATUS_SHAPES
        ]
        problems += wrong
        if wrong:
            continue
        before, layer.covers = layer.covers, _covers_after(layer, entries)
        entry = entries.get(_home(layer), {}) if any(layer.covers) else {}
        for name, shape in _shapes(kfac, layer) if entry and _fits(kfac, layer, entry) else ():
            if name in entry and entry[name].shape != shape:
                problems.append(
                    f"{layer.name}: {name} is {tuple(entry[name].shape)}, the model needs {shape}"
                )
        layer.covers = before
    homes = {p for layer in kfac.layers.values() for p in (layer.weight, layer.bias)}
    for p, entry in entries.items():
        if entry.keys() - {STEP} and p not in homes:
            problems.append(
                f"{names.get(p, 'a parameter')} of shape {tuple(p.shape)} has factors, but no layer"
            )
    if problems:
        raise ValueError(
            "Invalid state_dict: its K-FAC factors do not fit the model's layers; load it into a "
            "model with the same layers and options, or remove its kfac_ entries:\n  "
            + abridged(problems, 20, "\n  ")
        )


_STATUS_SHAPES = (8,), (6,)  # the latter without what is under way


def _shapes(kfac: Preconditioner, layer: Layer) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of all that a checkpoint may have of a layer, by what the layer covers."""
    for prefix, _, tensors in _kept(kfac, layer):
        for kind, (shape, _) in tensors.items():
            yield f"{PREFIX}{layer.tag}{prefix}{kind}", tuple(shape)
    for side in "ag":
        specs = kfac.second_order.under_way.specs(stack_key(layer, side), layer.blocks)
        for name, (shape, _) in specs.items():
            yield _begun_name(layer, side, name), shape


def _entries_of(layer: Layer, entries: Entries) -> list[dict[str, Tensor]]:
    """Where a layer's tensors may be: with its weight, or with its bias where that was frozen."""
    own = (p for p in (layer.weight, layer.bias) if p is not None)
    return [entries[p] for p in own if p in entries]


def _covers_after(layer: Layer, entries: Entries) -> tuple[bool, bool]:
    """What a layer covers once it has these: the same as where they were saved, if it can.

    A layer that is wholly frozen keeps what it has until it is not, as in the run that was saved.
    """
    now = layer.covers_now()
    for entry in _entries_of(layer, entries):
        saved = _saved_covers(layer, entry)
        known = all(own >= theirs for own, theirs in zip(layer.trained, saved, strict=True))
        if any(saved) and known and now in (saved, (False, False)):
            return saved
    return layer.covers


def _saved_covers(layer: Layer, entry: dict[str, Tensor]) -> tuple[bool, bool]:
    """Of which weight and bias an entry has factors; neither where it has none."""
    status = entry.get(f"{PREFIX}{layer.tag}status")
    return (False, False) if status is None else (bool(status[2]), bool(status[3]))


def _fits(kfac: Preconditioner, layer: Layer, entry: dict[str, Tensor]) -> bool:
    """Whether the saved factors are of the same parameters and the same convention."""
    status = entry.get(f"{PREFIX}{layer.tag}status")
    if status is None:
        return True
    return _saved_covers(layer, entry) == layer.covers and int(status[5]) == _convention(kfac)


_MOMENTS = "exp_avg", "momentum"  # one of them is among what K-FAC keeps of a gradient


class Restored(NamedTuple):
    """Names of layers that do not go on as they were."""

    anew: list[str]  # there are no tensors of them
    begun_anew: list[str]  # what was being decomposed is lost, and begins with what was saved
    moments_anew: list[str]  # the moments are missing, or of another kind


def restore(kfac: Preconditioner, entries: Entries) -> Restored:
    """Continue from loaded tensors."""
    kfac.discard()
    kfac.second_order.under_way.clear()
    for layer in kfac.layers.values():
        layer.covers = _covers_after(layer, entries)
        kfac.forget(layer)
    kfac.lay_out()
    kfac.second_order.failures.clear()
    steps = [int(e[STEP]) for e in entries.values() if STEP in e]
    restored = Restored([], [], [])
    for layer in kfac.active:
        entry = entries.get(_home(layer), {})
        if not _restore_layer(kfac, layer, entry, restored):
            restored.anew.append(layer.name)
    kfac.resume(max(steps, default=0))
    return restored


def _restore_layer(
    kfac: Preconditioner, layer: Layer, entry: dict[str, Tensor], restored: Restored
) -> bool:
    """Take over one layer's tensors; False where its factors are not among them."""
    status = entry.get(f"{PREFIX}{layer.tag}status")
    views = dict(_named(kfac, layer))
    if status is None or not _fits(kfac, layer, entry):
        return False
    fed, ready, _, _, failures, _, *begun = status.tolist()
    second_order_present = True
    for name, view in views.items():
        if name in entry:
            view.copy_(entry[name])
        elif name.rsplit("_", 1)[-1] in ("average", "weight"):
            return False
        elif name.endswith("stale"):
            # Nobody has looked whether bases can follow, which may be rounded.
            view.fill_(kfac.second_order.tracking.tolerance > 0)
        elif name.endswith("left_out"):
            view.zero_()  # nobody has counted: all eigenvectors are multiplied by
        else:
            second_order_present = second_order_present and name.endswith("rejected")
    if fed:
        kfac.fed.add(layer)
        if fed > 1:
            kfac.overdue[layer] = fed // 2
    if ready and second_order_present:
        kfac.second_order.ready.add(layer)
    if failures:
        kfac.second_order.failures[layer] = failures
    if ready and second_order_present:
        for side, step in zip("ag", begun, strict=False):
            if step >= 0:
                names = {name: _begun_name(layer, side, name) for name in COPIED}
                copies = {n: entry[key] for n, key in names.items() if key in entry}
                if not kfac.second_order.go_on(kfac.shelf, (layer, side), step, copies):
                    restored.begun_anew.append(f"{layer.name!r} ({side.upper()})")
    moments = {f"{PREFIX}{layer.tag}{name}" for name in _MOMENTS}
    given = moments & entry.keys()  # a whole state has those of other ranks, too
    if moments & views.keys() - given if kfac.second_order.moments else given:
        restored.moments_anew.append(layer.name)
    return True
