"""Buckets, and the pieces that they are cut into."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kaisa_optim.account import rounds, sum_buckets
from kaisa_optim.comm.ranks import Bucket, CopyItem, _added_up, overlaps
from kaisa_optim.plan.assignment import Placement, Task
from kaisa_optim.plan.facts import LayerFacts
from tests.core.test_distribution import exchanged
from tests.support.ranks import run


@given(st.data())
@settings(max_examples=200)
def test_buckets_are_cut_into_equal_pieces(data):
    members = range(data.draw(st.integers(0, 3)), 64, data.draw(st.integers(1, 40)))
    item = st.builds(CopyItem, st.sampled_from(members), st.integers(1, 5000), st.just(0))
    items = data.draw(st.lists(item, max_size=40))
    bucket = Bucket(items, members, 64)
    assert sorted(bucket.items) == sorted(items)
    for item, start, following in zip(bucket.items, bucket.starts, bucket.starts[1:], strict=False):
        assert start + item.size <= following
    whole = sum(-(-x.size // 16) * 16 for x in items)
    assert bucket.size == bucket.owned[-1] == bucket.pieces[-1] == whole
    sizes = [stop - start for start, stop in itertools.pairwise(bucket.pieces)]
    assert max(sizes) <= -(-whole // (16 * len(members))) * 16
    assert all(x % 16 == 0 for x in (*bucket.starts, *bucket.pieces, *bucket.owned))
    for item, start in zip(bucket.items, bucket.starts, strict=True):
        first, end = bucket.owned[item.owner : item.owner + 2]
        assert first <= start < start + item.size <= end
    # Every element of a piece has its owner, and every owner's element is in a piece.
    for rank in range(64):
        assert sum(overlaps(bucket.pieces, rank, bucket.owned)) == sizes[rank]
        assert sum(overlaps(bucket.owned, rank, bucket.pieces)) == bucket.sizes.get(rank, 0)


def test_owners_take_turns():
    owners = [Placement(0, 0), Placement(0, 2), Placement(1, 1)]
    layers = [LayerFacts(Task(str(i), 4, 4), x) for i, x in enumerate(owners)]  # 10 numbers a side
    order = [[f.owner for f in b.items] for b in sum_buckets(layers, None, 3, 4 * 30)]
    assert order == [[0, 1, 2], [0, 0, 1]]


@pytest.mark.parametrize(("sizes", "straight"), [((32, 16, 16), True), ((16, 0, 64), False)])
def test_owners_with_about_equal_parts_have_their_pieces(sizes, straight):
    copies = {rank: [size] for rank, size in enumerate(sizes) if size}
    even = {rank: [16] for rank in range(3, 6)}
    ((first, second),) = rounds([(range(3), copies), (range(3, 6), even)], int, 6, 1000)
    assert (first.pieces == first.owned) is straight
    assert second.pieces == second.owned == [0, 0, 0, 0, 16, 32, 48]


def test_sums_for_several_owners_travel_together():
    size, float32 = 4096, torch.float32
    cap = size * 4 / 2**20  # each in a bucket of its own
    each = [(owner, size, float32) for owner in range(4)]
    assert run(4, exchanged, each, cap) == [4 + 1] * 4
    # To one owner no more at once than a bucket.
    assert run(4, exchanged, [*each[:2], *each[:2]], cap) == [4 + 2] * 4
    assert run(4, exchanged, each[:1] * 4, cap) == [4 + 4] * 4
    assert run(2, exchanged, each[:2], cap) == [2 + 1] * 2


@pytest.mark.parametrize("count", range(1, 10))
def test_a_sum_is_one_tree_of_the_ranks(count):
    """The last ranks are added to the first ones, an odd one in the middle waits."""
    rows = torch.randn(count, 7)
    parts = [*rows.clone()]
    while len(parts) > 1:
        half = len(parts) // 2
        pairs = zip(parts[:half], parts[len(parts) - half :], strict=True)
        parts = [a + b for a, b in pairs] + parts[half : len(parts) - half]
    assert torch.equal(_added_up(rows), parts[0])
