"""Lengths of steps: along K-FAC's direction the loss falls as it falls by the base's own step.

To first order, a step -η D lowers the loss by η ⟨D, M⟩ if the momentum M stands for the gradient.
The base's own step lowers it by its *fall*. A length is the η at which both are equal. Everything
is per block, but for SGD, whose blocks share one scale.

Numbers of all blocks of a step, whatever their shapes, make one tensor: few small operations.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers import Layer
from ..plan.moves import TensorSpec
from .stacks import per_block, sent, stack_key

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
# 0.1, and a U-Net ended at 0.040 for 0.046. Short steps are free up to another share of the size:
# a detector's heads, of size 0.01, took steps of 0.003, and its loss rose to 3.8 times its first
# value. With 0.001 free for weights of any size, the U-Net ended at 0.051 for 0.046.
_OF_WEIGHTS_BY_SGD = 0.03
_FREE_OF_WEIGHTS_BY_SGD, _FREE_OF_ZEROS_BY_SGD = 0.1, 0.001
# A block's scale under SGD is at most this multiple of the scale by its own fall alone: blocks with
# tiny gradients, such as idle experts', would else take whole steps.
_MOST_OF_OWN = 10.0
_TINY = 1e-30  # a divisor in place of zero
SQUARE_SUM = TensorSpec("square_sum", "counters", "number", "own")


@dataclass
class OfBase:
    """The base's side of one step, tensors by parameter; sharded parameters have their own part."""

    momenta: dict[Tensor, Tensor] = field(default_factory=dict)  # the base would step along these
    # A length sums these over each block: gradients, or the momenta times the base's own step.
    measured: dict[Tensor, Tensor] = field(default_factory=dict)
    # Second moments that the base kept as long as it stepped the parameter itself.
    former: dict[Tensor, Tensor] = field(default_factory=dict)
    settings: dict[Tensor, Any] = field(default_factory=dict)  # of parameters, for their lengths
    idle: Any = None  # the settings of the others
    # Learning rates. The base does not step a parameter that a user took out of its group.
    rates: dict[Tensor, float | Tensor] = field(default_factory=dict)


