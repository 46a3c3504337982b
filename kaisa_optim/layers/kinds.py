"""Linear layers, embeddings, and single parameters, whose use in the forward pass is watched.

A module that no kind knows may hold parameters of its own. The shape of a parameter tells its
factors, so that they have their place before the first pass; calls tell its statistics (``watch``).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from ..linalg.moments import second_moment
from .base import _KINDS, Layer, Moments, PassSettings, register_layer


class SequenceRows(Layer):
    """Rows of a product with a matrix: the last dimension holds the features."""

    cast_by_autocast = unseen_output = reads_dense_only = True

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        return SequenceRows.output_rows(self, None, x)

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        # [batch, ..., features], or one example.
        grad = grad[None] if grad.dim() == 1 else grad
        return grad.reshape(1, grad.shape[0], grad.shape[1:-1].numel(), grad.shape[-1])

    def unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1


@register_layer(nn.Linear)
class LinearLayer(SequenceRows):
    in_papers = True
    input_dim = 1

    def input_rows_key(self) -> Hashable:
        return LinearLayer if type(self).input_rows is LinearLayer.input_rows else None


class Conv1DLayer(LinearLayer):
    """GPT-2's linear layer, whose weight is stored ``[inputs, outputs]``."""

    in_papers = False
    input_dim = 0

    def weight_view(self, tensor: Tensor) -> Tensor:
        return tensor.mT[None]


_KINDS["transformers.pytorch_utils.Conv1D"] = Conv1DLayer


