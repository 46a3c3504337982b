"""Adam's moments in the eigenbasis of a layer's factors.

New gradients are Adam's directions, rotated back. The base optimizer's own moments stay empty for
these parameters, and their weights move along the directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import invalid
from ...layers import Layer
from ...linalg import kronecker, orthogonal, precision
from ..stacks import AppliedFactors, LayerGroup, Slots, Specs, at, present_blocks
from .base import RotatingRule, Rotation, StepValues

Number = float | Tensor  # a tensor has one entry a block, ``[count, 1, 1]``

# The largest root mean square of an orthogonal step is this length, or this share of the learning
# rate if that is more: longer steps broke training that Adam's own steps do not. The share is the
# length of Muon's directions where it takes AdamW's rates.
_LONGEST = 0.003
_SHARE = 0.2


class Settings(NamedTuple):
    """The settings of a layer's moments; for several layers, each field may be a tensor."""

    keep1: Number  # share of the first moment that stays in a step
    take1: Number  # share of the gradient that enters the first moment
    keep2: Number
    take2: Number
    log1: Number  # log β₁; -inf leaves out the bias correction
    log2: Number
    eps: Number


def settings(group: dict[str, Any]) -> Settings:
    """Return the settings of a parameter group."""
    if len(group["betas"]) != 2:
        raise invalid("betas", group["betas"], "two numbers are needed")
    (beta1, beta2), averaged = group["betas"], group.get("grad_averaging", True)
    corrected = group.get("bias_correction", True)
    log1, log2 = (math.log(b) if corrected and b > 0 else -math.inf for b in (beta1, beta2))
    take1 = 1 - beta1 if averaged else 1.0
    return Settings(beta1, take1, beta2, 1 - beta2, log1, log2, group["eps"])


class AdamRule(RotatingRule):
    """Keep both moments in the eigenbasis; there directions may be made orthogonal."""

    makes_directions = True

    def __init__(self, dtype: torch.dtype | None, *, nesterov: bool, orthogonal: bool) -> None:
        super().__init__(dtype)
        self.nesterov = nesterov  # the direction takes the gradient in once more
        self.orthogonal = orthogonal  # directions have nearly equal singular values
        self.wants_half_products = orthogonal

    def group_specs(self, count: int, g: int, a: int, dtype: torch.dtype) -> Specs:
        moment = ((count, g, a), dtype)
        return {"exp_avg": moment, "exp_avg_sq": moment, "adam_steps": ((count,), dtype)}

    def rotate(
        self,
        applied: AppliedFactors,
        layer: Layer,
        slots: Slots,
        rotations: tuple[Rotation, Rotation],
    ) -> None:
        """Rotate the first moment, and carry the second by the squares of the rotation's entries.

        The second moment, a diagonal of variances, becomes the diagonal of the rotated matrix: it
        stays non-negative and keeps its sum.
        """
        if rotations == (None, None):
            return
        state = applied.group_of[layer].tensors
        # Infinity, from a squared gradient, times a zero of the rotation would be NaN.
        state["exp_avg_sq"][slots].clamp_(max=torch.finfo(state["exp_avg_sq"].dtype).max / 4)
        squares = [None if r is None else r.square() for r in rotations]
        for name, by in (("exp_avg", rotations), ("exp_avg_sq", squares)):
            state[name][slots] = kronecker.out_of_basis(state[name][slots], *by)

    def apply(
        self, group: LayerGroup, gradient: Tensor, members: list[Layer], values: StepValues
    ) -> Tensor:
        slots = group.slots_of(members)
        g, a = self._bases(group, slots, gradient)
        present = present_blocks(members, group)
        adam = _settings_of(members, group, values)
        projected = kronecker.into_basis(gradient, g, a)
        first, divisors = moved(group.tensors, slots, projected, present, adam, self.nesterov)
        del projected
        # Tables and factors too wide for a basis have no singular values to equalize here; a
        # vector has one singular value.
        narrow = g is not None and a is not None
        if not self.orthogonal or not narrow or 1 in gradient.shape[1:]:
            found = first.div_(divisors)
        else:
            found = first / divisors
            # Orthogonalize before the direction is rotated back: the result is the same.
            in_half = self._orthogonal_in_half(found)
            with precision.full_precision(found.device.type):
                found = orthogonal.orthogonalized(found, in_half=in_half)
            limit = _limit(members, group, values)
            found = orthogonal.as_steep_as_adams(found, first, divisors, limit)
            if in_half:  # the direction is rounded already
                g, a = (None if basis is None else basis.bfloat16() for basis in (g, a))
        return kronecker.out_of_basis(found, g, a)


