"""Products and roots of stacks of equal matrices: Kronecker algebra, polar factors, precision.

Factors are ``[k, n, n]`` (a diagonal one ``[k, n]``), gradients ``[k, g, a]``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


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


def between(left: Tensor | None, middle: Tensor, right: Tensor | None) -> Tensor:
    """Return L M R, ``[k, g, a]``; a side ``[k, n]`` is diagonal, and ``None`` the identity.

    Sides in half precision are multiplied with M rounded to it; the result has M's dtype.
    """
    g = left if left is not None and left.dim() == 3 else None
    a = right if right is not None and right.dim() == 3 else None
    side, product = a if g is None else g, middle
    if side is not None and side.dtype != middle.dtype:
        product = middle.to(side.dtype)
    if g is not None and a is not None:
        _, rows, columns = middle.shape
        # Less work with M R first.
        right_first = rows * a.shape[2] * (columns + g.shape[1])
        if right_first < g.shape[1] * columns * (rows + a.shape[2]):
            product = torch.bmm(g, torch.bmm(product, a))
        else:
            product = torch.bmm(torch.bmm(g, product), a)
    elif side is not None:
        product = torch.bmm(product, a) if g is None else torch.bmm(g, product)  # type: ignore
    product = product.to(middle.dtype)
    if left is not None and g is None:
        product = left[:, :, None] * product
    return product * right[:, None, :] if right is not None and a is None else product


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
TOWARDS_ONE = _after_scaling([(7.7110, -22.1138, 16.2488), (3.2153, -2.4112, 0.5013)])
# The same from 0.005 on, for sides above 256: n singular values have a mean square of 1/n.
FROM_FURTHER = _after_scaling(
    [(8.2987, -24.4305, 18.0903), (3.9152, -2.9211, 0.5592), (3.1746, -2.3804, 0.4978)]
)
FAR = 256
_LONG = 1.5  # sides' ratio from which powers of X Xᵀ are less work
_TINY = 1e-30  # a divisor in place of zero
_AT_ONCE = 1 << 22  # numbers that are made orthogonal in one batch
_NARROW = 64


def orthogonalized(matrices: Tensor, *, in_half: bool) -> Tensor:
    """Return about U Vᵀ of M = U S Vᵀ, ``[k, g, a]``; ``in_half`` by bfloat16 products, and in it.

    Products alone make the singular values nearly equal, but for values below 0.02 of M's norm
    (0.005 where the smaller side is above 256). Squares of M's numbers must be numbers of its
    dtype.

    A polynomial takes X to (a + b X Xᵀ + c (X Xᵀ)²) X. Each is multiplied so, as in Muon (Jordan
    et al., 2024), where bfloat16 is fast or the sides are about equal. Else several polynomials are
    multiplied as powers of the first X Xᵀ, which commute, so that the long side is multiplied only
    twice. This needs full precision, as the rounding of X Xᵀ grows with each polynomial: with four,
    it stays below 0.01 outside of X's range.
    """
    _, rows, columns = matrices.shape
    at_once = max(1, _AT_ONCE // max(1, rows * columns))  # products take memory
    if len(matrices) > at_once:
        parts = matrices.split(at_once)
        return torch.cat([orthogonalized(part, in_half=in_half) for part in parts])
    wide = matrices.mT if rows > columns else matrices
    norms = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)
    wide = wide / norms.clamp_(min=_TINY)
    shorter, longer = wide.shape[1:]
    # Up to a side of 64, CPUs make matrices orthogonal faster in float32.
    in_half = in_half and not (shorter <= _NARROW and wide.device.type == "cpu")
    polynomials = FROM_FURTHER if shorter > FAR else TOWARDS_ONE
    if not in_half and longer > _LONG * shorter:
        gram = torch.bmm(wide, wide.mT)
        x = torch.bmm(orthogonalizer(gram, polynomials), wide)
    else:
        x = wide.bfloat16() if in_half else wide
        for a, b, c in polynomials:
            gram = torch.bmm(x, x.mT)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a, alpha=1)
    return x.mT if rows > columns else x


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


# ---- eigenvectors and inverse roots: by eigenvectors on CPUs, by products elsewhere ----

# One after the other, these take all singular values from 1.5e-4 to 1 to within 5e-6 of 1. The
# first polynomial multiplies small values by 4, and takes no value above 0.1 to less than 0.1.
# Polynomials that multiply by 8 (Polar Express, Amsel et al., 2025) take some to 0.008: rounding
# errors were up to ten times as large. Each of the last four is the nearest to 1 on the interval
# that the one before leaves.
_OF_ROOTS: tuple[Polynomial, ...] = (
    *4 * ((4.1525, -11.7762, 8.5998),),
    (7.0325, -19.3866, 14.0356),
    (2.6988, -2.0012, 0.4525),
    (1.9664, -1.3458, 0.3829),
    (1.8734, -1.2465, 0.3731),
)
# Largest singular value at the start. Polynomials soon leave all bounds beyond 1.001.
_ROOTS_BELOW_ONE = 0.999
_TOLERATED = 0.1  # largest residual of good roots
_ROUGH = 0.001  # residual that float32 may leave, by an estimate; 16 times as much was seen
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
    (``by_products``), so that the host does not wait. For float32 factors, the spectral norm of
    S F̂ S - I is below 1e-3 by products for condition numbers of F̂ up to 1e4, below 0.05 up to 1e6;
    by eigenvectors below 0.02. Multiply in full precision.
    """
    damped = _damped(factors, damping, diagonal=diagonal)
    if diagonal or factors.shape[-1] == 1:
        root = damped.rsqrt().to(factors.dtype)
        return root, root.isfinite().flatten(1).all(1)
    on_cpu, dtype = factors.device.type == "cpu", factors.dtype
    if by_products or (by_products is None and not on_cpu):
        return _by_products(damped, dtype)
    # Float32 takes half the time, but errors of eigenvalues are some 1e-7 of the largest one: too
    # much for small ones where the norm is large beside the damping.
    norms = damped.flatten(1).norm(dim=1)
    rough = norms * torch.finfo(torch.float32).eps <= _ROUGH * damping
    roots, good = torch.empty_like(factors), torch.empty_like(rough)
    for chosen, exact in ((rough, dtype), (~rough, damped.dtype)):
        if not chosen.any():
            continue
        part = (damped if chosen.all() else damped[chosen]).to(exact)
        fine = part.isfinite().flatten(1).all(1)
        eye = torch.eye(part.shape[-1], dtype=exact, device=part.device)
        try:  # the solver would stop for all factors at one that is not finite
            values, vectors = torch.linalg.eigh(torch.where(fine[:, None, None], part, eye))
        except LinAlgError:
            return _by_products(damped, dtype)
        values.masked_fill_(fine.logical_not()[:, None], torch.nan)
        # Rounded roots have a residual of about eps times the root of the condition number.
        good[chosen] = values[:, 0] > (torch.finfo(dtype).eps / _TOLERATED) ** 2 * values[:, -1]
        root = torch.bmm(vectors / values.sqrt()[:, None], vectors.mT).to(dtype)
        roots[chosen] = (root + root.mT) / 2
    return roots, good


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
    mean = (exact if diagonal else exact.diagonal(dim1=-2, dim2=-1)).mean(-1)
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
    scale = (_ROOTS_BELOW_ONE * bound.rsqrt())[:, None, None]
    polar, gram = lower * scale, gram.mul_(scale.square())
    for left, polynomial in zip(reversed(range(len(_OF_ROOTS))), _OF_ROOTS, strict=True):
        polar = torch.bmm(orthogonalizer(gram, [polynomial]), polar)
        if left:
            gram = torch.bmm(polar, polar.mT)
    root = torch.linalg.solve_triangular(lower, polar, upper=False, left=False)
    root = (root + root.mT) / 2
    return root, _residual(lower, root) <= _TOLERATED  # False for NaN


