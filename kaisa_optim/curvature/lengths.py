"""Lengths of steps: along K-FAC's direction the loss falls as it falls by the base's own step.

To first order, a step -η D lowers the loss by η ⟨D, M⟩ if the momentum M stands for the gradient.
The base's own step lowers it by its *fall*. A length is the η at which both are equal. Everything
is per block, but for SGD, whose blocks share one scale.

Numbers of all blocks of a step, whatever their shapes, make one tensor: few small operations.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..plan.facts import TensorSpec
from .group import Group, per_block, sent, stack_key, strides

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


SHARD_SUMS = 3  # of each block of a sharded layer: what is measured, former moments, weights


class BaseNumbers(NamedTuple):
    """The base's numbers in one step; the last of each list is of a parameter without a place."""

    rates: list[Any]  # learning rates of the optimizer's groups
    settings: list[Any]  # of the plan's parameters, for their lengths
    present: list[bool] | None  # whether the plan's parameters have a gradient; None: all have


class Share:
    """Groups on one device that are stepped together, and the numbers of their blocks side by side.

    ``index`` has the places of parameters in the plan, ``number_of`` the numbers of their groups in
    the optimizer. Numbers of blocks, whatever their shapes, are one tensor, ``[blocks]``.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        index: Mapping[Tensor, int],
        number_of: Mapping[Tensor, int],
    ) -> None:
        self.groups = list(groups)
        self.layers = [layer for group in groups for layer in group.layers]
        self.like = groups[0].g.key
        self.sizes = [group.count for group in groups]
        self.counts = [layer.blocks for layer in self.layers]
        # The first parameter of a layer is its weight, the last its bias.
        first, last = ([x.parameters[i] for x in self.layers] for i in (0, -1))
        self.weights = [index.get(p, -1) for p in first]
        self.biases = [index.get(p, -1) for p in last]
        self._numbers = [[number_of.get(p, -1) for p in part] for part in (first, last)]
        sides = {x: (stack_key(x, "g").size, stack_key(x, "a").size) for x in self.layers}
        self.roots = per_block(self.layers, lambda x: math.prod(sides[x]) ** 0.5, self.like)
        # Steps up to this root mean square have no limit: those of vectors are all free.
        self.free = per_block(self.layers, lambda x: math.inf if 1 in sides[x] else 0.0, self.like)
        self._last: dict[str, tuple[list[Any], Tensor]] = {}
        places = torch.arange(sum(self.counts), device="cpu").split(self.counts)
        # The layers with parameters in the plan, and their blocks' places, in the order of the
        # layers' numbers, alike on all ranks: the bits of sums depend on what is added.
        ours = [i for i, x in enumerate(zip(self.weights, self.biases, strict=True)) if max(x) >= 0]
        self.ordered = sorted(ours, key=lambda i: self.layers[i].number)
        none = torch.empty(0, dtype=torch.long, device="cpu")
        self.order = sent(torch.cat([none, *(places[i] for i in self.ordered)]), self.like.device)
        self._find_plain(index, [int(place[0]) for place in places])
        self.measured: Tensor | None = None  # sums over each block, of what the base measures
        self.squares: Tensor | None = None  # of squares of the weights
        self.directions: list[Tensor] = []
        self.terms = torch.empty(0)

    def _find_plain(self, index: Mapping[Tensor, int], starts: list[int]) -> None:
        """Find the layers of one block and of whole parameters, whose norms need no copy."""
        plain: list[tuple[int, int]] = []  # a parameter's place in the plan, and its block
        whole = []
        for layer, start in zip(self.layers, starts, strict=True):
            layouts = [(p.shape, strides(p)) for p in layer.parameters]
            like = [torch.empty_strided(*layout, device="meta") for layout in layouts]
            parts = [(x.shape[1:], x.stride()[1:]) for x in layer.parameter_parts(like)]
            is_whole = layer.blocks == 1 and parts == layouts
            plain += [(index[p], start) for p in layer.parameters if is_whole and p in index]
            whole += [is_whole] * layer.blocks
        self._plain = [place for place, _ in plain]
        blocks = torch.tensor([block for _, block in plain], dtype=torch.long, device="cpu")
        self._block_of = sent(blocks, self.like.device)
        # For each group, whether its blocks are of such layers.
        self._is_whole: list[bool | Tensor] = []
        for flags in torch.tensor(whole, device="cpu").split(self.sizes):
            is_mixed = flags.any() and not flags.all()
            self._is_whole.append(sent(flags, self.like.device) if is_mixed else bool(flags[0]))

    def block_sums(self, tensors: Sequence[Tensor], name: str, *, squares: bool) -> Tensor:
        """Return sums over each block of the plan's ``tensors``, which are stacks of this name.

        ``squares``: of their squares.
        """
        total = self.roots.new_zeros(len(self.roots))
        if squares and self._plain:
            chosen = [tensors[i] for i in self._plain]
            norms = torch.stack(torch._foreach_norm(chosen, 2, dtype=self.like.dtype))
            total.index_add_(0, self._block_of, norms.square_())
        both = zip(self.groups, total.split(self.sizes), self._is_whole, strict=True)
        for group, part, is_whole in both:
            if squares and is_whole is True:
                continue
            matrices = group.collect(name)
            sums = (matrices.square_() if squares else matrices).sum((1, 2))
            if squares and isinstance(is_whole, Tensor):
                sums = torch.where(is_whole, part, sums)
            part.copy_(sums)
        return total

    def of_groups(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the groups' values for the layers' weights and for their biases."""
        weights, biases = ([values[i] for i in part] for part in self._numbers)
        return weights, biases

    def each(self, name: str, values: list[Any]) -> Number:
        """Return the layers' numbers: one, if all are the same, else one for each block.

        The last ones of each name stay on the device.
        """
        if are_alike(values):
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
        if name not in self._last or self._last[name][0] != values:
            of_layer = dict(zip(self.layers, values, strict=True))
            self._last[name] = values, per_block(self.layers, of_layer.__getitem__, self.like)
        return self._last[name][1]

    def present(self, present: list[bool]) -> Tensor | None:
        """Return for each block whether it has a gradient; ``None`` if all have one."""
        pairs = zip(self.layers, self.weights, self.biases, strict=True)
        of_layer = {x: present[weight] or present[bias] for x, weight, bias in pairs}
        if all(of_layer.values()):
            return None
        return per_block(self.layers, of_layer.__getitem__, self.like) > 0

    def scale(self, stacks: list[Tensor], scales: Tensor) -> None:
        """Multiply each block by its number, in place."""
        scales = scales.to(self.like.device, self.like.dtype)
        torch._foreach_mul_(stacks, list(scales[:, None, None].split(self.sizes)))


