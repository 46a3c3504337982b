"""From moments to running averages: counts, K, normalization, bias correction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ..capture.hooks import ForwardPass
from ..comm.ranks import Ranks, ReduceItem
from ..layers import Layer, Moments
from ..linalg.moments import lower_parts, pack, packed_size, unpack
from ..linalg.precision import full_precision
from .stacks import (
    Factor,
    Shelf,
    Specs,
    Stack,
    StackKey,
    common_or_each,
    device_of,
    sent,
    slots_of,
    stack_key,
)

Key = tuple[Layer, str]  # a layer's factor: side "a" or "g"
Number = Tensor | float  # a tensor has one for each block


class Gathered:
    """One layer's sums since the last step."""

    def __init__(self, covers: tuple[bool, bool], layer: Layer) -> None:
        self.covers = covers
        self.blocks = layer.blocks
        self.a: Tensor | None = None
        self.g: Tensor | None = None
        self.projected: Tensor | None = None
        # Of rows, for each section; of passes under the papers' normalization.
        self.count = [0.0] * layer.sections
        self.runs: set[ForwardPass] = set()
        self.drawn = False  # whether drawn gradients are in G
        self.own = False  # whether gradients that train are in G, and not drawn ones alone

    def add(self, moments: Moments, count: float) -> None:
        whole = moments.blocks == slice(None)
        self.a = _add(self.a, moments.a, self.blocks, moments.blocks, whole)
        self.g = _add(self.g, moments.g, self.blocks, moments.blocks, whole)
        if moments.projected is not None:
            self.projected = _add(
                self.projected, moments.projected, self.blocks, moments.blocks, whole
            )
        for section in range(len(self.count))[moments.blocks]:
            self.count[section] += count

    def bytes(self) -> int:
        sums = (self.a, self.g, self.projected)
        return sum(t.numel() * t.element_size() for t in sums if t is not None)


def _add(total: Tensor | None, term: Tensor, blocks: int, at: slice, whole: bool) -> Tensor:
    if whole and total is None:
        return term
    if total is None:
        total = term.new_zeros(blocks, *term.shape[1:])
    elif total.shape[0] < blocks and not whole:
        total = total.expand(blocks, *total.shape[1:]).clone()
    total[at].add_(term)
    return total


@dataclass
class Tally:
    """What all ranks together have gathered since the last step, layer by layer."""

    own_terms: float  # K of this rank
    terms: float  # Σ K over the ranks
    counts: dict[Layer, list[float]]  # of rows, of each section; only layers that have any
    givers: dict[Layer, list[float]]  # how many ranks have any
    drawn: bool = False  # G is of drawn gradients, each the root of one term's Hessian


