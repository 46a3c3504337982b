"""Lengths of steps: along K-FAC's direction the loss falls as it falls by the base's own step.

To first order, a step -η D lowers the loss by η ⟨D, M⟩ if the momentum M stands for the gradient.
The base's own step lowers it by its *fall*. A length is the η at which both are equal, in each
block.

Numbers of all blocks of a step, whatever their shapes, make one tensor: few small operations.
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
        # Numbers of the optimizer's groups of the weights, and of the biases.
        self.numbers = [[number_of.get(p, -1) for p in part] for part in (first, last)]
        self._pairs = [*dict.fromkeys(zip(*self.numbers, strict=True))]
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
        self.measured: Any = None  # sums over each block, of what the base measures
        self.squares: Any = None  # of squares of the weights
        self.directions: list[Tensor] = []
        self.terms = self.roots.new_empty(len(self.roots), 0)  # of the clip
        # Layers of one block and of whole parameters, whose norms need no copy: a parameter's place
        # in the plan, and its block.
        plain: list[tuple[int, int]] = []
        whole = []
        for layer, place in zip(self.layers, places, strict=True):
            layouts = [(p.shape, strides(p)) for p in layer.parameters]
            like = [torch.empty_strided(*layout, device="meta") for layout in layouts]
            parts = [(x.shape[1:], x.stride()[1:]) for x in layer.parameter_parts(like)]
            is_whole = layer.blocks == 1 and parts == layouts
            block = int(place[0])
            plain += [(index[p], block) for p in layer.parameters if is_whole and p in index]
            whole += [is_whole] * layer.blocks
        blocks = torch.tensor([block for _, block in plain], dtype=torch.long, device="cpu")
        self._plain = [place for place, _ in plain], sent(blocks, self.like.device)
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
        plain, block_of = self._plain
        if squares and plain:
            norms = torch._foreach_norm([tensors[i] for i in plain], 2, dtype=self.like.dtype)
            total.index_add_(0, block_of, torch.stack(norms).square_())
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

    def rates(self, rates: list[Any]) -> tuple[Number, Tensor | None]:
        """Return the weights' learning rates, and the biases' as shares of these.

        The shares are ``[blocks]``, or None if all are 1. A parameter moves by its own rate along
        the direction.
        """
        if len(self._pairs) == 1 and self._pairs[0][0] == self._pairs[0][1]:
            return rates[self._pairs[0][0]], None
        of_weights, of_biases = ([rates[i] for i in part] for part in self.numbers)
        rate = self.each("rate", of_weights)
        if all([are_alike([rates[i], rates[j]]) for i, j in self._pairs]):
            return rate, None
        shares = torch.ones_like(self.roots) * self.each("rate of bias", of_biases) / rate
        return rate, torch.where(shares.isfinite(), shares, 1.0)

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
    return len(set(map(id, values))) == 1 or (
        not any(map(torch.is_tensor, values)) and len(set(values)) == 1
    )


class Length(ABC):
    """One way to give directions a length."""

    measures = ""  # what is summed of all that the base measures: "squares", "sums" or nothing
    specs: tuple[TensorSpec, ...] = ()  # what gradient workers keep for each block

    @abstractmethod
    def give(
        self, share: Share, momenta: list[Tensor], divisors: Tensor, base: BaseNumbers
    ) -> None:
        """Give directions their length, in place.

        ``momenta`` are divided by ``divisors``: their absolute values add up to the root of their
        number. A divisor of zeros is 1.
        """


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

    def give(
        self, share: Share, momenta: list[Tensor], divisors: Tensor, base: BaseNumbers
    ) -> None:
        # A layer's first parameter, its weight, has the settings of the layer.
        settings = [base.settings[i] for i in share.weights]
        adam: AdamSettings = settings[0]
        if len(set(map(id, settings))) > 1:
            each = enumerate(zip(*settings, strict=True))
            adam = AdamSettings(*[share.each(str(i), list(values)) for i, values in each])
        stacks = [group.tensors["square_sum"] for group in share.groups]
        older = torch.cat(stacks)
        moved = (older * adam.keep2).add_(share.measured * adam.take2)
        # A layer that starts anew has counted steps before: its first square stands for these, or
        # its steps would be 12 times as long after 200 steps.
        moved = torch.where(older > 0, moved, share.measured * adam.all2)
        present = None if base.present is None else share.present(base.present)
        if present is not None:  # the other blocks' moments stay as they are
            moved = torch.where(present, moved, older)
        torch._foreach_copy_(stacks, list(moved.split(share.sizes)))
        rate, shares = share.rates(base.rates)
        units, norms, along = _along(share, momenta, rate, shares)
        deviation = (moved / adam.rest2).sqrt_().add_(share.roots * adam.eps)
        sums = share.roots
        if shares is not None:
            sums = norms_of(_in_last(momenta, shares.sqrt()), 1).to(norms.dtype)
        fall = (norms * sums).mul_(divisors) / adam.rest1
        fall /= deviation
        scales = _limited(fall / along, share, rate, taken=False) * units
        torch._foreach_mul_(share.directions, list(scales[:, None, None].split(share.sizes)))


class FallLength(Length):
    """The fall of a base that has stepped: ⟨M, -U⟩ for its step U, which its rate is part of."""

    measures = "sums"

    def give(
        self, share: Share, momenta: list[Tensor], divisors: Tensor, base: BaseNumbers
    ) -> None:
        rate, shares = share.rates(base.rates)
        if shares is not None:  # the base moves the parameters by directions as they are
            share.directions = _in_last(share.directions, shares)
            _leave_to_biases(share, momenta, rate)
        units, _, along = _along(share, momenta, rate, None)
        scales = share.measured.clamp(min=0) / along.mul_(divisors)
        scales = _limited(scales, share, rate, taken=True) * units
        torch._foreach_mul_(share.directions, list(scales[:, None, None].split(share.sizes)))


class SGDLength(Length):
    """SGD's fall lr ‖M‖², where a bias may have a rate of its own; weights limit its steps."""

    def give(
        self, share: Share, momenta: list[Tensor], divisors: Tensor, base: BaseNumbers
    ) -> None:
        rate, shares = share.rates(base.rates)
        units, norms, along = _along(share, momenta, rate, shares)
        # SGD steps along a momentum of any length.
        size = share.squares.sqrt().div_(share.roots)
        free = (size * _FREE_OF_WEIGHTS_BY_SGD).clamp_(_FREE_OF_ZEROS_BY_SGD, _FREE)
        limit = torch.maximum(size * _OF_WEIGHTS_BY_SGD, free).maximum(share.free) / rate
        scales = norms.square_().div_(along).mul_(divisors)
        scales.nan_to_num_(nan=math.inf, posinf=math.inf)
        scales = torch.minimum(scales, limit).nan_to_num_(nan=0.0, posinf=0.0).mul_(units)
        torch._foreach_mul_(share.directions, list(scales[:, None, None].split(share.sizes)))


