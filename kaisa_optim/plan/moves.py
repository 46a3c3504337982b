"""Sizes of the tensors that ranks keep and send: the step and its account read the same ones."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .facts import FactorFacts, LayerFacts
from .routes import cargo_bytes, chunks, grouped, side_by_side

Shape = tuple[int, ...]

# What a state that is loaded without a tensor means for its layer.
STARTS_ANEW, IS_REFRESHED, IS_ZERO = "starts anew", "is refreshed", "is zero"


class TensorSpec(NamedTuple):
    """A tensor that is kept for each block: of a factor, or of a layer's gradient."""

    name: str
    kind: str  # as users see it in the account of memory
    shape: Callable[..., Shape | None]  # of (n, diagonal), or of (g, a); None: there is none
    dtype: str = "stored"  # "stored" as the user asked for, "own" of the arithmetic, or "int32"
    if_absent: str = IS_REFRESHED

    def size(self, sides: tuple[int, int], stored: int | None, own: int) -> int:
        """Return the bytes of one block; ``stored`` and ``own`` are bytes of a number."""
        shape = self.shape(*sides)
        number = {"stored": stored or own, "own": own, "int32": 4}[self.dtype]
        return 0 if shape is None else math.prod(shape) * number


# ---- shapes of one block ----


def matrix(n: int, diagonal: bool) -> Shape:
    return (n,) if diagonal else (n, n)


def basis(n: int, diagonal: bool) -> Shape | None:
    return None if diagonal else (n, n)


def spectrum(n: int, diagonal: bool) -> Shape:
    return (n,)


def gradient(g: int, a: int) -> Shape:
    return (g, a)


def number(*sides: int) -> Shape:
    return ()


class Sizes(NamedTuple):
    """What bytes depend on beside shapes: the rule's tensors, and bytes of their numbers.

    If the bytes of a number are ``None``, the arithmetic's apply.
    """

    of_owner: tuple[TensorSpec, ...]  # kept for each factor by its owner
    of_factor: tuple[TensorSpec, ...]  # kept for each factor by gradient workers
    of_gradient: tuple[TensorSpec, ...] = ()  # kept for each layer by gradient workers
    packed: bool = False  # a factor's state travels as a triangle
    tells_means: bool = False  # owners of A and of G tell each other mean eigenvalues
    terms: int = 2  # numbers of each block that travel with its new gradient
    shard_sums: int = 0  # numbers of each block that travel with its sharded momentum
    average: int | None = None  # bytes of a number in a running average
    stored: int | None = None  # bytes of a number in eigenvectors, inverses, products
    wire: int | None = None  # bytes of a number in factors and gradients on their way
    scaled: bool = False  # factors and gradients travel with scales, as float16 needs them

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each tensor, by name."""
        specs = (*self.of_owner, *self.of_factor, *self.of_gradient)
        return {spec.name: spec.kind for spec in specs}

    def kept_by_owner(self, factor: FactorFacts) -> list[tuple[str, int]]:
        """Return kinds and bytes of the tensors that a factor's owner keeps."""
        return _kept(self.of_owner, factor.layer, (factor.n, factor.diagonal), self.average)

    def kept_by_workers(self, factor: FactorFacts) -> list[tuple[str, int]]:
        """Return kinds and bytes of the tensors of a factor that every gradient worker keeps."""
        return _kept(self.of_factor, factor.layer, (factor.n, factor.diagonal), self.stored)

    def kept_of_gradient(self, layer: LayerFacts) -> list[tuple[str, int]]:
        """Return kinds and bytes of the tensors that every gradient worker keeps beside factors."""
        return _kept(self.of_gradient, layer, (layer.task.g, layer.task.a), self.stored)

    def state(self, factor: FactorFacts) -> int:
        """Return the bytes of a factor's state on the wire."""
        if self.packed:
            return cargo_bytes([factor.size * (self.stored or factor.layer.itemsize)])
        return cargo_bytes(size for _, size in self.kept_by_workers(factor))

    def gradients(self, alike: Sequence[LayerFacts]) -> int:
        """Return the bytes on the wire of new gradients of one shape, with terms and scales."""
        own, blocks = alike[0].itemsize, sum(layer.task.blocks for layer in alike)
        new = sum(layer.gradient for layer in alike) * (self.wire or own)
        return cargo_bytes([new, self.terms * blocks * own, self.scaled * blocks * own])


def _kept(
    specs: Iterable[TensorSpec], layer: LayerFacts, sides: tuple[int, int], stored: int | None
) -> list[tuple[str, int]]:
    blocks, own = layer.task.blocks, layer.itemsize
    return [(spec.kind, blocks * spec.size(sides, stored, own)) for spec in specs]


def gradient_buckets(
    layers: Sequence[LayerFacts], sizes: Sizes, columns: int, bucket_bytes: int
) -> list[tuple[int, list[list[list[LayerFacts]]]]]:
    """Return each column's buckets of layers on one device; a bucket's lists have one shape each.

    Columns send side by side.
    """
    by_column = grouped(layers, lambda layer: layer.placement.g % columns)
    total = sum(sizes.gradients([layer]) for layer in layers)
    limit = side_by_side(total, len(by_column), bucket_bytes)
    found = []
    for column, own in sorted(by_column.items()):
        alike = grouped(own, operator.attrgetter("shape")).values()
        shapes = (chunks(same, lambda layer: sizes.gradients([layer]), limit) for same in alike)
        found.append((column, [*chunks([*itertools.chain(*shapes)], sizes.gradients, limit)]))
    return found
