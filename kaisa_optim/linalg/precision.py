"""Settings of the process: the precision of float32 products, and autocast."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Torch's settings of float32 products; since torch 2.9, each is a pair, of CUDA and of CPUs.
_BY_BACKEND = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}
_setting = "highest"  # in force


class full_precision(AbstractContextManager[None]):
    """Multiply float32 in full float32, then put back the user's settings.

    With a lower ``setting``, multiply as under ``torch.set_float32_matmul_precision(setting)``.
    This runs in each layer's backward pass: ``contextmanager`` takes longer.
    """

    def __init__(self, setting: str = "highest") -> None:
        self._setting = setting

    def __enter__(self) -> None:
        global _setting
        self._former, _setting = _setting, self._setting
        try:
            self._older = torch.get_float32_matmul_precision()
        except RuntimeError:
            self._older = self._setting  # torch does not answer where its newer settings differ
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


def _set(values: Iterable[str]) -> None:
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
