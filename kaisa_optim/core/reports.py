"""Answers to users' questions about one model's K-FAC, and the texts of its errors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..capture.witness import Witness
from ..checks import is_real
from ..comm import agreement
from ..comm.ranks import Ranks
from ..curvature.rules import Rule
from ..errors import invalid_because
from ..layers import SCALES, Layer
from ..plan.assignment import Grid, Placement
from ..plan.schedule import PATIENCE, LayerState
from .coverage import BY_OPTION, Coverage, CoverageReport, Left, unwrapped
from .placements import task_of
from .registry import Registry

_NAMED = 5  # layers of a warning
_ENOUGH = 0.9  # share of the trained parameters, from which coverage needs no warning

logger = logging.getLogger("kaisa_optim")


class Assigned(Mapping[str, Placement]):
    """The owners of each layer's factors; its ``repr`` is a table."""

    def __init__(self, registry: Registry, grid: Grid) -> None:
        self.strategy = registry.placements.strategy
        self.grid = grid
        self.tasks = tuple(task_of(layer) for layer in registry.layers.values())
        self._placements = {task.name: registry.placements.of[task.name] for task in self.tasks}

    def __getitem__(self, name: str) -> Placement:
        return self._placements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    def workers(self, name: str) -> range:
        """Return the ranks that precondition a layer's gradient."""
        return self.grid.workers_of(self[name].g)

    def __repr__(self) -> str:
        rows = [("layer", "A", "on rank", "G", "on rank", "gradient workers")]
        for task in self.tasks:
            a = _size(task.a, task.diagonal_a, task.blocks)
            g = _size(task.g, task.diagonal_g, task.blocks)
            at = self[task.name]
            rows.append((task.name, a, str(at.a), g, str(at.g), _ranks(self.workers(task.name))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        count = f"{self.grid.workers} gradient worker{'s' * (self.grid.workers > 1)} a layer"
        ranks = f"{self.grid.world} rank{'s' * (self.grid.world > 1)}"
        return "\n".join([f"{self.strategy!r} over {ranks}: {count}", *lines])


def _size(n: int, diagonal: bool, blocks: int) -> str:
    return f"{f'{blocks} x ' if blocks > 1 else ''}{n}{' diagonal' if diagonal else ''}"


def _ranks(ranks: range) -> str:
    if len(ranks) > 2 and ranks.step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "...", shown[-1]])


# ---- texts ----


def nothing_covered(registry: Registry) -> ValueError:
    """Return the error for a model without a layer that K-FAC covers."""
    reasons = [f"{name}: {why}" for name, why in registry.uncovered.items()]
    skipped = registry.skipped
    if skipped:
        patterns = ", ".join(map(repr, dict.fromkeys(skipped.values())))
        reasons.append(f"skip_layers {patterns} leaves out {len(skipped)} parameters")
    detail = "; ".join(reasons)
    detail = f" ({detail})" if detail else ""
    use = "use the base optimizer, skip less" if skipped else "use the base optimizer"
    must = f"{use}, or register its layers with register_layer"
    return invalid_because("model", f"it has no layer that K-FAC covers{detail}; {must}")


def warn_at_construction(registry: Registry, ranks: Ranks, rule: Rule) -> None:
    """Name the parameters that are not covered, wide factors, and a group without a CPU backend."""
    found = coverage(registry)
    if ranks.rank == 0:
        logger.info("%s", found)
    text = poor_coverage(found)
    if text:
        agreement.warn(ranks, text)
    text = _wide_factors(registry, rule)
    if text:
        agreement.warn(ranks, text)
    if ranks.status_device:
        agreement.warn(
            ranks,
            f"the process group has no backend for the CPU, only for {ranks.status_device}, so "
            f"ranks agree through {ranks.status_device}, and the host waits for it in most steps; "
            'add gloo for the CPU to the group, as in init_process_group("cpu:gloo,cuda:nccl")',
        )


def coverage(registry: Registry) -> CoverageReport:
    """Return the report on the trained parameters that K-FAC covers now."""
    named = unwrapped(registry.model).named_parameters()
    names: dict[Tensor, str] = {p: name for name, p in named}
    trained = [p for p in registry.parameters if p in names and p.requires_grad]
    sizes = {names[p]: p.numel() for p in trained}
    reasons = registry.uncovered | registry.unseen
    largest = sorted(reasons, key=lambda name: -sizes.get(name, 0))
    left = {name: Left(sizes.get(name, 0), reasons[name]) for name in largest}
    asked = {name: f"matches {why!r}" for name, why in registry.skipped.items()}
    asked |= {name: left.pop(name).reason for name in largest if reasons[name] in BY_OPTION}
    covered, total = covered_numbers(registry)
    elsewhere = {name: x.elsewhere for name, x in registry.states.items() if x.elsewhere}
    return CoverageReport(covered, total, left, asked, elsewhere)


