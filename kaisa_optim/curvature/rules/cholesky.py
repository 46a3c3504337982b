"""(G + γ_G I)⁻¹ ∇ (A + γ_A I)⁻¹ by Cholesky."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layers import Layer
from ...linalg import kronecker
from ...plan.facts import Work
from ..stacks import Factor, Factors, LayerGroup, StackKey, by_place, stack_key
from .base import StepValues, TriangleRule, triangles


class CholeskyRule(TriangleRule):
    """Multiply by damped inverses; ``split`` says how A and G share the damping."""

    sizes = triangles("inverse", "inverses")
    work = Work("inverses", 1)

    def __init__(self, dtype: torch.dtype | None, split: str) -> None:
        super().__init__(dtype)
        # "pi": γ_A γ_G = γ; "full": γ on both
        self.sizes = self.sizes._replace(tells_means=split == "pi")

    def means(self, owned: Factors, layers: Sequence[Layer]) -> list[Tensor]:
        """Return mean eigenvalues of A and of G, ``[2, blocks]`` for the layers of each place."""
        found = []
        for same in by_place(layers) if self.sizes.tells_means else ():
            like = stack_key(same[0], "g")
            rows = [_mean(owned.by_key.get((x, side)), x, like) for side in "ag" for x in same]
            found.append(torch.cat(rows).view(2, -1))
        return found

    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        assert damping is not None
        if diagonal:
            return (1 / (factors + damping[:, None]),)
        return (kronecker.damped_inverse(factors, damping),)

    def apply(
        self, group: LayerGroup, gradient: Tensor, members: list[Layer], values: StepValues
    ) -> Tensor:
        g, a = self._states(group, "inverse", members, gradient)
        return kronecker.apply_inverse(gradient, g, a)


def _mean(factor: Factor | None, layer: Layer, like: StackKey) -> Tensor:
    """Return mean eigenvalues, ``[blocks]``; zeros where another rank owns the factor."""
    if factor is None:
        return torch.zeros(layer.blocks, dtype=like.dtype, device=like.device)
    average = factor["average"].to(like.dtype)
    return kronecker.mean_eigenvalue(average, diagonal=factor.key.diagonal)
