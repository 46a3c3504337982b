"""Preconditioning by the leading eigenvectors alone.

Where an eigenvalue s of G ⊗ A is far below the damping γ, 1 / (s + γ) is 1 / γ, whatever the
eigenvectors. If some pairs of eigenvectors are taken to lead, and σ is the largest s of the others,

    Q_G (V / (s + γ)) Q_Aᵀ ≈ ∇ / (γ + σ) + Q_G (V ∘ (1 / (s + γ) - 1 / (γ + σ)) ∘ L) Q_Aᵀ,

V = Q_Gᵀ ∇ Q_A, L 1 where a pair leads, else 0. It is exact for all that lead, and damps the others
by at most σ too much, never too little. s is the product of a value of G's and one of A's, and most
of those that are large have one of the largest of either as a factor. So L is two blocks: the first
eigenvectors of G by all of A's that lead with any, the others of G that lead by the first of A's;
or one, where that is less work. Of all sizes with σ at most τγ theirs are the least work. They are
counted on the device, at refreshes and where the damping has fallen, and hold from the next step
on: by then the host knows them without waiting. All workers of a layer have the same eigenvalues
and damping, so they count alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...layers import Basis, Layer
from ...linalg import kronecker, precision, products
from ...linalg.products import Count
from ..deferred import Notes
from ..stacks import Layout, Pair, Specs, joined

_NOTCH = 1.1  # from one damping to the next lower one for which it is counted anew
# Half of the multiplications, those of one way, that take as long as the calls for one more block;
# that of GPUs is a guess.
_CALLS_ON_CPU = 1 << 22
_CALLS_ELSEWHERE = 1 << 28


class Sides(NamedTuple):
    """How wide a gradient is, and which of its bases are multiplied by: dense factors' own."""

    g: int
    a: int
    dense_g: bool = True
    dense_a: bool = True

    def orders(self, rows: Count, columns: Count) -> tuple[Count, Count]:
        """Multiplications by so many vectors of G and of A, by the former or the latter first; as
        many again on the way back."""
        if self.dense_g and self.dense_a:
            return products.orders(rows, self.g, self.a, columns)
        only = (rows if self.dense_g else columns) * self.g * self.a
        return only, only


class Counts(NamedTuple):
    """What is kept of a layer. Zeros leave nothing out."""

    idle_g: int  # of the last eigenvectors of G, those that lead with none
    idle_a: int
    short: int  # of the rows that lead, the last ones that leave columns out; 0: one block
    spared: int  # the columns that these leave out
    notch: int  # the damping that it was counted for


class Leading(NamedTuple):
    """Which eigenvectors are multiplied by."""

    rows: int  # of G
    columns: int  # of A
    first: int  # of these rows, those by all these columns
    few: int  # the first columns, those by all these rows

    def blocks(self) -> list[tuple[slice, slice]]:
        """Rows by columns; the first block has the first rows."""
        if not self.rows or not self.columns:
            return []
        if self.first >= self.rows or self.few >= self.columns:
            return [(slice(0, self.rows), slice(0, self.columns))]
        upper = slice(0, self.first), slice(0, self.columns)
        return [upper, (slice(self.first, self.rows), slice(0, self.few))]

    def forms(self) -> list[Leading]:
        """What one block may stand for when it is joined with others: an upper or a lower one."""
        if len(self.blocks()) > 1:
            return [self]
        return [self._replace(first=self.rows, few=0), self._replace(first=0, few=self.columns)]

    def work(self, sides: Sides) -> int:
        """Multiplications, on one way."""
        return sum(min(sides.orders(r.stop - r.start, c.stop - c.start)) for r, c in self.blocks())


Run = tuple[slice, Leading]  # entries of a stack that are multiplied together


def specs(count: int) -> Specs:
    """:class:`Counts` of each entry."""
    return {"left_out": ((count, len(Counts._fields)), torch.int32)}


