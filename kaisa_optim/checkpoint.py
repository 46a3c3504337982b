"""K-FAC state inside the optimizer's own: flat tensors under ``state[parameter]["kfac_…"]``.

State in other places gets lost: torch.distributed.checkpoint keeps only the entries of parameters.
It loads into them in place, so that names and shapes must be the same in every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import agree
from .comm.ranks import GatherItem
from .curvature.group import specs_of, stack_key
from .curvature.lengths import SQUARE_SUM
from .errors import invalid_because
from .layers import Layer
from .model import unwrapped
from .options import GROUP_KEYS
from .plan.facts import IS_REFRESHED, STARTS_ANEW, TensorSpec
from .preconditioner import Preconditioner

if TYPE_CHECKING:
    from .optimizer import KFACMixin

PREFIX = "kfac_"
STEP = f"{PREFIX}step"
_SCALE_FREE = 5  # in a convention: G has no scale, and the base's momenta are of raw gradients

State = MutableMapping[Tensor, dict[str, Any]]
Entries = dict[Tensor, dict[str, Tensor]]


class SavedFlags(NamedTuple):
    """Facts of one layer, as ``kfac_status`` has them in this order."""

    averages: int = 0  # 1 if there are averages, and 2 for each slot that was missed
    state: int = 0  # whether a refresh has made state
    weight: int = 0  # whether the factors cover the weight
    bias: int = 0
    failures: int = 0  # refreshes that failed in a row
    convention: int = 0  # a code of the factors' meaning

    @property
    def covers(self) -> tuple[bool, bool]:
        return bool(self.weight), bool(self.bias)


# ---- in the live state ----


def publish(kfac: Preconditioner, state: State, only: Container[Tensor] | None = None) -> None:
    """Put every layer's tensors into the optimizer's state.

    Until the base has made an entry, the layer's tensors stay out: some bases take an absent entry
    for the sign of a first step. After a load, ``only`` has the parameters that had an entry in the
    loaded state.
    """
    count, registry = kfac.step_count, kfac.registry
    # Another count is of an earlier layout, whose tensors all go: else every save would have them.
    counts = [(p, x[STEP]) for p, x in state.items() if isinstance(x, dict) and STEP in x]
    stale = {p for p, former in counts if former is not count}
    for p in stale:
        for key in [k for k in state[p] if str(k).startswith(PREFIX)]:
            del state[p][key]
        if not state[p]:
            del state[p]
    every, begun = registry.group_of, list[Tensor]()
    if only is not None:
        begun = [p for p in every if p in only]
    elif stale or len(counts) < len(every):  # in most steps, all have the count
        begun = [p for p in every if p.grad is not None or state.get(p) or p in stale]
    # torch.distributed.checkpoint refuses a save unless all parameters have an entry: the count.
    for p in begun:
        state[p][STEP] = count
    for layer in registry.active:
        entry, facts = state.get(layer.parameters[0], {}), registry.states[layer.name]
        if STEP not in entry:
            continue
        # In the order of SavedFlags, whose last one, the convention, never changes.
        flags = [facts.has_average + 2 * facts.missed, int(facts.has_state)]
        flags += [*map(int, layer.covers), facts.failures]
        key = f"{PREFIX}{layer.tag}status"
        if key not in entry:
            for name, view in kfac.groups.of[layer].views(layer):
                entry[f"{PREFIX}{layer.tag}{name}"] = view
            entry[key] = torch.tensor([*flags, _convention(kfac)], device="cpu")
        elif entry[key].tolist()[:-1] != flags:
            entry[key][:-1] = torch.tensor(flags, device="cpu")


def compact(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return entries with memory of their own."""
    compacted = dict(state)
    for key, entry in state.items():
        if isinstance(entry, dict):
            compacted[key] = values = dict(entry)
            for name, value in entry.items():
                # A row of a stack must be copied: pickle would write the whole stack for each row.
                if type(value) is Tensor and value.untyped_storage().nbytes() > value.nbytes:
                    values[name] = value.clone()
    return compacted


