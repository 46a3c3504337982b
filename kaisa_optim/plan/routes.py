"""The ways of bytes: which rank adds up or passes on which part, and how much travels at once.

Plain Python that knows sizes and ranks; all ranks find the same ways.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

# Items are padded to this number of elements, and tensors to this number of bytes: views of any
# dtype can begin there.
_ALIGN = 16
_owner = operator.itemgetter(0)  # of a segment


class Sized(Protocol):
    """An item of a bucket: its size and its owner."""

    @property
    def owner(self) -> int: ...

    @property
    def size(self) -> int: ...


P = TypeVar("P", bound=Sized)
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Shard(NamedTuple):
    """A part of a flat buffer on its way."""

    start: int
    stop: int
    adder: int  # the rank that adds it up, or that passes it on
    owner: int  # the rank that it ends at, or that it comes from


@functools.lru_cache(maxsize=1024)
def cut(segments: tuple[tuple[int, int], ...], world: int) -> tuple[Shard, ...]:
    """Return which rank adds up which part of a bucket of ``(owner, size)`` segments.

    Owners add up their own segments, unless one owns more than twice the mean: the terms of all
    ranks would come to that owner alone. Other ranks then add up so much of that owner's segments
    that the owner receives, with their sums, as much as any other rank. So no rank receives more
    than about twice the bucket, for any owners.
    """
    # In a slot of ResNet-50, the busiest rank receives 38 MB by this way, and 75 MB, 296 MB and
    # 1,224 MB (4, 16 and 64 ranks) if owners add up all of their own. GPT-2 at 16 ranks: 65 and
    # 257 MB. Bytes by plan/account.py, gathering every 10 steps.
    total = sum(size for _, size in segments)
    owned = [0] * world
    for owner, size in segments:
        owned[owner] += size
    mean = _padded(-(-total // world))
    left = owned.copy()  # how much each owner still adds up of its own
    for rank in range(world):
        if owned[rank] > 2 * mean:  # never in a world of two ranks
            left[rank] = (total - owned[rank]) // ((world - 2) * _ALIGN) * _ALIGN
    helpers = [rank for rank in range(world) if left[rank] == owned[rank]]
    rest = total - sum(left)
    level = _padded(-(-(rest + sum(owned[rank] for rank in helpers)) // len(helpers)))
    room = {rank: level - owned[rank] for rank in helpers if level > owned[rank]}
    pieces = []
    start = 0
    for owner, size in segments:
        stop, own = start + size, min(size, left[owner])
        if own:
            pieces.append(Shard(start, start + own, owner, owner))
            left[owner] -= own
        start += own
        while start < stop:
            helper = next(iter(room))
            step = min(stop - start, room[helper])
            pieces.append(Shard(start, start + step, helper, owner))
            start += step
            room[helper] -= step
            if not room[helper]:
                del room[helper]
    return tuple(pieces)


@functools.lru_cache(maxsize=1024)
def added_up(segments: tuple[tuple[int, int], ...], world: int) -> tuple[list[int], Counter[int]]:
    """Return how much each rank adds up of a bucket, and how much owners get from other adders.

    Nobody may change the answers, which are kept.
    """
    sizes, passed_on = [0] * world, Counter[int]()
    for piece in cut(segments, world):
        size = piece.stop - piece.start
        sizes[piece.adder] += size
        if piece.adder != piece.owner:
            passed_on[piece.owner] += size
    return sizes, passed_on


def segments_of(items: Iterable[Sized]) -> tuple[tuple[int, int], ...]:
    """Return owners and sizes of a bucket's items, as they lie in it: sorted by owner."""
    return tuple(sorted([(item.owner, _padded(item.size)) for item in items], key=_owner))


class Bucket(Generic[P]):
    """Items that travel together, and the way of each piece."""

    def __init__(self, items: list[P], world: int) -> None:
        self.items = items
        # Sort by owner: segments that owners add up themselves then need no reordering.
        order = sorted(range(len(items)), key=lambda i: items[i].owner)
        self.start: dict[int, int] = {}
        segments, at = [], 0
        for i in order:
            size = _padded(items[i].size)
            self.start[i] = at
            segments.append((items[i].owner, size))
            at += size
        self.size = at
        self.pieces = cut(tuple(segments), world)
        self.to_add: list[list[Shard]] = [[] for _ in range(world)]  # by rank
        self.owned = [(0, 0)] * world  # start and stop of each rank's items
        for piece in self.pieces:
            self.to_add[piece.adder].append(piece)
            start, stop = self.owned[piece.owner]
            self.owned[piece.owner] = (start if stop else piece.start), piece.stop
        # Elements to add up, by rank, and those that owners get from other adders.
        self.sizes, self.passed_on = added_up(tuple(segments), world)


