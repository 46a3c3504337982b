"""The order of one K-FAC step: report, agree, plan, execute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from . import agree, reports
from .capture.hooks import Capture
from .comm.ranks import Ranks
from .compiled import Groups, products
from .curvature import averages, rules
from .curvature.averages import FactorSums
from .curvature.lengths import BaseNumbers, Length, Share, norms_of
from .curvature.rules import Rule
from .errors import is_real
from .exchange import Exchange, Status, with_gradient
from .layers import Layer
from .layers.base import Sample
from .linalg.products import full_precision
from .model import Registry, unwrapped
from .options import PER_GROUP, SHARED, Hyperparameters, Options, rate_of, refuse_name
from .options import Group as ParamGroup
from .plan.schedule import GIVEN_UP, PATIENCE, Schedule, StepPlan, StepReport
from .reports import Answers
from .stages import PREFIX, stage

_NO_WORK = StepPlan(-1)


class Slot(NamedTuple):
    """The next step that gathers or refreshes."""

    number: int  # of the step
    gathers: list[Layer] | None  # layers in their slot, and late ones; None: no exchange
    refreshes: frozenset[str]
    sample: Sample | None  # the part of the examples that is read; None: all


class Preconditioner(Answers):
    """K-FAC for one model: ``optimizer.preconditioner``.

    The optimizer calls :meth:`step` with its parameter groups and gets the gradients for its base
    class. Users read coverage, costs and factors here, and set the hyperparameters of the whole
    optimizer.
    """

    slot: Slot
    _is_built = False

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        groups: list[ParamGroup],
        group_schedules: list[dict[str, Callable[[int], Any]]],
        length: Length,
        known: Iterable[Tensor] = (),
        base: str | None = None,
    ) -> None:
        # Without a name of the ``base``, ranks compare in the first step only: one may build alone.
        self.model, self.options, self._base = model, options, base
        self.ranks = Ranks(
            options.process_group,
            bucket_cap_mb=options.bucket_cap_mb,
            comm_dtype=options.comm_dtype,
            device=next((p.device for p in model.parameters()), None),
        )
        self.steps, alone = 0, self.ranks.world == 1
        self.rule = rule = make_rule(options, length)  # it keeps no tensors
        rule.half_products = None if alone else False  # False: until ranks agree
        self.sums = FactorSums(
            kaisa_scaling=options.kaisa_scaling,
            loss_reduction=options.loss_reduction,
            travel=not alone,
            units=rule.scale_free,
        )
        self.hyperparameters = Hyperparameters(options, self.sums, group_schedules, alone)
        self.registry = Registry(model, options, self.ranks, known)
        self.status = Status(self.ranks, self.registry, options, alone=alone)
        self.groups = Groups(self.registry, self.ranks, rule, options)
        self.exchange = Exchange(self.ranks, self.registry, rule, self.groups)
        self.work = _NO_WORK  # of the last step, on averages and state
        # The outcome of a load, until other ranks are asked: None, or the error that refused it.
        self.unsettled: list[Exception | None] = []
        self.rebuild(groups)
        if base is not None:  # else these are groups of a copy, whose values nobody has checked
            self.hyperparameters.note(groups)
        self._is_built = True
        if not self.registry.layers:
            self.capture.detach()
            raise reports.nothing_covered(self.registry)
        coverage = self.coverage()
        if self.ranks.rank == 0:
            reports.logger.info("%s", coverage)
        text = reports.poor_coverage(coverage)
        if text:
            agree.warn(self.ranks, text)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_built and name not in self.__dict__:  # attributes appear during construction
            refuse_name(self, name, value)
            if callable(vars(Answers).get(name)):
                raise AttributeError(f"{name} is a method of the preconditioner; call it")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        options, registry = self.options, self.registry
        gathers, refreshes = self.factor_update_steps, self.inv_update_steps
        slots = self.schedule.refresh_slots(gathers, refreshes)
        most, precision = max(map(len, slots.values()), default=0), options.statistics_precision
        at_once = f"up to {most} layer{'s' * (most > 1)} at a time"
        at_once = at_once if len(slots) > 1 else "all layers at once"
        rounded = "" if precision == "highest" else f" in {precision} precision"
        intervals = f"statistics every {gathers}{rounded}, refreshes every {refreshes} steps"
        lines = [f"Preconditioner({options.compute_method}, {self.steps} steps taken)"]
        lines += [f"  {intervals}, {at_once}", f"  {self.coverage().amount}"]
        lines += [f"  {options.chosen}"] if options.chosen else []
        for title, entries in (
            ("covered", [repr(layer) for layer in registry.layers.values()]),
            ("raw gradients", [f"{name}: {why}" for name, why in self.uncovered.items()]),
            ("skipped", [f"{name}: matches {why!r}" for name, why in registry.skipped.items()]),
        ):
            lines += [f"  {title}:", *(f"    {entry}" for entry in entries)] if entries else []
        return "\n".join(lines)

    # ---- the step ----

    def step(self, groups: list[ParamGroup] | None = None, base: Any = None) -> bool:
        """Take one step with the ``base``'s part in it; return whether ranks exchanged numbers."""
        if groups is None:  # users of kfac-pytorch call it
            raise TypeError(
                "optimizer.step() calls preconditioner.step() itself; leave out the call"
            )
        hyperparameters, registry = self.hyperparameters, self.registry
        if hyperparameters.known != [group.get(name) for group in groups for name in PER_GROUP]:
            hyperparameters.read(groups, self.steps)
        slot = self.slot
        works = self.steps == slot.number
        gathers = works and slot.gathers is not None
        # Past __setattr__, which checks the names that users set: a quiet step pays for each call.
        attributes = self.__dict__
        attributes["work"] = StepPlan(self.steps) if works else _NO_WORK
        facts = base.facts(self.groups.plan)  # without numbers such as lr: each step reads these
        if gathers or facts != self.groups.facts:
            registry.check_parameters(groups)
        if not self.status.alone:
            self.status.note_gradients(self.steps)
        # Only where ranks are about to compare frozen layers: if a rank laid a layer out anew in
        # any other step, the ranks would take part in different collectives.
        if gathers:
            covers = {layer: x.covers for layer, x in self.sums.of_layer.items()}
            if changed := registry.follow_changes(covers):
                self._forget(changed)
        if facts != self.groups.facts and self.groups.places != registry.devices:
            self.allocate()
        if gathers and not self.gather(groups):
            self._pass_over(groups, base)
            return False
        # Before any work that may fail: passes that an error left here would count in the next K.
        self.sums.of_layer.clear()
        self.sums.passes.clear()
        if works or not self.rule.damps:  # else the state has the damping
            # After the exchange: a rank that raised before it would leave the others waiting.
            self.damping_of = registry.values("damping", groups)
        if works:
            self.refresh()
        if facts != self.groups.facts:
            self.groups.compile(groups, base)
            self.groups.facts = facts
        self.direct(groups, base)
        attributes["steps"] += 1
        if not self.status.alone:
            self.status.note_weights(self.steps)
        self.step_count.fill_(self.steps)  # in place: all entries hold this tensor
        self.capture.reset()
        if self.work.exchanges:
            if hyperparameters.pending:
                hyperparameters.take_intervals(self.steps)
            self._aim()
        elif works or (hyperparameters.pending and self.status.alone):
            self._choose()
        elif self.steps == slot.number:
            self.capture.arm(slot.gathers, registry.missing, slot.sample)
        return self.work.exchanges

    def direct(self, groups: list[ParamGroup], base: Any) -> None:
        """Step the plan's parameters by new gradients or directions; the base steps the others."""
        # A call of stage would cost every step, and nullcontext takes a name, too.
        label = record_function if torch._C._autograd._profiler_enabled() else nullcontext
        plan = self.groups.plan
        try:
            make = functools.partial(self._make, base.follow(plan))
            if plan.rows is not None:
                plan.rows.exchange(make)
            else:
                for share in plan.made:
                    make(share)
            if plan.shards is not None:
                plan.shards.exchange(make)
            scales: list[Any] = [None] * len(plan.ends)
            if plan.whole is not None and self.kl_clip is not None:
                fixed = [(group, group["kl_clip_lr"]) for group in groups]
                rates = [rate_of(group) if x == "current" else x for group, x in fixed]
                scales = plan.clip([end.terms for end in plan.ends], self.kl_clip, rates)
            for end, scale in zip(plan.ends, scales, strict=True):
                end.deliver(scale)
            if plan.leaving:  # before the base steps them: their entries are K-FAC's
                base.let_go(plan)
            with label(PREFIX + "base step"):
                base.step_uncovered(plan)
                base.descend(plan)
        finally:  # scratch ends with the step
            for stack in plan.stacks:
                stack.buffer = stack.ahead = None

    def _make(self, base: BaseNumbers, share: Share) -> None:
        # Fill a share's new gradients, or directions with their lengths, and the clip's terms.
        rule, damping_of = self.rule, self.damping_of
        label = record_function if torch._C._autograd._profiler_enabled() else nullcontext
        with label(PREFIX + "precondition"):
            matrices = [group.collect("ahead") for group in share.groups]
            if rule.length is not None:
                # Squares of tiny and of huge numbers would be zero or infinite.
                divisors = norms_of(matrices, 1).div_(share.roots).to(share.like.dtype)
                divisors = torch.where(divisors == 0, 1.0, divisors)
                torch._foreach_div_(matrices, list(divisors[:, None, None].split(share.sizes)))
            share.directions = []
            with nullcontext() if rule.length is None else full_precision():
                for group, matrix in zip(share.groups, matrices, strict=True):
                    share.directions.append(rule.apply(group, matrix, damping_of))
            if rule.length is not None:
                with label(PREFIX + "length"):
                    rule.length.give(share, matrices, divisors, base)
            elif self.groups.sizes.terms:
                pairs = zip(matrices, share.directions, strict=True)
                share.terms = torch.cat([products(raw, new) for raw, new in pairs])

    def gather(self, groups: list[ParamGroup]) -> bool:
        """Agree with all ranks, and take sums into averages; return whether the step counts."""
        # Nowhere else does the host wait for other ranks. The work of other steps may follow from
        # their number and from facts that were agreed on here, and from nothing else.
        capture, registry, status, work = self.capture, self.registry, self.status, self.work
        label = record_function if torch._C._autograd._profiler_enabled() else nullcontext
        common = {} if status.alone else self._common(groups)
        report = self._report(common)  # it must be as long on all ranks
        with label(PREFIX + "agree"):
            total = status.exchange(capture, report, self.steps)
        status.check(total, common, capture, self.sums)
        halves = total.lacks_half_products == 0
        if common and halves != self.rule.half_products:  # the model may have been moved
            self.rule.half_products, self.groups.facts = halves, None
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
                    return False  # torch.distributed.checkpoint steps once, for the base's state
                raise reports.nothing_captured(self.steps)
        work.average = status.note_rows(total, capture)
        if not (work.average or total.has_gradients or registry.with_average):
            return False  # nothing has begun yet, and no entry of the state could hold a count
        # Drawn gradients belong to the sum of the terms, and not to their mean.
        square = 1.0 if total.drawn else report.terms**2
        work.of_gradients = square / total.terms if total.terms else 0.0
        work.seen = [a + b > 0 for a, b in zip(total.rows, total.crossed, strict=True)]
        work.exchanges, work.total, work.sections = True, total, registry.sections
        # Read after ranks have compared the groups: an error is then raised on all of them.
        decay_of = registry.values("factor_decay", groups)
        layers = [registry.layers[name] for name in work.average]
        arrivals = self.exchange.sums(self.sums, layers, work)
        while True:
            with label(PREFIX + "reduce"):  # a loop over the iterator would label averages, too
                factors = next(arrivals, None)
            if factors is None:
                break
            with label(PREFIX + "average"):
                averages.update(factors, work, decay_of, scale_free=self.rule.scale_free)
        return True

    def _report(self, common: dict[str, Any]) -> StepReport:
        capture, registry, sums, rule = self.capture, self.registry, self.sums, self.rule
        compared = capture.compared()  # first: it may find an error
        layers = [*registry.layers.values()]
        gradients = with_gradient(layers)
        for layer, graded in zip(layers, gradients, strict=True):
            # A gradient that the model's own zero_grad dropped, and no pass brought anew, leaves
            # sums behind that no backward pass has met: they would count in K.
            if not graded and layer in sums.passes:
                sums.drop(layer)
        each = [*sums.of_layer.values()]
        rows = [0.0] * (registry.sections[-1].stop if layers else 0)
        crossed = rows.copy()
        for layer, of_layer in sums.of_layer.items():
            at = registry.sections[layer.number]
            rows[at] = of_layer.count
            if of_layer.crossed is not None:
                crossed[at] = of_layer.crossed.count
        deferred = [layer for layer in layers if registry.states[layer.name].deferred]
        checksum = self.status.checksum(common) if common else 0
        devices = {device for device, _ in self.groups.places}
        return StepReport(
            captured=capture.backwards > 0 or capture.was_paused,
            unread=capture.ran and not capture.tapped and not capture.was_paused,
            has_gradients=any(gradients),
            drawn=capture.draws > 0 or any([x.drawn for x in each]),
            trained=any([x.trained for x in each]),
            elsewhere=compared,
            lacks_half_products=bool(common) and rule.lacks_half_products(devices),
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

    def refresh(self) -> None:
        """Let owners decompose due factors, and gradient workers receive the new state."""
        # After all sums: other ranks would wait for terms of an owner that decomposes in between.
        rule, group_of, registry, work = self.rule, self.groups.of, self.registry, self.work
        damping_of, refreshed = self.damping_of, self.slot.refreshes
        with_average = [(name, x) for name, x in registry.states.items() if x.has_average]
        work.refresh = [name for name, x in with_average if name in refreshed or not x.has_state]
        if not work.refresh:
            return
        layers = [registry.layers[name] for name in work.refresh]
        states = [registry.states[name] for name in work.refresh]
        again = {layer for layer in layers if registry.states[layer.name].failures}
        reduce = functools.partial(self.ranks.reduce_on_device, kind="second_order")
        reduce_means = reduce if registry.splits_owners else None  # else each owner has both
        shifts = self.exchange.refresher.shifts(group_of, layers, damping_of, reduce_means)
        try:
            with stage("decompose"):
                self.exchange.refresher.decompose(self.groups.all, {*layers}, again, shifts)
        except Exception as error:
            self.status.note_failure(error, "decomposing factors")
        with stage("share"):  # also after a failure: the other ranks wait for this one's part
            if self.ranks.grid.workers > 1:
                self.exchange.share_state(layers)
            if rule.renews:
                rule.renew(group_of, layers, damping_of)
        if not all([state.has_state for state in states]):
            self.groups.facts = None
        for state in states:
            # Only the owner knows of a failure until the next exchange: all ranks must count the
            # layer as refreshed until then, or their plans would differ.
            state.has_state = state.deferred = True
            state.refreshes += 1
            state.before, state.refreshed = state.refreshed, work.number

    def _pass_over(self, groups: list[ParamGroup], base: Any) -> None:
        # The base steps its own parameters in a step that does not count. The plan has all layers:
        # with fewer, the base would begin moments that K-FAC keeps later.
        self.capture.reset()
        self.groups.compile(groups, base, all_layers=True)
        plan, self.groups.facts = self.groups.plan, None
        base.open(plan)
        plan.present = [False] * len(plan.parameters)
        base.step_uncovered(plan)
        self._aim()

    # ---- slots ----

    def _aim(self) -> None:
        # Read no rank's own facts: if ranks noted other late layers, only some would exchange.
        registry = self.registry
        registry.missing, registry.late = [], []
        for layer, state in zip(registry.layers.values(), registry.states.values(), strict=True):
            # A first average is expected of any pass, for a while, and not of a slot alone.
            is_missing = not state.has_average and state.unseen < PATIENCE
            if is_missing:
                registry.missing.append(layer)
            # The slot met no pass.
            if layer.parameters and (is_missing or 0 < state.missed < GIVEN_UP):
                registry.late.append(layer)
        self._choose()

    def _choose(self) -> None:
        # Look up the next step that gathers or refreshes; arm the hooks if its passes come next.
        parameters, number, registry = self.hyperparameters, self.steps, self.registry
        if parameters.pending and self.status.alone:
            parameters.take_intervals(number)
        gathering, refreshing = parameters.in_force.values()
        late = bool(registry.late)
        due, refreshed, following = self.schedule.at(number, gathering, refreshing, late=late)
        if due is None and not refreshed:
            number = following
            due, refreshed, _ = self.schedule.at(number, gathering, refreshing, late=late)
        gathers: list[Layer] | None = None
        sample: Sample | None = None
        if due is not None:
            gathers = [*[registry.layers[name] for name in due], *registry.late]
            fraction = parameters.values["statistics_fraction"]
            if "statistics_fraction" in parameters.schedules:
                fraction = parameters.upcoming("statistics_fraction", number)
            if fraction != 1:
                # A layer gathers once in an interval, and early: each time it takes the next rows.
                early = [x for x in self.options.early if x <= number and x % gathering]
                sample = fraction, number // gathering + len(early)
        self.slot = Slot(number, gathers, refreshed, sample)
        self.capture.arm(gathers if number == self.steps else None, registry.missing, sample)

    # ---- the model ----

    def _common(self, groups: list[ParamGroup]) -> dict[str, Any]:
        # Return the values that must be alike on all ranks. Errors name the first that differs.
        values: dict[str, Any] = {}
        for i, group in enumerate(groups):
            for name in sorted(group, key=lambda x: (x != "lr", str(x))):  # lr before what follows
                value = group[name]
                if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
                    value = value.item()  # the host would wait for another device's
                if isinstance(value, int | float | str | tuple | None):
                    # 1 as 1.0: equal numbers must have equal texts
                    value = float(value) if is_real(value) else value
                    values[f"{name} of parameter group {i}"] = value
        parameters = self.hyperparameters
        values |= {"steps": self.steps} | {name: parameters.values[name] for name in SHARED}
        for name in parameters.in_force:
            if name in parameters.schedules:
                values[f"{name} of the next step"] = parameters.upcoming(name, self.steps + 1)
        layers = self.registry.layers.values()
        return values | {f"trained weight, bias of {x.name!r}": x.covers for x in layers}

    def rebuild(self, groups: list[ParamGroup]) -> None:
        """Match model and groups anew; layers that stay as they were keep their state."""
        registry = self.registry
        covered: dict[str, Layer] = {}
        compares = not self.status.alone and (self._is_built or self._base is not None)
        registry.match_groups(groups)
        error: Exception | None = None  # raised by all ranks, where they compare
        try:
            covered = registry.cover(groups, first=not self._is_built)
        except ValueError as problem:
            if not compares:
                raise
            error = problem
        if compares:
            values = {"base optimizer": self._base, **self._common(groups)}
            values |= self.options.described()
            for x in covered.values():
                dtype = f", {x.covers}, {x.parameters[0].dtype}" if x.parameters else ""
                values[f"layer {x.name!r}"] = f"{x!r}{dtype}"
            for i, group in enumerate(groups):
                values[f"sizes in parameter group {i}"] = [p.numel() for p in group["params"]]
            # A rank with meta parameters would refuse its step alone, and the others would wait.
            values["parameters on the meta device"] = sorted(registry.on_meta)
            agree.compare(self.ranks, values, "models and options", error)
        registry.rebuild(covered, groups)
        self.damping_of = registry.values("damping", groups)
        # Sums of layers that are gone would be counted in K.
        for layer in self.sums.passes.keys() - set(registry.layers.values()):
            self.sums.drop(layer)
        new = Capture(
            unwrapped(registry.model),
            list(registry.layers.values()),
            self.sums,
            reduce=self.options.weight_sharing == "reduce",
            counts=not self.rule.scale_free,
            precision=self.options.statistics_precision,
            # An error of the backward pass waits for the step: one rank that raised alone would
            # leave the others waiting.
            keep_errors=not self.status.alone,
        )
        if self._is_built:  # this may be between a backward pass and its step
            self.capture.detach()  # else both would count a pass
            new.resume(self.capture)
        self.capture = self.hyperparameters.capture = new
        self.allocate()
        self._aim()

    def allocate(self) -> None:
        """Lay out all tensors anew; layers that have an average keep their values."""
        options, registry = self.options, self.registry
        registry.find_facts()
        self.groups.allocate()
        self.exchange.refresher.notes.clear()  # those on their way are of other tensors
        self.groups.facts = None
        self.schedule = Schedule([*registry.facts.values()], options.staggered, options.early)
        # All entries of the optimizer's state share one count. Only a new tensor tells that the
        # entries are to have views of the new stacks: never fill the former one here.
        self.step_count = torch.tensor(self.steps, device="cpu")

    def _forget(self, layers: Collection[Layer]) -> None:
        # All ranks forget the same layers, or they would lay their tensors out differently.
        for layer in layers:
            self.registry.states[layer.name].reset()
        if layers:
            self.allocate()
            self._aim()

    def discard(self) -> None:
        """Drop the statistics gathered since the last step, as their gradients are dropped."""
        self.capture.break_off()
        if self.sums.passes:  # else drawn gradients still wait for their backward pass
            self.capture.draws = 0
        self.sums.of_layer.clear()
        self.sums.passes.clear()

    # ---- loading ----

    def resume(self, steps: int) -> None:
        """Go on from a loaded step count."""
        self.steps, self.unsettled = steps, [None]
        self.step_count = torch.tensor(steps, device="cpu")
        for state in self.registry.states.values():  # owners tell what a save had still to tell
            state.deferred |= self.status.alone
        self.hyperparameters.take_intervals(self.steps)
        self.status.proven = False  # the next step compares weights and gradients
        self.status.graded.clear()
        self._aim()

    def settle_load(self, groups: list[ParamGroup], momenta: Collection[Tensor]) -> list[Layer]:
        """Compare loaded states; return layers that only some ranks have, which begin anew.

        ``momenta`` are the parameters whose momenta this rank has. All other differences raise.
        """
        if self.status.alone or not self.unsettled:
            self.unsettled = []
            return []
        (refused,) = self.unsettled
        # Ranks that have loaded nothing join this exchange: if only some have loaded, all raise.
        report = self._report(self._common(groups))
        total = self.status.exchange(self.capture, report, self.steps, loads=True)
        states, (stepped, stored) = self.registry.states, self.groups.stepped()
        parts: dict[str, list[bool | None]] = {}
        for layer in self.layers.values():
            state = states[layer.name]
            # Owners tell in the next exchange: in this one, all ranks must send as many numbers.
            state.deferred = True
            parts[layer.name] = [state.has_average, state.has_state]
            for p in layer.parameters:
                # A rank that only receives directions keeps no momentum, and has no say.
                receives = p in stepped and p not in stored
                parts[layer.name].append(None if receives else p in momenta)
        of_ranks = self.ranks.gather_objects(parts, "agreeing on a loaded state")
        anew: list[Layer] = []
        for layer in self.layers.values():
            columns = zip(*[parts[layer.name] for parts in of_ranks], strict=False)
            if any([len({*column} - {None}) > 1 for column in columns]):
                anew.append(layer)
                states[layer.name].failures = 0
                # The ranks that lack a layer have gathered it since, alone: K has their terms.
                self.sums.drop(layer)
        self._forget(anew)
        values = self._common(groups) | self.options.described()
        values |= {
            f"missed slots, failures of {n!r}": (x.missed, x.failures) for n, x in states.items()
        }
        must = "call consolidate_state_dict() before a save, and load the same state on all ranks"
        doing = "loading a state"
        agree.compare(self.ranks, values, "loaded states", refused, doing, told=True, remedy=must)
        self.unsettled = []  # not before: an error above leaves the load unsettled
        self.rule.half_products = not total.lacks_half_products
        self.hyperparameters.take_intervals(self.steps)
        self._aim()
        return anew


def make_rule(options: Options, length: Length) -> Rule:
    dtype = options.inv_dtype
    if options.compute_method == "polar":
        return rules.PolarRule(dtype, length)
    if options.compute_method == "inverse":
        return rules.CholeskyRule(dtype, options.damping_split or "pi")
    if options.compute_eigenvalue_outer_product:
        return rules.StoredProductRule(dtype)
    return rules.EigenRule(dtype)
