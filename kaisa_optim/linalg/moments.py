"""Second moments of rows, and symmetric matrices packed as triangles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .precision import _asked, rounded
from .products import (
    _MUCH,
    _into_float32,
    _linear_for,
    _multiplies_into_float32,
    multiplies_in_half,
    multiplies_slowly,
)

# Columns, and multiplications, from which a symmetric product saves half of its work by parts. On a
# GPU the host takes longer to start the parts of smaller products than the device to multiply all.
_HALVED = 192
_HALVED_MUCH = 1 << 27
_HALVED_MUCH_ON_GPUS = 1 << 34
_HALVED_MUCH_IN_HALF = 1 << 38
_WIDE = 256  # columns from which oneDNN saves half
_LEAST_HALVED = 128  # columns from which oneDNN saves half if there are many rows
_TALL = 32  # rows for each column from which rows are many
_LONG = 4  # positions for each channel from which images are multiplied as they lie in memory
_ALIGNED = 16  # columns of a product's tile
_LEAST = 64  # rows, and columns, from which hardware for half precision pays
_PARTS = 4
_LEAST_UNIT = 2.0**-100  # of rows; its reciprocal is a float32, too
_EXPONENT = 0x7F800000  # the bits of a float32's exponent
_FEW = 1 << 16  # numbers up to which appending a 1 is faster than separate sums


def unit_of(gradient: Tensor) -> Tensor:
    """Return the power of two at or below a gradient's largest magnitude, a float32 scalar.

    A gradient is divided by its unit before it is squared: the square of 1e-22 is zero in float32.
    Powers of two change no digit. Units are at least 2^-100 and at most 2^100.
    """
    low, high = torch.aminmax(gradient)
    peak = torch.maximum(high, -low).float().clamp_(_LEAST_UNIT, 1 / _LEAST_UNIT)
    return peak.view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32)


def second_moment(
    rows: Tensor,
    dtype: torch.dtype,
    *,
    diagonal: bool,
    append_one: bool = False,
) -> Tensor:
    """Return Σ r rᵀ over ``rows`` ``[k, N, n]``: ``[k, n, n]``, or its diagonal ``[k, n]``.

    ``append_one`` gives the moment of the rows with a 1 appended, without forming those rows. Rows
    in half precision are multiplied by hardware for it, with sums in float32, where it exists.
    """
    _, count, n = rows.shape
    much = min(count, n) >= _LEAST and count * n * n >= _MUCH
    if not diagonal and dtype == torch.float32 and much and takes_halves(rows):
        return _moment(rows, append_one)
    rows = rows.to(dtype)
    if append_one and not diagonal:  # the sums of the border must be of rounded rows, too
        rows = rounded(rows)
    return _plain_moment(rows, diagonal, append_one)


def takes_halves(rows: Tensor) -> bool:
    """Return whether hardware multiplies rows in this half precision, with sums in float32."""
    if rows.dtype not in (torch.bfloat16, torch.float16):
        return False
    return _multiplies_into_float32(rows.dtype, rows.device)


def _plain_moment(rows: Tensor, diagonal: bool, append_one: bool) -> Tensor:
    """Return the moment of rows as they are, in their own precision."""
    if diagonal:
        moment = torch.linalg.vecdot(rows, rows, dim=1)
        if append_one:
            moment = torch.nn.functional.pad(moment, (0, 1), value=rows.shape[1])
        return moment
    if append_one and rows.numel() <= _FEW:
        rows, append_one = torch.nn.functional.pad(rows, (0, 1), value=1.0), False
    few = rows.shape[1] * rows.shape[2] ** 2 < min(_MUCH, _HALVED_MUCH)
    if few and not append_one:  # no parts to choose from, and nothing to fill in
        return symmetric(torch.bmm(rows.mT, rows))
    return _moment(rows, append_one)


def _moment(rows: Tensor, append_one: bool) -> Tensor:
    """Return the moment, in float32 if the rows are in half precision."""
    k, count, n = rows.shape
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if not append_one and rows.device.type != "cpu" and not _halves(rows):
        half = rows.dtype != dtype
        return _into_float32(rows.mT, rows) if half else torch.bmm(rows.mT, rows)
    moment = rows.new_empty(k, n + append_one, n + append_one, dtype=dtype)
    is_half = _gram(rows, moment[:, :n, :n], append_one)
    if append_one:
        fill_border(moment, rows.sum(1, dtype=dtype), count)
    return _filled_in(moment) if is_half else symmetric(moment)


def sums_images(images: Tensor) -> bool:
    """Return whether :func:`moment_of_images` takes less time than the moment of their rows.

    ``images`` are ``[batch, k, n, *size]``. The moment of rows takes less time on other devices
    than CPUs, for slow or bfloat16 products, and in three more cases. Batch and k are not one
    dimension in memory: images would be copied. There are few positions: products are mostly
    written and read. Rows are wide: their moments save half of the work.
    """
    if images.device.type != "cpu" or multiplies_slowly(images) or _in_brain_floats(images):
        return False
    k, n = images.shape[1:3]
    if k > 1 and images.stride(0) != k * images.stride(1):
        return False
    return n < _HALVED and images.shape[3:].numel() >= _LONG * n


def moment_of_images(images: Tensor) -> Tensor:
    """Return Σ v vᵀ over the positions of images ``[batch, k, n, positions]``: ``[k, n, n]``.

    Images are multiplied one by one, as they lie in memory: rows would be a copy.
    """
    return symmetric((images @ images.mT).sum(0))


def bordered(moment: Tensor, total: Tensor, count: int) -> Tensor:
    """Return the moment ``[k, n, n]`` of ``count`` rows, of sum ``total``, with 1s appended."""
    k, n = total.shape
    result = moment.new_empty(k, n + 1, n + 1)
    result[:, :n, :n] = moment
    fill_border(result, total, count)
    return result


def fill_border(moment: Tensor, total: Tensor, count: int) -> None:
    """Fill in the last row and column, which belong to the 1s."""
    moment[:, -1, :-1] = moment[:, :-1, -1] = total
    moment[:, -1, -1] = count


def _gram(rows: Tensor, out: Tensor, border: bool) -> bool:
    """Write Rᵀ R into a view; return True if only its lower blocks are written."""
    _, count, n = rows.shape
    linear = _linear_for(rows) if len(rows) == 1 and count * n * n >= _MUCH else None
    if linear is not None:
        return _gram_by_onednn(rows[0], out[0], border, linear)
    if not _halves(rows):
        _product_into(rows.mT, rows, out)
        return False
    # Blocks of rows, not of columns: MKL takes 0.9 of the time for few rows of many columns.
    for start, stop in _spans(n, border):
        right, part = rows.narrow(2, 0, stop), out.narrow(1, start, stop - start)
        _product_into(right.narrow(2, start, stop - start).mT, right, part.narrow(2, 0, stop))
    return True


def _halves(rows: Tensor) -> bool:
    """Return whether half of Rᵀ R is saved by parts.

    With few rows, and where products are fast, parts cost more time than they save.
    """
    _, count, n = rows.shape
    if rows.device.type == "cpu":
        least = _HALVED_MUCH
    else:
        least = _HALVED_MUCH_IN_HALF if rows.dtype.itemsize == 2 else _HALVED_MUCH_ON_GPUS
    much = count * n * n >= least
    return n >= _HALVED and count >= n // 4 and much and not _in_brain_floats(rows)


def _product_into(left: Tensor, right: Tensor, out: Tensor) -> None:
    if left.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(_into_float32(left, right))


def _gram_by_onednn(
    rows: Tensor, out: Tensor, border: bool, linear: Callable[[Tensor, Tensor], Tensor]
) -> bool:
    count, n = rows.shape
    # Transpose once, by torch: it is fast at whole matrices, and oneDNN takes columns.
    columns = rows.mT.contiguous()
    pays = count >= n // 4 if n >= _WIDE else n >= _LEAST_HALVED and count >= _TALL * n
    for start, stop in _spans(n, border) if pays else [(0, n)]:
        out[start:, start:stop] = linear(columns[start:], columns[start:stop])
    return pays


def _in_brain_floats(rows: Tensor) -> bool:
    """Return whether a CPU takes these products in bfloat16, as the user has asked."""
    on_cpu = rows.device.type == "cpu"
    return on_cpu and _asked.setting == "medium" and multiplies_in_half(torch.bfloat16, rows)


def _spans(n: int, border: bool = False) -> list[tuple[int, int]]:
    """Return the rows of each block of a wide symmetric matrix that is multiplied by parts.

    A matrix beside a border has the blocks of the matrix with the border, the last one a row less.
    """
    most = n + border - 1
    step = -(-most // (_PARTS * _ALIGNED)) * _ALIGNED
    return [(start, n if start + step >= most else start + step) for start in range(0, most, step)]


def symmetric(matrices: Tensor) -> Tensor:
    """Make products ``[k, n, n]`` exactly symmetric, in place, where it matters.

    It matters for wide products on CPUs, where rounding may differ between the halves. Solvers read
    one half alone, but products read both.
    """
    is_wide = matrices.shape[1] >= _LEAST_HALVED
    return _filled_in(matrices) if is_wide and matrices.device.type == "cpu" else matrices


def _filled_in(matrices: Tensor) -> Tensor:
    """Fill the upper blocks in from the lower ones."""
    for start, stop in _spans(matrices.shape[1])[1:]:
        matrices[:, :start, start:stop] = matrices[:, start:stop, :start].mT
    return matrices


def packed_size(n: int) -> int:
    """Return how many numbers a packed symmetric ``[n, n]`` matrix has."""
    return n * (n + 1) // 2


def pack(matrices: Tensor) -> Tensor:
    """Pack symmetric ``[k, n, n]`` into ``[k, n (n + 1) / 2]``, in a few block copies.

    Only numbers on and under the diagonal are read. The left half of the columns is a rectangle.
    Its numbers above the diagonal are redundant: the triangle of the lower right block takes their
    place (rectangular full packed format, LAPACK).
    """
    k, n, _ = matrices.shape
    packed = matrices.new_empty(k, packed_size(n))
    left, top, m = _rectangle(packed, n)
    left.copy_(matrices[:, :, :m])
    top.copy_(top.tril(-1) + matrices[:, m:, m:].tril().mT)
    return packed


def unpack(packed: Tensor, n: int) -> Tensor:
    """Return the matrices that :func:`pack` was given; exactly symmetric."""
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
    """Return views of packed matrices: left columns, triangle over them; and how many columns."""
    even, h = 1 - n % 2, n // 2
    m = n - h
    rectangle = packed.unflatten(1, (n + even, m))
    return rectangle[:, even:], rectangle[:, :h, 1 - even :], m
