"""K-FAC's direction, of the length at which the loss falls as by the base's own step.

Steepest descent in the Kronecker metric: among all steps Δ with ‖Ĝ^½ Δ Â^½‖ = 1 in the spectral
norm, the loss falls most along Ĝ^-½ polar(Ĝ^-½ M Â^-½) Â^-½ for a momentum M. The direction here
takes a small power of the outer roots: D = Ĝ^-p polar(Ĝ^-½ M Â^-½) Â^-p. Factors are divided by
their mean eigenvalues and damped by a share λ, so that no scale of the loss or the inputs matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ...linalg import kronecker, orthogonal, precision, roots
from ...plan.facts import TensorSpec, Work
from ..group import Group, StackKey
from ..lengths import SHARD_SUMS, SQUARE_SUM, Length
from .base import DampingOf, TriangleRule, triangles

# The outer roots are mixed with the identity: αI + (1 - α) F̂^-½. The mixture is near F̂^-⅛, and
# needs no root of its own.
_KEPT = 0.8

_LARGEST = 1e9  # in a root: its entries are at most 1 / √λ


class PolarRule(TriangleRule):
    """Keep a symmetric root of each factor; the base keeps the momentum."""

    sizes = triangles("root", "roots")._replace(of_gradient=(SQUARE_SUM,), units=True)
    work = Work("roots", 2, lambda shorter: len(orthogonal.polynomials_for(shorter)))
    scale_free = True
    wants_half_products = True
    quality = "residual"

    def __init__(self, dtype: torch.dtype | None, length: Length) -> None:
        super().__init__(dtype)
        self.length = length
        self.sizes = self.sizes._replace(
            of_gradient=length.specs, terms=length.terms, shard_sums=SHARD_SUMS
        )

    def faults(self, spec: TensorSpec, tensor: Tensor) -> Iterator[str]:
        found = [*super().faults(spec, tensor)]
        yield from found
        if spec.name == "root" and not found and tensor.abs().max() > _LARGEST:
            yield f"larger than {_LARGEST:g}, as no root of a damped factor is"

    def precision(self, device: torch.device) -> AbstractContextManager[None]:
        """Polynomials need full precision, unless they are multiplied in bfloat16."""
        half = device.type != "cpu" and self._in_half(torch.bfloat16, torch.empty(0, device=device))
        return nullcontext() if half else precision.full_precision()

    def measure(self, key: StackKey, average: Tensor, state: Tensor, damping: float) -> Tensor:
        """Return the residuals of a root, with the average of now."""
        shifts = average.new_full((len(average),), damping)
        return roots.residual(average, state, shifts, diagonal=key.diagonal)

    def solve(self, factors: Tensor, damping: Tensor | None, diagonal: bool) -> tuple[Tensor, ...]:
        assert damping is not None
        root, good = roots.inverse_root(factors, damping, diagonal=diagonal)
        return (root if diagonal else root.masked_fill_(~good[:, None, None], torch.nan),)

    def apply(self, group: Group, gradients: Tensor, damping_of: DampingOf) -> Tensor:
        """Return the directions of these momenta, without their lengths."""
        g, a = self._states(group, "root", gradients)
        white = kronecker.apply_inverse(gradients, g, a)
        half = not orthogonal.narrow(white) and self._in_half(torch.bfloat16, white)
        found = orthogonal.orthogonalized(white, in_half=half)
        return kronecker.softened(found, g, a, _KEPT)
