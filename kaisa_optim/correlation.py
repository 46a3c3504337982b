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
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .algebra import second_moment

_AT_ONCE = 1 << 19  # numbers of the images that CPUs take together
_FEW = 1 << 20  # numbers of lines, moved by each shift, that need no convolution
_CALLS = 16  # what a piece's calls cost, in products of channels with channels at a position
_REMEMBERED = 1 << 10  # geometries, of which each step has the same
Sizes = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]  # zeros before and after, for each dimension
# Of each dimension in which positions are left out: its axis, and what _strips says.
Piece = tuple[tuple[int, int, int, int, int], ...]


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Sliding windows: ``[batch, channels, *positions, *kernel]``, a view."""
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d]
    return x


@functools.lru_cache(_REMEMBERED)
def pays(size: Sizes, kernel: Sizes, dilation: Sizes, pad: Pairs) -> bool:
    """Whether this takes fewer products of channels than patches would, by a clear margin."""
    taps = math.prod(kernel)
    positions = [
        n + sum(p) - d * (k - 1) for n, k, d, p in zip(size, kernel, dilation, pad, strict=True)
    ]
    if taps == 1 or min(positions) < 1:
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
    dims, channels, taps = len(kernel), x.shape[1] // groups, math.prod(kernel)
    # Blocks of C×C stay together until the end, so that all but the last copy is of whole blocks.
    moment = _moments(x, kernel, dilation, groups).view(
        groups, *kernel, *kernel, channels, channels
    )
    size = tuple(map(int, x.shape[2:]))
    for (counts, own_kernel, own_dilation, *_), pieces in _alike(size, kernel, dilation, pad):
        borders = torch.cat([_border(x, groups, dilation, piece) for piece in pieces], 1)
        parts = _moments(borders, own_kernel, own_dilation, groups * len(pieces)).view(
            len(pieces), groups, *own_kernel, *own_kernel, *counts, channels, *counts, channels
        )
        for piece, part in zip(pieces, parts, strict=True):
            _add(moment, part, piece, dims)
    moment = moment.view(groups, taps, taps, channels, channels)
    return moment.permute(0, 3, 1, 4, 2).reshape(groups, channels * taps, channels * taps)


@functools.lru_cache(_REMEMBERED)
def _alike(
    size: Sizes, kernel: Sizes, dilation: Sizes, pad: Pairs
) -> list[tuple[tuple[Sizes, ...], list[Piece]]]:
    """The pieces but the first, those of equal shapes together: how many taps of each dimension
    they cut, kernel, dilation and size of the others, and how many positions they are about."""
    alike: dict[tuple[Sizes, ...], list[Piece]] = {}
    for piece in _pieces(size, kernel, dilation, pad):
        if piece:
            cut, rest, rows = _shape(piece, len(size))
            of_rest = (tuple(g[i] for i in rest) for g in (kernel, dilation, size))
            alike.setdefault((cut, *of_rest, rows), []).append(piece)
    return list(alike.items())


def _shape(piece: Piece, dims: int) -> tuple[Sizes, list[int], Sizes]:
    """How many taps of each dimension it cuts, the other dimensions, and its rows in those cut."""
    cut = {axis: stop - start for axis, start, stop, *_ in piece}
    rest = [i for i in range(dims) if i not in cut]
    return tuple(cut.values()), rest, tuple(rows for *_, rows in piece)


def _moments(x: Tensor, kernel: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Over all positions at which a patch meets the input, ``[groups, taps·taps, C, C]``."""
    if not kernel:
        return second_moment(x.unflatten(1, (groups, -1)).transpose(0, 1), diagonal=False)[:, None]
    correlation = _autocorrelation(x, kernel, dilation, groups).flatten(1, len(kernel))
    return correlation.index_select(1, _shifts(kernel, x.device))


def _border(x: Tensor, groups: int, dilation: Sizes, piece: Piece) -> Tensor:
    """What the taps of a piece meet, as channels, at its positions, as images:
    ``[batch·positions, groups·taps·C, *other dimensions]``."""
    x = x.unflatten(1, (groups, -1))
    for axis, start, stop, first, rows in piece:
        reach = dilation[axis] * (stop - start - 1)
        x = x.narrow(3 + axis, first, rows + reach)
        x = x.unfold(3 + axis, reach + 1, 1)[..., :: dilation[axis]]
    cut = [3 + axis for axis, *_ in piece]
    taps = range(x.dim() - len(cut), x.dim())
    rest = [dim for dim in range(3, taps.start) if dim not in cut]
    return x.permute(0, *cut, 1, *taps, 2, *rest).flatten(0, len(cut)).flatten(1, 2 + len(cut))


