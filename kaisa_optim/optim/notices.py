"""Warnings about settings without the effect that a user would expect, and refusals of a step."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from ..comm import agreement
from ..core import reports
from ..core.preconditioner import Preconditioner
from ..errors import invalid_because
from ..plan.schedule import PATIENCE

ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer"  # torch's module of ZeRO 1


class Notices:
    """Warnings that come once for each optimizer, at its steps."""

    def __init__(self) -> None:
        self._of_uses = False  # whether the warning of poor coverage was given
        # The layers without calls, the parameters without a layer, and which of all are trained,
        # when coverage was last looked at.
        self._looked: Any = None

    def look(self, kfac: Preconditioner) -> None:
        """Warn of much that is left to the base."""
        if self._of_uses or not kfac.work.exchanges:
            return
        registry = kfac.registry
        trained = [p.requires_grad for p in registry.parameters]
        # Layers of which no call was seen before the search ended
        states = registry.states.items()
        unseen = [n for n, x in states if x.unseen >= PATIENCE and not x.has_average]
        former, self._looked = self._looked, (unseen, registry.uncovered, trained)
        if unseen and self._looked != former:
            text = reports.poor_coverage(reports.coverage(registry))
            if text:
                self._of_uses = True
                agreement.warn(kfac.ranks, text)


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


def refuse_step(kfac: Preconditioner) -> None:
    """Refuse a step inside a CUDA graph, and a process group that came after the optimizer."""
    distributed = torch.distributed
    if kfac.ranks.group is None and distributed.is_available() and distributed.is_initialized():
        world = distributed.get_world_size()
        if world > 1:
            raise RuntimeError(
                f"Invalid process group: its {world} ranks joined after the optimizer was built, "
                "so the optimizer would exchange nothing; build the optimizer after "
                "init_process_group()"
            )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a K-FAC step can't be captured in a CUDA graph: the host decides in each step which "
            "layers are due; run the training step outside of graphs"
        )
