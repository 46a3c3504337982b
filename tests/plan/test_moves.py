"""Bytes of what ranks keep and send, and the buckets of new gradients."""

from __future__ import annotations

import itertools

import pytest

from kaisa_optim.plan.assignment import Placement, Task
from kaisa_optim.plan.facts import LayerFacts
from kaisa_optim.plan.moves import Sizes, TensorSpec, gradient_buckets


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
def test_buckets_hold_each_layer_once_by_column_and_shape(limit):
    known = {
        f"{column}.{i}": facts(f"{column}.{i}", 4 + i % 2, column)
        for column, i in itertools.product(range(2), range(5))
    }
    sizes = Sizes(())
    found = gradient_buckets(known, [*known], sizes, 2, limit)
    assert [column for column, _ in found] == [0, 1]
    total = sum(sizes.gradients([layer]) for layer in known.values())
    each = limit if total <= limit else limit // 2
    for column, buckets in found:
        own = []
        for size, bucket in buckets:
            counted = [sizes.gradients([known[name] for name in same]) for same in bucket]
            assert size == sum(counted)
            assert size <= each or len(bucket) == 1 == len(bucket[0])
            for same in bucket:
                assert len({known[name].shape for name in same}) == 1
                own += same
        assert sorted(own) == [name for name in known if name.startswith(str(column))]
