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
from ..plan.step_plan import AgreedStep
from ..stages import stage
from .group import Group, Key, Side, StackKey, common_or_each, per_block, sent

Number = Tensor | float  # a tensor has one entry a block
DecayOf = Callable[[Layer], float]


def update(
    groups: Sequence[Group],
    sums: dict[Key, Tensor],
    agreed: AgreedStep,
    decay_of: DecayOf,
    *,
    scale_free: bool,
) -> None:
    """Take new values of owned factors into their averages.

    ``scale_free``: each step's G enters divided by its mean eigenvalue, since a loss scale may
    change.
    """
    updated: dict[Any, list[tuple[Layer, Side]]] = {}  # by device and dtype
    for side in [side for group in groups for side in group.sides]:
        own = [(layer, side) for layer in side.owned if (layer, side.name) in sums]
        if own:
            updated.setdefault(side.key[2:], []).extend(own)
    with full_precision(), stage("average"):
        for factors in updated.values():
            values = [sums[layer, side.name] for layer, side in factors]
            _update(factors, values, agreed, decay_of, scale_free)


def _update(
    factors: list[tuple[Layer, Side]],
    values: list[Tensor],
    agreed: AgreedStep,
    decay_of: DecayOf,
    scale_free: bool,
) -> None:
    """Take values of any shapes, on one device: numbers of all blocks are one tensor."""
    like, layers = factors[0][1].key, [layer for layer, _ in factors]
    blocks = [layer.blocks for layer in layers]
    diagonals = [
        value if side.key.diagonal else value.diagonal(dim1=-2, dim2=-1)
        for (_, side), value in zip(factors, values, strict=True)
    ]
    # Each block's trace: no entry of a diagonal is below zero.
    each = [block for diagonal in diagonals for block in diagonal.unbind()]
    traces = torch.stack(torch._foreach_norm(each, 1))
    finite = traces < math.inf  # NaN is not
    if scale_free:
        counts = finite & (traces > least(traces.dtype))
        traces = torch.where(counts, traces, 1.0)
        # Divide values of G by their mean eigenvalues; turned layers have G in A.
        rows_of = zip(factors, values, _each(traces, values), strict=True)
        of_g = [
            (side, *value)
            for (layer, side), *value in rows_of
            if (side.name == "g") != (layer.name in agreed.turned)
        ]
        if of_g:
            sides, matrices, divisors = zip(*of_g, strict=True)
            torch._foreach_div_(matrices, divisors)
            torch._foreach_mul_(matrices, [float(side.key.size) for side in sides])
    # A sum that is not finite must not stay in an average for ever: the slot keeps its value.
    # On a CPU, the answer costs no wait and saves a pass over finite sums.
    if like.device.type != "cpu" or not finite.all():
        for value, broken in zip(values, _each(~finite, values), strict=True):
            value.masked_fill_(broken, 0)
    weights = _views(factors, "weight")
    rows = has_rows(layers, agreed, like)
    taken = finite if rows is None else finite & rows
    # β and 1 - β are each rounded once: an average's bits never depend on its neighbours.
    keep = common_or_each(layers, decay_of, like)
    each_takes = isinstance(keep, Tensor)
    take = per_block(layers, lambda x: 1 - decay_of(x), like) if each_takes else 1 - keep
    decays = keep, take
    grown, step = weighed(torch.cat(weights), decays, taken)
    torch._foreach_copy_(weights, list(grown.split(blocks)))
    averages, steps = _views(factors, "average"), _each(step, values)
    if averages[0].dtype == values[0].dtype:
        torch._foreach_lerp_(averages, values, steps)
    else:
        for average, value, part in zip(averages, values, steps, strict=True):
            average.copy_(average.to(value.dtype).lerp_(value, part))
    torch._foreach_add_(_views(factors, "rejected"), list((~finite).int().split(blocks)))
    for i, layer in enumerate(layers) if rows is not None else ():
        if not all(agreed.has_rows(layer.name)):
            _stand_in(averages[i], weights[i])


def _views(factors: list[tuple[Layer, Side]], name: str) -> list[Tensor]:
    return [side.averages[name][side.owned[layer]] for layer, side in factors]


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


def has_rows(layers: Sequence[Layer], agreed: AgreedStep, like: StackKey) -> Tensor | None:
    """Return for each block of these layers whether some rank has rows of it; None: all have."""
    if all(itertools.chain.from_iterable([agreed.rows[layer.name] for layer in layers])):
        return None
    flags: list[bool] = []
    for layer in layers:
        sections = agreed.has_rows(layer.name)
        for flag in sections:
            flags += [flag] * (layer.blocks // len(sections))
    return sent(torch.tensor(flags, dtype=torch.bool, device="cpu"), like.device)


def weighed(mass: Tensor, decays: tuple[Number, Number], taken: Tensor) -> tuple[Tensor, Tensor]:
    """Return the averages' weights after a new value, and the steps that they take towards it.

    ``decays`` are β and 1 - β. Averages that are not ``taken`` stay. The first
    value is taken as it is, also under a decay of 1, which keeps it from then on.
    """
    decay, rest = decays
    if not isinstance(rest, Tensor):  # torch would multiply a number by a rounded reciprocal
        rest = mass.new_full((), rest)
    grown = (mass * decay).add_(rest)
    step = rest / grown
    if isinstance(decay, Tensor) or decay == 1:
        first = (mass == 0) & (decay == 1)
        grown, step = torch.where(first, 1, grown), torch.where(first, 1, step)
    return torch.where(taken, grown, mass), torch.where(taken, step, 0)
