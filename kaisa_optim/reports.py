"""Answers to users' questions about one model's K-FAC, and the texts of its errors."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from . import agree
from .account import Account
from .capture import fisher
from .capture.hooks import Capture
from .capture.witness import Witness
from .comm.ranks import Ranks
from .compiled import Groups
from .coverage import BY_OPTION, Coverage, CoverageReport, Left, unwrapped
from .curvature.averages import FactorSums
from .curvature.rules import Rule
from .errors import invalid_because, is_real
from .layers import SCALES, Layer
from .options import OPTIONS, Hyperparameters, Options
from .plan.assignment import Grid, Placement
from .plan.schedule import PATIENCE, LayerState, Schedule
from .registry import Registry, task_of

_LISTED, _NAMED = 10, 5  # parameters and layers of a warning
_ENOUGH = 0.9  # share of the trained parameters, from which coverage needs no warning

logger = logging.getLogger("kaisa_optim")


class Assigned(dict[str, Placement]):
    """The owners of each layer's factors; its ``repr`` is a table."""

    def __init__(self, registry: Registry, grid: Grid) -> None:
        self.strategy, self.grid = registry.placements.strategy, grid
        self.tasks = tuple(task_of(layer) for layer in registry.layers.values())
        super().__init__({task.name: registry.placements.of[task.name] for task in self.tasks})

    def __repr__(self) -> str:
        rows = [("layer", "A", "on rank", "G", "on rank", "gradient workers")]
        for task in self.tasks:
            parts = f"{task.blocks} x " if task.blocks > 1 else ""
            a = f"{parts}{task.a}{' diagonal' * task.diagonal_a}"
            g = f"{parts}{task.g}{' diagonal' * task.diagonal_g}"
            at = self[task.name]
            ranks = self.grid.workers_of(at.g)
            workers = [str(rank) for rank in ranks]
            if len(workers) > 2 and ranks.step == 1:
                workers = [f"{ranks[0]}-{ranks[-1]}"]
            elif len(workers) > 6:
                workers[3:-1] = ["..."]
            rows.append((task.name, a, str(at.a), g, str(at.g), ", ".join(workers)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        count = f"{self.grid.workers} gradient worker{'s' * (self.grid.workers > 1)} a layer"
        ranks_in_all = f"{self.grid.world} rank{'s' * (self.grid.world > 1)}"
        return "\n".join([f"{self.strategy!r} over {ranks_in_all}: {count}", *lines])


def _setting(name: str) -> Any:
    """Return the property of one hyperparameter of the whole optimizer."""

    def write(self: Any, value: Any) -> None:
        if self.hyperparameters.set(name, value):
            self._aim()

    return property(lambda self: self.hyperparameters.values[name], write, doc=OPTIONS[name].help)


class Answers:
    """Settings and answers of ``optimizer.preconditioner``; no answer changes anything."""

    # Set by users and by schedules
    kl_clip: float | None = _setting("kl_clip")
    factor_update_steps: int = _setting("factor_update_steps")
    inv_update_steps: int = _setting("inv_update_steps")
    statistics_fraction: float | None = _setting("statistics_fraction")
    loss_terms: str | float = _setting("loss_terms")
    grad_scaler: Any = _setting("grad_scaler")
    # The parts that answer
    capture: Capture
    damping_of: Callable[[Layer], float]
    groups: Groups
    hyperparameters: Hyperparameters
    options: Options
    ranks: Ranks
    registry: Registry
    rule: Rule
    schedule: Schedule
    steps: int
    sums: FactorSums

    @property
    def layers(self) -> dict[str, Layer]:
        """The covered layers by name."""
        return self.registry.layers

    @property
    def uncovered(self) -> dict[str, str]:
        """The trained parameters that the base updates with their raw gradients, and why."""
        return self.registry.uncovered | self.registry.unseen

    def coverage(self) -> CoverageReport:
        """Return how many of the trained parameters are covered, and why the others are not.

        Before the first step, the report goes by shapes; afterwards, by the calls that were seen.
        """
        return coverage(self.registry)

    @property
    def skipped(self) -> dict[str, str]:
        """The parameters that ``skip_layers`` leaves out, and the pattern."""
        return self.registry.skipped

    @property
    def assignment(self) -> Assigned:
        """The owners of each layer's factors: a mapping from layer names, printed as a table."""
        return Assigned(self.registry, self.ranks.grid)

    @property
    def account(self) -> Account:
        """The bytes that every rank keeps and receives, as shapes and placements tell."""
        facts, ranks = [*self.registry.placements.facts.values()], self.ranks
        return Account(facts, ranks.grid, self.groups.sizes, ranks.bucket_bytes)

    def paused(self) -> AbstractContextManager[None]:
        """Gather no statistics in forward passes under this context."""
        return self.capture.pause()

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the running averages A and G: ``[blocks, n, n]``, or ``[blocks, n]`` if diagonal.

        A is of inputs and G of output gradients, in whichever order the weight is stored.
        Both tensors are the state itself: ask for them again after a step, and do not change them.
        """
        registry, layer = self.registry, self.registry.layers.get(name)
        if layer is None:
            raise KeyError(f"no covered layer {name!r}; there are {', '.join(registry.layers)}")
        if not registry.states[name].has_average:
            raise KeyError(f"layer {name!r} has no statistics yet")
        group = self.groups.of[layer]
        a, g = (group.g, group.a) if layer.turned else (group.a, group.g)
        placement = registry.placements.of[name]
        owners = [*reversed(placement)] if layer.turned else [*placement]
        away = [
            f"{label} is on rank {owner}"
            for label, side, owner in zip("AG", (a, g), owners, strict=True)
            if layer not in side.owned
        ]
        if away:
            raise KeyError(
                f"this rank lacks factors of layer {name!r}: {' and '.join(away)}; ask on that "
                "rank. colocate_factors=True puts A and G on one"
            )
        return a.averages["average"][a.owned[layer]], g.averages["average"][g.owned[layer]]

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes of K-FAC state on this rank, by kind; no collective is called.

        Sums of the running step are apart, as "pending". Momenta are in the base's entries, and do
        not count.
        """
        usage = Counter[str]()
        kinds = {spec.name: spec.kind for spec in self.groups.sizes.specs}
        for group in self.groups.all:
            for name, tensor in group.all_tensors():
                usage[kinds[name]] += tensor.nbytes
        return {**usage, "total": usage.total(), "pending": self.sums.bytes()}

    def communication_volume(self) -> dict[str, float]:
        """Return the bytes of K-FAC that arrive at this rank in a step, by kind, as a mean.

        The mean is over whole intervals as they are now set, with every layer in use. "factors" go
        to their owners, "second_order" state to the gradient workers, and "gradients" to receivers;
        "status" is the numbers that ranks exchange. The bytes follow from shapes: no collective is
        called, and on one process nothing arrives. The mean leaves out early refreshes, each
        about as much as the first step, and the all-reduce of gradients, such as
        DistributedDataParallel's.
        """
        intervals = self.factor_update_steps, self.inv_update_steps
        return self.account.per_slot(self.schedule, *intervals).per_step()[self.ranks.rank]

    def metrics(self, *, wait: bool = False) -> dict[str, float]:
        """Return how training goes on this rank, as plain numbers by name; no collective is called.

        Steps, the share of covered parameters, layers without statistics, refreshes done and
        failed, rejected statistics, the largest share of a gradient from elsewhere, bytes kept and
        received in a step, and the age of layers' state in steps. The host does not wait, unless
        ``wait`` asks for the device's numbers, too.

        These are the last step's "clip", and of the factors that this rank owns "residual" (of
        roots S, ‖S F̂ S - I‖ / √n with the averages of now), or "condition" (of factors with the
        damping, under "eigen"), each with "_mean" and "_max".
        """
        registry, groups, rule = self.registry, self.groups, self.rule
        states = [registry.states[layer.name] for layer in registry.active]
        numbers: dict[str, float] = {
            "steps": self.steps,
            "covered_share": self.coverage().share,
            "layers_without_statistics": sum(not x.has_average for x in states),
            "refreshes": sum(x.refreshes for x in states),
            "failures": sum(x.failed for x in states),
            "rejected": sum(x.rejected for x in states),
            "elsewhere_max": max((x.elsewhere for x in states), default=0.0),
            "bytes": self.memory_usage()["total"],
            "bytes_received": self.communication_volume()["total"],
        }
        ages = [self.steps - 1 - x.refreshed for x in states if x.has_state and x.refreshes]
        numbers |= _extremes("age", ages)
        if wait and groups.plan.nu is not None:
            numbers["clip"] = groups.plan.nu.item()
        if wait and rule.quality:
            name, measured = groups.sizes.of_factor[0].name, list[float]()
            for group in groups.all:
                for side in group.sides:
                    for layer, slots in side.owned.items():
                        if not registry.states[layer.name].has_state:
                            continue
                        average, damping = side.averages["average"][slots], self.damping_of(layer)
                        state = side.state[name][group.slots[layer]]
                        measured += rule.measure(side.key, average, state, damping).tolist()
            numbers |= _extremes(rule.quality, measured)
        return numbers

    def sample_fisher(self, outputs: Tensor, kind: str, *, dim: int | None = None) -> None:
        """Take G from labels drawn from the model's own distribution, and not from the data's.

        Call this method between the forward pass and ``loss.backward()``, on all ranks, with the
        ``outputs`` that the loss is computed from, without padding: ``outputs[mask]``. ``kind`` is
        the loss: "cross_entropy" of logits, or "mse". A call costs one backward pass in steps that
        gather statistics, in others nothing; no ``.grad`` changes.

        ``dim`` is the dimension of classes (by default as in torch's cross_entropy) or of features.
        Step and rank are the seed, not torch's seed.
        """
        if self.options.kaisa_scaling:
            raise invalid_because(
                "normalization",
                '"kaisa" has no scale for the Fisher of drawn labels; use normalization="fisher"',
            )
        dim, capture = fisher.dimension(outputs, kind, dim), self.capture
        # A checkpoint may have kept layers that gather from being tapped.
        if capture.gathers or capture.tapped:
            seed = self.steps, self.ranks.rank, capture.draws
            fisher.draw(outputs, kind, dim, seed, capture, self.sums)


def _extremes(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_mean": sum(values) / len(values), f"{name}_max": max(values)} if values else {}


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
    report = coverage(registry)
    if ranks.rank == 0:
        logger.info("%s", report)
    text = poor_coverage(report)
    if text:
        agree.warn(ranks, text)
    layers = registry.layers.values()
    on_cpu = [x for x in layers if x.weight is not None and x.weight.is_cpu]
    tasks = [task_of(x) for x in on_cpu]  # frozen ones, too: they may be trained later
    sides = [(task.name, "A", task.a) for task in tasks if not task.diagonal_a]
    sides += [(task.name, "G", task.g) for task in tasks if not task.diagonal_g]
    most = rule.slow_above
    wide = [f"  {name}: {side} has {n} columns\n" for name, side, n in sides if n > most]
    if wide:
        agree.warn(
            ranks,
            f"eigenvectors of factors wider than {most} hold a CPU up at each refresh:\n"
            f"{''.join(wide)}for a diagonal factor in its place give a lower max_factor_size; "
            'compute_method="inverse", where your other options admit it, takes about a fifth of '
            "the time",
        )
    if ranks.status_device:
        agree.warn(
            ranks,
            f"the process group has no backend for the CPU, only for {ranks.status_device}, so "
            f"ranks agree through {ranks.status_device}, and the host waits for it in most steps; "
            'add gloo for the CPU to the group, as in init_process_group("cpu:gloo,cuda:nccl")',
        )


def coverage(registry: Registry) -> CoverageReport:
    """Return the report on the trained parameters that K-FAC covers now."""
    named = unwrapped(registry.model).named_parameters()
    names: dict[Tensor, str] = {p: name for name, p in named}
    trained = {p: p.numel() for p in registry.parameters if p.requires_grad}
    sizes = {names[p]: size for p, size in trained.items() if p in names}
    reasons = registry.uncovered | registry.unseen
    largest = sorted(reasons, key=lambda name: -sizes.get(name, 0))
    left = {name: Left(sizes.get(name, 0), reasons[name]) for name in largest}
    asked = {name: f"matches {why!r}" for name, why in registry.skipped.items()}
    asked |= {name: left.pop(name).reason for name in largest if reasons[name] in BY_OPTION}
    states, covered = registry.states, set[Tensor | None]()
    without: set[Tensor | None] = set()  # no call of their layer was found
    for name, layer in registry.layers.items():
        is_found = states[name].has_average or not states[name].unseen
        (covered if is_found else without).update(layer.trainable)
    number = sum([size for p, size in trained.items() if p in covered and p not in without])
    elsewhere = {name: x.elsewhere for name, x in states.items() if x.elsewhere}
    return CoverageReport(number, sum(trained.values()), left, asked, elsewhere)


def poor_coverage(report: CoverageReport) -> str:
    """Return a warning if much of a model is left.

    Parameters that options leave, and those that scale or shift entries, do not count.
    """
    left = sum(entry.size for entry in report.left.values() if entry.reason != SCALES)
    if left <= (1 - _ENOUGH) * report.total:
        return ""
    lines = [f"  {name}: {size}, {why}" for name, (size, why) in report.left.items()]
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"  and {len(lines) - _LISTED} more"]
    named = "\n".join(lines)
    text = "the base optimizer updates these parameters with their raw gradients"
    return f"{text}:\n{named}\n{report.amount}"


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
    agree.warn(
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
