"""The order of one K-FAC step: report, agree, plan, execute."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.hooks import Capture
from ..comm import agreement
from ..comm.ranks import Ranks
from ..comm.sharding import is_sharded, local
from ..curvature import averages, rules
from ..curvature.group import Group, ParameterStack, alike, by_device, stack_key, strides
from ..curvature.lengths import BaseNumbers, Length, Share, norms_of
from ..curvature.refresh import Refresher
from ..curvature.rules import Rule
from ..curvature.sums import FactorSums
from ..layers import Layer, sampling
from ..plan.moves import Sizes, gradient_rounds
from ..plan.routes import Round, chunks, grouped
from ..plan.schedule import Schedule
from ..plan.step_plan import AgreedStep, StepPlan, StepReport, plan_step
from ..stages import stage, staged
from . import coverage, reports
from .coverage import CoverageReport
from .exchange import Exchange
from .hyperparameters import Hyperparameters, rate_of, refuse_name
from .options import SHARED, Options
from .options import Group as ParamGroup
from .plan import CLIP_TERMS, Plan, products
from .registry import Registry
from .status import Status
from .transport import Local, Rows, Shards
from .view import Forward, View

Parameters = Callable[[], Collection[Tensor]]  # some of the model's, asked for when they are needed
# What a plan depends on beside the parameters themselves.
_LAYOUT = operator.attrgetter("device", "dtype"), operator.methodcaller("stride")
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
        self.sizes = sizes_of(rule, options)
        self.refresher = Refresher(rule)
        self.exchange = Exchange(self.ranks, self.registry, rule, self.sizes)
        self.groups: list[Group] = []  # of all active layers
        self.group_of: dict[Layer, Group] = {}
        self._chunks: list[list[Layer]] = []  # sharded layers whose gradients travel together
        self._rounds: list[tuple[torch.device, list[Round]]] = []  # of new gradients to receivers
        self.places: list[tuple[torch.device, torch.dtype]] = []  # of the layers, when laid out
        self.plan: Plan | None = None
        self.compilations = 0
        self._held: Any = None  # what the plan's entries held after the last step
        self._facts: Any = None  # that the plan was compiled from
        self.work = StepPlan(-1)  # of the last step, on averages and state
        # Numbers of the last step; the clip is on its device.
        self.clip: Tensor | None = None  # ν
        self.damping_of: Callable[[Layer], float] | None = None
        self.published: dict[Layer, list[int]] = {}  # flags as the optimizer's state has them
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

    def step(self, groups: list[ParamGroup] | None = None, base: Any = None) -> None:
        """Take one step: agree, renew factors, and step the parameters by new gradients.

        ``base`` is the base optimizer's part in it.
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
        facts = self._read_facts(groups, base)
        if facts != self._facts and self.places != registry.devices:
            self.allocate()

        # Agree: the only decision that ranks take together
        agreed = self._agree(groups)
        if agreed is None:
            # The step does not count. The base must not begin moments that K-FAC keeps.
            self.capture.reset()
            plan = self.compile(groups, base, all_layers=True)
            base.open(plan)
            base.rest(plan, [False] * len(plan.parameters))
            self.plan = None
            return
        states = registry.states
        self.work = work = plan_step(self.steps, agreed, states, self._slot())

        # Factors: sums enter the owners' averages; due ones are decomposed and shared
        if work.changes_factors or self.rule.reads_damping:
            self.damping_of = registry.values("damping", groups)
        if work.changes_factors:
            self._renew(work, agreed, registry.values("factor_decay", groups))
        if work.exchanges:
            layers = [x for group in self.groups if group.applied for x in group.layers]
            reports.name_layers_without_statistics(layers, states, self.status.named)

        # Gradients: stacked by shape, preconditioned, handed to receivers
        if self.plan is None or facts != self._facts or self._held != base.held(self.plan):
            self.plan, self._facts = self.compile(groups, base), facts
        self.direct(self.plan, groups, base)
        self._held = base.held(self.plan)
        if work.exchanges:
            self.hyperparameters.take_intervals(self.steps + 1)
            name_unseen(self.capture, registry)
        self.steps += 1
        self.status.note_weights(self.steps)
        self.step_count.fill_(self.steps)
        self.sums.clear()  # a step without statistics may have passes, too
        self.capture.reset()
        self._choose()

    def direct(self, plan: Plan, groups: list[ParamGroup], base: Any) -> None:
        """Step the plan's parameters along new directions or gradients; the base steps the others."""
        numbers = base.follow(plan)
        for transport in plan.transports:
            transport.exchange(functools.partial(self._make, numbers))
        with stage("length"):
            kl_clip, self.clip = self.hyperparameters.kl_clip, None
            if self.rule.makes_directions or kl_clip is None or plan.whole is None:
                plan.finish(self.rule.length, numbers)
            else:
                alphas = [
                    rate_of(x) if x["kl_clip_lr"] == "current" else x["kl_clip_lr"] for x in groups
                ]
                self.clip = plan.clip(kl_clip, alphas)
        base.let_go(plan)
        with stage("base step"):
            base.rest(plan, numbers.present)
            base.descend(plan, numbers.present)
        plan.clear()

    def _make(self, base: BaseNumbers, share: Share) -> None:
        """Fill a share's new gradients, or directions with their lengths, and the blocks' terms."""
        rule, damping_of = self.rule, self.damping_of
        with stage("precondition"):
            matrices = [group.collect("ahead") for group in share.groups]
            if rule.length is None:
                share.directions = [*map(rule.apply, share.groups, matrices, repeat(damping_of))]
                terms = [products(*x) for x in zip(matrices, share.directions, strict=True)]
                none = share.roots.new_empty(len(share.roots), 0)
                share.terms = torch.cat(terms) if self.sizes.terms else none
                return
            # Squares of tiny and of huge numbers would be zero or infinite.
            peaks = norms_of(matrices, math.inf)
            peaks = torch.where(peaks == 0, 1.0, peaks)
            torch._foreach_div_(matrices, list(peaks[:, None, None].split(share.sizes)))
            with rule.precision(share.like.device):
                share.directions = [*map(rule.apply, share.groups, matrices, repeat(damping_of))]
            with stage("length"):
                share.terms = rule.length.give(share, matrices, peaks, base)

    # ---- the plan ----

    def _read_facts(self, groups: list[ParamGroup], base: Any) -> Any:
        """Return the facts that a plan depends on: parameters, their layouts, kept momenta.

        An id is safe here, since the plan holds the parameters.
        """
        lists = [group["params"] for group in groups]
        parameters = [*itertools.chain.from_iterable(lists)]
        facts = [[*map(fact, parameters)] for fact in (id, *_LAYOUT)]
        return facts, [*map(len, lists)], [*map(base.keeps, groups)]

    def stepped(self, *, all_layers: bool = False) -> tuple[set[Tensor], set[Tensor]]:
        """Return the parameters that K-FAC steps in the base's place, and those with momenta here.

        All layers of these parameters have a state; ``all_layers`` takes all for ready.
        """
        registry = self.registry
        if not self.rule.makes_directions:
            return set(), set()
        layers = registry.active if all_layers else registry.with_state
        chosen, sharded = set(layers), registry.placements.sharded
        raw = {p for x in registry.active if x not in chosen for p in x.parameters}
        ready: set[Tensor] = {p for x in layers for p in x.parameters if p not in raw}
        here = [x for x in layers if x in sharded or self.group_of[x].applied]
        return ready, {p for x in here for p in x.parameters if p in ready}

    def compile(self, groups: list[ParamGroup], base: Any, *, all_layers: bool = False) -> Plan:
        """Return the plan of the steps to come, for the layers that have a state."""
        registry, sharded = self.registry, self.registry.placements.sharded
        layers = dict.fromkeys(registry.active if all_layers else registry.with_state)
        ready, mine = self.stepped(all_layers=all_layers)
        if not self.rule.makes_directions:
            ready = {p for x in layers for p in x.parameters}
            here = [x for x in layers if x in sharded or self.group_of[x].applied]
            mine = {p for x in here for p in x.parameters}
        number_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        kinds: dict[Any, dict[Tensor, Tensor]] = {}  # parameters, and this rank's parts
        for p in [p for g in self.groups for x in g.layers if x in layers for p in x.parameters]:
            if p in ready and p in number_of:
                part, apart = (local(p), id(p)) if is_sharded(p) else (p, None)
                layout = part.shape, strides(part), part.dtype, part.device
                kinds.setdefault((layout, number_of[p], p in mine, apart), {})[p] = part
        former = {} if self.plan is None else {x.key: x for x in self.plan.stacks}
        stacks = []
        for (_, number, keeps, _), parts in kinds.items():
            stack = ParameterStack([*parts], next(iter(parts.values())), number, mine=keeps)
            stacks.append(former.get(stack.key, stack))
        rows = {p: (stack, i) for stack in stacks for i, p in enumerate(stack.parameters)}
        room: dict[ParameterStack, int] = {}
        for group in self.groups:
            if group.layers[0] not in sharded:
                group.place([x for x in group.layers if x in layers], rows, room)
        for stack in stacks:
            stack.is_partial = room.get(stack, 0) < math.prod(stack.shape)
        rest = [[p for p in group["params"] if p not in rows] for group in groups]
        plan = Plan(stacks, rest)

        def share_of(some: Sequence[Group]) -> Share:
            return Share(some, plan.index, number_of)

        terms = self.sizes.terms
        if self._rounds and layers:
            plan.transports.append(Rows(self._rounds, self.ranks, terms, self.group_of, share_of))
        elif self.ranks.grid.columns == 1:
            plan.transports.append(Local(self.groups, share_of))
        begun = [chunk for chunk in self._chunks if not layers.keys().isdisjoint(chunk)]
        if begun:
            part = registry.placements, self.ranks, terms, rows, self.group_of, share_of
            measures = self.rule.makes_directions
            plan.transports.append(Shards(begun, *part, measures=measures))
        every = [group for transport in plan.transports for group in transport.groups]
        plan.whole = share_of(every) if every and terms else None
        base.adopt(plan)
        base.part_from(plan)
        for transport in plan.transports:
            transport.take_former()
        self.compilations += 1
        return plan

    def _exchanges(self) -> bool:
        """Return whether ranks have something to agree on in this step.

        One process also looks at its sums; several ranks must know the answer without asking.
        """
        capture = self.capture
        alone = self.ranks.world == 1 and (self.sums.of_layer or capture.draws)
        if alone or capture.wanted:
            return True
        return any([not x.has_average and x.waits for x in self.registry.states.values()])

    def _agree(self, groups: list[ParamGroup]) -> AgreedStep | None:
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
        self.refresher.forget_answers(self.group_of, told)
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
        graded, all_sums = [*map(has_gradient, sections)], sums.of_layer.values()
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
            stale=self.refresher.answers(self.group_of, self.registry.deferred),
            rows=sums.rows(sections),
            crossed=sums.rows(sections, crossed=True),
        )

    def _renew(
        self, work: StepPlan, agreed: AgreedStep, decay_of: Callable[[Layer], float]
    ) -> None:
        """Bring averages and state up to date.

        Decompositions wait for all sums. If an owner decomposed after its first sums, the other
        ranks would wait for its terms of the next sums.
        """
        layers, damping_of = self.registry.layers, self.damping_of
        assert damping_of is not None
        average, scale_free = [layers[name] for name in work.average], self.rule.scale_free
        for arrived in staged("reduce", self.exchange.sums(self.sums, average, agreed)):
            averages.update(self.groups, arrived, agreed, decay_of, scale_free=scale_free)
        self.sums.clear()
        due = [layers[name] for name in work.refresh]
        if not due:
            return
        shifts = self.exchange.damping_shifts(due, damping_of)
        try:
            self.refresher.decompose(self.groups, work.refresh, work.again, shifts)
        except Exception as error:
            self.status.note_failure(error, "decomposing factors")
        self.exchange.share_state(due, damping_of)
        if not all(self.registry.states[name].has_state for name in work.refresh):
            self.plan = None
        for state in [self.registry.states[name] for name in work.refresh]:
            state.has_state = state.deferred = True
            state.refreshes += 1
            state.before, state.refreshed = state.refreshed, work.number

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
        self.capture.sample = sampling.sample_of(fraction, rounds)
        due, states = self.schedule.gathers(self.steps, interval), self.registry.states
        # Leave out layers without a pass for long: else ranks might exchange in every step.
        limit = _GIVEN_UP * interval
        self.capture.wanted = frozenset(
            [x for x in self.registry.active if x.name in due or 0 < states[x.name].missed < limit]
        )

    # ---- values that must be alike on all ranks ----

    def _common(self, groups: list[ParamGroup]) -> dict[str, Any]:
        if self.ranks.world == 1:
            return {}  # nobody to compare them with
        values, parameters = reports.of_groups(groups), self.hyperparameters
        values |= {"steps": self.steps} | {name: getattr(parameters, name) for name in SHARED}
        values |= parameters.scheduled_intervals(self.steps + 1)
        layers = self.registry.layers.values()
        return values | {f"trained weight, bias of {x.name!r}": x.covers for x in layers}

    def _lacks_half_products(self) -> bool:
        return self.rule.lacks_half_products({device for device, _ in self.places})

    # ---- the model ----

    def rebuild(self, groups: list[ParamGroup]) -> None:
        """Match model and parameter groups anew; layers that stay as they were keep their state."""
        registry = self.registry
        registry.match_groups(groups)
        described = self._common(groups) | self.options.described()
        found = self.status.cover(groups, described, self._identity, first=not self._is_built)
        registry.rebuild(found, groups)
        for layer in self.sums.of_layer.keys() - set(registry.layers.values()):
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
        self.capture.missing.add(layer)

    def allocate(self) -> None:
        """Lay out all tensors anew; layers that have an average keep their values."""
        registry, ranks, options = self.registry, self.ranks, self.options
        placements, active = registry.placements, registry.active
        placements.find_facts(registry.layers.values())
        values = {
            x: dict(self.group_of[x].views(x)) for x in registry.with_average if x in self.group_of
        }
        whole = [layer for layer in active if layer not in placements.sharded]
        columns, facts, self._rounds = ranks.grid.columns, placements.facts, []
        lists = alike(whole) if columns == 1 else []
        for same in by_device(whole) if columns > 1 else ():
            row, limit = ranks.grid.receivers_of(ranks.rank), ranks.bucket_bytes
            rounds = gradient_rounds(same, facts.__getitem__, self.sizes, row, limit)
            self._rounds.append((same[0].parameters[0].device, rounds))
            lists += [x for (bucket,) in rounds for item in bucket.items for x in item.content]
        sharded = [layer for layer in active if layer in placements.sharded]
        # Each rank has only a part of the bytes of a chunk.
        limit = ranks.bucket_bytes * ranks.world
        parts = chunks(sharded, lambda x: facts[x].gradient * facts[x].itemsize, limit)
        self._chunks = [*parts]
        for chunk in self._chunks:
            owned = grouped(chunk, lambda x: placements.owner(x, "g")).values()
            lists += [same for layers in owned for same in alike(layers)]
        self.groups = []
        for layers in lists:
            owner = placements.owner(layers[0], "g")
            group = Group(layers, applied=owner % columns == ranks.rank % columns)
            self.groups.append(group)
            if group.applied:
                group.allocate(
                    self.sizes,
                    options.factor_dtype,
                    self.rule.dtype,
                    lambda layer, side: placements.owner(layer, side) == ranks.rank,
                    at_identity=options.kaisa_scaling,
                )
        self.group_of = {layer: group for group in self.groups for layer in group.layers}
        self.exchange.group_of = self.group_of
        self.refresher.forget_answers(self.group_of)  # those on their way are of former stacks
        self.places, self.plan = registry.devices, None
        for layer in values.keys() & self.group_of.keys():
            for name, view in self.group_of[layer].views(layer):
                if name in values[layer]:
                    view.copy_(values[layer][name])
        at_once = self.options.at_once(self.ranks.world)
        self.schedule = Schedule([*registry.placements.facts.values()], at_once, self.options.early)
        # All entries of the optimizer's state share one count. They are to have views of the new
        # stacks: publish them anew.
        self.step_count = torch.tensor(self.steps, device="cpu")
        self.published.clear()

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

    def settle_load(self, groups: list[ParamGroup], momenta: Parameters) -> list[Layer] | None:
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
        if self.sums.of_layer:  # else drawn gradients still wait for their backward pass
            self.capture.draws = 0
        self.sums.clear()


def has_gradient(layer: Layer) -> bool:
    """Return whether a layer has a gradient: of the weight, of the bias, or of both."""
    own = layer.parameters
    return bool(own) and (own[0].grad is not None or own[-1].grad is not None)


def name_unseen(capture: Capture, registry: Registry) -> None:
    """Tell capture which layers lack an average: an exchange, a load or a reset changes them."""
    layers, states = registry.layers.values(), registry.states
    without = [x for x in layers if not states[x.name].has_average]
    capture.missing = {x for x in without if states[x.name].waits}
    unseen = [x for x in without if x in capture.missing and states[x.name].unseen]
    capture.look_around(coverage.unwrapped(registry.model), unseen)


def sizes_of(rule: Rule, options: Options) -> Sizes:
    """Return what the bytes of this rule depend on under these options."""
    dtypes, clips = (options.factor_dtype, options.comm_dtype), options.kl_clip is not None
    average, wire = (None if dtype is None else dtype.itemsize for dtype in dtypes)
    terms = rule.sizes.terms if rule.makes_directions else CLIP_TERMS * clips
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
