"""The exchanges of a step: numbers that ranks agree on, sums to owners, state to workers."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import agree, reports
from .account import state_rounds, sum_buckets
from .capture.hooks import Capture
from .comm import sharding
from .comm.ranks import Bucket, Ranks
from .compiled import Groups, Packet
from .curvature import refresh
from .curvature.averages import FactorSums
from .curvature.group import Side, device_of
from .curvature.refresh import EMPTY, FAILED, REJECTED, Refresher
from .curvature.rules import Rule
from .layers import Layer
from .linalg.moments import unpack
from .model import Registry, unwrapped
from .options import Options
from .plan.facts import FactorFacts, grouped
from .plan.schedule import StepPlan, StepReport

_PATIENCE = 20  # gathering steps with a gradient, but without a pass, before a layer is named

Factors = list[tuple[Layer, Side, Tensor]]


class Status:
    """The exchanges of numbers in which ranks agree; an error is raised on all ranks or on none."""

    def __init__(self, ranks: Ranks, registry: Registry, options: Options, *, alone: bool) -> None:
        self._ranks, self._registry, self.alone = ranks, registry, alone
        self._max_failures, self._verify_every = options.max_failures, options.verify_every
        self.silent = 0  # gathering steps since a layer saw a backward pass
        # The first error since the last exchange, and the action that it came from.
        self._failure: tuple[Exception, str] | None = None
        # The next exchange compares checksums of weights, which may be on their way to the host,
        # and the layers with a gradient, with the step from which they had one.
        self._noted: tuple[list[str], refresh.Note] | None = None
        self._codes: dict[str, int] = {}
        self.graded: list[tuple[int, list[str]]] = []
        self.proven = False  # weights and gradients were found alike on all ranks

    def note_failure(self, error: Exception, doing: str) -> None:
        """Keep an error for the next exchange, where all ranks raise it; a single rank raises."""
        if self.alone:
            raise error
        # Raised here, the error would leave the other ranks waiting in their next collective.
        self._failure = self._failure or (error, doing)
        text = f"{doing} failed on rank {self._ranks.rank}: {error!r}. All ranks raise this error"
        warnings.warn(f"{text} in K-FAC's next exchange", stacklevel=4)

    def note_gradients(self, number: int) -> None:
        """Note the layers with a gradient in this step; ranks compare them in the next exchange."""
        # A quiet step must not ask other ranks. Until the next exchange, a rank without a gradient
        # leaves weight and momentum as they are, while others step: without these notes, the
        # weights would drift apart unseen.
        layers = self._registry.layers
        flags = zip(layers, with_gradient(layers.values()), strict=True)
        graded = [name for name, flag in flags if flag]
        if not self.graded or self.graded[-1][1] != graded:
            self.graded.append((number, graded))

    def note_weights(self, steps: int) -> None:
        """Note checksums of the weights every ``verify_every`` steps; the host does not wait."""
        if not self._verify_every or steps % self._verify_every:
            return
        weights = {f"{name} in step {steps}": p for name, p in self._weights().items()}
        if weights:
            self._noted = [*weights], refresh.noted(agree.checksums(weights.values()))

    def _weights(self) -> dict[str, Tensor]:
        covered = {p for layer in self._registry.active for p in layer.parameters}
        named = [x for x in unwrapped(self._registry.model).named_parameters() if x[1] in covered]
        # Each rank has other numbers of a sharded weight.
        return {f"parameter {name!r}": p for name, p in named if not sharding.is_sharded(p)}

    def checksum(self, common: dict[str, Any]) -> int:
        """Return a checksum of the values that must be alike, and of all notes."""
        if self._noted is not None:
            names, note = self._noted  # on their way since an earlier step: reading hardly waits
            self._codes = dict(zip(names, refresh.read(note), strict=True))
            self._noted = None
        return agree.checksum([common, self._codes, self.graded])

    def exchange(
        self, capture: Capture, report: StepReport, number: int, *, loads: bool = False
    ) -> StepReport:
        """Return the sum of all ranks' reports; with ``loads``, raise unless all have loaded."""
        failure = self._failure
        if capture.errors.error is not None:
            failure = capture.errors.error, "capturing"
        if loads:
            why = "only some ranks have loaded a state: call load_state_dict() on all of them"
            failure = RuntimeError(why), "loading"
        report = report._replace(failed=failure is not None)
        # All ranks must send equally long lists: a list's length may follow from the layers, from
        # deferred answers and from sections alone, and never from this rank's passes.
        fields: list[tuple[str, Any]] = [*zip(report._fields, report, strict=True)]
        numbers: list[float] = []
        for _, value in fields:
            numbers += value if isinstance(value, list) else [value]
        if not self.alone:
            sent = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            numbers = self._ranks.sum_numbers(sent, f"agreeing on step {number}").tolist()
        totals: dict[str, Any] = {}
        for name, value in fields:
            if isinstance(value, list):
                totals[name], numbers = numbers[: len(value)], numbers[len(value) :]
            else:
                totals[name], *numbers = numbers
        total = StepReport(**totals)
        if total.failed and not (loads and total.failed == self._ranks.world):
            if not loads:  # the next step starts without the error
                capture.errors.error = self._failure = None
            error, doing = failure or (None, "capturing")
            agree.raise_together(self._ranks, error, doing)
        return total

    def check(
        self, total: StepReport, common: dict[str, Any], capture: Capture, sums: FactorSums
    ) -> None:
        """Raise if ranks or passes do not fit together; ``common`` must be alike on all ranks."""
        ranks, codes, graded = self._ranks, self._codes, self.graded
        self._codes, self.graded = {}, []
        if not self.alone and not agree.are_equal(ranks.world, total.checksum, total.squares):
            # Different notes lead to different weights: a missing gradient, the cause, comes first.
            self._raise_missing(graded, common["steps"])
            agree.raise_unlike(ranks, codes, "average gradients over all ranks before every step()")
            agree.raise_difference(ranks, common, "hyperparameters")
        if not self.alone and not self.proven:
            # Compare weights and gradients in the first step: perhaps no wrapper aligned them.
            weights = self._weights()
            must = "give all ranks the same weights, by DistributedDataParallel or by one seed"
            agree.compare_tensors(ranks, weights, must)
            gradients: dict[str, Tensor] = {}
            for title, p in weights.items():
                # A one for each that is missing: ranks must reduce equally many numbers.
                gradient = p.new_ones(()) if p.grad is None else p.grad
                gradients[title.replace("parameter", "the gradient of", 1)] = gradient
            must = "average gradients over all ranks before step(), or use DistributedDataParallel"
            agree.compare_tensors(ranks, gradients, must)
            self.proven = True
        if total.drawn and total.trained:  # G would mix two scales
            draws, capture.draws = capture.draws, 0
            trained = [layer.name for layer, x in sums.of_layer.items() if x.trained]
            missing = f", not for {', '.join(trained[:3])}" if trained else ""
            why = "sample_fisher was called for some passes of this step and not for others (rank "
            why += f"{ranks.rank}: {draws} calls{missing}); call sample_fisher on every rank "
            why += "between each forward pass and its backward pass, with all outputs that the "
            why += "loss reads. Under torch.utils.checkpoint, use_reentrant=False is needed"
            raise RuntimeError(why)
        if total.elsewhere:
            reports.name_elsewhere(self._ranks, self._registry.states, capture.witness)

    def _raise_missing(self, graded: list[tuple[int, list[str]]], number: int) -> None:
        of_ranks = self._ranks.gather_objects(graded, "looking for missing gradients")
        steps = {step for notes in of_ranks for step, _ in notes}
        first = max(notes[0][0] for notes in of_ranks)  # ranks may have taken other steps
        for step in sorted(step for step in steps if step >= first):
            for name in self._registry.layers:
                without = []
                for rank, notes in enumerate(of_ranks):
                    # A note holds until the next one.
                    present = [names for since, names in notes if since <= step][-1]
                    without += [rank] if name not in present else []
                if not 0 < len(without) < self._ranks.world:
                    continue
                drift = "would drift apart"
                if step < number:
                    drift = f"may have drifted apart since step {step}: load an older checkpoint"
                why = f"layer {name!r} has no gradient on ranks {without}, but has one on other "
                why += f"ranks, so weights {drift}; average gradients over all ranks before "
                why += "step(), a missing one as zero, or use DistributedDataParallel with "
                why += "find_unused_parameters=True"
                raise RuntimeError(why)

    def note_answers(self, flags: Sequence[float]) -> list[Layer]:
        """Note the outcomes of refreshes, as the owners answer; return the layers with a flag."""
        # The flags are of A and of G in turn, for each layer whose answer was deferred.
        states, told = self._registry.states, dict[Layer, int]()
        deferred = [x for x in self._registry.layers.values() if states[x.name].deferred]
        for layer, of_a, of_g in zip(deferred, flags[::2], flags[1::2], strict=True):
            state, flag = states[layer.name], int(of_a) | int(of_g)
            state.deferred = False
            if flag:
                told[layer] = flag
            elif state.refreshes:  # since the load, if there was one
                state.failures = 0
        # The flags are sums over the ranks: a flag that two ranks sent would read as another one.
        rejected = [layer.name for layer, flag in told.items() if flag & REJECTED]
        if rejected:
            names = ", ".join(map(repr, rejected))
            text = f"statistics that were not finite have been left out for {names}"
            agree.warn(self._ranks, text)
        for layer, flag in told.items():
            state = states[layer.name]
            state.rejected += bool(flag & REJECTED)
            if flag & EMPTY:  # it begins as in the first step
                state.reset()
            if not flag & FAILED:
                continue
            state.failures += 1
            state.failed += 1
            state.refreshes -= state.refreshes > 0
            state.refreshed = state.before
            text = f"the refresh of layer {layer.name!r} failed, {state.failures} in a row"
            most = self._max_failures
            if most is not None and state.failures > most:
                why = f"{text} (max_failures={most}): its statistics are not finite or too "
                why += "ill-conditioned; look for a loss that is not finite and for diverging "
                why += "activations, raise damping or skip the layer with skip_layers"
                raise RuntimeError(why)
            text += "; the state before it, at first the identity, stays in use. See whether the "
            text += "loss is finite"
            agree.warn(self._ranks, text)
        return list(told)

    def note_rows(self, total: StepReport, capture: Capture) -> list[str]:
        """Note the layers that have averages from now on; return those with rows on some rank."""
        registry, states = self._registry, self._registry.states
        names, is_new = [], False
        for (name, layer), at in zip(registry.layers.items(), registry.sections, strict=True):
            plain, crossed = any(total.rows[at]), any(total.crossed[at])
            if not (plain or crossed):
                continue
            names.append(name)
            state, layer.turned = states[name], not plain
            # All ranks have the average from now on, also a rank that saw no row of the layer:
            # ranks that disagreed here would take part in different collectives.
            state.has_average = True
            state.missed = state.unseen = 0
            if plain and crossed and not layer.tied:  # it has sums of both directions from now on
                layer.tied = is_new = True
        if is_new:
            registry.find_facts()
        # Count by total, never by this rank's capture: ranks must wait for the same layers.
        begun = total.captured and any([state.has_average for state in states.values()])
        seen = set(names)
        for (name, layer), graded in zip(registry.layers.items(), total.gradients, strict=True):
            state = states[name]
            is_missed = state.has_average and layer in capture.wanted and name not in seen
            # A layer without a pass in its slot gathers late: else it might never gather.
            state.missed += is_missed
            if not graded or not (is_missed or (not state.has_average and (begun or total.unread))):
                continue
            state.unseen += 1
            # Layers without an average count as not covered, which the optimizer warns of.
            if state.has_average and state.unseen == _PATIENCE and not capture.was_paused:
                text = f"layer {name!r} has had a gradient in {_PATIENCE} gathering steps, but no "
                text += "pass went through its module, so older factors stay in use. The weight "
                text += "may be used outside of its module's forward, or its gradient may always "
                text += "be zero; call the module itself, freeze the weight, or name the layer in "
                text += "skip_layers"
                agree.warn(self._ranks, text)
        return names


