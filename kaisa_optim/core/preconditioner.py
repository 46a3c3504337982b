"""The order of one K-FAC step: report, agree, plan, execute."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.hooks import Capture
from ..comm import agreement
from ..comm.ranks import Ranks
from ..curvature import rules
from ..curvature.averages import RunningAverages
from ..curvature.lengths import Length
from ..curvature.refresh import Refresher
from ..curvature.rules import Rule, StepValues
from ..curvature.sums import FactorSums
from ..layers import Layer, sampling
from ..plan.moves import Sizes
from ..plan.schedule import Schedule
from ..plan.step_plan import AgreedStep, StepPlan, StepReport, plan_step
from ..stages import staged
from . import coverage, gradients, reports
from .coverage import CoverageReport
from .exchange import BaseSide, Exchange
from .hyperparameters import Hyperparameters, rate_of, refuse_name
from .options import SHARED, Group, Options
from .registry import Registry
from .status import Status
from .store import FactorStore
from .view import Forward, View

Parameters = Callable[[], Collection[Tensor]]  # some of the model's, asked for when they are needed
_GIVEN_UP = 10  # intervals without a pass, after which a layer no longer gathers out of its slot


class Preconditioner:
    """K-FAC for one model: ``optimizer.preconditioner``.

    The optimizer calls :meth:`step` with its parameter groups and gets the gradients for its base
    class. Users read coverage, costs and factors here, and set the hyperparameters of the whole
    optimizer.
    """

    # Set by users and by schedules
    kl_clip = Forward[float | None](Hyperparameters, "hyperparameters")
    factor_update_steps = Forward[int](Hyperparameters, "hyperparameters")
    inv_update_steps = Forward[int](Hyperparameters, "hyperparameters")
    statistics_fraction = Forward[float](Hyperparameters, "hyperparameters")
    loss_terms = Forward[str | float](Hyperparameters, "hyperparameters")
    grad_scaler = Forward[Any](Hyperparameters, "hyperparameters")
    # Asked by users
    layers = Forward[dict[str, Layer]](View, "view")
    uncovered = Forward[dict[str, str]](View, "view")
    skipped = Forward[dict[str, str]](View, "view")
    assignment = Forward[reports.Assigned](View, "view")
    coverage = Forward[Callable[[], CoverageReport]](View, "view")
    factors = Forward[Callable[[str], tuple[Tensor, Tensor]]](View, "view")
    memory_usage = Forward[Callable[[], dict[str, int]]](View, "view")
    communication_volume = Forward[Callable[[], dict[str, float]]](View, "view")
    metrics = Forward[Callable[..., dict[str, float]]](View, "view")
    paused = Forward[Callable[[], AbstractContextManager[None]]](View, "view")
    sample_fisher = Forward[Callable[..., None]](View, "view")

    _is_built = False

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        groups: list[Group],
        group_schedules: list[dict[str, Callable[[int], Any]]],
        length: Length,
        known: Iterable[Tensor] = (),
        process_group: Any = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        """Build the preconditioner on all ranks, which compare models and options.

        ``length`` is the base's, for rules that make directions. ``identity`` has further values
        that must be alike on all ranks. Without it, ranks compare in the first step only, so that
        one rank may build alone.
        """
        self.capture: Capture  # made when the layers are known
        self.model = model
        self._identity = identity
        self.ranks = Ranks(
            process_group,
            bucket_cap_mb=options.bucket_cap_mb,
            comm_dtype=options.comm_dtype,
            device=next((p.device for p in model.parameters()), None),
        )
        self.steps = 0
        several, scaling = self.ranks.world > 1, options.kaisa_scaling
        self.rule = rule = make_rule(options, length)
        rule.half_products = False if several else None  # False: until ranks agree
        self.options = options
        self.sums = FactorSums(
            kaisa_scaling=scaling,
            loss_reduction=options.loss_reduction,
            packed=several,
            units=rule.scale_free,
        )
        self.hyperparameters = Hyperparameters(
            options, self.sums, group_schedules, several=several, aim=weakref.WeakMethod(self._aim)
        )
        self.registry = Registry(model, options, self.ranks, known)
        self.status = Status(self.ranks, self.registry, options)
        averages = RunningAverages(
            kaisa_scaling=scaling, dtype=options.factor_dtype, scale_free=rule.scale_free
        )
        sizes = sizes_of(rule, options)
        self.store = FactorStore(averages, rule, Refresher(rule), sizes)
        self.exchange = Exchange(self.ranks, self.registry, rule, sizes)
        self.plan = StepPlan(-1)  # the last step's plan
        self.published: dict[Layer, list[int]] = {}  # flags as the optimizer's state has them
        self.published_by: Any = None  # the facts that the state's entries were made from
        # The outcome of a load, until other ranks are asked: None, or the error that refused it.
        self._unsettled: list[Exception | None] = []
        self.rebuild(groups)
        self._identity = identity or {}
        self._is_built = True
        if not self.registry.layers:
            self.capture.detach()
            raise reports.nothing_covered(self.registry)
        reports.warn_at_construction(self.registry, self.ranks, self.rule)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_built:  # own attributes appear during construction
            refuse_name(self, name, value)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        options, registry = self.options, self.registry
        intervals = f"statistics every {self.factor_update_steps}"
        if options.statistics_precision != "highest":
            intervals += f" in {options.statistics_precision} precision"
        intervals += f", refreshes every {self.inv_update_steps} steps"
        slots = self.schedule.refresh_slots(self.inv_update_steps).values()
        most = max(map(len, slots), default=0)
        at_once = f"up to {most} layer{'s' * (most > 1)} at a time"
        intervals += f", {at_once}" if len(slots) > 1 else ", all layers at once"
        lines = [f"Preconditioner({options.compute_method}, {self.steps} steps taken)"]
        lines += [f"  {intervals}", f"  {self.coverage().amount}"]
        if options.chosen:
            lines.append(f"  {options.chosen}")
        for title, entries in (
            ("covered", [repr(layer) for layer in registry.layers.values()]),
            ("raw gradients", [f"{name}: {why}" for name, why in self.uncovered.items()]),
            ("skipped", [f"{name}: matches {why!r}" for name, why in registry.skipped.items()]),
        ):
            if entries:
                lines.append(f"  {title}:")
                lines += [f"    {entry}" for entry in entries]
        return "\n".join(lines)

    @property
    def view(self) -> View:
        """The answers to users' questions; made anew, since a kept one would be a circle."""
        return View(self)

    # ---- the step ----

    def step(
        self, groups: list[Group] | None = None, base: BaseSide | None = None
    ) -> dict[Tensor, Tensor]:
        """Take one step; return the gradient for the base of each covered parameter that has one.

        With a ``base``, return the directions of the parameters that K-FAC steps in its place.
        """
        if groups is None:
            # Users of kfac-pytorch call it.
            raise TypeError(
                "optimizer.step() calls preconditioner.step() itself; leave out the call"
            )
        self.hyperparameters.read(groups, self.steps)
        registry = self.registry
        registry.homes.check(groups, registry.on_meta)
        # Make room for layers that were moved, frozen or unfrozen since the last step. Ranks
        # compare frozen layers in each exchange, and changes take effect there.
        if self.ranks.world == 1 or self._exchanges():
            of_layer = self.sums.of_layer
            self._forget(registry.follow_changes({x: s.covers for x, s in of_layer.items()}))
        if self.store.places != registry.devices:
            self.allocate()

        # Agree: the only decision that ranks take together
        agreed = self._agree(groups)
        if agreed is None:
            # The step does not count. The base must not begin moments that K-FAC keeps.
            self.capture.reset()
            self._choose()
            if base is None:
                return {}
            base.open(*self.exchange.stepped(all_layers=True))
            covered = [p for x in registry.active for p in x.parameters]
            return {p: torch.zeros_like(p) for p in covered if p.grad is not None}
        values = StepValues(
            registry.values("damping", groups), registry.values("factor_decay", groups)
        )
        states = registry.states
        self.plan = plan = plan_step(self.steps, agreed, states, self._slot())

        # Factors: sums enter the owners' averages; due ones are decomposed and shared
        if plan.changes_factors:
            self._renew(plan, agreed, values)

        # Gradients: stacked by shape, preconditioned, handed to receivers
        reports.name_layers_without_statistics(self.store.applied, states, self.status.named)
        if base is None:
            updates = self.exchange.updates(values)
            if (kl_clip := self.hyperparameters.kl_clip) is not None:
                alphas = [
                    rate_of(x) if x["kl_clip_lr"] == "current" else x["kl_clip_lr"] for x in groups
                ]
                self.exchange.clip = updates.clip(kl_clip, alphas, registry.group_of)
            new = updates.by_parameter(registry.in_parts)
        else:
            new = self.exchange.directions(base, values)
        if plan.exchanges:
            self.hyperparameters.take_intervals(self.steps + 1)
            name_unseen(self.capture, registry)
        self.steps += 1
        self.status.note_weights(self.steps)
        self.step_count.fill_(self.steps)
        self.sums.clear()  # a step without statistics may have passes, too
        self.capture.reset()
        self._choose()
        return new

    def _exchanges(self) -> bool:
        """Return whether ranks have something to agree on in this step.

        One process also looks at its sums; several ranks must know the answer without asking.
        """
        capture = self.capture
        alone = self.ranks.world == 1 and (self.sums.passes or capture.draws)
        if alone or capture.wanted:
            return True
        return any([not x.has_average and x.waits for x in self.registry.states.values()])

    def _agree(self, groups: list[Group]) -> AgreedStep | None:
        """Agree with the other ranks on this step's facts; ``None`` for a step without any."""
        if not self._exchanges():
            return AgreedStep()
        capture, common = self.capture, self._common(groups)
        report = self._report(common)
        agreed = self.status.exchange(capture, report, self.steps)
        if self.ranks.world > 1:  # anew in each exchange: the model may have been moved
            self.rule.half_products = agreed.total.lacks_half_products == 0
        self.status.check(agreed, report, common, capture, self.sums)
        self.hyperparameters.take_intervals(self.steps)
        told = [self.registry.layers[name] for name in self.status.note_answers(agreed)]
        self.store.refresher.forget_answers(self.store.owned, told)
        slots = self.schedule.gathering_slots(self._interval("factor_update_steps"))
        if self.status.is_silent(agreed, capture, len(slots)):
            if all(float(rate_of(group)) == 0 for group in groups):
                return None  # torch.distributed.checkpoint steps once, for the base's state
            raise RuntimeError(
                f"step {self.steps} is due for statistics, but no covered layer saw a backward "
                "pass. Call .backward() through this very model once a step, after building the "
                "optimizer. If a model of this class was compiled and called before, torch reuses "
                "its code without hooks: build the optimizer first, or call "
                "torch._dynamo.reset(). A CUDA graph of the backward pass runs no hooks; to leave "
                "a forward pass out on purpose, use optimizer.preconditioner.paused()"
            )
        if not (agreed.total.has_gradients or agreed.rows or self.registry.with_average):
            return None  # nothing has begun yet, and no entry of the state could hold a count
        self.status.note_missed(agreed, capture)
        # Note the layers that have averages now, and the directions of their weights' uses.
        registry = self.registry
        for name in agreed.rows:
            registry.states[name].has_average = True
            registry.layers[name].turned = name in agreed.turned
        new = [x for x in map(registry.layers.__getitem__, agreed.crossed) if not x.tied]
        for layer in new:
            layer.tied = True
        if new:
            registry.placements.find_facts(registry.layers.values())
        return agreed

    def _report(self, common: dict[str, Any]) -> StepReport:
        """Return the report of this rank's captures since the last step."""
        capture, sums, sections = self.capture, self.sums, self.registry.sections
        graded, all_sums = gradients.with_gradient(sections), sums.of_layer.values()
        return StepReport(
            elsewhere=capture.compared(),
            failed=capture.errors.error is not None,
            captured=capture.backwards > 0 or capture.was_paused,
            unread=capture.ran and not capture.tapped and not capture.was_paused,
            has_gradients=any(graded),
            drawn=capture.draws > 0 or any([x.drawn for x in all_sums]),
            trained=any([x.trained for x in all_sums]),
            checksum=agreement.checksum(common | self.status.weights()),
            terms=sums.terms(),
            lacks_half_products=self._lacks_half_products(),
            gradients=graded,
            stale=self.store.refresher.answers(self.store.owned, self.registry.deferred),
            rows=sums.rows(sections),
            crossed=sums.rows(sections, crossed=True),
        )

    def _renew(self, plan: StepPlan, agreed: AgreedStep, values: StepValues) -> None:
        """Bring averages and state up to date.

        Decompositions wait for all sums. If an owner decomposed after its first sums, the other
        ranks would wait for its terms of the next sums.
        """
        layers, store = self.registry.layers, self.store
        average = [layers[name] for name in plan.average]
        for arrived in staged("reduce", self.exchange.sums(self.sums, average, agreed)):
            store.averages.update(store.owned, arrived, agreed, values.decay_of)
        self.sums.clear()
        due = [layers[name] for name in plan.refresh]
        if not due:
            return
        shifts = self.exchange.damping_shifts(store.owned, due, values.damping_of)
        try:
            store.refresher.decompose(store.owned, store.applied, plan, shifts)
        except Exception as error:
            self.status.note_failure(error, "decomposing factors")
        self.exchange.share_state(due, values.damping_of)
        for state in [self.registry.states[name] for name in plan.refresh]:
            state.has_state = state.deferred = True
            state.refreshes += 1
            state.before, state.refreshed = state.refreshed, plan.number

    def _slot(self) -> frozenset[str]:
        return self.schedule.refreshes(self.steps, self._interval("inv_update_steps"))

    def _interval(self, name: str) -> int:
        return self.hyperparameters.in_force(name, self.steps)

    def _aim(self) -> None:
        """Tell capture anew which layers gather, and where to look for their calls."""
        name_unseen(self.capture, self.registry)
        self._choose()

    def _choose(self) -> None:
        """Tell capture which layers gather in the next backward passes, and which rows."""
        interval = self._interval("factor_update_steps")
        fraction = self.hyperparameters.upcoming("statistics_fraction", self.steps)
        # A layer gathers once in an interval, and early: each time it takes the next rows.
        rounds = self.schedule.rounds_begun(self.steps, interval)
        due, states = self.schedule.gathers(self.steps, interval), self.registry.states
        # Leave out layers without a pass for long: else ranks might exchange in every step.
        limit = _GIVEN_UP * interval
        active, layers = self.registry.active, self.registry.layers.values()
        gathering = [x for x in active if x.name in due or 0 < states[x.name].missed < limit]
        # Layers without an average gather in any pass.
        without = [x for x in layers if not states[x.name].has_average]
        missing = [x for x in without if states[x.name].waits]
        self.capture.arm(gathering, missing, sampling.sample_of(fraction, rounds))

    # ---- values that must be alike on all ranks ----

    def _common(self, groups: list[Group]) -> dict[str, Any]:
        if self.ranks.world == 1:
            return {}  # nobody to compare them with
        values, parameters = reports.of_groups(groups), self.hyperparameters
        values |= {"steps": self.steps} | {name: getattr(parameters, name) for name in SHARED}
        values |= parameters.scheduled_intervals(self.steps + 1)
        layers = self.registry.layers.values()
        return values | {f"trained weight, bias of {x.name!r}": x.covers for x in layers}

    def _lacks_half_products(self) -> bool:
        return self.rule.lacks_half_products({device for device, _ in self.store.places})

    # ---- the model ----

    def rebuild(self, groups: list[Group]) -> None:
        """Match model and parameter groups anew; layers that stay as they were keep their state."""
        registry = self.registry
        registry.match_groups(groups)
        described = self._common(groups) | self.options.described()
        found = self.status.cover(groups, described, self._identity, first=not self._is_built)
        registry.rebuild(found, groups)
        for layer in self.sums.passes.keys() - set(registry.layers.values()):
            self.sums.drop(layer)
        former = self.capture if self._is_built else None
        if former is not None:
            former.detach()
        new = Capture(
            coverage.unwrapped(registry.model),
            list(registry.layers.values()),
            self.sums,
            reduce=self.options.weight_sharing == "reduce",
            counts=not self.rule.scale_free,
            precision=self.options.statistics_precision,
            # An error of the backward pass waits for the step: one rank that raised alone would
            # leave the others waiting.
            keep_errors=self.ranks.world > 1,
        )
        if former is not None:  # this may be between a backward pass and its step
            new.resume(former)
        self.capture = self.hyperparameters.capture = new
        self.allocate()
        self._aim()

    def reset(self, layer: Layer) -> None:
        """Forget a layer's factors: they are estimated anew when the layer is next used."""
        self.registry.states[layer.name].reset()

    def allocate(self) -> None:
        """Lay out all tensors anew; layers that have an average keep their values."""
        registry = self.registry
        registry.placements.find_facts(registry.layers.values())
        self.store.allocate(registry, self.ranks.rank, self.ranks.grid)
        self.exchange.allocate(self.store.applied)
        at_once = self.options.at_once(self.ranks.world)
        self.schedule = Schedule([*registry.placements.facts.values()], at_once, self.options.early)
        # All entries of the optimizer's state share one count. They are to have views of the new
        # stacks: publish them anew.
        self.step_count = torch.tensor(self.steps, device="cpu")
        self.published.clear()
        self.published_by = None

    # ---- loading ----

    def refuse(self, error: Exception) -> None:
        """Note an error of loading; if only some ranks have one, all raise in the next step."""
        if self.ranks.world > 1:
            self._unsettled = [error]

    def resume(self, steps: int) -> None:
        """Go on from a loaded step count."""
        self.steps = steps
        self.step_count = torch.tensor(steps, device="cpu")
        self._unsettled = [None] if self.ranks.world > 1 else []
        if not self._unsettled:
            self._ask_owners()
        self.hyperparameters.take_intervals(self.steps)
        self.status.proven = self.ranks.world == 1
        self._aim()

    def _ask_owners(self) -> None:
        """Let owners tell, in the next exchange, what a save had still to tell."""
        for state in self.registry.states.values():
            state.deferred = True

    def _forget(self, layers: Collection[Layer]) -> None:
        """Reset layers, and lay out their tensors anew."""
        for layer in layers:
            self.reset(layer)
        if layers:
            self.allocate()

    def settle_load(self, groups: list[Group], momenta: Parameters) -> list[Layer] | None:
        """Compare loaded states; return the layers whose ``momenta`` only some ranks have.

        Return None if there is nothing to compare.
        """
        if not self._unsettled:
            return None
        (refused,) = self._unsettled
        # Ranks that have loaded nothing join this exchange: if only some have loaded, all raise.
        report = self._report(self._common(groups))
        self.status.exchange(self.capture, report, self.steps, loads=True)
        self._ask_owners()  # not before: a rank that has not loaded sends as many numbers
        apart = self.status.compare_covers()
        for layer in apart:
            layer.cover(layer.covers_now())
        self._forget(apart)
        own = self._common(groups) | self.options.described()
        agreement.compare(self.ranks, own, "loaded states", refused, "loading a state", told=True)
        self._unsettled = [None]
        self.hyperparameters.take_intervals(self.steps)
        lacks = self._lacks_half_products()
        absent, uneven, in_part, any_lacks = self.status.compare_loaded(lacks, momenta())
        self._forget(absent)  # only some ranks have loaded their numbers
        for layer in in_part:
            self.sums.drop(layer)
        self.rule.half_products = not any_lacks
        self._aim()
        self._unsettled = []
        return uneven

    def discard(self) -> None:
        """Drop the statistics gathered since the last step, as their gradients are dropped."""
        self.capture.break_off()
        if self.sums.passes:  # else drawn gradients still wait for their backward pass
            self.capture.draws = 0
        self.sums.clear()