class Blocks:
    """The blocks of some layers, of any shapes on one device: what stays from step to step."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)
        self.like = stack_key(layers[0], "g")
        self.counts = [layer.blocks for layer in layers]
        self.weights: list[Tensor] = [layer.parameters[0] for layer in layers]
        self.biases: list[Tensor] = [layer.parameters[-1] for layer in layers]
        sides = {x: (stack_key(x, "g").size, stack_key(x, "a").size) for x in layers}
        self.roots = per_block(layers, lambda x: math.prod(sides[x]) ** 0.5, self.like)
        # Steps up to this root mean square have no limit: those of vectors are all free.
        self.free = per_block(layers, lambda x: math.inf if 1 in sides[x] else 0.0, self.like)
        self._kept: dict[str, tuple[list[Any], Tensor]] = {}
        self._order: Tensor | None = None

    def each(self, name: str, values: list[Any]) -> Number:
        """Return the layers' numbers: one, if all are the same, else one for each block.

        The last ones of each name stay on the device.
        """
        if _are_alike(values):
            return values[0]
        if any(map(torch.is_tensor, values)):
            device, dtype = self.like.device, self.like.dtype
            parts = [
                x.to(device, dtype).reshape(1)
                if isinstance(x, Tensor)
                else torch.full((1,), x, dtype=dtype, device=device)
                for x in values
            ]
            rows = zip(parts, self.counts, strict=True)
            return torch.cat([part.expand(count) for part, count in rows])
        if name not in self._kept or self._kept[name][0] != values:
            of_layer = dict(zip(self.layers, values, strict=True))
            self._kept[name] = values, per_block(self.layers, of_layer.__getitem__, self.like)
        return self._kept[name][1]

    @property
    def order(self) -> Tensor:
        """The blocks' places in the order of the layers' numbers, alike on all ranks."""
        if self._order is None:
            places = torch.arange(sum(self.counts), device="cpu").split(self.counts)
            both = sorted(zip(self.layers, places, strict=True), key=lambda x: x[0].number)
            self._order = sent(torch.cat([place for _, place in both]), self.like.device)
        return self._order


def _are_alike(values: list[Any]) -> bool:
    """Return whether all values are the same; tensors count as themselves, whatever they hold."""
    return len(set(values)) == 1


class BlockSums(NamedTuple):
    """Sums over each block, ``[blocks]``."""

    measured: Tensor | None
    former: Tensor | None
    weights: Tensor  # squares of the weights


class Stepped(NamedTuple):
    """Blocks that are stepped together, in stacks of equal shape ``[blocks, g, a]``."""

    blocks: Blocks
    directions: list[Tensor]
    momenta: list[Tensor]  # divided by their peaks
    peaks: Tensor  # the momenta's largest absolute values
    sums: BlockSums
    kept: Kept
    present: Tensor | None  # blocks with a gradient; None: all


class Kept(NamedTuple):
    """Numbers of each block that a length keeps from step to step, ``[blocks]``."""

    read: Callable[[str], Tensor]
    write: Callable[[str, Tensor], None]


class Length(ABC):
    """One way to give directions a length."""

    measures = ""  # what is summed of all that the base measures: "squares", "sums" or nothing
    terms = 0  # numbers of each block that travel with its direction
    kept: tuple[TensorSpec, ...] = ()  # what gradient workers keep for each block

    @abstractmethod
    def give(self, one: Stepped, base: OfBase) -> Tensor:
        """Give directions their length, in place; return the blocks' terms, ``[blocks, terms]``."""

    def finish(self, terms: Tensor, blocks: Blocks, base: OfBase) -> Tensor | None:
        """Return the blocks' scales, from the terms of all layers; None: they have their length."""
        return None


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

    measures = "squares"
    kept = (SQUARE_SUM,)

    def give(self, one: Stepped, base: OfBase) -> Tensor:
        # A layer's first parameter, its weight, has the settings of the layer.
        settings = [base.settings.get(p, base.idle) for p in one.blocks.weights]
        adam: AdamSettings = settings[0]
        if len(set(map(id, settings))) > 1:
            each = enumerate(zip(*settings, strict=True))
            adam = AdamSettings(*[one.blocks.each(str(i), list(values)) for i, values in each])
        older, former, measured = one.kept.read("square_sum"), one.sums.former, one.sums.measured
        assert measured is not None
        known = older if former is None else older + former
        moved = (known * adam.keep2).add_(measured * adam.take2)
        # A layer that starts anew has counted steps before: its first square stands for these, or
        # its steps would be 12 times as long after 200 steps.
        moved = torch.where(known > 0, moved, measured * adam.all2)
        if one.present is not None:  # the other blocks' moments stay as they are
            moved = torch.where(one.present, moved, older)
        one.kept.write("square_sum", moved)
        shares = _last_columns(one.blocks, base)
        momenta = one.momenta if shares is None else _in_last(one.momenta, shares.sqrt())
        deviation = (moved / adam.rest2).sqrt_().add_(one.blocks.roots * adam.eps)
        norms = _norms(one.momenta, 2)
        both = _norms(momenta, 1).mul_(norms if shares is None else _norms(momenta, 2))
        fall = both.mul_(one.peaks) / adam.rest1
        fall /= deviation
        units = _units(one, shares)
        along = _along(one, units, shares, norms)
        _scale(one, _within(fall / along, _limit(one, base)) * units)
        return _no_terms(one)


class FallLength(Length):
    """The fall of a base that has stepped: ⟨M, -U⟩ for its step U, which its rate is part of."""

    measures = "sums"

    def give(self, one: Stepped, base: OfBase) -> Tensor:
        shares = _last_columns(one.blocks, base)
        if shares is not None:  # the base moves the parameters by directions as they are
            one.directions[:] = _in_last(one.directions, shares)
            # Weights at rate 0 rest: the fall is left to their biases.
            rates = one.blocks.each("rate", _rates(one.blocks, base)[0])
            moves = torch.ones_like(one.peaks) * rates != 0
            for stacks in (one.directions, one.momenta):
                parts = moves.split(list(map(len, stacks)))
                for stack, part in zip(stacks, parts, strict=True):
                    stack[..., :-1] *= part[:, None, None]
        units, norms = _units(one, None), _norms(one.momenta, 2)
        assert one.sums.measured is not None
        along = _along(one, units, None, norms)
        scale = one.sums.measured.clamp(min=0) / along.mul_(one.peaks)
        _scale(one, _within(scale, _limit(one, base, taken=True)) * units)
        return _no_terms(one)