class Truncation:
    """Which eigenvectors lead, of each layer."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance  # τ
        self._known: dict[Pair, list[Counts]] = {}  # "left_out", on the host
        self._notes = Notes()
        # Of each pair by the first of some members.
        self._runs: dict[Pair, dict[Layer, tuple[tuple[Layer, ...], list[Run] | None]]] = {}

    def clear(self) -> None:
        """The device has other numbers now: those of a new layout, or loaded ones."""
        self._known.clear()
        self._notes.clear()
        self._runs.clear()

    def count(
        self,
        layout: Layout,
        ready: Collection[Layer],
        renewed: Collection[Layer],
        damping_of: Callable[[Layer], float],
    ) -> None:
        """Count anew for layers with a new state or a lower damping, from the next step on."""
        due: dict[Pair, dict[int, list[slice]]] = {}  # by notch
        for layer, pair in layout.pair_of.items():
            if layer not in ready or 1 in pair.shape[1:]:  # where nothing is to be spared
                continue
            notch = math.floor(math.log(damping_of(layer), _NOTCH))
            slots = pair.slots[layer]
            if layer in renewed or notch < self._counts(pair)[slots.start].notch:
                due.setdefault(pair, {}).setdefault(notch, []).append(slots)
        for pair, notches in due.items():
            for notch, slices in notches.items():
                self._count(pair, joined(slices, pair.g.key.device), notch)
            self._known.pop(pair, None)
            self._runs.pop(pair, None)
            self._notes.send(pair, pair.tensors["left_out"])

    def _count(self, pair: Pair, slots: slice | Tensor, notch: int) -> None:
        g, a = (
            stack.tensors["values"][own][slots]
            for stack, own in ((pair.g, pair.g_slots), (pair.a, pair.a_slots))
        )
        found = counted(g, a, self.tolerance * _NOTCH**notch, _sides(pair), _calls(pair))
        pair.tensors["left_out"][slots] = torch.nn.functional.pad(found, (0, 1), value=notch).int()

    def runs(self, pair: Pair, members: Sequence[Layer]) -> list[Run] | None:
        """How these layers are multiplied; None where nothing is left out."""
        found, layers = self._runs.setdefault(pair, {}), tuple(members)
        if layers[0] not in found or found[layers[0]][0] != layers:
            known = self._counts(pair)
            counts = [entry for layer in layers for entry in known[pair.slots[layer]]]
            some = any(entry.idle_g or entry.idle_a or entry.short for entry in counts)
            runs = runs_of(counts, _sides(pair), _calls(pair)) if some else None
            found[layers[0]] = layers, runs
        return found[layers[0]][1]

    def _counts(self, pair: Pair) -> list[Counts]:
        if pair not in self._known:
            read = self._notes.read(pair, pair.tensors["left_out"])
            self._known[pair] = [Counts(*entry) for entry in read]
        return self._known[pair]


def _sides(pair: Pair) -> Sides:
    return Sides(*pair.shape[1:], not pair.g.key.diagonal, not pair.a.key.diagonal)


def _calls(pair: Pair) -> int:
    return _CALLS_ON_CPU if pair.g.key.device.type == "cpu" else _CALLS_ELSEWHERE


def runs_of(counts: Sequence[Counts], sides: Sides, calls: int) -> list[Run]:
    """Neighbours together by the most of any, where that takes no longer than apart.

    In none are entries of which nothing leads, unless others lie on both sides of them.
    """

    def cost(leading: Leading, count: int) -> int:
        return count * leading.work(sides) + calls * len(leading.blocks())

    runs: list[Run] = []
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
    """:class:`Counts` but for the notch, ``[k, 4]``.

    All pairs of a value of ``g`` ``[k, n]`` and one of ``a`` lead whose product is above ``floor``.
    A second block has to save ``calls``, of which layers that are multiplied together would need
    fewer. A diagonal factor has no vectors to leave out.
    """
    g, a = _falling(g), _falling(a)
    rows, columns = _above(g, floor / a[:, :1]), _above(a, floor / g[:, :1])
    if not (sides.dense_g and sides.dense_a):
        none = torch.zeros_like(rows)
        idle_g = sides.g - rows if sides.dense_g else none
        idle_a = sides.a - columns if sides.dense_a else none
        return torch.cat([idle_g, idle_a, none, none], 1)
    # Of each number of first rows, the columns that the others need, and the multiplications.
    few = torch.maximum(_above(a, floor / g), columns.clamp(max=1))  # rounding may say none
    first = torch.arange(sides.g, device=g.device).expand_as(few)
    upper, lower = sides.orders(first, columns), sides.orders(rows - first, few)
    work = torch.minimum(*upper) + torch.minimum(*lower) + (first > 0) * calls
    work.masked_fill_((first >= rows) & (first > 0), torch.iinfo(work.dtype).max)
    best = work.argmin(1, keepdim=True)
    short = torch.where(best > 0, rows - best, 0)  # all rows by all columns is one block
    return torch.cat([sides.g - rows, sides.a - columns, short, columns - few.gather(1, best)], 1)


def _falling(values: Tensor) -> Tensor:
    """The largest of each and all after it: eigenvalues that are followed are not quite sorted."""
    return values.flip(1).cummax(1).values.flip(1)


def _above(falling: Tensor, bounds: Tensor) -> Tensor:
    """How many are above each of the bounds, ``[k, ...]``."""
    rising = falling.flip(1).contiguous()
    return falling.shape[1] - torch.searchsorted(rising, bounds.contiguous(), right=True)


def precondition(
    gradient: Tensor,
    vectors: Basis,
    values: tuple[Tensor, Tensor],
    left_out: Tensor,
    runs: Sequence[Run],
    damping: Tensor | float,
) -> Tensor:
    """About Q_G (Q_Gᵀ ∇ Q_A / (v_G v_Aᵀ + γ)) Q_Aᵀ; of each layer by what leads in it."""
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
    # The damping is far below what leads: TF32 of the one would drown the other.
    with precision.full_precision(gradient.device.type):
        for some, leading in runs:
            own = damping[some] if isinstance(damping, Tensor) else damping
            for r, c in leading.blocks():
                curvature = g[some, r, None] * a[some, None, c]
                # 1 / (s + γ) - 1 / (γ + σ), without the difference of what is nearly equal.
                steeper = (largest[some] - curvature).div_((curvature + own).mul_(flat[some]))
                if len(steeper) > 1:  # one alone has no more than leads
                    steeper.mul_(_leads(r, c, *(x[some] for x in ones)))
                bases = [
                    None if q is None else q[some, :, n]
                    for q, n in zip(vectors, (r, c), strict=True)
                ]
                projected = kronecker.into_basis(gradient[some], *bases).mul_(steeper)
                kronecker.add_out_of_basis_(new[some], projected, *bases)
    return new


def _ones(values: Tensor, count: Tensor) -> Tensor:
    """1 for so many of the first values, else 0."""
    n = values.shape[1]
    return (torch.arange(n, device=values.device) < count[:, None]).to(values.dtype)


def _leads(
    r: slice, c: slice, leads_g: Tensor, leads_a: Tensor, first: Tensor, few: Tensor
) -> Tensor:
    """1 for each pair of a block that leads in a layer, else 0."""
    lower = leads_g[:, r, None] * few[:, None, c]
    if r.start:
        return lower
    return torch.maximum(lower, first[:, r, None] * leads_a[:, None, c])


def _left(values: Tensor, leads: Tensor) -> Tensor:
    """The largest that does not lead."""
    return (values * (1 - leads)).amax(1)
