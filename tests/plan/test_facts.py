"""Facts about layers, from shapes alone."""

from __future__ import annotations

import pytest

from kaisa_optim.plan.assignment import Placement, Task
from kaisa_optim.plan.facts import LayerFacts


@pytest.mark.parametrize("blocks", [1, 3])
def test_numbers_of_factors_and_gradients(blocks):
    layer = LayerFacts(Task("x", 5, 4, True, False, blocks), Placement(1, 2))
    a, g = layer.factors
    assert (a.name, a.owner, a.sides) == (("x", "a"), 1, (5, True))
    assert (g.name, g.owner, g.sides) == (("x", "g"), 2, (4, False))
    assert (a.size, a.elements, a.operations) == (5 * blocks,) * 3
    assert (g.size, g.elements, g.operations) == (10 * blocks, 16 * blocks, 64 * blocks)
    assert layer.gradient == 20 * blocks


def test_stacks_have_one_shape_and_sums_one_place():
    one = LayerFacts(Task("x", 5, 4), Placement(0, 0), 4, "cpu")
    other = LayerFacts(Task("y", 5, 4, blocks=3), Placement(1, 1), 4, "cpu", frozen=True)
    assert one.shape == other.shape and one.place == other.place
    for task in (Task("x", 4, 5), Task("x", 5, 4, diagonal_a=True)):
        assert one._replace(task=task).shape != one.shape
    assert one._replace(itemsize=8).place != one.place != one._replace(device="cuda").place
