"""Polar factors of stacked matrices by Newton-Schulz polynomials."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]  # in a singular value s, a s + b s³ + c s⁵
# The largest singular value begins at or below this. Beyond 1 the polynomials soon leave all
# bounds, and bfloat16's rounding would take a matrix of rank one beyond 1.
_BELOW_ONE = 0.98


def _after_scaling(polynomials: Sequence[Polynomial]) -> tuple[Polynomial, ...]:
    """Return the polynomials of 0.98 s: then matrices are divided by their norms alone."""
    (a, b, c), *others = polynomials
    first = a * _BELOW_ONE, b * _BELOW_ONE**3, c * _BELOW_ONE**5
    return first, *others


# One after the other, these take all singular values from 0.02 to 1 to between 0.48 and 1.52. Each
# is the nearest to 1 on the interval that the one before leaves, as in Polar Express (Amsel et al.,
# 2025). A third polynomial (0.9 to 1.1) changed losses by 0.5 % on a character GPT, by -2 % on a
# digits autoencoder and by -1 % on a U-Net: factors have whitened the momentum already.
_TOWARDS_ONE = _after_scaling([(7.7110, -22.1138, 16.2488), (3.2153, -2.4112, 0.5013)])
# The same from 0.005 on, for sides above 256: n singular values have a mean square of 1/n.
_FROM_FURTHER = _after_scaling(
    [(8.2987, -24.4305, 18.0903), (3.9152, -2.9211, 0.5592), (3.1746, -2.3804, 0.4978)]
)
_FAR = 256
_LONG = 1.5  # sides' ratio from which powers of X Xᵀ are less work
_TINY = 1e-30  # a divisor in place of zero
_AT_ONCE = 1 << 22  # numbers that are made orthogonal in one batch
_NARROW = 64  # shorter side up to which CPUs make matrices orthogonal faster in float32


def narrow(matrices: Tensor) -> bool:
    """Return whether :func:`orthogonalized` is faster in float32 even where halves are fast."""
    return matrices.device.type == "cpu" and min(matrices.shape[1:]) <= _NARROW


def polynomials_for(shorter: int) -> Sequence[Polynomial]:
    """Return the polynomials for matrices by their shorter side."""
    return _FROM_FURTHER if shorter > _FAR else _TOWARDS_ONE


def orthogonalized(matrices: Tensor, *, in_half: bool) -> Tensor:
    """Return about U Vᵀ of M = U S Vᵀ, ``[k, g, a]``; ``in_half`` by bfloat16 products.

    Products alone (:func:`towards_one`) make the singular values nearly equal, but for values
    below 0.02 of M's norm (0.005 where the smaller side is above 256). Squares of M's numbers must
    be numbers of its dtype.
    """
    at_once = max(1, _AT_ONCE // max(1, matrices[:1].numel()))  # products take memory
    if len(matrices) > at_once:
        parts = matrices.split(at_once)
        return torch.cat([orthogonalized(some, in_half=in_half) for some in parts])
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    norms = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)
    wide = wide / norms.clamp_(min=_TINY)
    found = towards_one(wide, polynomials_for(wide.shape[1]), in_half)
    return found.mT if tall else found


def towards_one(wide: Tensor, polynomials: Sequence[Polynomial], in_half: bool) -> Tensor:
    """Make the singular values of ``wide`` matrices, of a norm of 1 at most, nearly equal.

    A polynomial takes X to (a + b X Xᵀ + c (X Xᵀ)²) X. Each is multiplied so, as in Muon (Jordan
    et al., 2024), where bfloat16 is fast or the sides are about equal. Else several polynomials are
    multiplied as powers of the first X Xᵀ, which commute, so that the long side is multiplied only
    twice. This needs full precision, as the rounding of X Xᵀ grows with each polynomial: with four,
    it stays below 0.01 outside of X's range.
    """
    _, rows, columns = wide.shape
    x = wide.bfloat16() if in_half else wide
    if not in_half and columns > _LONG * rows:
        gram = torch.bmm(wide, wide.mT)
        return torch.bmm(orthogonalizer(gram, polynomials), wide)
    for a, b, c in polynomials:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a, alpha=1)
    return x.to(wide.dtype)


def orthogonalizer(gram: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """Return Q from X Xᵀ: Q X is X after these polynomials, one after the other."""
    whole: Tensor | None = None
    for left, (a, b, c) in zip(reversed(range(len(polynomials))), polynomials, strict=True):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        whole = factor if whole is None else torch.bmm(whole, factor)
        if left:
            gram = torch.bmm(factor, torch.bmm(gram, factor))
    assert whole is not None
    return whole
