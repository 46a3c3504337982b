"""Convolutions and transposed convolutions of one to three dimensions, grouped ones included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad as of_weights

from ..linalg.moments import bordered, second_moment, symmetric, takes_halves
from ..linalg.products import lowered
from .base import Layer, register_layer

# Patches of this many elements are formed at once: memory stays bounded whatever the batch. GPUs
# get fewer calls: with the CPUs' number, a ResNet-50's took up to six times as long on an H100.
_PATCH_ELEMENTS = 1 << 24
_PATCH_ELEMENTS_OF_GPUS = 1 << 27

_GRADIENTS = of_weights.conv1d_weight, of_weights.conv2d_weight, of_weights.conv3d_weight


class _Spatial(Layer):
    """A plain or transposed convolution: each output position has a row, a patch of the input."""

    divided_by_positions = cast_by_autocast = reads_dense_only = True
    module: Any  # a convolution of torch

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        self.dims, self.blocks = len(module.kernel_size), module.groups

    def unbatched(self, x: Tensor) -> bool:
        return x.dim() == self.dims + 1

    def _batched(self, tensor: Tensor) -> Tensor:
        return tensor[None] if tensor.dim() == self.dims + 1 else tensor

    def _plain(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Sequence[int]]:
        """Return the padded input and the stride of a plain convolution with the same patches."""
        raise NotImplementedError

    def _products(self, x: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
        return None  # or Σ a aᵀ, without the bias's 1, if that takes fewer products than patches do

    def _patches(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return a view ``[batch, channels, *output positions, *kernel]`` of the padded input."""
        (plain, stride), module = self._plain(x, grad), self.module
        return windows(plain, module.kernel_size, stride, module.dilation)

    def _sums(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return each tap's sum over an image's positions, ``[batch, blocks, inputs]``."""
        (sums, stride), module = self._plain(x, grad), self.module
        geometry = zip(module.kernel_size, stride, module.dilation, strict=True)
        for dim, (k, s, d) in enumerate(geometry, start=2):
            # From the first position to the last.
            reach = (sums.shape[dim] - d * (k - 1) - 1) // s * s + 1
            sums = sums.unfold(dim, reach, d).narrow(dim, 0, k)[..., ::s].sum(-1)
        return sums.unflatten(1, (self.blocks, -1)).flatten(2)

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        patches = self._patches(self._batched(x), self._batched(grad))
        patches = patches.unflatten(1, (self.blocks, -1))
        positions, kernel = range(3, 3 + self.dims), range(3 + self.dims, 3 + 2 * self.dims)
        # Copies go channel by channel.
        columns = patches.permute(1, 2, *kernel, 0, *positions).flatten(1, 1 + self.dims)
        return columns.flatten(3).permute(0, 2, 3, 1)

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        grad = self._batched(grad).flatten(2)
        columns = grad.unflatten(1, (self.blocks, self.outputs)).permute(1, 2, 0, 3)
        # Copy channel by channel, as memory has them: this is fast, and suits the product.
        return columns.contiguous().permute(0, 2, 3, 1)

    def input_moment(
        self, x: Tensor, grad: Tensor, *, reduce: bool, diagonal: bool, append_one: bool, dtype: Any
    ) -> Tensor:
        x, grad = self._batched(x), self._batched(grad)
        positions, total = grad.shape[2:].numel(), None
        # Images come in parts: rows take much more memory.
        most = _PATCH_ELEMENTS if x.device.type == "cpu" else _PATCH_ELEMENTS_OF_GPUS
        chunk = max(1, most // max(1, self.blocks * self.inputs * positions))
        for images, gradients in zip(x.split(chunk), grad.split(chunk), strict=True):
            if reduce:
                rows = self._sums(images.to(dtype), gradients).transpose(0, 1) / positions
                moment = second_moment(rows, dtype, diagonal=diagonal, append_one=append_one)
            elif diagonal:
                squares = images.to(dtype).square().sum(0, keepdim=True)
                moment = self._sums(squares, gradients)[0]
                if append_one:
                    moment = F.pad(moment, (0, 1), value=len(images) * positions)
            elif (products := self._products(images, gradients, dtype)) is None:
                rows = self.input_rows(images, gradients).flatten(1, 2)
                moment = second_moment(rows, dtype, diagonal=False, append_one=append_one)
            else:
                moment = symmetric(products)
                if append_one:
                    sums = self._sums(images.sum(0, keepdim=True, dtype=dtype), gradients)[0]
                    moment = bordered(moment, sums, len(images) * positions)
            total = moment if total is None else total.add_(moment)
        assert total is not None  # split gives at least one chunk
        return total


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return sliding windows, ``[batch, channels, *positions, *kernel]``, as a view."""
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d]
    return x


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvLayer(_Spatial):
    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        # The papers' code knows 2-D convolutions of one group.
        self.in_papers = isinstance(module, nn.Conv2d) and module.groups == 1
        # Such a forward pads a copy of its input, and does not keep the input.
        reach = zip(module.kernel_size, module.dilation, strict=True)
        uneven = module.padding == "same" and any(d * (k - 1) % 2 for k, d in reach)
        self.keeps_another = module.padding_mode == "circular" or uneven

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor | None:
        assert self.weight is not None
        module, dtype = self.module, torch.promote_types(grad.dtype, torch.float32)
        (x, stride), grad = self._plain(self._batched(x), grad), self._batched(grad).to(dtype)
        geometry = {"stride": stride, "dilation": module.dilation, "groups": module.groups}
        made = _GRADIENTS[self.dims - 1](x.to(dtype), self.weight.shape, grad, **geometry)
        return self.weight_view(made).flatten(2)

    def _plain(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Sequence[int]]:
        module = self.module
        if module.padding == "same":  # the odd zero lies at the end
            reach = [d * (k - 1) for k, d in zip(module.kernel_size, module.dilation, strict=True)]
            pairs = [(n // 2, n - n // 2) for n in reach]
        else:
            padding = (0,) * self.dims if module.padding == "valid" else module.padding
            pairs = [(int(n), int(n)) for n in padding]
        sides = [side for pair in reversed(pairs) for side in pair]
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        # Without the question, torch would copy an input that needs no padding.
        return F.pad(x, sides, mode=mode) if any(sides) else x, module.stride

    def _products(self, x: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
        # Each row of the kernel sees a row of the input. At stride 1, all pairs of kernel rows with
        # one shift between them see the same pairs of input rows, but for some at the borders: take
        # the products that they share once.
        module = self.module
        taps, gap, positions = module.kernel_size[0], module.dilation[0], grad.shape[2]
        # Without it, a mean step at the defaults took 1.13 times as long for a ResNet-32, and 1.17
        # for a U-Net (in turns, one thread of an AMD EPYC with AVX-512).
        shares = taps > 1 and module.stride[0] == 1 and positions >= gap * (taps - 1)
        if not shares or takes_halves(x) or lowered():
            return None
        size, stride = (1, *module.kernel_size[1:]), (1, *module.stride[1:])
        plain = self._plain(x, grad)[0].to(dtype)
        images = windows(plain, size, stride, (1, *module.dilation[1:]))
        images = images.unflatten(1, (self.blocks, -1))
        positions_of, kernel = range(4, 3 + self.dims), range(3 + self.dims, 3 + 2 * self.dims)
        images = images.permute(1, 2, *kernel, 3, 0, *positions_of).flatten(1, 1 + self.dims)
        images = images.flatten(3).contiguous()  # [groups, C·other taps, rows, other positions]

        def rows(start: int, stop: int) -> Tensor:
            return images[:, :, start:stop].flatten(2)

        n, side = self.inputs, images.shape[1]
        moment = images.new_empty(self.blocks, taps, side, taps, side)
        for count in range(taps):
            shift, last = count * gap, (taps - 1 - count) * gap
            shared = rows(last, positions) @ rows(last + shift, positions + shift).mT
            for tap in range(taps - count):
                block, first = shared, tap * gap
                for start, stop in ((first, last), (positions, positions + first)):
                    if start < stop:
                        right = rows(start + shift, stop + shift)
                        block = torch.baddbmm(block, rows(start, stop), right.mT)
                moment[:, tap + count, :, tap] = block.mT
                moment[:, tap, :, tap + count] = block
        sides = taps, self.in_shape[0], side // self.in_shape[0]
        moment = moment.view(-1, *sides, *sides).permute(0, 2, 1, 3, 5, 4, 6)
        return moment.reshape(-1, n, n)


@register_layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeLayer(_Spatial):
    """A transposed convolution is a plain one over its input with zeros between the elements."""

    def _plain(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Sequence[int]]:
        """Return the input of the plain convolution, which meets the taps in reverse order."""
        module = self.module
        sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], module.stride, strict=True)]
        stuffed = x.new_zeros(*x.shape[:2], *sizes)
        stuffed[(slice(None), slice(None), *(slice(None, None, s) for s in module.stride))] = x
        pad: list[int] = []
        for i in range(self.dims):
            reach = module.dilation[i] * (module.kernel_size[i] - 1)
            before = reach - int(module.padding[i])
            # The gradient's size tells this call's output_padding, or its output_size=.
            after = grad.shape[2 + i] + reach - stuffed.shape[2 + i] - before
            pad = [before, after, *pad]
        return F.pad(stuffed, pad), (1,) * self.dims

    def _patches(self, x: Tensor, grad: Tensor) -> Tensor:
        return super()._patches(x, grad).flip(*range(2 + self.dims, 2 + 2 * self.dims))

    def _sums(self, x: Tensor, grad: Tensor) -> Tensor:
        sums = super()._sums(x, grad).unflatten(2, self.in_shape)
        return sums.flip(*range(3, 3 + self.dims)).flatten(2)

    def weight_view(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.blocks, -1)).transpose(1, 2)
