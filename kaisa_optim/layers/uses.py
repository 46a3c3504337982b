"""Uses of a layer's weight by other calls than its own kind's, with the rows of each use.

A use is a layer that lives for one call. Its moments enter the sums of its ``primary``. Where the
call's input meets the side of the weight that holds outputs of the primary, the use is ``crossed``:
its A belongs to the primary's G, and its G to the primary's A.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..linalg.moments import second_moment
from .base import Layer, Moments, PassSettings
from .embedding import EmbeddingLayer
from .linear import SequenceRows


class Use(Layer):
    """One call with the weight of another layer."""

    reads_dense_only = True

    def __init__(self, primary: Layer, *, crossed: bool = False) -> None:
        Layer.__init__(self, primary.name, primary.module)
        # A bias beside the weight is added to the product by another call.
        self.weight, self.bias = primary.weight, primary.bias
        self.trained, self.covers, self.names = primary.trained, primary.covers, primary.names
        self.number, self.blocks, self.wide = primary.number, primary.blocks, primary.wide
        self.shared = primary.shared
        self._primary, self.crossed = primary, crossed
        inputs, outputs = primary.inputs, primary.outputs
        self.in_shape = (outputs if crossed else inputs,)
        self.outputs = inputs if crossed else outputs

    @property
    def primary(self) -> Layer:
        return self._primary

    @property
    def adds_bias(self) -> bool:
        return not self.crossed

    def has_diagonal_a(self, covers: tuple[bool, bool]) -> bool:
        return self._is_diagonal("g" if self.crossed else "a", covers)

    def has_diagonal_g(self, covers: tuple[bool, bool]) -> bool:
        return self._is_diagonal("a" if self.crossed else "g", covers)

    def _is_diagonal(self, side: str, covers: tuple[bool, bool]) -> bool:
        of = self._primary
        covers = covers[0], of.covers_now()[1]  # a call without the bias is as wide
        return of.has_diagonal_a(covers) if side == "a" else of.has_diagonal_g(covers)


class ProductUse(SequenceRows, Use):
    """Rows times the weight, or times some rows of the weight, which give some of the outputs.

    A product that adds no bias, such as a crossed one, leaves the bias's place in A empty, unless a
    call of its own adds the bias.
    """

    biased = False  # the call adds the bias
    first: int | None = None  # the first output that the call gives; None: all outputs

    @property
    def adds_bias(self) -> bool:
        return not self.crossed and (self.biased or self._primary.bias_apart)

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        rows = super().output_rows(x, grad)
        if self.first is None:
            return rows
        behind = self.outputs - self.first - rows.shape[-1]
        return torch.nn.functional.pad(rows, (self.first, behind))

    def moments(
        self,
        x: Tensor | None,
        grad: Tensor,
        covers: tuple[bool, bool],
        how: PassSettings,
        known_a: Tensor | None = None,
    ) -> Moments:
        bare = covers[0], covers[1] and self.adds_bias
        moments = super().moments(x, grad, bare, how, known_a)
        if bare == covers or not (self.crossed or known_a is None):
            return moments
        moment = moments.g if self.crossed else moments.a  # the primary's A
        wider = torch.nn.functional.pad(moment, (0, 1) if moment.dim() == 2 else (0, 1, 0, 1))
        return moments._replace(g=wider) if self.crossed else moments._replace(a=wider)


class ColumnsUse(ProductUse):
    """The weight times columns ``[..., features, columns]``, as in Mamba."""

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return super().input_rows(x.mT, grad)

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        return super().output_rows(x, grad.mT)

    def unbatched(self, x: Tensor) -> bool:
        return False

    def example_dim(self, output: Tensor) -> int | None:
        return 1 if output.dim() == 2 else 0


class StackedUse(ProductUse):
    """One product for each matrix of a stack: ``[blocks, rows, features]``."""

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return x[:, :, None]

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        return grad[:, :, None]

    def unbatched(self, x: Tensor) -> bool:
        return False

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
        both = zip(self._groups(grad), self._groups(x), strict=True)
        return torch.stack([(g.mT @ a).float() for g, a in both])

    def moments(
        self,
        x: Tensor | None,
        grad: Tensor,
        covers: tuple[bool, bool],
        how: PassSettings,
        known_a: Tensor | None = None,
    ) -> Moments:
        assert x is not None
        grads = self._groups(grad)
        diagonal = self.has_diagonal_a(covers), self.has_diagonal_g(covers)
        g = [second_moment(rows[None], how.dtype, diagonal=diagonal[1]) for rows in grads]
        a = [] if known_a is not None else self._groups(x)
        moments = [second_moment(rows[None], how.dtype, diagonal=diagonal[0]) for rows in a]
        moment_a = torch.cat(moments) if known_a is None else known_a
        counts = [rows.shape[0] for rows in grads]
        return Moments(moment_a, torch.cat(g), sum(counts), 1, how.blocks, rows_of_block=counts)


class TableUse(Use, EmbeddingLayer):
    """Rows of the weight that indices pick."""

    reads_input = True

    def __init__(self, primary: Layer, padding: int | None, *, crossed: bool) -> None:
        Use.__init__(self, primary, crossed=crossed)
        self.padding = padding

    def _tokens(self, x: Tensor) -> Tensor:
        # table[-1] is the last row; index_add_ and one_hot refuse a negative index.
        return super()._tokens(x).remainder(self.inputs)

    def input_moment(
        self,
        x: Tensor,
        grad: Tensor,
        *,
        reduce: bool,
        diagonal: bool,
        append_one: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        moment = super().input_moment(
            x, grad, reduce=reduce, diagonal=True, append_one=append_one, dtype=dtype
        )
        return moment if diagonal else torch.diag_embed(moment)