# ---- settings of the process: the precision of float32 products, and autocast ----

# Torch's settings of float32 products; since torch 2.9, each is a pair, of CUDA and of CPUs.
_BY_BACKEND = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}
_setting = "highest"  # in force
_NOTHING = nullcontext()


def full_precision(setting: str = "highest") -> AbstractContextManager[None]:
    """Multiply float32 in full float32, then put back the user's settings.

    With a lower ``setting``, multiply as under ``torch.set_float32_matmul_precision(setting)``.
    """
    try:
        fits = torch.get_float32_matmul_precision() == setting == _setting
    except RuntimeError:  # torch does not answer where its newer settings differ
        fits = False
    for backend, value in zip(_backends(), _BY_BACKEND[setting], strict=False) if fits else ():
        present = backend.fp32_precision
        fits = fits and (present == value or (present, value) == ("none", "ieee"))
    return _NOTHING if fits else _Precision(setting)


class _Precision(AbstractContextManager[None]):
    """The settings in force while it is entered; ``contextmanager`` takes longer."""

    def __init__(self, setting: str) -> None:
        self._setting = setting

    def __enter__(self) -> None:
        global _setting
        self._former, _setting = _setting, self._setting
        try:
            self._older = torch.get_float32_matmul_precision()
        except RuntimeError:
            self._older = self._setting
        self._newer = [backend.fp32_precision for backend in _backends()]
        if self._older != self._setting:
            torch.set_float32_matmul_precision(self._setting)
        _set(_BY_BACKEND[self._setting])

    def __exit__(self, *raised: object) -> None:
        global _setting
        _setting = self._former
        if self._older != self._setting:
            torch.set_float32_matmul_precision(self._older)
        _set(self._newer)


@functools.cache  # asked for each layer
def _backends() -> list[Any]:
    """Return CUDA's and the CPU's settings; before torch 2.9 there are none."""
    both = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    return [backend for backend in both if hasattr(backend, "fp32_precision")]


def _set(values: Sequence[str]) -> None:
    for backend, value in zip(_backends(), values, strict=False):
        present = backend.fp32_precision
        if present != value and (present, value) != ("none", "ieee"):  # unset is full, too
            backend.fp32_precision = value


def lowered() -> bool:
    """Return whether products round their float32 rows now."""
    return _setting != "highest"


def without_autocast(device: str) -> AbstractContextManager[Any]:
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def multiplies_in_half(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether matrices of this dtype are multiplied with bfloat16 matrices in bfloat16.

    They are in float32, on devices with instructions for bfloat16: other devices would take longer.
    Float16 has too few exponents for preconditioned gradients.
    """
    off = device.type == "cpu" and not torch._C._get_mkldnn_enabled()
    return dtype == torch.float32 and not off and _multiplies_brain_floats(device)


@functools.cache
def _multiplies_brain_floats(device: torch.device) -> bool:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    has = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and bool(has())