class SGDLength(Length):
    """SGD's fall Σ lr ‖M‖² over all blocks: one scale for all, and a limit for each block.

    Terms: ‖M‖² and ⟨D, M⟩, each of all columns and of the last one, where a bias has a rate of its
    own, and the limit of the block's scale.
    """

    terms = 5

    def give(self, one: Stepped, base: OfBase) -> Tensor:
        shares = _last_columns(one.blocks, base)
        units = _units(one, shares)
        norms = _norms(one.momenta, 2)
        whole = norms.mul(one.peaks).square_()
        # Blocks at rest do not shorten the others' steps.
        along = _along(one, units, None, norms)
        along = torch.where(norms > 0, along.mul_(one.peaks), 0.0)
        squares = last = torch.zeros_like(whole)
        if shares is not None:
            squares = _dots_of_last(one.momenta, one.momenta).mul_(one.peaks).mul_(one.peaks)
            last = _dots_of_last(one.directions, one.momenta).mul_(units).mul_(one.peaks)
        own = whole / along.clamp(min=torch.finfo(along.dtype).tiny)
        most = (own * _MOST_OF_OWN).nan_to_num_(nan=math.inf, posinf=math.inf)  # an overflow
        limit = torch.minimum(_limit(one, base, of_momentum=True), most)
        _scale(one, units)
        return torch.stack([whole, squares, along, last, limit], 1)

    def finish(self, terms: Tensor, blocks: Blocks, base: OfBase) -> Tensor:
        # Σ lr ‖M‖² and Σ lr ⟨D, M⟩ are added up over blocks in the layers' order, so that all ranks
        # have the same bits.
        rows, (weights, biases) = terms[:, :4], _rates(blocks, base)
        if _are_alike([*weights, *biases]):
            total = rows.index_select(0, blocks.order).sum(0)
            fall, along = total[0], total[2]
        else:
            of_weight, of_bias = blocks.each("rate", weights), blocks.each("rate of bias", biases)
            parts = (rows[:, ::2] - rows[:, 1::2]).mul_(_column(of_weight))
            parts += rows[:, 1::2] * _column(of_bias)
            fall, along = parts.index_select(0, blocks.order).sum(0).unbind()
        share = torch.where(along > 0, fall / along, 0.0)
        return _within(share.expand(len(terms)), terms[:, 4])


def _column(values: Number) -> Number:
    many = isinstance(values, Tensor) and values.dim() == 1
    return values[:, None] if many else values  # type: ignore[index]


def _rates(blocks: Blocks, base: OfBase) -> tuple[list[Any], list[Any]]:
    """Return the learning rates of the layers' weights and of their biases."""
    rates = base.rates
    return [rates.get(p, 0.0) for p in blocks.weights], [rates.get(p, 0.0) for p in blocks.biases]


def _within(scale: Tensor, limit: Tensor) -> Tensor:
    """Return scales of at most ``limit``: the limit itself where squares of momenta overflow.

    Without a limit, an overflow gives a step of zero.
    """
    scale = torch.minimum(scale.nan_to_num(nan=math.inf, posinf=math.inf), limit)
    return scale.nan_to_num_(nan=0.0, posinf=0.0)


def _scale(one: Stepped, scales: Tensor) -> None:
    """Multiply each block's direction by its scale, in place."""
    sizes = [len(direction) for direction in one.directions]
    torch._foreach_mul_(one.directions, list(scales[:, None, None].split(sizes)))