def _add(moment: Tensor, part: Tensor, piece: Piece, dims: int) -> None:
    """Add a piece's moment at its taps, or take it off where it crosses an odd number of rows."""
    cut = [axis for axis, *_ in piece]
    rest = [i for i in range(dims) if i not in cut]
    here = moment
    for axis, start, stop, *_ in piece:
        for at in (1 + axis, 1 + dims + axis):
            here = here.narrow(at, start, stop - start)
    lie = [(0, 0), *_sides(rest), *((1, i) for i in cut), (3, 0), *((2, i) for i in cut), (4, 0)]
    belong = [(0, 0), *_sides(range(dims)), (3, 0), (4, 0)]
    order = [lie.index(dimension) for dimension in belong]
    here.add_(part.permute(order), alpha=(-1) ** len(cut))


def _sides(axes: Iterable[int]) -> list[tuple[int, int]]:
    """Names for the dimensions of taps, those of both sides of a moment."""
    return [(side, axis) for side in (1, 2) for axis in axes]


def _shifts(kernel: Sizes, device: torch.device) -> Tensor:
    """Where the shift from each tap to each is, among all shifts between taps."""
    place = torch.zeros((), dtype=torch.long, device=device)
    for axis, k in enumerate(kernel):
        taps = torch.arange(k, device=device)
        own = (taps - taps[:, None]).add_(k - 1)
        sides = [k if i % len(kernel) == axis else 1 for i in range(2 * len(kernel))]
        place = place * (2 * k - 1) + own.view(sides)
    return place.flatten()


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
    """Σ x[c, q] x[c', q + s] at all shifts s between taps, ``[groups, *(2k − 1), C, C]``."""
    half: Tensor | None = None
    for part in x.split(_images_at_once(x)):
        own = _half_of_the_shifts(part, kernel, dilation, groups)
        half = own if half is None else half.add_(own)
    assert half is not None
    mirror = half.flip(tuple(range(1, 1 + len(kernel)))).mT
    middle = (half[:, :1] + mirror[:, -1:]) / 2  # exactly symmetric
    return torch.cat([mirror[:, :-1], middle, half[:, 1:]], dim=1)


def _images_at_once(x: Tensor) -> int:
    """On CPUs few enough that their copies are in memory which the process has already: fresh
    pages for those of all images took as long as the products."""
    if x.device.type != "cpu":
        return max(1, len(x))
    return max(1, _AT_ONCE // max(1, x[:1].numel()))


def _half_of_the_shifts(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """Those that are not below 0 in the first dimension, ``[groups, *shifts, C, C]``.

    The others are mirror images of these.
    """
    if len(kernel) == 1 and kernel[0] * x.numel() <= _FEW:
        return _shifts_of_lines(x.unflatten(1, (groups, -1)), kernel[0], dilation[0])
    # The gradient of a convolution's weight where input and output gradient are both x.
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    sides = [(0, reach[0]), *((r, r) for r in reach[1:])]
    shifts = [kernel[0], *(2 * k - 1 for k in kernel[1:])]
    weight = x.new_empty(1).expand(x.shape[1], x.shape[1] // groups, *shifts)
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
    return half.unflatten(0, (groups, -1)).movedim((1, 2), (-2, -1)).contiguous()


def _shifts_of_lines(x: Tensor, kernel: int, dilation: int) -> Tensor:
    """The same of few short lines ``[batch, groups, C, n]``, sooner than by a convolution."""
    lines = x.permute(1, 2, 0, 3)
    groups, channels, _, n = lines.shape
    moved = lines.new_zeros(groups, kernel, *lines.shape[1:])
    for place in range(min(kernel, -(-n // dilation))):
        start = place * dilation
        moved[:, place, ..., : n - start] = lines[..., start:]
    product = moved[:, 0].flatten(2) @ moved.flatten(1, 2).flatten(2).mT
    return product.unflatten(2, (kernel, channels)).movedim(2, 1)


def _pieces(size: Sizes, kernel: Sizes, dilation: Sizes, pad: Pairs) -> Iterator[Piece]:
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
