"""The factors' tensors on this rank, in stacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..curvature.averages import RunningAverages
from ..curvature.refresh import Refresher
from ..curvature.rules import Rule
from ..curvature.stacks import AppliedFactors, Factors, Specs, StackKey, alike
from ..layers import Layer
from ..plan.assignment import Grid
from .registry import Registry


class FactorStore:
    """The factors that this rank owns, and the factors that it applies."""

    def __init__(self, averages: RunningAverages, rule: Rule, refresher: Refresher) -> None:
        self.averages = averages
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
                    if registry.owner(layer, side) == rank:
                        self.owned.put(layer, side)
        self.applied = AppliedFactors(x for x in registry.active if registry.column(x) == column)
        self.averages.allocate(self.owned)
        self.refresher.allocate(self.owned)
        self.rule.allocate(self.applied)
        self.places = registry.devices
        for layer in set(registry.with_average).intersection(registry.active):
            for name, view in self.views(layer):
                if name in kept[layer]:
                    view.copy_(kept[layer][name])

    def answer_late(self, layers: Mapping[str, Layer]) -> set[str]:
        """Return the layers whose owners tell in the next exchange whether a refresh failed."""
        if not any([self.refresher.defers_on(device) for device in {d for d, _ in self.places}]):
            return set()
        return {name for name, x in layers.items() if self.refresher.defers(x)}

    def specs(self, key: StackKey, count: int) -> Specs:
        """Return the tensors of ``count`` factors of one shape, owned and applied."""
        kept = self.averages.specs(key, count) | self.refresher.specs(count)
        return kept | self.rule.state_specs(key, count)

    def views(self, layer: Layer) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of a layer, as views with stable names."""
        yield from self.owned.views(layer)
        yield from self.applied.views(layer)
