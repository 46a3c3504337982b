"""The layers that are covered, their places among groups and ranks, and their state."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ..comm import agreement, sharding
from ..comm.ranks import Ranks
from ..errors import invalid_because
from ..layers import Layer
from ..plan.schedule import LayerState
from . import coverage
from .coverage import Coverage, unwrapped
from .options import PER_GROUP, Group, Options
from .placements import Placements

_requires_grad = operator.attrgetter("requires_grad")
logger = logging.getLogger("kaisa_optim")


class Registry:
    """One model's covered layers by name, in the model's order."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        ranks: Ranks,
        known: Iterable[Tensor],
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
        layers = [x for x in self.active if self.states[x.name].unseen]
        why = {
            p: f"{type(layer.module).__name__} uses it in a way that no kind of layer knows"
            for layer in layers
            if not self.states[layer.name].has_average
            for p in layer.parameters
        }
        named = unwrapped(self.model).named_parameters() if why else ()
        return {name: why[p] for name, p in named if p in why}

    @property
    def with_average(self) -> list[Layer]:
        return [layer for layer in self.layers.values() if self.states[layer.name].has_average]

    @property
    def with_state(self) -> list[Layer]:
        return [layer for layer in self.active if self.states[layer.name].has_state]

    # ---- group values ----

    def _shared(self, layer: Layer, groups: list[Group], name: str) -> float:
        """Return a group's value for a layer; its weight and bias must agree on it."""
        values = {groups[self.group_of[p]][name] for p in layer.parameters}
        if len(values) > 1:
            why = (
                f"layer {layer.name!r} has its weight and bias in parameter groups with "
                f"different values {sorted(values)}; give both groups the same {name}"
            )
            raise invalid_because(name, why)
        return values.pop()

    def values(self, name: str, groups: list[Group]) -> Callable[[Layer], float]:
        """Return a function that reads the groups' value for an active layer."""
        value, *others = {group[name] for group in groups}
        if not others:
            return dict.fromkeys(self.layers.values(), value).__getitem__
        return {layer: self._shared(layer, groups, name) for layer in self.active}.__getitem__

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
        self.homes = coverage.Homes(model, groups, self.group_of.keys())

    def cover(self, groups: list[Group], *, first: bool) -> Coverage:
        """Return the coverage of the model; raise where groups or options do not fit it."""
        options, model = self._options, coverage.unwrapped(self.model)
        coverage.refuse_wrappers(self.model)
        coverage.check_trained(model, self.parameters)
        found = coverage.cover(
            model,
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
            agreement.warn(self._ranks, text)
        for layer in found.layers.values():
            for name in PER_GROUP if layer.parameters else ():
                self._shared(layer, groups, name)
        self.placements.find_shards(found.layers.values())
        return found

    def rebuild(self, found: Coverage, groups: list[Group]) -> None:
        """Take over a new coverage; layers that stay as they were keep their state."""
        self._accepted.update(p for group in groups for p in group["params"])
        before, self.layers = self.layers, {}
        for name, layer in found.layers.items():
            old = before.get(name)
            same = old is not None and old.same_place(layer) and old.trained == layer.trained
            self.layers[name] = old if same and old is not None else layer
            if layer in self.placements.sharded:
                shards = self.placements.sharded.pop(layer)
                self.placements.sharded[self.layers[name]] = shards
        for name, layer in before.items():
            if self.layers.get(name) is not layer:
                del self.states[name], self.placements.of[name]
        self.states = {name: self.states.get(name, LayerState()) for name in self.layers}
        self.sections, start = [], 0
        for number, layer in enumerate(self.layers.values()):
            layer.number, end = number, start + layer.sections
            self.sections.append(slice(start, end))
            start = end
        self.uncovered, self.skipped = found.uncovered, found.skipped
        self.placements.place(self.layers)

    def follow_changes(self, gathered: Mapping[Layer, tuple[bool, bool]]) -> list[Layer]:
        """Return layers that were frozen or unfrozen since; they start anew.

        ``gathered`` are the covers of layers at the time of their statistics.
        """
        changed = []
        for layer in self.layers.values():
            covers = gathered.get(layer)
            if covers is None and [*map(_requires_grad, layer.trainable)] != layer.flags:
                covers = layer.covers_now()
            if covers is not None and any(covers) and covers != layer.covers:
                logger.info("layer %r starts anew: it was frozen or unfrozen", layer.name)
                layer.cover(covers)
                changed.append(layer)
        return changed

    @property
    def devices(self) -> list[tuple[torch.device, torch.dtype]]:
        """Device and dtype of each active layer."""
        return [(x.parameters[0].device, x.parameters[0].dtype) for x in self.active]