@register_layer(nn.Embedding)
class EmbeddingLayer(Layer):
    """A table: rows are one-hot, so A is the diagonal of token frequencies."""

    diagonal_input = reads_dense_only = True
    input_dim = 0

    def __init__(self, name: str, module: nn.Embedding) -> None:
        super().__init__(name, module)
        self.padding = module.padding_idx

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        assert isinstance(module, nn.Embedding)
        refused = module.sparse or module.scale_grad_by_freq
        return "sparse gradients, or scale_grad_by_freq changes them" if refused else None

    def _tokens(self, x: Tensor) -> Tensor:
        # As [batch, positions].
        return x.reshape(1, 1) if x.dim() == 0 else x.reshape(x.shape[0], x.shape[1:].numel())

    def example_dim(self, output: Tensor) -> int | None:
        return 0 if output.dim() > 1 else None

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        assert x is not None
        tokens = self._tokens(x)
        rows = grad.reshape(1, *tokens.shape, self.outputs)
        # No gradient reaches the padding vector: such a row is zero on both sides.
        return rows if self.padding is None else rows * (tokens != self.padding)[None, :, :, None]

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor | None:
        rows = self.output_rows(x, grad)[0].flatten(0, 1)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        table = rows.new_zeros(self.inputs, self.outputs)
        return table.index_add_(0, self._tokens(x).flatten().long(), rows).mT[None]

    def input_moment(
        self, x: Tensor, grad: Tensor, *, reduce: bool, diagonal: bool, dtype: torch.dtype, **_: Any
    ) -> Tensor:
        tokens = self._tokens(x)
        if reduce:
            # (count / positions)² summed over tokens: each occurrence adds count / positions².
            tokens = tokens.sort(1).values
            begins = torch.ones_like(tokens)
            begins[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
            run = begins.cumsum(1) - 1  # the number of each token's run of equal tokens
            lengths = torch.zeros_like(run).scatter_add_(1, run, torch.ones_like(run))
            value = lengths.gather(1, run).to(dtype) / tokens.shape[1] ** 2
        else:
            value = tokens.new_ones(tokens.shape, dtype=dtype)
        if self.padding is not None:
            value = value * (tokens != self.padding)
        moment = torch.zeros(self.inputs, dtype=dtype, device=x.device)
        moment = moment.index_add_(0, tokens.flatten().long(), value.flatten())[None]
        return moment if diagonal else torch.diag_embed(moment)

    def weight_view(self, tensor: Tensor) -> Tensor:
        return tensor.mT[None]


Reasons = dict[Tensor | None, str]  # why parameters have no layer

# Modules of torch whose calls do not show the rows of each weight, such as fused kernels.
_OPAQUE = nn.RNNBase, nn.RNNCellBase, nn.Bilinear, nn.EmbeddingBag, ParametrizationList
# The reason for what only scales or shifts entries; a warning of poor coverage leaves these out.
SCALES = "only scales or shifts: the base optimizer steps it"


class MatrixLayer(SequenceRows):
    """A matrix, or a stack of them such as experts', that multiplies rows."""

    sectioned = by_use = True
    input_dim = 1

    def __init__(self, path: str, module: nn.Module, name: str) -> None:
        super().__init__(path, module)
        weight = module._parameters[name]
        assert weight is not None
        self.weight, self.bias, self.names, self.watched_in = weight, None, (name, ""), (module,)
        self.blocks = weight.shape[0] if weight.dim() == 3 else 1

    def weight_view(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == 3 else tensor[None]


# Kinds that may share a weight. A subclass may read other rows: its type is not among them.
MATRICES = Conv1DLayer, EmbeddingLayer, LinearLayer, MatrixLayer


def declared(name: str, module: nn.Module) -> tuple[list[Layer], Reasons]:
    """Return the layers of a module that no kind knows, and why other parameters have none."""
    title, is_norm = type(module).__name__, isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    layers: list[Layer] = []
    reasons: Reasons = {}
    opaque = "its calls do not show the rows of its weights" if isinstance(module, _OPAQUE) else ""
    if isinstance(module, torch.jit.ScriptModule):
        opaque = "TorchScript runs its calls, and Python sees none of them"
    for own_name, p in module._parameters.items():
        # A lazy module that is not trained may have no shapes yet, which nothing may ask for.
        if p is None or isinstance(p, UninitializedParameter):
            continue
        if opaque:
            reasons[p] = f"no layer kind is registered for {title}: {opaque}"
        elif not p.is_contiguous() or sum(size > 1 for size in p.shape) > 3:
            # If memory had another order, views would not tell place_of rows from columns.
            reasons[p] = f"{title}: neither a matrix nor a stack of matrices, row by row in memory"
        elif p.numel() and p.dim() in (2, 3) and 1 not in p.shape[-2:] and not is_norm:
            layers.append(MatrixLayer(f"{name}.{own_name}" if name else own_name, module, own_name))
        else:
            reasons[p] = SCALES
    return layers, reasons


# ---- uses of a weight by other calls than its own kind's, with the rows of each use ----


class Use(Layer):
    """One call with the weight of another layer, as a layer that lives for this call.

    Its moments enter the sums of its ``primary``. A call whose input meets the side of the weight
    that holds outputs of the primary is ``crossed``: its A belongs to the primary's G.
    """

    def __init__(self, primary: Layer, *, crossed: bool = False) -> None:
        # All that the primary knows of itself, such as covers. An attribute that a kind is given
        # later comes along, too: what a use has of its own must be set after this line.
        vars(self).update(vars(primary))
        self._primary, self.crossed = primary, crossed
        inputs, outputs = primary.inputs, primary.outputs
        self.in_shape = (outputs if crossed else inputs,)
        self.outputs = inputs if crossed else outputs

    def size_of(self, side: str, covers: tuple[bool, bool] | None = None) -> tuple[int, bool]:
        size, _ = super().size_of(side, covers)
        weight, _ = self.covers if covers is None else covers
        # A call without the bias is as wide as the primary, whose other side a crossed call meets.
        side = {"a": "g", "g": "a"}[side] if self.crossed else side
        return size, self.primary.size_of(side, (weight, self.primary.covers_now()[1]))[1]


class ProductUse(SequenceRows, Use):
    """Rows times the weight, or times some rows of the weight, which give some of the outputs."""

    biased = False  # a product that adds no bias, as a crossed one, leaves its place in A empty
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

    # EmbeddingLayer.__init__ would read a module that need not be a table: only Use's runs.
    def __init__(self, primary: Layer, padding: int | None, *, crossed: bool) -> None:
        Use.__init__(self, primary, crossed=crossed)
        self.padding = padding

    def _tokens(self, x: Tensor) -> Tensor:
        # table[-1] is the last row; index_add_ and one_hot refuse a negative index.
        return super()._tokens(x).remainder(self.inputs)
