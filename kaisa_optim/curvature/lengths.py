"""Lengths of steps: along K-FAC's direction the loss falls as it falls by the base's own step.

To first order, a step -η D lowers the loss by η ⟨D, M⟩ if the momentum M stands for the gradient.
The base's own step lowers it by its *fall*. A length is the η at which both are equal, by block.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..plan.facts import TensorSpec
from .group import Group, blueprints, per_block, sent, stack_key

Number = float | Tensor  # a tensor has one entry a block

# The least cosine of a direction with its momentum: else a direction across it has no limit.
_LEAST_COSINE = 0.01
# A step's root mean square is at most a share of the learning rate, as Muon's is where it takes
# AdamW's rates, and a share of the weights' own: without the second, an autoencoder of digits ends
# at 0.80 for 0.12 at a rate of 0.1. Short steps are free, since weights may begin at zero.
_OF_RATE, _OF_WEIGHTS = 0.2, 0.05
_FREE, _FREE_OF_WEIGHTS = 0.003, 0.02
# SGD's rate is no length of a step: only a share of the weights' size limits its steps. Without a
# limit, the autoencoder broke at 0.1. Short steps are free up to another share of the size: with
# 0.003 free for all, a detector's loss rose by its heads, of size 0.01, to 3.8 times the first one.
_OF_WEIGHTS_BY_SGD = 0.03
_FREE_OF_WEIGHTS_BY_SGD, _FREE_OF_ZEROS_BY_SGD = 0.1, 0.001
_TINY = 1e-30  # a divisor in place of zero
SQUARE_SUM = TensorSpec("square_sum", "counters", "number", "own")
SHARD_SUMS = 3  # of each block of a sharded layer: what is measured, former moments, weights


class BaseNumbers(NamedTuple):
    """The base's numbers in one step; the last of each list is of a parameter without a place."""

    rates: list[Any]  # learning rates of the optimizer's groups
    settings: list[Any]  # of the plan's parameters, for their lengths
    present: list[bool] | None  # whether the plan's parameters have a gradient; None: all have