class Moves(NamedTuple):
    """Which parts of a flat buffer a rank sends and receives, in the order of the other ranks."""

    outgoing: list[tuple[int, int]]
    sizes_out: list[int]
    incoming: list[tuple[int, int]]
    sizes_in: list[int]


def _moves(
    outgoing: Iterable[tuple[int, Shard]], incoming: Iterable[tuple[int, Shard]], world: int
) -> Moves:
    """Return the moves of pieces, each given with the rank that it goes to or comes from."""
    parts, sizes = [], []
    for pairs in (outgoing, incoming):
        by_rank: dict[int, list[tuple[int, int]]] = {}
        for rank, piece in pairs:
            own = by_rank.setdefault(rank, [])
            if own and own[-1][1] == piece.start:  # neighbours travel as one
                own[-1] = own[-1][0], piece.stop
            else:
                own.append((piece.start, piece.stop))
        parts.append([part for rank in sorted(by_rank) for part in by_rank[rank]])
        counts = [0] * world
        for rank, own in by_rank.items():
            counts[rank] = sum(stop - start for start, stop in own)
        sizes.append(counts)
    return Moves(parts[0], sizes[0], parts[1], sizes[1])


@functools.lru_cache(maxsize=1024)
def owner_to_adder(pieces: tuple[Shard, ...], me: int, world: int) -> Moves:
    """Return the moves of pieces to the ranks that pass them on."""
    away = [p for p in pieces if p.adder != p.owner]
    outgoing = [(p.adder, p) for p in away if p.owner == me]
    return _moves(outgoing, [(p.owner, p) for p in away if p.adder == me], world)


@functools.lru_cache(maxsize=1024)
def adder_to_all(pieces: tuple[Shard, ...], members: tuple[int, ...], me: int, world: int) -> Moves:
    """Return the moves of pieces from the ranks that pass them on to all members."""
    mine = [p for p in pieces if p.adder == me]
    outgoing = [(rank, p) for rank in members if rank != me for p in mine if p.owner != rank]
    incoming = [(p.adder, p) for p in pieces if me not in (p.adder, p.owner)]
    return _moves(outgoing, incoming, world)


@functools.lru_cache(maxsize=1024)
def route(members: tuple[int, ...], segments: tuple[tuple[int, int], ...]) -> tuple[Shard, ...]:
    """Return which member passes on which part of the roots' bytes."""
    place = {rank: i for i, rank in enumerate(members)}
    pieces = cut(tuple((place[root], size) for root, size in segments), len(members))
    return tuple(Shard(p.start, p.stop, members[p.adder], members[p.owner]) for p in pieces)


def cargo_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes that tensors of these sizes take on the wire together."""
    return sum(map(_padded, sizes))


def chunks(
    items: Sequence[Any], size_of: Callable[[Any], int], limit: float
) -> Iterator[list[Any]]:
    """Yield neighbours together, up to ``limit``; a single item may be larger."""
    chunk: list[Any] = []
    size = 0
    for item in items:
        own = size_of(item)
        if chunk and size + own > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += own
    if chunk:
        yield chunk


def grouped(items: Iterable[T], key_of: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by key, in the order of each key's first item."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key_of(item), []).append(item)
    return groups


def in_buckets(
    items: Iterable[P],
    place_of: Callable[[P], Hashable],
    itemsize_of: Callable[[P], int],
    bucket_bytes: int,
) -> Iterator[list[P]]:
    """Yield items of one place together, up to ``bucket_bytes``."""
    for same in grouped(items, place_of).values():
        limit = bucket_bytes // itemsize_of(same[0])
        yield from chunks(same, lambda item: item.size, limit)


def side_by_side(total: int, senders: int, limit: int) -> int:
    """Return how much each sender may put into a call: a part of ``limit`` if ``total`` is more."""
    return limit if total <= limit else limit // senders


def in_turn(lists: Iterable[Sequence[T]]) -> list[T]:
    """Return the first of each list, then the second of each, and so on."""
    items = itertools.chain(*itertools.zip_longest(*lists))
    return [item for item in items if item is not None]


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
