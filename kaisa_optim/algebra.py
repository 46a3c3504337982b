"""Kronecker algebra on stacks of equal matrices.

Every function takes and returns batched tensors: factors ``[k, n, n]`` (a diagonal one ``[k, n]``),
gradients ``[k, g, a]``. Nothing here knows modules, ranks or steps.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Count = TypeVar("Count", int, Tensor)
Polynomial = tuple[float, float, float]  # in a singular value s, a s + b s³ + c s⁵

# Columns, and multiplications, from which half of a symmetric product is saved by parts.
_HALVED = 192
_HALVED_MUCH = 1 << 27
_WIDE = 256  # columns from which it is saved by oneDNN
_LEAST_HALVED = 128  # the fewest of which it is, there and of many rows, and so anywhere
_TALL = 32  # rows for each column, from which it is saved of fewer
_LONG = 4  # positions for each channel, from which images are multiplied as they lie
_ALIGNED = 16  # columns that products take at a time
# Multiplications from which on oneDNN pays, which is called for one matrix after the other.
_MUCH = 1 << 22
_LEAST = 64  # rows, and columns, from which units for half precision pay
_PARTS = 4
_SETTINGS = "highest", "high", "medium"  # torch's, of float32 products
# Since torch 2.9 by backend: on CUDA, and on CPUs.
_NEWER = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}
_LEFT_OUT = 13  # digits of float32 that TF32 has no place for
_BELOW_HALF = (1 << _LEFT_OUT - 1) - 1
_FEW = 1 << 16  # numbers that are copied sooner than sums are worked out apart
_LEADING = 8  # one of so many eigenvectors leads
_TURNS = 8  # until each of the others has been looked at
_ROUNDS = 2  # of rotations among those that lead
# Those that one after the other take all singular values from 0.02 to 1 to about 1 (0.9 to 1.1):
# each is the nearest to 1 on where the last one leaves them, as in
# Polar Express (Amsel et al., 2025). Muon's five, all alike, come to 0.7 to 1.14.
_TOWARDS_ONE = (
    (7.7110, -22.1138, 16.2488),
    (3.2153, -2.4112, 0.5013),
    (2.2183, -1.5940, 0.4107),
)
# The same from 0.005 on, for sides above 256: of n singular values the mean square is 1/n.
_FROM_FURTHER = (
    (8.2987, -24.4305, 18.0903),
    (3.9152, -2.9211, 0.5592),
    (3.1746, -2.3804, 0.4978),
    (2.1895, -1.5672, 0.4079),
)
_FAR = 256
_IN_A_ROW = 4  # polynomials of one X Xᵀ: where X has no part, rounding's then stays below 0.01
# Part of 1 that the largest singular value begins at or below: beyond 1, where bfloat16's rounding
# would take that of a matrix of rank one, the polynomials soon leave all bounds.
_BELOW_ONE = 0.98
_AT_ONCE = 1 << 22  # numbers that are made orthogonal in one batch
_NARROW = 64  # shorter side up to which CPUs make matrices orthogonal sooner in float32
_SIZE = 0.2  # root mean square of what is made orthogonal: about that of Adam's own directions
_STILL = 1e-3  # below which a direction's own is next to nothing, as where gradients have vanished


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
    """What the statistics that this thread gathers are to be taken in."""

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
    """What a backend inherits it inherits again, else a later change would pass it by."""
    backend.fp32_precision = "none"
    if backend.fp32_precision != value:
        backend.fp32_precision = value


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
    """Whether torch's products take about twice as long as oneDNN's, and so as convolutions."""
    return _linear_for(like) is not None


def multiplies_in_half(dtype: torch.dtype, like: Tensor) -> bool:
    """Whether products of float32 matrices with those of ``dtype`` are taken in that.

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


