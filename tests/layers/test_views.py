"""The place of a view in its matrix or stack of matrices."""

from __future__ import annotations

import pytest
import torch

from kaisa_optim.layers.watch import Place, place_of

ALL = slice(None)
MATRIX = {
    "itself": (lambda w: w, Place(ALL, False, None)),
    "transposed": (lambda w: w.mT, Place(ALL, True, None)),
    "rows": (lambda w: w[2:5], Place(ALL, False, 2)),
    "rows, transposed": (lambda w: w[2:5].mT, Place(ALL, True, 2)),
    "first columns": (lambda w: w[:, :2], None),
    "other columns": (lambda w: w[:, 1:3], None),
    "every second row": (lambda w: w[::2], None),
    "a row alone": (lambda w: w[1], None),
}
STACK = {
    "itself": (lambda w: w, Place(ALL, False, None)),
    "transposed": (lambda w: w.mT, Place(ALL, True, None)),
    "blocks": (lambda w: w[1:3], Place(slice(1, 3), False, None)),
    "one block": (lambda w: w[2].mT, Place(slice(2, 3), True, None)),
    "rows of a block": (lambda w: w[2, 1:4], Place(slice(2, 3), False, 1)),
    "rows of all": (lambda w: w[:, 1:4], None),
    "every second block": (lambda w: w[::2], None),
}


@pytest.mark.parametrize(("view", "place"), MATRIX.values(), ids=MATRIX)
@pytest.mark.parametrize("first", [0, 3])
def test_views_of_a_matrix(view, place, first):
    """Also of a matrix that is itself a part of some storage."""
    whole = torch.zeros(first + 6, 4)[first:]
    assert place_of(view(whole), whole) == place


@pytest.mark.parametrize(("view", "place"), STACK.values(), ids=STACK)
def test_views_of_a_stack(view, place):
    whole = torch.zeros(4, 6, 5)
    assert place_of(view(whole), whole) == place
