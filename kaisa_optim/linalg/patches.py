"""Second moments of a convolution's patches without forming the patches.

Over all positions at which a patch meets the input, the patches' moment is the input's
autocorrelation: taps δ and δ' meet at the shift δ' − δ, for every δ. For a kernel of 3×3 these are
13 products of C×C and their mirror images, in place of one product of 9C×9C. The convolution leaves
some of these positions out. These are subtracted again, so that the result is exact: a row of them
meets a strip along the border, and its moment is the strip's own autocorrelation. Rows and columns
of such positions cross at corners, which are added.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .moments import second_moment

_AT_ONCE = 1 << 19  # numbers of the images that CPUs take together
_FEW = 1 << 20  # numbers of shifted lines up to which no convolution is needed
_CALLS = 16  # the cost of a piece's calls, in products of channels with channels at a position
_MOST_TAPS = 256  # the places of all pairs of taps are kept in memory
_MOST_ROWS = 3  # products of channels with channels, for each one in the result
_REMEMBERED = 1 << 10  # geometries; each step has the same ones
Sizes = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]  # zeros before and after, for each dimension
# For each dimension in which positions are left out: its axis, and a tuple of _strips.
Strip = tuple[tuple[int, int, int, int, int], ...]
_Alike = list[tuple[tuple[Sizes, ...], list[Strip]]]
# For pieces of equal shape: how many taps they cut, their kernel, and each piece's axes and taps.
_Layout = tuple[tuple[Sizes, Sizes, tuple[tuple[Sizes, ...], ...]], ...]


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return sliding windows, ``[batch, channels, *positions, *kernel]``, as a view."""
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d]
    return x


