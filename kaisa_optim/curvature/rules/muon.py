"""Muon's momentum, made orthogonal in the metric of K-FAC's output factors.

Muon takes, of all steps Δ of spectral norm 1, the one along which the loss falls most: polar(M) of
a momentum M. Here lengths are measured by G: of all Δ with ‖L⁻¹Δ‖ = 1, L = (G / ḡ + λI)^-½ and ḡ
the mean eigenvalue of G, that is L polar(L M). Any other root of L², R Rᵀ = L², gives the same
step, R polar(Rᵀ M): so a triangular one, by Cholesky, takes the place of an eigendecomposition. A,
of which nothing is asked, is the identity.

The momentum is kept where gradients are preconditioned, for all layers of one shape together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.coverage import beside_matrices
from ...optim import muon
from ..stacks import Specs

DAMPING = 0.1  # λ, of the mean eigenvalue
# What only other ways to precondition have a use for. Under weight_sharing="reduce" the G of an
# attention's keys is made of rounding alone, and here a factor's own scale is taken for its unit.
WITHOUT = (
    "weight_sharing",
    "kl_clip",
    "kl_clip_lr",
    "compute_method",
    "damping_split",
    "compute_eigenvalue_outer_product",
    "normalization",
    "orthogonal",
    "basis_tolerance",
    "truncation",
    "eigenvalue_correction",
    "grafting",
    "warmup_steps",
    "refresh_lag",
)


Group = dict[str, Any]


class Settings(NamedTuple):
    """How a layer's momentum moves, and what is made of it."""

    momentum: float
    nesterov: bool
    direction: muon.Settings


def settings(group: Group) -> Settings:
    return Settings(group["momentum"], group["nesterov"], muon.settings(group))


def no_matrices(group_of: Mapping[Tensor, Group], model: nn.Module) -> dict[Tensor, str]:
    """The parameters that AdamW takes, and why; the others' momentum is made orthogonal.

    Tables, of which a step sees some rows, and norms are no matrices, unless their group says so.
    """
    apart = beside_matrices(model)
    found = {}
    for p, group in group_of.items():
        if not muon.takes_muon(group, p):
            told = group["use_muon"] is not None
            found[p] = "use_muon=False" if told else "fewer than two dimensions"
        elif p in apart and not group["use_muon"]:
            found[p] = "of an embedding or a norm"
    return found


def choices(groups: Iterable[Group]) -> list[bool | None]:
    """What groups say of whose their parameters are."""
    return [group["use_muon"] for group in groups]


def refuse_changes(groups: Iterable[Group], former: Sequence[bool | None]) -> None:
    for i, (now, before) in enumerate(zip(choices(groups), former, strict=False)):
        if now is not before:
            raise ValueError(
                f"Invalid use_muon: {now!r} of parameter group {i}, which was built with "
                f"{before!r}; what K-FAC covers follows from it, so build another optimizer, with "
                "the state_dict() of this one if that is to go on"
            )


def specs(count: int, g: int, a: int, dtype: torch.dtype) -> Specs:
    """What is kept of ``count`` gradients of one shape."""
    return {"momentum": ((count, g, a), dtype)}


def direction(
    state: dict[str, Tensor],
    slots: slice | Tensor,
    gradient: Tensor,
    present: Tensor | None,
    root: Tensor,
    own: Settings,
    in_half: bool,
) -> Tensor:
    """Take gradients into the momenta at ``slots``; the step from there.

    ``present`` says which blocks have a gradient; the others' momenta stay as they are.
    """
    moved = state["momentum"][slots].lerp(gradient, 1 - own.momentum)
    if present is not None:
        moved = torch.where(present[:, None, None], moved, state["momentum"][slots])
    state["momentum"][slots] = moved
    ahead = gradient.lerp(moved, own.momentum) if own.nesterov else moved
    return muon.polar_step(ahead, root, own.direction, in_half)