def take_entries(state: Any) -> Entries:
    """Take K-FAC's tensors out of a copied state; the base must see its own entries only."""
    entries: Entries = {}
    for p, entry in list(state.items()):
        if isinstance(entry, dict):
            entries[p] = {k: v for k, v in entry.items() if str(k).startswith(PREFIX)}
            state[p] = {k: v for k, v in entry.items() if k not in entries[p]}
            # An entry of K-FAC's tensors alone must stay absent: bases test for that.
            if entries[p] and not state[p]:
                del state[p]
    return entries


def _convention(kfac: Preconditioner) -> int:
    # A code of the factors' meaning; factors of another convention do not fit here.
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
    registry, items = kfac.registry, []
    sources: dict[Tensor, int] = {}
    for layer in registry.active:
        sources |= dict.fromkeys(layer.trainable, registry.owner(layer, "g"))
        if registry.states[layer.name].has_average:
            items += [item for _, item in _tensors(kfac, layer) if item.source != to]
    for p, tensor in momenta.items():
        if sources[p] != to:
            part = tensor if tensor.numel() == p.numel() else None
            key = p, momentum
            items.append(GatherItem(key, sources[p], tuple(p.shape), tensor.dtype, p.device, part))
    entries: Entries = {}
    for (home, name), tensor in kfac.ranks.gather_to(items, to, "checkpoint").items():
        entries.setdefault(home, {})[name] = tensor
    return entries


def _tensors(kfac: Preconditioner, layer: Layer) -> Iterator[tuple[TensorSpec, GatherItem]]:
    # Yield a layer's tensors on all ranks, with the rank that sends each: the factor's owner.
    # Nothing here may follow from what this rank keeps, except for the tensor itself: ranks pair
    # the tensors that they send and receive by their order.
    group, sizes = kfac.groups.of.get(layer), kfac.groups.sizes
    views = {} if group is None else dict(group.views(layer))  # a frozen layer has no group
    average, stored = kfac.options.factor_dtype, kfac.rule.dtype
    g, a, parts = stack_key(layer, "g"), stack_key(layer, "a"), []
    for side, key in (("a", a), ("g", g)):
        owned = specs_of(sizes.of_owner, layer.blocks, key[:2], average, key.dtype)
        applied = specs_of(sizes.of_factor, layer.blocks, key[:2], stored, key.dtype)
        parts.append((f"{side}_", side, owned | applied))
    of_gradient = specs_of(sizes.of_gradient, layer.blocks, (g.size, a.size), stored, g.dtype)
    for prefix, side, specs in (*parts, ("", "g", of_gradient)):
        source = kfac.registry.owner(layer, side)
        for spec, (shape, dtype) in specs.items():
            name = f"{prefix}{spec.name}"
            key_of_entry = layer.parameters[0], f"{PREFIX}{layer.tag}{name}"
            yield spec, GatherItem(key_of_entry, source, shape, dtype, g.device, views.get(name))


def warn_of_share(optimizer: KFACMixin) -> None:
    """Warn that a state is one rank's share, and name what it lacks."""
    kfac = optimizer.preconditioner
    if kfac.status.alone:
        return
    # torch.distributed.checkpoint saves every rank's share, and gets no warning. A full state is
    # different: of plain tensors, torch takes rank 0's alone.
    for caller in agree.callers():
        module, values = caller.f_globals.get("__name__"), caller.f_locals
        if module == "torch.distributed.checkpoint.state_dict" and "options" in values:
            full = values["options"] is not None and values["options"].full_state_dict
            if full and caller.f_code.co_name.startswith("get_"):
                break
            return
    states, group_of = kfac.registry.states, kfac.groups.of
    averages = [
        f"{side.name.upper()} of {layer.name!r}"
        for layer in kfac.registry.active
        for side in group_of[layer].sides
        if states[layer.name].has_average and layer not in side.owned
    ]
    absent = [abridged(averages, between=", ")] if averages else []
    elsewhere = {p for p, momentum in optimizer.momenta().items() if momentum.shape != p.shape}
    if elsewhere:
        named = unwrapped(kfac.model).named_parameters()
        names = [repr(name) for name, p in named if p in elsewhere]
        absent.append(f"the momenta of {abridged(names, between=', ')}")
    if absent:
        # With the number of steps, Python's filter takes each save's text for a new one.
        text = f"state_dict() after {kfac.steps} steps has only rank {kfac.ranks.rank}'s share of "
        text += "the state; call consolidate_state_dict(to=rank) on all ranks first, or save all "
        text += "ranks' shares, as torch.distributed.checkpoint does. Missing are "
        text += f"{'; '.join(absent)}; and the state that K-FAC computes from them"
        warnings.warn(text, stacklevel=3)


