"""The exchanges of a step: numbers that ranks agree on, sums to owners, state to workers."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from . import agree, reports
from .capture import fisher
from .capture.hooks import Capture
from .comm import sharding
from .comm.ranks import Ranks
from .compiled import Groups
from .coverage import unwrapped
from .curvature import refresh
from .curvature.averages import FactorSums
from .curvature.group import Side, device_of
from .curvature.refresh import EMPTY, FAILED, REJECTED, Refresher
from .curvature.rules import Rule
from .layers import Layer
from .linalg.moments import unpack
from .options import Options
from .plan.facts import FactorFacts
from .plan.routes import Bucket, grouped, state_rounds, sum_buckets
from .plan.schedule import HEAD, StepPlan, StepReport
from .registry import Registry
from .stages import PREFIX

_IDLE = 3  # steps before any gradient, after which a warning comes
_PATIENCE = 20  # gathering steps with a gradient, but without a pass, before a layer is named


class Comparison:
    """Values, gradients and weights that all ranks must have alike; one process compares none."""

    def __init__(self, ranks: Ranks, registry: Registry, verify_every: int | None) -> None:
        self._ranks, self._registry, self._verify_every = ranks, registry, verify_every
        # Checksums of weights, on their way to the host.
        self._noted: tuple[list[str], refresh.Note] | None = None
        self._codes: dict[str, int] = {}  # checksums that the next exchange compares
        # Since the last exchange: the layers with a gradient, and the step from which they had one.
        self._graded: list[tuple[int, list[str]]] = []
        self._proven = False  # weights and gradients were found alike on all ranks

    def begin(self) -> None:
        """Start anew after a load: the next step compares weights and gradients."""
        self._proven = False
        self._graded.clear()

    def note_gradients(self, number: int) -> None:
        """Note the layers with a gradient in this step, which ranks compare in the next exchange.

        Steps that gather nothing must not ask: without the notes, weights would part unseen.
        """
        layers = self._registry.layers
        graded = [*itertools.compress(layers, with_gradient(layers.values()))]
        if not self._graded or self._graded[-1][1] != graded:
            self._graded.append((number, graded))

    def _whole_weights(self) -> dict[str, Tensor]:
        covered = {p for layer in self._registry.active for p in layer.parameters}
        named = unwrapped(self._registry.model).named_parameters()
        return {n: p for n, p in named if p in covered and not sharding.is_sharded(p)}

    def note_weights(self, steps: int) -> None:
        """Note checksums of the weights every ``verify_every`` steps; the host does not wait."""
        due = self._verify_every and steps % self._verify_every == 0
        whole = self._whole_weights() if due else {}
        if whole:
            names = [f"parameter {name!r} in step {steps}" for name in whole]
            self._noted = names, refresh.noted(agree.checksums(whole.values()))

    def checksum(self, common: dict[str, Any]) -> int:
        """Return a checksum of the values that must be alike, and of all notes."""
        if self._noted is not None:
            names, note = self._noted
            self._codes = dict(zip(names, refresh.read(note), strict=True))
            self._noted = None
        return agree.checksum([common, self._codes, self._graded])

    def check(self, total: StepReport, common: dict[str, Any]) -> None:
        """Raise if values differ among the ranks, or if a gradient is missing on some."""
        codes, self._codes = self._codes, {}
        graded, self._graded = self._graded, []
        if not agree.alike(self._ranks.world, total.checksum, total.squares):
            self._raise_missing(graded, common["steps"])
            agree.raise_unlike(
                self._ranks, codes, "average gradients over all ranks before every step()"
            )
            agree.raise_difference(self._ranks, common, "hyperparameters")
        if not self._proven:
            # Compare weights and gradients in the first step: perhaps no wrapper aligned them.
            whole = self._whole_weights()
            agree.compare_tensors(
                self._ranks,
                {f"parameter {name!r}": p for name, p in whole.items()},
                "give all ranks the same weights, by DistributedDataParallel or by one seed",
            )
            gradients = {n: p.grad for n, p in whole.items() if p.grad is not None}
            agree.compare_tensors(
                self._ranks,
                {f"the gradient of {name!r}": x for name, x in gradients.items()},
                "average gradients over all ranks before step(), or use DistributedDataParallel",
            )
            self._proven = True

    def _raise_missing(self, graded: list[tuple[int, list[str]]], number: int) -> None:
        """Raise an error that names the first layer whose gradient was missing on some ranks."""
        of_ranks = self._ranks.gather_objects(graded, "looking for missing gradients")
        steps = {step for notes in of_ranks for step, _ in notes}
        first = max(notes[0][0] for notes in of_ranks)  # ranks may have taken other steps
        for step in sorted(step for step in steps if step >= first):
            present = [[names for since, names in x if since <= step][-1] for x in of_ranks]
            for name in self._registry.layers:
                without = [rank for rank, names in enumerate(present) if name not in names]
                if not 0 < len(without) < self._ranks.world:
                    continue
                drift = "would drift apart"
                if step < number:
                    drift = f"may have drifted apart since step {step}: load an older checkpoint"
                raise RuntimeError(
                    f"layer {name!r} has no gradient on ranks {without}, but has one on other "
                    f"ranks, so weights {drift}; average gradients over all ranks before step(), "
                    "a missing one as zero, or use DistributedDataParallel with "
                    "find_unused_parameters=True"
                )

    # ---- after a load ----

    def compare_loaded(
        self, lacks_half_products: bool, momenta: Collection[Tensor]
    ) -> tuple[list[Layer], list[Layer], list[Layer], bool]:
        """Agree on loaded states; note missed slots and failures.

        ``momenta`` are the parameters that have one on this rank. Return the layers whose averages
        some rank lacks; of these, layers whose momenta only some ranks have; layers whose
        statistics, since the load, only some ranks gathered; and whether some rank lacks products
        in bfloat16.
        """
        registry, world = self._registry, self._ranks.world
        layers, states = list(registry.layers.values()), list(registry.states.values())
        missed = [float(state.missed) for state in states]
        columns: Any = [
            [state.has_average for state in states],
            [state.has_state for state in states],
            missed,
            [n**2 for n in missed],
            [state.failures for state in states],
            [any(p in momenta for p in layer.parameters) for layer in layers],
            [lacks_half_products] * len(layers),
        ]
        numbers = torch.tensor(columns, dtype=torch.float64, device="cpu").flatten()
        totals = self._ranks.sum_numbers(numbers, "agreeing on a loaded state")
        *columns, lacking = totals.view(len(columns), -1).tolist()
        absent, uneven, in_part = list[Layer](), list[Layer](), list[Layer]()
        for layer, state, averages, with_state, total, squares, failures, kept in zip(
            layers, states, *columns, strict=True
        ):
            if not agree.alike(world, total, squares):
                state.missed = 1
                in_part.append(layer)
            is_uneven = 0 < kept < world and with_state < world
            if is_uneven:  # gradient workers would begin with other momenta
                uneven.append(layer)
            if averages < world or is_uneven:
                absent.append(layer)
                if averages:  # ranks with an average did not gather, but K has their terms
                    in_part.append(layer)
            elif with_state < world:
                state.has_state = False
            if failures:
                state.failures = round(failures / world)
        return absent, uneven, in_part, any(lacking)


class Status:
    """The exchanges of numbers in which ranks agree; an error is raised on all ranks or on none."""

    def __init__(self, ranks: Ranks, registry: Registry, options: Options, *, alone: bool) -> None:
        self._ranks, self._registry = ranks, registry
        self._max_failures = options.max_failures
        self.comparison = None if alone else Comparison(ranks, registry, options.verify_every)
        self._idle = 0  # steps before any gradient; -1 once there was one
        self.silent = 0  # gathering steps since a layer saw a backward pass
        # The first error since the last exchange, and what it came from.
        self._failure: tuple[Exception, str] | None = None
        self.named: set[Layer] = set()  # layers that a message named as without statistics

    # ---- before the step ----

    def note_failure(self, error: Exception, doing: str) -> None:
        """Keep an error for the next exchange, where all ranks raise it.

        If this rank raised the error alone, the other ranks would wait.
        """
        if self.comparison is None:
            raise error
        self._failure = self._failure or (error, doing)
        text = f"{doing} failed on rank {self._ranks.rank}: {error!r}. All ranks raise this error"
        warnings.warn(f"{text} in K-FAC's next exchange", stacklevel=4)

    def exchange(
        self, capture: Capture, report: StepReport, number: int, *, loads: bool = False
    ) -> StepReport:
        """Return the sum of all ranks' reports, in one all-reduce.

        With ``loads`` this rank has loaded a state, and all ranks raise unless all have.
        """
        if loads or self._failure is not None:
            report = report._replace(failed=True)
        parts: Any = report[HEAD:]
        numbers = [*report[:HEAD], *itertools.chain.from_iterable(parts)]
        label = record_function if torch._C._autograd._profiler_enabled() else nullcontext
        with label(PREFIX + "agree"):
            totals = numbers
            if self.comparison is not None:
                sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
                totals = self._ranks.sum_numbers(sums, f"agreeing on step {number}").tolist()
        rest = iter(totals[HEAD:])
        lists = [[*itertools.islice(rest, len(part))] for part in parts]
        total = StepReport(*totals[:HEAD], *lists)
        if total.failed and not (loads and total.failed == self._ranks.world):
            error: Exception | None
            if loads:
                why = "only some ranks have loaded a state: call load_state_dict() on all of them"
                error, doing = RuntimeError(why), "loading"
            else:  # the next step starts without the error
                error, doing, capture.errors.error = capture.errors.error, "capturing", None
                if error is None and self._failure is not None:
                    (error, doing), self._failure = self._failure, None
            agree.raise_together(self._ranks, error, doing)
        return total

    def check(
        self, total: StepReport, common: dict[str, Any], capture: Capture, sums: FactorSums
    ) -> None:
        """Raise if ranks or passes do not fit together; ``common`` must be alike on all ranks."""
        if self.comparison is not None:
            self.comparison.check(total, common)
        if total.drawn and total.trained:
            draws, capture.draws = capture.draws, 0
            trained = [layer.name for layer, x in sums.of_layer.items() if x.trained]
            fisher.raise_half(self._ranks, draws, trained)
        # Count steps before any gradient; users may take one to make the state.
        self._idle = -1 if total.has_gradients or self._idle < 0 else self._idle + 1
        if self._idle == _IDLE:
            agree.warn(
                self._ranks,
                f"step() was called {_IDLE} times, and no parameter of the optimizer has ever had "
                "a gradient: nothing is trained; is the optimizer built on the model that runs, "
                "and not on a copy of it?",
            )
        if total.elsewhere:
            reports.name_elsewhere(self._ranks, self._registry.states, capture.witness)

    def note_answers(self, flags: Iterable[float]) -> list[Layer]:
        """Note the outcomes of refreshes since the last exchange, as the factors' owners answer.

        ``flags`` are those of A and of G, of the layers that are asked. Return the layers of which
        something was told.
        """
        answers, states, most = iter(flags), self._registry.states, self._max_failures
        told: dict[Layer, int] = {}
        for layer in self._registry.layers.values():
            state = states[layer.name]
            if not state.deferred:
                continue
            state.deferred, flag = False, int(next(answers)) | int(next(answers))
            if flag:
                told[layer] = flag
            elif state.refreshes:  # since the load, if there was one
                state.failures = 0
        rejected = [layer.name for layer, flag in told.items() if flag & REJECTED]
        for name in rejected:
            states[name].rejected += 1
        if rejected:
            names = ", ".join(map(repr, rejected))
            text = f"statistics that were not finite have been left out for {names}"
            agree.warn(self._ranks, text)
        for layer, flag in told.items():
            state = states[layer.name]
            if flag & EMPTY:  # it begins as in the first step
                state.reset()
            if not flag & FAILED:
                continue
            state.failures += 1
            state.failed += 1
            state.refreshes -= state.refreshes > 0
            state.refreshed = state.before
            text = f"the refresh of layer {layer.name!r} failed, {state.failures} in a row"
            if most is not None and state.failures > most:
                raise RuntimeError(
                    f"{text} (max_failures={most}): its statistics are not finite or too "
                    "ill-conditioned; look for a loss that is not finite and for diverging "
                    "activations, raise damping or skip the layer with skip_layers"
                )
            agree.warn(
                self._ranks,
                f"{text}; the state before it, at first the identity, stays in use. See whether "
                "the loss is finite",
            )
        return list(told)

    def note_rows(self, total: StepReport, capture: Capture) -> list[str]:
        """Note the layers that have averages from now on; return those with rows on some rank.

        Let layers without a pass in their slot gather late: else they might never gather.
        """
        registry, states = self._registry, self._registry.states
        names, is_new = [], False
        for (name, layer), at in zip(registry.layers.items(), registry.sections, strict=True):
            plain, crossed = any(total.rows[at]), any(total.crossed[at])
            if plain or crossed:
                names.append(name)
                state, layer.turned = states[name], not plain
                state.has_average = True
                state.missed = state.missed_with_gradient = 0
            if plain and crossed and not layer.tied:  # it has sums of both directions from now on
                layer.tied = is_new = True
        if is_new:
            registry.placements.find_facts(registry.layers.values())
        begun = total.captured and any([state.has_average for state in states.values()])
        for state, graded in zip(states.values(), total.gradients, strict=True):
            if graded and not state.has_average and (begun or total.unread):
                state.unseen += 1
        seen = set(names)
        for layer in capture.wanted:
            state, has_gradient = states[layer.name], total.gradients[layer.number] > 0
            if not state.has_average or layer.name in seen:
                continue
            state.missed += 1
            state.missed_with_gradient += has_gradient
            steps = state.missed_with_gradient
            if steps == _PATIENCE and not capture.was_paused and has_gradient:
                agree.warn(
                    self._ranks,
                    f"layer {layer.name!r} has had a gradient in {steps} gathering steps, but no "
                    "pass went through its module, so older factors stay in use. The weight may be "
                    "used outside of its module's forward, or its gradient may always be zero; "
                    "call the module itself, freeze the weight, or name the layer in skip_layers",
                )
        return names


def with_gradient(layers: Iterable[Layer]) -> list[bool]:
    """Return which layers have a gradient: of the weight, of the bias, or of both."""
    return [
        bool(own := layer.parameters) and (own[0].grad is not None or own[-1].grad is not None)
        for layer in layers
    ]


class _PackedState(NamedTuple):
    """One factor's state as it travels."""

    side: Side
    slots: slice
    tensors: list[Tensor]


