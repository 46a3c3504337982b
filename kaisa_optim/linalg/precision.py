"""Settings of the process: the precision of float32 products, and autocast."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_SETTINGS = "highest", "high", "medium"  # torch's, of float32 products
# The same settings by backend, since torch 2.9: on CUDA, and on CPUs.
_NEWER = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}
_LEFT_OUT = 13  # bits of float32 that have no place in TF32
_BELOW_HALF = (1 << _LEFT_OUT - 1) - 1


class _OfProcess:
    """A setting of the whole process, which several threads change for a while.

    The most precise level that has begun is in force; 0 is the most precise. When the last level
    ends, the former setting is put back. ``change`` returns the former setting, or None if nothing
    has to be changed.
    """

    def __init__(self, change: Callable[[int], Any], put_back: Callable[[Any], None]) -> None:
        self._change, self._put_back = change, put_back
        self._lock = threading.Lock()  # of the records alone: threads may wait for each other
        self._begun: list[int] = []
        self._found: Any = None

    def begin(self, level: int) -> None:
        with self._lock:
            before = self._change(min((level, *self._begun)))
            self._found = before if self._found is None else self._found
            self._begun.append(level)

    def end(self, level: int) -> None:
        with self._lock:
            self._begun.remove(level)
            if self._begun:
                before = self._change(min(self._begun))
                self._found = before if self._found is None else self._found
            elif self._found is not None:
                found, self._found = self._found, None
                self._put_back(found)


class _Asked(threading.local):
    """The precision in which this thread takes statistics."""

    setting = "highest"


_asked = _Asked()
_Levels = tuple[tuple[_OfProcess, int], ...]


class _Precision(AbstractContextManager[None]):
    """Begin each setting at its level, and end them, the last one first.

    This runs in each layer's backward pass: ``contextmanager`` and ``ExitStack`` take longer.
    """

    def __init__(self, levels: _Levels, asked: str | None = None) -> None:
        self._levels = levels
        self._begun: list[tuple[_OfProcess, int]] = []
        self._asked = asked or _asked.setting

    def __enter__(self) -> None:
        self._former, _asked.setting = _asked.setting, self._asked
        try:
            for of, level in self._levels:
                of.begin(level)
                self._begun.append((of, level))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        _asked.setting = self._former
        try:
            while self._begun:
                of, level = self._begun.pop()
                of.end(level)
        finally:
            if self._begun:  # one of them has raised
                self.__exit__()


def full_precision(device: str | None = None) -> AbstractContextManager[None]:
    """Multiply float32 in full float32: a user's TF32 setting must not reach the factors.

    With a ``device``, settings of other device types stay as they are, which takes less time.
    """
    return _Precision(_levels("highest", device, 0))


def statistics_precision(
    setting: str, device: str, *, in_half: bool
) -> AbstractContextManager[None]:
    """Multiply float32 as under ``torch.set_float32_matmul_precision(setting)``.

    On CUDA, convolutions follow the setting, too. Convolutions of images that were ``in_half``
    precision take TF32 there under any setting: TF32 holds all of their digits and rounds nothing.
    """
    tf32 = device == "cuda" and (in_half or setting != "highest")
    return _Precision(_levels(setting, device, int(tf32)), setting)


@functools.cache  # asked for each layer
def _levels(setting: str, device: str | None, level: int) -> _Levels:
    """Return the levels of products, and of convolutions on a device of this type."""
    convolutions = _OF_DEVICES.get(device or "", (_CUDNN, _ONEDNN))
    return (_MATMULS, _SETTINGS.index(setting)), *[(of, level) for of in convolutions]


def rounded(rows: Tensor) -> Tensor:
    """Round float32 rows as the products of statistics round them.

    Sums and products must be of the same numbers: else their moment could be indefinite.
    """
    if _asked.setting == "highest" or rows.dtype != torch.float32:
        return rows
    if _asked.setting == "medium" and rows.device.type == "cpu":
        return rows.bfloat16().float()
    bits = rows.view(torch.int32)  # to the nearest number of TF32; ties go to the even one
    return (bits + _BELOW_HALF + (bits >> _LEFT_OUT & 1) & -1 << _LEFT_OUT).view(torch.float32)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def _matmul_backends() -> list[Any]:
    """Return CUDA's and the CPU's settings; before torch 2.9 there are none."""
    both = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    return [backend for backend in both if hasattr(backend, "fp32_precision")]


def _change_matmuls(level: int) -> tuple[str | None, list[str]] | None:
    setting = _SETTINGS[level]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None  # torch refuses to answer where its newer settings differ
    # A backend may differ from the older setting; at "highest", no backend is less precise.
    if older == setting == "highest":
        return None
    backends = _matmul_backends()
    before = [backend.fp32_precision for backend in backends]
    wanted = list(zip(backends, _NEWER[setting], strict=False))
    if older == setting and all(backend.fp32_precision == newer for backend, newer in wanted):
        return None
    if older is not None:
        torch.set_float32_matmul_precision(setting)
    for backend, newer in wanted:
        unset = newer == "ieee" and backend.fp32_precision == "none"
        if backend.fp32_precision != newer and not unset:
            backend.fp32_precision = newer
    return older, before


def _put_back_matmuls(found: tuple[str | None, list[str]]) -> None:
    older, values = found
    if older is not None:
        torch.set_float32_matmul_precision(older)
    for backend, value in zip(_matmul_backends(), values, strict=True):
        _set(backend, value)


@functools.cache  # asked for each layer; torch makes this object once, at import
def _conv(part: Any) -> Any:
    """Return a backend's setting of convolutions, or None before torch 2.9."""
    conv = getattr(part, "conv", None)
    return conv if hasattr(conv, "fp32_precision") else None


def _change_cudnn(level: int) -> bool | str | None:
    """Set cuDNN's precision: its own default is TF32."""
    conv, wanted = _conv(torch.backends.cudnn), "tf32" if level else "ieee"
    if conv is None:
        allowed: bool = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = level > 0
        return allowed
    before: str = conv.fp32_precision
    if before == wanted or (before == "none" and not level):
        return None
    conv.fp32_precision = wanted
    return before


def _put_back_cudnn(found: Any) -> None:
    conv = _conv(torch.backends.cudnn)
    if conv is None:
        torch.backends.cudnn.allow_tf32 = found
    else:
        _set(conv, found)


def _change_onednn(level: int) -> str | None:
    """Set oneDNN's convolutions to float32, at every level: no lower precision is needed here."""
    conv = _conv(torch.backends.mkldnn)
    before: str = "none" if conv is None else conv.fp32_precision
    if before in ("none", "ieee"):
        return None
    conv.fp32_precision = "ieee"
    return before


_MATMULS = _OfProcess(_change_matmuls, _put_back_matmuls)
_CUDNN = _OfProcess(_change_cudnn, _put_back_cudnn)
_ONEDNN = _OfProcess(_change_onednn, lambda found: _set(_conv(torch.backends.mkldnn), found))
_OF_DEVICES: dict[str, tuple[_OfProcess, ...]] = {"cuda": (_CUDNN,), "cpu": (_ONEDNN,)}


def _set(backend: Any, value: str) -> None:
    """Set a backend's precision; let the backend inherit a value that its parent has, too.

    Else a later change of the parent would not reach the backend.
    """
    backend.fp32_precision = "none"
    if backend.fp32_precision != value:
        backend.fp32_precision = value


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
