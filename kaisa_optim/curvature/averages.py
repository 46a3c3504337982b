"""Sums of the passes since the last step, and the running averages that they enter.

Averages have bias correction: x̂ ← x̂ + ((1 - β) / w)(x - x̂), w ← βw + 1 - β; the first value is
taken as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..capture.passes import ForwardPass
from ..layers import Layer, Moments
from ..linalg.moments import pack, packed_size, unpack
from ..linalg.products import full_precision, least
from ..plan.schedule import StepPlan
from .group import Side, by_place, device_of, per_block, sent, stack_key


class LayerSums:
    """One layer's sums since the last step."""

    def __init__(
        self, covers: tuple[bool, bool], layer: Layer, *, is_crossed: bool = False
    ) -> None:
        self.covers, self.is_crossed = covers, is_crossed
        self.blocks = layer.blocks
        self.a: Tensor | None = None
        self.g: Tensor | None = None
        self.unit: Tensor | None = None  # the gradients were divided by it; None: by 1
        self.crossed: LayerSums | None = None  # sums of crossed uses, with A and G exchanged
        # Counts of each section: of rows, or of passes under the papers' normalization.
        self.count = [0.0] * layer.sections
        self.is_scaled = False  # the sums are this rank's terms of the factors
        self.drawn = False  # G has gradients of drawn labels
        self.trained = False  # G has gradients that train

    def add(self, moments: Moments, count: float | Sequence[float]) -> None:
        whole = moments.blocks == slice(None)
        if self.gradients is None or (self.unit is None and moments.unit is None):
            self.unit = moments.unit
        else:
            own, new = self.own_unit(), moments.unit
            new = _unit(1, own.device) if new is None else new
            self.unit = torch.maximum(own, new)
            self.gradients.mul_((own / self.unit).square_())
            (moments.a if self.is_crossed else moments.g).mul_((new / self.unit).square_())
        self.a = _add(self.a, moments.a, self.blocks, moments.blocks, whole)
        self.g = _add(self.g, moments.g, self.blocks, moments.blocks, whole)
        sections = range(len(self.count))[moments.blocks]
        counts = [count] * len(sections) if isinstance(count, int | float) else count
        for section, more in zip(sections, counts, strict=True):
            self.count[section] += more

    @property
    def gradients(self) -> Tensor | None:
        """The sum of output gradients, wherever the weight stores their side."""
        return self.a if self.is_crossed else self.g

    def own_unit(self) -> Tensor:
        assert self.gradients is not None
        return _unit(1, self.gradients.device) if self.unit is None else self.unit


