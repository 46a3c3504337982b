"""Lengths of steps: along K-FAC's direction the loss falls as it falls by the base's own step.

To first order, a step -η D lowers the loss by η ⟨D, M⟩ if the momentum M stands for the gradient.
The base's own step lowers it by its *fall*. A length is the η at which both are equal. Everything
is per block, but for SGD, whose blocks share one scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers import Layer
from ..linalg import orthogonal
from .stacks import LayerGroup, Slots, Specs, at, per_block

Number = float | Tensor  # a tensor has one entry a block

# The least cosine of a direction with its momentum. Directions that hardly follow the momentum
# would else be as long as one likes.
_LEAST_COSINE = 0.01
# A step's root mean square is at most a share of the learning rate, as Muon's is where it takes
# AdamW's rates, and a share of the weights' own. Without the second share, an autoencoder of digits
# breaks at a rate of 0.1: its loss ends at 0.80, and not at 0.12. Short steps are free: weights may
# begin at zero, and weights of size 1 need longer steps than weights of size 1 / √n.
_OF_RATE, _OF_WEIGHTS = 0.2, 0.05
_FREE, _FREE_OF_WEIGHTS = 0.003, 0.02
# SGD's rate is no length of a step: only a share of the weights' size limits its steps. With 0.05,
# the autoencoder of digits broke at a rate of 1, where SGD diverges. Without a limit it broke at
# 0.1, and a U-Net ended at 0.040 for 0.046.
_OF_WEIGHTS_BY_SGD = 0.03
# A block's scale under SGD is at most this multiple of the scale by its own fall alone: blocks with
# tiny gradients, such as idle experts', would else take whole steps.
_MOST_OF_OWN = 10.0


@dataclass
class OfBase:
    """The base's side of one step, tensors by parameter; sharded parameters have their own part."""

    momenta: dict[Tensor, Tensor] = field(default_factory=dict)  # the base would step along these
    # A length sums these over each block: gradients, or the momenta times the base's own step.
    measured: dict[Tensor, Tensor] = field(default_factory=dict)
    # Second moments that the base kept as long as it stepped the parameter itself.
    former: dict[Tensor, Tensor] = field(default_factory=dict)
    settings_of: Callable[[Tensor], Any] = lambda parameter: ()  # of a parameter, for its length
    rate_of: Callable[[Tensor], float | Tensor] = lambda parameter: 0.0  # its learning rate


class Sums(NamedTuple):
    """Sums over each block, ``[blocks]``."""

    measured: Tensor
    former: Tensor
    weights: Tensor  # squares of the weights; zeros without a limit


class Stepped(NamedTuple):
    """Blocks of one shape that are stepped together."""

    members: list[Layer]
    group: LayerGroup
    slots: Slots
    direction: Tensor  # [blocks, g, a]
    momentum: Tensor
    sums: Sums
    present: Tensor | None  # blocks with a gradient; None: all

    @property
    def entries(self) -> int:
        return self.direction[0].numel()


class Length(ABC):
    """One way to give directions a length."""

    squares = False  # what the base measures is a gradient, whose squares are summed
    limits = True  # the weights' size limits steps
    terms = 0  # numbers of each block that travel with its direction

    def specs(self, count: int, dtype: torch.dtype) -> Specs:
        """Return the tensors that gradient workers keep for ``count`` blocks."""
        return {}

    @abstractmethod
    def give(self, one: Stepped, base: OfBase) -> Tensor:
        """Give directions their length, in place; return terms ``[blocks, terms]``."""

    def finish(self, terms: dict[Layer, Tensor], base: OfBase) -> dict[Layer, Tensor]:
        """Return each layer's scale ``[blocks]``, from the terms of all layers on this rank."""
        return {}


class AdamSettings(NamedTuple):
    """Adam's settings and counts; for blocks of several kinds, each field may be a tensor."""

    keep2: Number  # share of the second moment that stays in a step
    take2: Number
    all2: Number  # 1 - β₂ᵗ: what squares that are alike in all steps so far have come to
    rest1: Number  # 1 - β₁ᵗ, or 1 without bias correction
    rest2: Number
    eps: Number


