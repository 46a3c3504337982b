"""The factors' tensors on this rank, for tests that look at averages and at state."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def averages(opt: Any) -> dict[tuple[str, str], Tensor]:
    """Return the running averages that this rank owns, by layer and side."""
    sides = [side for group in opt.preconditioner.groups.all for side in group.sides]
    return {
        (layer.name, side.name): side.averages["average"][slots]
        for side in sides
        for layer, slots in side.owned.items()
    }


def state(opt: Any, name: str, side: str) -> dict[str, Tensor]:
    """Return a factor's state as this rank applies it; nothing on other ranks."""
    layer = opt.preconditioner.layers[name]
    group = opt.preconditioner.groups.of[layer]
    of_side = getattr(group, side).state if group.applied else {}
    return {key: tensor[group.slots[layer]] for key, tensor in of_side.items()}


def applied(opt: Any) -> list[Any]:
    """Return the layers whose new gradients this rank makes."""
    return [x for group in opt.preconditioner.groups.all if group.applied for x in group.layers]


def tensors(opt: Any) -> list[tuple[str, Tensor]]:
    """Return all tensors of factors and groups on this rank, by name."""
    return [x for group in opt.preconditioner.groups.all for x in group.all_tensors()]