def abridged(names: list[str], limit: int = 10, between: str = "; ") -> str:
    """Return the first names, and how many more there are: a whole model's may be hundreds."""
    beyond = len(names) - limit
    return between.join(names[:limit] + ([f"and {beyond} more"] if beyond > 0 else []))


# ---- loading ----


def check_form(state: Any, keys: Sequence[str] = ("state", "param_groups")) -> None:
    """Refuse a state that is not an optimizer's, such as a model's."""
    if not isinstance(state, Mapping):
        what = f"it is of type {type(state).__name__}"
    elif missing := [key for key in keys if key not in state]:
        what = f"it has no {' and no '.join(map(repr, missing))}"
    else:
        return
    why = f"{what}; pass what an optimizer's state_dict() has returned, and not its model's, or "
    why += "the whole of a checkpoint that holds several"
    raise invalid_because("state_dict", why)


class Load:
    """One state that is loaded: K-FAC's part of it, and the layers that begin anew."""

    def __init__(self, kfac: Preconditioner, entries: Entries) -> None:
        self._kfac, self.entries = kfac, entries
        self.is_fresh = False  # the state was taken before any step, so that nothing is missing
        self.foreign: list[Layer] = []  # layers whose saved moments mean nothing here
        self._saved: dict[Layer, tuple[dict[str, Tensor], SavedFlags]] = {}  # factors that fit here
        self._anew: list[str] = []  # layers whose factors are missing, or do not fit
        names = [key for entry in entries.values() for key in entry]
        # One number a block took the place of second moments, which this base reads.
        replaced = any(name.endswith(SQUARE_SUM.name) for name in names)
        lacks_second = replaced and SQUARE_SUM not in kfac.groups.sizes.of_gradient
        for layer in kfac.registry.layers.values():
            key = f"{PREFIX}{layer.tag}status"
            # The bias's entry has the tensors of a layer whose weight was frozen.
            parts = [entries.get(p, {}) for p in (layer.weight, layer.bias) if p is not None]
            entry = next((entry for entry in parts if key in entry), None)
            if entry is None:
                continue
            shapes = {k: getattr(x, "shape", None) for k, x in entry.items() if k != STEP}
            wrong = [k for k, shape in shapes.items() if shape is None]
            if wrong or shapes[key] != (len(SavedFlags._fields),):
                what = f"{(wrong or [key])[0]} of layer {layer.name!r} is not what K-FAC saves"
                raise invalid_because("state_dict", f"{what}; remove its kfac_ entries")
            # The plain base keeps them as floats, since torch casts what it loads.
            flags = SavedFlags(*map(int, entry[key].tolist()))
            # Moments are of preconditioned gradients, or with a rule without a scale of raw ones.
            scale_free = flags.convention & _SCALE_FREE == _SCALE_FREE
            if lacks_second or scale_free != kfac.rule.scale_free:
                self.foreign.append(layer)
            same = flags.convention == _convention(kfac)
            pairs = zip(layer.trained, flags.covers, strict=True)
            known = any(flags.covers) and all(trained or not saved for trained, saved in pairs)
            # A wholly frozen layer takes the saved covers, and keeps its factors, as in that run.
            if same and known and layer.covers_now() in (flags.covers, (False, False)):
                self._saved[layer] = entry, flags

    def check(self) -> None:
        """Refuse factors that fit no layer, and state that would spoil the weights."""
        kfac, problems = self._kfac, list[str]()
        covered = {p for x in kfac.registry.layers.values() for p in (x.weight, x.bias)}
        for name, p in unwrapped(kfac.model).named_parameters():
            if p not in covered and self.entries.get(p, {}).keys() - {STEP}:
                problems.append(f"{name} of shape {tuple(p.shape)} has factors, but no layer")
        for layer, (entry, flags) in self._saved.items():
            before = layer.covers
            layer.cover(flags.covers)  # which the sizes of its tensors follow
            for spec, item in _tensors(kfac, layer):
                _, name = item.key
                tensor = entry.get(name)
                if tensor is not None and tensor.shape != item.shape:
                    shapes = f"{tuple(tensor.shape)}, the model needs {item.shape}"
                    problems.append(f"{layer.name}: {name} is {shapes}")
                elif tensor is not None and flags.state:
                    faults = kfac.rule.faults(spec, tensor)
                    problems += [f"{layer.name}: {name} is {fault}" for fault in faults]
            # A state that is refused must change nothing, and so must these checks.
            layer.cover(before)
        if problems:
            why = (
                "its K-FAC factors do not fit the model's layers; load it into a model with the "
                "same layers and options, or remove its kfac_ entries:\n  "
            )
            raise invalid_because("state_dict", why + abridged(problems, 20, "\n  "))

    def restore(self) -> None:
        """Continue from the saved tensors, and note the layers whose factors start anew."""
        kfac, registry = self._kfac, self._kfac.registry
        kfac.discard()
        for layer, (_, flags) in self._saved.items():
            layer.cover(flags.covers)
        # Reset all layers before room is made: layers with an average would keep their values, and
        # what the loaded state lacks would be left over from another run.
        for state in registry.states.values():
            state.reset()
            state.failures = state.refreshes = 0
            state.refreshed = state.before = -1
        kfac.allocate()
        for layer in registry.active:
            state, absent = registry.states[layer.name], set[str]()
            entry, flags = self._saved.get(layer, ({}, SavedFlags()))
            for spec, item in _tensors(kfac, layer) if entry else ():
                _, name = item.key
                if item.tensor is not None and name in entry:
                    # Copy: steps read whole stacks, and would not see a tensor put beside them.
                    item.tensor.copy_(entry[name])
                elif item.tensor is not None:  # else another rank keeps it
                    absent.add(spec.if_absent)
            if not entry or STARTS_ANEW in absent:
                self._anew.append(layer.name)
                continue
            state.has_average, state.missed = bool(flags.averages), flags.averages // 2
            state.has_state = bool(flags.state) and IS_REFRESHED not in absent
            state.failures = flags.failures
        steps = [int(entry[STEP]) for entry in self.entries.values() if STEP in entry]
        kfac.resume(max(steps, default=0))

    def warn(self, optimizer: KFACMixin) -> None:
        """Warn of layers whose factors or momenta start anew."""
        kfac = self._kfac
        lacking = [layer.name for layer in self.foreign]
        _, stepped = kfac.groups.stepped()
        for layer in kfac.registry.with_state:
            weight, base = layer.parameters[0], optimizer.base_part
            entry = optimizer.state.get(weight, {})
            keeps = base.keeps(optimizer.param_groups[kfac.registry.group_of[weight]], [entry])
            if weight in stepped and keeps and base.momentum not in entry:
                lacking += [layer.name] if layer.name not in lacking else []
        if lacking:
            names = ", ".join(map(repr, lacking))
            text = f"this state lacks the momenta of {names}, or has those of another "
            text += "compute_method or base, so these momenta start at zero; to continue a run, "
            text += "build the optimizer like the saved one, and on several ranks call "
            text += "consolidate_state_dict() before a save"
            warnings.warn(text, stacklevel=3)
        if self._anew and not self.is_fresh:
            names = ", ".join(map(repr, self._anew))
            if not kfac.status.alone:
                names += f", which rank {kfac.ranks.rank} keeps (was it saved without "
                names += "consolidate_state_dict()?)"
            text = f"the checkpoint has no K-FAC factors of this kind for {names}; K-FAC estimates "
            text += "them again, from the next step that gathers on"
            warnings.warn(text, stacklevel=3)


