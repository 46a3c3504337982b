"""Scale and shift of normalization layers.

Every feature is a block of its own: s_i = w_i x̂_i + b_i has the per-row gradient (x̂_i, 1) ∂L/∂s_i,
so G is its 2x2 second moment (1x1 where one of the two is trained) and A is the number 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .base import Layer, Moments, PassSettings, register_layer
from .saving import saving_hooks

# Autograd's nodes that keep the mean and 1 over the deviation of a batch.
_KEEP_STATISTICS = (
    "NativeBatchNormBackward0",
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
)


def _chunk(tensor: Tensor) -> int:
    """Return how many numbers of a batch to work on at once.

    A part on a CPU stays in its caches. GPUs take few large parts: the host starts each call anew
    for each part.
    """
    return 1 << (19 if tensor.device.type == "cpu" else 27)


class _Norm(Layer):
    positions_dim = 1  # the dimension of positions in the flat view
    multiplies = False
    watchable = True
    reads_dense_only = True

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        shaped = self.weight if self.weight is not None else self.bias
        assert shaped is not None  # else unsupported
        self.blocks = shaped.numel()

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        parameters = (module._parameters.get(name) for name in ("weight", "bias"))
        return None if any(p is not None for p in parameters) else "no parameters of its own"

    def a_dim_of(self, covers: tuple[bool, bool]) -> int:
        return int(any(covers))

    def g_dim_of(self, covers: tuple[bool, bool]) -> int:
        return sum(covers)

    def _normalized(self, x: Tensor, frame: Any) -> Tensor:
        """Return x̂, computed again since the module does not keep it."""
        raise NotImplementedError

    def _frame(self, x: Tensor, mode: Any, dtype: torch.dtype) -> Any:
        """Return the statistics of the whole batch that its parts need."""
        return mode

    def _entries(
        self,
        x: Tensor | None,
        grad: Tensor,
        frame: Any,
        dtype: torch.dtype,
        *,
        shifts: bool,
        reduce: bool,
    ) -> list[Tensor]:
        """Return sums over this part's rows, ``[blocks]`` each, in ``dtype``.

        The sums are the moment's one entry, or its entries (0, 0), (1, 0) and (1, 1). They are new
        tensors, since the caller adds to them. There is no ``x`` if scales are not trained;
        ``shifts`` says whether shifts are trained.
        """
        shift = self._flat(grad.to(dtype))
        columns = [shift] if shifts else []
        if x is not None:
            columns.insert(0, self._flat(self._normalized(x.to(dtype), frame)).mul_(shift))
        if reduce:
            columns = [c.sum(self.positions_dim, keepdim=True) for c in columns]
        sums = [self._squares(column) for column in columns]
        if len(columns) == 2:
            sums.insert(1, columns[0].mul_(columns[1]).sum((0, self.positions_dim)))
        return sums

    def _flat(self, tensor: Tensor) -> Tensor:
        """Return a view of three dimensions: batch, then positions and features in memory order."""
        raise NotImplementedError

    def _squares(self, flat: Tensor) -> Tensor:
        """Return the sum of squares of each feature."""
        return (flat * flat).sum((0, 1))

    def moments(
        self,
        x: Tensor | None,
        grad: Tensor,
        covers: tuple[bool, bool],
        how: PassSettings,
        known_a: Tensor | None = None,
    ) -> Moments:
        reduce, dtype, part, blocks = how.reduce, how.dtype, how.part, how.blocks
        if grad.numel() == 0:
            return Moments(grad.new_zeros(1, 1), grad.new_zeros(1, 1), 0, 0, blocks)
        assert x is not None or not covers[0]
        x = x if covers[0] else None
        # Read the frame before the part is taken: the forward normalized by the whole batch.
        frame = None if x is None else self._frame(x, how.mode, dtype)
        x, grad = None if x is None else part.of(x), part.of(grad)
        whole = self.unbatched(grad)
        batch = 1 if whole else grad.shape[0]
        positions = grad.numel() // max(1, batch * self.blocks)
        entries: list[Tensor] = []
        # Wide copies are made of a part of the batch at a time: memory stays bounded.
        chunk = batch if whole else max(1, _chunk(grad) // max(1, positions * self.blocks))
        for start in range(0, batch, chunk):
            span = slice(None) if whole else slice(start, start + chunk)
            inputs = None if x is None else x[span]
            more = self._entries(inputs, grad[span], frame, dtype, shifts=covers[1], reduce=reduce)
            if entries:
                torch._foreach_add_(entries, more)
            else:
                entries = more
        size = sum(covers)
        if size == 2:
            entries.insert(2, entries[1])
        g = part.weighted(torch.stack(entries, 1).view(self.blocks, size, size))
        if self.has_diagonal_g(covers):
            g = g.diagonal(dim1=-2, dim2=-1)
        batch, positions = part.whole_counts(batch, positions)
        rows = batch if reduce else batch * positions
        shape = (1, 1) if self.wide < 1 else (1, 1, 1)
        return Moments(g.new_full(shape, rows), g, rows, positions, blocks)

    def matrix_parts(self, matrix: Tensor) -> list[Tensor]:
        return [matrix[:, i, 0] for i in range(sum(self.covers))]

    def parameter_parts(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.flatten() for tensor in tensors]


@register_layer(nn.LayerNorm, nn.RMSNorm)
class LayerNormLayer(_Norm):
    """Normalization over the last dimensions."""

    def _shape(self) -> tuple[int, ...]:
        assert isinstance(self.module, nn.LayerNorm | nn.RMSNorm)
        return self.module.normalized_shape

    def unbatched(self, x: Tensor) -> bool:
        return x.dim() == len(self._shape())

    def row_dims(self, output: Tensor) -> tuple[int, ...]:
        return (0, 1)[: output.dim() - len(self._shape())]

    def _normalized(self, x: Tensor, frame: Any) -> Tensor:
        if isinstance(self.module, nn.RMSNorm):
            return F.rms_norm(x, list(self._shape()), None, self.module.eps)
        assert isinstance(self.module, nn.LayerNorm)
        return F.layer_norm(x, self._shape(), None, None, self.module.eps)

    def _flat(self, tensor: Tensor) -> Tensor:
        batch = 1 if self.unbatched(tensor) else tensor.shape[0]
        return tensor.reshape(batch, -1, self.blocks)


class _ChannelNorm(_Norm):
    """Normalization of ``[batch, channels, *positions]``."""

    positions_dim = 2

    def _flat(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(*tensor.shape[:2], -1)

    def _squares(self, flat: Tensor) -> Tensor:
        return torch.linalg.vector_norm(flat, dim=2).square_().sum(0)  # no tensor of squares


@register_layer(nn.GroupNorm)
class GroupNormLayer(_ChannelNorm):
    def _normalized(self, x: Tensor, frame: Any) -> Tensor:
        assert isinstance(self.module, nn.GroupNorm)
        return F.group_norm(x, self.module.num_groups, None, None, self.module.eps)


_Frame = tuple[Tensor, Tensor]  # the mean of each channel, and 1 over the deviation


@register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormLayer(_ChannelNorm):
    def mode(self, output: Tensor) -> _Frame | None:
        """Return the mean and scale of this forward, if autograd or the module keeps them."""
        module = self.module
        assert isinstance(module, _BatchNorm)
        mean, var = module.running_mean, module.running_var
        if not module.training and mean is not None and var is not None:
            wide = torch.promote_types(mean.dtype, torch.float32)
            return mean.to(wide, copy=True), (var.to(wide) + module.eps).rsqrt_()
        # Reading tensors that hooks have packed would run the hooks: a checkpoint would recompute.
        node = None if saving_hooks() is not None else output.grad_fn
        if node is None or node.name() not in _KEEP_STATISTICS:
            return None
        kept: _Frame = node._saved_result1, node._saved_result2  # type: ignore[attr-defined]
        return None if kept[0].dtype.itemsize < 4 else kept  # halves are too coarse

    def _frame(self, x: Tensor, mode: _Frame | None, dtype: torch.dtype) -> _Frame:
        if mode is not None:
            # For a replica, these are the original module's statistics, on another device.
            return mode[0].to(x.device, dtype), mode[1].to(x.device, dtype)
        assert isinstance(self.module, _BatchNorm)
        x = self._flat(x)
        mean = x.mean((0, 2), dtype=dtype)
        var = torch.zeros_like(mean)
        for images in x.split(max(1, _chunk(x) // x[0].numel())):
            var += self._squares(images.to(dtype) - mean[:, None])
        return mean, (var / (x.shape[0] * x.shape[2]) + self.module.eps).rsqrt_()

    def _normalized(self, x: Tensor, frame: _Frame) -> Tensor:
        mean, scale = (_by_channel(v, x) for v in frame)
        return (x - mean).mul_(scale)

    def _entries(
        self,
        x: Tensor | None,
        grad: Tensor,
        frame: _Frame,
        dtype: torch.dtype,
        *,
        shifts: bool,
        reduce: bool,
    ) -> list[Tensor]:
        if reduce or x is None:
            return super()._entries(x, grad, frame, dtype, shifts=shifts, reduce=reduce)
        if x.device.type != "cpu":
            return self._entries_of_gpus(x, grad, frame, dtype, shifts=shifts)
        # The normalization's own backward sums over a channel in one pass, in any memory layout.
        mean, scale = frame
        x, grad = x.to(dtype), grad.to(dtype)
        rows = (x - _by_channel(mean, x)).mul_(grad)
        if rows.is_contiguous():
            squares = self._squares(self._flat(rows))  # faster still
        else:
            squares, _ = _sums(rows, rows, torch.zeros_like(mean))
        squares.mul_(scale).mul_(scale)
        if not shifts:
            return [squares]
        both, shift = _sums(torch.mul(grad, grad, out=rows), x, mean)
        return [squares, both.mul_(scale), shift]

    def _entries_of_gpus(
        self, x: Tensor, grad: Tensor, frame: _Frame, dtype: torch.dtype, *, shifts: bool
    ) -> list[Tensor]:
        """Return the entries in few kernels, without copies of tensors in half precision."""
        mean, scale = frame
        dims = (0, *range(2, x.dim()))
        rows = (x - _by_channel(mean, x)).mul_(grad)
        squares = torch.linalg.vector_norm(rows, dim=dims).mul_(scale).square_()
        if not shifts:
            return [squares]
        both = rows.mul_(grad).sum(dims).mul_(scale)
        return [squares, both, torch.linalg.vector_norm(grad, dim=dims, dtype=dtype).square_()]


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (like.dim() - 2))


def _sums(weights: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ w (x − mean) and Σ w of each channel."""
    one = torch.ones_like(mean)
    _, moment, total = torch.ops.aten.native_batch_norm_backward(
        weights, x, one, None, None, mean, one, True, 0.0, [False, True, True]
    )
    return moment, total
