"""The place of a view in its parameter, a stack of matrices or plain entries."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """A view of a matrix or of a stack of matrices."""

    blocks: slice  # the matrices that the view has
    transposed: bool
    first: int | None  # the first row of the matrix that the view has; None: all rows


class Entries(NamedTuple):
    """A view of entries, as it takes part in a sum or product."""

    dims: tuple[int, ...]  # dimensions of the result along which the entries lie
    span: slice  # the entries' place in the flat parameter


def _offset(view: Tensor, whole: Tensor) -> int:
    return int(view.storage_offset()) - int(whole.storage_offset())


def place_of(view: Tensor, whole: Tensor) -> Place | None:
    """Return the place of a view of ``whole``, a matrix or stack; ``None`` for other views."""
    if whole.dim() not in (2, 3) or not 2 <= view.dim() <= whole.dim():
        return None
    offset, strides = _offset(view, whole), whole.stride()
    block, blocks = 0, slice(None)
    if whole.dim() == 3:
        block, offset = divmod(offset, strides[0])
        count = view.shape[0] if view.dim() == 3 else 1
        if view.dim() == 3 and count > 1 and view.stride(0) != strides[0]:
            return None
        if count < whole.shape[0]:
            blocks = slice(block, block + count)
    first, beside = divmod(offset, strides[-2])
    if beside:
        return None
    size, step = view.shape[-2:], view.stride()[-2:]
    for transposed in (False, True):
        rows, columns = (size[1], size[0]) if transposed else (size[0], size[1])
        row_step, column_step = (step[1], step[0]) if transposed else (step[0], step[1])
        steps_fit = (rows == 1 or row_step == strides[-2]) and (
            columns == 1 or column_step == strides[-1]
        )
        if columns == whole.shape[-1] and steps_fit and first + rows <= whole.shape[-2]:
            in_part = rows < whole.shape[-2]
            if in_part and whole.dim() == 3 and view.dim() == 3 and view.shape[0] > 1:
                return None
            return Place(blocks, transposed, first if in_part else None)
    return None


def entries_of(view: Tensor, whole: Tensor, out: Tensor) -> Entries | None:
    """Return the dimensions of ``out`` along which a view's entries lie; ``None`` for other views.

    The view holds entries of ``whole`` that lie one after the other, and broadcasts to ``out``.
    """
    pairs = zip(view.shape, view.stride(), strict=True)
    shape = [1 if step == 0 else size for size, step in pairs]
    expected, in_order = 1, True
    for size, step in zip(reversed(shape), reversed(view.stride()), strict=True):
        if size > 1:
            in_order &= step == expected
            expected *= size
    ahead = out.dim() - len(shape)
    if not in_order or ahead < 0:
        return None
    # Copies of a view, as by repeat, may be longer than the view.
    dims = tuple(ahead + i for i, size in enumerate(shape) if size > 1)
    if any(out.shape[dim] != shape[dim - ahead] for dim in dims):
        return None
    first = _offset(view, whole)
    return Entries(dims, slice(first, first + expected))
