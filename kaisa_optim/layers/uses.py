"""Uses of a layer's weight by other calls than its own kind's, with the rows of each use.

A use is a layer that lives for one call. Its moments enter the sums of its ``primary``. Where the
call's input meets the side of the weight that holds outputs of the primary, the use is ``crossed``:
its A belongs to the primary's G, and its G to the primary's A.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linalg.moments import second_moment
from .base import Layer, Moments, PassSettings
from .kinds import EmbeddingLayer, SequenceRows


class Use(Layer):
    """One call with the weight of another layer."""

    reads_dense_only = True

    def __init__(self, primary: Layer, *, crossed: bool = False) -> None:
        vars(self).update(vars(primary))  # a bias beside the weight may be added by another call
        self._primary, self.crossed = primary, crossed
        inputs, outputs = primary.inputs, primary.outputs
        self.in_shape = (outputs if crossed else inputs,)
        self.outputs = inputs if crossed else outputs

    def size_of(self, side: str, covers: tuple[bool, bool] | None = None) -> tuple[int, bool]:
        size, _ = super().size_of(side, covers)
        weight, _ = self.covers if covers is None else covers
        # A call without the bias is as wide as the primary, whose other side a crossed call meets.
        side = "ga"[side == "g"] if self.crossed else side
        return size, self.primary.size_of(side, (weight, self.primary.covers_now()[1]))[1]


class ProductUse(SequenceRows, Use):
    """Rows times the weight, or times some rows of the weight, which give some of the outputs.

    A product that adds no bias, such as a crossed one, leaves the bias's place in A empty, unless a
    call of its own adds the bias.
    """

    biased = False
    first: int | None = None  # the first output that the call gives; None: all outputs

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        rows = super().output_rows(x, grad)
        if self.first is None:
            return rows
        behind = self.outputs - self.first - rows.shape[-1]
        return F.pad(rows, (self.first, behind))

    def moments(
        self, x: Tensor | None, grad: Tensor, covers: tuple[bool, bool], how: PassSettings
    ) -> Moments:
        bare = covers[0], covers[1] and self.adds_bias
        moments = super().moments(x, grad, bare, how)
        if bare == covers:
            return moments
        moment = moments.g if self.crossed else moments.a  # the primary's A
        wider = F.pad(moment, (0, 1) if moment.dim() == 2 else (0, 1, 0, 1))
        return moments._replace(g=wider) if self.crossed else moments._replace(a=wider)


class StackedUse(ProductUse):
    """One product for each matrix of a stack: ``[blocks, rows, features]``."""

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return x[:, :, None]

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        return grad[:, :, None]

    def example_dim(self, output: Tensor) -> int | None:
        return 1


class GroupedUse(ProductUse):
    """Rows in groups that lie one after the other, each times a matrix of its own."""

    def __init__(self, primary: Layer, ends: Tensor, *, crossed: bool) -> None:
        super().__init__(primary, crossed=crossed)
        self.ends = ends  # the end of each group's rows

    def example_dim(self, output: Tensor) -> int | None:
        return None

    def _groups(self, rows: Tensor) -> Sequence[Tensor]:
        ends = [0, *self.ends.tolist()]  # the host waits here, in passes that gather
        counts = [end - start for start, end in itertools.pairwise(ends)]
        return rows[: ends[-1]].split(counts)

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor | None:
        groups = zip(self._groups(grad), self._groups(x), strict=True)
        return torch.stack([(g.mT @ a).float() for g, a in groups])

    def moments(
        self, x: Tensor | None, grad: Tensor, covers: tuple[bool, bool], how: PassSettings
    ) -> Moments:
        assert x is not None
        moments = []
        for side, groups in (("a", self._groups(x)), ("g", self._groups(grad))):
            _, diagonal = self.size_of(side, covers)
            made = [second_moment(rows[None], how.dtype, diagonal=diagonal) for rows in groups]
            moments.append(torch.cat(made))
        (a, g), counts = moments, [rows.shape[0] for rows in groups]
        return Moments(a, g, sum(counts), 1, how.blocks, rows_of_block=counts)


class TableUse(Use, EmbeddingLayer):
    """Rows of the weight that indices pick."""

    def __init__(self, primary: Layer, padding: int | None, *, crossed: bool) -> None:
        Use.__init__(self, primary, crossed=crossed)
        self.padding = padding

    def _tokens(self, x: Tensor) -> Tensor:
        # table[-1] is the last row; index_add_ and one_hot refuse a negative index.
        return super()._tokens(x).remainder(self.inputs)
