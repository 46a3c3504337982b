"""Sums of the passes since the last step, and the running averages that they enter.

With bias correction, x̂ ← x̂ + ((1 - β) / w)(x - x̂) and w ← βw + 1 - β; x̂ begins as the first x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..capture.passes import ForwardPass
from ..layers import Layer, Moments
from ..linalg.moments import pack, packed_size, unpack
from ..linalg.products import full_precision, least
from ..plan.schedule import StepPlan
from .group import Side, by_place, device_of, per_block, sent, stack_key

Factors = Sequence[tuple[Layer, Side, Tensor]]  # with the values


@dataclass(eq=False)
class LayerSums:
    """One layer's sums since the last step, of its uses in one direction."""

    covers: tuple[bool, bool]
    count: list[float]  # of each section: rows, or passes under the papers' normalization
    a: Tensor | None = None  # Σ a aᵀ of the inputs, also where they meet the G of a weight
    g: Tensor | None = None
    unit: Any = None  # the gradients were divided by it; None where the rule has no units
    crossed: LayerSums | None = None  # sums of crossed uses: A enters G, and G enters A
    is_scaled: bool = False  # the sums are this rank's terms of the factors
    drawn: bool = False  # G has gradients of drawn labels
    trained: bool = False  # G has gradients that train


class FactorSums:
    """The sums of all layers; those that ``travel`` to factors' owners are packed triangles."""

    def __init__(
        self, *, kaisa_scaling: bool, loss_reduction: str, travel: bool, units: bool
    ) -> None:
        self.kaisa_scaling, self.loss_reduction = kaisa_scaling, loss_reduction
        self.travel, self.units = travel, units  # units: each sum of G has one
        self.loss_terms: str | float = "examples"
        self.loss_scale: Callable[[], Tensor | float] | None = None
        self.of_layer: dict[Layer, LayerSums] = {}
        # The passes that trained each layer, whether it gathers or not. K is one number for all.
        self.passes: dict[Layer, set[ForwardPass]] = {}

    def add(
        self, layer: Layer, covers: tuple[bool, bool], moments: Moments, *, drawn: bool
    ) -> None:
        primary = layer.primary
        sums = self.of_layer.get(primary)
        if sums is None or sums.covers != covers:
            sums = self.of_layer[primary] = LayerSums(covers, [0.0] * primary.sections)
        if moments.rows == 0 or moments.positions == 0:
            return  # an empty batch has no rows
        sums.drawn |= drawn
        sums.trained |= not drawn
        # A weight that is offloaded lies elsewhere than the gradients of its layer.
        device = (layer.bias if layer.weight is None else layer.weight).device  # type: ignore
        a, g, at = moments.a.to(device), moments.g.to(device), moments.blocks
        if self.loss_scale is not None and not drawn:
            scale = self.loss_scale()
            scale = scale.to(device) if isinstance(scale, Tensor) else scale
            g.div_(scale).div_(scale)
        counts: Sequence[float] = moments.rows_of_block or [moments.rows] * len(sums.count[at])
        if self.kaisa_scaling:
            # Each pass is a covariance of rows over the positions; passes are then averaged.
            share = moments.rows * (moments.positions**2 if layer.divided_by_positions else 1)
            a, g, counts = a.div_(share), g.div_(share), [1.0] * len(counts)
        if self.travel:
            a, g = [pack(x) if x.dim() == 3 else x for x in (a, g)]
        if layer.crossed:
            sums.crossed = sums.crossed or LayerSums(covers, [0.0] * primary.sections)
            sums = sums.crossed
        if self.units:
            unit = moments.unit  # or made on the device: the host would wait for a copy
            unit = g.new_ones((), dtype=torch.float32) if unit is None else unit.to(device)
            if sums.g is not None:
                # In the smaller unit, the squares of the larger gradients might be infinite.
                common = torch.maximum(sums.unit, unit)
                sums.g.mul_((sums.unit / common).square_())
                g.mul_((unit / common).square_())
                unit = common
            sums.unit = unit
        sums.a, sums.g = _added(sums.a, a, at, primary), _added(sums.g, g, at, primary)
        sums.count[at] = [x + new for x, new in zip(sums.count[at], counts, strict=True)]

    def drop(self, layer: Layer) -> None:
        self.of_layer.pop(layer, None)
        self.passes.pop(layer, None)

    def terms(self, passes: Iterable[ForwardPass] | None = None) -> float:
        """Return K: how many terms the loss of this rank averages, for all layers alike.

        ``passes`` count their examples or positions, by default those that trained some layer.
        """
        if self.loss_reduction == "sum":
            return 1.0
        if not isinstance(self.loss_terms, str):
            return self.loss_terms if self.passes else 0.0
        passes = set().union(*self.passes.values()) if passes is None else passes
        return float(sum([getattr(x, self.loss_terms) for x in passes]))

    def level(self, layers: Sequence[Layer], largest: Callable[[Tensor], Tensor]) -> None:
        """Scale sums of gradients to one unit a layer, the ``largest`` of its uses on all ranks."""
        for same in by_place(layers):
            uses, units = [], []
            # Ranks must reduce equally many numbers: layers without sums on a rank have a zero.
            zero = torch.zeros((), dtype=torch.float32, device=device_of(same[0]))
            for layer in same:
                plain = self.of_layer.get(layer)
                uses.append([] if plain is None else [x for x in (plain, plain.crossed) if x])
                of_uses = [x.unit for x in uses[-1] if x.g is not None]
                units.append(torch.stack(of_uses or [zero]).amax())
            for sums, unit in zip(uses, largest(torch.stack(units)), strict=True):
                for x in sums:
                    if x.g is not None:
                        x.g.mul_((x.unit / unit).square_())
                        x.unit = unit

    def mix(
        self, layers: Iterable[Layer], plan: StepPlan, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> None:
        """Take the plain and the crossed uses of each layer as one product."""
        # The mixture is not linear: if each rank mixed by traces of its own sums, the factors would
        # depend on the number of ranks.
        uses = ("a", False), ("g", False), ("g", True), ("a", True)
        for same in by_place(layers):
            terms, traces = [], []
            for layer in same:
                terms.append(self.take([(layer, *use) for use in uses], plan))
                of_layer = []
                for moment, (side, _) in zip(terms[-1], uses, strict=True):
                    n, diagonal = layer.size_of(side)
                    if not diagonal:
                        moment = moment if moment.dim() == 3 else unpack(moment, n)
                        moment = moment.diagonal(dim1=-2, dim2=-1)
                    of_layer.append(moment.sum(-1))
                traces.append(torch.stack(of_layer))
            totals = sum_over_ranks(torch.cat(traces, 1)).split([layer.blocks for layer in same], 1)
            for layer, sums, total in zip(same, terms, totals, strict=True):
                for x, share in zip(sums, _shares(total), strict=True):
                    x.mul_(share.view(-1, *(1,) * (x.dim() - 1)))
                if (plain := self.of_layer.get(layer)) is not None:
                    a1, g1, a2, g2 = sums
                    plain.a, plain.g, plain.crossed = a1.add_(g2), g1.add_(a2), None
                    plain.is_scaled = True

    def take(self, chosen: Iterable[tuple[Layer, str, bool]], plan: StepPlan) -> list[Tensor]:
        """Take sums, by layer, side and direction; return this rank's terms of the new factors."""
        total, shares = plan.total, list[Tensor]()
        parts, scales = list[Tensor](), list[float]()
        for layer, side, crossed in chosen:
            sums = self.of_layer.get(layer)
            sums = sums.crossed if crossed and sums is not None else sums
            name = "a" if (side == "a") != crossed else "g"
            share = None if sums is None else getattr(sums, name)
            if sums is None or share is None:
                n, diagonal, device, dtype = stack_key(layer, side)
                shape = (n,) if diagonal else (packed_size(n),) if self.travel else (n, n)
                shares.append(torch.zeros(layer.blocks, *shape, dtype=dtype, device=device))
                continue
            setattr(sums, name, None)  # the share is scaled in place
            if share.shape[0] < layer.blocks:
                share = share.expand(layer.blocks, *share.shape[1:]).clone()
            shares.append(share)
            if sums.is_scaled:
                continue
            at, count = plan.sections[layer.number], len(sums.count)
            parts += [share] if count == 1 else share.chunk(count)
            if self.kaisa_scaling:
                # Each rank's passes are averaged, then the ranks.
                givers = (total.crossed_givers if crossed else total.givers)[at]
                pairs = zip(sums.count, givers, strict=True)
                scales += [1 / (max(1, passes) * max(1, ranks)) for passes, ranks in pairs]
            elif name == "a":
                rows = (total.crossed if crossed else total.rows)[at]
                scales += [1 / max(1, number) for number in rows]
            else:
                scales += [plan.of_gradients] * count
        if parts:
            torch._foreach_mul_(parts, scales)
        return shares


def _added(total: Tensor | None, term: Tensor, at: slice, layer: Layer) -> Tensor:
    if total is None and at == slice(None):
        return term
    if total is None:
        total = term.new_zeros(layer.blocks, *term.shape[1:])
    elif total.shape[0] < layer.blocks and at != slice(None):
        # One matrix stood for all blocks, and would take the terms of these blocks for all.
        total = total.expand(layer.blocks, *total.shape[1:]).clone()
    total[at].add_(term)
    return total


def _shares(traces: Tensor) -> Tensor:
    """Return the shares of A₁, G₁, A₂ and G₂ in one product, ``[4, blocks]``, from their traces."""
    # The layer's sides take a₁ A₁ + g₂ G₂ and g₁ G₁ + a₂ A₂. Their product has the trace of A₁⊗G₁ +
    # G₂⊗A₂, the first that of A₁: a scale of the loss is in the second factor alone.
    a1, g1, a2, g2 = (torch.where(x == 0, 1, x) for x in traces)  # divisors; NaN stays
    first, second = traces[:2].sqrt().prod(0), traces[2:].sqrt().prod(0)
    empty = first + second == 0
    share = torch.where(empty, 1, first / (first + second))
    mean = (first * share + second * (1 - share)) / a1
    of_g1 = torch.where(empty, 1, mean * (first / g1))
    return torch.stack([share, of_g1, mean * (second / a2), (1 - share) * (a1 / g2)])


def update(
    factors: Factors, plan: StepPlan, decay_of: Mapping[Layer, float], *, scale_free: bool
) -> None:
    """Take new values of owned factors, of any shapes on one device, into their averages."""
    layers, sides, values = map(list, zip(*factors, strict=True))
    like, blocks = sides[0].key, [layer.blocks for layer in layers]
    owned = [(side.averages, side.owned[layer]) for layer, side, _ in factors]
    averages = [tensors["average"][at] for tensors, at in owned]
    weights = [tensors["weight"][at] for tensors, at in owned]
    rejected = [tensors["rejected"][at] for tensors, at in owned]
    with full_precision():
        # Each block's trace: no entry of a diagonal is below zero.
        diagonals = [x if x.dim() == 2 else x.diagonal(dim1=-2, dim2=-1) for x in values]
        each = [block for diagonal in diagonals for block in diagonal.unbind()]
        traces = torch.stack(torch._foreach_norm(each, 1))
        finite = traces < math.inf  # NaN is not
        if scale_free:
            # Divide values of G by their mean eigenvalues: the loss may have another scale in each
            # step. Turned layers have G in A.
            traces = torch.where(finite & (traces > least(traces.dtype)), traces, 1.0)
            divisors = _for_each(traces, values)
            of_g = [i for i, x in enumerate(layers) if (sides[i].name == "g") != x.turned]
            matrices = [values[i] for i in of_g]
            if matrices:
                torch._foreach_div_(matrices, [divisors[i] for i in of_g])
                torch._foreach_mul_(matrices, [float(sides[i].key.size) for i in of_g])
        # A sum that is not finite must not stay in an average for ever: the slot keeps its value.
        # On a CPU, the answer costs no wait and saves a pass over finite sums.
        if like.device.type != "cpu" or not finite.all():
            for value, broken in zip(values, _for_each(~finite, values), strict=True):
                value.masked_fill_(broken, 0)
        seen = [plan.seen[plan.sections[layer.number]] for layer in layers]
        taken, flags = finite, list[bool]()  # of each block: some rank has rows of its section
        for count, sections in zip(blocks, seen, strict=True):
            for flag in sections:
                flags += [flag] * (count // len(sections))
        if not all(flags):
            taken = finite & sent(torch.tensor(flags, device="cpu"), like.device)
        # β and 1 - β are each rounded once: an average's bits never depend on its neighbours.
        mass, decays = torch.cat(weights), [decay_of[layer] for layer in layers]
        decay: Any = decays[0]
        gain = mass.new_full((), 1 - decay)  # torch would multiply a number by its reciprocal
        if len(set(decays)) > 1:
            decay = per_block(layers, decays, like)
            gain = per_block(layers, [1 - x for x in decays], like)
        grown = (mass * decay).add_(gain)
        step = gain / grown
        # The first value is taken also under a decay of 1, which keeps it from then on.
        if 1 in decays:
            first = (mass == 0) & (decay == 1)
            grown, step = torch.where(first, 1, grown), torch.where(first, 1, step)
        torch._foreach_copy_(weights, list(torch.where(taken, grown, mass).split(blocks)))
        steps = _for_each(torch.where(taken, step, 0), values)
        if averages[0].dtype == values[0].dtype:
            torch._foreach_lerp_(averages, values, steps)
        else:
            for average, value, part in zip(averages, values, steps, strict=True):
                average.copy_(average.to(value.dtype).lerp_(value, part))
        torch._foreach_add_(rejected, list((~finite).int().split(blocks)))
        for average, weight, sections in zip(averages, weights, seen, strict=True):
            if not all(sections):
                _stand_in(average, weight)


def _for_each(numbers: Tensor, matrices: list[Tensor]) -> list[Tensor]:
    parts = zip(numbers.split([len(x) for x in matrices]), matrices, strict=True)
    return [part[:, None, None] if x.dim() == 3 else part[:, None] for part, x in parts]


def _stand_in(average: Tensor, weight: Tensor) -> None:
    """Give blocks without rows so far, such as experts', the mean of the others' averages."""
    # Damping alone would make their first steps far longer than the other blocks' steps.
    seen = weight > 0
    shares = seen.to(average.dtype) / seen.sum().clamp(min=1)
    mean = (average * _for_each(shares, [average])[0]).sum(0)
    average.copy_(torch.where(_for_each(seen, [average])[0], average, mean))
