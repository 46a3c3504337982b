"""Warnings about settings without the effect that a user would expect, and refusals of a step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..comm import agreement
from ..core import reports
from ..core.options import meant
from ..core.preconditioner import Preconditioner
from ..errors import invalid_because
from .arguments import GROUP_KEYS, OF_ALL

if TYPE_CHECKING:
    from .mixin import KFACMixin

ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer"  # torch's module of ZeRO 1


class Notices:
    """Warnings that come once for each optimizer, at its steps."""

    def __init__(self) -> None:
        self._of_settings = self._of_order = self._of_uses = False  # whether each was given
        # The layers without calls, the parameters without a layer, and which of all are trained,
        # when coverage was last looked at.
        self._looked: Any = None

    def look(self, optimizer: KFACMixin) -> None:
        """Warn of a setting that has no effect, or not the expected one."""
        kfac = optimizer.preconditioner
        found = "" if self._of_order else reports.misread(kfac)
        if found:
            self._of_order = True
            agreement.warn(kfac.ranks, found)
        if kfac.plan.exchanges and not self._of_uses:
            self._look_at_uses(kfac)
        if self._of_settings:
            return
        found = _unread(optimizer)
        if not found and not kfac.rule.scale_free:
            found = _unread_scale(kfac) or _beyond_the_clip(optimizer)
        if found:
            self._of_settings = True
            agreement.warn(kfac.ranks, found)

    def _look_at_uses(self, kfac: Preconditioner) -> None:
        """Warn of much that is left, once no call of some layer was seen."""
        registry = kfac.registry
        trained = [p.requires_grad for p in registry.parameters]
        looked = reports.given_up(registry), registry.uncovered, trained
        if not looked[0] or looked == self._looked:
            return
        self._looked = looked
        text = reports.poor_coverage(reports.coverage(registry))
        if text:
            self._of_uses = True
            agreement.warn(kfac.ranks, text)


def misspelt_keys(optimizer: KFACMixin, groups: Iterable[dict[str, Any]]) -> None:
    """Warn of unread keys of groups that resemble a known name; torch says nothing."""
    keys = dict.fromkeys(key for group in groups for key in group)
    unread = [key for key in keys if key not in (*GROUP_KEYS, *optimizer.defaults)]
    # Schedulers' max_momentum is as near as 0.8.
    near = {key: meant(str(key), GROUP_KEYS, optimizer.defaults, 0.85) for key in unread}
    said = [f"{key!r} (did you mean {name!r}?)" for key, name in near.items() if name]
    if said:
        text = f"a parameter group has an unknown key, which has no effect: {', '.join(said)}"
        agreement.warn(optimizer.preconditioner.ranks, text)


def _unread(optimizer: KFACMixin) -> str:
    """Name options of the whole optimizer that were put into a group since it was built."""
    names = OF_ALL.difference(optimizer.defaults)
    found = [name for group in optimizer.param_groups for name in sorted(names & group.keys())]
    if not found:
        return ""
    return (
        f"a parameter group has {found[0]!r}, an option of the whole optimizer, which has no "
        "effect in a group; pass it to the constructor, or, if it may change, set "
        f"optimizer.preconditioner.{found[0]}"
    )


def _unread_scale(kfac: Preconditioner) -> str:
    """Name a GradScaler that the optimizer does not know.

    G would be too large by the scale squared, and steps too short to train.
    """
    if kfac.sums.loss_scale is not None:
        return ""
    for caller in agreement.callers():
        if caller.f_globals.get("__name__") != torch.amp.GradScaler.__module__:
            # Reading a frame's locals would keep them alive, with all tensors of a step.
            continue
        scaler = caller.f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
            return (
                "step() was called by a GradScaler that the optimizer does not know: scaled "
                "gradients enlarge the factors, so weights will hardly move; pass "
                "grad_scaler=scaler"
            )
    return ""


def _beyond_the_clip(optimizer: KFACMixin) -> str:
    """Name groups whose lr is above the one that the KL clip goes by."""
    kfac = optimizer.preconditioner
    if kfac.kl_clip is None:
        return ""
    # Leave out tensors, which may be on a GPU. A hundredth is no more than a schedule's rounding.
    beyond = [
        number
        for number, group in enumerate(optimizer.param_groups)
        if isinstance(group["kl_clip_lr"], int | float)
        and isinstance(group.get("lr"), int | float)
        and 0 < 1.01 * group["kl_clip_lr"] < group["lr"]
    ]
    if beyond:
        beyond = [number for number in beyond if number in kfac.registry.covered_groups]
    if not beyond:
        return ""
    group = optimizer.param_groups[beyond[0]]
    lr, alpha = group["lr"], group["kl_clip_lr"]
    return (
        f"lr {lr:g} is above kl_clip_lr {alpha:g} in parameter group "
        f"{', '.join(map(str, beyond))}: the KL clip counts with kl_clip_lr, the lr at "
        f"construction, so clipped steps are {lr / alpha:.3g} times as long as kl_clip "
        'allows; build the optimizer with the peak lr, set param_groups[i]["kl_clip_lr"], or '
        'use kl_clip_lr="current"'
    )


def refuse_zero_redundancy(title: str) -> None:
    """Refuse to be built by ZeroRedundancyOptimizer, which gives each rank some parameters only.

    A layer would miss its bias, and ranks would wait for layers that the others do not have.
    """
    if any(caller.f_globals.get("__name__") == ZERO_REDUNDANCY for caller in agreement.callers()):
        why = (
            f"ZeroRedundancyOptimizer gives each rank a part of the parameters, and {title} needs "
            f'all; build {title} alone, where assignment="layer-wise" spreads the moments of Adam, '
            "AdamW and LAMB over ranks as ZeRO 1 does"
        )
        raise invalid_because("optimizer_class", why)


def missing_process_group(group: Any) -> None:
    """Warn if a launcher runs a script without a process group: each process trains alone."""
    world = os.environ.get("WORLD_SIZE", "1")
    distributed = torch.distributed
    initialized = distributed.is_available() and distributed.is_initialized()
    if world not in ("", "1") and group is None and not initialized:
        warnings.warn(
            f"WORLD_SIZE is {world}, but there is no process group: this process trains alone; "
            "call torch.distributed.init_process_group() before building model and optimizer",
            stacklevel=4,
        )


def refuse_late_process_group(kfac: Preconditioner) -> None:
    """Refuse a process group that came after the optimizer."""
    distributed = torch.distributed
    if kfac.ranks.group is None and distributed.is_available() and distributed.is_initialized():
        world = distributed.get_world_size()
        if world > 1:
            raise RuntimeError(
                f"Invalid process group: its {world} ranks joined after the optimizer was built, "
                "so the optimizer would exchange nothing; build the optimizer after "
                "init_process_group()"
            )


def refuse_graph_capture() -> None:
    """Refuse a step inside a CUDA graph."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a K-FAC step can't be captured in a CUDA graph: the host decides in each step which "
            "layers are due; run the training step outside of graphs"
        )
