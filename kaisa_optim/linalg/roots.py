"""Eigenvectors of factors, and inverse roots: by eigenvectors on CPUs, by products elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from .products import Polynomial, least, mean_eigenvalue, orthogonalizer

# One after the other, these take all singular values from 1.5e-4 to 1 to within 5e-6 of 1. The
# first polynomial multiplies small values by 4, and takes no value above 0.1 to less than 0.1.
# Polynomials that multiply by 8 (Polar Express, Amsel et al., 2025) take some to 0.008: rounding
# errors were up to ten times as large. Each of the last four is the nearest to 1 on the interval
# that the one before leaves.
_POLYNOMIALS: tuple[Polynomial, ...] = (
    *4 * ((4.1525, -11.7762, 8.5998),),
    (7.0325, -19.3866, 14.0356),
    (2.6988, -2.0012, 0.4525),
    (1.9664, -1.3458, 0.3829),
    (1.8734, -1.2465, 0.3731),
)
# Largest singular value at the start. Polynomials soon leave all bounds beyond 1.001.
_BELOW_ONE = 0.999
_TOLERANCE = 0.1  # largest residual of good roots
WITHOUT_DOUBLES = {"mps"}  # types of devices that have no float64
LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def eigendecompose(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues ``[k, n]``, none below zero, and eigenvectors ``[k, n, n]`` of factors.

    The largest eigenvalues come first.
    """
    if factors.shape[-1] == 1:  # a solver would be called for each depthwise channel
        return factors[..., 0].clamp(min=0), torch.ones_like(factors)
    values, vectors = torch.linalg.eigh(factors)
    return values.clamp_(min=0).flip(-1), vectors.flip(-1)


def inverse_root(
    factors: Tensor, damping: Tensor, *, diagonal: bool, by_products: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return S = F̂^-½ and a flag of success for each factor.

    F̂ = F / f̄ + λI for factors F ``[k, n, n]`` (``diagonal``: ``[k, n]``), f̄ the mean eigenvalue,
    λ ``[k]``. A factor that is zero to its dtype counts as the identity, as its root does. Roots
    are exactly symmetric. A flag, ``[k]`` on the device, is False where a root is not finite or
    S F̂ S - I is large.

    By default, CPUs find roots by eigenvectors, and other devices by products alone
    (``by_products``), so that the host does not wait. In float32, the spectral norm of S F̂ S - I is
    below 1e-3 for condition numbers of F̂ up to 1e4; up to 1e6, products leave at most 0.05, and
    eigenvectors 1e-3. Multiply in full precision.
    """
    damped = _damped(factors, damping, diagonal=diagonal)
    if diagonal or factors.shape[-1] == 1:
        root = damped.rsqrt().to(factors.dtype)
        return root, root.isfinite().flatten(1).all(1)
    on_cpu, dtype = factors.device.type == "cpu", factors.dtype
    if by_products or (by_products is None and not on_cpu):
        return _by_products(damped, dtype)
    fine = damped.isfinite().flatten(1).all(1)
    eye = torch.eye(damped.shape[-1], dtype=damped.dtype, device=damped.device)
    try:  # the solver would stop for all factors at one that is not finite
        values, vectors = torch.linalg.eigh(torch.where(fine[:, None, None], damped, eye))
    except LinAlgError:
        return _by_products(damped, dtype)
    values.masked_fill_(fine.logical_not()[:, None], torch.nan)
    # Rounded roots have a residual of about eps times the root of the condition number.
    good = values[:, 0] > (torch.finfo(dtype).eps / _TOLERANCE) ** 2 * values[:, -1]
    # Float32 products would leave a residual above 1e-3 where the condition number is 1e6. In
    # float32, errors of eigenvalues are some 1e-7 of the largest one: too much for small ones.
    root = torch.bmm(vectors / values.sqrt()[:, None], vectors.mT).to(dtype)
    return (root + root.mT) / 2, good


def residual(factors: Tensor, found: Tensor, damping: Tensor, *, diagonal: bool) -> Tensor:
    """Return ‖S F̂ S - I‖ / √n of roots S that were ``found``, in the Frobenius norm, ``[k]``."""
    damped = _damped(factors, damping, diagonal=diagonal)
    exact = found.to(damped.dtype)
    if diagonal:
        rest = exact.square() * damped - 1
    else:
        rest = exact @ damped @ exact
        rest.diagonal(dim1=1, dim2=2).sub_(1)
    return rest.flatten(1).norm(dim=1) / factors.shape[-1] ** 0.5


def _residual(lower: Tensor, roots: Tensor) -> Tensor:
    """Return an upper estimate of the spectral norm of S F̂ S - I for F̂ = L Lᵀ, ``[k]``.

    The estimate is at most n^¼ times the norm, but for rounding: in float32, some 1e-6 times the
    root of the condition number of F̂. S L is nearly orthogonal. S F̂ would be rounded far more, by
    the condition number of F̂.
    """
    turn = torch.bmm(roots, lower)
    rest = torch.bmm(turn, turn.mT)
    rest.diagonal(dim1=1, dim2=2).sub_(1)
    return torch.bmm(rest, rest.mT).flatten(1).norm(dim=1).sqrt()


def _damped(factors: Tensor, damping: Tensor, *, diagonal: bool) -> Tensor:
    """Return F̂, or its diagonal, in float64; I for a factor that is zero to its dtype.

    Rounding F̂ to float32 would change its smallest eigenvalues, by a tenth where the condition
    number is 1e6.
    """
    exact = factors if factors.device.type in WITHOUT_DOUBLES else factors.double()
    mean = mean_eigenvalue(exact, diagonal=diagonal)
    # A negative mean must not make a factor definite.
    zero = mean.abs() <= least(factors.dtype)
    scale = torch.where(zero, torch.inf, mean.abs())
    damped = exact / (scale[:, None] if diagonal else scale[:, None, None])
    shift = torch.where(zero, 1.0, damping.to(mean))[:, None]
    (damped if diagonal else damped.diagonal(dim1=1, dim2=2)).add_(shift)
    return damped


def _by_products(damped: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inverse roots and flags, by Cholesky factors L and their polar factors P.

    F̂ = L Lᵀ has the root F̂^-½ = P L⁻¹. It is NaN if F̂ is not positive definite.
    """
    # In float64: a decomposition in float32 leaves four to ten times the residual.
    lower, info = torch.linalg.cholesky_ex(damped)
    lower = lower.to(dtype).masked_fill_((info != 0)[:, None, None], torch.nan)
    # The spectral norm of L Lᵀ is at most each of these norms.
    gram = torch.bmm(lower, lower.mT)
    bound = torch.minimum(gram.flatten(1).norm(dim=1), gram.abs().sum(2).amax(1))
    scale = (_BELOW_ONE * bound.rsqrt())[:, None, None]
    polar, gram = lower * scale, gram.mul_(scale.square())
    for left, polynomial in zip(reversed(range(len(_POLYNOMIALS))), _POLYNOMIALS, strict=True):
        polar = torch.bmm(orthogonalizer(gram, [polynomial]), polar)
        if left:
            gram = torch.bmm(polar, polar.mT)
    root = torch.linalg.solve_triangular(lower, polar, upper=False, left=False)
    root = (root + root.mT) / 2
    return root, _residual(lower, root) <= _TOLERANCE  # False for NaN
