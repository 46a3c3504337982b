"""Products of stacks of equal matrices: Kronecker algebra, and polar factors by polynomials.

Factors are ``[k, n, n]`` (a diagonal one ``[k, n]``), gradients ``[k, g, a]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mean_eigenvalue(factor: Tensor, *, diagonal: bool) -> Tensor:
    """Return the trace over the dimension, ``[k]``."""
    values = factor if diagonal else factor.diagonal(dim1=-2, dim2=-1)
    return values.mean(-1)


def least(dtype: torch.dtype) -> float:
    """Return the mean eigenvalue up to which a factor counts as zero: its entries lack digits."""
    return torch.finfo(dtype).tiny / torch.finfo(dtype).eps


def split_damping(damping: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
    """Return γ_A and γ_G with product γ and ratio ``mean_a`` / ``mean_g`` (Martens & Grosse, 2015).

    A factor that is zero, or not finite, has no scale to balance: the pair then shares √γ evenly.
    """
    ratio = mean_a / mean_g
    fine = (mean_a > 0) & (mean_g > 0) & (ratio > 0) & ratio.isfinite()
    ratio = torch.where(fine, ratio, torch.ones_like(ratio))
    return torch.sqrt(damping * ratio), torch.sqrt(damping / ratio)


def damped_inverse(factors: Tensor, damping: Tensor) -> Tensor:
    """Return (F + γI)⁻¹ by Cholesky, γ ``[k]``; NaN where F + γI is not positive definite."""
    damped = factors.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    if factors.shape[-1] == 1:
        return torch.where(damped > 0, 1 / damped, torch.nan)
    lower, info = torch.linalg.cholesky_ex(damped)
    lower.masked_fill_((info != 0)[:, None, None], torch.nan)
    if lower.device.type == "cpu":
        return torch.cholesky_inverse(lower)
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    # MAGMA's inverse of a batch would make the host wait.
    root = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    return root.mT @ root


def damped_product(values_g: Tensor, values_a: Tensor, damping: Tensor | float) -> Tensor:
    """Return v_G v_Aᵀ + γ, ``[k, g, a]``."""
    return (values_g.unsqueeze(2) * values_a.unsqueeze(1)).add_(damping)


def _between(left: Tensor | None, middle: Tensor, right: Tensor | None) -> Tensor:
    """Return L M R, ``[k, g, a]``; a side that is ``None`` stands for the identity.

    Sides in half precision are multiplied with M rounded to it; the result has M's dtype.
    """
    side = right if left is None else left
    if side is not None and side.dtype != middle.dtype:
        return _between(left, middle.to(side.dtype), right).to(middle.dtype)
    if left is not None and right is not None:
        g, a = middle.shape[1:]
        rows, columns = left.shape[1], right.shape[2]
        if g * columns * (a + rows) < rows * a * (g + columns):  # less work with M R first
            return torch.bmm(left, torch.bmm(middle, right))
    product = middle if left is None else torch.bmm(left, middle)
    return product if right is None else torch.bmm(product, right)


def into_basis(gradient: Tensor, vectors_g: Tensor | None, vectors_a: Tensor | None) -> Tensor:
    """Return Q_Gᵀ ∇ Q_A; ``None`` stands for the basis of a diagonal factor."""
    return _between(None if vectors_g is None else vectors_g.mT, gradient, vectors_a)


def out_of_basis(gradient: Tensor, vectors_g: Tensor | None, vectors_a: Tensor | None) -> Tensor:
    """Return Q_G ∇ Q_Aᵀ."""
    return _between(vectors_g, gradient, None if vectors_a is None else vectors_a.mT)


def apply_inverse(gradient: Tensor, inverse_g: Tensor, inverse_a: Tensor) -> Tensor:
    """Return G⁻¹ ∇ A⁻ᵀ; inverses are symmetric, and one given as ``[k, n]`` is diagonal."""
    g = inverse_g if inverse_g.dim() == 3 else None
    a = inverse_a if inverse_a.dim() == 3 else None
    out = _between(g, gradient, None if a is None else a.mT)
    if g is None:
        out = inverse_g[:, :, None] * out
    return out if a is not None else out * inverse_a[:, None, :]


def softened(directions: Tensor, root_g: Tensor, root_a: Tensor, kept: float) -> Tensor:
    """Return T_G D T_A with T = αI + (1 - α) R, α ``kept``; a root given as ``[k, n]`` is diagonal.

    Directions in half precision are multiplied in it.
    """
    if root_g.dim() == 2:
        found = directions * root_g.mul(1 - kept).add_(kept)[:, :, None]
    else:
        found = torch.baddbmm(
            directions, root_g.to(directions.dtype), directions, beta=kept, alpha=1 - kept
        )
    if root_a.dim() == 2:
        return found * root_a.mul(1 - kept).add_(kept)[:, None, :]
    return torch.baddbmm(found, found, root_a.to(found.dtype), beta=kept, alpha=1 - kept)


# ---- polar factors, by Newton-Schulz polynomials ----

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
