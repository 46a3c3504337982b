"""The layers that are covered, their places among groups and ranks, and their state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from . import agree, coverage
from .comm import sharding
from .comm.ranks import Ranks
from .coverage import Coverage, unwrapped
from .curvature.group import stack_key
from .errors import invalid_because
from .layers import Layer
from .options import PER_GROUP, Group, Options
from .plan import assignment
from .plan.assignment import Placement, Task
from .plan.facts import LayerFacts, ShardPlaces
from .plan.schedule import LayerState

logger = logging.getLogger("kaisa_optim")


class Placements:
    """The ranks that own each layer's factors, and the shards of each layer's parameters."""

    def __init__(self, options: Options, ranks: Ranks, *, sharded: bool) -> None:
        self._options = options
        self._ranks = ranks
        self.strategy: assignment.WorkAssignment = options.strategy
        if sharded:  # one rank works for each layer
            chosen = options.assignment, options.grad_worker_fraction
            if chosen != (None, None) and self.strategy.gradient_workers(ranks.world) > 1:
                why = (
                    f"{self.strategy!r} for parameters sharded by fully_shard, where exactly one "
                    'rank preconditions each gradient; use assignment="layer-wise" or leave it out'
                )
                raise invalid_because("assignment", why)
            self.strategy = assignment.LayerWise()
        self.of: dict[str, Placement] = {}
        self.facts: dict[Layer, LayerFacts] = {}  # of all layers, frozen ones included
        self.sharded: dict[Layer, tuple[ShardPlaces | None, ...]] = {}  # weight's, bias's
        self.splits_owners = False  # whether A and G of some layer have two owners

    def owner(self, layer: Layer, side: str) -> int:
        """Return the rank that owns a factor."""
        placement = self.of[layer.name]
        return placement.a if side == "a" else placement.g

    def shards(self, layer: Layer) -> list[ShardPlaces]:
        """Return the shards of a layer's covered parameters."""
        parts = zip(self.sharded[layer], layer.covers, strict=True)
        return [shards for shards, covered in parts if covered and shards is not None]

    def find_shards(self, layers: Iterable[Layer]) -> None:
        """Note how the parameters of these layers lie over the ranks."""
        self.sharded = {}
        for layer in layers:
            shards = [
                sharding.shards_of(f"a parameter of {layer.name!r}", p, self._ranks.members())
                if p is not None and sharding.is_sharded(p)
                else None
                for p in (layer.weight, layer.bias)
            ]
            if any(shards):
                self.sharded[layer] = tuple(shards)

    def place(self, layers: Mapping[str, Layer]) -> None:
        """Give new layers to ranks; layers with a place stay where their factors are."""
        options, ranks = self._options, self._ranks
        grid = assignment.make_grid(self.strategy, ranks.world, options.grad_worker_fraction)
        ranks.grid = grid
        tasks = [task_of(layer) for layer in layers.values()]
        placed = [task for task in tasks if task.name in self.of]
        load = assignment.loads(self.strategy, placed, self.of, grid.world)
        new = [task for task in tasks if task.name not in self.of]
        self.of |= assignment.assign(self.strategy, new, grid, options.colocate_factors, load)
        self.splits_owners = any(placement.a != placement.g for placement in self.of.values())

    def find_facts(self, layers: Iterable[Layer]) -> None:
        """Find the plain facts of all layers anew."""
        self.facts = {}
        for layer in layers:
            facts = LayerFacts(task_of(layer), self.of[layer.name], sections=layer.sections)
            if not any(layer.covers):
                self.facts[layer] = facts._replace(frozen=True)
                continue
            key, sizes = stack_key(layer, "g"), [p.dtype.itemsize for p in layer.parameters]
            shards = zip(self.shards(layer), sizes, strict=True) if layer in self.sharded else ()
            self.facts[layer] = facts._replace(
                task=task_of(layer, layer.covers),
                itemsize=key.dtype.itemsize,
                device=key.device,
                shards=tuple(shards),
                tied=layer.tied,
            )


def task_of(layer: Layer, covers: tuple[bool, bool] | None = None) -> Task:
    """Return a layer's task by the parameters that it covers: its trained ones, frozen or not."""
    covers = covers or layer.trained
    (a, diagonal_a), (g, diagonal_g) = layer.size_of("a", covers), layer.size_of("g", covers)
    return Task(layer.name, a, g, diagonal_a, diagonal_g, layer.blocks)


