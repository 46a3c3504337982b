"""The part of a pass that statistics read: every n-th example, or position.

A strided slice is a view, follows from a count that all ranks know, and draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Part(NamedTuple):
    """A slice of one dimension that a layer's input and output gradient have alike."""

    counts: int = 0  # 0: the dimension counts examples, 1: positions
    dim: int = 0
    start: int = 0
    stride: int = 1
    whole: int = 1
    taken: int = 1

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of a whole tensor; a tensor that is this part already stays as it is."""
        if self.stride == 1 or tensor.shape[self.dim] == self.taken:
            return tensor
        return tensor[(slice(None),) * self.dim + (slice(self.start, None, self.stride),)]

    def weighted(self, total: Tensor) -> Tensor:
        """Scale a sum over the part in place, so that it stands for the whole."""
        return total if self.whole == self.taken else total.mul_(self.whole / self.taken)

    def whole_counts(self, batch: int, positions: int) -> tuple[int, int]:
        """Return the whole's numbers of examples and positions, given the part's."""
        counts = [batch, positions]
        counts[self.counts] = counts[self.counts] * self.whole // self.taken
        return counts[0], counts[1]


WHOLE = Part()


class Sample(NamedTuple):
    """Every ``stride``-th example or position; the first one moves on by one each turn."""

    stride: int
    turn: int

    def part(self, shape: Sequence[int], dims: Sequence[int]) -> Part:
        """Return a part along the first of these dimensions that is long enough, or the longest."""
        if not dims:
            return WHOLE
        longest = max(dims, key=lambda dim: shape[dim])
        dim = next((dim for dim in dims if shape[dim] >= self.stride), longest)
        n = shape[dim]
        if n < 2:
            return WHOLE
        # Not modulo the stride: if there are fewer examples, each must be read equally often.
        start = self.turn % min(n, self.stride)
        taken = len(range(start, n, self.stride))
        return Part(list(dims).index(dim), dim, start, self.stride, n, taken)


def sample_of(fraction: float, turn: int) -> Sample | None:
    """Return the sample nearest to a fraction, at most one half; ``None`` for all rows."""
    if fraction == 1:
        return None
    return Sample(max(2, round(min(1 / fraction, 1e9))), turn)
