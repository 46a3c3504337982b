"""Buckets of bytes on their way: which items travel together, and how they are cut.

Plain Python that knows sizes and ranks; all ranks find the same buckets.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from .assignment import Grid
from .facts import ALIGN, FactorFacts, LayerFacts, Sizes, cargo_bytes, padded

owner_of = operator.attrgetter("owner")
size_of = operator.attrgetter("size")


class CopyItem(NamedTuple):
    """Tensors that their owner sends to the other members of its group, all at once."""

    owner: int
    size: int  # in bytes
    content: Any


P = TypeVar("P", bound=CopyItem | FactorFacts)
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Bucket(Generic[P]):
    """Items that travel together, cut into an equal piece for each member of a group.

    An item has a size, and an owner: the rank that its sum goes to, or that its bytes come from.

    They travel in two hops. Sums: each member receives all terms of its piece, and sends the sum
    on to the owners. Copies: each member receives its piece from the owners, and sends it on to
    all members. So every member carries the same load, whoever owns the items.
    """

    def __init__(self, items: Iterable[P], members: Sequence[int]) -> None:
        self.items = sorted(items, key=owner_of)  # the items of each owner lie side by side
        sizes = [padded(item.size) for item in self.items]
        *self.starts, self.size = itertools.accumulate(sizes, initial=0)
        self.sizes = dict.fromkeys(members, 0)  # of all items of each owner
        for item, size in zip(self.items, sizes, strict=True):
            self.sizes[item.owner] += size
        # Bounds of the owners' items and of the pieces, in the order of the members.
        self.owned = [*itertools.accumulate(self.sizes.values(), initial=0)]
        piece = max(ALIGN, padded(-(-self.size // len(members))))
        self.pieces = [*range(0, self.size, piece)]
        self.pieces += [self.size] * (len(members) + 1 - len(self.pieces))


# Buckets that travel at the same time: one for each group of ranks, which have no rank in common.
Round = list[Bucket[CopyItem]]


def rounds(groups: Sequence[tuple[Sequence[int], list[CopyItem]]], limit: int) -> list[Round]:
    """Return members' items in rounds; a bucket has ``limit`` bytes, or a single item.

    If no member of a round owns more than twice its group's mean, the owners' parts are the pieces:
    every member has its piece from the start, and the first hop can be left out.
    """
    each = [[*chunks(items, size_of, limit)] for _, items in groups]
    divided: list[Round] = []
    for row in itertools.zip_longest(*each, fillvalue=[]):
        buckets = [Bucket(x, members) for x, (members, _) in zip(row, groups, strict=True)]
        if all(max(b.sizes.values()) * len(b.sizes) <= 2 * b.size for b in buckets):
            for bucket in buckets:
                bucket.pieces = bucket.owned
        divided.append(buckets)
    return divided


def overlaps(bounds: Sequence[int], at: int, others: Sequence[int]) -> list[int]:
    """Return how much of the interval ``at`` between bounds lies in each of the other intervals."""
    start, stop = bounds[at], bounds[at + 1]
    return [max(0, min(stop, b) - max(start, a)) for a, b in itertools.pairwise(others)]


def all_reduced(size: int, world: int) -> int:
    """Return the bytes that an all-reduce of so many bytes brings to each rank."""
    return 2 * size * (world - 1) // world


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


def in_turn(lists: Iterable[Sequence[T]]) -> list[T]:
    """Return the first of each list, then the second of each, and so on."""
    items = itertools.chain(*itertools.zip_longest(*lists))
    return [item for item in items if item is not None]


def sum_buckets(
    layers: Iterable[LayerFacts], wire: int | None, world: int, limit: int
) -> Iterator[Bucket[FactorFacts]]:
    """Yield buckets of the layers' sums, of one place each; owners take turns."""
    factors = itertools.chain.from_iterable([layer.factors for layer in layers])
    for same in grouped(factors, lambda factor: factor.layer.place).values():
        numbers = limit // (wire or same[0].layer.itemsize)
        turns = in_turn(grouped(same, owner_of).values())
        yield from (Bucket(chunk, range(world)) for chunk in chunks(turns, size_of, numbers))


def state_rounds(
    factors: Iterable[FactorFacts], sizes: Sizes, grid: Grid, limit: int
) -> list[Round]:
    """Return the rounds in which owners send new state along the columns; factors are content.

    Owners in a column send side by side, and have ``limit`` bytes together at a time.
    """
    groups = []
    for column, members in grouped(factors, lambda f: f.owner % grid.columns).items():
        by_owner = grouped(members, owner_of)
        share = limit
        if sum(map(sizes.state, members)) > limit:
            share //= len(by_owner)
        turns = in_turn([*chunks(owned, sizes.state, share)] for owned in by_owner.values())
        copies = [CopyItem(x[0].owner, sum(map(sizes.state, x)), x) for x in turns]
        groups.append((grid.workers_of(column), copies))
    return rounds(groups, limit)


def gradient_rounds(
    layers: Sequence[T],
    facts_of: Callable[[T], LayerFacts],
    sizes: Sizes,
    row: Sequence[int],
    limit: int,
) -> list[Round]:
    """Return the rounds in which a row of ranks hands out new gradients of layers on one device.

    Content are lists of layers of one shape. Ranks send side by side, and have ``limit`` bytes
    together at a time.
    """

    def size(alike: list[T]) -> int:
        """Return the bytes on the wire of new gradients of one shape, with terms."""
        facts = [facts_of(layer) for layer in alike]
        itemsize, blocks = facts[0].itemsize, sum(x.task.blocks for x in facts)
        new = sum(x.gradient for x in facts) * (sizes.wire or itemsize)
        return cargo_bytes([new, sizes.terms * blocks * itemsize])

    by_column = grouped(layers, lambda layer: facts_of(layer).placement.g % len(row))
    share = limit
    if sum(size([layer]) for layer in layers) > limit:
        share //= len(by_column)
    turns: list[list[CopyItem]] = []
    for column, members in sorted(by_column.items(), key=operator.itemgetter(0)):
        alike = grouped(members, lambda layer: facts_of(layer).shape).values()
        shapes = itertools.chain(*(chunks(same, lambda x: size([x]), share) for same in alike))
        buckets = chunks([*shapes], size, share)
        turns.append([CopyItem(row[column], sum(map(size, x)), x) for x in buckets])
    return rounds([(row, in_turn(turns))], limit)
