"""Symmetric inverse roots of damped factors: by eigenvectors on CPUs, by products elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from .kronecker import _or_one, mean_eigenvalue
from .orthogonal import Polynomial, orthogonalizer
from .products import between, product

# One after the other, these take all singular values from 1.5e-4 to 1 to 1, up to 5e-6. The first
# one grows small values by 4, and leaves no value above 0.1 below 0.1. Polynomials that grow them
# by 8 (as in Polar Express, Amsel et al., 2025) leave some at 0.008, which cost digits: errors were
# up to ten times as large. The others are the nearest to 1 on the interval left by the one before.
_POLYNOMIALS: tuple[Polynomial, ...] = (
    *4 * ((4.1525, -11.7762, 8.5998),),
    (7.0325, -19.3866, 14.0356),
    (2.6988, -2.0012, 0.4525),
    (1.9664, -1.3458, 0.3829),
    (1.8734, -1.2465, 0.3731),
)
# The first polynomial for F̂ and for its roots: each root takes the root of the condition number.
_STARTS = 0, 2, 3
# Largest singular value at the start. Polynomials soon leave all bounds beyond 1.001.
_BELOW_ONE = 0.999
# Largest residual of a good root. Rounding in this estimate comes to 0.1 for 1e6.
_TOLERANCE = 0.25
_WITH_DOUBLES = {"cpu", "cuda"}  # types of devices that decompose float64 matrices
LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def inverse_roots(
    factors: Tensor,
    damping: Tensor,
    halvings: int,
    *,
    diagonal: bool,
    by_products: bool | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return F̂^-½, F̂^-¼, F̂^-⅛ (the first ``halvings``) and a flag of success for each factor.

    F̂ = F / f̄ + λI for factors F ``[k, n, n]`` (``diagonal``: ``[k, n]``), f̄ the mean eigenvalue,
    λ ``[k]``. A zero factor counts as the identity: each of its roots is I. The roots are exactly
    symmetric. A flag, ``[k]`` on the device, is False where numbers are not finite or the roots'
    residual is large.

    By default, CPUs use eigenvectors in float64, and other devices products alone
    (``by_products``), for which the host does not wait. In float32 the residual of products is at
    most 1e-3 for condition numbers of F̂ to 1e4, and 0.05 to 1e6. Multiply in full precision.
    """
    damped, mean = _damped(factors, damping, diagonal=diagonal)
    powers = [0.5 ** (1 + i) for i in range(halvings)]
    if diagonal or factors.shape[-1] == 1:
        scaled = damped / _spread(mean, damped)
        roots = tuple(scaled.pow(-power) for power in powers)
        return roots, torch.stack([root.isfinite().flatten(1).all(1) for root in roots]).all(0)
    if by_products is None:
        by_products = factors.device.type != "cpu"
    found = (_by_products if by_products else _by_eigenvectors)(damped, halvings)
    roots = tuple(
        root * _spread(mean.pow(power), root) for root, power in zip(found, powers, strict=True)
    )
    whole = roots[-1]  # its power shows errors of all roots
    for _ in range(halvings - 1):
        whole = product(whole, whole)
    return roots, _residual(damped, mean, whole) <= _TOLERANCE  # False for NaN


def residual(factors: Tensor, damping: Tensor, roots: Tensor) -> Tensor:
    """Return an upper estimate of the spectral norm of S F̂ S − I, ``[k]``, S about F̂^-½.

    The estimate is at most n^¼ times the norm, and about twice the norm for n = 100. In float32
    its rounding grows with the condition number of F̂: 1e-7 of it, up to 0.1 for 1e6.
    """
    return _residual(*_damped(factors, damping, diagonal=False), roots)


def _residual(damped: Tensor, mean: Tensor, roots: Tensor) -> Tensor:
    rest = between(roots, damped / _spread(mean, damped), roots)
    rest.diagonal(dim1=1, dim2=2).sub_(1)
    return product(rest, rest.mT).flatten(1).norm(dim=1).sqrt()