def with_gradient(layers: Iterable[Layer]) -> list[bool]:
    """Return which layers have a gradient: of the weight, of the bias, or of both."""
    parts = [layer.parameters for layer in layers]
    return [bool(x) and (x[0].grad is not None or x[-1].grad is not None) for x in parts]


class Exchange:
    """Brings sums to owners and state to gradient workers."""

    def __init__(self, ranks: Ranks, registry: Registry, rule: Rule, groups: Groups) -> None:
        self._ranks, self._groups, self._registry = ranks, groups, registry
        self._rule, self.refresher = rule, Refresher(rule)

    def sums(self, sums: FactorSums, layers: Sequence[Layer], plan: StepPlan) -> Iterator[Factors]:
        """Yield new values of the factors that this rank owns, as they arrive, by their place."""
        total, reduce = plan.total, functools.partial(self._ranks.reduce_on_device, kind="factors")
        places = [(x, plan.sections[x.number]) for x in layers if x.tied]
        tied = [x for x, at in places if any(total.rows[at]) and any(total.crossed[at])]
        if sums.units and (sums.travel or tied):
            sums.level(layers if sums.travel else tied, functools.partial(reduce, op="MAX"))
        if tied:
            sums.mix(tied, plan, reduce)
        arrivals: Iterable[list[tuple[Layer, str, Tensor]]]
        if sums.travel:
            arrivals = self._reduced(self._loads(sums, layers, plan))
        else:
            chosen = [(x, side, x.turned) for x in layers for side in "ag"]
            values = zip(chosen, sums.take(chosen, plan), strict=True)
            arrivals = [[(x, side, value) for (x, side, _), value in values]]
        for arrived in arrivals:
            factors: dict[Any, Factors] = {}
            for layer, name, value in arrived:
                side = getattr(self._groups.of[layer], name)
                factors.setdefault((value.device, value.dtype), []).append((layer, side, value))
            yield from factors.values()

    def _loads(
        self, sums: FactorSums, layers: Sequence[Layer], plan: StepPlan
    ) -> Iterator[tuple[Bucket, list[Tensor]]]:
        ranks, layer_of = self._ranks, self._registry.layers
        facts = [self._registry.facts[layer] for layer in layers]
        wire = None if ranks.comm_dtype is None else ranks.comm_dtype.itemsize
        for bucket in sum_buckets(facts, wire, ranks.world, ranks.bucket_bytes):
            pairs = [(layer_of[factor.layer.name], factor.side) for factor in bucket.items]
            chosen = [(layer, side, layer.turned) for layer, side in pairs]
            # No name may hold the terms: the generator would keep them until it is asked for the
            # next bucket's, and the memory of a step would grow by a bucket.
            yield bucket, [term.flatten() for term in sums.take(chosen, plan)]

    def _reduced(
        self, loads: Iterable[tuple[Bucket, list[Tensor]]]
    ) -> Iterator[list[tuple[Layer, str, Tensor]]]:
        for arrived in self._ranks.reduce_to_owners(loads, "factors"):
            values = []
            for factor, total in arrived:
                layer = self._registry.layers[factor.layer.name]
                total = total.unflatten(0, (layer.blocks, -1))
                value = total if factor.diagonal else unpack(total, factor.n)
                values.append((layer, factor.side, value))
            yield values

    def share_state(self, layers: Sequence[Layer]) -> None:
        """Bring the owners' new state of these layers to all gradient workers."""
        ranks, facts = self._ranks, self._registry.facts
        for same in grouped(layers, device_of).values():
            renewed = [factor for layer in same for factor in facts[layer].factors]
            rounds = state_rounds(renewed, self._groups.sizes, ranks.grid, ranks.bucket_bytes)
            buckets = [x for x in itertools.chain(*rounds) if ranks.rank in x.sizes]
            # A generator, and no list: a packed triangle lives only until it has arrived.
            packets = (self._packed(item.content) for bucket in buckets for item in bucket.items)
            arrived = ranks.broadcast(rounds, packets, device_of(same[0]), "second_order")
            for (side, slots), tensors in arrived:
                side.incoming(slots, self._rule.sizes, tensors)

    def _packed(self, factors: list[FactorFacts]) -> list[Packet]:
        packets = []
        for factor in factors:
            layer = self._registry.layers[factor.layer.name]
            group = self._groups.of[layer]
            side, slots = getattr(group, factor.side), group.slots[layer]
            packets.append(Packet((side, slots), side.outgoing(slots, self._rule.sizes)))
        return packets