class AdamLength(Length):
    """Adam's fall ⟨m̂, m̂ / √v̂⟩, with one second moment a block: ‖m̂‖₁ ‖m̂‖₂ / (√Σv̂ + ε√n)."""

    squares = True

    def specs(self, count: int, dtype: torch.dtype) -> Specs:
        return {"square_sum": ((count,), dtype)}

    def give(self, one: Stepped, base: OfBase) -> Tensor:
        adam = AdamSettings(*_each_block(one, base.settings_of))
        kept = one.group.tensors["square_sum"]
        older = at(kept, one.slots)
        known = older + one.sums.former
        moved = known * adam.keep2 + one.sums.measured * adam.take2
        # A layer that starts anew has counted steps before: its first square stands for these, or
        # its steps would be 12 times as long after 200 steps.
        moved = torch.where(known > 0, moved, one.sums.measured * adam.all2)
        if one.present is not None:  # the other blocks' moments stay as they are
            moved = torch.where(one.present, moved, older)
        kept[one.slots] = moved
        shares = _last_columns(one, base)
        momentum = one.momentum if shares is None else _in_last(one.momentum, shares.sqrt())
        norms = [torch.linalg.vector_norm(momentum, x, (1, 2)) for x in (1, 2)]
        deviation = (moved / adam.rest2).sqrt_().add_(adam.eps * math.sqrt(one.entries))
        fall = norms[0] * norms[1] / (adam.rest1 * deviation)
        scale = fall / _along(one, _unit(one, shares), shares)
        return _no_terms(one, _within(scale, _limit(one, base)))


class FallLength(Length):
    """The fall of a base that has stepped: ⟨M, -U⟩ for its step U, which its rate is part of."""

    def give(self, one: Stepped, base: OfBase) -> Tensor:
        shares = _last_columns(one, base)
        if shares is not None:  # the base moves the parameters by directions as they are
            one.direction[..., -1] *= shares[:, None]
        scale = one.sums.measured.clamp(min=0) / _along(one, _unit(one, None), None)
        return _no_terms(one, _within(scale, _limit(one, base, taken=True)))


class MuonLength(Length):
    """Muon's own length: that of a matrix with equal singular values."""

    limits = False

    def give(self, one: Stepped, base: OfBase) -> Tensor:
        g, a = one.momentum.shape[1:]
        each = {
            x: orthogonal.muon_scale(g, a, base.settings_of(x.parameters[0])) for x in one.members
        }
        _unit(one, None)
        scale = one.group.common_or_each(one.members, each.__getitem__)
        return _no_terms(one, scale * max(g, a) ** -0.5)


class SGDLength(Length):
    """SGD's fall Σ lr ‖M‖² over all blocks: one scale for all, and a limit for each block.

    Terms: ‖M‖² and ⟨D, M⟩, each of all columns and of the last one, where the bias has a rate of
    its own, and the limit of the block's scale.
    """

    terms = 5

    def give(self, one: Stepped, base: OfBase) -> Tensor:
        norms = _unit(one, _last_columns(one, base))
        squares = one.momentum.square().sum(1)
        whole = squares.sum(1)
        last = (one.direction[..., -1] * one.momentum[..., -1]).sum(1)
        # Blocks at rest do not shorten the others' steps.
        along = torch.where(norms > 0, _along(one, norms, None), 0.0)
        own = whole / along.clamp(min=torch.finfo(along.dtype).tiny)
        most = torch.where(own.isnan(), math.inf, own * _MOST_OF_OWN)  # NaN: squares overflowed
        limit = torch.minimum(_limit(one, base, of_momentum=True), most)
        return torch.stack([whole, squares[:, -1], along, last, limit], 1)

    def finish(self, terms: dict[Layer, Tensor], base: OfBase) -> dict[Layer, Tensor]:
        layers = sorted(terms, key=lambda layer: layer.number)
        if not layers:
            return {}
        device = terms[layers[0]].device
        # Blocks are added up in the layers' order, so that all ranks have the same bits.
        rows = torch.cat([terms[x].to(device) for x in layers])
        rates = [_rates(x, base) for x in layers for _ in range(len(terms[x]))]
        fall, along = _weighed(rows[:, :4], rates)
        scales = _within(torch.where(along > 0, fall / along, 0.0), rows[:, 4])
        each = zip(layers, scales.split([len(terms[x]) for x in layers]), strict=True)
        return {x: part.to(terms[x].device) for x, part in each}


