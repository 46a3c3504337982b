"""Second moments of a convolution's patches without forming the patches.

Over all positions at which a patch meets the input, its moment is the input's autocorrelation:
taps δ and δ' meet at the shift δ' − δ, whatever δ. For a kernel of 3×3 these are 13 products of C×C
and their mirror images, in place of one of 9C×9C. Positions that the convolution leaves out are
taken off again, so that the result is exact: a row of them meets a strip along the border, whose
moment is the strip's own autocorrelation. Rows and columns cross at corners, which are added.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import spectrum
from .moments import second_moment
from .precision import full_precision
from .products import multiplies_slowly
from .spectrum import Sizes, half_of_shifts

_AT_ONCE = 1 << 19  # numbers of the images that CPUs take together
_FEW = 1 << 20  # numbers of lines, moved by each shift, that need no convolution
_CALLS = 16  # what a piece's calls cost, in products of channels with channels at a position
_MOST_TAPS = 256  # of whose pairs the places are remembered
_MOST_ROWS = 3  # products of channels with channels, for each one in the result
_REMEMBERED = 1 << 10  # geometries, of which each step has the same
Pairs = tuple[tuple[int, int], ...]  # zeros before and after, for each dimension
# Of each dimension in which positions are left out: its axis, and what _strips says.
Strip = tuple[tuple[int, int, int, int, int], ...]
_Alike = list[tuple[tuple[Sizes, ...], list[Strip]]]
# Of pieces that are alike: how many taps they cut, their kernel, and each one's axes and taps.
_Layout = tuple[tuple[Sizes, Sizes, tuple[tuple[Sizes, ...], ...]], ...]


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Sliding windows: ``[batch, channels, *positions, *kernel]``, a view."""
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d]
    return x


@functools.lru_cache(_REMEMBERED)
def pays(size: Sizes, kernel: Sizes, dilation: Sizes, pad: Pairs) -> bool:
    """Return whether this needs clearly fewer products of channels than patches would.

    It must also take little more memory than the result, which it does not for wide kernels
    without padding: the strips that they leave out are as wide.
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
    """Σ u uᵀ over the patches of a convolution of stride 1, ``[groups, C·k, C·k]``.

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
        del images, joined, part  # of wide layers each is as large as the result
    index, starts, weights = _places(kernel, _layout(alike), x.dtype, x.device)
    half = F.embedding_bag(index, table, starts, mode="sum", per_sample_weights=weights)
    del table
    half = half.view(taps, taps, groups, channels, channels).permute(2, 3, 0, 4, 1)
    whole = half + half.permute(0, 3, 4, 1, 2)  # exactly symmetric
    del half
    return whole.reshape(groups, channels * taps, channels * taps)