def name_unseen(capture: Capture, registry: Registry) -> None:
    """Tell capture which layers were never seen: an exchange, a load or a reset changes them."""
    layers, states = registry.layers.values(), registry.states
    unseen = [x for x in layers if states[x.name].waits and states[x.name].unseen]
    capture.look_around(coverage.unwrapped(registry.model), unseen)


def sizes_of(rule: Rule, options: Options) -> Sizes:
    """Return what the bytes of this rule depend on under these options."""
    dtypes, clips = (options.factor_dtype, options.comm_dtype), options.kl_clip is not None
    average, wire = (None if dtype is None else dtype.itemsize for dtype in dtypes)
    terms = rule.sizes.terms if rule.makes_directions else gradients.CLIP_TERMS * clips
    return rule.sizes._replace(average=average, wire=wire, terms=terms)


def make_rule(options: Options, length: Length) -> Rule:
    """Return the rule that the options ask for."""
    dtype = options.inv_dtype
    if options.compute_method == "polar":
        return rules.PolarRule(dtype, length)
    if options.compute_method == "inverse":
        return rules.CholeskyRule(dtype, options.damping_split or "pi")
    if options.compute_eigenvalue_outer_product:
        return rules.StoredProductRule(dtype)
    return rules.EigenRule(dtype)
