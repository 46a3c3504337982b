"""Settings of the process: the precision of float32 products, and autocast."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_SETTINGS = "highest", "high", "medium"  # torch's, of float32 products
# Since torch 2.9 by backend: on CUDA, and on CPUs.
_NEWER = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}
_LEFT_OUT = 13  # digits of float32 that TF32 has no place for
_BELOW_HALF = (1 << _LEFT_OUT - 1) - 1


class _OfProcess:
    """A setting of the whole process, which several threads change for a while.

    The most precise of the levels begun holds, 0 before others; what was found is put back when the
    last one ends. ``change`` returns what was there before, or None where that is to stay.
    """

    def __init__(self, change: Callable[[int], Any], put_back: Callable[[Any], None]) -> None:
        self._change, self._put_back = change, put_back
        self._lock = threading.Lock()  # for the books alone: threads may wait for each other within
        self._begun: list[int] = []
        self._found: Any = None

    def begin(self, level: int) -> None:
        with self._lock:
            self._take(min((level, *self._begun)))
            self._begun.append(level)

    def end(self, level: int) -> None:
        with self._lock:
            self._begun.remove(level)
            if self._begun:
                self._take(min(self._begun))
            elif self._found is not None:
                found, self._found = self._found, None
                self._put_back(found)

    def _take(self, level: int) -> None:
        before = self._change(level)
        if self._found is None:
            self._found = before


class _Asked(threading.local):
    """The precision in which this thread takes statistics."""

    def __init__(self) -> None:
        self._begun = ["highest"]

    @property
    def setting(self) -> str:
        return self._begun[-1]

    def begin(self, setting: str) -> None:
        self._begun.append(setting)

    def end(self, setting: str) -> None:
        self._begun.pop()


_asked = _Asked()
_Level = tuple[Any, Any]  # what is begun and ended, and at which level


class _Levels(AbstractContextManager[None]):
    """Begins each at its level, and ends them, last first.

    It is entered for each layer's backward pass: ``contextmanager`` and ``ExitStack`` take longer.
    """

    def __init__(self, levels: Sequence[_Level]) -> None:
        self._levels = levels

    def __enter__(self) -> None:
        begun = 0
        try:
            for of, level in self._levels:
                of.begin(level)
                begun += 1
        except BaseException:
            self._end(begun)
            raise

    def __exit__(self, *raised: object) -> None:
        self._end(len(self._levels))

    def _end(self, begun: int) -> None:
        """The first so many, whatever becomes of one of them."""
        if begun:
            of, level = self._levels[begun - 1]
            try:
                of.end(level)
            finally:
                self._end(begun - 1)


def full_precision(device: str | None = None) -> AbstractContextManager[None]:
    """Float32 products in real float32: a user's TF32 setting must not reach the factors.

    Settings of another type of device than a given one stay as they are, which takes less time.
    """
    return _Levels(_process("highest", device, 0))


def statistics_precision(
    setting: str, device: str, *, in_half: bool
) -> AbstractContextManager[None]:
    """Float32 products as ``torch.set_float32_matmul_precision(setting)`` would have them.

    Convolutions, too, on CUDA; and there those of images that are ``in_half`` precision, whatever
    the setting: TF32 has a place for each of their digits, so that it rounds nothing.
    """
    tf32 = device == "cuda" and (in_half or setting != "highest")
    return _Levels([(_asked, setting), *_process(setting, device, int(tf32))])


def _process(setting: str, device: str | None, level: int) -> list[_Level]:
    """Of products, and of convolutions on such a device."""
    return [(_MATMULS, _SETTINGS.index(setting)), *((x, level) for x in _convolutions(device))]


def rounded(rows: Tensor) -> Tensor:
    """Float32 rows as the products of statistics take them.

    Sums and products must be of the same numbers, else they are no moment: it could be indefinite.
    """
    if _asked.setting == "highest" or rows.dtype != torch.float32:
        return rows
    if _asked.setting == "medium" and rows.device.type == "cpu":
        return rows.bfloat16().float()
    bits = rows.view(torch.int32)  # to the nearest of TF32, of two to the even one
    return (bits + _BELOW_HALF + (bits >> _LEFT_OUT & 1) & -1 << _LEFT_OUT).view(torch.float32)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def _matmul_backends() -> list[Any]:
    """CUDA's settings and CPUs'; none of them before torch 2.9."""
    both = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    return [backend for backend in both if hasattr(backend, "fp32_precision")]


def _older() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None  # torch refuses to answer where its newer settings say something else


def _change_matmuls(level: int) -> tuple[str | None, list[str]] | None:
    setting, older = _SETTINGS[level], _older()
    # The older name may tell what some backend is not at; at the highest none is below.
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
    """A backend's setting of convolutions, or None before torch 2.9."""
    conv = getattr(part, "conv", None)
    return conv if hasattr(conv, "fp32_precision") else None


def _change_cudnn(level: int) -> bool | str | None:
    """It uses TF32 unless told otherwise."""
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
    """It has no lower level: of what statistics need, its convolutions know only float32."""
    conv = _conv(torch.backends.mkldnn)
    before: str = "none" if conv is None else conv.fp32_precision
    if before in ("none", "ieee"):
        return None
    conv.fp32_precision = "ieee"
    return before


def _put_back_onednn(found: Any) -> None:
    _set(_conv(torch.backends.mkldnn), found)


_MATMULS = _OfProcess(_change_matmuls, _put_back_matmuls)
_CUDNN = _OfProcess(_change_cudnn, _put_back_cudnn)
_ONEDNN = _OfProcess(_change_onednn, _put_back_onednn)
_OF_DEVICES = {"cuda": (_CUDNN,), "cpu": (_ONEDNN,)}


def _convolutions(device: str | None) -> Sequence[_OfProcess]:
    return _OF_DEVICES.get(device or "", (_CUDNN, _ONEDNN))


def _set(backend: Any, value: str) -> None:
    """Set a backend's precision, or let it inherit again a value that it inherits.

    A later change of the parent would else pass it by.
    """
    backend.fp32_precision = "none"
    if backend.fp32_precision != value:
        backend.fp32_precision = value
