"""Preconditioning by the leading eigenvectors alone.

Where an eigenvalue s of G ⊗ A is far below the damping γ, 1 / (s + γ) is 1 / γ, whatever the
eigenvectors. With those pairs that lead, and σ the largest s of the others,

    Q_G (V / (s + γ)) Q_Aᵀ ≈ ∇ / (γ + σ) + Q_G (V ∘ (1 / (s + γ) - 1 / (γ + σ)) ∘ L) Q_Aᵀ,

V = Q_Gᵀ ∇ Q_A, L 1 where a pair leads, else 0. It is exact for all that lead, and damps the others
by at most σ too much, never too little. As s is the product of a value of G's and one of A's, pairs
that lead lie under a hyperbola, most of them beside the largest values. L covers it by two blocks:
the first eigenvectors of G by all of A's that lead with any, the others of G that lead by the first
of A's. Their sizes are counted on the device at refreshes, and where the damping has fallen, such
that σ is at most τγ and the least is multiplied; they hold from the next step on: by then the host
knows them without waiting. All workers of a layer have the same eigenvalues and damping, so they
count alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import algebra
from .layers import Basis, Layer
from .stacks import Layout, Pair, Specs
from .tracking import Notes

_NOTCH = 1.1  # from one damping to the next lower one for which it is counted anew
# Multiplications that take as long as the calls for one block more; of GPUs a guess.
_CALLS_ON_CPU = 1 << 22
_CALLS_ELSEWHERE = 1 << 28


class Leading(NamedTuple):
    """Which pairs of eigenvectors are multiplied by: two blocks of them."""

    rows: int  # vectors of G that lead with any of A
    columns: int  # vectors of A that lead with any of G
    first: int  # of these rows, those that are taken with all these columns
    few: int  # of these columns, those that are taken with all these rows

    def blocks(self) -> list[tuple[slice, slice]]:
        """In rows and columns."""
        upper = slice(0, self.first), slice(0, self.columns)
        lower = slice(self.first, self.rows), slice(0, self.few)
        return [(r, c) for r, c in (upper, lower) if r.start < r.stop and c.stop]

    def work(self, shape: Sequence[int], calls: int) -> int:
        """Multiplications, half of all: as many again on the way back."""
        _, g, a = shape
        work = 0
        for r, c in self.blocks():
            rows, columns = r.stop - r.start, c.stop
            work += calls + min(rows * a * (g + columns), g * columns * (a + rows))
        return work


Run = tuple[slice, Leading]  # entries of a stack that are multiplied together


def specs(count: int) -> Specs:
    """How many of the last eigenvectors of G and of A are left out; how many of the rows that lead
    are not taken with all columns, and how many columns these leave out; for which damping, in
    notches. Zeros leave nothing out."""
    return {"left_out": ((count, 5), torch.int32)}


class Truncation:
    """Which eigenvectors lead, of each layer."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance  # τ
        self._known: dict[Pair, list[list[int]]] = {}  # "left_out", on the host
        self._notes = Notes()
        self._runs: dict[Pair, tuple[Sequence[Layer], list[Run] | None]] = {}

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
        changed: dict[Pair, None] = {}
        for layer, pair in layout.pair_of.items():
            if layer not in ready or 1 in pair.shape[1:]:  # where nothing is to be spared
                continue
            notch = math.floor(math.log(damping_of(layer), _NOTCH))
            if layer not in renewed and notch >= self._of(pair)[pair.slots[layer].start][4]:
                continue
            g, a = (layout.factors[layer, side]["values"] for side in "ga")
            left_out = pair.tensors["left_out"][pair.slots[layer]]
            floor = self.tolerance * _NOTCH**notch
            dense = not pair.g.key.diagonal, not pair.a.key.diagonal
            left_out[:, :4] = counted(g, a, floor, dense, _calls(g.device))
            left_out[:, 4] = notch
            changed[pair] = None
        for pair in changed:
            self._known.pop(pair, None)
            self._runs.pop(pair, None)
            self._notes.send(pair, pair.tensors["left_out"])

    def runs(self, pair: Pair, members: Sequence[Layer]) -> list[Run] | None:
        """How these layers are multiplied; None where nothing is left out."""
        if pair not in self._runs or self._runs[pair][0] is not members:
            known = self._of(pair)
            rows = [row for layer in members for row in known[pair.slots[layer]]]
            some = any(any(row[:3]) for row in rows)
            self._runs[pair] = (
                members,
                _runs(rows, pair.shape, _calls(pair.g.key.device)) if some else None,
            )
        return self._runs[pair][1]

    def _of(self, pair: Pair) -> list[list[int]]:
        if pair not in self._known:
            self._known[pair] = self._notes.read(pair, pair.tensors["left_out"])
        return self._known[pair]


