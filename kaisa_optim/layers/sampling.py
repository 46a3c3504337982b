"""The part of a pass that statistics read: every n-th example.

A strided slice is a view, follows from a count that all ranks know, and draws no random numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Part(NamedTuple):
    """A slice of the dimension of examples, which a layer's input and output gradient share."""

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


WHOLE = Part()


class Sample(NamedTuple):
    """Every ``stride``-th example; the first one moves on by one each turn."""

    stride: int
    turn: int

    def part(self, dim: int, count: int) -> Part:
        """Return a part of ``count`` examples in dimension ``dim``."""
        if count < 2:
            return WHOLE
        # Not modulo the stride: if there are fewer examples, each must be read equally often.
        start = self.turn % min(count, self.stride)
        return Part(dim, start, self.stride, count, len(range(start, count, self.stride)))


def sample_of(fraction: float, turn: int) -> Sample | None:
    """Return the sample nearest to a fraction, at most one half; ``None`` for all rows."""
    if fraction == 1:
        return None
    return Sample(max(2, round(min(1 / fraction, 1e9))), turn)