class Share:
    """Groups on one device that are stepped together; numbers of all blocks are one tensor.

    Parameters have an ``index`` in the plan, and the number of their group in the optimizer.
    """

    def __init__(
        self, groups: Sequence[Group], index: Mapping[Tensor, int], number_of: Mapping[Tensor, int]
    ) -> None:
        self.groups = list(groups)
        self.layers = [layer for group in groups for layer in group.layers]
        self.like, self.sizes = groups[0].g.key, [group.count for group in groups]
        self.counts = [layer.blocks for layer in self.layers]
        # Places of the weights and of the biases (a layer's first parameter, and its last), and
        # numbers of their groups. Without a place, it is -1: the last of the base's numbers.
        first = [x.parameters[0] for x in self.layers]
        last = [x.parameters[-1] for x in self.layers]
        self.places = [[index.get(p, -1) for p in first], [index.get(p, -1) for p in last]]
        self.numbers = [[number_of.get(p, -1) for p in first], [number_of.get(p, -1) for p in last]]
        self._pairs = [*dict.fromkeys(zip(*self.numbers, strict=True))]
        shapes = [(stack_key(x, "g").size, stack_key(x, "a").size) for x in self.layers]
        self.roots = per_block(self.layers, [math.prod(x) ** 0.5 for x in shapes], self.like)
        # Steps up to this root mean square have no limit: those of vectors are all free.
        self.free = per_block(self.layers, [math.inf if 1 in x else 0.0 for x in shapes], self.like)
        blocks, start = list[range](), 0
        for count in self.counts:
            blocks.append(range(start, start + count))
            start += count
        # The layers with parameters in the plan, and their blocks, in the order of the layers'
        # numbers: bits of a sum depend on the order, which must be the same on all ranks.
        pairs = enumerate(zip(*self.places, strict=True))
        self.ordered = [i for i, pair in pairs if max(pair) >= 0]
        self.ordered.sort(key=lambda i: self.layers[i].number)
        order = [block for i in self.ordered for block in blocks[i]]
        self.order = sent(torch.tensor(order, dtype=torch.long, device="cpu"), self.like.device)
        self.measured: Any = None  # sums over each block, of what the base measures
        self.squares: Any = None  # of squares of the weights
        # Of each block's momentum M: the divisors, and ‖M‖ and ⟨D, M⟩ over these.
        self.divisors = self.norms = self.along = torch.empty(0)
        self.directions: list[Tensor] = []
        self.terms = self.roots.new_empty(len(self.roots), 0)  # of the clip
        # Layers of one block and of whole parameters, whose norms need no copy: their parameters'
        # places in the plan, their blocks, and whether each group's blocks are of such layers.
        self._plain, plain_blocks, flags = list[int](), list[int](), list[bool]()
        for layer, of_layer in zip(self.layers, blocks, strict=True):
            like = blueprints(layer)
            parts = [(x.shape[1:], x.stride()[1:]) for x in layer.parameter_parts(like)]
            is_whole = layer.blocks == 1 and parts == [(x.shape, x.stride()) for x in like]
            flags += [is_whole] * layer.blocks
            placed = [index[p] for p in layer.parameters if is_whole and p in index]
            self._plain += placed
            plain_blocks += [of_layer.start] * len(placed)
        rows = torch.tensor(plain_blocks, dtype=torch.long, device="cpu")
        self._plain_blocks = sent(rows, self.like.device)
        self._is_plain: list[bool | Tensor] = []
        for of_group in torch.tensor(flags, device="cpu").split(self.sizes):
            is_mixed = of_group.any() and not of_group.all()
            is_plain = sent(of_group, self.like.device) if is_mixed else bool(of_group[0])
            self._is_plain.append(is_plain)

    def block_sums(self, tensors: Sequence[Tensor], name: str, *, squares: bool) -> Tensor:
        """Return sums over each block of the plan's tensors, or squares, in stacks of this name."""
        total = self.roots.new_zeros(len(self.roots))
        if squares and self._plain:
            norms = torch._foreach_norm([tensors[i] for i in self._plain], 2, dtype=self.like.dtype)
            total.index_add_(0, self._plain_blocks, torch.stack(norms).square_())
        parts = zip(self.groups, total.split(self.sizes), self._is_plain, strict=True)
        for group, part, is_plain in parts:
            if squares and is_plain is True:
                continue
            matrices = group.collect(name)
            sums = (matrices.square_() if squares else matrices).sum((1, 2))
            if squares and isinstance(is_plain, Tensor):
                sums = torch.where(is_plain, part, sums)
            part.copy_(sums)
        return total

    def rates(self, rates: list[Any]) -> tuple[Number, Tensor | None]:
        """Return the weights' learning rates, and the biases' as shares of these; None: all 1."""
        if len(self._pairs) == 1 and self._pairs[0][0] == self._pairs[0][1]:
            return rates[self._pairs[0][0]], None
        weights, biases = self.numbers
        rate = self.each([rates[i] for i in weights])
        if all([are_alike([rates[i], rates[j]]) for i, j in self._pairs]):
            return rate, None
        shares = torch.ones_like(self.roots) * self.each([rates[i] for i in biases]) / rate
        return rate, torch.where(shares.isfinite(), shares, 1.0)

    def each(self, values: list[Any]) -> Number:
        """Return the layers' numbers: one, if all are the same, else one for each block."""
        if are_alike(values):
            return values[0]
        if any(map(torch.is_tensor, values)):
            numbers = []
            for value, count in zip(values, self.counts, strict=True):
                number = value if isinstance(value, Tensor) else self.roots.new_full((), value)
                numbers.append(number.to(self.roots).reshape(1).expand(count))
            return torch.cat(numbers)
        return per_block(self.layers, values, self.like)

    def deliver(self, scales: Tensor | None) -> None:
        """Write the directions into the buffers, times ``scales`` of the blocks."""
        if scales is not None:
            scales = scales.to(self.like.device, self.like.dtype)
            torch._foreach_mul_(self.directions, list(scales[:, None, None].split(self.sizes)))
        for group, directions in zip(self.groups, self.directions, strict=True):
            group.deliver(directions)
        self.directions = []


def are_alike(values: list[Any]) -> bool:
    """Return whether all values are the same; tensors count as themselves, whatever they hold."""
    # To compare the numbers of tensors would make the host wait for the device.
    return len(set(map(id, values))) == 1 or (
        not any(map(torch.is_tensor, values)) and len(set(values)) == 1
    )


def norms_of(stacks: Sequence[Tensor], order: float) -> Tensor:
    """Return the norms of all blocks, ``[blocks]``."""
    blocks = itertools.chain.from_iterable(map(Tensor.unbind, stacks))
    # CPUs add up one by one: in float32, a sum of 2²⁶ numbers came to half of it.
    wide = torch.float64 if order == 1 and stacks[0].is_cpu else None
    return torch.stack(torch._foreach_norm([*blocks], order, dtype=wide))


