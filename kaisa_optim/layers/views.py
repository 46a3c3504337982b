"""The place of a view in its parameter, a matrix or a stack of matrices."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """A view of a matrix or of a stack of matrices."""

    blocks: slice  # the matrices that the view has
    transposed: bool
    first: int | None  # the first row of the matrix that the view has; None: all rows


def place_of(view: Tensor, whole: Tensor) -> Place | None:
    """Return the place of a view of ``whole``, a matrix or stack; ``None`` for other views."""
    if whole.dim() not in (2, 3) or not 2 <= view.dim() <= whole.dim():
        return None
    offset, strides = int(view.storage_offset()) - int(whole.storage_offset()), whole.stride()
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
