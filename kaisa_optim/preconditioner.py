"""The order of one K-FAC step: report, agree, plan, execute."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from . import agree, coverage, reports
from .capture.hooks import Capture
from .comm.ranks import Ranks
from .compiled import CompiledPlan, Groups, products
from .curvature import averages, rules
from .curvature.averages import FactorSums
from .curvature.lengths import BaseNumbers, Length, Share, norms_of
from .curvature.rules import Rule
from .exchange import Exchange, Status, with_gradient
from .layers import Layer
from .linalg.products import full_precision
from .options import PER_GROUP, SHARED, Hyperparameters, Options, rate_of, refuse_name
from .options import Group as ParamGroup
from .plan.schedule import GIVEN_UP, PATIENCE, Schedule, StepPlan, StepReport
from .registry import Registry
from .reports import Answers
from .stages import PREFIX, stage

_NO_WORK = StepPlan(-1)
Parameters = Callable[[], Collection[Tensor]]  # some of the model's, asked for when they are needed


class Preconditioner(Answers):
    """K-FAC for one model: ``optimizer.preconditioner``.

    The optimizer calls :meth:`step` with its parameter groups and gets the gradients for its base
    class. Users read coverage, costs and factors here, and set the hyperparameters of the whole
    optimizer.
    """

    _is_built = False

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        groups: list[ParamGroup],
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
        alone = self.ranks.world == 1
        self.rule = rule = make_rule(options, length)
        rule.half_products = None if alone else False  # False: until ranks agree
        self.options = options
        self.sums = FactorSums(
            kaisa_scaling=options.kaisa_scaling,
            loss_reduction=options.loss_reduction,
            travel=not alone,
            units=rule.scale_free,
        )
        self.hyperparameters = Hyperparameters(
            options, self.sums, group_schedules, alone=alone, aim=weakref.WeakMethod(self._aim)
        )
        self.registry = Registry(model, options, self.ranks, known)
        self.status = Status(self.ranks, self.registry, options, alone=alone)
        self.groups = Groups(self.registry, self.ranks, rule, options)
        self.exchange = Exchange(self.ranks, self.registry, rule, self.groups)
        self.work = _NO_WORK  # of the last step, on averages and state
        self.damping_of: Callable[[Layer], float]  # of the last step that refreshed or read it
        # The next step that gathers or refreshes, the layers that gather in it, None if none may,
        # those to refresh, and what capture is told before its passes.
        self.slot: tuple[int, frozenset[str] | None, frozenset[str], tuple[Any, ...]]
        # The outcome of a load, until other ranks are asked: None, or the error that refused it.
        self.unsettled: list[Exception | None] = []
        self.rebuild(groups)
        if identity is not None:  # else these are groups of a copy, whose values nobody has checked
            self.hyperparameters.note(groups)
        self._identity = identity or {}
        self._is_built = True
        if not self.registry.layers:
            self.capture.detach()
            raise reports.nothing_covered(self.registry)
        reports.warn_at_construction(self.registry, self.ranks, self.rule)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_built and name not in self.__dict__:  # own ones appear during construction
            refuse_name(self, name, value)
            if callable(vars(Answers).get(name)):
                raise AttributeError(f"{name} is a method of the preconditioner; call it")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        options, registry = self.options, self.registry
        intervals = f"statistics every {self.factor_update_steps}"
        if options.statistics_precision != "highest":
            intervals += f" in {options.statistics_precision} precision"
        intervals += f", refreshes every {self.inv_update_steps} steps"
        slots = self.schedule.refresh_slots(self.factor_update_steps, self.inv_update_steps)
        most = max(map(len, slots.values()), default=0)
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

    # ---- the step ----

    def step(self, groups: list[ParamGroup] | None = None, base: Any = None) -> bool:
        """Take one step: agree, renew factors, and step the parameters by new gradients.

        ``base`` is the base optimizer's part in it. Return whether ranks exchanged numbers.
        """
        if groups is None:  # users of kfac-pytorch call it
            raise TypeError(
                "optimizer.step() calls preconditioner.step() itself; leave out the call"
            )
        known, values = self.hyperparameters.known, [g.get(x) for g in groups for x in PER_GROUP]
        if known is None or len(known) != len(values) or not all(map(operator.is_, known, values)):
            self.hyperparameters.read(groups, self.steps)
        own = self.__dict__  # past __setattr__, which checks what users set
        registry, (number, due, _, armed) = self.registry, self.slot
        comparison = self.status.comparison
        works = self.steps == number
        gathers = works and due is not None
        own["work"] = StepPlan(self.steps) if works else _NO_WORK
        facts = base.facts(self.groups.plan)
        if gathers or facts != self.groups.facts:
            registry.homes.check(groups, registry.on_meta)
        if comparison is not None:
            comparison.note_gradients(self.steps)
        # Make room for layers that were moved, frozen or unfrozen since the last step. Ranks
        # compare frozen layers where they gather, and changes take effect there.
        if gathers:
            of_layer = self.sums.of_layer
            changed = registry.follow_changes({x: s.covers for x, s in of_layer.items()})
            if changed:
                self._forget(changed)
        if facts != self.groups.facts and self.groups.places != registry.devices:
            self.allocate()
        if self.rule.reads_damping:
            self.damping_of = registry.values("damping", groups)
        if works and not self._renew(groups):
            # The step does not count. The base must not begin moments that K-FAC keeps.
            self.capture.reset()
            self.groups.compile(groups, base, all_layers=True)
            plan, self.groups.facts = self.groups.plan, None
            base.open(plan)
            plan.present = [False] * len(plan.parameters)
            base.rest(plan)
            self._aim()
            return False
        if facts != self.groups.facts:
            self.groups.compile(groups, base)
            self.groups.facts = facts
        plan = self.groups.plan
        try:
            self.direct(plan, groups, base)
        finally:  # scratch ends with the step
            for stack in plan.stacks:
                stack.buffer = stack.ahead = None
        own["steps"] += 1
        if comparison is not None:
            comparison.note_weights(self.steps)
        self.step_count.fill_(self.steps)
        self.sums.of_layer.clear()
        self.sums.passes.clear()
        self.capture.reset()
        if self.work.exchanges:
            if self.hyperparameters.pending:
                self.hyperparameters.take_intervals(self.steps)
            self._aim()
        elif works or self.hyperparameters.moves:
            self._choose()
        elif self.steps == number:
            self.capture.arm(*armed)
        return self.work.exchanges

    def direct(self, plan: CompiledPlan, groups: list[ParamGroup], base: Any) -> None:
        """Step the plan's parameters by new gradients or directions; the base steps the others."""
        # A call of stage would cost every step, and nullcontext takes a name, too.
        label = record_function if torch._C._autograd._profiler_enabled() else nullcontext
        numbers = base.follow(plan)
        for share in plan.local:
            self._make(numbers, share)
        make = functools.partial(self._make, numbers)
        for ways in (plan.rows, plan.shards):
            if ways is not None:
                ways.exchange(make)
        scales: list[Tensor] | None = None
        if plan.whole is not None and self.kl_clip is not None:
            terms = [share.terms for share in plan.shares]
            terms += [] if plan.shards is None else plan.shards.terms()
            fixed = [(x, x["kl_clip_lr"]) for x in groups]
            rates = [rate_of(x) if own == "current" else own for x, own in fixed]
            scales = plan.clip(terms, self.kl_clip, rates)
        for i, share in enumerate(plan.shares):
            share.deliver(None if scales is None else scales[i])
        if plan.shards is not None and scales is not None:
            plan.shards.deliver(scales[-1])
        if plan.leaving:
            base.let_go(plan)
        with label(PREFIX + "base step"):
            base.rest(plan)
            base.descend(plan)

    def _make(self, base: BaseNumbers, share: Share) -> None:
        """Fill a share's new gradients, or directions with their lengths, and the blocks' terms."""
        rule, damping_of = self.rule, self.damping_of
        label = record_function if torch._C._autograd._profiler_enabled() else nullcontext
        with label(PREFIX + "precondition"):
            matrices = [group.collect("ahead") for group in share.groups]
            if rule.length is None:
                share.directions = [*map(rule.apply, share.groups, matrices, repeat(damping_of))]
                if self.groups.sizes.terms:
                    terms = [products(*x) for x in zip(matrices, share.directions, strict=True)]
                    share.terms = torch.cat(terms)
                return
            # Squares of tiny and of huge numbers would be zero or infinite.
            divisors = norms_of(matrices, 1).div_(share.roots).to(share.like.dtype)
            divisors = torch.where(divisors == 0, 1.0, divisors)
            torch._foreach_div_(matrices, list(divisors[:, None, None].split(share.sizes)))
            with full_precision():
                share.directions = [*map(rule.apply, share.groups, matrices, repeat(damping_of))]
            with label(PREFIX + "length"):
                rule.length.give(share, matrices, divisors, base)

    # ---- the plan ----

    def _agree(self, groups: list[ParamGroup]) -> bool:
        """Agree on the work of this step with all ranks; return False if it does not count."""
        capture, registry, status, work = self.capture, self.registry, self.status, self.work
        common = {} if status.comparison is None else self._common(groups)
        total = status.exchange(capture, report := self._report(common), self.steps)
        status.check(total, common, capture, self.sums)
        if common:  # anew in each exchange: the model may have been moved
            halves = total.lacks_half_products == 0
            if halves != self.rule.half_products:
                self.rule.half_products, self.groups.facts = halves, None
            if self.hyperparameters.pending:
                self.hyperparameters.take_intervals(self.steps)
        told = status.note_answers(total.stale)
        if told:  # a layer that begins anew leaves the plan
            self.exchange.refresher.drop_flags(self.groups.of, told)
            self.groups.facts = None
        if total.captured or total.unread:
            status.silent = 0
        elif total.has_gradients:
            # Once layers have statistics, it is fine if a step passes by the layers that are due.
            status.silent += 1
            interval = self.hyperparameters.in_force["factor_update_steps"]
            most = max(4, 2 * len(self.schedule.gathering_slots(interval)))  # all were due
            if not registry.with_average or status.silent >= most:
                if all(float(rate_of(group)) == 0 for group in groups):
                    # torch.distributed.checkpoint steps once, for the base's state
                    return False
                raise RuntimeError(
                    f"step {self.steps} is due for statistics, but no covered layer saw a backward "
                    "pass. Call .backward() through this very model once a step, after building "
                    "the optimizer. If a model of this class was compiled and called before, torch "
                    "reuses its code without hooks: build the optimizer first, or call "
                    "torch._dynamo.reset(). A CUDA graph of the backward pass runs no hooks; to "
                    "leave a forward pass out on purpose, use optimizer.preconditioner.paused()"
                )
        names = status.note_rows(total, capture)
        if not (names or total.has_gradients or registry.with_average):
            return False  # nothing has begun yet, and no entry of the state could hold a count
        # Drawn gradients belong to the sum of the terms, and not to their mean.
        square = 1.0 if total.drawn else report.terms**2
        work.of_gradients = square / total.terms if total.terms else 0.0
        work.seen = [a + b > 0 for a, b in zip(total.rows, total.crossed, strict=True)]
        work.exchanges, work.average = True, names
        work.total, work.sections = total, registry.sections
        return True

    def _report(self, common: dict[str, Any]) -> StepReport:
        """Return the report of this rank's captures since the last step."""
        capture, registry, sums = self.capture, self.registry, self.sums
        compared = capture.compared()  # it may find an error
        layers, each = [*registry.layers.values()], [*sums.of_layer.values()]
        rows = [0.0] * (registry.sections[-1].stop if layers else 0)
        crossed = rows.copy()
        for layer, at in zip(layers, registry.sections, strict=True):
            of_layer = sums.of_layer.get(layer)
            if of_layer is not None:
                rows[at] = of_layer.count
                if of_layer.crossed is not None:
                    crossed[at] = of_layer.crossed.count
        gradients = with_gradient(layers)
        deferred = [layer for layer in layers if registry.states[layer.name].deferred]
        checksum, lacks_half_products = 0, False
        if self.status.comparison is not None:
            checksum = self.status.comparison.checksum(common)
            devices = {device for device, _ in self.groups.places}
            lacks_half_products = self.rule.lacks_half_products(devices)
        return StepReport(
            failed=capture.errors.error is not None,
            captured=capture.backwards > 0 or capture.was_paused,
            unread=capture.ran and not capture.tapped and not capture.was_paused,
            has_gradients=any(gradients),
            drawn=capture.draws > 0 or any([x.drawn for x in each]),
            trained=any([x.trained for x in each]),
            elsewhere=compared,
            lacks_half_products=lacks_half_products,
            terms=sums.terms(),
            checksum=checksum,
            squares=checksum**2,
            gradients=gradients,
            stale=self.exchange.refresher.answers(self.groups.of, deferred),
            rows=rows,
            crossed=crossed,
            givers=[number > 0 for number in rows],
            crossed_givers=[number > 0 for number in crossed],
        )

    def _renew(self, groups: list[ParamGroup]) -> bool:
        """Bring averages and state up to date; return False for a step that does not count.

        Ranks decide together in gathering steps alone; the others' work may depend only on their
        number and on facts that were agreed on. Decompositions wait for all sums. If an owner
        decomposed after its first sums, the other ranks would wait for its terms of the next sums.
        """
        (_, due, refreshed, _), registry, states = self.slot, self.registry, self.registry.states
        if due is not None and not self._agree(groups):
            return False
        label = record_function if torch._C._autograd._profiler_enabled() else nullcontext
        work = self.work
        with_average = [(name, state) for name, state in states.items() if state.has_average]
        work.refresh = [name for name, x in with_average if name in refreshed or not x.has_state]
        self.damping_of = registry.values("damping", groups)
        if work.average:
            decay_of = registry.values("factor_decay", groups)
            layers = [registry.layers[name] for name in work.average]
            sums = self.exchange.sums(self.sums, layers, work)
            while True:
                with label(PREFIX + "reduce"):
                    factors = next(sums, None)
                if factors is None:
                    break
                with label(PREFIX + "average"):
                    averages.update(factors, work, decay_of, scale_free=self.rule.scale_free)
        # A refresh takes memory of its own. If these were left to the end of a step, and an error
        # ended it before, the next step would count their passes in K.
        self.sums.of_layer.clear()
        self.sums.passes.clear()
        if work.refresh:
            self._refresh(work)
        if work.exchanges and len(with_average) < len(states):
            layers = [x for group in self.groups.all if group.applied for x in group.layers]
            reports.name_layers_without_statistics(layers, states, self.status.named)
        return True

    def _refresh(self, work: StepPlan) -> None:
        """Let owners decompose due factors, and gradient workers receive the new state."""
        layers = [self.registry.layers[name] for name in work.refresh]
        states = [self.registry.states[name] for name in work.refresh]
        again = {layer for layer, state in zip(layers, states, strict=True) if state.failures}
        rule, group_of, damping_of = self.rule, self.groups.of, self.damping_of
        reduce = None  # each owner has both means
        if self.registry.placements.splits_owners:
            reduce = functools.partial(self.ranks.reduce_on_device, kind="second_order")
        shifts = self.exchange.refresher.shifts(group_of, layers, damping_of, reduce)
        try:
            with stage("decompose"):
                self.exchange.refresher.decompose(self.groups.all, {*layers}, again, shifts)
        except Exception as error:
            self.status.note_failure(error, "decomposing factors")
        with stage("share"):
            if self.ranks.grid.workers > 1:
                self.exchange.share_state(layers)
            if rule.renews:
                rule.renew(group_of, layers, damping_of)
        if not all([state.has_state for state in states]):
            self.groups.facts = None
        for state in states:
            state.has_state = state.deferred = True
            state.refreshes += 1
            state.before, state.refreshed = state.refreshed, work.number

    def _aim(self) -> None:
        """Note which layers are late, and tell capture where to look for their calls.

        An exchange, a load or a reset changes them, and all ranks must note the same ones.
        """
        registry, unseen = self.registry, []
        registry.missing, registry.late = [], []
        for layer, state in zip(registry.layers.values(), registry.states.values(), strict=True):
            # A first average is expected of any pass, for a while, and not of a slot alone.
            is_missing = not state.has_average and state.unseen < PATIENCE
            if is_missing:
                registry.missing.append(layer)
                unseen += [layer] if state.unseen else []
            # The slot met no pass.
            if layer.parameters and (is_missing or 0 < state.missed < GIVEN_UP):
                registry.late.append(layer)
        if unseen:
            self.capture.look_around(coverage.unwrapped(registry.model), unseen)
        self._choose()

    def _choose(self) -> None:
        """Look up the next step that gathers or refreshes, and what capture does in its passes."""
        parameters, number, layers = self.hyperparameters, self.steps, self.registry.layers
        if parameters.moves:
            parameters.take_intervals(number)
        gathering, refreshing = parameters.in_force.values()
        late = bool(self.registry.late)
        due, refreshed, following = self.schedule.at(number, gathering, refreshing, late=late)
        if due is None and not refreshed:
            number = following
            due, refreshed, _ = self.schedule.at(number, gathering, refreshing, late=late)
        armed: tuple[Any, ...] = (None,)  # hooks leave at once
        if due is not None:
            wanted, sample = [*map(layers.__getitem__, due), *self.registry.late], None
            fraction = parameters.fraction
            if callable(fraction):
                fraction = parameters.upcoming("statistics_fraction", number)
            if fraction != 1:
                # A layer gathers once in an interval, and early: each time it takes the next rows.
                besides = [x for x in self.options.early if x <= number and x % gathering]
                sample = fraction, number // gathering + len(besides)
            armed = wanted, self.registry.missing, sample
        self.slot = number, due, refreshed, armed
        self.capture.arm(*(armed if number == self.steps else (None,)))

    # ---- values that must be alike on all ranks ----

    def _common(self, groups: list[ParamGroup]) -> dict[str, Any]:
        values, parameters = reports.of_groups(groups), self.hyperparameters
        values |= {"steps": self.steps} | {name: getattr(parameters, name) for name in SHARED}
        values |= parameters.scheduled_intervals(self.steps + 1)
        layers = self.registry.layers.values()
        return values | {f"trained weight, bias of {x.name!r}": x.covers for x in layers}

    # ---- the model ----

    def rebuild(self, groups: list[ParamGroup]) -> None:
        """Match model and parameter groups anew; layers that stay as they were keep their state.

        Every rank raises if the coverage differs among the ranks.
        """
        registry, identity = self.registry, self._identity
        registry.match_groups(groups)
        error: Exception | None = None
        covered = coverage.Coverage()
        try:
            covered = registry.cover(groups, first=not self._is_built)
        except ValueError as problem:
            if self.status.comparison is None or identity is None:
                raise
            error = problem
        if self.status.comparison is not None and identity is not None:
            values = {**identity, **self._common(groups), **self.options.described()}
            values |= reports.described(covered)
            for i, group in enumerate(groups):
                values[f"sizes in parameter group {i}"] = [p.numel() for p in group["params"]]
            # A rank with meta parameters would refuse its step alone, and the others would wait.
            values["parameters on the meta device"] = sorted(registry.on_meta)
            agree.compare(self.ranks, values, "models and options", error)
        registry.rebuild(covered, groups)
        self.damping_of = registry.values("damping", groups)
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
            keep_errors=self.status.comparison is not None,
        )
        if former is not None:  # this may be between a backward pass and its step
            new.resume(former)
        self.capture = self.hyperparameters.capture = new
        self.allocate()
        self._aim()

    def allocate(self) -> None:
        """Lay out all tensors anew; layers that have an average keep their values."""
        options, registry = self.options, self.registry
        registry.placements.find_facts(registry.layers.values())
        self.groups.allocate()
        self.exchange.refresher.notes.clear()  # those on their way are of other tensors
        self.groups.facts = None
        facts = [*registry.placements.facts.values()]
        self.schedule = Schedule(facts, options.staggered, options.early)
        # All entries of the optimizer's state share one count; a new one says that they are to have
        # views of the new stacks.
        self.step_count = torch.tensor(self.steps, device="cpu")

    # ---- loading ----

    def resume(self, steps: int) -> None:
        """Go on from a loaded step count."""
        self.steps = steps
        self.step_count = torch.tensor(steps, device="cpu")
        self.unsettled, comparison = [None], self.status.comparison
        for state in self.registry.states.values():  # owners tell what a save had still to tell
            state.deferred |= comparison is None
        self.hyperparameters.take_intervals(self.steps)
        if comparison is not None:
            comparison.begin()
        self._aim()

    def _forget(self, layers: Collection[Layer]) -> None:
        """Reset layers, and lay out their tensors anew."""
        for layer in layers:
            self.registry.states[layer.name].reset()
        if layers:
            self.allocate()
            self._aim()

    def settle_load(self, groups: list[ParamGroup], momenta: Parameters) -> list[Layer] | None:
        """Compare loaded states; return the layers whose ``momenta`` only some ranks have.

        Return None if there is nothing to compare.
        """
        comparison = self.status.comparison
        if comparison is None or not self.unsettled:
            self.unsettled = []
            return None
        (refused,) = self.unsettled
        # Ranks that have loaded nothing join this exchange: if only some have loaded, all raise.
        report = self._report(self._common(groups))
        self.status.exchange(self.capture, report, self.steps, loads=True)
        # Owners tell what a save had still to tell. Not in the exchange before: there, a rank that
        # has not loaded must send as many numbers.
        for state in self.registry.states.values():
            state.deferred = True
        layers = [*self.registry.layers.values()]
        covers = torch.tensor([x.covers for x in layers], dtype=torch.float64, device="cpu")
        sums = self.ranks.sum_numbers(covers.flatten(), "agreeing on what a loaded state covers")
        differs = ((sums != 0) & (sums != self.ranks.world)).view(-1, 2).any(1).tolist()
        apart = [layer for layer, flag in zip(layers, differs, strict=True) if flag]
        for layer in apart:
            layer.cover(layer.covers_now())
        self._forget(apart)
        own = self._common(groups) | self.options.described()
        agree.compare(self.ranks, own, "loaded states", refused, "loading a state", told=True)
        self.unsettled = [None]
        self.hyperparameters.take_intervals(self.steps)
        lacks = self.rule.lacks_half_products({device for device, _ in self.groups.places})
        absent, uneven, in_part, any_lacks = comparison.compare_loaded(lacks, momenta())
        self._forget(absent)  # only some ranks have loaded their numbers
        for layer in in_part:
            self.sums.drop(layer)
        self.rule.half_products = not any_lacks
        self._aim()
        self.unsettled = []
        return uneven

    def discard(self) -> None:
        """Drop the statistics gathered since the last step, as their gradients are dropped."""
        self.capture.break_off()
        if self.sums.passes:  # else drawn gradients still wait for their backward pass
            self.capture.draws = 0
        self.sums.clear()


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
