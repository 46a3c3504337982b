"""Buckets, and the ranks that their parts go by."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kaisa_optim.plan.routes import cut
from tests.core.test_distribution import exchanged
from tests.support.ranks import run


@given(st.data())
@settings(max_examples=200)
def test_buckets_are_cut_into_fair_parts(data):
    world = data.draw(st.integers(1, 64))
    segment = st.tuples(st.integers(0, world - 1), st.integers(1, 400).map(lambda n: 16 * n))
    segments = tuple(sorted(data.draw(st.lists(segment, min_size=1, max_size=40))))
    pieces = cut(segments, world)
    at = 0
    load = [0] * world
    arrives = [0] * world  # from others, be it to be added up or as a sum
    for piece in pieces:
        assert piece.start == at < piece.stop
        at = piece.stop
        load[piece.adder] += piece.stop - piece.start
        arrives[piece.owner] += (piece.stop - piece.start) * (piece.adder != piece.owner)
        assert piece.start % 16 == piece.stop % 16 == 0
    total = sum(size for _, size in segments)
    assert at == total
    mean = math.ceil(total / (16 * world)) * 16
    assert max(load) <= 2 * mean
    for rank in range(world):
        arrives[rank] += load[rank] * (world - 1)
        owned = sum(size for owner, size in segments if owner == rank)
        assert arrives[rank] <= (total if owned > 2 * mean else 2 * mean * (world - 1))
    # Every element has its owner.
    ends = 0
    for owner, size in segments:
        ends += size
        inside = [p for p in pieces if ends - size <= p.start < ends]
        assert inside[-1].stop == ends
        assert {p.owner for p in inside} == {owner}


def test_what_is_passed_on_to_several_owners_travels_together():
    size, float32 = 4096, torch.float32
    cap = size * 4 / 2**20  # each in a bucket of its own, which others add up
    each = [(owner, size, float32) for owner in range(4)]
    assert run(4, exchanged, each, cap) == [4 + 1] * 4
    # To one owner no more at once than a bucket.
    assert run(4, exchanged, [*each[:2], *each[:2]], cap) == [4 + 2] * 4
    assert run(4, exchanged, each[:1] * 4, cap) == [4 + 4] * 4
    # Nothing is passed on where owners add up all that is theirs.
    assert run(2, exchanged, each[:2], cap) == [2] * 2