# ---- the base's part ----


def separate(optimizer: Any, loaded: dict[str, Any]) -> dict[str, Any]:
    """Return the base's part of a state, with K-FAC's keys of its groups; the load has K-FAC's.

    ``Optimizer.load_state_dict`` would cast K-FAC's tensors to the parameters' dtype.
    """
    check_form(loaded)
    groups, saved_groups = optimizer.param_groups, loaded["param_groups"]
    saved = [i for group in saved_groups for i in group["params"]]
    parameters = [p for group in groups for p in group["params"]]
    # Torch itself refuses other counts of parameters later, and its text tells more.
    by_index = dict(zip(saved, parameters, strict=False))
    state = dict(loaded["state"])
    entries = {by_index[i]: entry for i, entry in take_entries(state).items() if i in by_index}
    load = optimizer._loaded = Load(optimizer.preconditioner, entries)
    load.check()
    of_base = any("damping" not in group for group in saved_groups)
    load.is_fresh = not (of_base or state or any(entries.values()))
    foreign = {p for layer in load.foreign for p in layer.trainable}
    state = {i: entry for i, entry in state.items() if by_index.get(i) not in foreign}
    # A base optimizer's groups lack K-FAC's keys: these stay as they are in this optimizer.
    # Another method's groups may have more of them, which must not appear here.
    merged = list(saved_groups)
    for i, (former, group) in enumerate(zip(saved_groups, groups, strict=False)):
        present = {key: group[key] for key in GROUP_KEYS if key in group}
        known = {k: v for k, v in former.items() if k in present or k not in GROUP_KEYS}
        merged[i] = present | known
    return {**loaded, "state": state, "param_groups": merged}


