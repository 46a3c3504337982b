"""Muon's momentum, made orthogonal in the metric of K-FAC's output factors.

Among all steps Δ of spectral norm 1, Muon takes the one along which the loss falls most: polar(M)
for a momentum M. Here G measures the length of a step: among all Δ with ‖L⁻¹Δ‖ = 1, the loss falls
most along L polar(L M). L is (G / ḡ + λI)^-½, with ḡ the mean eigenvalue of G. Any other root R of
L², with R Rᵀ = L², gives the same step R polar(Rᵀ M). So a triangular root, by Cholesky, takes the
place of an eigendecomposition. A is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...layers import Layer
from ...linalg import orthogonal, precision
from ..stacks import Key, LayerGroup, Specs, by_place, per_block, present_blocks, stack_key
from .base import DampingOf, StepValues, TriangleRule
from .cholesky import of_factors

DAMPING = 0.1  # λ, a share of the mean eigenvalue


class Settings(NamedTuple):
    """The settings of a layer's momentum, and of the step from the momentum."""

    momentum: float
    nesterov: bool
    step: orthogonal.MuonStep


class MuonRule(TriangleRule):
    """Keep a momentum, and take the step R polar(Rᵀ M)."""

    method = "root"
    results = ("root",)
    multiplied = ("root",)
    makes_directions = True
    wants_half_products = True

    def group_specs(self, count: int, g: int, a: int, dtype: torch.dtype) -> Specs:
        return {"momentum": ((count, g, a), dtype)}

    def shifts(
        self, layers: Sequence[Layer], damping_of: DampingOf, means: list[Tensor]
    ) -> dict[Key, Tensor]:
        shifts: dict[Key, Tensor] = {}
        for same in by_place(layers):
            damping = per_block(same, damping_of, stack_key(same[0], "g"))
            shifts |= of_factors(same, (torch.zeros_like(damping), damping))
        return shifts

    def apply(
        self, group: LayerGroup, gradient: Tensor, members: list[Layer], values: StepValues
    ) -> Tensor:
        """Return the members' steps; if their settings differ, step each member alone."""
        own, *others = dict.fromkeys(values.settings_of[layer] for layer in members)
        if others:
            parts = gradient.split([layer.blocks for layer in members])
            each = zip(members, parts, strict=True)
            return torch.cat([self.apply(group, part, [x], values) for x, part in each])
        slots = group.slots_of(members)
        present = present_blocks(members, group)
        root = self._state(group, "g", "root", slots, gradient)
        assert root is not None
        in_half = self._orthogonal_in_half(gradient)
        with precision.full_precision(gradient.device.type):
            momentum = group.tensors["momentum"]
            moved = momentum[slots].lerp(gradient, 1 - own.momentum)
            if present is not None:  # the momenta of other blocks stay as they are
                moved = torch.where(present[:, None, None], moved, momentum[slots])
            momentum[slots] = moved
            ahead = gradient.lerp(moved, own.momentum) if own.nesterov else moved
            return orthogonal.muon_step(ahead, root, own.step, in_half)

    def _symmetric(self, matrices: Tensor) -> Tensor:
        return matrices + matrices.triu(1).mT

    def _triangle(self, matrices: Tensor) -> Tensor:
        return matrices.triu_()
