"""Running averages of the factors, with bias correction:
x̂ ← x̂ + ((1 - β) / w)(x - x̂), w ← βw + 1 - β; the first value is taken as it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg.products import full_precision, least
from ..plan.schedule import StepPlan
from ..stages import stage
from .group import Side, per_block, sent

DecayOf = Callable[[Layer], float]


def update(
    factors: Sequence[tuple[Layer, Side, Tensor]],
    plan: StepPlan,
    decay_of: DecayOf,
    *,
    scale_free: bool,
) -> None:
    """Take new values of owned factors, of any shapes on one device, into their averages.

    ``scale_free``: each step's G enters divided by its mean eigenvalue, since a loss scale may
    change. Numbers of all blocks are one tensor.
    """
    layers, sides, values = (list(x) for x in zip(*factors, strict=True))
    like, blocks = sides[0].key, [layer.blocks for layer in layers]
    owned = [(side.averages, side.owned[layer]) for layer, side, _ in factors]
    averages = [tensors["average"][at] for tensors, at in owned]
    weights = [tensors["weight"][at] for tensors, at in owned]
    rejected = [tensors["rejected"][at] for tensors, at in owned]
    with full_precision(), stage("average"):
        # Each block's trace: no entry of a diagonal is below zero.
        diagonals = [x if x.dim() == 2 else x.diagonal(dim1=-2, dim2=-1) for x in values]
        each = [block for diagonal in diagonals for block in diagonal.unbind()]
        traces = torch.stack(torch._foreach_norm(each, 1))
        finite = traces < math.inf  # NaN is not
        if scale_free:
            # Divide values of G by their mean eigenvalues; turned layers have G in A.
            traces = torch.where(finite & (traces > least(traces.dtype)), traces, 1.0)
            divisors = _each(traces, values)
            of_g = [i for i, x in enumerate(layers) if (sides[i].name == "g") != x.turned]
            if of_g:
                matrices = [values[i] for i in of_g]
                torch._foreach_div_(matrices, [divisors[i] for i in of_g])
                torch._foreach_mul_(matrices, [float(sides[i].key.size) for i in of_g])
        # A sum that is not finite must not stay in an average for ever: the slot keeps its value.
        # On a CPU, the answer costs no wait and saves a pass over finite sums.
        if like.device.type != "cpu" or not finite.all():
            for value, broken in zip(values, _each(~finite, values), strict=True):
                value.masked_fill_(broken, 0)
        seen = [plan.seen[plan.sections[layer.number]] for layer in layers]
        taken = finite
        if not all(itertools.chain.from_iterable(seen)):
            taken = finite & _has_rows(blocks, seen, like.device)
        # β and 1 - β are each rounded once: an average's bits never depend on its neighbours.
        mass, decays = torch.cat(weights), [*map(decay_of, layers)]
        decay: Any = decays[0]
        gain = mass.new_full((), 1 - decay)  # torch would multiply a number by its reciprocal
        if len(set(decays)) > 1:
            decay = per_block(layers, decay_of, like)
            gain = per_block(layers, lambda x: 1 - decay_of(x), like)
        grown = (mass * decay).add_(gain)
        step = gain / grown
        # The first value is taken also under a decay of 1, which keeps it from then on.
        if 1 in decays:
            first = (mass == 0) & (decay == 1)
            grown, step = torch.where(first, 1, grown), torch.where(first, 1, step)
        torch._foreach_copy_(weights, list(torch.where(taken, grown, mass).split(blocks)))
        steps = _each(torch.where(taken, step, 0), values)
        if averages[0].dtype == values[0].dtype:
            torch._foreach_lerp_(averages, values, steps)
        else:
            for average, value, part in zip(averages, values, steps, strict=True):
                average.copy_(average.to(value.dtype).lerp_(value, part))
        torch._foreach_add_(rejected, list((~finite).int().split(blocks)))
        for average, weight, flags in zip(averages, weights, seen, strict=True):
            if not all(flags):
                _stand_in(average, weight)


def _each(numbers: Tensor, matrices: list[Tensor]) -> list[Tensor]:
    """Return numbers of blocks in shapes that go with the blocks' matrices, or diagonals."""
    parts = zip(numbers.split([len(x) for x in matrices]), matrices, strict=True)
    return [part[:, None, None] if x.dim() == 3 else part[:, None] for part, x in parts]


def _stand_in(average: Tensor, weight: Tensor) -> None:
    """Give blocks without rows so far, such as experts', the mean of the others' averages.

    Damping alone would make their first steps far longer than the other blocks' steps.
    """
    seen = weight > 0
    shares = seen.to(average.dtype) / seen.sum().clamp(min=1)
    mean = (average * _each(shares, [average])[0]).sum(0)
    average.copy_(torch.where(_each(seen, [average])[0], average, mean))


def _has_rows(
    blocks: Sequence[int], seen: Sequence[Sequence[bool]], device: torch.device
) -> Tensor:
    """Return for each block of some layers whether some rank has rows of its section."""
    flags: list[bool] = []
    for count, sections in zip(blocks, seen, strict=True):
        for flag in sections:
            flags += [flag] * (count // len(sections))
    return sent(torch.tensor(flags, dtype=torch.bool, device="cpu"), device)
