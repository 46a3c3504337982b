"""The factors' tensors on this rank, in stacks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..curvature.averages import RunningAverages
from ..curvature.refresh import Refresher
from ..curvature.rules import Rule
from ..curvature.stacks import AppliedFactors, Factors, Specs, alike, specs_of, stack_key
from ..layers import Layer
from ..plan.assignment import Grid
from ..plan.moves import Sizes
from .registry import Registry


class FactorStore:
    """The factors that this rank owns, and the factors that it applies."""

    def __init__(
        self, averages: RunningAverages, rule: Rule, refresher: Refresher, sizes: Sizes
    ) -> None:
        self.averages = averages
        self.sizes = sizes
        self.rule = rule
        self.refresher = refresher
        self.owned = Factors()  # the factors whose averages this rank keeps and decomposes
        self.applied = AppliedFactors()  # factors of layers whose gradients it preconditions
        self.places: list[tuple[torch.device, torch.dtype]] = []  # of the layers, when laid out

    def allocate(self, registry: Registry, rank: int, grid: Grid) -> None:
        """Lay out all tensors anew; layers that have an average keep their values."""
        kept = {layer: dict(self.views(layer)) for layer in registry.with_average}
        self.owned, column = Factors(), rank % grid.columns
        for members in alike(registry.active):
            for side in "ag":
                for layer in members:
                    if registry.placements.owner(layer, side) == rank:
                        self.owned.put(layer, side)
        self.applied = AppliedFactors(
            x for x in registry.active if registry.placements.owner(x, "g") % grid.columns == column
        )
        self.averages.allocate(self.owned, self.rule.sizes.of_owner)
        self.refresher.forget_answers(self.owned)  # those on their way are of former stacks
        self.rule.allocate(self.applied)
        self.places = registry.devices
        for layer in set(registry.with_average).intersection(registry.active):
            for name, view in self.views(layer):
                if name in kept[layer]:
                    view.copy_(kept[layer][name])

    def specs(self, layer: Layer) -> Iterator[tuple[str, str, Specs]]:
        """Yield a layer's tensors: their prefix, and the factor whose owner has them."""
        rule, sizes, blocks = self.rule, self.rule.sizes, layer.blocks
        g, a = stack_key(layer, "g"), stack_key(layer, "a")
        for side, key in (("a", a), ("g", g)):
            owned = specs_of(sizes.of_owner, blocks, key[:2], self.averages.dtype, key.dtype)
            applied = specs_of(sizes.of_factor, blocks, key[:2], rule.dtype, key.dtype)
            yield f"{side}_", side, owned | applied
        both = g.size, a.size
        yield "", "g", specs_of(sizes.of_gradient, blocks, both, rule.dtype, g.dtype)

    def views(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of a layer, as views with stable names."""
        yield from self.owned.views(layer)
        yield from self.applied.views(layer)