class Statistics:
    """Sums of the passes since the last step, and the running averages that they feed."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        kaisa_scaling: bool,
        loss_reduction: str,
        factor_dtype: torch.dtype | None,
    ) -> None:
        self.ranks = ranks
        self.kaisa_scaling = kaisa_scaling
        self.loss_reduction = loss_reduction
        self.factor_dtype = factor_dtype
        self.loss_terms: str | float = "examples"
        self.loss_scale: Callable[[], Tensor | float] | None = None
        self.gathered: dict[Layer, Gathered] = {}

    # ---- within a step ----

    def add(
        self,
        layer: Layer,
        run: ForwardPass,
        covers: tuple[bool, bool],
        moments: Moments | None,
        drawn: bool = False,
    ) -> None:
        """One pass through a layer; without moments where others have their turn."""
        gathered = self.gathered.get(layer)
        if gathered is None or gathered.covers != covers:
            anew = Gathered(covers, layer)
            if gathered is not None:
                anew.runs = gathered.runs
            gathered = self.gathered[layer] = anew
        gathered.runs.add(run)
        if moments is None:
            return
        if moments.rows == 0 or moments.positions == 0:
            return  # an empty batch says nothing
        gathered.drawn |= drawn
        gathered.own |= not drawn
        moments = _at_home(layer, moments)
        if self.loss_scale is not None and not drawn:
            scale = self.loss_scale()
            if isinstance(scale, Tensor):
                scale = scale.to(moments.g.device)
            for sums in (moments.g, moments.projected):
                if sums is not None:
                    sums.div_(scale).div_(scale)
        count: float = moments.rows
        if self.kaisa_scaling:
            # Each pass is a covariance of rows over the positions; passes are then averaged.
            share = moments.rows * (moments.positions**2 if layer.divided_by_positions else 1)
            moments.a.div_(share)
            moments.g.div_(share)
            count = 1.0
        if self.ranks.world > 1:  # what waits for its reduction waits as it will travel
            moments = moments._replace(a=_packed(moments.a), g=_packed(moments.g))
        gathered.add(moments, count)

    def drop(self, layer: Layer) -> None:
        self.gathered.pop(layer, None)

    def clear(self) -> None:
        self.gathered.clear()

    def pending_bytes(self) -> int:
        return sum(gathered.bytes() for gathered in self.gathered.values())

    def counts(self, layers: Sequence[Layer]) -> list[float]:
        """How many rows this rank has of each, section after section."""
        counts: list[float] = []
        for layer in layers:
            gathered = self.gathered.get(layer)
            counts += [0.0] * layer.sections if gathered is None else gathered.count
        return counts

    def terms(self) -> float:
        """K: how many terms this rank's loss averages in this step, for all layers alike."""
        if self.loss_reduction == "sum":
            return 1.0
        if not isinstance(self.loss_terms, str):
            return self.loss_terms if self.gathered else 0.0
        return self.terms_of(set().union(*(x.runs for x in self.gathered.values())))

    def terms_of(self, runs: Iterable[ForwardPass]) -> float:
        """How many examples or positions these forward passes had."""
        assert isinstance(self.loss_terms, str)
        return float(sum(getattr(run, self.loss_terms) for run in runs))

    # ---- at a step ----

    def specs(self, key: StackKey, count: int) -> Specs:
        """What is kept of ``count`` factors of one shape; of averages, their lower parts.

        What else is in a wide one is of no account until whoever reads it has it mirrored.
        """
        return {
            "average": (key.shape(count), self.factor_dtype or key.dtype),
            "weight": ((count,), key.dtype),
            "rejected": ((count,), torch.int32),
        }

    def allocate(self, shelf: Shelf) -> None:
        for stack in shelf.stacks.values():
            stack.new(self.specs(stack.key, stack.count))
            if self.kaisa_scaling:
                # No bias correction there: averages start at the identity, at full weight.
                stack.tensors["weight"].fill_(1.0)
                average = stack.tensors["average"]
                diagonal = average if stack.key.diagonal else average.diagonal(dim1=-2, dim2=-1)
                diagonal.fill_(1.0)

    def update(
        self,
        shelf: Shelf,
        tally: Tally,
        owner_of: Callable[[Layer, str], int],
        decay_of: Callable[[Layer], float],
    ) -> None:
        """Take the gathered sums into the running averages of the ranks that keep them."""
        for sums in self._delivered(tally, owner_of):
            with full_precision():
                for stack in shelf.stacks.values():
                    factors = [f for f in stack.factors if (f.layer, f.side) in sums]
                    if factors:
                        self._update_stack(stack, factors, sums, tally, decay_of)
        self.clear()

    def _delivered(
        self, tally: Tally, owner_of: Callable[[Layer, str], int]
    ) -> Iterator[dict[Key, Tensor]]:
        """The new values of factors, as they arrive where they are kept."""
        keys = [(layer, side) for layer in tally.counts for side in "ag"]
        if self.ranks.world == 1:
            yield dict(zip(keys, self._contributions(keys, tally), strict=True))
            return
        parcels = []
        for layer, side in keys:
            key = stack_key(layer, side)
            size = layer.blocks * _width(key)
            parcels.append(
                ReduceItem((layer, side), owner_of(layer, side), size, key.device, key.dtype)
            )

        def flat(bucket: list[ReduceItem]) -> list[Tensor]:
            return [v.flatten() for v in self._contributions([p.key for p in bucket], tally)]

        for arrived in self.ranks.reduce_to_owners(parcels, flat, "factors"):
            sums = {}
            for (layer, side), total in arrived.items():
                key = stack_key(layer, side)
                total = total.unflatten(0, (layer.blocks, -1))
                sums[layer, side] = total if key.diagonal else unpack(total, key.size)
            yield sums

    def _contributions(self, keys: list[Key], tally: Tally) -> list[Tensor]:
        """This rank's share of new factors: their sum over the ranks is the value."""
        values: list[Tensor] = []
        parts: list[Tensor] = []
        scales: list[float] = []
        for layer, side in keys:
            gathered, key = self.gathered.get(layer), stack_key(layer, side)
            total = None if gathered is None else gathered.a if side == "a" else gathered.g
            shape = key.shape(layer.blocks)
            if self.ranks.world > 1:
                shape = (layer.blocks, _width(key))
            if gathered is None or total is None:
                values.append(torch.zeros(shape, dtype=key.dtype, device=key.device))
                continue
            # Here the sum ends; what remains of it is a share of the new factor.
            setattr(gathered, side, None)
            if total.shape[0] < layer.blocks:
                total = total.expand(shape).clone()
            values.append(total)
            parts += [total] if layer.sections == 1 else total.chunk(layer.sections)
            scales += self._scales(layer, side, gathered, tally)
        if parts:
            torch._foreach_mul_(parts, scales)
        return values

    def projected(self, layers: Sequence[Layer], tally: Tally) -> list[Tensor]:
        """This rank's share of what K Σ (Q_Gᵀ ∇ Q_A)² of these layers comes to."""
        terms, parts, scales = [], [], []
        for layer in layers:
            gathered, key = self.gathered.get(layer), stack_key(layer, "g")
            if gathered is None or gathered.projected is None:
                shape = (layer.blocks, layer.g_dim, layer.a_dim)
                terms.append(torch.zeros(shape, dtype=key.dtype, device=key.device))
                continue
            terms.append(gathered.projected)
            gathered.projected = None
            parts.append(terms[-1])
            scales.append(self._scales(layer, "g", gathered, tally)[0])
        if parts:
            torch._foreach_mul_(parts, scales)
        return terms

    def _scales(self, layer: Layer, side: str, gathered: Gathered, tally: Tally) -> list[float]:
        """What to multiply each section of a sum with, on the host."""
        if self.kaisa_scaling:
            # Each rank's passes are averaged, then the ranks.
            both = zip(gathered.count, tally.givers[layer], strict=True)
            return [1 / (max(1, count) * max(1, givers)) for count, givers in both]
        if side == "a":
            return [1 / max(1, count) for count in tally.counts[layer]]
        # Drawn gradients are those of the terms' sum, and not of their mean.
        own = 1.0 if tally.drawn else tally.own_terms**2
        return [own / tally.terms if tally.terms else 0.0] * layer.sections

    def _update_stack(
        self,
        stack: Stack,
        factors: list[Factor],
        sums: dict[Key, Tensor],
        tally: Tally,
        decay_of: Callable[[Layer], float],
    ) -> None:
        values = [sums[f.layer, f.side] for f in factors]
        layers = [factor.layer for factor in factors]
        blocks = [layer.blocks for layer in layers]
        decay = keep_and_take(layers, decay_of, stack.key)
        matrix = (slice(None), *(None,) * (values[0].dim() - 1))
        # A sum that is not finite must not stay in an average for ever: the slot keeps its value.
        diagonals = [v if stack.key.diagonal else v.diagonal(dim1=-2, dim2=-1) for v in values]
        finite = torch.cat(diagonals).sum(-1).isfinite()
        # Where the host need not wait for the answer, it saves the pass over what is well.
        if stack.key.device.type != "cpu" or not finite.all():
            for value, broken in zip(values, (~finite)[matrix].split(blocks), strict=True):
                value.masked_fill_(broken, 0)
        slots = slots_of(factors)
        weight, rejected = stack.tensors["weight"], stack.tensors["rejected"]
        grown, step = weighed(weight[slots], decay, finite & given(layers, tally, stack.key))
        steps = list(step[matrix].split(blocks))
        if isinstance(slots, slice):
            averages = list(stack.tensors["average"][slots].split(blocks))
        else:
            averages = [factor["average"] for factor in factors]
        averages, values, steps = _lower(averages, values, steps)
        if averages[0].dtype == stack.key.dtype:
            torch._foreach_lerp_(averages, values, steps)
        else:
            for average, value, part in zip(averages, values, steps, strict=True):
                average.copy_(average.to(stack.key.dtype).lerp_(value, part))
        weight[slots] = grown
        rejected[slots] += (~finite).int()