def second_moment(
    rows: Tensor,
    dtype: torch.dtype,
    *,
    diagonal: bool,
    append_one: bool = False,
    lower: bool = False,
) -> Tensor:
    """Σ r rᵀ over ``rows`` ``[k, N, n]``, in ``dtype``: ``[k, n, n]``, or its diagonal ``[k, n]``.

    ``append_one`` gives the moment of the rows with a 1 appended, without forming those rows. Rows
    in half precision are multiplied by units for it, with sums in float32, where there are such.
    ``lower``: what is not in its :func:`lower_parts` may be anything until it is :func:`mirrored`.
    """
    if not diagonal and dtype == torch.float32 and _takes_halves(rows):
        return _moment(rows, append_one, lower)
    rows = rows.to(dtype)
    if append_one and not diagonal:  # alone, a product of whatever it rounds is a moment
        rows = rounded(rows)
    return _plain_moment(rows, diagonal, append_one, lower)


def _takes_halves(rows: Tensor) -> bool:
    _, count, n = rows.shape
    if rows.dtype not in (torch.bfloat16, torch.float16) or min(count, n) < _LEAST:
        return False
    return count * n * n >= _MUCH and _multiplies_into_float32(rows.dtype, rows.device)


def _plain_moment(rows: Tensor, diagonal: bool, append_one: bool, lower: bool) -> Tensor:
    """The same of rows as they are, in their own precision."""
    if diagonal:
        moment = torch.linalg.vecdot(rows, rows, dim=1)
        if append_one:
            moment = torch.nn.functional.pad(moment, (0, 1), value=rows.shape[1])
        return moment
    if append_one and rows.numel() <= _FEW:
        rows, append_one = torch.nn.functional.pad(rows, (0, 1), value=1.0), False
    few = rows.shape[1] * rows.shape[2] ** 2 < min(_MUCH, _HALVED_MUCH)
    if few and not append_one:  # no parts to choose from, and nothing to fill in
        return torch.bmm(rows.mT, rows)
    return _moment(rows, append_one, lower)


def _moment(rows: Tensor, append_one: bool, lower: bool) -> Tensor:
    """In float32 if the rows are in half precision."""
    k, count, n = rows.shape
    dtype = torch.promote_types(rows.dtype, torch.float32)
    moment = rows.new_empty(k, n + append_one, n + append_one, dtype=dtype)
    halved = _gram(rows, moment[:, :n, :n], append_one)
    if append_one:
        fill_border(moment, rows.sum(1, dtype=dtype), count)
    if halved and not (lower and _keeps_half(moment)):
        moment = _filled_in(moment)
    return moment


def sums_images(images: Tensor) -> bool:
    """Whether :func:`moment_of_images` takes less time than the moment of their rows.

    ``images`` are ``[batch, k, n, *size]``. Where batch and k are not one in memory, they would be
    copied; of few positions, products are mostly written and read; those of wide rows are halved.
    """
    if images.device.type != "cpu" or multiplies_slowly(images) or _in_brain_floats(images):
        return False
    k, n = images.shape[1:3]
    if k > 1 and images.stride(0) != k * images.stride(1):
        return False
    return n < _HALVED and images.shape[3:].numel() >= _LONG * n


def moment_of_images(images: Tensor) -> Tensor:
    """Σ v vᵀ over the positions of images ``[batch, k, n, positions]``: ``[k, n, n]``.

    Image by image, as they lie in memory: rows would be a copy.
    """
    return (images @ images.mT).sum(0)


def bordered(moment: Tensor, total: Tensor, count: int) -> Tensor:
    """The moment ``[k, n, n]`` of ``count`` rows of sum ``total`` ``[k, n]``, with 1s appended."""
    k, n = total.shape
    result = moment.new_empty(k, n + 1, n + 1)
    result[:, :n, :n] = moment
    fill_border(result, total, count)
    return result


def fill_border(moment: Tensor, total: Tensor, count: int) -> None:
    """The last row and column, those of the 1s."""
    moment[:, -1, :-1] = moment[:, :-1, -1] = total
    moment[:, -1, -1] = count


def _gram(rows: Tensor, out: Tensor, border: bool) -> bool:
    """Rᵀ R into a view, beside a border or none. Of wide ones the :func:`lower_parts` alone:
    then True."""
    _, count, n = rows.shape
    much = count * n * n
    linear = _linear_for(rows) if len(rows) == 1 and much >= _MUCH else None
    if linear is not None:
        return _gram_by_onednn(rows[0], out[0], border, linear)
    # Of few rows parts would take longer than what they save, as they do of fast products.
    pays = n >= _HALVED and count >= n // 4 and much >= _HALVED_MUCH and not _in_brain_floats(rows)
    if not pays:
        _product_into(rows.mT, rows, out)
        return False
    # Its rows and not its columns: MKL takes few rows of many columns in 0.9 of the time.
    for start, stop in _spans(n, border):
        right, part = rows.narrow(2, 0, stop), out.narrow(1, start, stop - start)
        _product_into(right.narrow(2, start, stop - start).mT, right, part.narrow(2, 0, stop))
    return True


