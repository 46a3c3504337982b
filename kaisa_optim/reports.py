"""Answers to users' questions about one model's K-FAC, and the texts of its errors."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
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
from .curvature.averages import FactorSums
from .curvature.rules import Rule
from .errors import invalid_because
from .layers import SCALES, Layer
from .model import BY_OPTION, CoverageReport, Left, Registry, unwrapped
from .options import OPTIONS, Hyperparameters, Options
from .plan.assignment import Placement
from .plan.schedule import LayerState, Schedule

_LISTED, _NAMED = 10, 5  # parameters and layers of a warning
_ENOUGH = 0.9  # share of the trained parameters, from which coverage needs no warning

logger = logging.getLogger("kaisa_optim")


def _setting(name: str) -> Any:
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
    damping_of: Mapping[Layer, float]
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
        registry = self.registry
        named = unwrapped(registry.model).named_parameters()
        names: dict[Tensor, str] = {p: name for name, p in named}
        trained = {p: p.numel() for p in registry.group_of if p.requires_grad}
        sizes = {names[p]: size for p, size in trained.items() if p in names}
        reasons, left = registry.uncovered | registry.unseen, dict[str, Left]()
        skipped = {name: f"matches {why!r}" for name, why in registry.skipped.items()}
        # The largest first: warnings name the first ones alone.
        for name in sorted(reasons, key=lambda name: -sizes.get(name, 0)):
            if reasons[name] in BY_OPTION:
                skipped[name] = reasons[name]
            else:
                left[name] = Left(sizes.get(name, 0), reasons[name])
        covered: set[Any] = {p for layer in registry.layers.values() for p in layer.trainable}
        for name, layer in registry.layers.items():
            if registry.states[name].unseen and not registry.states[name].has_average:
                covered.difference_update(layer.trainable)  # no call of the layer was found
        number = sum([size for p, size in trained.items() if p in covered])
        elsewhere = {name: x.elsewhere for name, x in registry.states.items() if x.elsewhere}
        return CoverageReport(number, sum(trained.values()), left, skipped, elsewhere)

    @property
    def assignment(self) -> dict[str, Placement]:
        """The ranks that own each layer's factors A and G, by the layer's name."""
        return {name: self.registry.placements[name] for name in self.layers}

    @property
    def account(self) -> Account:
        """The bytes that every rank keeps and receives, as shapes and placements tell."""
        facts, ranks = [*self.registry.facts.values()], self.ranks
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
        group, values = self.groups.of[layer], list[Tensor]()
        for label, side in zip("GA" if layer.turned else "AG", (group.a, group.g), strict=True):
            if layer not in side.owned:
                why = f"this rank lacks factors of layer {name!r}: {label} is on rank "
                why += f"{registry.owner(layer, side.name)}; ask on that rank. "
                why += "colocate_factors=True puts A and G on one"
                raise KeyError(why)
            values.append(side.averages["average"][side.owned[layer]])
        a, g = reversed(values) if layer.turned else values
        return a, g

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes of K-FAC state on this rank, by kind; no collective is called.

        Sums of the running step are "pending", apart from the total; momenta are the base's.
        """
        usage = Counter[str]()
        kinds = {spec.name: spec.kind for spec in self.groups.sizes.specs}
        for group in self.groups.all:
            for name, tensor in group.all_tensors():
                usage[kinds[name]] += tensor.nbytes
        uses = [x for sums in self.sums.of_layer.values() for x in (sums, sums.crossed) if x]
        pending = sum([t.nbytes for x in uses for t in (x.a, x.g) if t is not None])
        return {**usage, "total": usage.total(), "pending": pending}

    def communication_volume(self) -> dict[str, float]:
        """Return the bytes of K-FAC that arrive at this rank in a step, by kind, as a mean.

        "factors" go to their owners, "second_order" state to the gradient workers, "gradients" to
        receivers, and "status" is the numbers that ranks exchange. The mean is over whole intervals
        as they are now set, without early refreshes. It follows from shapes: no collective is
        called. DDP's all-reduce of gradients does not count.
        """
        intervals = self.factor_update_steps, self.inv_update_steps
        return self.account.per_step(self.schedule, *intervals)[self.ranks.rank]

    def metrics(self, *, wait: bool = False) -> dict[str, float]:
        """Return how training goes on this rank, as plain numbers by name; no collective is called.

        Steps, layers without statistics, refreshes done and failed, rejected statistics, bytes
        kept, and the age of layers' state in steps. With ``wait``, the host waits for the device's
        numbers, too: the last step's "clip", and of the factors that this rank owns "residual" (of
        roots S, ‖S F̂ S - I‖ / √n with the averages of now), or "condition" (of factors with the
        damping, under "eigen"), each with "_mean" and "_max".
        """
        registry, groups, rule = self.registry, self.groups, self.rule
        states = [registry.states[layer.name] for layer in registry.active]
        # Without ``wait``, plain numbers alone: a tensor that is read here stops the host.
        numbers: dict[str, float] = {
            "steps": self.steps,
            "layers_without_statistics": sum(not x.has_average for x in states),
            "refreshes": sum(x.refreshes for x in states),
            "failures": sum(x.failed for x in states),
            "rejected": sum(x.rejected for x in states),
            "bytes": self.memory_usage()["total"],
        }
        refreshed = [x.refreshed for x in states if x.has_state and x.refreshes]
        ages: list[float] = [self.steps - 1 - step for step in refreshed]
        if wait and groups.plan.nu is not None:
            numbers["clip"] = groups.plan.nu.item()
        measured: list[float] = []
        sides = [(group, side) for group in groups.all for side in group.sides]
        for layer in registry.with_state if wait and rule.quality else ():
            for group, side in sides:
                if layer in side.owned:
                    average = side.averages["average"][side.owned[layer]]
                    state = side.state[groups.sizes.of_factor[0].name][group.slots[layer]]
                    damping = self.damping_of[layer]
                    measured += rule.measure(side.key, average, state, damping).tolist()
        for name, values in (("age", ages), (rule.quality, measured)):
            if values:
                numbers[f"{name}_mean"] = sum(values) / len(values)
                numbers[f"{name}_max"] = max(values)
        return numbers

    def sample_fisher(self, outputs: Tensor, kind: str, *, dim: int | None = None) -> None:
        """Take G from labels drawn from the model's own distribution, and not from the data's.

        Call this method between the forward pass and ``loss.backward()``, on all ranks, with the
        ``outputs`` that the loss is computed from, without padding: ``outputs[mask]``. ``kind`` is
        the loss: "cross_entropy" of logits, or "mse". A call costs one backward pass in steps that
        gather statistics, in others nothing; no ``.grad`` changes. ``dim`` is the dimension of
        classes (by default as in torch's cross_entropy) or of features.
        """
        if self.options.kaisa_scaling:
            why = '"kaisa" has no scale for the Fisher of drawn labels; use normalization="fisher"'
            raise invalid_because("normalization", why)
        dim, capture = fisher.dimension(outputs, kind, dim), self.capture
        # A checkpoint may have kept layers that gather from being tapped.
        if capture.gathers or capture.tapped:
            seed = self.steps, self.ranks.rank, capture.draws
            fisher.draw(outputs, kind, dim, seed, capture, self.sums)


