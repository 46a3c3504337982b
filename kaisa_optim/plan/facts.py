"""Plain facts about layers and their factors, from shapes and placements alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from .assignment import Placement, Task

Side = str  # "a" or "g"
FactorName = tuple[str, Side]  # a layer's name, and the side of its factor

WIDEST = 16384  # the widest side with a factor in full
_NARROW = 64  # a side so many times as wide as the other costs as many times Adam's moments
_SMALL = 513  # a side up to which that costs little: heads of 512 features, with the bias


def widest(inputs: int, outputs: int) -> int:
    """Return the widest side, of a matrix of these sizes, with a factor in full by default.

    Two square matrices of side n stand beside the 2 n m numbers of Adam's moments. Of an adapter of
    rank 16 on 4,096 features they are 256 times as many.
    """
    return min(WIDEST, max(_SMALL, _NARROW * min(inputs, outputs) - 1))


class Work(NamedTuple):
    """The operations of one rule, by their counts."""

    decomposition: str  # the operation of a hardware profile that makes a factor's state
    two_sided: int  # products of a gradient with matrices of both sides
    # Polynomials that make a gradient orthogonal, by its shorter side.
    polynomials: Callable[[int], int] | None = None


class Division(Protocol):
    """How one parameter lies over the ranks."""

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard."""

    def sends(self, source: int, to: int) -> bool:
        """Return whether rank ``to`` takes a shard from rank ``source``."""


class LayerFacts(NamedTuple):
    """One layer's task, and the ranks that do it."""

    task: Task
    placement: Placement
    itemsize: int = 4  # bytes of a number in the layer's arithmetic
    device: Hashable = None  # layers of one device travel together
    sections: int = 1  # counts of rows that ranks compare
    frozen: bool = False  # a frozen layer costs its numbers in the status exchange alone
    shards: tuple[tuple[Division, int], ...] = ()  # of its parameters, each with its itemsize
    tied: bool = False  # uses in both directions have sums of their own

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def shape(self) -> Hashable:
        """The sizes that layers of one stack have alike."""
        task = self.task
        return task.a, task.g, task.diagonal_a, task.diagonal_g

    @property
    def place(self) -> Hashable:
        """The key of layers whose sums travel together."""
        return self.device, self.itemsize

    @property
    def factors(self) -> tuple[FactorFacts, FactorFacts]:
        task, placement = self.task, self.placement
        return (
            FactorFacts(self, "a", placement.a, task.a, task.diagonal_a),
            FactorFacts(self, "g", placement.g, task.g, task.diagonal_g),
        )

    @property
    def gradient(self) -> int:
        """The number of elements of the layer's gradient."""
        return self.task.blocks * self.task.g * self.task.a


class FactorFacts(NamedTuple):
    """One factor of a layer; an item of :class:`routes.Bucket`."""

    layer: LayerFacts
    side: Side
    owner: int
    n: int
    diagonal: bool

    @property
    def name(self) -> FactorName:
        return self.layer.name, self.side

    @property
    def sides(self) -> tuple[int, bool]:
        return self.n, self.diagonal

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
