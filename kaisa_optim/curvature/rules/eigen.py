"""Q_G (Q_Gᵀ ∇ Q_A / (v_G v_Aᵀ + γ)) Q_Aᵀ: the exact damping, in the factors' eigenbasis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...layers import Layer
from ...linalg import eigen, kronecker
from ...plan.facts import Sizes, TensorSpec, Work
from ..group import Group, StackKey
from .base import DampingOf, GroupOf, Rule, stored

_ORTHONORMAL = 0.1  # far above the error of rounding to half precision


class EigenRule(Rule):
    """Divide by the eigenvalues' product, with the current damping."""

    work = Work("eigenvectors", 2)
    sizes = Sizes(
        (
            TensorSpec("values", "eigenvalues", "spectrum", "own"),
            TensorSpec("vectors", "eigenvectors", "basis"),
        )
    )
    quality = "condition"
    reads_damping = True
    slow_above = 4096  # a core of a CPU then takes a quarter of a minute or more

    def faults(self, spec: TensorSpec, tensor: Tensor) -> Iterator[str]:
        found = [*super().faults(spec, tensor)]
        yield from found
        if spec.name == "vectors" and not found:
            wide = tensor.float()
            off = wide.mT @ wide - torch.eye(wide.shape[-1], device=wide.device)
            if not off.abs().max() <= _ORTHONORMAL:  # infinities of both signs make NaN
                yield "not orthonormal"

    def measure(self, key: StackKey, average: Tensor, state: Tensor, damping: float) -> Tensor:
        """Return condition numbers of a factor with the damping."""
        values = state.double() + damping
        return values.amax(1) / values.amin(1)

    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        return (factors.clamp(min=0),) if diagonal else eigen.eigendecompose(factors)

    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        bases = self._states(group, "vectors", gradients)
        projected = kronecker.into_basis(gradients, *bases)
        if projected is gradients:  # both factors are diagonal, and the caller needs the gradients
            projected = gradients.clone()
        self._divide(group, projected, damping_of)
        return kronecker.out_of_basis(projected, *bases)

    def _divide(self, group: Group, new: Tensor, damping_of: DampingOf) -> None:
        damping = group.common_or_each(damping_of)
        g, a = self._states(group, "values", new)
        new.div_(kronecker.damped_product(g, a, damping))


class StoredProductRule(EigenRule):
    """Multiply by 1 / (v_G v_Aᵀ + γ), formed at the refresh with the damping of that step."""

    sizes = EigenRule.sizes._replace(
        of_gradient=(TensorSpec("scale", "eigenvalue_products", "gradient"),)
    )

    def renew(self, group_of: GroupOf, layers: Sequence[Layer], damping_of: DampingOf) -> None:
        for layer in [x for x in layers if x in group_of and group_of[x].applied]:
            group = group_of[layer]
            slots = group.slots[layer]
            a, g = (side.state["values"][slots] for side in group.sides)
            product = kronecker.damped_product(g, a, damping_of(layer))
            scale = group.tensors["scale"]
            scale[slots] = stored(product.reciprocal_(), scale.dtype)

    def _divide(self, group: Group, new: Tensor, damping_of: DampingOf) -> None:
        new.mul_(group.tensors["scale"].to(new.dtype))
