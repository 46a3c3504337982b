"""Preconditioning by the leading eigenvectors alone.

Where an eigenvalue s of G ⊗ A is far below the damping γ, 1 / (s + γ) is 1 / γ, whatever the
eigenvectors. If some pairs of eigenvectors are taken to lead, and σ is the largest s of the others,

    Q_G (V / (s + γ)) Q_Aᵀ ≈ ∇ / (γ + σ) + Q_G (V ∘ (1 / (s + γ) - 1 / (γ + σ)) ∘ L) Q_Aᵀ,

with V = Q_Gᵀ ∇ Q_A; L is 1 where a pair leads, else 0. The sum is exact for leading pairs. It damps
the other pairs by at most σ too much, never too little. s is the product of an eigenvalue of G and
one of A, and most large s have one of the largest eigenvalues of G or of A as a factor. So L is two
blocks: the first eigenvectors of G with all leading ones of A, and the other leading ones of G with
the first ones of A. One block takes their place if it is less work. Among all block sizes with σ at
most τγ, the rule takes the sizes with the least work. The sizes are counted on the device, at
refreshes and after the damping has fallen. They hold from the next step on: by then the host knows
them without waiting. All workers of a layer have the same eigenvalues and damping, so they count
alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...layers import Layer
from ...linalg import kronecker, precision, products
from ...linalg.products import Count
from ..notes import Notes
from ..stacks import AppliedFactors, LayerGroup, Slots, Specs, joined
from .base import DampingOf, StepValues
from .eigen import EigenRule

Basis = tuple[Tensor | None, Tensor | None]  # eigenvectors of G and of A
_NOTCH = 1.1  # ratio of a damping to the next lower one at which pairs are counted anew
# Multiplications of one way, half of all, that take as long as the calls for one more block. The
# number for GPUs is a guess.
_CALLS_ON_CPU = 1 << 22
_CALLS_ELSEWHERE = 1 << 28


class Sides(NamedTuple):
    """The sides of a gradient, and which factors are dense: only these have a basis."""

    g: int
    a: int
    dense_g: bool = True
    dense_a: bool = True

    def orders(self, rows: Count, columns: Count) -> tuple[Count, Count]:
        """Return the multiplications by vectors of G and of A: with G's first, and with A's first.

        The way back takes as many again.
        """
        if self.dense_g and self.dense_a:
            return products.orders(rows, self.g, self.a, columns)
        only = (rows if self.dense_g else columns) * self.g * self.a
        return only, only


class Counts(NamedTuple):
    """Counts of eigenvectors, for one block of a layer. Zeros leave nothing out."""

    idle_g: int  # the last eigenvectors of G, which lead with none of A
    idle_a: int  # the last eigenvectors of A, which lead with none of G
    short: int  # the last leading rows, which leave columns out; 0: one block
    spared: int  # the columns that these rows leave out
    notch: int  # the damping that the counts are for, as a power of _NOTCH


class Leading(NamedTuple):
    """The eigenvectors that gradients are multiplied by."""

    rows: int  # leading eigenvectors of G
    columns: int  # leading eigenvectors of A
    first: int  # the first rows, which are multiplied by all columns
    few: int  # the first columns, which are multiplied by all rows

    def blocks(self) -> list[tuple[slice, slice]]:
        """Return the blocks, rows by columns; the first block has the first rows."""
        if not self.rows or not self.columns:
            return []
        if self.first >= self.rows or self.few >= self.columns:
            return [(slice(0, self.rows), slice(0, self.columns))]
        upper = slice(0, self.first), slice(0, self.columns)
        return [upper, (slice(self.first, self.rows), slice(0, self.few))]

    def forms(self) -> list[Leading]:
        """Return the forms in which the blocks can be joined with others; one block has two."""
        if len(self.blocks()) > 1:
            return [self]
        return [self._replace(first=self.rows, few=0), self._replace(first=0, few=self.columns)]

    def work(self, sides: Sides) -> int:
        """Return the multiplications on one way."""
        return sum(min(sides.orders(r.stop - r.start, c.stop - c.start)) for r, c in self.blocks())


JoinedEntries = tuple[slice, Leading]  # entries of a stack that are multiplied together


class TruncatedRule(EigenRule):
    """Multiply by the leading eigenvectors of each layer."""

    def __init__(self, dtype: torch.dtype | None, tolerance: float) -> None:
        super().__init__(dtype)
        self.tolerance = tolerance  # τ
        self._known: dict[LayerGroup, list[Counts]] = {}  # the tensor "left_out", on the host
        self._notes = Notes()
        # For each group, joined entries by the first of the members that they are for.
        self._runs: dict[
            LayerGroup, dict[Layer, tuple[tuple[Layer, ...], list[JoinedEntries] | None]]
        ] = {}

    def group_specs(self, count: int, g: int, a: int, dtype: torch.dtype) -> Specs:
        """Return :class:`Counts` of each entry."""
        return {"left_out": ((count, len(Counts._fields)), torch.int32)}

    def allocate(self, applied: AppliedFactors) -> None:
        super().allocate(applied)
        self._known.clear()
        self._notes.clear()
        self._runs.clear()

    def settle(
        self,
        applied: AppliedFactors,
        ready: Iterable[Layer],
        renewed: Iterable[Layer],
        damping_of: DampingOf,
    ) -> None:
        """Count anew for layers with a new state or a lower damping, from the next step on."""
        ready, renewed = set(ready), set(renewed)
        due: dict[LayerGroup, dict[int, list[slice]]] = {}  # by notch
        for layer, group in applied.group_of.items():
            if layer not in ready or 1 in group.shape[1:]:  # a vector leaves nothing out
                continue
            notch = math.floor(math.log(damping_of(layer), _NOTCH))
            slots = group.slots[layer]
            if layer in renewed or notch < self._counts(group)[slots.start].notch:
                due.setdefault(group, {}).setdefault(notch, []).append(slots)
        for group, notches in due.items():
            for notch, slices in notches.items():
                self._count(group, joined(slices, group.g.key.device), notch)
            self._known.pop(group, None)
            self._runs.pop(group, None)
            self._notes.send(group, group.tensors["left_out"])

    def apply(
        self, group: LayerGroup, gradient: Tensor, members: list[Layer], values: StepValues
    ) -> Tensor:
        runs = self._runs_of(group, members)
        if runs is None:
            return super().apply(group, gradient, members, values)
        slots = group.slots_of(members)
        bases = self._bases(group, slots, gradient)
        eigenvalues = self._eigenvalues(group, slots, gradient)
        damping = group.common_or_each(members, values.damping_of)
        left_out = group.tensors["left_out"][slots]
        return precondition(gradient, bases, eigenvalues, left_out, runs, damping)

    def _count(self, group: LayerGroup, slots: Slots, notch: int) -> None:
        g, a = (
            stack.tensors["values"][own][slots]
            for stack, own in ((group.g, group.g_slots), (group.a, group.a_slots))
        )
        found = counted(g, a, self.tolerance * _NOTCH**notch, _sides(group), _calls(group))
        group.tensors["left_out"][slots] = torch.nn.functional.pad(found, (0, 1), value=notch).int()

    def _runs_of(self, group: LayerGroup, members: Sequence[Layer]) -> list[JoinedEntries] | None:
        """Return the joined entries of these layers; ``None`` if nothing is left out."""
        found, layers = self._runs.setdefault(group, {}), tuple(members)
        if layers[0] not in found or found[layers[0]][0] != layers:
            known = self._counts(group)
            counts = [entry for layer in layers for entry in known[group.slots[layer]]]
            some = any(entry.idle_g or entry.idle_a or entry.short for entry in counts)
            runs = runs_of(counts, _sides(group), _calls(group)) if some else None
            found[layers[0]] = layers, runs
        return found[layers[0]][1]

    def _counts(self, group: LayerGroup) -> list[Counts]:
        if group not in self._known:
            read = self._notes.read(group, group.tensors["left_out"])
            self._known[group] = [Counts(*entry) for entry in read]
        return self._known[group]


def _sides(group: LayerGroup) -> Sides:
    return Sides(*group.shape[1:], not group.g.key.diagonal, not group.a.key.diagonal)


def _calls(group: LayerGroup) -> int:
    return _CALLS_ON_CPU if group.g.key.device.type == "cpu" else _CALLS_ELSEWHERE


def runs_of(counts: Sequence[Counts], sides: Sides, calls: int) -> list[JoinedEntries]:
    """Return runs of neighbours; a run is multiplied together if that takes no longer than apart.

    A run multiplies by as many vectors as any of its entries needs. Entries in which nothing leads
    are in no run, unless other entries lie on both sides of them.
    """

    def cost(leading: Leading, count: int) -> int:
        return count * leading.work(sides) + calls * len(leading.blocks())

    runs: list[JoinedEntries] = []
    for i, entry in enumerate(counts):
        rows, columns = sides.g - entry.idle_g, sides.a - entry.idle_a
        own = Leading(rows, columns, rows - entry.short, columns - entry.spared)
        if not own.blocks():
            continue
        if runs:
            where, leading = runs[-1]
            joint = (Leading(*map(max, x, y)) for x in leading.forms() for y in own.forms())
            both = min(joint, key=lambda x: x.work(sides))
            apart = cost(leading, where.stop - where.start) + cost(own, 1)
            if cost(both, i + 1 - where.start) <= apart:
                runs[-1] = slice(where.start, i + 1), both
                continue
        runs.append((slice(i, i + 1), own))
    return runs


def counted(g: Tensor, a: Tensor, floor: float, sides: Sides, calls: int) -> Tensor:
    """Return :class:`Counts` without the notch, ``[k, 4]``.

    A pair of a value of ``g`` ``[k, n]`` and one of ``a`` leads if the product is above ``floor``.
    A second block has to save ``calls`` multiplications, although layers that are multiplied
    together would need fewer. A diagonal factor has no vectors to leave out.
    """
    g, a = _falling(g), _falling(a)
    rows, columns = _above(g, floor / a[:, :1]), _above(a, floor / g[:, :1])
    if not (sides.dense_g and sides.dense_a):
        none = torch.zeros_like(rows)
        idle_g = sides.g - rows if sides.dense_g else none
        idle_a = sides.a - columns if sides.dense_a else none
        return torch.cat([idle_g, idle_a, none, none], 1)
    # For each number of first rows: the columns that other rows need, and the multiplications.
    few = torch.maximum(_above(a, floor / g), columns.clamp(max=1))  # rounding may find none
    first = torch.arange(sides.g, device=g.device).expand_as(few)
    upper, lower = sides.orders(first, columns), sides.orders(rows - first, few)
    work = torch.minimum(*upper) + torch.minimum(*lower) + (first > 0) * calls
    work.masked_fill_((first >= rows) & (first > 0), torch.iinfo(work.dtype).max)
    best = work.argmin(1, keepdim=True)
    short = torch.where(best > 0, rows - best, 0)  # all rows by all columns is one block
    return torch.cat([sides.g - rows, sides.a - columns, short, columns - few.gather(1, best)], 1)


def _falling(values: Tensor) -> Tensor:
    """Return running maxima from the end: refined eigenvalues are not quite sorted."""
    return values.flip(1).cummax(1).values.flip(1)


def _above(falling: Tensor, bounds: Tensor) -> Tensor:
    """Return how many values are above each of the bounds, ``[k, ...]``."""
    rising = falling.flip(1).contiguous()
    return falling.shape[1] - torch.searchsorted(rising, bounds.contiguous(), right=True)


def precondition(
    gradient: Tensor,
    vectors: Basis,
    values: tuple[Tensor, Tensor],
    left_out: Tensor,
    runs: Sequence[JoinedEntries],
    damping: Tensor | float,
) -> Tensor:
    """Return about Q_G (Q_Gᵀ ∇ Q_A / (v_G v_Aᵀ + γ)) Q_Aᵀ, by each layer's leading vectors."""
    g, a = values
    idle_g, idle_a, short, spared, _ = left_out.unbind(1)
    rows, columns = g.shape[1] - idle_g, a.shape[1] - idle_a
    ends = (g, rows), (a, columns), (g, rows - short), (a, columns - spared)
    ones = leads_g, leads_a, first, few = tuple(_ones(v, n) for v, n in ends)
    left = (g, leads_g, a.amax(1)), (a, leads_a, g.amax(1)), (g, first, _left(a, few))
    largest = torch.stack([_left(v, leads) * most for v, leads, most in left]).amax(0)
    largest = largest[:, None, None]
    flat = damping + largest
    new = gradient / flat
    # The damping is far below the leading values: TF32 would drown it.
    with precision.full_precision(gradient.device.type):
        for some, leading in runs:
            own = damping[some] if isinstance(damping, Tensor) else damping
            for r, c in leading.blocks():
                curvature = g[some, r, None] * a[some, None, c]
                # 1 / (s + γ) - 1 / (γ + σ), without a difference of nearly equal numbers.
                steeper = (largest[some] - curvature).div_((curvature + own).mul_(flat[some]))
                if len(steeper) > 1:  # a block of one entry has leading pairs only
                    steeper.mul_(_leads(r, c, *(x[some] for x in ones)))
                bases = [
                    None if q is None else q[some, :, n]
                    for q, n in zip(vectors, (r, c), strict=True)
                ]
                projected = kronecker.into_basis(gradient[some], *bases).mul_(steeper)
                kronecker.add_out_of_basis_(new[some], projected, *bases)
    return new


def _ones(values: Tensor, count: Tensor) -> Tensor:
    """Return 1 for the first ``count`` values, else 0."""
    n = values.shape[1]
    return (torch.arange(n, device=values.device) < count[:, None]).to(values.dtype)


def _leads(
    r: slice, c: slice, leads_g: Tensor, leads_a: Tensor, first: Tensor, few: Tensor
) -> Tensor:
    """Return 1 for each pair of a block that leads in a layer, else 0."""
    lower = leads_g[:, r, None] * few[:, None, c]
    if r.start:
        return lower
    return torch.maximum(lower, first[:, r, None] * leads_a[:, None, c])


def _left(values: Tensor, leads: Tensor) -> Tensor:
    """Return the largest value that does not lead."""
    return (values * (1 - leads)).amax(1)
