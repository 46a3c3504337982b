"""(G + γ_G I)⁻¹ ∇ (A + γ_A I)⁻¹ by Cholesky."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layers import Layer
from ...linalg import kronecker
from ..stacks import Factors, Key, LayerGroup, by_place, per_block, stack_key
from .base import DampingOf, StepValues, TriangleRule, of_factors, triangles


class CholeskyRule(TriangleRule):
    """Multiply by damped inverses; ``split`` says how A and G share the damping."""

    method = "inverse"
    sizes = triangles("inverse", "inverses")

    def __init__(self, dtype: torch.dtype | None, split: str) -> None:
        super().__init__(dtype)
        # "pi": γ_A γ_G = γ; "full": γ on both
        self.sizes = self.sizes._replace(tells_means=split == "pi")

    def means(self, owned: Factors, layers: Sequence[Layer]) -> list[Tensor]:
        """Return mean eigenvalues of A and of G, ``[2, blocks]`` for the layers of each place."""
        return [_means(owned, same) for same in by_place(layers)] if self.sizes.tells_means else []

    def shifts(
        self, layers: Sequence[Layer], damping_of: DampingOf, means: list[Tensor]
    ) -> dict[Key, Tensor]:
        if not means:
            return super().shifts(layers, damping_of, means)
        shifts: dict[Key, Tensor] = {}
        for same, both in zip(by_place(layers), means, strict=True):
            damping = per_block(same, damping_of, stack_key(same[0], "g"))
            shifts |= of_factors(same, kronecker.split_damping(damping, *both))
        return shifts

    def apply(
        self, group: LayerGroup, gradient: Tensor, members: list[Layer], values: StepValues
    ) -> Tensor:
        slots = group.slots_of(members)
        g, a = (self._state(group, side, "inverse", slots, gradient) for side in "ga")
        assert g is not None and a is not None
        return kronecker.apply_inverse(gradient, g, a)


def _means(owned: Factors, layers: list[Layer]) -> Tensor:
    key = stack_key(layers[0], "g")
    means = torch.zeros(2, sum(x.blocks for x in layers), dtype=key.dtype, device=key.device)
    for row, side in zip(means, "ag", strict=True):
        at = 0
        for layer in layers:
            factor = owned.by_key.get((layer, side))
            if factor is not None:
                row[at : at + layer.blocks] = kronecker.mean_eigenvalue(
                    factor["average"].to(key.dtype), diagonal=factor.key.diagonal
                )
            at += layer.blocks
    return means