def _leave_to_biases(share: Share, momenta: list[Tensor], rate: Number) -> None:
    """Take weights at rate 0, which rest, out of the directions and the momenta."""
    moves = torch.ones_like(share.roots) * rate != 0
    for stacks in (share.directions, momenta):
        for stack, part in zip(stacks, moves.split(share.sizes), strict=True):
            stack[..., :-1] *= part[:, None, None]


def _in_last(stacks: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    """Return copies whose last columns are multiplied by these numbers."""
    copies = [stack.clone() for stack in stacks]
    for stack, part in zip(copies, shares.split(list(map(len, copies))), strict=True):
        stack[..., -1] *= part[:, None]
    return copies


def norms_of(stacks: Sequence[Tensor], order: float) -> Tensor:
    """Return the norms of all blocks, ``[blocks]``."""
    blocks = itertools.chain.from_iterable(map(Tensor.unbind, stacks))
    # CPUs add up one by one: in float32, a sum of 2²⁶ numbers came to half of it.
    wide = torch.float64 if order == 1 and stacks[0].is_cpu else None
    return torch.stack(torch._foreach_norm([*blocks], order, dtype=wide))


def _along(
    share: Share, momenta: list[Tensor], rate: Number, shares: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales to units, norms of momenta, and ⟨D, M⟩ over M's divisors, each ``[blocks]``.

    Directions in units have a root mean square of 1; zero stays zero. ⟨D, M⟩ is at least
    0.01 ‖D‖ ‖M‖ and not 0. ``shares`` multiply the last column's part of ⟨D, M⟩ and of ‖M‖².
    """
    if shares is not None:
        _leave_to_biases(share, momenta, rate)
    norms = norms_of(momenta if shares is None else _in_last(momenta, shares.sqrt()), 2)
    moved = share.directions if shares is None else _in_last(share.directions, shares)
    units = share.roots / norms_of(moved, 2).clamp_(min=_TINY)
    dots = torch.cat([(x * y).sum((1, 2)) for x, y in zip(moved, momenta, strict=True)])
    least = (norms * _LEAST_COSINE).mul_(share.roots)
    return units, norms, torch.maximum(dots.mul_(units), least).clamp_(min=_TINY)


def _limited(scales: Tensor, share: Share, rate: Number, *, taken: bool) -> Tensor:
    """Return scales at which steps have limited root mean squares; vectors have no limit.

    A scale is the limit where squares of momenta overflow. Without a limit, an overflow gives a
    step of zero. ``taken``: the learning rate is in the scales already.
    """
    size = share.squares.sqrt().div_(share.roots)
    by_rate, most = rate * _OF_RATE, size * _OF_WEIGHTS
    if isinstance(by_rate, Tensor):
        most = torch.minimum(most, by_rate)
    else:
        most.clamp_(max=by_rate)
    most = torch.maximum(most, size * _FREE_OF_WEIGHTS).clamp_(min=_FREE)
    most = torch.maximum(most, share.free)
    scales = scales.nan_to_num(nan=math.inf, posinf=math.inf)
    scales = torch.minimum(scales, most if taken else most / rate)
    return scales.nan_to_num_(nan=0.0, posinf=0.0)