def covered_numbers(registry: Registry) -> tuple[int, int]:
    """Return how many numbers of trained parameters K-FAC covers, and how many there are."""
    states = registry.states
    covered: set[Tensor | None] = set()
    without: set[Tensor | None] = set()  # no call of their layer was found
    for name, layer in registry.layers.items():
        state = states[name]
        found = state.has_average or not state.unseen
        (covered if found else without).update(layer.trainable)
    sizes = {p: p.numel() for p in registry.parameters if p.requires_grad}
    covered -= without
    return sum([size for p, size in sizes.items() if p in covered]), sum(sizes.values())


def poor_coverage(found: CoverageReport) -> str:
    """Return a warning if much of a model is left.

    Parameters that options leave, and those that scale or shift entries, do not count.
    """
    left = sum(one.size for one in found.left.values() if one.reason != SCALES)
    if left <= (1 - _ENOUGH) * found.total:
        return ""
    text = "the base optimizer updates these parameters with their raw gradients"
    return f"{text}:\n{found.named()}\n{found.amount}"


def _wide_factors(registry: Registry, rule: Rule) -> str:
    """Return a warning that names factors whose eigenvectors take a CPU long, if there are any."""
    layers = registry.layers.values()
    on_cpu = [x for x in layers if x.weight is not None and x.weight.is_cpu]
    tasks = [task_of(x) for x in on_cpu]  # frozen ones, too: they may be trained later
    sides = [(task.name, "A", task.a) for task in tasks if not task.diagonal_a]
    sides += [(task.name, "G", task.g) for task in tasks if not task.diagonal_g]
    most = rule.slow_above
    wide = [f"  {name}: {side} has {n} columns" for name, side, n in sides if n > most]
    if not wide:
        return ""
    remedy = (
        "for a diagonal factor in its place give a lower max_factor_size; "
        'compute_method="inverse", where your other options admit it, takes about a fifth of '
        "the time"
    )
    head = f"eigenvectors of factors wider than {most} hold a CPU up at each refresh:"
    return "\n".join([head, *wide, remedy])


def name_layers_without_statistics(
    layers: Iterable[Layer], states: Mapping[str, LayerState], named: set[Layer]
) -> None:
    """Warn once of each layer that has a gradient but no average."""
    for layer in [x for x in layers if not states[x.name].has_average and x not in named]:
        unseen = states[layer.name].unseen
        # Search calls around the layer's module first; coverage() reports layers by use.
        if layer.watchable and unseen and (layer.by_use or unseen < PATIENCE):
            continue
        if any(p.grad is not None for p in layer.parameters):
            named.add(layer)
            warnings.warn(
                f"layer {layer.name!r} has a gradient but no statistics, so its raw gradient "
                "is used; its weight may be in use outside of its module's forward, or the "
                "forward pass was paused()",
                stacklevel=3,
            )


def name_elsewhere(ranks: Ranks, states: Mapping[str, LayerState], witness: Witness) -> None:
    """Name layers whose gradients have other sources than their rows, as any rank found."""
    new: dict[str, float] = {}
    for shares in ranks.gather_objects(witness.elsewhere, "naming gradients with other sources"):
        for name, share in shares.items():
            if not states[name].elsewhere:
                new[name] = max(share, new.get(name, 0.0))
    witness.named.update(witness.elsewhere)
    for name, share in new.items():
        states[name].elsewhere = share
    if not new:
        return
    largest = sorted(new, key=lambda name: -new[name])
    named = ", ".join(f"{name} ({100 * new[name]:.0f} %)" for name in largest[:_NAMED])
    more = " and others" if len(new) > _NAMED else ""
    agreement.warn(
        ranks,
        f"a part of these layers' gradients comes from no call that K-FAC sees: {named}{more}. A "
        "penalty, a hook on the weight, or a use outside of the model's forward may add that part, "
        "and the factors leave it out; move such a use into the model's forward, and ignore this "
        "warning for a penalty or a hook",
    )


# ---- values that ranks compare ----


def of_groups(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the plain values of parameter groups; errors name the first that differs."""
    values: dict[str, Any] = {}
    for i, group in enumerate(groups):
        for name in sorted(group, key=lambda x: (x != "lr", str(x))):  # others follow from lr
            value = group[name]
            if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
                value = value.item()  # the host would wait for another device's
            if isinstance(value, int | float | str | tuple | None):
                # 1 as 1.0: equal numbers must have equal texts
                values[f"{name} of parameter group {i}"] = float(value) if is_real(value) else value
    return values


def described(found: Coverage) -> dict[str, Any]:
    """Return texts of a model's layers, for ranks to compare."""
    return {
        f"layer {x.name!r}": f"{x!r}, {x.covers}, {x.parameters[0].dtype}"
        if x.parameters
        else repr(x)
        for x in found.layers.values()
    }