def _damped(factors: Tensor, damping: Tensor, *, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Return D and m, ``[k]``, with F̂ = D / m; D = I and m = 1 for a zero factor.

    D is F over a power of two, damped. To divide F by its mean eigenvalue would round each number:
    at a condition number of 1e6, the smallest eigenvalues would be off by a tenth.
    """
    largest = (factors if diagonal else factors.diagonal(dim1=1, dim2=2)).abs().amax(1)
    mantissa, _ = torch.frexp(largest)
    damped = factors / _spread(_or_one(largest) / _or_one(mantissa), factors)
    mean = mean_eigenvalue(damped, diagonal=diagonal)
    shift = torch.where(mean == 0, 1.0, damping.to(mean) * mean)
    (damped if diagonal else damped.diagonal(dim1=1, dim2=2)).add_(shift[:, None])
    return damped, _or_one(mean)


def _spread(scales: Tensor, like: Tensor) -> Tensor:
    """Return ``[k]`` numbers as a factor for each matrix or diagonal."""
    return scales.view(-1, *[1] * (like.dim() - 1))


def _symmetric(matrices: Tensor) -> Tensor:
    return (matrices + matrices.mT) / 2


def _by_eigenvectors(damped: Tensor, halvings: int) -> list[Tensor]:
    """Return the inverse roots by one decomposition in float64.

    The errors of float32 eigenvalues, some 1e-7 of the largest, would come near the smallest ones.
    """
    fine = damped.isfinite().flatten(1).all(1)
    eye = torch.eye(damped.shape[-1], dtype=damped.dtype, device=damped.device)
    try:  # one matrix that is not finite would stop the solver for all
        values, vectors = torch.linalg.eigh(
            torch.where(_spread(fine, damped), damped, eye).double()
        )
    except LinAlgError:
        return _by_products(damped, halvings)
    values.masked_fill_(~fine[:, None], torch.nan)
    vectors = vectors.to(damped.dtype)
    found = []
    for _ in range(halvings):
        values = values.sqrt()
        scaled = vectors * values.reciprocal().to(damped.dtype)[:, None]
        found.append(_symmetric(product(scaled, vectors.mT)))
    return found


def _by_products(damped: Tensor, halvings: int) -> list[Tensor]:
    """Return the inverse roots by Cholesky factors L and their polar factors P.

    D = L Lᵀ has the roots D^½ = L Pᵀ and D^-½ = P L⁻¹, and so has D^-½ in D's place.
    """
    lower, polar = _triangle_and_polar(damped, _POLYNOMIALS)
    inverse = torch.linalg.solve_triangular(lower, polar, upper=False, left=False)
    found = [_symmetric(inverse)]
    for start in _STARTS[1:halvings]:
        lower, polar = _triangle_and_polar(found[-1], _POLYNOMIALS[start:])
        found.append(_symmetric(product(lower, polar.mT)))
    return found


def _triangle_and_polar(
    matrices: Tensor, polynomials: tuple[Polynomial, ...]
) -> tuple[Tensor, Tensor]:
    """Return lower triangular L with L Lᵀ = D, and L's polar factor; NaN if D is not definite."""
    # A Cholesky factor in float32 would leave four to ten times the residual.
    wide = matrices.double() if matrices.device.type in _WITH_DOUBLES else matrices
    lower, info = torch.linalg.cholesky_ex(wide)
    lower = lower.to(matrices.dtype).masked_fill_(_spread(info != 0, matrices), torch.nan)
    largest = torch.minimum(matrices.flatten(1).norm(dim=1), matrices.abs().sum(2).amax(1))
    polar = lower * _spread(_BELOW_ONE * largest.rsqrt(), matrices)
    for polynomial in polynomials:
        polar = product(orthogonalizer(product(polar, polar.mT), [polynomial]), polar)
    return lower, polar