def _settings_of(members: list[Layer], group: LayerGroup, values: StepValues) -> Settings:
    adam, *others = dict.fromkeys(values.settings_of[layer] for layer in members)
    if not others:
        return adam
    each = zip(*(values.settings_of[layer] for layer in members), strict=True)
    return Settings(*(group.common_or_each(members, _among(members, n)) for n in each))


def _among(members: list[Layer], values: Any) -> Callable[[Layer], float]:
    return dict(zip(members, values, strict=True)).__getitem__


def _limit(members: list[Layer], group: LayerGroup, values: StepValues) -> Number:
    """Return the largest root mean square of these layers' orthogonal directions."""
    rates = {layer: values.rate_of(layer) for layer in members}
    host = {x: _limit_at(rate) for x, rate in rates.items() if not isinstance(rate, Tensor)}
    if len(host) == len(rates):
        return group.common_or_each(members, host.__getitem__)
    like = group.g.key  # some are on a device: do not wait for them
    limits = [
        torch.full((x.blocks,), _LONGEST, dtype=like.dtype, device=like.device) for x in members
    ]
    for limit, rate in zip(limits, rates.values(), strict=True):
        limit.div_(rate.to(like.device) if isinstance(rate, Tensor) else rate).clamp_(min=_SHARE)
    return torch.cat(limits)[:, None, None]


def _limit_at(rate: float) -> float:
    return max(_LONGEST / rate, _SHARE) if rate > 0 else math.inf


def moved(
    state: dict[str, Tensor],
    slots: Slots,
    gradient: Tensor,
    present: Tensor | None,
    adam: Settings,
    nesterov: bool,
) -> tuple[Tensor, Tensor]:
    """Take gradients, in the basis, into the moments at ``slots``.

    Return the first moment that the direction follows, and what Adam divides it by. The bias of
    both is corrected, if the settings say so.

    ``present`` says which blocks have a gradient; the other blocks' moments stay as they are. With
    ``nesterov``, the direction follows a first moment that takes in the gradient once more.
    """
    names = ("exp_avg", "exp_avg_sq", "adam_steps")
    moving = first, second, steps = tuple(at(state[name], slots) for name in names)
    former = [] if present is None else [tensor.clone() for tensor in moving]
    first.mul_(adam.keep1)
    second.mul_(adam.keep2)
    _take(first, gradient, adam.take1)
    if isinstance(adam.take2, Tensor):
        second.add_(gradient.square().mul_(adam.take2))
    else:
        second.addcmul_(gradient, gradient, value=adam.take2)
    steps.add_(1)
    if present is not None:
        for tensor, old in zip(moving, former, strict=True):
            absent = ~present if tensor.dim() == 1 else ~present[:, None, None]
            tensor.copy_(torch.where(absent, old, tensor))
    if not isinstance(slots, slice):  # then these are copies
        for name, tensor in zip(names, moving, strict=True):
            state[name][slots] = tensor
    count = steps.clamp(min=1)[:, None, None]  # 0 where no gradient has come yet
    taken = count
    if nesterov:
        first, taken = first * adam.keep1, count + 1
        _take(first, gradient, adam.take1)
    # A direct difference 1 - β^t would lose its digits for a β near 1.
    rest1, rest2 = -torch.expm1(taken * adam.log1), -torch.expm1(count * adam.log2)
    return first / rest1, (second / rest2).sqrt_().add_(adam.eps)


def _take(moment: Tensor, gradient: Tensor, part: Number) -> None:
    """Add a part of the gradient, without a copy if the part is one number."""
    if isinstance(part, Tensor):
        moment.add_(gradient * part)
    else:
        moment.add_(gradient, alpha=part)
