"""Second moments of rows, and symmetric matrices packed as triangles."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .products import lowered

_MUCH, _LEAST = 1 << 22, 64  # multiplications, rows and columns from which halves' hardware pays
_LEAST_UNIT = 2.0**-100  # of rows; its reciprocal is a float32, too
_EXPONENT = 0x7F800000  # the bits of a float32's exponent
_FEW = 1 << 16  # numbers up to which appending a 1 is faster than separate sums
_WIDE = 128  # columns from which the halves of a product may differ
_PARTS, _ALIGNED = 4, 16  # blocks in which a half is copied, and what their sides are multiples of


def unit_of(gradient: Tensor) -> Tensor:
    """Return the power of two at or below a gradient's largest magnitude, a float32 scalar."""
    # Gradients are divided by it: 1e-22 squared is zero in float32. Powers of two keep all digits.
    low, high = torch.aminmax(gradient)
    peak = torch.maximum(high, -low).float().clamp_(_LEAST_UNIT, 1 / _LEAST_UNIT)
    return peak.view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32)


def second_moment(
    rows: Tensor, dtype: torch.dtype, *, diagonal: bool, append_one: bool = False
) -> Tensor:
    """Return Σ r rᵀ over ``rows`` ``[k, N, n]``: ``[k, n, n]``, or its diagonal ``[k, n]``.

    ``append_one`` gives the moment of the rows with a 1 appended.
    """
    _, count, n = rows.shape
    if diagonal:
        rows = rows.to(dtype)
        moment = torch.linalg.vecdot(rows, rows, dim=1)
        return torch.nn.functional.pad(moment, (0, 1), value=count) if append_one else moment
    much = min(count, n) >= _LEAST and count * n * n >= _MUCH
    if dtype == torch.float32 and much and takes_halves(rows):
        # Rows under autocast are bfloat16 already: float32 copies of them would take twice the
        # memory, and products without tensor cores. Sums in half precision would lose small rows.
        moment = _into_float32(rows.mT, rows)
    else:
        rows = rows.to(dtype)
        # Beside products of rounded rows, sums of exact rows could make an indefinite moment.
        if append_one and (rows.numel() <= _FEW or lowered()):
            rows, append_one = torch.nn.functional.pad(rows, (0, 1), value=1.0), False
        blocks = _blocks(rows)
        if len(blocks) == 1:
            moment = torch.bmm(rows.mT, rows)
        else:
            # Only the blocks under the diagonal are multiplied: 0.625 of the work.
            moment = rows.new_empty(len(rows), rows.shape[2], rows.shape[2])
            for start, stop in blocks:
                columns, before = rows[:, :, start:stop], rows[:, :, :stop]
                torch.bmm(columns.mT, before, out=moment[:, start:stop, :stop])
            symmetric(moment)
    return bordered(moment, rows.sum(1, dtype=dtype), count) if append_one else moment


def _blocks(matrices: Tensor) -> list[tuple[int, int]]:
    n = matrices.shape[2]
    if n < _WIDE or matrices.device.type != "cpu":
        return [(0, n)]
    step = -(-n // (_PARTS * _ALIGNED)) * _ALIGNED
    return [(start, min(n, start + step)) for start in range(0, n, step)]


def takes_halves(rows: Tensor) -> bool:
    """Return whether hardware multiplies rows in this half precision, with sums in float32."""
    is_half = rows.dtype in (torch.bfloat16, torch.float16)
    return is_half and _multiplies_into_float32(rows.dtype, rows.device)


@functools.cache
def _multiplies_into_float32(dtype: torch.dtype, device: torch.device) -> bool:
    ones = torch.ones(1, 16, 16, dtype=dtype, device=device)
    try:
        return torch.equal(_into_float32(ones, ones), ones.float() * 16)
    except (RuntimeError, TypeError):  # before torch 2.8
        return False


def _into_float32(left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left, right, out_dtype=torch.float32)


def bordered(moment: Tensor, total: Tensor, count: int) -> Tensor:
    """Return the moment ``[k, n, n]`` of ``count`` rows, of sum ``total``, with 1s appended."""
    k, n = total.shape
    result = moment.new_empty(k, n + 1, n + 1)
    result[:, :n, :n] = moment
    result[:, -1, :-1] = result[:, :-1, -1] = total
    result[:, -1, -1] = count
    return result


def symmetric(matrices: Tensor) -> Tensor:
    """Make products ``[k, n, n]`` symmetric, in place, where their halves may differ."""
    # They may for wide products on CPUs. Solvers read one half alone, but products read both, so
    # that an owner and a rank that received a triangle would use different matrices.
    for start, stop in _blocks(matrices)[1:]:
        matrices[:, :start, start:stop] = matrices[:, start:stop, :start].mT
    return matrices


def packed_size(n: int) -> int:
    return n * (n + 1) // 2


def pack(matrices: Tensor) -> Tensor:
    """Pack symmetric ``[k, n, n]``, read on and under the diagonal, as ``[k, n (n + 1) / 2]``."""
    # The left half of the columns is a rectangle. Its numbers above the diagonal are redundant: the
    # triangle of the lower right block takes their place (rectangular full packed format, LAPACK).
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
    even, right = 1 - n % 2, n // 2
    left = n - right
    rectangle = packed.unflatten(1, (n + even, left))
    return rectangle[:, even:], rectangle[:, :right, 1 - even :], left
