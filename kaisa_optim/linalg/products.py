"""Products and roots of stacks of equal matrices: Kronecker algebra, polar factors, precision.

Factors are ``[k, n, n]`` (a diagonal one ``[k, n]``), gradients ``[k, g, a]``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def least(dtype: torch.dtype) -> float:
    """Return the mean eigenvalue up to which a factor counts as zero: its entries lack digits."""
    return torch.finfo(dtype).tiny / torch.finfo(dtype).eps


def split_damping(damping: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
    """Return γ_A and γ_G, with product γ and the ratio of means (Martens and Grosse, 2015)."""
    # A factor that is zero, or not finite, has no scale to balance: the pair shares √γ evenly.
    ratio = mean_a / mean_g
    fine = (mean_a > 0) & (mean_g > 0) & (ratio > 0) & ratio.isfinite()
    ratio = torch.where(fine, ratio, torch.ones_like(ratio))
    return torch.sqrt(damping * ratio), torch.sqrt(damping / ratio)


def damped_inverse(factors: Tensor, damping: Tensor) -> Tensor:
    """Return (F + γI)⁻¹ by Cholesky, γ ``[k]``; NaN where F + γI is not positive definite."""
    # A copy: ``factors`` may be the running average itself, which must not be damped.
    damped = factors.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    if factors.shape[-1] == 1:
        return torch.where(damped > 0, 1 / damped, torch.nan)
    lower, info = torch.linalg.cholesky_ex(damped)
    lower.masked_fill_((info != 0)[:, None, None], torch.nan)
    if lower.device.type == "cpu":
        return torch.cholesky_inverse(lower)
    # On GPUs, MAGMA's inverse of a batch would make the host wait in every refresh.
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    root = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    return root.mT @ root


def between(left: Tensor | None, middle: Tensor, right: Tensor | None) -> Tensor:
    """Return L M R, ``[k, g, a]``, of square L and R; ``[k, n]`` is a diagonal, None the identity.

    Sides in half precision are multiplied with M rounded to it; the result has M's dtype.
    """
    g = left if left is not None and left.dim() == 3 else None
    a = right if right is not None and right.dim() == 3 else None
    side = a if g is None else g
    product = middle if side is None else middle.to(side.dtype)
    if g is not None:  # first on all ranks: in the other order, products would be rounded otherwise
        product = torch.bmm(g, product)
    if a is not None:
        product = torch.bmm(product, a)
    product = product.to(middle.dtype)
    if left is not None and g is None:
        product = left[:, :, None] * product
    return product * right[:, None, :] if right is not None and a is None else product


def softened(directions: Tensor, root_g: Tensor, root_a: Tensor, identity: float) -> Tensor:
    """Return T_G D T_A, in the dtype of D, with T = αI + (1 - α) R and α ``identity``."""
    share = 1 - identity
    if root_g.dim() == 2:
        product = directions * root_g.mul(share).add_(identity)[:, :, None]
    else:
        root_g = root_g.to(directions.dtype)
        product = torch.baddbmm(directions, root_g, directions, beta=identity, alpha=share)
    if root_a.dim() == 2:
        return product * root_a.mul(share).add_(identity)[:, None, :]
    return torch.baddbmm(product, product, root_a.to(product.dtype), beta=identity, alpha=share)


Polynomial = tuple[float, float, float]  # in a singular value s, a s + b s³ + c s⁵
# The largest singular value begins at or below this. Beyond 1 the polynomials soon leave all
# bounds, and bfloat16's rounding would take a matrix of rank one beyond 1.
_BELOW_ONE = 0.98
# One after the other, these take all singular values from 0.02 to 1 to between 0.48 and 1.52. Each
# is the nearest to 1 on the interval that the one before leaves, as in Polar Express (Amsel et al.,
# 2025); a third one (0.9 to 1.1) changed losses on three tasks by -2 to 0.5 %. The first is a
# polynomial of 0.98 s, so that matrices are divided by their norms alone.
TOWARDS_ONE: Sequence[Polynomial] = (
    (7.7110 * _BELOW_ONE, -22.1138 * _BELOW_ONE**3, 16.2488 * _BELOW_ONE**5),
    (3.2153, -2.4112, 0.5013),
)
# The same from 0.005 on, for sides above 256: n singular values have a mean square of 1/n.
FROM_FURTHER: Sequence[Polynomial] = (
    (8.2987 * _BELOW_ONE, -24.4305 * _BELOW_ONE**3, 18.0903 * _BELOW_ONE**5),
    (3.9152, -2.9211, 0.5592),
    (3.1746, -2.3804, 0.4978),
)
FAR, _NARROW = 256, 64
_LONG = 1.5  # sides' ratio from which powers of X Xᵀ are less work
_TINY = 1e-30  # a divisor in place of zero
_AT_ONCE = 1 << 22  # numbers that are made orthogonal in one batch


def orthogonalized(matrices: Tensor, *, in_half: bool) -> Tensor:
    """Return about U Vᵀ of M = U S Vᵀ, ``[k, g, a]``; ``in_half`` by bfloat16 products, and in it.

    Singular values below 0.02 of M's norm (0.005 if both sides exceed 256) come out smaller.
    """
    _, rows, columns = matrices.shape
    # Each product has the size of its stack: parts bound the memory.
    at_once = max(1, _AT_ONCE // max(1, rows * columns))
    if len(matrices) > at_once:
        return torch.cat([orthogonalized(x, in_half=in_half) for x in matrices.split(at_once)])
    wide = matrices.mT if rows > columns else matrices
    # A norm over the whole stack would make a block's direction depend on its neighbours.
    wide = wide / torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True).clamp_(min=_TINY)
    shorter, longer = wide.shape[1:]
    # Up to a side of 64, CPUs make matrices orthogonal faster in float32.
    in_half = in_half and not (shorter <= _NARROW and wide.device.type == "cpu")
    polynomials = FROM_FURTHER if shorter > FAR else TOWARDS_ONE
    # A polynomial takes X to (a + b X Xᵀ + c (X Xᵀ)²) X. Each is multiplied so, as in Muon (Jordan
    # et al., 2024), where bfloat16 is fast or the sides are about equal. Else all are multiplied as
    # powers of the first X Xᵀ, which commute: the long side is multiplied only twice. This needs
    # full precision, as the rounding of X Xᵀ grows with each polynomial.
    if not in_half and longer > _LONG * shorter:
        x = torch.bmm(orthogonalizer(torch.bmm(wide, wide.mT), polynomials), wide)
    else:
        x = wide.bfloat16() if in_half else wide
        for a, b, c in polynomials:
            gram = torch.bmm(x, x.mT)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a, alpha=1)
    return x.mT if rows > columns else x


def orthogonalizer(gram: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """Return Q from X Xᵀ: Q X is X after these polynomials, one after the other."""
    whole: Any = None
    for i, (a, b, c) in enumerate(polynomials, 1):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        whole = factor if whole is None else torch.bmm(whole, factor)
        if i < len(polynomials):
            gram = torch.bmm(factor, torch.bmm(gram, factor))
    return whole


# One after the other, these take all singular values from 1.5e-4 to 1 to within 5e-6 of 1. The
# first polynomial multiplies small values by 4, and takes no value above 0.1 to less than 0.1.
# Polynomials that multiply by 8 take some to 0.008: rounding errors were up to ten times as large.
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


def eigendecompose(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues ``[k, n]``, the largest first, none below zero; and eigenvectors."""
    values, vectors = torch.linalg.eigh(factors)
    return values.clamp_(min=0).flip(-1), vectors.flip(-1)