def are_alike(values: list[Any]) -> bool:
    """Return whether all values are the same; tensors count as themselves, whatever they hold."""
    return len(set(map(id, values))) == 1 or (
        not any(map(torch.is_tensor, values)) and len(set(values)) == 1
    )


class Length(ABC):
    """One way to give directions a length."""

    measures = ""  # what is summed of all that the base measures: "squares", "sums" or nothing
    terms = 0  # numbers of each block that travel with its direction
    specs: tuple[TensorSpec, ...] = ()  # what gradient workers keep for each block

    @abstractmethod
    def give(self, share: Share, momenta: list[Tensor], peaks: Tensor, base: BaseNumbers) -> Tensor:
        """Give directions their length, in place; return the blocks' terms, ``[blocks, terms]``.

        ``momenta`` are divided by their largest absolute values, ``peaks``.
        """

    def finish(self, terms: Tensor, share: Share, base: BaseNumbers) -> Tensor | None:
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
    specs = (SQUARE_SUM,)

    def give(self, share: Share, momenta: list[Tensor], peaks: Tensor, base: BaseNumbers) -> Tensor:
        # A layer's first parameter, its weight, has the settings of the layer.
        settings = [base.settings[i] for i in share.weights]
        adam: AdamSettings = settings[0]
        if len(set(map(id, settings))) > 1:
            each = enumerate(zip(*settings, strict=True))
            adam = AdamSettings(*[share.each(str(i), list(values)) for i, values in each])
        stacks, measured = [group.tensors["square_sum"] for group in share.groups], share.measured
        assert measured is not None
        older = torch.cat(stacks)
        moved = (older * adam.keep2).add_(measured * adam.take2)
        # A layer that starts anew has counted steps before: its first square stands for these, or
        # its steps would be 12 times as long after 200 steps.
        moved = torch.where(older > 0, moved, measured * adam.all2)
        present = None if base.present is None else share.present(base.present)
        if present is not None:  # the other blocks' moments stay as they are
            moved = torch.where(present, moved, older)
        torch._foreach_copy_(stacks, list(moved.split(share.sizes)))
        shares = _last_columns(share, base)
        falling = momenta if shares is None else _in_last(momenta, shares.sqrt())
        deviation = (moved / adam.rest2).sqrt_().add_(share.roots * adam.eps)
        norms = norms_of(momenta, 2)
        both = norms_of(falling, 1).mul_(norms if shares is None else norms_of(falling, 2))
        fall = both.mul_(peaks) / adam.rest1
        fall /= deviation
        units = _units(share, shares)
        along = _along(share, momenta, units, shares, norms)
        scales = _within(fall / along, _limit(share, base)) * units
        share.scale(share.directions, scales)
        return peaks.new_empty(len(peaks), 0)


