"""Eigenvectors of factors: found anew, or refined from older ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .products import between, product

_LEADING = 8  # one of so many eigenvectors leads
_TURNS = 8  # until each of the others has been looked at
_ROUNDS = 2  # of rotations among those that lead


def eigendecompose(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[k, n]``, none below zero, and eigenvectors ``[k, n, n]`` of PSD factors.

    The largest come first.
    """
    if factors.shape[-1] == 1:  # a solver would be called for each of a norm layer's features
        return factors[..., 0].clamp(min=0), torch.ones_like(factors)
    values, vectors = torch.linalg.eigh(factors)
    return values.clamp_(min=0).flip(-1), vectors.flip(-1)


def refine_basis(
    factors: Tensor, vectors: Tensor, values: Tensor, turn: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eigenvalues and eigenvectors near F's, from those of an F that was a little different.

    With them, ``[k]`` each, about the norm of QᵀFQ outside of its diagonal, and that of F. It is
    0.3 of a decomposition's work or less, as no product has all of F's columns:

    - one orthogonal iteration of the leading eighth of the vectors. The reflections that it takes
      turn the others along, so that all stay orthonormal but for rounding;
    - those leading vectors turn in what they span until F is nearly diagonal there (Rayleigh and
      Ritz);
    - of the others, every eighth is multiplied with F, other ones at each ``turn``. These get new
      eigenvalues; those of the rest are scaled so that all add up to F's trace. What the former
      have outside of the diagonal counts for all.

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
    """Diagonal of QᵀHQ, and Q, of symmetric H that are not far from diagonal.

    The rotations of all pairs, which Jacobi's method takes one after the other, taken at once and
    made orthonormal; twice. Of what was outside of the diagonal that leaves some thousandths where
    eigenvalues are apart, and more among those that are nearly equal. A solver would leave nothing,
    but makes the host wait for a GPU, to see whether all went well.
    """
    whole: Tensor | None = None
    for _ in range(_ROUNDS):
        values = matrices.diagonal(dim1=1, dim2=2)
        half = (values[:, :, None] - values[:, None, :]) / 2
        rotations = -matrices / (half + torch.hypot(half, matrices).copysign(half))
        # Of equal values that nothing couples, 0 / 0: these stay.
        rotations = torch.where(matrices == 0, 0.0, rotations).tril_(-1)
        rotations = rotations - rotations.mT
        rotations.diagonal(dim1=1, dim2=2).fill_(1)
        turn, _ = torch.linalg.qr(rotations)
        matrices = between(turn.mT, matrices, turn)
        whole = turn if whole is None else product(whole, turn)
    assert whole is not None
    return matrices.diagonal(dim1=1, dim2=2), whole


def _adding_up(values: Tensor, total: Tensor, count: int) -> Tensor:
    """``values`` ``[k, n]`` in their proportions, scaled to a sum of ``total`` ``[k]``.

    Where they have none, each is what ``count`` equal ones would be.
    """
    scale = (total / values.sum(1))[:, None]
    return torch.where(scale.isfinite(), values * scale, total[:, None] / max(1, count))