class Length(ABC):
    """One way to give directions a length."""

    measures = ""  # what is summed of all that the base measures: "squares", "sums" or nothing
    specs: tuple[TensorSpec, ...] = ()  # what gradient workers keep for each block
    has_rate = False  # falls are of whole steps, which the learning rate is part of

    def give(
        self, share: Share, momenta: list[Tensor], divisors: Tensor, base: BaseNumbers
    ) -> None:
        """Give directions their length, in place; ``momenta`` are divided by ``divisors``."""
        rate, shares = share.rates(base.rates)
        directions, weighed = share.directions, None
        if shares is not None:
            # Weights at rate 0 rest: they have no part in the fall, nor in the biases' length.
            moves = (torch.ones_like(share.roots) * rate != 0).split(share.sizes)
            for stacks in (directions, momenta):
                for stack, part in zip(stacks, moves, strict=True):
                    stack[..., :-1] *= part[:, None, None]
            # Shares of the rate multiply the last column's part of ⟨D, M⟩ and of ‖M‖².
            directions = _in_last(directions, shares)
            if self.has_rate:  # the base moves the parameters by directions as they are
                share.directions = directions
            else:
                weighed = _in_last(momenta, shares.sqrt())
        share.divisors, share.norms = divisors, norms_of(weighed or momenta, 2)
        # Directions in units have a root mean square of 1; zero stays zero.
        units = share.roots / norms_of(directions, 2).clamp_(min=_TINY)
        dots = torch.cat([(x * y).sum((1, 2)) for x, y in zip(directions, momenta, strict=True)])
        least = (share.norms * _LEAST_COSINE).mul_(share.roots)
        share.along = torch.maximum(dots.mul_(units), least).clamp_(min=_TINY)
        scales, limit = self._scales(share, base, rate, weighed)
        # Where squares of momenta overflow, a scale is the limit. Without a limit, it is zero.
        scales = scales.nan_to_num_(nan=math.inf, posinf=math.inf)
        scales = torch.minimum(scales, limit).nan_to_num_(nan=0.0, posinf=0.0).mul_(units)
        torch._foreach_mul_(share.directions, list(scales[:, None, None].split(share.sizes)))

    @abstractmethod
    def _scales(
        self, share: Share, base: BaseNumbers, rate: Number, weighed: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return scales of directions in units, and limits; ``weighed`` momenta count by rates."""


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
    specs = (SQUARE_SUM,)

    def _scales(
        self, share: Share, base: BaseNumbers, rate: Number, weighed: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        # A layer's first parameter, its weight, has the settings of the layer.
        settings = [base.settings[i] for i in share.places[0]]
        adam: AdamSettings = settings[0]
        if len(set(map(id, settings))) > 1:
            adam = AdamSettings(*[share.each([*x]) for x in zip(*settings, strict=True)])
        stacks = [group.tensors["square_sum"] for group in share.groups]
        older = torch.cat(stacks)
        moved = (older * adam.keep2).add_(share.measured * adam.take2)
        # A layer that starts anew has counted steps before: its first square stands for these, or
        # its steps would be 12 times as long after 200 steps.
        moved = torch.where(older > 0, moved, share.measured * adam.all2)
        if base.present is not None:
            parts = zip(*share.places, strict=True)
            flags = [base.present[weight] or base.present[bias] for weight, bias in parts]
            if not all(flags):  # moments of blocks without a gradient stay as they are
                present = per_block(share.layers, flags, share.like) > 0
                moved = torch.where(present, moved, older)
        torch._foreach_copy_(stacks, list(moved.split(share.sizes)))
        deviation = (moved / adam.rest2).sqrt_().add_(share.roots * adam.eps)
        sums = share.roots if weighed is None else norms_of(weighed, 1).to(share.norms.dtype)
        fall = (share.norms * sums).mul_(share.divisors) / adam.rest1 / deviation
        return fall / share.along, _limit(share, rate) / rate


class FallLength(Length):
    """The fall of a base that has stepped: ⟨M, -U⟩ for its step U, which its rate is part of."""

    measures = "sums"
    has_rate = True

    def _scales(
        self, share: Share, base: BaseNumbers, rate: Number, weighed: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        return share.measured.clamp(min=0) / share.along.mul_(share.divisors), _limit(share, rate)


class SGDLength(Length):
    """SGD's fall lr ‖M‖², where a bias may have a rate of its own; weights limit its steps."""

    def _scales(
        self, share: Share, base: BaseNumbers, rate: Number, weighed: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        # SGD steps along a momentum of any length.
        size = share.squares.sqrt().div_(share.roots)
        free = (size * _FREE_OF_WEIGHTS_BY_SGD).clamp_(_FREE_OF_ZEROS_BY_SGD, _FREE)
        limit = torch.maximum(size * _OF_WEIGHTS_BY_SGD, free).maximum(share.free) / rate
        return share.norms.square_().div_(share.along).mul_(share.divisors), limit


def _limit(share: Share, rate: Number) -> Tensor:
    """Return the largest root mean squares of steps, ``[blocks]``; vectors have no limit."""
    size = share.squares.sqrt().div_(share.roots)
    by_rate, most = rate * _OF_RATE, size * _OF_WEIGHTS
    if isinstance(by_rate, Tensor):
        most = torch.minimum(most, by_rate)
    else:
        most.clamp_(max=by_rate)
    most = torch.maximum(most, size * _FREE_OF_WEIGHTS).clamp_(min=_FREE)
    return torch.maximum(most, share.free)


def _in_last(stacks: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    copies = [stack.clone() for stack in stacks]
    for stack, part in zip(copies, shares.split(list(map(len, copies))), strict=True):
        stack[..., -1] *= part[:, None]
    return copies