class Homes:
    """The modules that hold the groups' parameters; wrappers may replace modules or parameters."""

    def __init__(
        self, model: nn.Module, groups: list[Group], parameters: Collection[Tensor]
    ) -> None:
        self._model = model
        self._listed = {id(p): p for group in groups for p in group["params"]}
        # fully_shard puts a whole parameter in a sharded one's place for a while.
        self._places = [
            (p, module._parameters, name, f"{prefix}.{name}" if prefix else name)
            for prefix, module in model.named_modules()
            for name, p in module._parameters.items()
            if p is not None and p in parameters and not sharding.is_sharded(p)
        ]

    def check(self, groups: list[Group], on_meta: dict[str, Tensor]) -> None:
        """Refuse parameters that are no longer the model's: K-FAC would be off without a word.

        ``on_meta`` are those that were on the meta device at construction.
        """
        for title in [name for name, p in on_meta.items() if p.is_meta]:
            raise RuntimeError(
                f"Invalid params: {title} was on the meta device when the optimizer was built, so "
                "no step would change the weight that replaces it; call to_empty, load or "
                "initialize the weights, then build the optimizer"
            )
        # By id, which is safe since the parameters are held: to hash a tensor is a call of Python.
        listed = self._listed
        for p in [p for group in groups for p in group["params"] if id(p) not in listed]:
            raise RuntimeError(
                f"Invalid param_groups: they hold a tensor of shape {tuple(p.shape)} that the "
                "optimizer was not given. DeepSpeed puts such float32 copies into the groups under "
                "ZeRO and under its own bf16 or fp16, and K-FAC can't precondition the copies; use "
                "DistributedDataParallel, fully_shard, or DeepSpeed's stage 0 with torch.autocast, "
                'where assignment="layer-wise" spreads the moments of Adam and LAMB as ZeRO 1 '
                "does. Add parameters of the model by add_param_group"
            )
        for p, held, name, title in self._places:
            now = held[name] if name in held else None  # noqa: SIM401 (TorchScript's has no get)
            if now is not p and all(p is not other for other in self._model.parameters()):
                raise RuntimeError(
                    "Invalid params: the parameters of the groups are not the model's any more: "
                    f"{title} is a {type(now).__name__} that the optimizer was not given. Build "
                    "the optimizer after fully_shard, after load_state_dict(assign=True) and after "
                    "whatever else replaces parameters, or give it the new ones by add_param_group"
                )