def _no_terms(one: Stepped) -> Tensor:
    """Return the terms of blocks of which no number has to travel."""
    return one.peaks.new_empty(len(one.peaks), 0)


def _last_columns(blocks: Blocks, base: OfBase) -> Tensor | None:
    """Return the bias's learning rate as a share of the weight's, ``[blocks]``; None if all are 1.

    A parameter moves by its own rate along the direction.
    """
    weights, biases = _rates(blocks, base)
    pairs = set(zip(weights, biases, strict=True))  # few: a rate is a whole group's
    if all(_are_alike([weight, bias]) for weight, bias in pairs):
        return None
    of_weight, of_bias = blocks.each("rate", weights), blocks.each("rate of bias", biases)
    shares = torch.ones_like(blocks.roots) * of_bias / of_weight
    return torch.where(shares.isfinite(), shares, 1.0)


def _in_last(stacks: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    """Return copies whose last columns are multiplied by these numbers."""
    found = [stack.clone() for stack in stacks]
    for stack, share in zip(found, shares.split(list(map(len, found))), strict=True):
        stack[..., -1] *= share[:, None]
    return found


def _norms(stacks: Sequence[Tensor], order: float) -> Tensor:
    """Return the norms of all blocks, ``[blocks]``."""
    blocks = itertools.chain.from_iterable(map(Tensor.unbind, stacks))
    return torch.stack(torch._foreach_norm([*blocks], order))


def peaks_of(stacks: Sequence[Tensor]) -> Tensor:
    """Return the blocks' largest absolute values, or 1 for zeros, ``[blocks]``."""
    peaks = _norms(stacks, math.inf)
    return torch.where(peaks == 0, 1.0, peaks)


def _units(one: Stepped, shares: Tensor | None) -> Tensor:
    """Return the scales with which steps have a root mean square of 1; zero stays zero."""
    moved = one.directions if shares is None else _in_last(one.directions, shares)
    return one.blocks.roots / _norms(moved, 2).clamp_(min=_TINY)


def _dots(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the blocks' inner products, ``[blocks]``."""
    return torch.cat([(x * y).sum((1, 2)) for x, y in zip(ones, others, strict=True)])


def _dots_of_last(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return _dots([x[..., -1:] for x in ones], [y[..., -1:] for y in others])


def _along(one: Stepped, units: Tensor, shares: Tensor | None, norms: Tensor) -> Tensor:
    """Return ⟨D, M⟩ over M's peaks, at least 0.01 ‖D‖ ‖M‖ and not 0.

    Directions are in ``units``, ``norms`` are of momenta; ``shares`` multiply the last column's
    part.
    """
    dots = _dots(one.directions, one.momenta)
    if shares is not None:
        dots += _dots_of_last(one.directions, one.momenta).mul_(shares - 1)
    least = (norms * _LEAST_COSINE).mul_(one.blocks.roots)
    return torch.maximum(dots.mul_(units), least).clamp_(min=_TINY)


def _limit(one: Stepped, base: OfBase, *, taken: bool = False, of_momentum: bool = False) -> Tensor:
    """Return the largest scale of each block: steps have limited root mean squares.

    ``taken`` says that the learning rate is in the scale already, ``of_momentum`` that the base
    steps along a momentum of any length. Vectors have no limit.
    """
    blocks = one.blocks
    rate = blocks.each("rate", _rates(blocks, base)[0])
    size = one.sums.weights.sqrt().div_(blocks.roots)
    if of_momentum:
        free = (size * _FREE_OF_WEIGHTS_BY_SGD).clamp_(_FREE_OF_ZEROS_BY_SGD, _FREE)
        most = torch.maximum(size * _OF_WEIGHTS_BY_SGD, free)
    else:
        by_rate = rate * _OF_RATE
        most = size * _OF_WEIGHTS
        if isinstance(by_rate, Tensor):
            most = torch.minimum(most, by_rate)
        else:
            most.clamp_(max=by_rate)
        most = torch.maximum(most, size * _FREE_OF_WEIGHTS).clamp_(min=_FREE)
    most = torch.maximum(most, blocks.free)
    return most if taken else most / rate
