"""Buckets of bytes on their way: which items travel together, and how they are cut.

Plain Python that knows sizes and ranks; all ranks find the same buckets.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

# Items are padded to this number of elements, and tensors to this number of bytes: views of any
# dtype can begin there.
_ALIGN = 16
_owner = operator.attrgetter("owner")


class Sized(Protocol):
    """An item of a bucket: its size, and the rank that its sum goes to or its bytes come from."""

    @property
    def owner(self) -> int: ...

    @property
    def size(self) -> int: ...


P = TypeVar("P", bound=Sized)
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Bucket(Generic[P]):
    """Items that travel together, cut into an equal piece for each member of a group.

    They travel in two hops. Sums: each member receives all terms of its piece, and sends the sum
    on to the owners. Copies: each member receives its piece from the owners, and sends it on to
    all members. So every member carries the same load, whoever owns the items.
    """

    def __init__(self, items: Iterable[P], members: Sequence[int]) -> None:
        self.items = sorted(items, key=_owner)  # the items of each owner lie side by side
        padded = [_padded(item.size) for item in self.items]
        *self.starts, self.size = itertools.accumulate(padded, initial=0)
        self.sizes = dict.fromkeys(members, 0)  # of all items of each owner
        for item, size in zip(self.items, padded, strict=True):
            self.sizes[item.owner] += size
        # Bounds of the owners' items and of the pieces, in the order of the members.
        self.owned = [*itertools.accumulate(self.sizes.values(), initial=0)]
        piece = _padded(-(-self.size // len(members)))
        self.pieces = [min(self.size, i * piece) for i in range(len(members) + 1)]
        # Whether no member owns more than twice the mean.
        self.is_even = max(self.sizes.values()) * len(members) <= 2 * self.size


def overlaps(bounds: Sequence[int], at: int, others: Sequence[int]) -> list[int]:
    """Return how much of the interval ``at`` between bounds lies in each of the other intervals."""
    start, stop = bounds[at], bounds[at + 1]
    return [max(0, min(stop, b) - max(start, a)) for a, b in itertools.pairwise(others)]


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
    """Yield items of one place together, up to ``bucket_bytes``; owners take turns."""
    for same in grouped(items, place_of).values():
        limit = bucket_bytes // itemsize_of(same[0])
        turns = in_turn(grouped(same, _owner).values())
        yield from chunks(turns, lambda item: item.size, limit)


def side_by_side(total: int, senders: int, limit: int) -> int:
    """Return how much each sender may put into a call: a part of ``limit`` if ``total`` is more."""
    return limit if total <= limit else limit // senders


def in_turn(lists: Iterable[Sequence[T]]) -> list[T]:
    """Return the first of each list, then the second of each, and so on."""
    items = itertools.chain(*itertools.zip_longest(*lists))
    return [item for item in items if item is not None]


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
