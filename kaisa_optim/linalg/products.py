"""Products of stacked matrices, by the fastest library at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

# Multiplications from which oneDNN pays; it is called for one matrix after the other.
_MUCH = 1 << 22


def _into_float32(left: Tensor, right: Tensor) -> Tensor:
    """Return L R of stacks in half precision, with sums and results in float32."""
    return torch.bmm(left, right, out_dtype=torch.float32)


@functools.cache
def _multiplies_into_float32(dtype: torch.dtype, device: torch.device) -> bool:
    ones = torch.ones(1, 16, 16, dtype=dtype, device=device)
    try:
        return torch.equal(_into_float32(ones, ones), ones.float() * 16)
    except (RuntimeError, TypeError):  # before torch 2.8
        return False


@functools.cache
def _onednn() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return oneDNN's x wᵀ of float32 matrices where it is much faster than torch's products.

    Torch's products are MKL's, which uses AVX-512 on Intel's CPUs only: on AMD's, oneDNN's products
    took 0.5 of the time (2 cores, torch 2.13). They have no public name; torch.compile calls the
    same operator. The choice does not depend on timings, so that a run can be repeated bit for bit.
    ``torch.backends.mkldnn.flags(enabled=False)`` leaves all products to torch.
    """
    try:
        if torch.backends.cpu.get_cpu_capability() != "AVX512":
            return None
        of_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
        return onednn_linear() if of_amd else None
    except (OSError, AttributeError):
        return None


def onednn_linear() -> Callable[[Tensor, Tensor], Tensor]:
    """Return oneDNN's x wᵀ; raise AttributeError if torch lacks it or has another one."""
    op = torch.ops.mkldnn._linear_pointwise

    def linear(x: Tensor, w: Tensor) -> Tensor:
        # oneDNN copies an x that is not dense; such a w makes it take a thousand times as long.
        if not (w.is_contiguous() or w.mT.is_contiguous()):
            w = w.contiguous()
        found: Tensor = op(x, w, None, "none", [], "")
        return found

    x = torch.arange(6, dtype=torch.float32, device="cpu").view(2, 3)
    w = torch.ones(4, 3, dtype=torch.float32, device="cpu")
    try:
        if torch.equal(linear(x, w), x @ w.mT):
            return linear
    except RuntimeError as error:
        raise AttributeError("mkldnn._linear_pointwise") from error
    raise AttributeError("mkldnn._linear_pointwise")


def _linear_for(like: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return oneDNN's product if matrices like this one should take it."""
    on_cpu = like.dtype == torch.float32 and like.device.type == "cpu"
    return _onednn() if on_cpu and torch._C._get_mkldnn_enabled() else None


def multiplies_slowly(like: Tensor) -> bool:
    """Return whether torch's products take about twice the time of oneDNN's convolutions."""
    return _linear_for(like) is not None


def multiplies_in_half(dtype: torch.dtype, like: Tensor) -> bool:
    """Return whether float32 matrices are multiplied with matrices of ``dtype`` in that dtype.

    They are for bfloat16, on devices with instructions for bfloat16: other devices would take
    longer. Float16 has too few exponents for preconditioned gradients.
    """
    if dtype != torch.bfloat16 or like.dtype != torch.float32:
        return False
    off = like.device.type == "cpu" and not torch._C._get_mkldnn_enabled()
    return not off and _multiplies_brain_floats(like.device)


@functools.cache
def _multiplies_brain_floats(device: torch.device) -> bool:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    has = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and bool(has())


Products = tuple[Callable[[Tensor, Tensor], Tensor], Callable[..., Tensor]]


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return L R of two stacks of equally many matrices, by oneDNN where it pays."""
    few = left.shape[1] * left.shape[2] * right.shape[2] < _MUCH
    linear = None if few else _linear_for(left)
    if linear is None:
        return torch.bmm(left, right)
    return torch.stack([linear(x, y.mT) for x, y in zip(left, right, strict=True)])


def added(base: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> Tensor:
    """Return β B + α L R of stacks."""
    few = left.shape[1] * left.shape[2] * right.shape[2] < _MUCH
    if few or _linear_for(left) is None:
        return torch.baddbmm(base, left, right, beta=beta, alpha=alpha)
    return product(left, right).mul_(alpha).add_(base, alpha=beta)


def products_for(like: Tensor, most: int) -> Products:
    """Return :func:`product` and :func:`added` for matrices like this one.

    Torch's own functions are as good if no product has more than ``most`` multiplications, and
    these are few, or if oneDNN is not to be used. Ask once for several products.
    """
    if most < _MUCH or _linear_for(like) is None:
        return torch.bmm, torch.baddbmm
    return product, added


def between(left: Tensor | None, middle: Tensor, right: Tensor | None) -> Tensor:
    """Return L M R, ``[k, g, a]``; a side that is ``None`` stands for the identity.

    Sides in half precision are multiplied with M rounded to it; the result has M's dtype.
    """
    side = right if left is None else left
    if side is not None and side.dtype != middle.dtype:
        return between(left, middle.to(side.dtype), right).to(middle.dtype)
    g, a = middle.shape[1:]
    rows = g if left is None else left.shape[1]
    columns = a if right is None else right.shape[2]
    multiply, _ = products_for(middle, max(rows, g) * max(a, columns) * max(g, a))
    if left is None or right is None:
        out = middle if left is None else multiply(left, middle)
        return out if right is None else multiply(out, right)
    if g * columns * (a + rows) < rows * a * (g + columns):  # less work with M R first
        return multiply(left, multiply(middle, right))
    linear = _linear_for(middle) if g * a * (g + a) >= 2 * _MUCH else None
    if linear is None:
        return torch.bmm(torch.bmm(left, middle), right)
    # Only Q_Gᵀ, on the way into a basis, has to be copied.
    stacks = zip(left, middle, right, strict=True)
    return torch.stack([linear(x, _turned_product(linear, y, z)) for x, y, z in stacks])


def _turned_product(
    linear: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor
) -> Tensor:
    """Return (L R)ᵀ of dense matrices."""
    if right.is_contiguous():
        return linear(left, right.mT).mT
    return linear(right.mT, left)


_onednn()  # ask at import, while tensors are real: the answer is cached
