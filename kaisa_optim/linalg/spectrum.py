"""Autocorrelations of images by way of their frequencies.

A shift changes only the phases of an image's Fourier transform X. For all shifts s at once,
Σ x[c, q] x[c', q + s] is therefore a sum of the products X[c]* X[c'] over the frequencies; zeros
beyond the image, as far as shifts reach, keep its ends apart. So one product of channels with
channels for each frequency takes the place of one for each position and shift. A real image needs
only the first half of the frequencies. The transforms are products with small matrices: their
results have frequencies first, as the next products need them. A fast transform's result would have
to be transposed.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

_AT_ONCE = 1 << 19  # numbers of the images that are transformed together
# Images that are transformed together whatever their size: products of fewer images spend most of
# their time on reads and writes.
_TOGETHER = 32
_KEPT = 1 << 20  # numbers of products that are kept until they are added up
_MOST_KEPT = 8  # numbers of one wave's products, for each number of the result
_MOST_PHASES = 1 << 19  # numbers of phases, which stay in memory
# Costs in multiplications: of reading a number of an image again, and of writing a number of the
# products. Images that are multiplied together share the cost of writing.
_READ = 16
_WRITTEN = 64
_REMEMBERED = 1 << 7  # geometries; each step has the same ones
Sizes = tuple[int, ...]


def autocorrelation(x: Tensor, kernel: Sizes, dilation: Sizes, groups: int) -> Tensor:
    """Return Σ x[c, q] x[c', q + s] at all shifts s between taps, ``[groups, shifts, C, C]``.

    ``x`` is ``[batch, groups·C, *size]``. Shifts go from 0 on, in the last dimension fastest; the
    other shifts are mirror images.
    """
    geometry = tuple(map(int, x.shape[2:])), kernel, dilation
    waves, *others = _transforms(*geometry, x.dtype, x.device)
    phases = _phases(*geometry, x.dtype, x.device)
    channels, across = int(x.shape[1]) // groups, phases.shape[3]
    found = x.new_zeros(groups, phases.shape[1], channels * channels)
    some, images = _at_once(*geometry, channels, groups, len(x))
    room = x.new_empty(2, groups, some * across, channels, channels)
    for start in range(0, len(waves), some):
        those = waves[start : start + some]
        products = room[:, :, : len(those) * across]
        for first in range(0, len(x), images):
            spectrum = _transformed(x[first : first + images], those, others)
            _add_products(spectrum, *products, anew=first == 0)
        real, imaginary = products.flatten(3)
        cosines, sines = phases[:, :, start : start + some].flatten(2)
        found += cosines @ real
        turned = (sines @ imaginary).unflatten(2, (channels, channels))
        found += (turned - turned.mT).flatten(2)
    return found.unflatten(2, (channels, channels))


@functools.lru_cache(_REMEMBERED)
def pays(
    size: Sizes, kernel: Sizes, dilation: Sizes, channels: int, groups: int, batch: int, slow: bool
) -> bool:
    """Return whether a CPU takes less time by frequencies than for each position and shift.

    It must also take little more memory. ``slow``: products take twice the time of a convolution.
    """
    if not batch * channels * math.prod(size):
        return False
    padded, kept = _padded(size, kernel, dilation), half_of_shifts(kernel)
    lines, frequencies = math.prod(size[:-1]), padded[-1] // 2 + 1
    of_a_wave, result = (groups * n * channels**2 for n in (math.prod(padded[:-1]), kept))
    some, images = _at_once(size, kernel, dilation, channels, groups, batch)
    cost = -(-frequencies // some) * _READ * math.prod(size)
    cost += lines * size[-1] * 2 * frequencies
    for n, whole in zip(size[-2::-1], padded[-2::-1], strict=True):
        lines //= n
        cost += frequencies * lines * 2 * n * 2 * whole
        frequencies *= whole
    products = frequencies * channels
    cost += products * 3 + products * _WRITTEN // images + products * 2 * kept // batch
    if of_a_wave > max(_KEPT, _MOST_KEPT * result) or 2 * kept * frequencies > _MOST_PHASES:
        return False
    # A convolution multiplies shifts below 0 in the last dimensions, too.
    shifts = kernel[0] * math.prod(2 * k - 1 for k in kernel[1:])
    return (8 if slow else 4) * cost < 3 * shifts * math.prod(size) * channels


@functools.lru_cache(_REMEMBERED)
def _at_once(
    size: Sizes, kernel: Sizes, dilation: Sizes, channels: int, groups: int, batch: int
) -> tuple[int, int]:
    """Return how many waves of the last dimension, and how many images, are multiplied together."""
    padded = _padded(size, kernel, dilation)
    waves, numbers = padded[-1] // 2 + 1, groups * channels * math.prod(size)
    products = groups * channels**2 * math.prod(padded[:-1])
    images = min(batch, max(_TOGETHER, _AT_ONCE // numbers))
    some = max(1, min(waves, _KEPT // products, _AT_ONCE * waves // (images * numbers)))
    return some, min(batch, max(images, _AT_ONCE * waves // (some * numbers)))


def half_of_shifts(kernel: Sizes) -> int:
    """Return how many shifts between taps are not before 0; shift 0 stands first."""
    return (math.prod(2 * k - 1 for k in kernel) + 1) // 2


def _padded(size: Sizes, kernel: Sizes, dilation: Sizes) -> Sizes:
    return tuple(n + d * (k - 1) for n, k, d in zip(size, kernel, dilation, strict=True))


def _transformed(images: Tensor, waves: Tensor, others: list[Tensor]) -> Tensor:
    """Return X, ``[frequencies, 2, batch, groups·C]``, the last dimension's frequencies first."""
    lines = images.reshape(-1, waves.shape[2])
    found = (waves.flatten(0, 1) @ lines.mT).unflatten(0, (-1, 2))
    for of_real, of_imaginary in others:
        found = found.unflatten(2, (-1, of_real.shape[1]))
        real, imaginary = found.mT.unbind(1)
        turned = of_real @ real
        turned.baddbmm_(of_imaginary.expand(len(turned), -1, -1), imaginary)
        found = turned.unflatten(1, (-1, 2)).flatten(0, 1)
    return found.unflatten(2, images.shape[:2])


def _add_products(spectrum: Tensor, real: Tensor, imaginary: Tensor, *, anew: bool) -> None:
    """Add Σ X[c]* X[c'] over the images, ``[groups, frequencies, C, C]``.

    The imaginary part is half done: its transpose is still to be subtracted.
    """
    channels, beta = real.shape[2], 0 if anew else 1
    for group in range(len(real)):
        own = spectrum[..., group * channels : (group + 1) * channels]
        both = own.flatten(1, 2)
        real[group].baddbmm_(both.mT, both, beta=beta)
        imaginary[group].baddbmm_(own[:, 1].mT, own[:, 0], beta=beta)


@functools.lru_cache(_REMEMBERED)
def _transforms(
    size: Sizes, kernel: Sizes, dilation: Sizes, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return the matrices of the transforms, from the last dimension to the first.

    The last dimension's is ``[frequencies, 2, n]``, with the first half of the frequencies. The
    others' are ``[2, 2·N, n]``: they take real and imaginary parts to both parts of the result.
    """
    found = []
    padded = _padded(size, kernel, dilation)
    for axis in reversed(range(len(size))):
        n, whole = size[axis], padded[axis]
        last = axis == len(size) - 1
        angles = _angles(torch.arange(n, device="cpu"), whole // 2 + 1 if last else whole, whole).T
        cosine, sine = angles.cos(), angles.sin()
        ways = torch.stack([cosine, -sine], 1)
        if not last:
            ways = torch.stack([ways, torch.stack([sine, cosine], 1)]).flatten(1, 2)
        found.append(ways.to(device, dtype))
    return found


@functools.lru_cache(_REMEMBERED)
def _phases(
    size: Sizes, kernel: Sizes, dilation: Sizes, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return frequencies' weights in each shift, ``[2, shifts, last dimension's, others']``."""
    padded, dims = _padded(size, kernel, dilation), len(size)
    taps = itertools.product(*(range(1 - k, k) for k in kernel))
    apart = torch.tensor([s for s in taps if s >= (0,) * dims], device="cpu")
    angles = torch.zeros(len(apart), 1, dtype=torch.float64, device="cpu")
    for axis in reversed(range(dims)):
        waves = padded[axis] // 2 + 1 if axis == dims - 1 else padded[axis]
        own = _angles(apart[:, axis] * dilation[axis], waves, padded[axis])
        angles = (angles[:, :, None] + own[:, None, :]).flatten(1)
    found = torch.stack([angles.cos(), angles.sin()]).unflatten(2, (padded[-1] // 2 + 1, -1))
    found[:, :, 1 : (padded[-1] + 1) // 2] *= 2  # for the half of the frequencies that is left out
    return (found / math.prod(padded)).to(device, dtype)


def _angles(places: Tensor, waves: int, whole: int) -> Tensor:
    """Return the angles of ``waves`` waves at places in a line of ``whole``, in float64."""
    turns = torch.outer(places, torch.arange(waves, device="cpu")) % whole
    return turns.double() * (2 * math.pi / whole)
