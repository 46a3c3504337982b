"""Convolutions and transposed convolutions of one to three dimensions, grouped ones included."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad as of_weights

from ..linalg.moments import (
    bordered,
    second_moment,
    symmetric,
    takes_halves,
)
from ..linalg.products import lowered
from .base import Layer, register_layer

# Patches of this many elements are formed at once: memory stays bounded whatever the batch. GPUs
# get fewer calls: with the CPUs' number, a ResNet-50's took up to six times as long on an H100.
_PATCH_ELEMENTS = 1 << 24
_PATCH_ELEMENTS_OF_GPUS = 1 << 27

_ALL = slice(None)

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
_GRADIENTS = of_weights.conv1d_weight, of_weights.conv2d_weight, of_weights.conv3d_weight
_ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


class _Spatial(Layer):
    """A plain or transposed convolution: each output position has a row, a patch of the input."""

    divided_by_positions = True
    cast_by_autocast = True
    reads_input = False
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
        return tensor[None] if tensor.dim() == self.dims + 1 else tensor

    def _patches(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return a view ``[batch, channels, *output positions, *kernel]`` of the padded input."""
        raise NotImplementedError

    def input_rows(self, x: Tensor, grad: Tensor) -> Tensor:
        x, grad = self._batched(x), self._batched(grad)
        return _rows(self._patches(x, grad), self.blocks)

    def output_rows(self, x: Tensor | None, grad: Tensor) -> Tensor:
        grad = self._batched(grad).flatten(2)
        columns = grad.unflatten(1, (self.blocks, self.outputs)).permute(1, 2, 0, 3)
        # Copy channel by channel, as memory has them: this is fast, and suits the product.
        return columns.contiguous().permute(0, 2, 3, 1)

    def _sums(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return each tap's sum over an image's positions, ``[batch, blocks, inputs]``."""
        raise NotImplementedError

    def _moment(self, x: Tensor, grad: Tensor, append_one: bool, dtype: torch.dtype) -> Tensor:
        """Return Σ a aᵀ over all positions of a part of the batch."""
        rows = self.input_rows(x, grad).flatten(1, 2)
        return second_moment(rows, dtype, diagonal=False, append_one=append_one)

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
            if reduce or diagonal:
                moment = self._cheap_moment(
                    images.to(dtype), gradients, reduce, diagonal, append_one
                )
            else:
                moment = self._moment(images, gradients, append_one, dtype)
            total = moment if total is None else total.add_(moment)
        assert total is not None  # split gives at least one chunk
        return total

    def _cheap_moment(
        self, x: Tensor, grad: Tensor, reduce: bool, diagonal: bool, append_one: bool
    ) -> Tensor:
        """Return a moment of means over positions, or a diagonal one, without patches."""
        positions = grad.shape[2:].numel()
        if reduce:
            rows = self._sums(x, grad).transpose(0, 1) / positions
            return second_moment(rows, x.dtype, diagonal=diagonal, append_one=append_one)
        moment = self._sums(x.square().sum(0, keepdim=True), grad)[0]
        return F.pad(moment, (0, 1), value=x.shape[0] * positions) if append_one else moment

    def parts(self, x: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of input and output gradient: rows take much more memory than images."""
        x, grad = self._batched(x), self._batched(grad)
        per_image = self.blocks * self.inputs * grad.shape[2:].numel()
        most = _PATCH_ELEMENTS if x.device.type == "cpu" else _PATCH_ELEMENTS_OF_GPUS
        chunk = max(1, most // max(1, per_image))
        yield from zip(x.split(chunk), grad.split(chunk), strict=True)


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return sliding windows, ``[batch, channels, *positions, *kernel]``, as a view."""
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d]
    return x


def patch_sums(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return Σ u over each image's patches, ``[batch, channels, *kernel]``.

    Dimensions beyond the kernel's stay as they are.
    """
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        reach = (x.shape[dim] - d * (k - 1) - 1) // s * s + 1  # from the first position to the last
        x = x.unfold(dim, reach, d).narrow(dim, 0, k)[..., ::s].sum(-1)
    return x


def _rows(patches: Tensor, groups: int) -> Tensor:
    """Return rows ``[groups, batch, positions, C·kernel]``; copies go channel by channel."""
    dims = (patches.dim() - 2) // 2
    patches = patches.unflatten(1, (groups, -1))
    positions, kernel = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    columns = patches.permute(1, 2, *kernel, 0, *positions).flatten(1, 1 + dims)
    return columns.flatten(3).permute(0, 2, 3, 1)


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvLayer(_Spatial):
    watchable = True

    def __init__(self, name: str, module: _Conv) -> None:
        super().__init__(name, module)
        # The papers' code knows 2-D convolutions of one group.
        self.in_papers = isinstance(module, nn.Conv2d) and module.groups == 1
        # Such a forward pads a copy of its input, and does not keep the input.
        reach = zip(module.kernel_size, module.dilation, strict=True)
        uneven = module.padding == "same" and any(d * (k - 1) % 2 for k, d in reach)
        self.keeps_another = module.padding_mode == "circular" or uneven

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor | None:
        module = self.module
        assert isinstance(module, _Conv) and self.weight is not None
        dtype = torch.promote_types(grad.dtype, torch.float32)
        x, grad = self._padded(self._batched(x)).to(dtype), self._batched(grad).to(dtype)
        geometry = {"stride": module.stride, "dilation": module.dilation, "groups": module.groups}
        made = _GRADIENTS[self.dims - 1](x, self.weight.shape, grad, **geometry)
        return self.weight_view(made).flatten(2)

    def _sums(self, x: Tensor, grad: Tensor) -> Tensor:
        module = self.module
        assert isinstance(module, _Conv)
        sums = patch_sums(self._padded(x), module.kernel_size, module.stride, module.dilation)
        return sums.unflatten(1, (self.blocks, -1)).flatten(2)

    def _moment(self, x: Tensor, grad: Tensor, append_one: bool, dtype: torch.dtype) -> Tensor:
        """Return Σ a aᵀ over all positions of a part of the batch.

        Each row of the kernel sees a row of the input. At stride 1, all pairs of kernel rows with
        one shift between them see the same pairs of input rows, but for some at the borders: the
        sum over the pairs that they share is taken once.
        """
        module = self.module
        assert isinstance(module, _Conv)
        taps, apart, positions = module.kernel_size[0], module.dilation[0], grad.shape[2]
        # Without it, a mean step at the defaults took 1.13 times as long for a ResNet-32, and 1.17
        # for a U-Net (in turns, one thread of an AMD EPYC with AVX-512).
        shares = taps > 1 and module.stride[0] == 1 and positions >= apart * (taps - 1)
        if not shares or takes_halves(x) or lowered():
            return super()._moment(x, grad, append_one, dtype)
        sizes = module.kernel_size, module.stride, module.dilation
        images = windows(self._padded(x).to(dtype), *((1, *of_dims[1:]) for of_dims in sizes))
        images = images.unflatten(1, (self.blocks, -1))
        positions_of, kernel = range(4, 3 + self.dims), range(3 + self.dims, 3 + 2 * self.dims)
        images = images.permute(1, 2, *kernel, 3, 0, *positions_of).flatten(1, 1 + self.dims)
        images = images.flatten(3).contiguous()  # [groups, C·other taps, rows, other positions]

        def rows(start: int, stop: int) -> Tensor:
            return images[:, :, start:stop].flatten(2)

        n, side = self.inputs, images.shape[1]
        moment = images.new_empty(self.blocks, taps, side, taps, side)
        for count in range(taps):
            shift, last = count * apart, (taps - 1 - count) * apart
            shared = rows(last, positions) @ rows(last + shift, positions + shift).mT
            for tap in range(taps - count):
                block, first = shared, tap * apart
                for start, stop in ((first, last), (positions, positions + first)):
                    if start < stop:
                        right = rows(start + shift, stop + shift)
                        block = torch.baddbmm(block, rows(start, stop), right.mT)
                moment[:, tap + count, :, tap] = block.mT
                moment[:, tap, :, tap + count] = block
        sides = taps, self.in_shape[0], side // self.in_shape[0]
        moment = moment.view(-1, *sides, *sides).permute(0, 2, 1, 3, 5, 4, 6).reshape(-1, n, n)
        if not append_one:
            return symmetric(moment)
        total = self._sums(x.sum(0, keepdim=True, dtype=dtype), grad)[0]
        return bordered(symmetric(moment), total, grad[:, 0].numel())

    def _patches(self, x: Tensor, grad: Tensor) -> Tensor:
        module = self.module
        assert isinstance(module, _Conv)
        return windows(self._padded(x), module.kernel_size, module.stride, module.dilation)

    def _padded(self, x: Tensor) -> Tensor:
        module = self.module
        assert isinstance(module, _Conv)
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        sides = [side for pair in reversed(self._padding()) for side in pair]
        return F.pad(x, sides, mode=mode) if any(sides) else x  # torch would copy it

    def _padding(self) -> tuple[tuple[int, int], ...]:
        """Return zeros before and after each dimension; "same" puts the odd one at the end."""
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

    def _sums(self, x: Tensor, grad: Tensor) -> Tensor:
        module, ones = self.module, (1,) * self.dims
        assert isinstance(module, _ConvTranspose)
        sums = patch_sums(self._stuffed(x, grad), module.kernel_size, ones, module.dilation)
        return sums.flip(self._taps(2)).unflatten(1, (self.blocks, -1)).flatten(2)

    def _moment(self, x: Tensor, grad: Tensor, append_one: bool, dtype: torch.dtype) -> Tensor:
        """Return Σ a aᵀ over all positions of a part of the batch.

        Along a dimension of stride s, a tap meets elements at every s-th position, and zeros at the
        others: only taps that meet elements at the same positions have a product.
        """
        # Without it, a mean step at the defaults took 1.05 times as long for a U-Net.
        module, ones = self.module, (1,) * self.dims
        assert isinstance(module, _ConvTranspose)
        if lowered():
            return super()._moment(x, grad, append_one, dtype)
        patches = windows(self._stuffed(x, grad), module.kernel_size, ones, module.dilation)
        moment = x.new_zeros(self.blocks, *self.in_shape, *self.in_shape, dtype=dtype)
        for phase in itertools.product(*map(range, module.stride)):
            taps, positions = [], []
            for i, first in enumerate(phase):
                k, s, d = module.kernel_size[i], module.stride[i], module.dilation[i]
                start = first + int(module.padding[i]) - d * (k - 1)
                met = [t for t in range(k) if (start + d * t) % s == 0]
                taps.append(slice(met[0], None, s // math.gcd(s, d)) if met else slice(0))
                positions.append(slice(first, None, s))
            seen = patches[(_ALL, _ALL, *positions, *taps)]
            part = second_moment(_rows(seen, self.blocks).flatten(1, 2), dtype, diagonal=False)
            shape = self.in_shape[0], *seen.shape[2 + self.dims :]
            part = part.unflatten(2, shape).unflatten(1, shape)
            moment[(_ALL, _ALL, *taps, _ALL, *taps)] = part
        moment = moment.flip(*self._taps(2), *self._taps(3 + self.dims)).flatten(1, 1 + self.dims)
        moment = symmetric(moment.flatten(2))
        if not append_one:
            return moment
        total = self._sums(x.sum(0, keepdim=True, dtype=dtype), grad)[0]
        return bordered(moment, total, grad[:, 0].numel())

    def _patches(self, x: Tensor, grad: Tensor) -> Tensor:
        module = self.module
        assert isinstance(module, _ConvTranspose)
        stuffed = self._stuffed(x, grad)
        patches = windows(stuffed, module.kernel_size, (1,) * self.dims, module.dilation)
        return patches.flip(self._taps(2 + self.dims))

    def _taps(self, first: int) -> list[int]:
        return list(range(first, first + self.dims))

    def _stuffed(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the input of the plain convolution, which meets the taps in reverse order."""
        module = self.module
        assert isinstance(module, _ConvTranspose)
        stuffed = x.new_zeros(
            *x.shape[:2],
            *((n - 1) * s + 1 for n, s in zip(x.shape[2:], module.stride, strict=True)),
        )
        elements = (_ALL, _ALL, *(slice(None, None, s) for s in module.stride))
        stuffed[elements] = x
        pad: list[int] = []
        for i in range(self.dims):
            reach = module.dilation[i] * (module.kernel_size[i] - 1)
            before = reach - int(module.padding[i])
            # The gradient's size tells this call's output_padding, or its output_size=.
            after = grad.shape[2 + i] + reach - stuffed.shape[2 + i] - before
            pad = [before, after, *pad]
        return F.pad(stuffed, pad)

    def weight_view(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.blocks, self.in_shape[0])).transpose(1, 2)