def inverse_root(
    factors: Tensor, damping: Tensor, *, diagonal: bool, by_products: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return S = F̂^-½ and a flag of success for each factor.

    F̂ = F / f̄ + λI for factors F ``[k, n, n]`` (``diagonal``: ``[k, n]``), f̄ the mean eigenvalue,
    λ ``[k]``. A factor that is zero to its dtype counts as the identity. Roots are exactly
    symmetric. A flag is False where a root is not finite or S F̂ S - I is large: in float32, it is
    below 0.02 by eigenvectors, and ``by_products`` below 1e-3 for condition numbers of F̂ up to 1e4,
    below 0.05 up to 1e6. Multiply in full precision.
    """
    damped, dtype = _damped(factors, damping, diagonal=diagonal), factors.dtype
    if diagonal or factors.shape[-1] == 1:
        root = damped.rsqrt().to(dtype)
        return root, root.isfinite().flatten(1).all(1)
    # A solver of eigenvectors would make the host wait for a GPU; on CPUs it is faster.
    if factors.device.type != "cpu" if by_products is None else by_products:
        return _by_products(damped, dtype)
    # Float32 takes half the time, but errors of eigenvalues are some 1e-7 of the largest one: too
    # much for small ones where the norm is large beside the damping. Each factor chooses alone: a
    # choice for the batch would make bits depend on which rank owns the neighbours.
    norms = damped.flatten(1).norm(dim=1)
    rough = norms * torch.finfo(torch.float32).eps <= _ROUGH * damping
    roots, good = torch.empty_like(factors), torch.empty_like(rough)
    for chosen, precision in ((rough, dtype), (~rough, damped.dtype)):
        if not chosen.any():
            continue
        part = (damped if chosen.all() else damped[chosen]).to(precision)
        # The solver would stop for all factors at one that is not finite.
        fine = part.isfinite().flatten(1).all(1)
        eye = torch.eye(part.shape[-1], dtype=precision, device=part.device)
        values, vectors = torch.linalg.eigh(torch.where(fine[:, None, None], part, eye))
        values.masked_fill_(fine.logical_not()[:, None], torch.nan)
        # Rounded roots have a residual of about eps times the root of the condition number.
        good[chosen] = values[:, 0] > (torch.finfo(dtype).eps / _TOLERATED) ** 2 * values[:, -1]
        root = torch.bmm(vectors / values.sqrt()[:, None], vectors.mT).to(dtype)
        roots[chosen] = (root + root.mT) / 2
    return roots, good


def residual(factors: Tensor, roots: Tensor, damping: Tensor, *, diagonal: bool) -> Tensor:
    """Return ‖S F̂ S - I‖ / √n of roots S, in the Frobenius norm, ``[k]``."""
    damped = _damped(factors, damping, diagonal=diagonal)
    exact = roots.to(damped.dtype)
    if diagonal:
        error = exact.square() * damped - 1
    else:
        error = exact @ damped @ exact
        error.diagonal(dim1=1, dim2=2).sub_(1)
    return error.flatten(1).norm(dim=1) / factors.shape[-1] ** 0.5


def _residual(lower: Tensor, roots: Tensor) -> Tensor:
    """Return an upper estimate of the spectral norm of S F̂ S - I for F̂ = L Lᵀ, ``[k]``."""
    # At most n^¼ times the norm. S L is nearly orthogonal, and S F̂ would be rounded far more.
    turn = torch.bmm(roots, lower)
    error = torch.bmm(turn, turn.mT)
    error.diagonal(dim1=1, dim2=2).sub_(1)
    return torch.bmm(error, error.mT).flatten(1).norm(dim=1).sqrt()


def _damped(factors: Tensor, damping: Tensor, *, diagonal: bool) -> Tensor:
    """Return F̂, or its diagonal, in float64; I for a factor that is zero to its dtype."""
    # Rounded to float32, F̂ of condition 1e6 would have its smallest eigenvalues off by a tenth.
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
    """Return P L⁻¹ = F̂^-½ by Cholesky factors L and their polar factors P, and flags."""
    # In float64: a decomposition in float32 leaves four to ten times the residual.
    lower, info = torch.linalg.cholesky_ex(damped)
    lower = lower.to(dtype).masked_fill_((info != 0)[:, None, None], torch.nan)
    # The spectral norm of L Lᵀ is at most each of these norms.
    gram = torch.bmm(lower, lower.mT)
    bound = torch.minimum(gram.flatten(1).norm(dim=1), gram.abs().sum(2).amax(1))
    scale = (_ROOTS_BELOW_ONE * bound.rsqrt())[:, None, None]
    polar, gram = lower * scale, gram.mul_(scale.square())
    for i, polynomial in enumerate(_OF_ROOTS):
        # L Lᵀ is at hand for the first; powers of it alone would be rounded more with each.
        gram = torch.bmm(polar, polar.mT) if i else gram
        polar = torch.bmm(orthogonalizer(gram, [polynomial]), polar)
    root = torch.linalg.solve_triangular(lower, polar, upper=False, left=False)
    root = (root + root.mT) / 2
    return root, _residual(lower, root) <= _TOLERATED  # False for NaN


# Users lower the precision of float32 products for their network, but roots enlarge rounding
# errors: TF32 would spoil directions. Torch's older setting is one for all devices. Since torch
# 2.9, CUDA and CPUs have newer ones: their values are here by the older setting's.
_Precisions = list[tuple[Any, str]]  # backends, and their settings
_CUDA, _CPUS = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
_PRECISIONS: dict[str, _Precisions] = {"highest": [], "high": [], "medium": []}
if hasattr(_CPUS, "fp32_precision"):
    _PRECISIONS["highest"] = [(_CUDA, "ieee"), (_CPUS, "ieee")]
    _PRECISIONS["high"] = [(_CUDA, "tf32"), (_CPUS, "tf32")]
    _PRECISIONS["medium"] = [(_CUDA, "tf32"), (_CPUS, "bf16")]
_setting = "highest"  # in force
_NOTHING = nullcontext()


def full_precision(setting: str = "highest") -> AbstractContextManager[None]:
    """Multiply float32 in full, or as torch does by this setting; then restore the user's."""
    try:
        fits = torch.get_float32_matmul_precision() == setting == _setting
    except RuntimeError:  # torch does not answer where its newer settings differ
        fits = False
    for backend, value in _PRECISIONS[setting] if fits else ():
        present = backend.fp32_precision
        fits = fits and (present == value or (present == "none" and value == "ieee"))
    return _NOTHING if fits else _changed_precision(setting)


@contextmanager
def _changed_precision(setting: str) -> Iterator[None]:
    # The user's settings are read here, where hooks hold their lock, not by the caller: a thread
    # beside another one's hook would read that hook's settings, and put them back as the user's.
    global _setting
    former, _setting = _setting, setting
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = setting
    newer = [(backend, backend.fp32_precision) for backend, _ in _PRECISIONS[setting]]
    try:
        # Torch's older setting writes to the newer ones, so that these are set last, both times.
        if older != setting:
            torch.set_float32_matmul_precision(setting)
        _write(_PRECISIONS[setting])
        yield
    finally:
        _setting = former
        if older != setting:
            torch.set_float32_matmul_precision(older)
        _write(newer)


def _write(precisions: _Precisions) -> None:
    for backend, value in precisions:
        present = backend.fp32_precision
        if present != value and not (present == "none" and value == "ieee"):  # unset is full, too
            backend.fp32_precision = value


def lowered() -> bool:
    """Return whether products round their float32 rows now."""
    return _setting != "highest"


def without_autocast(device: str) -> AbstractContextManager[Any]:
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def multiplies_in_half(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether matrices of this dtype are multiplied with bfloat16 matrices in bfloat16."""
    # Emulated bfloat16 takes longer than float32; float16 has too few exponents for gradients.
    off = device.type == "cpu" and not torch._C._get_mkldnn_enabled()
    return dtype == torch.float32 and not off and _multiplies_brain_floats(device)


@functools.cache
def _multiplies_brain_floats(device: torch.device) -> bool:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    has = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and bool(has())