def _lower(
    averages: list[Tensor], values: list[Tensor], steps: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Parts that hold all that counts, and each one's step."""
    parts = [lower_parts(average) for average in averages]
    own = [lower_parts(value) for value in values]
    steps = [step for step, some in zip(steps, parts, strict=True) for _ in some]
    return list(chain.from_iterable(parts)), list(chain.from_iterable(own)), steps


def given(layers: Sequence[Layer], tally: Tally, like: StackKey) -> Tensor:
    """Which of these layers' blocks any rank has rows of."""
    flags: list[bool] = []
    for layer in layers:
        per_section = layer.blocks // layer.sections
        for count in tally.counts[layer]:
            flags += [count > 0] * per_section
    return _on_device(flags, torch.bool, like.device)


def keep_and_take(
    layers: Sequence[Layer], decay_of: Callable[[Layer], float], like: StackKey
) -> tuple[Number, Number]:
    """β and 1 - β, each rounded once: an average's bits must not depend on its company."""
    return (
        common_or_each(layers, decay_of, like),
        common_or_each(layers, lambda layer: 1 - decay_of(layer), like),
    )


def weighed(mass: Tensor, decays: tuple[Number, Number], taken: Tensor) -> tuple[Tensor, Tensor]:
    """What running averages weigh after a new value, and the step that they take towards it.

    ``decays`` are those of :func:`keep_and_take`. Those that are not ``taken`` stay. The first
    value is taken as it is, also by a decay of 1, which then keeps it.
    """
    decay, rest = decays
    if not isinstance(rest, Tensor):  # a number would be multiplied with a reciprocal
        rest = mass.new_full((), rest)
    grown = (mass * decay).add_(rest)
    step = rest / grown
    if isinstance(decay, Tensor) or decay == 1:
        first = (mass == 0) & (decay == 1)
        grown, step = torch.where(first, 1, grown), torch.where(first, 1, step)
    return torch.where(taken, grown, mass), torch.where(taken, step, 0)


def _at_home(layer: Layer, moments: Moments) -> Moments:
    """On the layer's device: DataParallel's replicas gather on others, and may be first."""
    device = device_of(layer)
    if moments.g.device == device:
        return moments
    projected = None if moments.projected is None else moments.projected.to(device)
    return moments._replace(a=moments.a.to(device), g=moments.g.to(device), projected=projected)


def _packed(moment: Tensor) -> Tensor:
    return pack(moment) if moment.dim() == 3 else moment


def _width(key: StackKey) -> int:
    """Numbers of one block on the wire."""
    return key.size if key.diagonal else packed_size(key.size)


def _on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    if len(set(values)) == 1:  # then nothing has to be copied to the device
        return torch.full((len(values),), values[0], dtype=dtype, device=device)
    return sent(torch.tensor(values, dtype=dtype, device="cpu"), device)
