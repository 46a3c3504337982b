"""Scale and shift of normalization layers.

Every feature is a block of its own: s_i = w_i x̂_i + b_i has the per-row gradient (x̂_i, 1) ∂L/∂s_i,
so G is its 2x2 second moment (1x1 where one of the two is trained) and A is the number 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..algebra import projected_diagonal
from ..sampling import WHOLE, Part
from .base import Basis, Layer, Moments, register_layer

_FEW = 16  # images, at least, that say where the mean of a batch is


def _chunk(tensor: Tensor) -> int:
    """How many numbers of a batch are worked on at once: on CPUs, what stays in their caches."""
    return 1 << (19 if tensor.device.type == "cpu" else 24)


class _Norm(Layer):
    positions_dim = 1  # of the flat view

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
        """x̂, computed again as the module keeps none, or what _framed makes its moments of."""
        raise NotImplementedError

    def _columns(self, covers: tuple[bool, bool]) -> tuple[bool, bool]:
        """Of weight and bias, whose rows are needed for the moments of those covered."""
        return covers

    def _frame(self, x: Tensor, mode: Any, part: Part, dtype: torch.dtype) -> Any:
        """The mode with what must be known of the whole batch before its parts."""
        return mode

    def _framed(self, g: Tensor, frame: Any) -> None:
        """Make the moments that :meth:`_normalized` led to those of x̂, in place."""

    def _flat(self, tensor: Tensor) -> Tensor:
        """A view with three dimensions: batch, and the positions and features as they lie."""
        raise NotImplementedError

    def _squares(self, flat: Tensor) -> Tensor:
        """Sums of squares, of each feature."""
        return (flat * flat).sum((0, 1))

    def moments(
        self,
        x: Tensor | None,
        grad: Tensor,
        covers: tuple[bool, bool],
        *,
        reduce: bool,
        dtype: torch.dtype,
        blocks: slice = slice(None),
        mode: Any = None,
        known_a: Tensor | None = None,
        part: Part = WHOLE,
    ) -> Moments:
        if grad.numel() == 0:
            return Moments(grad.new_zeros(1, 1), grad.new_zeros(1, 1), 0, 0, blocks)
        # Before the part is taken: the forward normalized by the whole batch.
        frame = self._frame(x, mode, part, dtype) if covers[0] and x is not None else None
        x, grad = None if x is None else part.of(x), part.of(grad)
        whole = self.unbatched(grad)
        batch = 1 if whole else grad.shape[0]
        positions = grad.numel() // max(1, batch * self.blocks)
        with_weight, with_bias = self._columns(covers)
        size = with_weight + with_bias
        g = grad.new_zeros(self.blocks, size, size, dtype=dtype)
        # Wide copies are made of a part of the batch at a time: memory stays bounded.
        chunk = batch if whole else max(1, _chunk(grad) // max(1, positions * self.blocks))
        for start in range(0, batch, chunk):
            span = slice(None) if whole else slice(start, start + chunk)
            shift = self._flat(grad[span].to(dtype))
            columns = [shift] if with_bias else []
            if with_weight:
                assert x is not None
                normalized = self._normalized(x[span].to(dtype), frame)
                columns.insert(0, self._flat(normalized).mul_(shift))
            if reduce:
                columns = [c.sum(self.positions_dim, keepdim=True) for c in columns]
            for i, column in enumerate(columns):
                g[:, i, i] += self._squares(column)
            if size == 2:
                g[:, 1, 0] += columns[0].mul_(columns[1]).sum((0, self.positions_dim))
        if with_weight:
            self._framed(g, frame)
        part.weighted(g)
        if size == 2:
            g[:, 0, 1] = g[:, 1, 0]
        kept = slice(1 - covers[0], 1 + covers[1]) if size == 2 else slice(None)
        g = g[:, kept, kept]
        if self.g_dim_of(covers) > self.wide:
            g = g.diagonal(dim1=-2, dim2=-1)
        batch, positions = part.whole_counts(batch, positions)
        rows = batch if reduce else batch * positions
        shape = (1, 1) if self.wide < 1 else (1, 1, 1)
        return Moments(g.new_full(shape, rows), g, rows, positions, blocks)

    def projected_moment(
        self,
        x: Tensor | None,
        grad: Tensor,
        moment_g: Tensor,
        basis: Basis,
        covers: tuple[bool, bool],
        *,
        reduce: bool,
    ) -> Tensor:
        return projected_diagonal(moment_g, basis[0])[..., None]

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
        return torch.linalg.vector_norm(flat, dim=2).square_().sum(0)  # without their squares


@register_layer(nn.GroupNorm)
class GroupNormLayer(_ChannelNorm):
    def _normalized(self, x: Tensor, frame: Any) -> Tensor:
        assert isinstance(self.module, nn.GroupNorm)
        return F.group_norm(x, self.module.num_groups, None, None, self.module.eps)


@dataclasses.dataclass
class _Frame:
    """What a batch is normalized by: a place near its mean, and sums and squares from there.

    Given statistics are a frame, too: of one number at the mean, with the variance for its square.
    """

    near: Tensor
    total: Tensor
    squares: Tensor
    count: int
    open: bool = False  # whether what is normalized is still to be added to the sums


@register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormLayer(_ChannelNorm):
    def mode(self) -> tuple[Tensor, Tensor] | None:
        """The running statistics that an evaluating forward used; ``None``: the batch's own."""
        module = self.module
        assert isinstance(module, _BatchNorm)
        if module.training or module.running_mean is None or module.running_var is None:
            return None
        return module.running_mean.clone(), module.running_var.clone()

    def _columns(self, covers: tuple[bool, bool]) -> tuple[bool, bool]:
        # The batch's mean is known only after its last part; the bias's sums take it off.
        return covers[0], any(covers)

    def _frame(self, x: Tensor, mode: Any, part: Part, dtype: torch.dtype) -> _Frame:
        if mode is not None:
            mean, var = (statistic.to(dtype) for statistic in mode)
            return _Frame(mean[:, None], torch.zeros_like(mean), var, 1)
        x = self._flat(x)
        chunk = max(1, _chunk(x) // x[0].numel())
        # To meet the mean takes one more pass. Images from all over the batch, so that in a sorted
        # one, too, what the sums take off at the end is not much more than what they leave.
        few = max(chunk, _FEW)
        near = x[:: -(-len(x) // few)].mean((0, 2), dtype=dtype)
        none = torch.zeros_like(near)
        frame = _Frame(near[:, None], none, none.clone(), x.shape[0] * x.shape[2], open=True)
        if part is not WHOLE:
            for images in x.split(chunk):
                self._normalized(images.to(dtype), frame)
            frame.open = False
        return frame

    def _normalized(self, x: Tensor, frame: _Frame) -> Tensor:
        """x from near its mean, not scaled yet; while the frame is open, its moments are noted."""
        near = self._flat(x) - frame.near
        if frame.open:
            frame.total += near.sum((0, 2))
            frame.squares += self._squares(near)
        return near

    def _framed(self, g: Tensor, frame: _Frame) -> None:
        assert isinstance(self.module, _BatchNorm)
        mean = frame.total / frame.count
        var = (frame.squares / frame.count).sub_(mean * mean).clamp_(min=0)
        scale = (var + self.module.eps).rsqrt_()
        own, both, shift = g[:, 0, 0], g[:, 1, 0], g[:, 1, 1]
        own.sub_((2 * both - mean * shift).mul_(mean)).clamp_(min=0).mul_(scale * scale)
        both.sub_(mean * shift).mul_(scale)
