"""(G + γ_G I)⁻¹ ∇ (A + γ_A I)⁻¹ by Cholesky."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layers import Layer
from ...linalg import kronecker
from ...plan.facts import Work
from ..group import Group, by_place, stack_key
from .base import DampingOf, GroupOf, TriangleRule, triangles


class CholeskyRule(TriangleRule):
    """Multiply by damped inverses; ``split`` says how A and G share the damping."""

    sizes = triangles("inverse", "inverses")
    work = Work("inverses", 1)

    def __init__(self, dtype: torch.dtype | None, split: str) -> None:
        super().__init__(dtype)
        # "pi": γ_A γ_G = γ; "full": γ on both
        self.sizes = self.sizes._replace(tells_means=split == "pi")

    def means(self, group_of: GroupOf, layers: Sequence[Layer]) -> list[Tensor]:
        """Return mean eigenvalues of A and of G, ``[2, blocks]`` for the layers of each place.

        They are zero where another rank owns the factor.
        """
        means = []
        for same in by_place(layers) if self.sizes.tells_means else ():
            like, rows = stack_key(same[0], "g"), []
            for layer, side in [(x, group_of[x].sides[i]) for i in range(2) for x in same]:
                if layer in side.owned:
                    average = side.averages["average"][side.owned[layer]].to(like.dtype)
                    rows.append(kronecker.mean_eigenvalue(average, diagonal=side.key.diagonal))
                else:
                    rows.append(torch.zeros(layer.blocks, dtype=like.dtype, device=like.device))
            means.append(torch.cat(rows).view(2, -1))
        return means

    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        assert damping is not None
        if diagonal:
            return (1 / (factors + damping[:, None]),)
        return (kronecker.damped_inverse(factors, damping),)

    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        return kronecker.apply_inverse(gradients, *self._states(group, "inverse", gradients))
