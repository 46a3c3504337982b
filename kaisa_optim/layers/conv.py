"""Convolutions and transposed convolutions of one to three dimensions, grouped ones included."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..algebra import bordered, second_moment
from ..correlation import patch_moment, patch_sum, pays, windows
from .base import Layer, register_layer

# Patches of this many elements are formed at once: memory stays bounded whatever the batch.
_PATCH_ELEMENTS = 1 << 24

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
_ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


class _Spatial(Layer):
    """What both directions share: patches in, one row for each output position."""

    divided_by_positions = True
    cast_by_autocast = True
    reads_dense_only = True

    def __init__(self, name: str, module: _Conv | _ConvTranspose) -> None:
        super().__init__(name, module)
        self.dims = len(module.kernel_size)
        self.blocks = module.groups
        self.outputs = module.out_channels // module.groups
        self.in_shape = (module.in_channels // module.groups, *module.kernel_size)

    def unbatched(self, x: Tensor) -> bool:
        return x.dim() == self.dims + 1

    def _batched(self, tensor: Tensor) -> Tensor:
        return tensor[None] if self.unbatched(tensor) else tensor

    def _patches(self, x: Tensor, grad: Tensor) -> Tensor:
        """``[batch, channels, *output positions, *kernel]``, a view of the padded input."""
        raise NotImplementedError

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        x, grad = self._batched(x), self._batched(grad)
        patches = self._patches(x, grad).unflatten(1, (self.blocks, self.in_shape[0]))
        positions = range(3, 3 + self.dims)
        kernel = range(3 + self.dims, 3 + 2 * self.dims)
        columns = patches.permute(1, 2, *kernel, 0, *positions)
        columns = columns.reshape(self.blocks, self.inputs, x.shape[0], grad.shape[2:].numel())
        return columns.permute(0, 2, 3, 1)

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        grad = self._batched(grad).flatten(2)
        columns = grad.unflatten(1, (self.blocks, self.outputs)).permute(1, 2, 0, 3)
        # Channel by channel, as memory has them: copied fast, and the product takes them so.
        return columns.contiguous().permute(0, 2, 3, 1)

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
        total: Tensor | None = None
        for images, gradients in self.parts(x, grad):
            rows = self.input_rows(images, gradients)
            rows = (rows.mean(2, dtype=dtype) if reduce else rows.flatten(1, 2)).to(dtype)
            moment = second_moment(rows, diagonal=diagonal, append_one=append_one)
            total = moment if total is None else total.add_(moment)
        assert total is not None  # split gives at least one chunk
        return total

    def parts(self, x: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        x, grad = self._batched(x), self._batched(grad)
        per_image = self.blocks * self.inputs * grad.shape[2:].numel()
        chunk = max(1, _PATCH_ELEMENTS // per_image)
        yield from zip(x.split(chunk), grad.split(chunk), strict=True)


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvLayer(_Spatial):
    def __init__(self, name: str, module: _Conv) -> None:
        super().__init__(name, module)
        # The papers' code knows 2-D convolutions of one group.
        self.in_papers = isinstance(module, nn.Conv2d) and module.groups == 1
        # Padded by a copy, after which the input is not needed again.
        reach = zip(module.kernel_size, module.dilation, strict=True)
        uneven = module.padding == "same" and any(d * (k - 1) % 2 for k, d in reach)
        self.keeps_another = module.padding_mode == "circular" or uneven

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
        module = self.module
        assert isinstance(module, _Conv)
        x, grad = self._batched(x), self._batched(grad)
        plain = not reduce and not diagonal and set(module.stride) == {1}
        padded, pad = x, self._padding()
        if plain and module.padding_mode != "zeros":
            padded, pad = self._padded(x), ((0, 0),) * self.dims
        # Their owner may have set lists, and sizes are symbols while something is traced.
        geometry = tuple(module.kernel_size), tuple(module.dilation), pad
        if not plain or not pays(tuple(map(int, padded.shape[2:])), *geometry):
            return super().input_moment(
                x, grad, reduce=reduce, diagonal=diagonal, append_one=append_one, dtype=dtype
            )
        padded = padded.to(dtype)
        moment = patch_moment(padded, *geometry, self.blocks)
        if not append_one:
            return moment
        total = patch_sum(padded, *geometry, self.blocks)
        return bordered(moment, total, x.shape[0] * grad.shape[2:].numel())

    def _patches(self, x: Tensor, grad: Tensor) -> Tensor:
        module = self.module
        assert isinstance(module, _Conv)
        return windows(self._padded(x), module.kernel_size, module.stride, module.dilation)

    def _padded(self, x: Tensor) -> Tensor:
        module = self.module
        assert isinstance(module, _Conv)
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return F.pad(x, [side for pair in reversed(self._padding()) for side in pair], mode=mode)

    def _padding(self) -> tuple[tuple[int, int], ...]:
        """Before and after, in each dimension; "same" puts the odd element at the end."""
        module = self.module
        assert isinstance(module, _Conv)
        pairs = []
        for i in range(self.dims):
            if module.padding == "same":
                total = module.dilation[i] * (module.kernel_size[i] - 1)
                pairs.append((total // 2, total - total // 2))
            elif module.padding == "valid":
                pairs.append((0, 0))
            else:
                pairs.append((int(module.padding[i]), int(module.padding[i])))
        return tuple(pairs)


@register_layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeLayer(_Spatial):
    """A transposed convolution is a plain one over its input with zeros between the elements."""

    def _patches(self, x: Tensor, grad: Tensor) -> Tensor:
        module = self.module
        assert isinstance(module, _ConvTranspose)
        stuffed = x.new_zeros(
            *x.shape[:2],
            *((n - 1) * s + 1 for n, s in zip(x.shape[2:], module.stride, strict=True)),
        )
        elements = (slice(None), slice(None), *(slice(None, None, s) for s in module.stride))
        stuffed[elements] = x
        pad: list[int] = []
        for i in range(self.dims):
            reach = module.dilation[i] * (module.kernel_size[i] - 1)
            before = reach - int(module.padding[i])
            # The gradient's size says what output_padding, or output_size=, came to in this call.
            after = grad.shape[2 + i] + reach - stuffed.shape[2 + i] - before
            pad = [before, after, *pad]
        stuffed = F.pad(stuffed, pad)
        patches = windows(stuffed, module.kernel_size, (1,) * self.dims, module.dilation)
        return patches.flip(tuple(range(2 + self.dims, 2 + 2 * self.dims)))

    def weight_view(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.blocks, self.in_shape[0])).transpose(1, 2)
