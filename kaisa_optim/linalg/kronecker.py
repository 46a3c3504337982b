"""Kronecker algebra on stacks of equal matrices: factors ``[k, n, n]`` (a diagonal one ``[k, n]``),
gradients ``[k, g, a]``."""

from __future__ import annotations

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