class FallLength(Length):
    """The fall of a base that has stepped: ⟨M, -U⟩ for its step U, which its rate is part of."""

    measures = "sums"

    def give(self, share: Share, momenta: list[Tensor], peaks: Tensor, base: BaseNumbers) -> Tensor:
        shares = _last_columns(share, base)
        if shares is not None:  # the base moves the parameters by directions as they are
            share.directions = _in_last(share.directions, shares)
            # Weights at rate 0 rest: the fall is left to their biases.
            rates = share.each("rate", share.of_groups(base.rates)[0])
            moves = torch.ones_like(peaks) * rates != 0
            for stacks in (share.directions, momenta):
                for stack, part in zip(stacks, moves.split(share.sizes), strict=True):
                    stack[..., :-1] *= part[:, None, None]
        units, norms = _units(share, None), norms_of(momenta, 2)
        assert share.measured is not None
        along = _along(share, momenta, units, None, norms)
        scales = share.measured.clamp(min=0) / along.mul_(peaks)
        scales = _within(scales, _limit(share, base, taken=True)) * units
        share.scale(share.directions, scales)
        return peaks.new_empty(len(peaks), 0)


class SGDLength(Length):
    """SGD's fall Σ lr ‖M‖² over all blocks: one scale for all, and a limit for each block.

    Terms: ‖M‖² and ⟨D, M⟩, each of all columns and of the last one, where a bias has a rate of its
    own, and the limit of the block's scale.
    """

    terms = 5

    def give(self, share: Share, momenta: list[Tensor], peaks: Tensor, base: BaseNumbers) -> Tensor:
        shares = _last_columns(share, base)
        units = _units(share, shares)
        norms = norms_of(momenta, 2)
        whole = norms.mul(peaks).square_()
        # Blocks at rest do not shorten the others' steps.
        along = _along(share, momenta, units, None, norms)
        along = torch.where(norms > 0, along.mul_(peaks), 0.0)
        squares = last = torch.zeros_like(whole)
        if shares is not None:
            squares = _dots_of_last(momenta, momenta).mul_(peaks).mul_(peaks)
            last = _dots_of_last(share.directions, momenta).mul_(units).mul_(peaks)
        own = whole / along.clamp(min=torch.finfo(along.dtype).tiny)
        most = (own * _MOST_OF_OWN).nan_to_num_(nan=math.inf, posinf=math.inf)  # an overflow
        limit = torch.minimum(_limit(share, base, of_momentum=True), most)
        share.scale(share.directions, units)
        return torch.stack([whole, squares, along, last, limit], 1)

    def finish(self, terms: Tensor, share: Share, base: BaseNumbers) -> Tensor:
        # Σ lr ‖M‖² and Σ lr ⟨D, M⟩ are added up over blocks in the layers' order, so that all ranks
        # have the same bits.
        rows, (weights, biases) = terms[:, :4], share.of_groups(base.rates)
        if are_alike([*weights, *biases]):
            total = rows.index_select(0, share.order).sum(0)
            fall, along = total[0], total[2]
        else:
            of_weight, of_bias = share.each("rate", weights), share.each("rate of bias", biases)
            parts = (rows[:, ::2] - rows[:, 1::2]).mul_(_column(of_weight))
            parts += rows[:, 1::2] * _column(of_bias)
            fall, along = parts.index_select(0, share.order).sum(0).unbind()
        common = torch.where(along > 0, fall / along, 0.0)
        return _within(common.expand(len(terms)), terms[:, 4])


