"""The layers of a model: what K-FAC covers, why other parameters are left, and places on ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from . import agree
from .capture.hooks import refuse_data_parallel
from .comm import sharding
from .comm.ranks import Ranks
from .curvature.group import stack_key
from .errors import invalid_because
from .layers.base import Layer, kind_of, take_sizes
from .layers.kinds import MATRICES, SCALES, Reasons, declared
from .options import PER_GROUP, Group, Options
from .plan import assignment
from .plan.assignment import Placement, Task
from .plan.facts import LayerFacts, ShardPlaces, widest
from .plan.schedule import LayerState

# Reasons why a parameter is left to the base; what the user skips is told with its pattern.
_SKIPPED = ""
_CUT = "tensor parallelism cuts it, or another sharding than fully_shard over one mesh dimension"
_PAPERS_ONLY = 'normalization="kaisa" knows Linear and Conv2d with one group only'
BY_OPTION = {_PAPERS_ONLY}  # reasons that follow from what the user has chosen

Names = dict[Tensor | None, list[str]]  # every name under which a parameter is registered


# ---- what is covered ----


class Left(NamedTuple):
    """A parameter that K-FAC leaves to the base optimizer."""

    size: int
    reason: str


@dataclass(frozen=True)
class CoverageReport:
    """The number of trained parameters that K-FAC covers; the parameters that are left, and why."""

    covered: int
    total: int
    left: dict[str, Left]  # the largest first
    skipped: dict[str, str]  # left by an option, or by the kind of optimizer, and why
    # For each layer that a warning named: the share of its gradient that its rows do not make.
    elsewhere: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.covered / max(1, self.total)

    @property
    def amount(self) -> str:
        # Never say 100 % while a parameter is left.
        percent = 100 if self.covered == self.total else min(99.9, 100 * self.share)
        return f"K-FAC covers {percent:.3g} % of {self.total:,} parameters"

    def __str__(self) -> str:
        names = [*self.left, *self.skipped]
        if not names:
            return self.amount
        shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
        text = f"the base optimizer updates the rest ({shown})"
        return f"{self.amount}; {text}: print(optimizer.preconditioner)"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module from inside DDP and torch.compile."""
    while True:
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        inner = getattr(model, "module" if is_ddp else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _checked_names(model: nn.Module, trained: Collection[Tensor]) -> Names:
    for module in model.modules():
        refuse_data_parallel(module)
        if type(module).__name__ == "FullyShardedDataParallel":
            why = "FullyShardedDataParallel flattens parameters, so that no layer has a weight "
            why += "matrix left; use torch.distributed.fsdp.fully_shard, its successor, or "
            why += "DistributedDataParallel"
            raise invalid_because("model", why)
    names: Names = {}
    # A module counts once, whatever its names: only a second module makes a weight shared.
    for prefix, module in unwrapped(model).named_modules():
        for name, p in module._parameters.items():
            if p is not None:
                names.setdefault(p, []).append(f"{prefix}.{name}" if prefix else name)
    for p in trained:
        if p not in names:
            why = f"a parameter of shape {tuple(p.shape)} does not belong to the model; pass the "
            why += "model whose parameters you optimize as model="
            raise invalid_because("params", why)
        if isinstance(p, UninitializedParameter):
            name = names[p][0]
            why = f"{name} has no shape yet; run the lazy model once before you build the optimizer"
            raise invalid_because("params", why)
    return names


def _layers_of(
    name: str, module: nn.Module, claimed: set[nn.Module]
) -> tuple[list[Layer], Reasons]:
    # Return a module's layers, and why its parameters have none; claim parts that its kind covers.
    kind, overrides = kind_of(module)
    if kind is None:
        return declared(name, module)
    why, parts, inside = kind.unsupported(module), [module], kind.interceptor is not None
    if inside and any(map(sharding.is_sharded, module._parameters.values())):
        why = "its weights are sharded, and its projections can't be told apart then"
    layers = [] if why or (overrides and inside) else kind.layers_of(name, module)
    if overrides:
        # The kind's rows need not be those of another forward: calls alone tell the use.
        layers = [layer for layer in layers if layer.weight is not None]
        for layer in layers:
            layer.watched_in, layer.by_use = (module,), True
        why = None if layers else "it overrides a covered forward"
    elif why is None or inside:
        # An attention's projections are no calls of modules, whether it is covered or not. Without
        # this claim, the out-projection would become a second layer, which never sees a call.
        parts = [*module.modules()]
        claimed.update(parts)
    reasons: Reasons = {}
    for part in parts if why else ():
        reasons.update((p, f"{type(module).__name__}: {why}") for p in part._parameters.values())
    return layers, reasons


def _tie(layers: list[Layer], names: Names, reasons: Reasons) -> set[Tensor | None]:
    # Make one layer of each table or matrix that several modules share; return these weights. The
    # layer takes the rows of all uses. The base optimizer steps the biases of these modules.
    tied: set[Tensor | None] = set()
    users_of: dict[Tensor | None, list[Layer]] = {}
    for layer in layers:
        users_of.setdefault(layer.weight, []).append(layer)
    for weight, users in users_of.items():
        plain = all(type(layer) in MATRICES and layer.blocks == 1 for layer in users)
        count = len(names.get(weight, ()))
        # A module without a layer would use the weight unseen.
        if count < 2 or not plain or len(users) != count or weight in reasons:
            continue
        # A table before a matrix: its factor is a diagonal on the side of the vocabulary.
        primary = next((layer for layer in users if layer.diagonal_input), users[0])
        tied.add(weight)
        primary.tied = len({layer.input_dim for layer in users}) > 1
        primary.watched_in = tuple(dict.fromkeys(layer.module for layer in users))
        for layer in users:
            if layer.bias is not None:
                reasons[layer.bias], layer.bias = SCALES, None
        layers[:] = [x for x in layers if x is primary or x not in users]
    return tied


def task_of(layer: Layer, covers: tuple[bool, bool] | None = None) -> Task:
    """Return a layer's task by the parameters that it covers: its trained ones, frozen or not."""
    # Ranks place a layer by what is trained, whatever is frozen now: flags of one rank alone must
    # not move factors, and a layer that is unfrozen finds its place.
    covers = covers or layer.trained
    (a, diagonal_a), (g, diagonal_g) = layer.size_of("a", covers), layer.size_of("g", covers)
    return Task(layer.name, a, g, diagonal_a, diagonal_g, layer.blocks)


# ---- one model's layers ----


class Registry:
    """One model's covered layers by name, in the model's order, and their places on ranks."""

    def __init__(
        self, model: nn.Module, options: Options, ranks: Ranks, known: Iterable[Tensor]
    ) -> None:
        self.model, self._options, self._ranks = model, options, ranks
        self.layers: dict[str, Layer] = {}
        self.states: dict[str, LayerState] = {}
        self.sections: list[slice] = []  # by layer: places of its sections among those of all
        self.late: list[Layer] = []  # active layers that gather in each step that gathers
        self.missing: list[Layer] = []  # layers whose first average any pass may bring
        self.uncovered: dict[str, str] = {}  # parameters that no layer covers, and why
        self.skipped: dict[str, str] = {}  # parameters that skip_layers leaves out, and the pattern
        self.on_meta: dict[str, Tensor] = {}  # parameters with sizes, but without numbers
        # The optimizer's parameters of this model, covered or not, with their groups' numbers.
        self.group_of: dict[Tensor, int] = {}
        self._accepted = set(known)  # parameters that are, or were, the model's
        # The groups' parameters, which are held here, by id: to hash a tensor is a call of Python.
        self._listed: dict[int, Tensor] = {}
        # Each parameter, with the dictionary and the name under which its module holds it.
        self._homes: list[tuple[Tensor, dict[str, nn.Parameter | None], str, str]] = []
        self.placements: dict[str, Placement] = {}  # the owners of each layer's factors
        self.splits_owners = False  # whether A and G of some layer have two owners
        self.facts: dict[Layer, LayerFacts] = {}  # of all layers, frozen ones included
        self.sharded: dict[Layer, tuple[ShardPlaces | None, ...]] = {}  # weight's, bias's
        self.strategy: assignment.WorkAssignment = options.strategy
        if any(map(sharding.is_sharded, model.parameters())):  # one rank works for each layer
            chosen = options.assignment, options.grad_worker_fraction
            if chosen != (None, None) and self.strategy.gradient_workers(ranks.world) > 1:
                why = f"{self.strategy!r} for parameters sharded by fully_shard, where exactly one "
                why += 'rank preconditions each gradient; use assignment="layer-wise" or leave it '
                why += "out"
                raise invalid_because("assignment", why)
            self.strategy = assignment.LayerWise()

    # ---- answers ----

    @property
    def active(self) -> list[Layer]:
        """The covered layers that are not wholly frozen."""
        return [layer for layer in self.layers.values() if layer.parameters]

    @property
    def unseen(self) -> dict[str, str]:
        """Parameters of layers that had a gradient, but no call that K-FAC can read; and why."""
        titles: dict[Tensor, str] = {}
        for layer in self.active:
            if self.states[layer.name].unseen and not self.states[layer.name].has_average:
                titles |= dict.fromkeys(layer.parameters, type(layer.module).__name__)
        named = unwrapped(self.model).named_parameters() if titles else ()
        use = "uses it in a way that no kind of layer knows"
        return {name: f"{titles[p]} {use}" for name, p in named if p in titles}

    @property
    def with_average(self) -> list[Layer]:
        return [layer for layer in self.layers.values() if self.states[layer.name].has_average]

    @property
    def with_state(self) -> list[Layer]:
        return [layer for layer in self.active if self.states[layer.name].has_state]

    @property
    def devices(self) -> list[tuple[torch.device, torch.dtype]]:
        return [(x.parameters[0].device, x.parameters[0].dtype) for x in self.active]

    def owner(self, layer: Layer, side: str) -> int:
        placement = self.placements[layer.name]
        return placement.a if side == "a" else placement.g

    def shards(self, layer: Layer) -> list[ShardPlaces]:
        parts = zip(self.sharded[layer], layer.covers, strict=True)
        return [shards for shards, covered in parts if covered and shards is not None]

    def values(
        self, name: str, groups: list[Group], layers: Iterable[Layer] | None = None
    ) -> dict[Layer, float]:
        """Return the value of each active layer, which is its groups'."""
        layers = self.layers.values() if layers is None else layers
        values = {group[name] for group in groups}
        if len(values) == 1:  # the loop hashes each parameter, which would cost each step
            return dict.fromkeys(layers, values.pop())
        value_of: dict[Layer, float] = {}
        for layer in layers:
            # A layer has one A and one G for weight and bias: their groups must agree.
            numbers = sorted({groups[self.group_of[p]][name] for p in layer.parameters})
            if len(numbers) > 1:
                why = f"layer {layer.name!r} has its weight and bias in parameter groups with "
                why += f"different values {numbers}; give both groups the same {name}"
                raise invalid_because(name, why)
            if numbers:  # else the layer is frozen
                value_of[layer] = numbers[0]
        return value_of

    def check_parameters(self, groups: list[Group]) -> None:
        """Refuse parameters that are no longer the model's: K-FAC would be off without a word."""
        for title in [name for name, p in self.on_meta.items() if p.is_meta]:
            why = f"Invalid params: {title} was on the meta device when the optimizer was built, "
            why += "so no step would change the weight that replaces it; call to_empty, load or "
            why += "initialize the weights, then build the optimizer"
            raise RuntimeError(why)
        for p in [p for group in groups for p in group["params"] if id(p) not in self._listed]:
            why = f"Invalid param_groups: they hold a tensor of shape {tuple(p.shape)} that the "
            why += "optimizer was not given. DeepSpeed puts such float32 copies into the groups "
            why += "under ZeRO and under its own bf16 or fp16, and K-FAC can't precondition the "
            why += "copies; use DistributedDataParallel, fully_shard, or DeepSpeed's stage 0 with "
            why += 'torch.autocast, where assignment="layer-wise" spreads the moments of Adam and '
            why += "LAMB as ZeRO 1 does. Add parameters of the model by add_param_group"
            raise RuntimeError(why)
        for p, held, name, title in self._homes:
            now = held[name] if name in held else None  # noqa: SIM401 (TorchScript's has no get)
            # A parameter may have moved within the model, as under pruning: it is searched last.
            if now is not p and all(p is not other for other in self.model.parameters()):
                raise RuntimeError(
                    "Invalid params: the parameters of the groups are not the model's any more: "
                    f"{title} is a {type(now).__name__} that the optimizer was not given. Build "
                    "the optimizer after fully_shard, after load_state_dict(assign=True) and after "
                    "whatever else replaces parameters, or give it the new ones by add_param_group"
                )

    # ---- changes ----

    def match_groups(self, groups: list[Group]) -> None:
        """Note the parameters of the groups that are the model's."""
        of_groups = {p: i for i, group in enumerate(groups) for p in group["params"]}
        # A replaced module's parameters stay in their group, as they do in any optimizer.
        gone = self._accepted.difference(self.model.parameters())
        self.group_of = {p: i for p, i in of_groups.items() if p not in gone}
        self._listed, self._homes = {id(p): p for p in of_groups}, []
        for prefix, module in unwrapped(self.model).named_modules():
            for name, p in module._parameters.items():
                title = f"{prefix}.{name}" if prefix else name
                if p in of_groups and p.is_meta:
                    self.on_meta[title] = p
                # fully_shard puts a whole parameter in a sharded one's place for a while.
                if p in self.group_of and not sharding.is_sharded(p):
                    self._homes.append((p, module._parameters, name, title))

    def cover(self, groups: list[Group], *, first: bool) -> dict[str, Layer]:
        """Return the model's covered layers; raise where groups or options do not fit it."""
        names, model = _checked_names(self.model, self.group_of), unwrapped(self.model)
        skips: dict[nn.Module, str] = {}
        for pattern in self._options.skip_layers:
            matches = False
            for name, module in model.named_modules():
                if re.search(pattern, name) or re.search(pattern, type(module).__name__):
                    matches = True
                    skips.update((child, pattern) for child in module.modules())
            if first and not matches:
                text = f"skip_layers: {pattern!r} matches no module; patterns are searched in "
                text += "qualified names (as in model.named_modules()) and class names"
                agree.warn(self._ranks, text)
        self.skipped = {}
        reasons: Reasons = {}
        candidates: list[Layer] = []
        claimed: set[nn.Module] = set()  # parts of a module whose kind answers for them
        for name, module in model.named_modules():
            if module in claimed:
                continue
            if module in skips:
                trained = [p for p in module._parameters.values() if p in self.group_of]
                self.skipped.update((names[p][0], skips[module]) for p in trained)
                reasons.update((p, _SKIPPED) for p in trained)
                continue
            layers, declined = _layers_of(name, module, claimed)
            candidates += layers
            reasons |= declined
        # After the reasons of modules, which tell more, and before layers claim parts of matrices.
        for p in sharding.cut_otherwise(model):
            reasons.setdefault(p, _CUT)
        for p in self.group_of:
            if not p.is_floating_point():
                reasons.setdefault(p, "not real-valued")
        covered = self._accepted_layers(candidates, names, reasons)
        used = {p for layer in covered.values() for p in (layer.weight, layer.bias)}
        left = [p for p in self.group_of if p not in used and reasons.get(p) != _SKIPPED]
        unused = "a parameter that its layer kind does not use"
        self.uncovered = {names[p][0]: reasons.get(p, unused) for p in left}
        self.sharded, ranks = {}, self._ranks.members()
        for name, layer in covered.items():
            # A layer that stays as it was keeps its object, by which its state and averages go.
            old = self.layers.get(name, layer)
            same = old.module is layer.module and old.trained == layer.trained
            if same and old.weight is layer.weight and old.bias is layer.bias:
                covered[name] = layer = old
            shards: list[ShardPlaces | None] = [None, None]
            for i, parameter in enumerate((layer.weight, layer.bias)):
                if parameter is not None and sharding.is_sharded(parameter):
                    shards[i] = sharding.shards_of(f"a parameter of {name!r}", parameter, ranks)
                    self.sharded[layer] = tuple(shards)
        for name in PER_GROUP:
            self.values(name, groups, covered.values())
        return covered

    def _accepted_layers(
        self, candidates: list[Layer], names: Names, reasons: Reasons
    ) -> dict[str, Layer]:
        # Return the candidates whose weight is their own, or shared by uses that are known.
        papers_only, accepted = self._options.kaisa_scaling, []
        tied = set() if papers_only else _tie(candidates, names, reasons)
        for layer in candidates:
            weight, title = layer.weight, type(layer.module).__name__
            if papers_only and (layer.by_use or not layer.in_papers):
                reasons.setdefault(weight, _PAPERS_ONLY)
                reasons.setdefault(layer.bias, _PAPERS_ONLY)
                continue
            for p in (weight, layer.bias):
                if p not in tied and len(names.get(p, ())) > 1:
                    reasons[p] = "shared by " + " and ".join(names[p])
            if weight not in names:  # it is computed of the parameters inside
                for part in layer.module.modules():
                    for p in part._parameters.values():
                        reasons.setdefault(p, f"{title} whose weight is no parameter of its own")
            elif weight in reasons:
                reasons.setdefault(layer.bias, f"the bias of a {title} that is not covered")
            else:
                accepted.append(layer)
        layers: dict[str, Layer] = {}
        for layer in accepted:
            # Only now all reasons are known. Projections share a bias: if one of them is not
            # covered, no row would tell that part of the bias, and the base would not step it.
            if layer.bias in reasons:
                layer.bias = None
            layer.trained = layer.weight in self.group_of, layer.bias in self.group_of
            if any(layer.trained):
                take_sizes(layer)
                layer.wide = self._options.max_factor_size or widest(layer.inputs, layer.outputs)
                layer.cover(layer.covers_now())
                layers[layer.name] = layer
        return layers

    def rebuild(self, covered: dict[str, Layer], groups: list[Group]) -> None:
        """Take over these layers; those with a place stay where their factors are."""
        self._accepted.update(p for group in groups for p in group["params"])
        # A layer that begins anew leaves its place, too: it may go to another owner. Those that
        # stay must keep theirs, since their factors lie there and nothing moves them.
        for name, layer in self.layers.items():
            if covered.get(name) is not layer:
                del self.states[name], self.placements[name]
        self.layers, self.sections, start = covered, [], 0
        self.states = {name: self.states.get(name, LayerState()) for name in covered}
        for number, layer in enumerate(covered.values()):
            layer.number, end = number, start + layer.sections
            self.sections.append(slice(start, end))
            start = end
        options, world = self._options, self._ranks.world
        grid = assignment.make_grid(self.strategy, world, options.grad_worker_fraction)
        self._ranks.grid = grid
        tasks = [task_of(layer) for layer in self.layers.values()]
        placed = [task for task in tasks if task.name in self.placements]
        load = assignment.loads(self.strategy, placed, self.placements, world)
        new = [task for task in tasks if task.name not in self.placements]
        colocate = options.colocate_factors
        self.placements |= assignment.assign(self.strategy, new, grid, colocate, load)
        self.splits_owners = any(x.a != x.g for x in self.placements.values())

    def find_facts(self) -> None:
        """Find the plain facts of all layers anew."""
        self.facts = {}
        for name, layer in self.layers.items():
            facts = LayerFacts(task_of(layer), self.placements[name], sections=layer.sections)
            if any(layer.covers):
                key, shards = stack_key(layer, "g"), []
                if layer in self.sharded:
                    sizes = [p.dtype.itemsize for p in layer.parameters]
                    shards = [*zip(self.shards(layer), sizes, strict=True)]
                facts = facts._replace(
                    task=task_of(layer, layer.covers),
                    itemsize=key.dtype.itemsize,
                    device=key.device,
                    shards=tuple(shards),
                    tied=layer.tied,
                )
            self.facts[layer] = facts._replace(frozen=not any(layer.covers))

    def follow_changes(self, gathered: Mapping[Layer, tuple[bool, bool]]) -> list[Layer]:
        """Return layers frozen or unfrozen since their statistics, which ``gathered`` covers."""
        changed = []
        for layer in self.layers.values():
            covers = gathered.get(layer) or layer.covers_now()
            if any(covers) and covers != layer.covers:
                layer.cover(covers)
                changed.append(layer)
        return changed
