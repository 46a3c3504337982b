"""Ranks that run out of data: they go on with every step, inside torch's ``Join``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.options import SHARED

if TYPE_CHECKING:
    from .mixin import KFACMixin

if torch.distributed.is_available():
    from torch.distributed.algorithms.join import Join, JoinHook
else:
    JoinHook = object  # type: ignore[assignment, misc]


class StepsOn(JoinHook):
    """Takes every step on a rank without data.

    Such a rank still owns factors, decomposes and preconditions. Its gradients and settings come
    from a rank that has data, so that weights stay alike.
    """

    def __init__(self, optimizer: KFACMixin) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer._has_joined = True
        try:
            self.optimizer.step()
        finally:
            self.optimizer._has_joined = False


def joined_gradients(optimizer: KFACMixin) -> dict[Tensor, Tensor]:
    """Return the gradients that a rank without data takes, as the settings, from one with data."""
    kfac, has_joined = optimizer.preconditioner, optimizer._has_joined
    ranks = kfac.ranks
    if ranks.world == 1 or not _is_entered(optimizer._join_config):
        return {}
    if not has_joined:
        Join.notify_join_context(optimizer)  # type: ignore[arg-type]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    shared = {name: getattr(kfac, name) for name in SHARED}
    mine = groups, shared, [p.grad is not None for p in parameters]
    told = ranks.gather_objects(None if has_joined else mine, "joining")
    if all(told):
        return {}
    root = next(rank for rank, said in enumerate(told) if said)
    groups, shared, graded = told[root]
    if has_joined:
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        for name, value in shared.items():
            setattr(kfac, name, value)
    taken = [p for p, has in zip(parameters, graded, strict=True) if has]
    new = {p: p.grad if ranks.rank == root else torch.empty_like(p) for p in taken}
    ranks.broadcast_from(root, list(new.values()), "gradients")
    return new if has_joined else {}


def refuse_join_of_the_model_alone(optimizer: KFACMixin) -> None:
    """Refuse the model's own join(): joined ranks would run none of K-FAC's collectives."""
    if optimizer.preconditioner.ranks.world == 1:
        return
    config: Any = getattr(optimizer._kfac_model, "_join_config", None)
    # Torch keeps the setting that a wrapper's last Join made.
    entered = config is not optimizer._former_join and config.enable
    if entered and not _is_entered(optimizer._join_config):
        raise RuntimeError(
            "the model's join() does not cover K-FAC's exchanges between ranks; use "
            "torch.distributed.algorithms.Join([model, optimizer]) instead"
        )


def _is_entered(config: Any) -> bool:
    return config is not None and bool(config.enable)
