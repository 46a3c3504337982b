"""Eigenvectors of factors: found anew, or refined from older ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .products import between, product

_LEADING = 8  # one in this many eigenvectors is a leading one
_TURNS = 8  # refinements until each of the other eigenvectors has been multiplied once
_ROUNDS = 2  # rounds of rotations among the leading eigenvectors


def eigendecompose(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues ``[k, n]``, none below zero, and eigenvectors ``[k, n, n]`` of factors.

    The largest eigenvalues come first.
    """
    if factors.shape[-1] == 1:  # a solver would be called for each of a norm layer's features
        return factors[..., 0].clamp(min=0), torch.ones_like(factors)
    values, vectors = torch.linalg.eigh(factors)
    return values.clamp_(min=0).flip(-1), vectors.flip(-1)


def refine_basis(
    factors: Tensor, vectors: Tensor, values: Tensor, turn: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Refine slightly older factors' eigenvalues and eigenvectors for the factors F.

    Return values, vectors, and for each factor, ``[k]``, about the norm of QᵀFQ outside of its
    diagonal and the norm of F. The work is 0.3 of a decomposition's or less, as no product has all
    of F's columns:

    - The leading eighth of the vectors takes one orthogonal iteration. Its reflections rotate the
      other vectors along, so that all stay orthonormal but for rounding.
    - The leading vectors rotate within their span until F is nearly diagonal there (Rayleigh-Ritz).
    - Of the other vectors, every eighth is multiplied with F; which ones depends on ``turn``. They
      get new eigenvalues; the eigenvalues of the rest are scaled so that all add up to F's trace.
      The norm outside of the diagonal, measured on every eighth, stands for all other vectors.

    The leading vectors come first.
    """
    n = factors.shape[-1]
    if n == 1:
        values, vectors = eigendecompose(factors)
        return values, vectors, torch.zeros_like(values[:, 0]), values[:, 0]
    few = max(1, n // _LEADING)
    image = product(product(factors, vectors[..., :few]).mT, vectors).mT
    # Transposed, rows are the columns that LAPACK works on: nothing is copied to and fro.
    basis = torch.ormqr(*torch.geqrf(image), vectors.mT, transpose=True).mT
    leading, others = basis[..., :few], basis[..., few:]
    image = product(factors, leading)
    own, inside = _rotated(leading.mT @ image)
    leading.copy_(product(leading, inside))
    outside = product(image, inside).sub_(leading * own[:, None, :]).square_().sum((1, 2))
    turns = min(_TURNS, n - few)
    some = slice(turn % turns, None, turns)
    picked = others[..., some]
    image = product(factors, picked)
    found = torch.linalg.vecdot(image, picked, dim=1)
    beside = image.sub_(picked * found[:, None, :]).square_().sum((1, 2))
    outside += beside * (others.shape[-1] / picked.shape[-1])
    older = values[:, few:].clone()
    older[:, some] = 0
    left = factors.diagonal(dim1=1, dim2=2).sum(1) - own.sum(1) - found.sum(1)
    rest = _adding_up(older, left.clamp_(min=0), n - few - picked.shape[-1])
    rest[:, some] = found
    values = torch.cat([own, rest], 1).clamp_(min=0)
    return values, basis, outside.sqrt_(), factors.flatten(1).norm(dim=1)


def _rotated(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the diagonal of QᵀHQ, and Q, for symmetric H that are nearly diagonal.

    Jacobi's method rotates one pair after the other; here all pairs rotate at once, the rotations
    are made orthonormal, and all is done twice. Where eigenvalues are apart, some thousandths of
    the numbers outside of the diagonal are left, and more where eigenvalues are nearly equal. A
    solver would leave nothing, but the host would wait for a GPU to check the solver's success.
    """
    whole: Tensor | None = None
    for _ in range(_ROUNDS):
        values = matrices.diagonal(dim1=1, dim2=2)
        half = (values[:, :, None] - values[:, None, :]) / 2
        rotations = -matrices / (half + torch.hypot(half, matrices).copysign(half))
        # 0 / 0 for equal values that nothing couples: they do not rotate.
        rotations = torch.where(matrices == 0, 0.0, rotations).tril_(-1)
        rotations = rotations - rotations.mT
        rotations.diagonal(dim1=1, dim2=2).fill_(1)
        turn, _ = torch.linalg.qr(rotations)
        matrices = between(turn.mT, matrices, turn)
        whole = turn if whole is None else product(whole, turn)
    assert whole is not None
    return matrices.diagonal(dim1=1, dim2=2), whole


def _adding_up(values: Tensor, total: Tensor, count: int) -> Tensor:
    """Scale ``values`` ``[k, n]`` to a sum of ``total`` ``[k]``.

    Values whose sum is zero have no proportions: each becomes ``total / count``.
    """
    scale = (total / values.sum(1))[:, None]
    return torch.where(scale.isfinite(), values * scale, total[:, None] / max(1, count))
