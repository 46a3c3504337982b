"""Bytes of what ranks keep and send, and the rounds of new gradients."""

from __future__ import annotations

import itertools

import pytest

from kaisa_optim.plan.assignment import Placement, Task
from kaisa_optim.plan.facts import LayerFacts
from kaisa_optim.plan.moves import Sizes, TensorSpec, gradient_rounds


def facts(name: str, g: int = 4, column: int = 0, blocks: int = 1) -> LayerFacts:
    return LayerFacts(Task(name, 8, g, blocks=blocks), Placement(0, column))


def test_bytes_follow_the_dtype_and_the_side():
    layer = facts("x", blocks=3)._replace(itemsize=8)
    number = {"stored": 2, "own": 8, "int32": 4}
    shapes = {"matrix": (8 * 8, 8), "basis": (8 * 8, 0), "spectrum": (8, 8), "number": (1, 1)}
    for (shape, counts), dtype in itertools.product(shapes.items(), number):
        spec = TensorSpec("x", "kind", shape, dtype)
        for diagonal, count in zip((False, True), counts, strict=True):
            assert spec.bytes(layer, (8, diagonal), 2) == 3 * count * number[dtype]
    assert TensorSpec("x", "kind").bytes(layer, (8, False), None) == 3 * 64 * 8


def test_gradients_travel_with_terms():
    """Each rounded up to 16 bytes."""
    sizes, alike = Sizes((), terms=2), [facts("x"), facts("y", blocks=2)]
    assert sizes.gradients(alike) == 3 * 32 * 4 + 32
    assert sizes._replace(wire=2).gradients(alike) == 3 * 32 * 2 + 32


@pytest.mark.parametrize("limit", [1, 300, 10_000])
def test_rounds_hold_each_layer_once_by_column_and_shape(limit):
    known = {
        f"{column}.{i}": facts(f"{column}.{i}", 4 + i % 2, column)
        for column, i in itertools.product(range(2), range(5))
    }
    sizes = Sizes(())
    rounds = gradient_rounds([*known], known.__getitem__, sizes, range(6, 8), limit)
    total = sum(sizes.gradients([layer]) for layer in known.values())
    each = limit if total <= limit else limit // 2
    names = []
    for (bucket,) in rounds:
        assert bucket.size <= limit or len(bucket.items) == 1
        assert bucket.size == sum(item.size for item in bucket.items)
        for owner, size, content in bucket.items:
            assert size == sum(sizes.gradients([known[name] for name in same]) for same in content)
            assert size <= each or len(content) == 1 == len(content[0])
            for same in content:
                assert len({known[name].shape for name in same}) == 1
                assert {known[name].placement.g for name in same} == {owner - 6}
                names += same
    assert sorted(names) == [*known]