def nothing_covered(registry: Registry) -> ValueError:
    reasons = [f"{name}: {why}" for name, why in registry.uncovered.items()]
    skipped = registry.skipped
    if skipped:
        patterns = ", ".join(map(repr, dict.fromkeys(skipped.values())))
        reasons.append(f"skip_layers {patterns} leaves out {len(skipped)} parameters")
    use = "use the base optimizer, skip less" if skipped else "use the base optimizer"
    detail = f" ({'; '.join(reasons)})" if reasons else ""
    must = f"{use}, or register its layers with register_layer"
    return invalid_because("model", f"it has no layer that K-FAC covers{detail}; {must}")


def nothing_captured(step: int) -> RuntimeError:
    return RuntimeError(
        f"step {step} is due for statistics, but no covered layer saw a backward pass. Call "
        ".backward() through this very model once a step, after building the optimizer. If a model "
        "of this class was compiled and called before, torch reuses its code without hooks: build "
        "the optimizer first, or call torch._dynamo.reset(). A CUDA graph of the backward pass "
        "runs no hooks; to leave a forward pass out on purpose, use "
        "optimizer.preconditioner.paused()"
    )


def poor_coverage(report: CoverageReport) -> str:
    """Return a warning if much of a model is left to the base; else an empty text."""
    # Parameters that options leave out, and those that scale or shift entries, are no news.
    left = sum(entry.size for entry in report.left.values() if entry.reason != SCALES)
    if left <= (1 - _ENOUGH) * report.total:
        return ""
    lines = [f"  {name}: {size}, {why}" for name, (size, why) in report.left.items()]
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"  and {len(lines) - _LISTED} more"]
    named = "\n".join(lines)
    text = "the base optimizer updates these parameters with their raw gradients"
    return f"{text}:\n{named}\n{report.amount}"


def name_elsewhere(ranks: Ranks, states: Mapping[str, LayerState], witness: Witness) -> None:
    """Name layers whose gradients have other sources than their rows, as any rank found."""
    new: dict[str, float] = {}  # alike on all ranks, which then warn together
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
    ending = " and others" if len(new) > _NAMED else ""
    text = "a part of these layers' gradients comes from no call that K-FAC sees: "
    text += f"{named}{ending}. A penalty, a hook on the weight, or a use outside of the model's "
    text += "forward may add that part, and the factors leave it out; move such a use into the "
    text += "model's forward, and ignore this warning for a penalty or a hook"
    agree.warn(ranks, text)
