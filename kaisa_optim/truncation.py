"""Preconditioning by the leading eigenvectors alone.

Where an eigenvalue s of G ⊗ A is far below the damping γ, 1 / (s + γ) is 1 / γ, whatever the
eigenvectors. With those that lead, Q̂ of either factor, and σ the largest s of the others,

    Q_G (V / (s + γ)) Q_Aᵀ ≈ ∇ / (γ + σ) + Q̂_G (V̂ ∘ (1 / (s + γ) - 1 / (γ + σ))) Q̂_Aᵀ,

V̂ = Q̂_Gᵀ ∇ Q̂_A. It is exact for all s among those that lead, and damps the others by at most σ too
much, never too little. How many lead is counted on the device at refreshes, and where the damping
has fallen, such that σ is at most τγ; it holds from the next step on: by then the host knows it
without waiting. All workers of a layer have the same eigenvalues and damping, so they count alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from . import algebra
from .layers import Basis, Layer
from .stacks import Layout, Pair, Specs
from .tracking import Notes

Leading = tuple[int, int]  # eigenvectors of G and of A
_NOTCH = 1.1  # from one damping to the next lower one for which it is counted anew


def specs(count: int) -> Specs:
    """How many of the last eigenvectors of G and of A are left out, none until it is known; and for
    which damping, in notches."""
    return {"idle": ((count, 3), torch.int32)}


class Truncation:
    """How many eigenvectors lead, of each layer."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance  # τ
        self._known: dict[Pair, list[list[int]]] = {}  # "idle", on the host
        self._notes = Notes()
        self._leading: dict[Pair, tuple[Sequence[Layer], Leading | None]] = {}

    def clear(self) -> None:
        """The device has other numbers now: those of a new layout, or loaded ones."""
        self._known.clear()
        self._notes.clear()
        self._leading.clear()

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
            if layer not in renewed and notch >= self._of(pair)[pair.slots[layer].start][2]:
                continue
            g, a = (layout.factors[layer, side]["values"] for side in "ga")
            floor = self.tolerance * _NOTCH**notch
            idle = pair.tensors["idle"][pair.slots[layer]]
            idle[:, 2] = notch
            for i, (own, other, stack) in enumerate(((g, a, pair.g), (a, g, pair.a))):
                if not stack.key.diagonal:  # there is nothing to multiply by
                    idle[:, i] = _idle(own, other, floor)
            changed[pair] = None
        for pair in changed:
            self._known.pop(pair, None)
            self._leading.pop(pair, None)
            self._notes.send(pair, pair.tensors["idle"])

    def leading(self, pair: Pair, members: Sequence[Layer]) -> Leading | None:
        """The most that lead in one of these layers; None where nothing is left out."""
        if pair not in self._leading or self._leading[pair][0] is not members:
            idle, (_, g, a) = self._of(pair), pair.shape
            rows = [row for layer in members for row in idle[pair.slots[layer]]]
            most = g - min(row[0] for row in rows), a - min(row[1] for row in rows)
            self._leading[pair] = members, most if any(r[0] or r[1] for r in rows) else None
        return self._leading[pair][1]

    def _of(self, pair: Pair) -> list[list[int]]:
        if pair not in self._known:
            self._known[pair] = self._notes.read(pair, pair.tensors["idle"])
        return self._known[pair]


def _idle(values: Tensor, others: Tensor, floor: float) -> Tensor:
    """How many of the last ``values`` ``[k, n]`` have no product with one of the others above
    ``floor``."""
    leads = values * others.amax(1, keepdim=True) > floor
    return (leads.flip(1).cumsum(1) == 0).sum(1)


def precondition(
    gradient: Tensor,
    vectors: Basis,
    values: tuple[Tensor, Tensor],
    idle: Tensor,
    leading: Leading,
    damping: Tensor | float,
) -> Tensor:
    """About Q_G (Q_Gᵀ ∇ Q_A / (v_G v_Aᵀ + γ)) Q_Aᵀ; of each layer by what leads in it."""
    g, a = values
    leads_g, leads_a = _leads(g, idle[:, 0]), _leads(a, idle[:, 1])
    left_g, left_a = ((v * (1 - m)).amax(1) for v, m in ((g, leads_g), (a, leads_a)))
    left_out = torch.maximum(left_g * a.amax(1), left_a * g.amax(1))[:, None, None]
    flat = damping + left_out
    rows, columns = leading
    curvature = g[:, :rows, None] * a[:, None, :columns]
    # 1 / (s + γ) - 1 / (γ + σ), without the difference of what is nearly equal.
    steeper = (left_out - curvature).div_((curvature + damping).mul_(flat))
    steeper.mul_(leads_g[:, :rows, None]).mul_(leads_a[:, None, :columns])
    some_g, some_a = (
        None if q is None else q[..., :n] for q, n in zip(vectors, leading, strict=True)
    )
    # The damping is far below what leads: TF32 of the one would drown the other.
    with algebra.full_precision(gradient.device.type):
        new = algebra.out_of_basis(
            algebra.into_basis(gradient, some_g, some_a).mul_(steeper), some_g, some_a
        )
    return new.addcdiv_(gradient, flat)


def _leads(values: Tensor, idle: Tensor) -> Tensor:
    """1 for each value that leads, else 0."""
    n = values.shape[1]
    return (torch.arange(n, device=values.device) < (n - idle)[:, None]).to(values.dtype)
