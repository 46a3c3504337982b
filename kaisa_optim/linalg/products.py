"""Products of stacked matrices, by the fastest library at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

Count = TypeVar("Count", int, Tensor)
# Multiplications from which on oneDNN pays, which is called for one matrix after the other.
_MUCH = 1 << 22


def _into_float32(left: Tensor, right: Tensor) -> Tensor:
    """L R of stacks in half precision, with sums and results in float32."""
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
    """x wᵀ of float32 matrices by oneDNN, where that is much faster than torch's own products.

    These are MKL's, which keeps its AVX-512 kernels to CPUs of its maker: on AMD's, oneDNN's took
    0.5 of the time (2 cores, torch 2.13). There is no public name for them; they are what
    torch.compile calls. Not a matter of timing, so that a run can be repeated bit for bit.
    ``torch.backends.mkldnn.flags(enabled=False)`` leaves all to torch.
    """
    try:
        if torch.backends.cpu.get_cpu_capability() != "AVX512":
            return None
        of_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
        return onednn_linear() if of_amd else None
    except (OSError, AttributeError):
        return None


def onednn_linear() -> Callable[[Tensor, Tensor], Tensor]:
    """AttributeError where torch has no such operator, or another one of that name."""
    op = torch.ops.mkldnn._linear_pointwise

    def linear(x: Tensor, w: Tensor) -> Tensor:
        # It copies an x that is not dense; over such a w it takes a thousand times as long.
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


def _linear_for(*tensors: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """oneDNN's product, if it is the one for these."""
    if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors):
        return None
    return None if _onednn_is_off() else _onednn()


def _onednn_is_off() -> bool:
    return not torch._C._get_mkldnn_enabled()


def multiplies_slowly(like: Tensor) -> bool:
    """Return whether torch's products take about twice the time of oneDNN's convolutions."""
    return _linear_for(like) is not None


def multiplies_in_half(dtype: torch.dtype, like: Tensor) -> bool:
    """Return whether products of float32 matrices with those of ``dtype`` are taken in that.

    In bfloat16 they are, where the device has instructions for it: elsewhere it would take longer,
    and float16 has no room for preconditioned gradients.
    """
    if dtype != torch.bfloat16 or like.dtype != torch.float32:
        return False
    on_cpu = like.device.type == "cpu"
    return _multiplies_brain_floats(like.device) and not (on_cpu and _onednn_is_off())


@functools.cache
def _multiplies_brain_floats(device: torch.device) -> bool:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    has = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and bool(has())


def product(left: Tensor, right: Tensor) -> Tensor:
    """L R of two stacks of as many matrices, by oneDNN where it pays."""
    linear = _linear_for(left, right) if _is_much(left, right) else None
    if linear is None:
        return torch.bmm(left, right)
    return torch.stack([linear(x, y.mT) for x, y in zip(left, right, strict=True)])


def _is_much(left: Tensor, right: Tensor) -> bool:
    return left.shape[1] * left.shape[2] * right.shape[2] >= _MUCH


def orders(rows: Count, g: int, a: int, columns: Count) -> tuple[Count, Count]:
    """Multiplications of L M R, M ``[g, a]``, for L M first and for M R first."""
    return rows * a * (g + columns), g * columns * (a + rows)


def _right_first(rows: int, g: int, a: int, columns: int) -> bool:
    """Return whether M R first is less work; square sides are alike."""
    left, right = orders(rows, g, a, columns)
    return right < left


def _add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    if _is_much(left, right) and multiplies_slowly(out):
        out += product(left, right)
    else:
        out.baddbmm_(left, right)


def between(left: Tensor | None, middle: Tensor, right: Tensor | None) -> Tensor:
    """L M R, ``[k, g, a]``; without a side, the other's product alone, without both M itself.

    Where sides are in half precision so are the products, of M rounded; the result is of M's dtype.
    """
    side = right if left is None else left
    if side is not None and side.dtype != middle.dtype:
        return between(left, middle.to(side.dtype), right).to(middle.dtype)
    if left is None or right is None:
        out = middle if left is None else product(left, middle)
        return out if right is None else product(out, right)
    rows, g, a, columns = left.shape[1], *middle.shape[1:], right.shape[2]
    if _right_first(rows, g, a, columns):
        return product(left, product(middle, right))
    linear = _linear_for(left, middle, right) if g * a * (g + a) >= 2 * _MUCH else None
    if linear is None:
        return torch.bmm(torch.bmm(left, middle), right)
    # All but Q_Gᵀ on the way into a basis is taken as it lies, and not copied.
    stacks = zip(left, middle, right, strict=True)
    return torch.stack([linear(x, _turned_product(linear, y, z)) for x, y, z in stacks])


def _turned_product(
    linear: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor
) -> Tensor:
    """(L R)ᵀ of dense matrices."""
    if right.is_contiguous():
        return linear(left, right.mT).mT
    return linear(right.mT, left)


_onednn()  # while tensors are real: what it finds stays
