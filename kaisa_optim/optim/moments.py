"""The parameters' side of moments that K-FAC keeps: gradients in, directions out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from ..comm.sharding import parts_here
from ..core.options import Group
from . import muon
from .lamb import LAMB, clipped_gradients, descend, math_dtype


def limited(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return gradients under LAMB's limit on the norm of all gradients, K-FAC's included."""
    return clipped_gradients(optimizer.param_groups) if isinstance(optimizer, LAMB) else {}


@contextmanager
def without_limit(optimizer: Optimizer) -> Iterator[None]:
    """Turn LAMB's limit off, for a step on gradients that :func:`limited` has made."""
    groups = optimizer.param_groups if isinstance(optimizer, LAMB) else []
    limits = [group["max_grad_norm"] for group in groups]
    try:
        for group in groups:
            group["max_grad_norm"] = None
        yield
    finally:
        for group, limit in zip(groups, limits, strict=True):
            group["max_grad_norm"] = limit


def taken_in(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the gradients that weight decay or maximize changes, as the moments take them."""
    result: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        decay = 0.0 if _decoupled(optimizer, group) else group["weight_decay"]
        if decay == 0 and not group["maximize"]:
            continue
        for params in _alike(p for p in group["params"] if p.grad is not None):
            gradients = [p.grad for p in params if p.grad is not None]
            if group["maximize"]:
                gradients = list(torch._foreach_neg(gradients))
            if decay != 0:
                gradients = list(torch._foreach_add(gradients, params, alpha=decay))
            result.update(zip(params, gradients, strict=True))
    return result


def move(optimizer: Optimizer, directions: dict[Tensor, Tensor]) -> None:
    """Step along directions, which may be overwritten."""
    for group in optimizer.param_groups:
        for params in _alike(p for p in group["params"] if p in directions):
            _move(optimizer, group, params, [directions[p] for p in params])


def _alike(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return lists of parameters that one foreach call can take."""
    places: dict[Any, list[Tensor]] = {}
    for p in params:
        places.setdefault((p.device, p.dtype, type(p)), []).append(p)
    return list(places.values())


def _move(
    optimizer: Optimizer, group: Group, params: list[Tensor], directions: list[Tensor]
) -> None:
    lr, decay, decoupled = group["lr"], group["weight_decay"], _decoupled(optimizer, group)
    if isinstance(optimizer, LAMB):
        wide = [p.to(math_dtype(p.dtype)) for p in params]  # itself, unless in half precision
        directions = [x.to(wide[0].dtype) for x in directions]
        descend(wide, directions, lr, decay, decoupled, group["use_nvlamb"])
        if wide[0] is not params[0]:
            torch._foreach_copy_(parts_here(params), parts_here(wide))
        return
    muon.descend(params, directions, lr, decay if decoupled else 0.0)


def _decoupled(optimizer: Optimizer, group: Group) -> bool:
    """Return whether weight decay bypasses the moments, as in AdamW and in LAMB's own mode."""
    if isinstance(optimizer, muon.Muon):
        return True
    if isinstance(optimizer, LAMB):
        return bool(group["adam_w_mode"])
    return isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))