def _rows(alike: _Alike) -> int:
    return sum(
        len(pieces) * half_of_shifts(kernel) * math.prod(counts) ** 2
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
    """Which rows add up to the block of each pair of taps, as bags for ``embedding_bag``.

    A block and its mirror image are one: what two taps have in common stands at one of the two
    places, and where it could be at both, half of it at each.
    """
    blocks, rows, weights, first = [], [], [], 0
    for counts, own_kernel, pieces in layout:
        for piece in pieces:
            block, shift, row = _pairs_of_taps(kernel, piece, math.prod(counts))
            blocks.append(block)
            rows.append(first + row)
            sign = (-1.0) ** len(piece)
            weights.append(torch.where(shift == 0, sign / 2, sign))
            first += half_of_shifts(own_kernel) * math.prod(counts) ** 2
    block = torch.cat(blocks)
    order = block.argsort(stable=True)
    counted = block.bincount(minlength=math.prod(kernel) ** 2)
    starts, weight = counted.cumsum(0) - counted, torch.cat(weights)[order].to(dtype)
    # Waited for, but once: others may read them from another stream.
    return torch.cat(rows)[order].to(device), starts.to(device), weight.to(device)


def _pairs_of_taps(
    kernel: Sizes, piece: tuple[Sizes, ...], count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of taps that meet a piece, as places of their blocks, the shifts between them in
    the dimensions that it does not cut, none before 0, and their rows among the piece's own."""
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
    """The pieces, those of equal shapes together: how many taps of each dimension they cut,
    kernel, dilation and size of the others, and how many positions they are about."""
    alike: dict[tuple[Sizes, ...], list[Strip]] = {}
    for piece in _pieces(size, kernel, dilation, pad):
        cut, rest, rows = _shape(piece, len(size))
        of_rest = (tuple(g[i] for i in rest) for g in (kernel, dilation, size))
        alike.setdefault((cut, *of_rest, rows), []).append(piece)
    return list(alike.items())


def _shape(piece: Strip, dims: int) -> tuple[Sizes, list[int], Sizes]:
    """How many taps of each dimension it cuts, the other dimensions, and its rows in those cut."""
    cut = {axis: stop - start for axis, start, stop, *_ in piece}
    rest = [i for i in range(dims) if i not in cut]
    return tuple(cut.values()), rest, tuple(rows for *_, rows in piece)


def _strip_images(x: Tensor, groups: int, dilation: Sizes, piece: Strip) -> Tensor:
    """Return the inputs of a piece's taps, as channels, at its positions, as images.

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
    """Σ u over each image's patches, ``[batch, channels, *kernel]``, dimension after dimension.

    Dimensions beyond those of the kernel stay as they are.
    """
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        reach = (x.shape[dim] - d * (k - 1) - 1) // s * s + 1  # from the first position to the last
        x = x.unfold(dim, reach, d).narrow(dim, 0, k)[..., ::s].sum(-1)
    return x


def _autocorrelation(x: Tensor, kernel: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Σ x[c, q] x[c', q + s] at shifts s between taps, ``[groups, shifts, C, C]``.

    From 0 on, the last dimension's next to each other; the others are mirror images of these.
    """
    if not kernel:
        rows = x.unflatten(1, (groups, -1)).transpose(0, 1)
        return second_moment(rows, x.dtype, diagonal=False)[:, None]
    if len(kernel) == 1 and kernel[0] * x.numel() <= _FEW:
        return _shifts_of_lines(x.unflatten(1, (groups, -1)), kernel[0], dilation[0])
    geometry = tuple(map(int, x.shape[2:])), kernel, dilation
    channels, slow = x.shape[1] // groups, multiplies_slowly(x)
    if x.device.type == "cpu" and spectrum.pays(*geometry, channels, groups, len(x), slow):
        with full_precision("cpu"):  # whatever is asked of rows: these products are no rows'
            return spectrum.autocorrelation(x, kernel, dilation, groups)
    total: Tensor | None = None
    for images in x.split(_images_at_once(x)):
        own = _by_convolution(images, kernel, dilation, groups)
        total = own if total is None else total.add_(own)
    assert total is not None
    found = total.unflatten(0, (groups, -1)).flatten(3).permute(0, 3, 1, 2)
    return found[:, -half_of_shifts(kernel) :]


def _images_at_once(x: Tensor) -> int:
    """On CPUs few enough that their copies are in memory which the process has already: fresh
    pages for those of all images took as long as the products."""
    if x.device.type != "cpu":
        return max(1, len(x))
    return max(1, _AT_ONCE // max(1, x[:1].numel()))


def _by_convolution(x: Tensor, kernel: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """As the gradient of a convolution's weight where input and output gradient are both x.

    ``[groups·C, C, *shifts]``, those that are not below 0 in the first dimension.
    """
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    shifts = [kernel[0], *(2 * k - 1 for k in kernel[1:])]
    weight = x.new_empty(1).expand(x.shape[1], x.shape[1] // groups, *shifts)
    ones, zeros = [1] * len(kernel), [0] * len(kernel)
    _, found, _ = torch.ops.aten.convolution_backward(
        x,
        # Zeros on both sides are the convolution's own, which costs no copy and no products.
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
    """The same of few short lines ``[batch, groups, C, n]``, sooner than by a convolution."""
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
    """All positions, rows of them that a convolution leaves out, and where such rows cross."""
    strips = [
        list(_strips(*geometry)) for geometry in zip(size, kernel, dilation, pad, strict=True)
    ]
    for count in range(1 + len(size)):
        for axes in itertools.combinations(range(len(size)), count):
            for cut in itertools.product(*(strips[axis] for axis in axes)):
                yield tuple((axis, *strip) for axis, strip in zip(axes, cut, strict=True))


def _strips(n: int, k: int, d: int, pad: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """The positions of one dimension that are left out, of those at which taps meet the input.

    Neighbours that the same taps meet, from ``start`` to ``stop``, are one strip: where in the
    input the first tap of the first position is, and how many positions there are.
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
