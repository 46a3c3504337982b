"""K-FAC state inside the optimizer's own: flat tensors under ``state[parameter]["kfac_…"]``.

State in other places gets lost: torch.distributed.checkpoint keeps only the entries of parameters.
It loads into them in place, so that names and shapes must be the same in every step.

A state that is loaded may be of the optimizer's class, of its base's, or of an older version.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import agree
from .comm.ranks import GatherItem
from .coverage import unwrapped
from .curvature.group import specs_of, stack_key
from .curvature.lengths import SQUARE_SUM
from .curvature.rules import RULES
from .errors import invalid_because, is_real
from .layers import Layer
from .options import GROUP_KEYS
from .plan.facts import IS_REFRESHED, STARTS_ANEW, TensorSpec
from .preconditioner import Preconditioner

if TYPE_CHECKING:
    from .optimizer import KFACMixin

PREFIX = "kfac_"
STEP = f"{PREFIX}step"
_STATUS_SHAPE = (6,)  # averages, state, covers of weight and of bias, failures, convention
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


# ---- in the live state ----


def publish(kfac: Preconditioner, state: State, only: Container[Tensor] | None = None) -> None:
    """Put every layer's tensors into the optimizer's state.

    Until the base has made an entry, the layer's tensors stay out: some bases take an absent entry
    for the sign of a first step. After a load, ``only`` has the parameters that had an entry in the
    loaded state.
    """
    count, registry, published = kfac.step_count, kfac.registry, kfac.groups.published
    parameters = registry.parameters
    # The tensors of an earlier layout, which has a step count of its own, go: layers may be gone.
    counts = [(p, x[STEP]) for p, x in state.items() if isinstance(x, dict) and STEP in x]
    stale = {p for p, former in counts if former is not count}
    for p in stale:
        for key in [k for k in state[p] if str(k).startswith(PREFIX)]:
            del state[p][key]
        if not state[p]:
            del state[p]
    begun: list[Tensor] = []
    if only is not None:
        begun = [p for p in parameters if p in only]
    elif stale or len(counts) < len(registry.group_of):  # in most steps, all have the count
        begun = [p for p in parameters if p.grad is not None or state.get(p) or p in stale]
    # Every entry has the step count: torch.distributed.checkpoint wants one for every parameter.
    for p in begun:
        state[p][STEP] = count
    for layer in registry.active:
        entry, flags = state.get(layer.parameters[0], {}), registry.states[layer.name]
        if STEP in entry:
            key, averages = f"{PREFIX}{layer.tag}status", flags.has_average + 2 * flags.missed
            values = [averages, int(flags.has_state), *map(int, layer.covers), flags.failures]
            if key not in entry:
                for name, view in kfac.groups.of[layer].views(layer):
                    entry[f"{PREFIX}{layer.tag}{name}"] = view
                entry[key] = torch.tensor([*values, _convention(kfac)], device="cpu")
            elif published.get(layer) != values:
                entry[key][:-1] = torch.tensor(values, device="cpu")
            published[layer] = values


def apart(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return entries with memory of their own: a pickled row would take its whole stack along."""
    copies = dict(state)
    for key, entry in state.items():
        if isinstance(entry, dict):
            copies[key] = copy = dict(entry)
            for name, value in entry.items():
                if type(value) is Tensor and value.untyped_storage().nbytes() > value.nbytes:
                    copy[name] = value.clone()
    return copies


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
    registry, items = kfac.registry, []
    sources: dict[Tensor, int] = {}
    for layer in registry.active:
        sources |= dict.fromkeys(layer.parameters, registry.placements.owner(layer, "g"))
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
    """Yield a layer's tensors on all ranks, with the rank that sends each: the factor's owner."""
    group, sizes, blocks = kfac.groups.of.get(layer), kfac.groups.sizes, layer.blocks
    views = {} if group is None else dict(group.views(layer))  # a frozen layer has no group
    average, stored = kfac.options.factor_dtype, kfac.rule.dtype
    g, a = stack_key(layer, "g"), stack_key(layer, "a")
    parts = []
    for side, key in (("a", a), ("g", g)):
        owned = specs_of(sizes.of_owner, blocks, key[:2], average, key.dtype)
        applied = specs_of(sizes.of_factor, blocks, key[:2], stored, key.dtype)
        parts.append((f"{side}_", side, owned | applied))
    of_gradient = specs_of(sizes.of_gradient, blocks, (g.size, a.size), stored, g.dtype)
    for prefix, side, specs in (*parts, ("", "g", of_gradient)):
        source, home = kfac.registry.placements.owner(layer, side), layer.parameters[0]
        for spec, (shape, dtype) in specs.items():
            name = f"{prefix}{spec.name}"
            title = f"{PREFIX}{layer.tag}{name}"
            item = GatherItem((home, title), source, shape, dtype, g.device, views.get(name))
            yield spec, item


