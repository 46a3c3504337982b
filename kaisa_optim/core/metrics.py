"""How training goes, in plain numbers for any logger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from . import reports

if TYPE_CHECKING:
    from .preconditioner import Preconditioner


def measured(kfac: Preconditioner, *, wait: bool) -> dict[str, float]:
    """Return this rank's numbers after its last step; ``wait`` adds those on the device."""
    registry = kfac.registry
    states = [registry.states[layer.name] for layer in registry.active]
    covered, total = reports.covered_numbers(registry)
    found: dict[str, float] = {
        "steps": kfac.steps,
        "covered_share": covered / max(1, total),
        "layers_without_statistics": sum(not x.has_average for x in states),
        "refreshes": sum(x.refreshes for x in states),
        "failures": sum(x.failed for x in states),
        "rejected": sum(x.rejected for x in states),
        "elsewhere_max": max((x.elsewhere for x in states), default=0.0),
        "bytes": kfac.memory_usage()["total"],
        "bytes_received": kfac.communication_volume()["total"],
    }
    ages = [kfac.steps - 1 - x.refreshed for x in states if x.has_state and x.refreshes]
    found |= _extremes("age", ages)
    return found | _on_device(kfac) if wait else found


def _on_device(kfac: Preconditioner) -> dict[str, float]:
    """Return the last step's numbers, and the quality of the state of this rank's factors."""
    rule, last = kfac.rule, kfac.gradients.last
    found = {} if last.clip is None else {"clip": last.clip.item()}
    if not rule.quality or last.damping_of is None:
        return found
    store, states = kfac.store, kfac.registry.states
    owned, applied = store.owned, store.applied
    here = [key for key in owned.by_key if key in applied.by_key]
    values: list[Tensor] = [
        rule.measure(owned.by_key[key], applied.by_key[key], last.damping_of(key[0]))
        for key in here
        if states[key[0].name].has_state
    ]
    return found | _extremes(rule.quality, [x for value in values for x in value.tolist()])


def _extremes(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_mean": sum(values) / len(values), f"{name}_max": max(values)} if values else {}