def set_base_state(
    optimizer: KFACMixin, state: dict[str, Any], set_state: Callable[[dict[str, Any]], None]
) -> None:
    """Let the base set, and complete, a loaded state; refuse one without keys that it reads."""
    before = {n: optimizer.__dict__[n] for n in state if n in optimizer.__dict__}
    failed: Exception | None = None
    try:
        set_state(state)
    except Exception as error:
        failed = error
    pairs = list(zip(optimizer.param_groups, before.get("param_groups", []), strict=False))
    names = []
    for key in optimizer.defaults:
        lacking = [key in old and key not in new for new, old in pairs]
        # Torch adds "differentiable" to the defaults of any optimizer in a load, read or not.
        if any(lacking) and key != "differentiable":
            names.append(key)
    if failed is None and not names:
        return
    # The base has set the state already: without this, a refused state would be in force.
    optimizer.__dict__.update(before)
    if failed is not None and not names and not isinstance(failed, KeyError):
        raise failed  # an error of the base's own, such as a lack of memory
    lacks = f"parameter groups lack {', '.join(names)}" if names else f"entries lack {failed}"
    why = f"its {lacks}, which {optimizer._base.__name__} reads; it is of another optimizer, or of "
    why += "an older version: load it into one of that class, add what it lacks, or begin without "
    why += "its state"
    raise invalid_because("state_dict", why) from failed


def of_base(optimizer: KFACMixin, state: dict[str, Any]) -> dict[str, Any]:
    """Return a whole state without K-FAC's part, and with the base's second moments."""
    kfac, base = optimizer.preconditioner, optimizer.base_part
    registry = kfac.registry
    if registry.sharded:
        raise RuntimeError("base_state_dict() can't collect parameters that fully_shard shards")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {p: state["state"].get(i, {}) for i, p in enumerate(parameters)}
    seconds: dict[Tensor, Tensor] = {}
    replaces = SQUARE_SUM in kfac.groups.sizes.of_gradient
    for layer in registry.with_state if replaces else ():
        # The number is a sum over the block's entries, and the base reads a mean in each entry.
        total = entries[layer.parameters[0]][f"{PREFIX}{layer.tag}{SQUARE_SUM.name}"]
        for p in layer.parameters:
            seconds.setdefault(p, torch.zeros(p.shape, dtype=total.dtype))
        g, a = layer.size_of("g")[0], layer.size_of("a")[0]
        matrix = (total.cpu() / (g * a))[:, None, None].expand(-1, g, a)
        parts = layer.parameter_parts([seconds[p] for p in layer.parameters])
        for part, room in zip(layer.matrix_parts(matrix), parts, strict=True):
            room.copy_(part)
    plain: dict[int, dict[str, Any]] = {}
    for i, p in enumerate(parameters):
        entry = {k: v for k, v in entries[p].items() if not str(k).startswith("kfac")}
        if p in seconds and base.momentum in entry:
            entry[base.second] = seconds[p].to(p.device, p.dtype)
        if isinstance(entry.get("step"), Tensor):
            entry["step"] = entry["step"].clone()  # the base counts in place
        if entry:
            plain[i] = entry
    groups = []
    for group in state["param_groups"]:
        groups.append({k: value for k, value in group.items() if k not in GROUP_KEYS})
    return {"state": plain, "param_groups": groups}
