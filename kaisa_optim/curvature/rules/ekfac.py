"""Second moments of gradients in the eigenbasis in place of the eigenvalues of G ⊗ A.

EKFAC (George et al., 2018): among all matrices with K-FAC's eigenvectors, the one with the
eigenvalues S = diag(Qᵀ F Q) is nearest to the Fisher F. S is a running average that starts at
K-FAC's own v_G v_Aᵀ. Its mass is the weight of the values taken in since: 0 while S is v_G v_Aᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layers import Layer
from ...linalg import kronecker
from ...plan.step_plan import AgreedStep
from ..averages import has_rows, keep_and_take, weighed
from ..stacks import AppliedFactors, LayerGroup, Slots, Specs, joined, per_block
from .base import RotatingRule, Rotation, StepValues


class EkfacRule(RotatingRule):
    """Divide by S + γ; S is corrected by "examples" or by the mean "gradients" of steps."""

    def __init__(self, dtype: torch.dtype | None, correction: str) -> None:
        super().__init__(dtype)
        self.correction = correction

    def group_specs(self, count: int, g: int, a: int, dtype: torch.dtype) -> Specs:
        return {"corrected": ((count, g, a), dtype), "corrected_mass": ((count,), dtype)}

    def rotate(
        self,
        applied: AppliedFactors,
        layer: Layer,
        slots: Slots,
        rotations: tuple[Rotation, Rotation],
    ) -> None:
        """Make S the diagonal of the rotated matrix, or v_G v_Aᵀ where S has no mass yet.

        The squares of the rotations' entries keep S non-negative, and keep its sum.
        """
        state = applied.group_of[layer].tensors
        g, a = (applied.by_key[layer, side]["values"] for side in "ga")
        product = g[:, :, None] * a[:, None, :]
        squares = [None if r is None else r.square() for r in rotations]
        old = kronecker.out_of_basis(state["corrected"][slots], *squares)
        moved = state["corrected_mass"][slots][:, None, None] > 0
        state["corrected"][slots] = torch.where(moved, old, product)

    def take_examples(
        self,
        applied: AppliedFactors,
        sums: dict[Layer, Tensor],
        agreed: AgreedStep,
        values: StepValues,
    ) -> None:
        """Take second moments of examples' gradients, summed over the ranks, into S."""
        for group in applied.groups:
            members = [layer for layer in group.layers if layer in sums]
            if members:
                slots = joined([group.slots[layer] for layer in members], group.g.key.device)
                new = torch.cat([sums[layer] for layer in members])
                decays = keep_and_take(members, values.decay_of, group.g.key)
                mass = group.tensors["corrected_mass"]
                taken = _finite(new) & has_rows(members, agreed, group.g.key)
                grown, step = weighed(mass[slots], decays, taken)
                _approach(group, slots, new, step)
                mass[slots] = grown

    def apply(
        self, group: LayerGroup, gradient: Tensor, members: list[Layer], values: StepValues
    ) -> Tensor:
        slots = group.slots_of(members)
        bases = self._bases(group, slots, gradient)
        damping = group.common_or_each(members, values.damping_of)
        projected = kronecker.into_basis(gradient, *bases)
        new = projected * torch.reciprocal_(group.tensors["corrected"][slots] + damping)
        if self.correction == "gradients" and any(x.name in values.graded for x in members):
            _take_gradients(group, slots, projected, members, values)
        return kronecker.out_of_basis(new, *bases)

    def _weighed(self, group: LayerGroup, squares: Tensor, slots: Slots) -> Tensor:
        return (group.tensors["corrected"][slots] * squares).sum()


def _take_gradients(
    group: LayerGroup, slots: Slots, projected: Tensor, members: Sequence[Layer], values: StepValues
) -> None:
    """Take the mean gradients of ``members``, in the basis, into S."""
    new = projected.square() * values.terms

    def share_of(layer: Layer) -> float:
        return 1 - (values.decay_of(layer) if layer.name in values.graded else 1.0)

    # Start from v_G v_Aᵀ at full weight: one gradient says too little about its own variance.
    share = per_block(members, share_of, group.g.key)
    share = torch.where(_finite(new), share, 0)
    _approach(group, slots, new, share)
    mass = group.tensors["corrected_mass"]
    mass[slots] += (1 - mass[slots]) * share


def _finite(new: Tensor) -> Tensor:
    """Return which blocks are finite: other sums would stay in an average for ever."""
    return new.sum((1, 2)).isfinite()


def _approach(group: LayerGroup, slots: Slots, new: Tensor, step: Tensor) -> None:
    new = new.masked_fill_((step == 0)[:, None, None], 0)
    corrected = group.tensors["corrected"]
    if isinstance(slots, slice):
        corrected[slots].lerp_(new, step[:, None, None])
    else:
        corrected[slots] = corrected[slots].lerp(new, step[:, None, None])