def _product_into(left: Tensor, right: Tensor, out: Tensor) -> None:
    if left.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(_into_float32(left, right))


def _gram_by_onednn(
    rows: Tensor, out: Tensor, border: bool, linear: Callable[[Tensor, Tensor], Tensor]
) -> bool:
    count, n = rows.shape
    # As oneDNN takes them, and but once; torch transposes matrices fast, and only these.
    columns = rows.mT.contiguous()
    pays = count >= n // 4 if n >= _WIDE else n >= _LEAST_HALVED and count >= _TALL * n
    for start, stop in _spans(n, border) if pays else [(0, n)]:
        out[start:, start:stop] = linear(columns[start:], columns[start:stop])
    return pays


def _in_brain_floats(rows: Tensor) -> bool:
    """Whether a CPU takes these products in bfloat16, as it has been asked to."""
    on_cpu = rows.device.type == "cpu"
    return on_cpu and _asked.setting == "medium" and multiplies_in_half(torch.bfloat16, rows)


def _spans(n: int, border: bool = False) -> list[tuple[int, int]]:
    """The rows of each block of a wide symmetric matrix, of which half is saved by parts.

    Beside a border they are what they are with it, as of one more row: the last block's.
    """
    most = n + border - 1
    step = -(-most // (_PARTS * _ALIGNED)) * _ALIGNED
    return [(start, n if start + step >= most else start + step) for start in range(0, most, step)]


def lower_parts(matrices: Tensor) -> list[Tensor]:
    """Views of symmetric ``[k, n, n]`` that hold all that is on and under the diagonal.

    Of wide ones on CPUs, they leave out most of what is above it: there that need not be kept up.
    """
    if not _keeps_half(matrices):
        return [matrices]
    return [matrices[:, start:stop, :stop] for start, stop in _spans(matrices.shape[1])]


def mirrored(matrices: Tensor) -> Tensor:
    """Symmetric ``[k, n, n]``, of which the :func:`lower_parts` count, made whole in place.

    One given as ``[k, n]`` is diagonal, and whole.
    """
    return _filled_in(matrices) if _keeps_half(matrices) else matrices


def _keeps_half(matrices: Tensor) -> bool:
    # On GPUs more and smaller calls would take longer than what they save.
    wide = matrices.dim() == 3 and matrices.shape[1] >= _LEAST_HALVED
    return wide and matrices.device.type == "cpu"


def _filled_in(matrices: Tensor) -> Tensor:
    for start, stop in _spans(matrices.shape[1])[1:]:
        matrices[:, :start, start:stop] = matrices[:, start:stop, :start].mT
    return matrices


def projected_moment(
    rows_g: Tensor,
    rows_a: Tensor,
    vectors_g: Tensor | None,
    vectors_a: Tensor | None,
    *,
    append_one: bool,
    by_example: bool,
) -> Tensor:
    """Σ (Q_Gᵀ g aᵀ Q_A)² over rows ``[k, batch, positions, n]``, elementwise: ``[k, g, a]``.

    ``by_example`` adds up g aᵀ over an example's positions before the square.
    """
    batch = rows_g.shape[1:3]
    g, a = rows_g.flatten(1, 2), rows_a.flatten(1, 2)
    if vectors_g is not None:
        g = g @ vectors_g
    if vectors_a is not None and append_one:
        a = a @ vectors_a[:, :-1] + vectors_a[:, -1:]
    elif vectors_a is not None:
        a = a @ vectors_a
    elif append_one:
        a = torch.nn.functional.pad(a, (0, 1), value=1.0)
    if not by_example or batch[1] == 1:
        return g.square().mT @ a.square()
    gradients = g.unflatten(1, batch).mT @ a.unflatten(1, batch)
    return gradients.square_().sum(1)


def projected_diagonal(moment: Tensor, vectors: Tensor | None) -> Tensor:
    """The diagonal of Qᵀ M Q, ``[k, n]``, a copy; a moment given as ``[k, n]`` is diagonal.

    One moment may stand for all.
    """
    if moment.dim() == 2 or vectors is None:
        return moment.clone()
    moment = moment.expand(len(vectors), -1, -1)
    return (vectors * product(moment, vectors)).sum(-2).clamp_(min=0)


def mean_eigenvalue(factor: Tensor, *, diagonal: bool) -> Tensor:
    """The trace over the dimension, ``[k]``."""
    values = factor if diagonal else factor.diagonal(dim1=-2, dim2=-1)
    return values.mean(-1)


def split_damping(damping: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
    """γ_A and γ_G with product γ and ratio ``mean_a`` / ``mean_g`` (Martens & Grosse, 2015).

    A factor that is zero, or not finite, has no scale to balance: the pair then shares √γ evenly.
    """
    ratio = mean_a / mean_g
    fine = (mean_a > 0) & (mean_g > 0) & (ratio > 0) & ratio.isfinite()
    ratio = torch.where(fine, ratio, torch.ones_like(ratio))
    return torch.sqrt(damping * ratio), torch.sqrt(damping / ratio)


def eigendecompose(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[k, n]``, none below zero, and eigenvectors ``[k, n, n]`` of PSD factors.

    The largest come first.
    """
    if factors.shape[-1] == 1:  # a solver would be called for each of a norm layer's features
        return factors[..., 0].clamp(min=0), torch.ones_like(factors)
    values, vectors = torch.linalg.eigh(factors)
    return values.clamp_(min=0).flip(-1), vectors.flip(-1)


def followed(
    factors: Tensor, vectors: Tensor, values: Tensor, turn: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eigenvalues and eigenvectors near F's, from those of an F that was a little different.

    With them, ``[k]`` each, about the norm of QᵀFQ outside of its diagonal, and that of F. It is
    0.3 of a decomposition's work or less, as no product has all of F's columns:

    - one orthogonal iteration of the leading eighth of the vectors. The reflections that it takes
      turn the others along, so that all stay orthonormal but for rounding;
    - those leading vectors turn in what they span until F is nearly diagonal there (Rayleigh and
      Ritz);
    - of the others, every eighth is multiplied with F, other ones at each ``turn``. These get new
      eigenvalues; those of the rest are scaled so that all add up to F's trace. What the former
      have outside of the diagonal counts for all.

    The leading vectors come first.
    """
    n = factors.shape[-1]
    if n == 1:
        values, vectors = eigendecompose(factors)
        return values, vectors, torch.zeros_like(values[:, 0]), values[:, 0]
    few = max(1, n // _LEADING)
    image = product(product(factors, vectors[..., :few]).mT, vectors).mT
    # Transposed, rows are the columns that LAPACK works on: nothing is copied to and fro.
    basis = torch.ormqr(*torch.geqrf(image), vectors.mT, transpose=True).mT
    leading, others = basis[..., :few], basis[..., few:]
    image = product(factors, leading)
    own, inside = _rotated(leading.mT @ image)
    leading.copy_(product(leading, inside))
    outside = product(image, inside).sub_(leading * own[:, None, :]).square_().sum((1, 2))
    turns = min(_TURNS, n - few)
    some = slice(turn % turns, None, turns)
    picked = others[..., some]
    image = product(factors, picked)
    found = torch.linalg.vecdot(image, picked, dim=1)
    beside = image.sub_(picked * found[:, None, :]).square_().sum((1, 2))
    outside += beside * (others.shape[-1] / picked.shape[-1])
    older = values[:, few:].clone()
    older[:, some] = 0
    left = factors.diagonal(dim1=1, dim2=2).sum(1) - own.sum(1) - found.sum(1)
    rest = _adding_up(older, left.clamp_(min=0), n - few - picked.shape[-1])
    rest[:, some] = found
    values = torch.cat([own, rest], 1).clamp_(min=0)
    return values, basis, outside.sqrt_(), factors.flatten(1).norm(dim=1)


def _rotated(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonal of QᵀHQ, and Q, of symmetric H that are not far from diagonal.

    The rotations of all pairs, which Jacobi's method takes one after the other, taken at once and
    made orthonormal; twice. Of what was outside of the diagonal that leaves some thousandths where
    eigenvalues are apart, and more among those that are nearly equal. A solver would leave nothing,
    but makes the host wait for a GPU, to see whether all went well.
    """
    whole: Tensor | None = None
    for _ in range(_ROUNDS):
        values = matrices.diagonal(dim1=1, dim2=2)
        half = (values[:, :, None] - values[:, None, :]) / 2
        rotations = -matrices / (half + torch.hypot(half, matrices).copysign(half))
        # Of equal values that nothing couples, 0 / 0: these stay.
        rotations = torch.where(matrices == 0, 0.0, rotations).tril_(-1)
        rotations = rotations - rotations.mT
        rotations.diagonal(dim1=1, dim2=2).fill_(1)
        turn, _ = torch.linalg.qr(rotations)
        matrices = between(turn.mT, matrices, turn)
        whole = turn if whole is None else product(whole, turn)
    assert whole is not None
    return matrices.diagonal(dim1=1, dim2=2), whole


def _adding_up(values: Tensor, total: Tensor, count: int) -> Tensor:
    """``values`` ``[k, n]`` in their proportions, scaled to a sum of ``total`` ``[k]``.

    Where they have none, each is what ``count`` equal ones would be.
    """
    scale = (total / values.sum(1))[:, None]
    return torch.where(scale.isfinite(), values * scale, total[:, None] / max(1, count))


def damped_inverse(factors: Tensor, damping: Tensor) -> Tensor:
    """(F + γI)⁻¹ by Cholesky, γ ``[k]``; NaN where the damped factor is not positive definite."""
    damped = factors.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    if factors.shape[-1] == 1:
        return torch.where(damped > 0, 1 / damped, torch.nan)
    lower, info = torch.linalg.cholesky_ex(damped)
    lower.masked_fill_((info != 0)[:, None, None], torch.nan)
    if lower.device.type == "cpu":
        return torch.cholesky_inverse(lower)
    root = _inverted(lower)  # MAGMA's inverse of a batch would make the host wait
    return root.mT @ root


def damped_root(factors: Tensor, damping: Tensor) -> Tensor:
    """R of (F / f̄ + γI)⁻¹ = R Rᵀ, f̄ the mean eigenvalue, upper triangular, γ ``[k]``.

    A factor that is zero has no scale; NaN where the damped one is not positive definite.
    """
    damped = factors / _or_one(mean_eigenvalue(factors, diagonal=False))[:, None, None]
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    lower, info = torch.linalg.cholesky_ex(damped)
    lower.masked_fill_((info != 0)[:, None, None], torch.nan)
    # Of two roots of the inverse, the transposed inverse of the lower one is at hand.
    return _inverted(lower).mT.contiguous()


def _inverted(lower: Tensor) -> Tensor:
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)


def damped_root_of_diagonal(factors: Tensor, damping: Tensor) -> Tensor:
    """The same of factors ``[k, n]``."""
    scale = _or_one(mean_eigenvalue(factors, diagonal=True))[:, None]
    return (factors / scale + damping[:, None]).rsqrt()


def damped_product(values_g: Tensor, values_a: Tensor, damping: Tensor | float) -> Tensor:
    """v_G v_Aᵀ + γ, ``[k, g, a]``."""
    return (values_g[:, :, None] * values_a[:, None, :]).add_(damping)


def into_basis(gradient: Tensor, vectors_g: Tensor | None, vectors_a: Tensor | None) -> Tensor:
    """Q_Gᵀ ∇ Q_A; ``None`` stands for the basis of a diagonal factor."""
    return between(None if vectors_g is None else vectors_g.mT, gradient, vectors_a)


def out_of_basis(gradient: Tensor, vectors_g: Tensor | None, vectors_a: Tensor | None) -> Tensor:
    """Q_G ∇ Q_Aᵀ."""
    return between(vectors_g, gradient, None if vectors_a is None else vectors_a.mT)


def add_out_of_basis_(
    out: Tensor, gradient: Tensor, vectors_g: Tensor | None, vectors_a: Tensor | None
) -> None:
    """Q_G ∇ Q_Aᵀ, added where it is multiplied; of one dtype, and one basis at least."""
    if vectors_g is None:
        assert vectors_a is not None
        return _add_product_(out, gradient, vectors_a.mT)
    if vectors_a is None:
        return _add_product_(out, vectors_g, gradient)
    (_, g, rows), (_, a, columns) = vectors_g.shape, vectors_a.shape
    if _right_first(g, rows, columns, a):
        return _add_product_(out, vectors_g, product(gradient, vectors_a.mT))
    return _add_product_(out, product(vectors_g, gradient), vectors_a.mT)


def orders(rows: Count, g: int, a: int, columns: Count) -> tuple[Count, Count]:
    """Multiplications of L M R, M ``[g, a]``, for L M first and for M R first."""
    return rows * a * (g + columns), g * columns * (a + rows)


def _right_first(rows: int, g: int, a: int, columns: int) -> bool:
    """Whether M R first is less work; square sides are alike."""
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
        return (left @ middle) @ right
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


def narrow(matrices: Tensor) -> bool:
    """Whether :func:`orthogonalized` takes less time in float32, also where halves are fast."""
    return matrices.device.type == "cpu" and min(matrices.shape[1:]) <= _NARROW


def orthogonalized(matrices: Tensor, *, in_half: bool) -> Tensor:
    """Of M = U S Vᵀ about U Vᵀ, ``[k, g, a]``, of one size; ``in_half``: by bfloat16 products.

    Singular values are made nearly equal, but for those below 0.02 of M's norm (0.005 where the
    smaller side is above 256), by products alone (:func:`_towards_one`). The root mean square is
    then 0.2, as in Moonlight (Liu et al., 2025), so that learning rates are of Adam's order for any
    shape; less, in proportion, where that of M is below 0.001.
    """
    at_once = max(1, _AT_ONCE // max(1, matrices[:1].numel()))  # what is multiplied takes memory
    if len(matrices) <= at_once:
        return _orthogonalized(matrices, in_half)
    return torch.cat([_orthogonalized(part, in_half) for part in matrices.split(at_once)])


def _orthogonalized(matrices: Tensor, in_half: bool) -> Tensor:
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    # Squares of very small or large numbers would not be there.
    largest = _or_one(torch.linalg.vector_norm(wide, torch.inf, (1, 2), keepdim=True))
    wide = wide / largest
    norm = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)
    wide *= _BELOW_ONE / _or_one(norm)
    polynomials = _FROM_FURTHER if wide.shape[1] > _FAR else _TOWARDS_ONE
    found = _towards_one(wide, polynomials, in_half)
    now = torch.linalg.vector_norm(found, dim=(1, 2), keepdim=True)
    root = math.sqrt(wide[0].numel())
    moves = (largest * (norm / (root * _STILL))).clamp_(max=1.0)
    found.mul_(moves * (_SIZE * root) / _or_one(now))
    return found.mT if tall else found


def _or_one(norms: Tensor) -> Tensor:
    """To divide by: what is nothing stays nothing."""
    return torch.where(norms == 0, 1.0, norms)


def polar(
    matrices: Tensor,
    root: Tensor | None,
    polynomials: Sequence[Polynomial],
    eps: float,
    *,
    in_half: bool,
) -> Tensor:
    """R X', of ``[k, g, a]``: X = Rᵀ M of norm 1, and X' what the polynomials make of it.

    ``root`` is R, ``[k, n, n]``, or its diagonal ``[k, n]``; ``None`` stands for the identity.
    """
    at_once = max(1, _AT_ONCE // max(1, matrices[0].numel()))
    if len(matrices) > at_once:  # as what is multiplied takes memory
        pieces = matrices.split(at_once)
        roots = [None] * len(pieces) if root is None else root.split(at_once)
        each = zip(pieces, roots, strict=True)
        return torch.cat([polar(m, r, polynomials, eps, in_half=in_half) for m, r in each])
    if root is not None and root.dim() == 2:
        scale = root[:, :, None]
        return polar(scale * matrices, None, polynomials, eps, in_half=in_half).mul_(scale)
    if root is not None and not in_half:
        root = root.to(matrices.dtype)
    # In float32 unless R is not: what M is rounded by would lie where R enlarges it most.
    x = between(None if root is None else root.mT, matrices, None)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    tall = x.shape[1] > x.shape[2]
    wide = _towards_one(x.mT if tall else x, polynomials, in_half)
    half_root = root.bfloat16() if root is not None and in_half else root
    return between(half_root, wide.mT if tall else wide, None)


def _towards_one(wide: Tensor, polynomials: Sequence[Polynomial], in_half: bool) -> Tensor:
    """``wide`` matrices of a norm of 1 at most, with singular values nearly equal.

    A polynomial takes X to (a + b X Xᵀ + c (X Xᵀ)²) X: so it is done in bfloat16, where that is
    fast, as Muon does (Jordan et al., 2024). Else by powers of the first X Xᵀ, which commute, so
    that the long side is multiplied but twice for some polynomials; this needs full precision, as
    what is rounded in X Xᵀ grows by each.
    """
    if not in_half:
        for start in range(0, len(polynomials), _IN_A_ROW):
            some = polynomials[start : start + _IN_A_ROW]
            wide = product(orthogonalizer(product(wide, wide.mT), some), wide)
        return wide
    x = wide.bfloat16()
    for a, b, c in polynomials:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(wide.dtype)


def orthogonalizer(gram: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """Q, with Q X what these polynomials, one after the other, make of X; from X Xᵀ alone."""
    whole: Tensor | None = None
    for left, (a, b, c) in zip(reversed(range(len(polynomials))), polynomials, strict=True):
        factor = product(gram, gram).mul_(c).add_(gram, alpha=b)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        whole = factor if whole is None else product(whole, factor)
        if left:
            gram = product(factor, product(gram, factor))
    assert whole is not None
    return whole


def apply_inverse(gradient: Tensor, inverse_g: Tensor, inverse_a: Tensor) -> Tensor:
    """G⁻¹ ∇ A⁻ᵀ; inverses are symmetric, and one given as ``[k, n]`` is diagonal."""
    g, a = (inverse if inverse.dim() == 3 else None for inverse in (inverse_g, inverse_a))
    out = out_of_basis(gradient, g, a)
    if g is None:
        out = inverse_g[:, :, None] * out
    return out if a is not None else out * inverse_a[:, None, :]


def packed_size(n: int) -> int:
    """How many numbers say all of a symmetric ``[n, n]`` matrix."""
    return n * (n + 1) // 2


def pack(matrices: Tensor) -> Tensor:
    """Symmetric ``[k, n, n]`` as ``[k, n (n + 1) / 2]``, in a few block copies.

    Read is what is on and under the diagonal. The left half of the columns is a rectangle; above
    its diagonal, where it has nothing to say, goes the triangle of the lower right block
    (rectangular full packed format, LAPACK).
    """
    k, n, _ = matrices.shape
    packed = matrices.new_empty(k, packed_size(n))
    left, top, m = _rectangle(packed, n)
    left.copy_(matrices[:, :, :m])
    top.copy_(top.tril(-1) + matrices[:, m:, m:].tril().mT)
    return packed


def unpack(packed: Tensor, n: int) -> Tensor:
    """The matrices that :func:`pack` was given; exactly symmetric."""
    left, top, m = _rectangle(packed, n)
    matrices = packed.new_empty(packed.shape[0], n, n)
    matrices[:, :m, :m] = left[:, :m].tril()
    matrices[:, :m, :m] += left[:, :m].tril(-1).mT
    matrices[:, m:, :m] = left[:, m:]
    matrices[:, :m, m:] = left[:, m:].mT
    matrices[:, m:, m:] = top.triu()
    matrices[:, m:, m:] += top.triu(1).mT
    return matrices


def _rectangle(packed: Tensor, n: int) -> tuple[Tensor, Tensor, int]:
    """Views of packed matrices: the left columns, what lies over their diagonal, how many."""
    even, h = 1 - n % 2, n // 2
    m = n - h
    rectangle = packed.unflatten(1, (n + even, m))
    return rectangle[:, even:], rectangle[:, :h, 1 - even :], m


_onednn()  # while tensors are real: what it finds stays