def _calls(device: torch.device) -> int:
    return _CALLS_ON_CPU if device.type == "cpu" else _CALLS_ELSEWHERE


def _runs(rows: Sequence[Sequence[int]], shape: Sequence[int], calls: int) -> list[Run]:
    """Neighbours together by the most of any, unless that is more work than calls apart."""
    _, g, a = shape
    runs: list[Run] = []
    for i, (idle_g, idle_a, short, spared, _) in enumerate(rows):
        own = Leading(g - idle_g, a - idle_a, g - idle_g - short, a - idle_a - spared)
        if runs:
            where, leading = runs[-1]
            both = Leading(*map(max, leading, own))
            count = i - where.start
            extra = (count + 1) * both.work(shape, 0) - count * leading.work(shape, 0)
            if extra <= own.work(shape, calls):
                runs[-1] = slice(where.start, i + 1), both
                continue
        runs.append((slice(i, i + 1), own))
    return runs


def counted(g: Tensor, a: Tensor, floor: float, dense: tuple[bool, bool], calls: int) -> Tensor:
    """What the pairs of values ``g`` ``[k, n]`` and ``a`` leave out whose products are not above
    ``floor``: ``[k, 4]``, as :func:`specs` has it. Only a dense factor's vectors are multiplied."""
    g, a = _falling(g), _falling(a)
    rows, columns = _above(g, floor / a[:, :1]), _above(a, floor / g[:, :1])
    (k, n_g), n_a = g.shape, a.shape[1]
    if not all(dense):
        none = torch.zeros_like(rows)
        sides = (n_g - rows, dense[0]), (n_a - columns, dense[1])
        return torch.cat([*(idle if has else none for idle, has in sides), none, none], 1)
    # Of each number of first rows, the columns that the others need, and the multiplications.
    few = torch.nn.functional.pad(_above(a, floor / g), (0, 1))
    first = torch.arange(n_g + 1, device=g.device).expand(k, -1)
    work = _work(first, columns, n_g, n_a) + _work(rows - first, few, n_g, n_a)
    split = (first > 0) & (first < rows)
    work = (work + split * calls).masked_fill(first > rows, torch.iinfo(work.dtype).max)
    best = work.argmin(1, keepdim=True)
    return torch.cat([n_g - rows, n_a - columns, rows - best, columns - few.gather(1, best)], 1)


def _work(rows: Tensor, columns: Tensor, g: int, a: int) -> Tensor:
    """:meth:`Leading.work` of a block, on the device."""
    return torch.minimum(rows * a * (g + columns), g * columns * (a + rows))


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
    leads_g, leads_a, first, few = (
        _ones(v, n) for v, n in ((g, rows), (a, columns), (g, rows - short), (a, columns - spared))
    )
    left = (g, leads_g, a.amax(1)), (a, leads_a, g.amax(1)), (g, first, _left(a, few))
    largest = torch.stack([_left(v, leads) * most for v, leads, most in left]).amax(0)
    largest = largest[:, None, None]
    flat = damping + largest
    new = gradient / flat
    # The damping is far below what leads: TF32 of the one would drown the other.
    with algebra.full_precision(gradient.device.type):
        for some, leading in runs:
            for r, c in leading.blocks():
                curvature = g[some, r, None] * a[some, None, c]
                bottom = (curvature + _of(damping, some)).mul_(flat[some])
                # 1 / (s + γ) - 1 / (γ + σ), without the difference of what is nearly equal.
                steeper = (largest[some] - curvature).div_(bottom)
                if len(steeper) > 1:  # else it has no more than leads
                    upper = first[some, r, None] * leads_a[some, None, c]
                    steeper.mul_(torch.maximum(upper, leads_g[some, r, None] * few[some, None, c]))
                sides = [
                    None if q is None else q[some, :, n]
                    for q, n in zip(vectors, (r, c), strict=True)
                ]
                projected = algebra.into_basis(gradient[some], *sides).mul_(steeper)
                algebra.add_out_of_basis_(new[some], projected, *sides)
    return new


def _of(damping: Tensor | float, some: slice) -> Tensor | float:
    return damping[some] if isinstance(damping, Tensor) else damping


def _ones(values: Tensor, count: Tensor) -> Tensor:
    """1 for so many of the first values, else 0."""
    n = values.shape[1]
    return (torch.arange(n, device=values.device) < count[:, None]).to(values.dtype)


def _left(values: Tensor, leads: Tensor) -> Tensor:
    """The largest that does not lead."""
    return (values * (1 - leads)).amax(1)