def _weighed(rows: Tensor, rates: Sequence[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    """Return Σ lr ‖M‖² and Σ lr ⟨D, M⟩ over blocks; ``rates`` are of weight and of bias."""
    first = rates[0][0]
    if all(_same(rate, first) for both in rates for rate in both):
        total = rows.sum(0)
        return total[0], total[2]
    weights = torch.stack([_on(rate, rows) for both in rates for rate in both]).view(-1, 2)
    parts = torch.stack([rows[:, ::2] - rows[:, 1::2], rows[:, 1::2]], 2)  # weight, bias
    fall, along = (parts * weights[:, None, :]).sum((0, 2)).unbind()
    return fall, along


def _same(a: Any, b: Any) -> bool:
    """Compare without a comparison of tensors, which would wait for the device."""
    return a is b or (not (isinstance(a, Tensor) or isinstance(b, Tensor)) and bool(a == b))


def _on(rate: Any, like: Tensor) -> Tensor:
    if isinstance(rate, Tensor):
        return rate.to(like.device, like.dtype).reshape(())
    return like.new_full((), rate)


def _within(scale: Tensor, limit: Tensor) -> Tensor:
    """Return scales of at most ``limit``: the limit itself where squares of momenta overflow.

    Without a limit, an overflow gives a step of zero.
    """
    scale = torch.where(scale.isfinite(), torch.minimum(scale, limit), limit)
    return torch.where(scale.isfinite(), scale, 0.0)


def _no_terms(one: Stepped, scale: Tensor | float) -> Tensor:
    """Scale the directions; no number of these blocks has to travel."""
    one.direction.mul_(scale[:, None, None] if isinstance(scale, Tensor) else scale)
    return one.direction.new_empty(len(one.direction), 0)


def _last_columns(one: Stepped, base: OfBase) -> Tensor | None:
    """Return the bias's learning rate as a share of the weight's, ``[blocks]``; None if all are 1.

    A parameter moves by its own rate along the direction.
    """
    rates = [_rates(layer, base) for layer in one.members]
    if all(_same(weight, bias) for weight, bias in rates):
        return None
    like = one.direction
    shares = [_on(bias, like) / _on(weight, like) for weight, bias in rates]
    each = zip(shares, one.members, strict=True)
    found = torch.cat([share.expand(layer.blocks) for share, layer in each])
    return torch.where(found.isfinite(), found, 1.0)


def _in_last(matrices: Tensor, shares: Tensor) -> Tensor:
    """Return a copy whose last columns are multiplied by these numbers."""
    found = matrices.clone()
    found[..., -1] *= shares[:, None]
    return found


def _unit(one: Stepped, shares: Tensor | None) -> Tensor:
    """Scale directions so that the steps along them have a root mean square of 1; zero stays zero.

    Return ‖M‖, ``[blocks]``.
    """
    moved = one.direction if shares is None else _in_last(one.direction, shares)
    own = torch.linalg.vector_norm(moved, 2, (1, 2))
    size = math.sqrt(one.entries)
    one.direction.mul_((size / torch.where(own > 0, own, size))[:, None, None])
    return torch.linalg.vector_norm(one.momentum, 2, (1, 2))


def _along(one: Stepped, norms: Tensor, shares: Tensor | None) -> Tensor:
    """Return ⟨D, M⟩ of directions from :func:`_unit`, at least 0.01 ‖D‖ ‖M‖; 1 for a zero M.

    ``norms`` are ‖M‖; ``shares`` multiply the last column's part.
    """
    along = torch.linalg.vecdot(one.direction.flatten(1), one.momentum.flatten(1))
    if shares is not None:
        last = torch.linalg.vecdot(one.direction[..., -1], one.momentum[..., -1])
        along = along + last * (shares - 1)
    along = torch.maximum(along, norms * (_LEAST_COSINE * math.sqrt(one.entries)))
    return torch.where(norms > 0, along, 1.0)


def _limit(one: Stepped, base: OfBase, *, taken: bool = False, of_momentum: bool = False) -> Tensor:
    """Return the largest scale of each block: steps have limited root mean squares.

    ``taken`` says that the learning rate is in the scale already, ``of_momentum`` that the base
    steps along a momentum of any length. Vectors have no limit.
    """
    if 1 in one.direction.shape[1:]:
        return one.direction.new_full((len(one.direction),), math.inf)
    rates = {layer: _rates(layer, base)[0] for layer in one.members}
    rate: Any
    if any(isinstance(x, Tensor) for x in rates.values()):  # do not wait for a device's rate
        rate = torch.cat([_on(rates[x], one.direction).expand(x.blocks) for x in one.members])
    else:
        rate = per_block(one.members, rates.__getitem__, one.group.g.key)
    size = (one.sums.weights / one.entries).sqrt_()
    if of_momentum:
        most = (size * _OF_WEIGHTS_BY_SGD).clamp_(min=_FREE)
    else:
        most = torch.minimum(rate * _OF_RATE, size * _OF_WEIGHTS)
        most = torch.maximum(most, size * _FREE_OF_WEIGHTS).clamp_(min=_FREE)
    return most if taken else most / rate


def _rates(layer: Layer, base: OfBase) -> tuple[Any, Any]:
    """Return the learning rates of a layer's weight and of its bias."""
    return base.rate_of(layer.parameters[0]), base.rate_of(layer.parameters[-1])


def _each_block(one: Stepped, of: Callable[[Tensor], Sequence[float]]) -> list[Number]:
    """Return each number of the layers' settings, one for all blocks or one for each.

    A layer's first parameter, its weight, has the settings of the layer.
    """
    settings = {layer: of(layer.parameters[0]) for layer in one.members}
    found: list[Number] = []
    for values in zip(*settings.values(), strict=True):
        by_layer = dict(zip(settings, values, strict=True))
        each = one.group.common_or_each(one.members, by_layer.__getitem__)
        found.append(each.flatten() if isinstance(each, Tensor) else each)
    return found
