"""Second moments of a convolution's patches without forming the patches.

Over all positions at which a patch meets the input, its moment is the input's autocorrelation:
taps δ and δ' meet at the shift δ' − δ, whatever δ. For a kernel of 3×3 these are 13 products of C×C
and their mirror images, in place of one of 9C×9C. Positions that the convolution leaves out, thin
strips along the border, are formed and taken off again, so that the result is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .algebra import second_moment

Pairs = Sequence[tuple[int, int]]  # zeros before and after, for each dimension


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Sliding windows: ``[batch, channels, *positions, *kernel]``, a view."""
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d]
    return x


def pays(size: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], pad: Pairs) -> bool:
    """Whether this takes fewer products of channels than patches would, by a clear margin."""
    taps = math.prod(kernel)
    positions = [
        n + sum(p) - d * (k - 1) for n, k, d, p in zip(size, kernel, dilation, pad, strict=True)
    ]
    extended = [n + d * (k - 1) for n, k, d in zip(size, kernel, dilation, strict=True)]
    if taps == 1 or min(positions) < 1:
        return False
    cost = kernel[0] * math.prod(2 * k - 1 for k in kernel[1:]) * math.prod(size)
    for axis, start, stop, _ in _strips(size, kernel, dilation, pad):
        long = math.prod(positions[:axis]) * math.prod(extended[axis + 1 :])
        cost += long * (taps // kernel[axis] * (stop - start)) ** 2
    return 1.5 * cost < taps**2 * math.prod(positions)


def patch_moment(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], pad: Pairs, groups: int
) -> Tensor:
    """Σ u uᵀ over the patches of a convolution of stride 1, ``[groups, C·k, C·k]``.

    ``x`` is ``[batch, groups·C, *size]``; a patch is ordered as a weight is, (channel, *tap).
    """
    dims, channels = len(kernel), x.shape[1] // groups
    # [groups, C, *taps, C, *taps]
    moment = _toeplitz(_autocorrelation(x, kernel, dilation, groups), kernel).contiguous()
    for axis, start, stop, first in _strips(x.shape[2:], kernel, dilation, pad):
        rows = _strip(x, kernel, dilation, pad, groups, axis, first, stop - start)
        taps = [stop - start if i == axis else k for i, k in enumerate(kernel)]
        moment_there = second_moment(rows.mT, diagonal=False)
        part = moment_there.view(groups, channels, *taps, channels, *taps)
        here = moment.narrow(2 + axis, start, stop - start)
        here.narrow(3 + dims + axis, start, stop - start).sub_(part)
    size = channels * math.prod(kernel)
    return moment.view(groups, size, size)


def patch_sum(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], pad: Pairs, groups: int
) -> Tensor:
    """Σ u over the same patches, ``[groups, C·k]``."""
    whole = F.pad(x.sum(0, keepdim=True), [side for pair in reversed(pad) for side in pair])
    taps = windows(whole, kernel, [1] * len(kernel), dilation)
    return taps.sum(tuple(range(2, 2 + len(kernel)))).view(groups, -1)


def _autocorrelation(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """Σ x[c, q] x[c', q + s] at all shifts s between taps, ``[groups, C, C, *(2k − 1)]``.

    It is the gradient of a convolution's weight where input and output gradient are both ``x``.
    """
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    # Half of the shifts of the first dimension are mirror images of the other half.
    sides = [(0, reach[0]), *((r, r) for r in reach[1:])]
    shifts = [kernel[0], *(2 * k - 1 for k in kernel[1:])]
    per_group = x.shape[1] // groups
    weight = x.new_empty(1).expand(x.shape[1], per_group, *shifts)
    ones, zeros = [1] * len(kernel), [0] * len(kernel)
    _, half, _ = torch.ops.aten.convolution_backward(
        x,
        F.pad(x, [side for pair in reversed(sides) for side in pair]),
        weight,
        None,
        ones,
        zeros,
        list(dilation),
        False,
        zeros,
        groups,
        [False, True, False],
    )
    half = half.unflatten(0, (groups, per_group))
    space = list(range(3, half.dim()))
    mirror = half.transpose(1, 2).flip(space)
    middle = (half[:, :, :, :1] + mirror[:, :, :, -1:]) / 2  # exactly symmetric
    return torch.cat([mirror[:, :, :, :-1], middle, half[:, :, :, 1:]], dim=3)


def _toeplitz(correlation: Tensor, kernel: Sequence[int]) -> Tensor:
    """``[groups, C, *taps, C, *taps]``: at taps δ and δ' what the shift δ' − δ has."""
    dims = len(kernel)
    for axis, k in enumerate(kernel, start=3):
        # Windows at w hold the shifts from w − (k − 1) on: those of the tap δ = k − 1 − w.
        correlation = correlation.unfold(axis, k, 1).flip(axis)
    taps, others = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    return correlation.permute(0, 1, *taps, 2, *others)


def _strips(
    size: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], pad: Pairs
) -> Iterator[tuple[int, int, int, int]]:
    """What a convolution leaves out of all positions at which a patch meets the input.

    One dimension after the other: the axis, the taps from ``start`` to ``stop`` that meet the
    input, and where in the input the first of them is.
    """
    geometry = zip(size, kernel, dilation, pad, strict=True)
    for axis, (n, k, d, (before, after)) in enumerate(geometry):
        last = n + after - d * (k - 1)
        for at in (*range(-d * (k - 1), -before), *range(last, n)):
            start = max(0, -(at // d))
            stop = min(k, (n - 1 - at) // d + 1)
            if start < stop:
                yield axis, start, stop, at + d * start


def _strip(
    x: Tensor,
    kernel: Sequence[int],
    dilation: Sequence[int],
    pad: Pairs,
    groups: int,
    axis: int,
    first: int,
    count: int,
) -> Tensor:
    """The patches of one strip, ``[groups, C·taps, N]``; of the dimensions before, only what the
    convolution visits, so that no position is taken off twice."""
    dims = len(kernel)
    d = dilation[axis]
    x = x[(slice(None),) * (2 + axis) + (slice(first, first + d * (count - 1) + 1, d),)]
    sides = [
        (0, 0) if i == axis else pad[i] if i < axis else (dilation[i] * (kernel[i] - 1),) * 2
        for i in range(dims)
    ]
    x = F.pad(x, [side for pair in reversed(sides) for side in pair])
    taps = [count if i == axis else k for i, k in enumerate(kernel)]
    steps = [1 if i == axis else e for i, e in enumerate(dilation)]
    patches = windows(x, taps, [1] * dims, steps).unflatten(1, (groups, -1))
    positions, kernel_dims = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    # Positions last, as memory has them: that is copied in a half or a third of the time.
    rows = patches.permute(1, 2, *kernel_dims, 0, *positions)
    return rows.flatten(2 + dims).flatten(1, 1 + dims)
