"""Running averages of the factors, with bias correction."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg.precision import full_precision
from ..linalg.rounding import rounded
from ..plan.step_plan import AgreedStep
from .stacks import (
    Factor,
    Factors,
    FactorStack,
    Key,
    Specs,
    StackKey,
    common_or_each,
    sent,
    slots_of,
)

Number = Tensor | float  # a tensor has one entry a block
DecayOf = Callable[[Layer], float]


class RunningAverages:
    """x̂ ← x̂ + ((1 - β) / w)(x - x̂), w ← βw + 1 - β: the first value is taken as it is."""

    def __init__(
        self, *, kaisa_scaling: bool, dtype: torch.dtype | None, scale_free: bool = False
    ) -> None:
        self.kaisa_scaling = kaisa_scaling
        # Each step's G enters divided by its mean eigenvalue: a loss scale may change.
        self.scale_free = scale_free
        self.dtype = dtype  # the dtype of storage; None: the arithmetic's dtype

    def specs(self, key: StackKey, count: int) -> Specs:
        """Return the tensors of ``count`` factors of one shape on the rank that owns them."""
        return {
            "average": (key.shape(count), self.dtype or key.dtype),
            "weight": ((count,), key.dtype),
            "rejected": ((count,), torch.int32),
        }

    def allocate(self, owned: Factors) -> None:
        for stack in owned.stacks.values():
            stack.allocate(self.specs(stack.key, stack.count))
            if self.kaisa_scaling:
                # The papers correct no bias: averages start at the identity, at full weight.
                stack.tensors["weight"].fill_(1.0)
                average = stack.tensors["average"]
                diagonal = average if stack.key.diagonal else average.diagonal(dim1=-2, dim2=-1)
                diagonal.fill_(1.0)

    def update(
        self,
        owned: Factors,
        sums: dict[Key, Tensor],
        agreed: AgreedStep,
        decay_of: DecayOf,
        number: int,
    ) -> None:
        """Take new values of owned factors into their averages in step ``number``."""
        with full_precision():
            for stack in owned.stacks.values():
                factors = [f for f in stack.factors if (f.layer, f.side) in sums]
                if factors:
                    values = [sums[f.layer, f.side] for f in factors]
                    if self.scale_free:
                        _divide_by_means(stack, factors, values)
                    _update_stack(stack, factors, values, agreed, decay_of, number)


def _divide_by_means(stack: FactorStack, factors: list[Factor], values: list[Tensor]) -> None:
    """Divide values of G, in place, by their mean eigenvalues; an overflow is rejected later."""
    own = [(f, v) for f, v in zip(factors, values, strict=True) if f.side == "g"]
    if not own:
        return
    diagonals = [v if stack.key.diagonal else v.diagonal(dim1=-2, dim2=-1) for _, v in own]
    means = torch.cat(diagonals).mean(-1)
    means = torch.where((means > 0) & means.isfinite(), means, 1.0)
    matrix = (slice(None), *(None,) * (own[0][1].dim() - 1))
    torch._foreach_div_(
        [v for _, v in own], list(means[matrix].split([f.layer.blocks for f, _ in own]))
    )


def _update_stack(
    stack: FactorStack,
    factors: list[Factor],
    values: list[Tensor],
    agreed: AgreedStep,
    decay_of: DecayOf,
    number: int,
) -> None:
    layers = [factor.layer for factor in factors]
    blocks = [layer.blocks for layer in layers]
    matrix = (slice(None), *(None,) * (values[0].dim() - 1))
    # A sum that is not finite must not stay in an average for ever: the slot keeps its value.
    diagonals = [v if stack.key.diagonal else v.diagonal(dim1=-2, dim2=-1) for v in values]
    finite = torch.cat(diagonals).sum(-1).isfinite()
    # On a CPU, the answer costs no wait and saves a pass over finite sums.
    if stack.key.device.type != "cpu" or not finite.all():
        for value, broken in zip(values, (~finite)[matrix].split(blocks), strict=True):
            value.masked_fill_(broken, 0)
    slots = slots_of(factors)
    weight, rejected = stack.tensors["weight"], stack.tensors["rejected"]
    taken = finite & has_rows(layers, agreed, stack.key)
    grown, step = weighed(weight[slots], keep_and_take(layers, decay_of, stack.key), taken)
    steps = list(step[matrix].split(blocks))
    if isinstance(slots, slice):
        averages = list(stack.tensors["average"][slots].split(blocks))
    else:
        averages = [factor["average"] for factor in factors]
    if averages[0].dtype == stack.key.dtype:
        torch._foreach_lerp_(averages, values, steps)
    else:
        # At a decay of 0.99, new values change an average by less than bfloat16's last digit.
        for factor, average, value, part in zip(factors, averages, values, steps, strict=True):
            new = average.to(stack.key.dtype).lerp_(value, part)
            seed = zlib.crc32(repr((number, *factor.name)).encode()) - 2**31
            average.copy_(rounded(new, average.dtype, seed))
    weight[slots] = grown
    rejected[slots] += (~finite).int()
    for factor in factors:
        if not all(agreed.rows[factor.layer.name]):
            _stand_in(factor)


def _stand_in(factor: Factor) -> None:
    """Give blocks without rows so far, such as experts', the mean of the others' averages.

    Damping alone would make their first steps far longer than the other blocks' steps.
    """
    average, seen = factor["average"], factor["weight"] > 0
    matrix = (slice(None), *(None,) * (average.dim() - 1))
    shares = seen.to(average.dtype) / seen.sum().clamp(min=1)
    mean = (average * shares[matrix]).sum(0)
    average.copy_(torch.where(seen[matrix], average, mean))


def has_rows(layers: Sequence[Layer], agreed: AgreedStep, like: StackKey) -> Tensor:
    """Return for each block of these layers whether some rank has rows of it."""
    flags: list[bool] = []
    for layer in layers:
        per_section = layer.blocks // layer.sections
        for count in agreed.rows[layer.name]:
            flags += [count > 0] * per_section
    if len(set(flags)) == 1:  # nothing has to be copied to the device
        return torch.full((len(flags),), flags[0], dtype=torch.bool, device=like.device)
    return sent(torch.tensor(flags, dtype=torch.bool, device="cpu"), like.device)


def keep_and_take(
    layers: Sequence[Layer], decay_of: DecayOf, like: StackKey
) -> tuple[Number, Number]:
    """Return β and 1 - β, each rounded once: an average's bits never depend on its neighbours."""
    return (
        common_or_each(layers, decay_of, like),
        common_or_each(layers, lambda layer: 1 - decay_of(layer), like),
    )


def weighed(mass: Tensor, decays: tuple[Number, Number], taken: Tensor) -> tuple[Tensor, Tensor]:
    """Return the averages' weights after a new value, and the steps that they take towards it.

    ``decays`` come from :func:`keep_and_take`. Averages that are not ``taken`` stay. The first
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