class Exchange:
    """Brings sums to owners and state to gradient workers."""

    def __init__(self, ranks: Ranks, registry: Registry, rule: Rule, groups: Groups) -> None:
        self._ranks, self._groups, self._registry = ranks, groups, registry
        self._rule, self.refresher = rule, Refresher(rule)

    def sums(
        self, sums: FactorSums, layers: Sequence[Layer], plan: StepPlan
    ) -> Iterator[list[tuple[Layer, Side, Tensor]]]:
        """Yield new values of the factors that this rank owns, as they arrive, by their place."""
        ranks, total, group_of = self._ranks, plan.total, self._groups.of
        places = [(x, plan.sections[x.number]) for x in layers if x.tied]
        tied = [x for x, at in places if any(total.rows[at]) and any(total.crossed[at])]
        leveled = layers if sums.travel else tied
        if sums.units and leveled:
            largest = functools.partial(ranks.reduce_on_device, kind="factors", op="MAX")
            sums.level(leveled, largest)
        if tied:
            sums.mix(tied, plan, functools.partial(ranks.reduce_on_device, kind="factors"))
        arrivals: Iterable[Iterable[tuple[Layer, str, Tensor]]]
        if sums.travel:
            arrivals = self._reduced(sums, layers, plan)
        else:
            chosen = [(x, side, x.turned) for x in layers for side in "ag"]
            values = zip(chosen, sums.take(chosen, plan), strict=True)
            arrivals = [[(x, side, value) for (x, side, _), value in values]]
        for arrived in arrivals:
            factors: dict[Any, list[tuple[Layer, Side, Tensor]]] = {}
            for layer, name, value in arrived:
                group = group_of[layer]
                place = factors.setdefault((value.device, value.dtype), [])
                place.append((layer, group.a if name == "a" else group.g, value))
            yield from factors.values()

    def _reduced(
        self, sums: FactorSums, layers: Sequence[Layer], plan: StepPlan
    ) -> Iterator[list[tuple[Layer, str, Tensor]]]:
        """Reduce sums to the factors' owners; yield those of this rank, some buckets at a time."""
        ranks, layer_of = self._ranks, self._registry.layers
        facts = [self._registry.placements.facts[layer] for layer in layers]
        wire = None if ranks.comm_dtype is None else ranks.comm_dtype.itemsize
        buckets = sum_buckets(facts, wire, ranks.world, ranks.bucket_bytes)

        def terms(bucket: Bucket[FactorFacts]) -> list[Tensor]:
            pairs = [(layer_of[factor.layer.name], factor.side) for factor in bucket.items]
            chosen = [(layer, side, layer.turned) for layer, side in pairs]
            return [term.flatten() for term in sums.take(chosen, plan)]

        loads = ((bucket, terms(bucket)) for bucket in buckets)
        for arrived in ranks.reduce_to_owners(loads, "factors"):
            values = []
            for factor, total in arrived:
                layer = layer_of[factor.layer.name]
                total = total.unflatten(0, (layer.blocks, -1))
                value = total if factor.diagonal else unpack(total, factor.n)
                values.append((layer, factor.side, value))
            yield values

    def share_state(self, layers: Sequence[Layer]) -> None:
        """Bring the owners' new state of these layers to all gradient workers."""
        ranks, rule, layer_of = self._ranks, self._rule, self._registry.layers
        facts = self._registry.placements.facts
        for same in grouped(layers, device_of).values() if ranks.grid.workers > 1 else ():
            renewed = [factor for layer in same for factor in facts[layer].factors]
            rounds = state_rounds(renewed, self._groups.sizes, ranks.grid, ranks.bucket_bytes)
            buckets = [x for x in itertools.chain(*rounds) if ranks.rank in x.sizes]

            # Generators, so that a packed triangle lives only until it has arrived.
            def packed(factor: FactorFacts) -> _PackedState:
                layer = layer_of[factor.layer.name]
                group = self._groups.of[layer]
                side, slots = group.a if factor.side == "a" else group.g, group.slots[layer]
                return _PackedState(side, slots, side.outgoing(slots, rule.sizes))

            cargo = ([*map(packed, x.content)] for bucket in buckets for x in bucket.items)
            for state in ranks.broadcast(rounds, cargo, device_of(same[0]), "second_order"):
                state.side.incoming(state.slots, rule.sizes, state.tensors)