def _column(values: Number) -> Number:
    many = isinstance(values, Tensor) and values.dim() == 1
    return values[:, None] if many else values  # type: ignore[index]


def _within(scale: Tensor, limit: Tensor) -> Tensor:
    """Return scales of at most ``limit``: the limit itself where squares of momenta overflow.

    Without a limit, an overflow gives a step of zero.
    """
    scale = torch.minimum(scale.nan_to_num(nan=math.inf, posinf=math.inf), limit)
    return scale.nan_to_num_(nan=0.0, posinf=0.0)


def _last_columns(share: Share, base: BaseNumbers) -> Tensor | None:
    """Return the bias's learning rate as a share of the weight's, ``[blocks]``; None if all are 1.

    A parameter moves by its own rate along the direction.
    """
    weights, biases = share.of_groups(base.rates)
    if all(map(operator.is_, weights, biases)):
        return None
    pairs = {(id(x), id(y)): [x, y] for x, y in zip(weights, biases, strict=True)}
    if all(map(are_alike, pairs.values())):
        return None
    of_weight, of_bias = share.each("rate", weights), share.each("rate of bias", biases)
    shares = torch.ones_like(share.roots) * of_bias / of_weight
    return torch.where(shares.isfinite(), shares, 1.0)


def _in_last(stacks: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    """Return copies whose last columns are multiplied by these numbers."""
    copies = [stack.clone() for stack in stacks]
    for stack, part in zip(copies, shares.split(list(map(len, copies))), strict=True):
        stack[..., -1] *= part[:, None]
    return copies


def norms_of(stacks: Sequence[Tensor], order: float) -> Tensor:
    """Return the norms of all blocks, ``[blocks]``."""
    blocks = itertools.chain.from_iterable(map(Tensor.unbind, stacks))
    return torch.stack(torch._foreach_norm([*blocks], order))


def _units(share: Share, shares: Tensor | None) -> Tensor:
    """Return the scales with which steps have a root mean square of 1; zero stays zero."""
    moved = share.directions if shares is None else _in_last(share.directions, shares)
    return share.roots / norms_of(moved, 2).clamp_(min=_TINY)


def _dots(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the blocks' inner products, ``[blocks]``."""
    return torch.cat([(x * y).sum((1, 2)) for x, y in zip(ones, others, strict=True)])


def _dots_of_last(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return _dots([x[..., -1:] for x in ones], [y[..., -1:] for y in others])


def _along(
    share: Share, momenta: list[Tensor], units: Tensor, shares: Tensor | None, norms: Tensor
) -> Tensor:
    """Return ⟨D, M⟩ over M's peaks, at least 0.01 ‖D‖ ‖M‖ and not 0.

    Directions are in ``units``, ``norms`` are of momenta; ``shares`` multiply the last column's
    part.
    """
    dots = _dots(share.directions, momenta)
    if shares is not None:
        dots += _dots_of_last(share.directions, momenta).mul_(shares - 1)
    least = (norms * _LEAST_COSINE).mul_(share.roots)
    return torch.maximum(dots.mul_(units), least).clamp_(min=_TINY)


def _limit(
    share: Share, base: BaseNumbers, *, taken: bool = False, of_momentum: bool = False
) -> Tensor:
    """Return the largest scale of each block: steps have limited root mean squares.

    ``taken`` says that the learning rate is in the scale already, ``of_momentum`` that the base
    steps along a momentum of any length. Vectors have no limit.
    """
    rate = share.each("rate", share.of_groups(base.rates)[0])
    assert share.squares is not None
    size = share.squares.sqrt().div_(share.roots)
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
    most = torch.maximum(most, share.free)
    return most if taken else most / rate
