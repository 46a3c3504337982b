"""Q_G (Q_Gᵀ ∇ Q_A / (v_G v_Aᵀ + γ)) Q_Aᵀ: the exact damping, in the factors' eigenbasis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...layers import Layer
from ...linalg import eigen, kronecker
from ...plan.facts import Work
from ...plan.moves import Sizes, TensorSpec
from ..stacks import AppliedFactors, Factor, LayerGroup, at
from .base import DampingOf, Rule, StepValues, stored

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
    slow_above = 4096  # a core of a CPU then takes a quarter of a minute or more

    def faults(self, spec: TensorSpec, tensor: Tensor) -> Iterator[str]:
        found = [*super().faults(spec, tensor)]
        yield from found
        if spec.name == "vectors" and not found:
            wide = tensor.float()
            off = wide.mT @ wide - torch.eye(wide.shape[-1], device=wide.device)
            if not off.abs().max() <= _ORTHONORMAL:  # infinities of both signs make NaN
                yield "not orthonormal"

    def measure(self, owned: Factor, state: Factor, damping: float) -> Tensor:
        """Return condition numbers of a factor with the damping."""
        values = state["values"].double() + damping
        return values.amax(1) / values.amin(1)

    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        return (factors.clamp(min=0),) if diagonal else eigen.eigendecompose(factors)

    def apply(
        self, group: LayerGroup, gradient: Tensor, members: list[Layer], values: StepValues
    ) -> Tensor:
        bases = self._states(group, "vectors", members, gradient)
        projected = kronecker.into_basis(gradient, *bases)
        if projected is gradient:  # both factors are diagonal, and the caller needs the gradient
            projected = gradient.clone()
        self._divide(group, projected, members, values)
        return kronecker.out_of_basis(projected, *bases)

    def _divide(
        self, group: LayerGroup, new: Tensor, members: list[Layer], values: StepValues
    ) -> None:
        damping = group.common_or_each(members, values.damping_of)
        g, a = self._states(group, "values", members, new)
        new.div_(kronecker.damped_product(g, a, damping))


class StoredProductRule(EigenRule):
    """Multiply by 1 / (v_G v_Aᵀ + γ), formed at the refresh with the damping of that step."""

    sizes = EigenRule.sizes._replace(
        of_gradient=(TensorSpec("scale", "eigenvalue_products", "gradient"),)
    )

    def renew(
        self, applied: AppliedFactors, layers: Sequence[Layer], damping_of: DampingOf
    ) -> None:
        for layer in layers:
            group = applied.group_of.get(layer)
            if group is not None:
                a, g = (applied.by_key[layer, side]["values"] for side in "ag")
                product = kronecker.damped_product(g, a, damping_of(layer))
                scale = group.tensors["scale"]
                scale[group.slots[layer]] = stored(product.reciprocal_(), scale.dtype)

    def _divide(
        self, group: LayerGroup, new: Tensor, members: list[Layer], values: StepValues
    ) -> None:
        scale = at(group.tensors["scale"], group.slots_of(members))
        new.mul_(scale.to(new.dtype))