@functools.lru_cache(_REMEMBERED)
def pays(size: Sizes, kernel: Sizes, dilation: Sizes, pad: Pairs) -> bool:
    """Return whether :func:`patch_moment` needs clearly fewer products of channels than patches.

    It must also take little more memory than the result. Wide kernels without padding take much
    more: the strips that they leave out are as wide as the kernels.
    """
    taps = math.prod(kernel)
    positions = [
        n + sum(p) - d * (k - 1) for n, k, d, p in zip(size, kernel, dilation, pad, strict=True)
    ]
    if not 1 < taps <= _MOST_TAPS or min(positions) < 1:
        return False
    if _rows(_alike(size, kernel, dilation, pad)) > _MOST_ROWS * taps**2:
        return False
    cost = 0
    for piece in _pieces(size, kernel, dilation, pad):
        cut, rest, rows = _shape(piece, len(size))
        halves = [2 * kernel[i] - 1 for i in rest] or [1]
        products = math.prod(cut) ** 2 * (halves[0] // 2 + 1) * math.prod(halves[1:])
        cost += products * math.prod([*(size[i] for i in rest), *rows]) + _CALLS
    return 1.5 * cost < taps**2 * math.prod(positions)


def patch_moment(x: Tensor, kernel: Sizes, dilation: Sizes, pad: Pairs, groups: int) -> Tensor:
    """Return Σ u uᵀ over the patches of a convolution of stride 1, ``[groups, C·k, C·k]``.

    ``x`` is ``[batch, groups·C, *size]``; a patch is ordered as a weight is, (channel, *tap).
    """
    channels, taps = x.shape[1] // groups, math.prod(kernel)
    alike = _alike(tuple(map(int, x.shape[2:])), kernel, dilation, pad)
    table = x.new_empty(_rows(alike), groups * channels * channels)
    first = 0
    for (counts, own_kernel, own_dilation, *_), pieces in alike:
        images = [_strip_images(x, groups, dilation, piece) for piece in pieces]
        joined = images[0] if len(images) == 1 else torch.cat(images, 1)
        part = _autocorrelation(joined, own_kernel, own_dilation, groups * len(pieces))
        sides = (math.prod(counts), channels)
        part = part.view(len(pieces), groups, -1, *sides, *sides).permute(0, 2, 3, 5, 1, 4, 6)
        stop = first + math.prod(part.shape[:4])
        table[first:stop].view(part.shape).copy_(part)
        first = stop
        del images, joined, part  # in wide layers each is as large as the result
    index, starts, weights = _places(kernel, _layout(alike), x.dtype, x.device)
    half = F.embedding_bag(index, table, starts, mode="sum", per_sample_weights=weights)
    del table
    half = half.view(taps, taps, groups, channels, channels).permute(2, 3, 0, 4, 1)
    whole = half + half.permute(0, 3, 4, 1, 2)  # exactly symmetric
    del half
    return whole.reshape(groups, channels * taps, channels * taps)


def _half_of_shifts(kernel: Sizes) -> int:
    """Return how many shifts between taps are not before 0; shift 0 stands first."""
    return (math.prod(2 * k - 1 for k in kernel) + 1) // 2


def _rows(alike: _Alike) -> int:
    return sum(
        len(pieces) * _half_of_shifts(kernel) * math.prod(counts) ** 2
        for (counts, kernel, *_), pieces in alike
    )


def _layout(alike: _Alike) -> _Layout:
    """Return the key of the places of products, which do not depend on the sizes of images."""
    return tuple(
        (counts, kernel, tuple(tuple(cut[:3] for cut in piece) for piece in pieces))
        for (counts, kernel, *_), pieces in alike
    )


@functools.lru_cache(_REMEMBERED)
def _places(
    kernel: Sizes, layout: _Layout, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that add up to the block of each pair of taps, as bags of ``embedding_bag``.

    A block and its mirror image count once: a product of two taps stands at one of the two places.
    If it could stand at both, half of it stands at each.
    """
    blocks, rows, weights, first = [], [], [], 0
    for counts, own_kernel, pieces in layout:
        for piece in pieces:
            block, shift, row = _pairs_of_taps(kernel, piece, math.prod(counts))
            blocks.append(block)
            rows.append(first + row)
            sign = (-1.0) ** len(piece)
            weights.append(torch.where(shift == 0, sign / 2, sign))
            first += _half_of_shifts(own_kernel) * math.prod(counts) ** 2
    block = torch.cat(blocks)
    order = block.argsort(stable=True)
    counted = block.bincount(minlength=math.prod(kernel) ** 2)
    starts, weight = counted.cumsum(0) - counted, torch.cat(weights)[order].to(dtype)
    # These copies wait, once for each geometry: other streams may read the tensors later.
    return torch.cat(rows)[order].to(device), starts.to(device), weight.to(device)


def _pairs_of_taps(
    kernel: Sizes, piece: tuple[Sizes, ...], count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of taps that meet a piece: their blocks' places, shifts and rows.

    A shift is between the two taps, in the dimensions that the piece does not cut; only shifts from
    0 on are kept. Rows are numbered within the piece.
    """
    taps, dims, cut = math.prod(kernel), len(kernel), {axis for axis, *_ in piece}
    at = torch.cartesian_prod(*(torch.arange(k, device="cpu") for k in kernel)).view(taps, dims)
    meets = torch.ones(taps, dtype=torch.bool, device="cpu")
    inner = torch.zeros(taps, dtype=torch.long, device="cpu")
    for axis, start, stop in piece:
        meets &= (at[:, axis] >= start) & (at[:, axis] < stop)
        inner = inner * (stop - start) + at[:, axis] - start
    taken = meets.nonzero()[:, 0]
    one, other = taken.repeat_interleave(len(taken)), taken.repeat(len(taken))
    shift = torch.zeros_like(one)
    for axis in range(dims):
        if axis not in cut:
            shift = shift * (2 * kernel[axis] - 1) + at[other, axis] - at[one, axis]
    one, other, shift = (t[shift >= 0] for t in (one, other, shift))
    return one * taps + other, shift, (shift * count + inner[one]) * count + inner[other]


@functools.lru_cache(_REMEMBERED)
def _alike(size: Sizes, kernel: Sizes, dilation: Sizes, pad: Pairs) -> _Alike:
    """Return pieces grouped by shape.

    A shape says how many taps of each dimension are cut, the other dimensions' kernel, dilation and
    size, and the numbers of positions.
    """
    alike: dict[tuple[Sizes, ...], list[Strip]] = {}
    for piece in _pieces(size, kernel, dilation, pad):
        cut, rest, rows = _shape(piece, len(size))
        of_rest = (tuple(g[i] for i in rest) for g in (kernel, dilation, size))
        alike.setdefault((cut, *of_rest, rows), []).append(piece)
    return list(alike.items())


def _shape(piece: Strip, dims: int) -> tuple[Sizes, list[int], Sizes]:
    """Return how many taps a piece cuts of each dimension, the other dimensions, and its rows."""
    cut = {axis: stop - start for axis, start, stop, *_ in piece}
    rest = [i for i in range(dims) if i not in cut]
    return tuple(cut.values()), rest, tuple(rows for *_, rows in piece)


def _strip_images(x: Tensor, groups: int, dilation: Sizes, piece: Strip) -> Tensor:
    """Return the inputs of a piece's taps: taps become channels, and positions images.

    The shape is ``[batch·positions, groups·taps·C, *other dimensions]``.
    """
    batch, of_batch, of_channel = x.shape[0], x.stride(0), x.stride(1)
    channels, first = x.shape[1] // groups, x.storage_offset()
    rows: list[tuple[int, int]] = []
    taps: list[tuple[int, int]] = []
    rest = list(zip(x.shape, x.stride(), strict=True))[2:]
    for axis, start, stop, at, count in reversed(piece):
        _, stride = rest.pop(axis)
        first += at * stride
        rows.insert(0, (count, stride))
        taps.insert(0, (stop - start, dilation[axis] * stride))
    view = (batch, of_batch), *rows, (groups, channels * of_channel), *taps
    view = *view, (channels, of_channel), *rest
    seen = x.as_strided([n for n, _ in view], [stride for _, stride in view], first)
    return seen.flatten(0, len(rows)).flatten(1, 2 + len(taps))


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


def _autocorrelation(x: Tensor, kernel: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Return Σ x[c, q] x[c', q + s] at shifts s between taps, ``[groups, shifts, C, C]``.

    Shifts go from 0 on, in the last dimension fastest; the other shifts are mirror images.
    """
    if not kernel:
        rows = x.unflatten(1, (groups, -1)).transpose(0, 1)
        return second_moment(rows, x.dtype, diagonal=False)[:, None]
    if len(kernel) == 1 and kernel[0] * x.numel() <= _FEW:
        return _shifts_of_lines(x.unflatten(1, (groups, -1)), kernel[0], dilation[0])
    total: Tensor | None = None
    for images in x.split(_images_at_once(x)):
        own = _by_convolution(images, kernel, dilation, groups)
        total = own if total is None else total.add_(own)
    assert total is not None
    found = total.unflatten(0, (groups, -1)).flatten(3).permute(0, 3, 1, 2)
    return found[:, -_half_of_shifts(kernel) :]


def _images_at_once(x: Tensor) -> int:
    """Return how many images are taken together.

    On CPUs, images are so few that copies fit into memory that the process already has: fresh pages
    for copies of all images took as long as the products.
    """
    if x.device.type != "cpu":
        return max(1, len(x))
    return max(1, _AT_ONCE // max(1, x[:1].numel()))


def _by_convolution(x: Tensor, kernel: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Return the autocorrelation as a weight's gradient: x is both input and output gradient.

    The shape is ``[groups·C, C, *shifts]``, with shifts from 0 on in the first dimension.
    """
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    shifts = [kernel[0], *(2 * k - 1 for k in kernel[1:])]
    weight = x.new_empty(1).expand(x.shape[1], x.shape[1] // groups, *shifts)
    ones, zeros = [1] * len(kernel), [0] * len(kernel)
    _, found, _ = torch.ops.aten.convolution_backward(
        x,
        # Zeros on both sides are the convolution's own padding: no copy, and no products.
        F.pad(x, [0, 0] * (len(kernel) - 1) + [0, reach[0]]),
        weight,
        None,
        ones,
        [0, *reach[1:]],
        list(dilation),
        False,
        zeros,
        groups,
        [False, True, False],
    )
    return found


def _shifts_of_lines(x: Tensor, kernel: int, dilation: int) -> Tensor:
    """Return the autocorrelation of short lines ``[batch, groups, C, n]``, faster if few."""
    lines = x.permute(1, 2, 0, 3)
    groups, channels, _, n = lines.shape
    moved = lines.new_empty(groups, kernel, *lines.shape[1:])
    moved[:, 0] = lines
    for place in range(1, kernel):
        start = min(n, place * dilation)
        moved[:, place, ..., : n - start] = moved[:, 0, ..., start:]
        moved[:, place, ..., n - start :] = 0
    product = moved[:, 0].flatten(2) @ moved.flatten(1, 2).flatten(2).mT
    return product.unflatten(2, (kernel, channels)).movedim(2, 1)


def _pieces(size: Sizes, kernel: Sizes, dilation: Sizes, pad: Pairs) -> Iterator[Strip]:
    """Yield all positions, rows of positions that a convolution leaves out, and their crossings."""
    strips = [
        list(_strips(*geometry)) for geometry in zip(size, kernel, dilation, pad, strict=True)
    ]
    for count in range(1 + len(size)):
        for axes in itertools.combinations(range(len(size)), count):
            for cut in itertools.product(*(strips[axis] for axis in axes)):
                yield tuple((axis, *strip) for axis, strip in zip(axes, cut, strict=True))


def _strips(n: int, k: int, d: int, pad: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the positions of one dimension that are left out although taps meet the input there.

    Neighbours that the same taps meet, from ``start`` to ``stop``, are one strip. Its tuple goes on
    with the first position's first tap, as a place in the input, and the number of positions.
    """
    last = n + pad[1] - d * (k - 1)
    strip: tuple[int, int, int, int] | None = None
    for at in (*range(-d * (k - 1), -pad[0]), *range(last, n)):
        start = max(0, -(at // d))
        stop = min(k, (n - 1 - at) // d + 1)
        first = at + d * start
        if start >= stop:
            continue
        if strip is not None and strip[:2] == (start, stop) and first == strip[2] + strip[3]:
            strip = *strip[:3], strip[3] + 1
            continue
        if strip is not None:
            yield strip
        strip = start, stop, first, 1
    if strip is not None:
        yield strip
