"""Rounding without bias, so that changes below half a unit of the last place are not lost."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ODD, _ODDER = 0x7FEB352D, 0x846CA68B - 2**32  # multipliers of a 32-bit hash; products wrap


def rounded(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Return factors, ``[blocks, n]`` or ``[blocks, n, n]``, in a dtype of fewer digits.

    A number is rounded up with a probability that is its distance from the number below: the mean
    of many is right. The noise follows from ``seed``, an int32, alone. Matrices stay symmetric.
    ``values`` may be overwritten.
    """
    kept = torch.finfo(dtype)
    bits = 23 + round(math.log2(kept.eps))  # bits of float32 that have no place in the dtype
    if bits <= 0:
        return values.to(dtype)
    single = values.to(torch.float32)
    fewer_exponents = kept.tiny > torch.finfo(torch.float32).tiny
    if fewer_exponents:
        # Below its least normal number, float16 has the same step as just above that number.
        shift = torch.where(single.abs() < kept.tiny, kept.tiny, 0.0).copysign_(single)
        single.add_(shift)
    noise = _noise(single.shape, seed, single.device).bitwise_right_shift_(32 - bits)
    noise.bitwise_and_((1 << bits) - 1)
    single.view(torch.int32).add_(noise).bitwise_and_(-1 << bits)
    if fewer_exponents:
        single.sub_(shift)
    return single.to(dtype)


def _noise(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Return random int32 with good high bits; symmetric for matrices."""
    numbers = torch.arange(shape[:2].numel(), dtype=torch.int32, device=device)
    rows = _mixed(numbers.add_(seed)).view(shape[:2])
    return _mixed(rows[:, :, None] + rows[:, None, :]) if len(shape) == 3 else _mixed(rows)


def _mixed(numbers: Tensor) -> Tensor:
    numbers.mul_(_ODD)
    numbers.bitwise_xor_(numbers >> 15)
    return numbers.mul_(_ODDER)
