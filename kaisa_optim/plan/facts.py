"""Plain facts about layers, their factors and tensors, from shapes and placements alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from .assignment import Placement, Task

Shape = tuple[int, ...]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

WIDEST = 16384  # the widest side with a factor in full
_NARROW = 64  # a side so many times as wide as the other costs as many times Adam's moments
_SMALL = 513  # a side up to which that costs little: heads of 512 features, with the bias


def widest(inputs: int, outputs: int) -> int:
    """Return the widest side, of a matrix of these sizes, with a factor in full by default."""
    # Two n² stand beside the 2 n m of Adam's moments: for rank 16 on 4,096, 256 times as many.
    return min(WIDEST, max(_SMALL, _NARROW * min(inputs, outputs) - 1))


# ---- layers and factors ----


class ShardPlaces(NamedTuple):
    """The places of one parameter's parts; ranks are numbered in K-FAC's group."""

    dim: int
    extents: tuple[tuple[int, int], ...]  # each rank's start and length along ``dim``
    replicas: tuple[tuple[int, ...], ...]  # for each rank, the copy that its part belongs to
    shape: Shape  # of the whole

    def sends(self, source: int, to: int) -> bool:
        """Return whether ``source`` sends ``to`` a part: of the same copy, and not empty."""
        return self.replicas[source] == self.replicas[to] and bool(self.extents[source][1])

    def part(self, whole: Any, rank: int) -> Any:
        return whole.narrow(self.dim, *self.extents[rank])

    def count(self, rank: int) -> int:
        """Return the number of elements of a rank's part."""
        sizes = self.shape[: self.dim] + self.shape[self.dim + 1 :]
        return self.extents[rank][1] * math.prod(sizes)


class LayerFacts(NamedTuple):
    """One layer's task, and the ranks that do it."""

    task: Task
    placement: Placement
    itemsize: int = 4  # bytes of a number in the layer's arithmetic
    device: Hashable = None  # layers of one device travel together
    sections: int = 1  # counts of rows that ranks compare
    frozen: bool = False  # a frozen layer costs its numbers in the status exchange alone
    shards: tuple[tuple[ShardPlaces, int], ...] = ()  # of its parameters, each with its itemsize
    tied: bool = False  # uses in both directions have sums of their own

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def shape(self) -> Hashable:
        """The sizes that all layers of one stack have."""
        return self.task.a, self.task.g, self.task.diagonal_a, self.task.diagonal_g

    @property
    def place(self) -> Hashable:
        """The key of layers whose sums travel together."""
        return self.device, self.itemsize

    @property
    def factors(self) -> tuple[FactorFacts, FactorFacts]:
        task, placement = self.task, self.placement
        a = FactorFacts(self, "a", placement.a, task.a, task.diagonal_a)
        return a, FactorFacts(self, "g", placement.g, task.g, task.diagonal_g)

    @property
    def gradient(self) -> int:
        """The number of elements of the layer's gradient."""
        return self.task.blocks * self.task.g * self.task.a


class FactorFacts(NamedTuple):
    """One factor of a layer; an item of a bucket of sums."""

    layer: LayerFacts
    side: str  # "a" or "g"
    owner: int
    n: int
    diagonal: bool

    @property
    def size(self) -> int:
        """The count of numbers that travel: one triangle of a symmetric matrix."""
        return self.layer.task.blocks * (self.n if self.diagonal else self.n * (self.n + 1) // 2)

    @property
    def elements(self) -> int:
        return self.layer.task.blocks * self.n ** (1 if self.diagonal else 2)

    @property
    def operations(self) -> int:
        """Operations of its decomposition, up to a constant that is about the same for all."""
        return self.elements * (1 if self.diagonal else self.n)


# ---- tensors that a rule keeps ----


class Work(NamedTuple):
    """The operations of one rule, by their counts."""

    decomposition: str  # the operation of a hardware profile that makes a factor's state
    two_sided: int  # products of a gradient with matrices of both sides
    # Polynomials that make a gradient orthogonal, by its shorter side.
    polynomials: Callable[[int], int] | None = None


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
        shape = self.shape_of(sides)
        itemsizes = {"stored": stored or layer.itemsize, "own": layer.itemsize, "int32": 4}
        numbers = 0 if shape is None else math.prod(shape)
        return layer.task.blocks * numbers * itemsizes[self.dtype]


OF_AVERAGES = (
    TensorSpec("average", "factors", if_absent=STARTS_ANEW),
    TensorSpec("weight", "counters", "number", "own", STARTS_ANEW),
    TensorSpec("rejected", "counters", "number", "int32", IS_ZERO),
    TensorSpec("stale", "counters", "number", "int32", IS_ZERO),  # flags that are still to be told
)


class Sizes(NamedTuple):
    """The facts beside shapes that bytes depend on: the rule's tensors, and sizes of numbers."""

    # If the bytes of a number are ``None``, the arithmetic's apply.
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


# ---- items that travel ----

# Items are padded to this number of elements, and tensors to this number of bytes. Below 8, views
# of bytes as float64 would raise: they begin at multiples of their item's size.
ALIGN = 16


def padded(size: int) -> int:
    """Return the next multiple of :data:`ALIGN`."""
    return -(-size // ALIGN) * ALIGN


def cargo_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes that tensors of these sizes take on the wire together."""
    return sum(map(padded, sizes))


def all_reduced(size: int, world: int) -> int:
    """Return the bytes that an all-reduce of so many bytes brings to each rank."""
    return 2 * size * (world - 1) // world


def grouped(items: Iterable[T], key_of: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by key, in the order of each key's first item."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key_of(item), []).append(item)
    return groups


def chunks(items: Iterable[T], size_of: Callable[[T], int], limit: float) -> Iterator[list[T]]:
    """Yield neighbours together, up to ``limit``; a single item may be larger."""
    chunk: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if chunk and total + size > limit:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size
    if chunk:
        yield chunk