class Registry:
    """One model's covered layers by name, in the model's order."""

    def __init__(
        self, model: nn.Module, options: Options, ranks: Ranks, known: Iterable[Tensor]
    ) -> None:
        self.model = model
        self._options = options
        self._ranks = ranks
        sharded = any(sharding.is_sharded(p) for p in model.parameters())
        self.placements = Placements(options, ranks, sharded=sharded)
        self.layers: dict[str, Layer] = {}
        self.states: dict[str, LayerState] = {}
        self.sections: list[slice] = []  # by layer: places of its sections among those of all
        self.late: list[Layer] = []  # active layers that gather in each step that gathers
        self.missing: list[Layer] = []  # layers whose first average any pass may bring
        self.uncovered: dict[str, str] = {}  # parameters that no layer covers, and why
        self.skipped: dict[str, str] = {}  # parameters that skip_layers leaves out, and the pattern
        self.on_meta: dict[str, Tensor] = {}  # parameters with sizes, but without numbers
        self.group_of: dict[Tensor, int] = {}  # the number of each parameter's group
        self._accepted = set(known)  # parameters that are, or were, the model's

    # ---- answers ----

    @property
    def active(self) -> list[Layer]:
        """The covered layers that are not wholly frozen."""
        return [layer for layer in self.layers.values() if layer.parameters]

    @property
    def parameters(self) -> Iterable[Tensor]:
        """All parameters that the optimizer has of this model, covered or not."""
        return self.group_of.keys()

    @property
    def unseen(self) -> dict[str, str]:
        """Parameters of layers that had a gradient, but no call that K-FAC can read; and why."""
        why: dict[Tensor, str] = {}
        for layer in self.active:
            if self.states[layer.name].unseen and not self.states[layer.name].has_average:
                title = type(layer.module).__name__
                text = f"{title} uses it in a way that no kind of layer knows"
                why |= dict.fromkeys(layer.parameters, text)
        named = unwrapped(self.model).named_parameters() if why else ()
        return {name: why[p] for name, p in named if p in why}

    @property
    def with_average(self) -> list[Layer]:
        return [layer for layer in self.layers.values() if self.states[layer.name].has_average]

    @property
    def with_state(self) -> list[Layer]:
        return [layer for layer in self.active if self.states[layer.name].has_state]

    def values(
        self, name: str, groups: list[Group], layers: Iterable[Layer] | None = None
    ) -> Callable[[Layer], float]:
        """Return a function that reads the groups' value for an active layer.

        The groups of its weight and its bias must agree on it.
        """
        value, *differing = {group[name] for group in groups}
        if not differing:
            return dict.fromkeys(self.layers.values(), value).__getitem__
        value_of: dict[Layer, float] = {}
        for layer in self.layers.values() if layers is None else layers:
            numbers = sorted({groups[self.group_of[p]][name] for p in layer.parameters})
            if len(numbers) > 1:
                why = (
                    f"layer {layer.name!r} has its weight and bias in parameter groups with "
                    f"different values {numbers}; give both groups the same {name}"
                )
                raise invalid_because(name, why)
            if numbers:  # else the layer is frozen
                value_of[layer] = numbers[0]
        return value_of.__getitem__

    # ---- changes ----

    def match_groups(self, groups: list[Group]) -> None:
        """Note the parameters of the groups that are the model's."""
        of_groups = {p: i for i, group in enumerate(groups) for p in group["params"]}
        # A replaced module's parameters stay in their group, as they do in any optimizer.
        gone = self._accepted.difference(self.model.parameters())
        self.group_of = {p: i for p, i in of_groups.items() if p not in gone}
        model = unwrapped(self.model)
        named = model.named_parameters()
        self.on_meta.update({name: p for name, p in named if p in of_groups and p.is_meta})
        self.homes = Homes(model, groups, self.group_of.keys())

    def cover(self, groups: list[Group], *, first: bool) -> Coverage:
        """Return the coverage of the model; raise where groups or options do not fit it."""
        options = self._options
        found = coverage.cover(
            self.model,
            dict.fromkeys(self.parameters),
            skip_layers=tuple(options.skip_layers),
            max_factor_size=options.max_factor_size,
            papers_only=options.kaisa_scaling,
        )
        for pattern in found.unmatched if first else ():
            text = (
                f"skip_layers: {pattern!r} matches no module; patterns are searched in qualified "
                "names (as in model.named_modules()) and class names"
            )
            agree.warn(self._ranks, text)
        for name, layer in found.layers.items():  # layers that stay as they were keep their state
            old = self.layers.get(name, layer)
            same = old.module is layer.module and old.trained == layer.trained
            if same and old.weight is layer.weight and old.bias is layer.bias:
                found.layers[name] = old
        for name in PER_GROUP:
            self.values(name, groups, found.layers.values())
        self.placements.find_shards(found.layers.values())
        return found

    def rebuild(self, found: Coverage, groups: list[Group]) -> None:
        """Take over a new coverage."""
        self._accepted.update(p for group in groups for p in group["params"])
        for name, layer in self.layers.items():
            if found.layers.get(name) is not layer:
                del self.states[name], self.placements.of[name]
        self.layers, self.uncovered, self.skipped = found.layers, found.uncovered, found.skipped
        self.states = {name: self.states.get(name, LayerState()) for name in self.layers}
        self.sections, start = [], 0
        for number, layer in enumerate(self.layers.values()):
            layer.number, end = number, start + layer.sections
            self.sections.append(slice(start, end))
            start = end
        self.placements.place(self.layers)

    def follow_changes(self, gathered: Mapping[Layer, tuple[bool, bool]]) -> list[Layer]:
        """Return layers that were frozen or unfrozen since; they start anew.

        ``gathered`` are the covers of layers at the time of their statistics.
        """
        changed = []
        for layer in self.layers.values():
            covers = gathered.get(layer) or layer.covers_now()
            if any(covers) and covers != layer.covers:
                logger.info("layer %r starts anew: it was frozen or unfrozen", layer.name)
                layer.cover(covers)
                changed.append(layer)
        return changed

    @property
    def devices(self) -> list[tuple[torch.device, torch.dtype]]:
        """Device and dtype of each active layer."""
        return [(x.parameters[0].device, x.parameters[0].dtype) for x in self.active]
