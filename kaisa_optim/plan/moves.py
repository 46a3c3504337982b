"""The tensors that ranks keep and send, and their buckets: the step and its account share them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from .assignment import Grid
from .facts import FactorFacts, LayerFacts
from .routes import (
    Bucket,
    CopyItem,
    Round,
    cargo_bytes,
    chunks,
    grouped,
    in_turn,
    owner_of,
    rounds,
    side_by_side,
    size_of,
)

T = TypeVar("T")
Shape = tuple[int, ...]

# What a state that is loaded without a tensor means for its layer.
STARTS_ANEW, IS_REFRESHED, IS_ZERO = "starts anew", "is refreshed", "is zero"
# Shapes of one block, of a factor's size and whether it is diagonal, or of both sides' sizes.
_SHAPES: dict[str, Callable[[int, int], Shape | None]] = {
    "matrix": lambda n, diagonal: (n,) if diagonal else (n, n),
    "basis": lambda n, diagonal: None if diagonal else (n, n),
    "spectrum": lambda n, diagonal: (n,),
    "gradient": lambda g, a: (g, a),
    "number": lambda *_: (),
}


class TensorSpec(NamedTuple):
    """A tensor that is kept for each block: of a factor, or of a layer's gradient."""

    name: str
    kind: str  # as users see it in the account of memory
    shape: str = "matrix"  # a key of _SHAPES
    dtype: str = "stored"  # "stored" as the user asked for, "own" of the arithmetic, or "int32"
    if_absent: str = IS_REFRESHED

    def shape_of(self, sides: tuple[int, int]) -> Shape | None:
        """Return the shape of one block; ``None``: a diagonal factor has no such tensor."""
        return _SHAPES[self.shape](*sides)

    def bytes(self, layer: LayerFacts, sides: tuple[int, int], stored: int | None) -> int:
        """Return the bytes of all blocks; ``stored`` are bytes of a number."""
        shape, own = self.shape_of(sides), layer.itemsize
        number = {"stored": stored or own, "own": own, "int32": 4}[self.dtype]
        return 0 if shape is None else layer.task.blocks * math.prod(shape) * number


OF_AVERAGES = (
    TensorSpec("average", "factors", if_absent=STARTS_ANEW),
    TensorSpec("weight", "counters", "number", "own", STARTS_ANEW),
    TensorSpec("rejected", "counters", "number", "int32", IS_ZERO),
    TensorSpec("stale", "counters", "number", "int32", IS_ZERO),  # flags that are still to be told
)


class Sizes(NamedTuple):
    """The facts beside shapes that bytes depend on: the rule's tensors, and bytes of their numbers.

    If the bytes of a number are ``None``, the arithmetic's apply.
    """

    of_factor: tuple[TensorSpec, ...]  # a decomposition's results; gradient workers keep them
    of_gradient: tuple[TensorSpec, ...] = ()  # kept by gradient workers for each layer
    of_owner: tuple[TensorSpec, ...] = OF_AVERAGES  # kept for each factor by its owner
    packed: bool = False  # a factor's state travels as a triangle
    tells_means: bool = False  # owners of A and of G tell each other mean eigenvalues
    terms: int = 0  # numbers of each block that travel with its new gradient
    shard_sums: int = 0  # numbers of each block that travel with its sharded momentum
    average: int | None = None  # bytes of a number in a running average
    stored: int | None = None  # bytes of a number in eigenvectors, inverses, products
    wire: int | None = None  # bytes of a number in factors and gradients on their way
    units: bool = False  # ranks agree on a unit of each sum of G

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return (*self.of_owner, *self.of_factor, *self.of_gradient)

    def kept(self, layer: LayerFacts) -> Iterator[tuple[int | None, str, int]]:
        """Yield kinds and bytes of a layer's tensors, each with the rank that keeps it.

        ``None`` stands for all gradient workers.
        """
        for factor in layer.factors:
            for spec in self.of_owner:
                yield factor.owner, spec.kind, spec.bytes(layer, factor.sides, self.average)
            for spec in self.of_factor:
                yield None, spec.kind, spec.bytes(layer, factor.sides, self.stored)
        for spec in self.of_gradient:
            yield None, spec.kind, spec.bytes(layer, (layer.task.g, layer.task.a), self.stored)

    def state(self, factor: FactorFacts) -> int:
        """Return the bytes of a factor's state on the wire."""
        layer, sides = factor.layer, factor.sides
        if self.packed:
            return cargo_bytes([factor.size * (self.stored or layer.itemsize)])
        return cargo_bytes(spec.bytes(layer, sides, self.stored) for spec in self.of_factor)

    def gradients(self, alike: Sequence[LayerFacts]) -> int:
        """Return the bytes on the wire of new gradients of one shape, with terms."""
        own, blocks = alike[0].itemsize, sum(layer.task.blocks for layer in alike)
        new = sum(layer.gradient for layer in alike) * (self.wire or own)
        return cargo_bytes([new, self.terms * blocks * own])


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
        share = side_by_side(sum(map(sizes.state, members)), len(by_owner), limit)
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
        return sizes.gradients([facts_of(layer) for layer in alike])

    by_column = grouped(layers, lambda layer: facts_of(layer).placement.g % len(row))
    share = side_by_side(sum(size([layer]) for layer in layers), len(by_column), limit)
    turns: list[list[CopyItem]] = []
    for column, members in sorted(by_column.items(), key=operator.itemgetter(0)):
        alike = grouped(members, lambda layer: facts_of(layer).shape).values()
        shapes = itertools.chain(*(chunks(same, lambda x: size([x]), share) for same in alike))
        buckets = chunks([*shapes], size, share)
        turns.append([CopyItem(row[column], sum(map(size, x)), x) for x in buckets])
    return rounds([(row, in_turn(turns))], limit)