def warn_of_share(optimizer: KFACMixin) -> None:
    """Warn that a state is one rank's share, and name what it lacks.

    torch.distributed.checkpoint saves every rank's share, and gets no warning. A full state is
    different: of plain tensors, torch takes rank 0's alone.
    """
    kfac = optimizer.preconditioner
    if kfac.status.comparison is None:
        return
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
        warnings.warn(
            f"state_dict() after {kfac.steps} steps has only rank {kfac.ranks.rank}'s share of the "
            "state; call consolidate_state_dict(to=rank) on all ranks first, or save all ranks' "
            f"shares, as torch.distributed.checkpoint does. Missing are {'; '.join(absent)}; and "
            "the state that K-FAC computes from them",
            stacklevel=3,
        )


def abridged(names: list[str], limit: int = 10, between: str = "; ") -> str:
    """Return the first names, and how many more there are: a whole model's may be hundreds."""
    rest = len(names) - limit
    return between.join(names[:limit] + ([f"and {rest} more"] if rest > 0 else []))


# ---- loading ----


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


class Load:
    """One call of ``load_state_dict``: the given state, and the outcome of the load."""

    def __init__(self, optimizer: KFACMixin) -> None:
        self._kfac = optimizer.preconditioner
        self.entries: Entries = {}  # K-FAC's part of the state
        self.anew: list[str] = []  # layers whose factors are missing, or do not fit
        self._fresh = False  # the state was taken before any step, so that nothing is missing

    def separate(self, optimizer: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        """Return the base's part of a state, with K-FAC's keys of its groups.

        ``Optimizer.load_state_dict`` would cast K-FAC's tensors to the parameters' dtype.
        """
        check_form(loaded)
        groups, saved_groups = optimizer.param_groups, loaded["param_groups"]
        saved = [i for group in saved_groups for i in group["params"]]
        parameters = [p for group in groups for p in group["params"]]
        by_index = dict(zip(saved, parameters, strict=False))
        state = dict(loaded["state"])
        taken = take_entries(state)
        self.entries = {by_index[i]: entry for i, entry in taken.items() if i in by_index}
        _check_contents(self._kfac, self.entries, [str(key) for key in loaded])
        of_base = any("damping" not in group for group in saved_groups)
        self._fresh = not (of_base or state or any(self.entries.values()))
        layers = foreign_moments(self._kfac, self.entries)
        foreign = {p for x in layers for p in (x.weight, x.bias) if p is not None}
        state = {i: entry for i, entry in state.items() if by_index.get(i) not in foreign}
        # A base optimizer's groups lack K-FAC's keys: these stay as they are in this optimizer.
        # Another method's groups may have more of them.
        merged = list(saved_groups)
        for i, (former, group) in enumerate(zip(saved_groups, groups, strict=False)):
            own_keys = {key: group[key] for key in GROUP_KEYS if key in group}
            keys = own_keys.keys() | former.keys() - set(GROUP_KEYS)
            merged[i] = own_keys | {k: v for k, v in former.items() if k in keys}
        return {**loaded, "state": state, "param_groups": merged}

    @property
    def refrozen(self) -> list[Layer]:
        """The layers whose saved factors are of other parameters than they train now."""
        layers = [self._kfac.registry.layers[name] for name in self.anew]
        return [x for x in layers if _saved(x, self.entries)[2] not in ((False, False), x.covers)]

    def warn(self, optimizer: KFACMixin) -> None:
        """Warn of layers whose factors or momenta start anew."""
        missing, kfac, base = self.anew, self._kfac, optimizer.base_part
        ranks, registry, groups = kfac.ranks, kfac.registry, optimizer.param_groups
        # Layers that have a state here, or had one, but no momentum
        anew = dict.fromkeys(x.name for x in foreign_moments(kfac, self.entries))
        _, with_momenta = kfac.groups.stepped()
        for layer in registry.with_state:
            weight = layer.parameters[0]
            keeps = weight in with_momenta and base.keeps(groups[registry.group_of[weight]])
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
            refrozen = {layer.name for layer in self.refrozen}.issuperset(missing)
            shared = kfac.status.comparison is not None and not refrozen
            share = f", which rank {ranks.rank} keeps" if shared else ""
            cause = " (was it saved without consolidate_state_dict()?)" if share else ""
            parameters = {p for name in missing for p in registry.layers[name].parameters}
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


def _saved(
    layer: Layer, entries: Entries
) -> tuple[dict[str, Tensor], list[int], tuple[bool, bool]]:
    """Return the entry with a layer's tensors, its status, and the covers of then.

    The bias's entry has the tensors if the weight was frozen. Without a status, all is empty.
    """
    for p in (layer.weight, layer.bias):
        entry = {} if p is None else entries.get(p, {})
        status = entry.get(f"{PREFIX}{layer.tag}status")
        if status is not None:
            values = [int(x) for x in status.tolist()]  # the plain base keeps them as floats
            return entry, values, (bool(values[2]), bool(values[3]))
    return {}, [], (False, False)


def foreign_moments(kfac: Preconditioner, entries: Entries) -> list[Layer]:
    """Return layers whose saved moments mean nothing here.

    They are of preconditioned gradients, and K-FAC's now of raw ones, or the other way round; or
    one number a block took the place of second moments that the base reads.
    """
    lacks_second = SQUARE_SUM not in kfac.groups.sizes.of_gradient and any(
        key.endswith(SQUARE_SUM.name) for entry in entries.values() for key in entry
    )
    foreign = []
    for layer in kfac.registry.layers.values():
        _, status, _ = _saved(layer, entries)
        if status:
            scale_free = status[5] & _SCALE_FREE == _SCALE_FREE
            if lacks_second or scale_free != kfac.rule.scale_free:
                foreign.append(layer)
    return foreign


def _check_contents(kfac: Preconditioner, entries: Entries, keys: Sequence[str]) -> None:
    """Refuse a state whose K-FAC part does not fit; ``keys`` are those of the whole state."""
    named = unwrapped(kfac.model).named_parameters()
    names: dict[Tensor, str] = {p: name for name, p in named}
    layers_of: dict[Tensor | None, list[Layer]] = {}
    for layer in kfac.registry.layers.values():
        for part in (layer.weight, layer.bias):
            layers_of.setdefault(part, []).append(layer)
    problems = [f"{key} is unknown" for key in keys if key.startswith(PREFIX)]
    for p, entry in entries.items():
        problems += _malformed(names.get(p, "a parameter"), entry, layers_of.get(p, []))
    for layer in () if problems else kfac.registry.layers.values():
        before = layer.covers
        entry, status = _cover_as_saved(kfac, layer, entries)
        for spec, item in _tensors(kfac, layer) if entry else ():
            _, name = item.key
            tensor = entry.get(name)
            if tensor is not None and tensor.shape != item.shape:
                shapes = f"{tuple(tensor.shape)}, the model needs {item.shape}"
                problems.append(f"{layer.name}: {name} is {shapes}")
            elif tensor is not None and status[1]:
                faults = kfac.rule.faults(spec, tensor)
                problems += [f"{layer.name}: {name} is {fault}" for fault in faults]
        layer.cover(before)
    for p, entry in entries.items():
        if entry.keys() - {STEP} and p not in layers_of:
            title = names.get(p, "a parameter")
            problems.append(f"{title} of shape {tuple(p.shape)} has factors, but no layer")
    if problems:
        why = (
            "its K-FAC factors do not fit the model's layers; load it into a model with the same "
            "layers and options, or remove its kfac_ entries:\n  "
        )
        raise invalid_because("state_dict", why + abridged(problems, 20, "\n  "))


def _malformed(title: str, entry: dict[str, Tensor], layers: list[Layer]) -> Iterator[str]:
    """Yield what is wrong with the form of a parameter's entry; ``layers`` use the parameter."""
    count, known = entry.get(STEP), {STEP}
    for key, value in entry.items():
        if not isinstance(value, Tensor) and not (key == STEP and is_real(value)):
            yield f"{title}: {key} is a {type(value).__name__}, no tensor"
    if isinstance(count, Tensor) and count.numel() != 1:
        yield f"{title}: {STEP} is {tuple(count.shape)}, it must be a number"
    elif (isinstance(count, Tensor) or is_real(count)) and int(count) < 0:
        yield f"{title}: {STEP} is {int(count)}, it must be 0 or more"
    for layer in layers:
        known.update(f"{PREFIX}{layer.tag}{name}" for name in _NAMES)
        status = f"{PREFIX}{layer.tag}status"
        shape = getattr(entry.get(status), "shape", _STATUS_SHAPE)
        if shape != _STATUS_SHAPE:
            yield f"{layer.name}: {status} is {tuple(shape)}, it must be {_STATUS_SHAPE}"
    for key in sorted(entry.keys() - known) if layers else ():
        yield f"{title}: {key} is unknown"


def _cover_as_saved(
    kfac: Preconditioner, layer: Layer, entries: Entries
) -> tuple[dict[str, Tensor], list[int]]:
    """Give a layer the saved covers, if possible; return its entry and its status.

    Both are empty unless the factors are of the same parameters and the same convention. A wholly
    frozen layer keeps its factors until it trains again, as in the saved run.
    """
    entry, status, saved = _saved(layer, entries)
    known = all(trained >= covered for trained, covered in zip(layer.trained, saved, strict=True))
    if any(saved) and known and layer.covers_now() in (saved, (False, False)):
        layer.cover(saved)
    same = status[5:] == [_convention(kfac)]
    return (entry, status) if same and any(saved) and saved == layer.covers else ({}, [])


def restore(kfac: Preconditioner, entries: Entries) -> list[str]:
    """Continue from loaded tensors; return the names of layers whose factors start anew."""
    registry, anew = kfac.registry, []
    kfac.discard()
    fitting = {x: _cover_as_saved(kfac, x, entries) for x in registry.layers.values()}
    for state in registry.states.values():
        state.reset()
    kfac.allocate()
    for layer in registry.active:
        state = registry.states[layer.name]
        state.failures = state.refreshes = 0
        state.refreshed = state.before = -1
        entry, status = fitting[layer]
        is_complete = fits = bool(entry)
        for spec, item in _tensors(kfac, layer) if fits else ():
            _, name = item.key
            if item.tensor is not None and name in entry:
                item.tensor.copy_(entry[name])
            elif item.tensor is not None:
                fits = fits and spec.if_absent != STARTS_ANEW
                is_complete = is_complete and spec.if_absent != IS_REFRESHED
        if fits:
            state.has_average, state.missed = bool(status[0]), status[0] // 2
            state.has_state = bool(status[1]) and is_complete
            state.failures = status[4]
        else:
            anew.append(layer.name)
    steps = [int(e[STEP]) for e in entries.values() if STEP in e]
    kfac.resume(max(steps, default=0))
    return anew


# ---- the base's part ----


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
    # A load adds "differentiable" to any optimizer's defaults.
    own = {"differentiable"} & inspect.signature(optimizer._base.__init__).parameters.keys()
    read = [key for key in optimizer.defaults if key != "differentiable" or own]
    names = [k for k in read if any(k in old and k not in new for new, old in pairs)]
    if failed is None and not names:
        return
    optimizer.__dict__.update(before)
    if failed is not None and not names and not isinstance(failed, KeyError):
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
    kfac, base = optimizer.preconditioner, optimizer.base_part
    registry = kfac.registry
    if registry.placements.sharded:
        raise RuntimeError("base_state_dict() can't gather parameters that fully_shard has sharded")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {p: state["state"].get(i, {}) for i, p in enumerate(parameters)}
    seconds: dict[Tensor, Tensor] = {}
    replaces = SQUARE_SUM in kfac.groups.sizes.of_gradient
    for layer in registry.with_state if replaces else ():
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
            entry[base.second[0]] = seconds[p].to(p.device, p.dtype)
        if isinstance(entry.get("step"), Tensor):
            entry["step"] = entry["step"].clone()  # the base counts in place
        if entry:
            plain[i] = entry
    groups = [
        {key: value for key, value in group.items() if key not in GROUP_KEYS}
        for group in state["param_groups"]
    ]
    return {"state": plain, "param_groups": groups}