def _unit(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _add(total: Tensor | None, term: Tensor, blocks: int, at: slice, whole: bool) -> Tensor:
    if whole and total is None:
        return term
    if total is None:
        total = term.new_zeros(blocks, *term.shape[1:])
    elif total.shape[0] < blocks and not whole:
        total = total.expand(blocks, *total.shape[1:]).clone()
    total[at].add_(term)
    return total


class FactorSums:
    """The sums of all layers; those that ``travel`` to factors' owners are packed triangles."""

    def __init__(
        self, *, kaisa_scaling: bool, loss_reduction: str, travel: bool, units: bool
    ) -> None:
        self.kaisa_scaling = kaisa_scaling
        self.loss_reduction = loss_reduction
        self.travel = travel
        self.units = units  # each sum of G has a unit, which no step needs to know
        self.loss_terms: str | float = "examples"
        self.loss_scale: Callable[[], Tensor | float] | None = None
        self.of_layer: dict[Layer, LayerSums] = {}
        # The passes that trained each layer, whether it gathers or not. K is one number for all.
        self.passes: dict[Layer, set[ForwardPass]] = {}

    # ---- within a step ----

    def add(
        self, layer: Layer, covers: tuple[bool, bool], moments: Moments, *, drawn: bool
    ) -> None:
        """Add one pass through a layer."""
        primary = layer.primary
        sums = self.of_layer.get(primary)
        if sums is None or sums.covers != covers:
            sums = self.of_layer[primary] = LayerSums(covers, primary)
        if moments.rows == 0 or moments.positions == 0:
            return  # an empty batch has no rows
        sums.drawn |= drawn
        sums.trained |= not drawn
        device = (layer.bias if layer.weight is None else layer.weight).device  # type: ignore
        if moments.g.device != device:  # a weight that is offloaded lies elsewhere
            unit = None if moments.unit is None else moments.unit.to(device)
            moments = moments._replace(a=moments.a.to(device), g=moments.g.to(device), unit=unit)
        if self.loss_scale is not None and not drawn:
            scale = self.loss_scale()
            if isinstance(scale, Tensor):
                scale = scale.to(moments.g.device)
            moments.g.div_(scale).div_(scale)
        count: float | Sequence[float] = moments.rows_of_block or moments.rows
        if self.kaisa_scaling:
            # Each pass is a covariance of rows over the positions; passes are then averaged.
            share = moments.rows * (moments.positions**2 if layer.divided_by_positions else 1)
            moments.a.div_(share)
            moments.g.div_(share)
            count = 1.0
        if self.travel:
            a, g = [pack(x) if x.dim() == 3 else x for x in (moments.a, moments.g)]
            moments = moments._replace(a=a, g=g)
        if layer.crossed:
            sums.crossed = sums.crossed or LayerSums(covers, primary, is_crossed=True)
            sums, moments = sums.crossed, moments._replace(a=moments.g, g=moments.a)
        sums.add(moments, count)

    def drop(self, layer: Layer) -> None:
        self.of_layer.pop(layer, None)
        self.passes.pop(layer, None)

    def clear(self) -> None:
        self.of_layer.clear()
        self.passes.clear()

    def bytes(self) -> int:
        uses = [x for sums in self.of_layer.values() for x in (sums, sums.crossed) if x]
        return sum([t.nbytes for x in uses for t in (x.a, x.g) if t is not None])

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

    # ---- at a step ----

    def level(self, layers: Sequence[Layer], largest: Callable[[Tensor], Tensor]) -> None:
        """Scale the sums of gradients to units that a layer's uses and all ranks have in common.

        ``largest`` returns the largest numbers over the ranks, on their device.
        """
        for same in by_place(layers):
            device = device_of(same[0])
            plain = [self.of_layer.get(layer) for layer in same]
            pairs = [(x, None if x is None else x.crossed) for x in plain]
            each = [[x for x in both if x and x.gradients is not None] for both in pairs]
            units = [[x.own_unit() for x in uses] or [_unit(0, device)] for uses in each]
            common = largest(torch.stack([torch.stack(x).amax() for x in units]))
            for uses, unit in zip(each, common, strict=True):
                for x in uses:
                    assert x.gradients is not None
                    x.gradients.mul_((x.own_unit() / unit).square_())
                    x.unit = unit

    def mix(
        self, layers: Iterable[Layer], plan: StepPlan, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> None:
        """Take the plain and the crossed uses of each layer as one product.

        The mixture is not linear: if each rank mixed by traces of its own, the factors would
        depend on the number of ranks.
        """
        for same in by_place(layers):
            uses = ("a", False), ("g", False), ("g", True), ("a", True)
            terms, traces = [], []
            for layer in same:
                terms.append(self.take([(layer, *use) for use in uses], plan))
                each = zip(terms[-1], "agga", strict=True)
                traces.append(torch.stack([_traces(x, layer, side) for x, side in each]))
            totals = sum_over_ranks(torch.cat(traces, 1)).split([layer.blocks for layer in same], 1)
            for layer, four, total in zip(same, terms, totals, strict=True):
                for x, share in zip(four, _shares(total), strict=True):
                    x.mul_(share.view(-1, *(1,) * (x.dim() - 1)))
                if (sums := self.of_layer.get(layer)) is not None:
                    a1, g1, a2, g2 = four
                    sums.a, sums.g, sums.crossed = a1.add_(g2), g1.add_(a2), None
                    sums.is_scaled = True

    def take(self, chosen: Iterable[tuple[Layer, str, bool]], plan: StepPlan) -> list[Tensor]:
        """Return this rank's shares of new factors, whose sums over the ranks are the factors.

        ``chosen`` are layers and sides, of plain or crossed uses. A share is the sum itself, scaled
        in place, or zeros without one; the sum ends here.
        """
        total, shares = plan.total, []
        parts: list[Tensor] = []
        scales: list[float] = []
        for layer, side, crossed in chosen:
            sums = self.of_layer.get(layer)
            if sums is not None and crossed:
                sums = sums.crossed
            share = None if sums is None else sums.a if side == "a" else sums.g
            if sums is None or share is None:
                key = stack_key(layer, side)
                shape = key.shape(layer.blocks)
                if self.travel and not key.diagonal:
                    shape = (layer.blocks, packed_size(key.size))
                shares.append(torch.zeros(shape, dtype=key.dtype, device=key.device))
                continue
            setattr(sums, side, None)
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
            elif (side == "a") != crossed:  # of inputs
                rows = (total.crossed if crossed else total.rows)[at]
                scales += [1 / max(1, number) for number in rows]
            else:
                scales += [plan.of_gradients] * count
        if parts:
            torch._foreach_mul_(parts, scales)
        return shares


def _shares(traces: Tensor) -> Tensor:
    """Return the shares of A₁, G₁, A₂ and G₂ in one product, ``[4, blocks]``, from their traces.

    The layer's sides take a₁ A₁ + g₂ G₂ and g₁ G₁ + a₂ A₂. Their product has the trace of
    A₁⊗G₁ + G₂⊗A₂. Its first factor has the trace of A₁, so that a scale of the loss is in the
    second factor alone.
    """
    a1, g1, a2, g2 = (torch.where(x == 0, 1, x) for x in traces)  # divisors; NaN stays
    first, second = traces[:2].sqrt().prod(0), traces[2:].sqrt().prod(0)
    empty = first + second == 0
    share = torch.where(empty, 1, first / (first + second))
    mean = (first * share + second * (1 - share)) / a1
    of_g1 = torch.where(empty, 1, mean * (first / g1))
    return torch.stack([share, of_g1, mean * (second / a2), (1 - share) * (a1 / g2)])


def _traces(moment: Tensor, layer: Layer, side: str) -> Tensor:
    """Return the trace of each block's moment: a diagonal, a matrix, or a packed one."""
    n, diagonal = layer.size_of(side)
    if not diagonal:
        whole = moment if moment.dim() == 3 else unpack(moment, n)
        moment = whole.diagonal(dim1=-2, dim2=-1)
    return moment.sum(-1)


# ---- averages ----


def update(
    factors: Sequence[tuple[Layer, Side, Tensor]],
    plan: StepPlan,
    decay_of: Callable[[Layer], float],
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
    with full_precision():
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
