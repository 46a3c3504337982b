"""The base optimizer's part in a step along K-FAC's directions: its momentum, its fall, its step.

The momentum of a parameter that K-FAC steps stays in the base's own entry and format, so that
checkpoints go from one to the other. Ranks that only receive a direction keep no momentum of it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from . import checkpoint, lamb
from .comm.sharding import is_sharded, local, parts_here, sharded_like
from .compiled import CompiledPlan
from .curvature.group import ParameterStack
from .curvature.lengths import AdamLength, AdamSettings, BaseNumbers, FallLength, Length, SGDLength
from .errors import invalid
from .lamb import LAMB, Pairs, math_dtype, rate_for
from .options import Group

if TYPE_CHECKING:
    from .optimizer import KFACMixin

MOMENTUM = "kfac-momentum"  # of a base that keeps no momentum of the gradient
_DECAY = 0.9  # of that momentum

Entry = dict[str, Any]
Stacks = list[ParameterStack]


class BaseStep:
    """Steps one optimizer, of one kind of base, along K-FAC's directions."""

    length: type[Length]
    momentum = "exp_avg"  # the momentum's key in the base's entry
    second = ""  # the key of second moments, if one number a block takes their place
    measures = True  # follow() sums over blocks what the length needs of gradients
    turns = True  # gradients are turned around where the base maximizes
    limits = False  # the base limits gradients of all parameters together, to max_grad_norm
    counts = False  # entries have a count of steps, on all ranks
    rated = True  # directions are still to be multiplied by the learning rate
    idle: Any = ()  # the settings of a parameter without a gradient; empty: there are none

    def __init__(self, optimizer: KFACMixin) -> None:
        # A strong reference would be a circle, which keeps a model's tensors until Python looks.
        self.optimizer: KFACMixin = weakref.proxy(optimizer)
        self.stepped: set[Tensor] = set()  # parameters that K-FAC stepped in place of the base

    # ---- entries ----

    def adopt(self, plan: CompiledPlan) -> None:
        """Take over the entries' momenta (receivers drop them), counts and second moments."""
        plan.entries = [self.optimizer.state.get(p, {}) for p in plan.parameters]
        for stack in plan.stacks:
            entries, stack.fresh = plan.entries[stack.at], []
            former = [entry.pop(self.second, None) for entry in entries if self.second]
            if stack.keeps_momenta and any(x is not None for x in former):
                stack.former = stack.stacked(parts_here(former))
            if stack.keeps_momenta and self.keeps(
                self.optimizer.param_groups[stack.number], entries
            ):
                self._adopt(stack, entries)
            else:  # a load brings momenta of all ranks, or takes them away
                stack.momentum, stack.momenta = None, []
                for entry in entries:
                    entry.pop(self.momentum, None)
            if self.counts:
                without = [i for i, entry in enumerate(entries) if "step" not in entry]
                stack.fresh = sorted({*stack.fresh, *without})
        if self.counts:
            counts = [float(entry.get("step", 0)) for entry in plan.entries]
            # A tensor of its own: torch keeps the tensors of a loaded state, and counting in them
            # would change the state that the user still has.
            plan.counts = torch.tensor(counts, dtype=torch.float32, device="cpu")
            plan.steps = list(plan.counts.unbind())
            for count, entry in zip(plan.steps, plan.entries, strict=True):
                if "step" in entry:
                    entry["step"] = count

    def _adopt(self, stack: ParameterStack, entries: Sequence[Entry]) -> None:
        (p, *_) = stack.parameters
        if not is_sharded(p):
            stack.adopt(self.momentum, entries)
            return
        # A sharded parameter has a stack of its own, and its entry the sharded momentum: a row of
        # this rank's part would be saved by torch.distributed.checkpoint as if it were the whole.
        momentum = entries[0].get(self.momentum)
        stack.fresh = [0] if momentum is None else []
        if momentum is None:
            momentum = torch.zeros_like(p, memory_format=torch.preserve_format)
        stack.momentum, stack.momenta = local(momentum)[None], [momentum]

    def _begin(self, stack: ParameterStack, plan: CompiledPlan) -> list[int]:
        # Return the rows of parameters that take their first gradient, and have entries now.
        flags, start = plan.present, stack.at.start
        begun = [row for row in stack.fresh if flags is None or flags[start + row]]
        stack.fresh = [row for row in stack.fresh if row not in begun]
        for row in begun:
            # The plan's own dictionary goes into the state, so that facts() reads what users read.
            # With a copy, the plan would be compiled again after each first gradient.
            entry = self.optimizer.state[stack.parameters[row]] = plan.entries[start + row]
            if stack.momenta:
                entry[self.momentum] = stack.momenta[row]
            if plan.counts is not None:
                entry["step"] = plan.steps[start + row]
        return begun

    def facts(self, plan: CompiledPlan) -> list[Any]:
        """Return what a plan depends on; other layers with a state set the plan's facts to None."""
        groups, entries = self.optimizer.param_groups, [*self.optimizer.state.values()]
        parameters = [p for group in groups for p in group["params"]]
        keys = [self.momentum, "step"] if self.counts else [self.momentum]
        # Users may replace entries, or their tensors. Ids are safe only since the plan holds what
        # it was compiled from: a new object may have the id of one that is gone.
        return [
            [*map(id, parameters)],
            [(p.device, p.dtype, p.stride()) for p in parameters],
            [(len(group["params"]), group.get("momentum") == 0) for group in groups],
            [*map(id, entries)],
            [id(x.get(checkpoint.STEP)) for x in entries if isinstance(x, dict)],
            [id(entry.get(key)) for key in keys for entry in plan.entries],
        ]

    def let_go(self, plan: CompiledPlan) -> None:
        """Empty the entries of parameters that leave, before the base steps them."""
        for p in plan.leaving:
            # A parameter without a gradient is not stepped: frozen, it keeps its momentum.
            if p.grad is not None and p in self.stepped:
                if p in self.optimizer.state:  # it may have left the optimizer, too
                    self.release(self.optimizer.state[p])
                self.stepped.discard(p)
                self.optimizer._published = -1, 0  # the entry lacks K-FAC's part now

    def keeps(self, group: Group, entries: Sequence[Entry]) -> bool:
        """Return whether gradient workers alone keep such entries' momenta, in K-FAC's stacks."""
        return True

    def release(self, entry: Entry) -> None:
        """Empty the entry of a parameter that the base is to step again: it starts anew."""
        # Counts go, too, although all ranks have them: with a count of many steps, the base would
        # not correct the bias of a momentum of one step.
        entry.clear()

    def open(self, plan: CompiledPlan) -> None:
        """Let the parameters have entries without a step, so that a checkpoint can be loaded."""
        for stack in plan.stacks:
            self._begin(stack, plan)

    # ---- a step ----

    def follow(self, plan: CompiledPlan) -> BaseNumbers:
        """Take gradients into the momenta; leave what directions are made of in the stacks."""
        # A parameter without a gradient keeps its momentum, and makes no direction.
        groups, gradients = self.optimizer.param_groups, [p.grad for p in plan.parameters]
        if plan.has_shards:
            gradients = parts_here(gradients)  # type: ignore[arg-type, assignment]
        flags = [gradient is not None for gradient in gradients]
        plan.present = present = None if all(flags) else flags
        of_group: list[Stacks] = [[] for _ in groups]
        for stack in plan.stacks:
            if stack.keeps_momenta:
                of_group[stack.number].append(stack)
            # A receiver needs the gradient of a part that no layer covers: it moves by the buffer
            # as it is. Deliveries overwrite all other buffers.
            needed = stack.keeps_momenta or stack.is_partial
            stack.buffer = stack.stacked(gradients[stack.at]) if needed else stack.empty()
        settings = self.settings(plan, groups) if self.idle else []
        up = [x.buffer for x in plan.stacks if self.turns and groups[x.number].get("maximize")]
        if up:
            torch._foreach_neg_(up)
        for stack in plan.stacks:
            if stack.fresh:
                self._begin(stack, plan)
        if self.measures:
            self._measure(plan)
        resting: list[tuple[ParameterStack, list[int], Tensor]] = []
        for stack in () if present is None else plan.stacks:
            without = [i for i, flag in enumerate(flags[stack.at]) if not flag]
            if without and stack.momentum is not None:
                resting.append((stack, without, stack.momentum[without]))
        for group, stacks in zip(groups, of_group, strict=True):
            new = self.ahead(group, stacks, plan) if stacks else ()
            for stack, tensor in zip(stacks, new, strict=True):
                stack.ahead = tensor
        for stack, rows, momenta in resting:
            # The foreach calls have moved whole stacks. Without the clone, SGD's momentum itself
            # would become zero where it rests.
            if stack.ahead is stack.momentum:
                stack.ahead = stack.momentum.clone()
            stack.ahead[rows] = 0
            assert stack.momentum is not None
            stack.momentum[rows] = momenta
        rates: list[Any] = []
        for group in groups:
            rate = 1.0 if group.get("lr") is None else group["lr"]
            on_host = isinstance(rate, Tensor) and rate.device.type == "cpu"
            rates.append(float(rate) if on_host else rate)
        # The last of each list is of a parameter without a place, which has the index -1.
        return BaseNumbers(
            [*rates, 0.0], [*settings, self.idle], None if present is None else [*present, False]
        )

    def _measure(self, plan: CompiledPlan) -> None:
        # Sum over blocks what the length needs: of the buffers, and of the parameters' squares.
        measures, rows = self.length.measures, list[Tensor]()
        for stack in plan.stacks if measures else ():
            rows += stack.buffer.unbind()
        for share in plan.made:
            if rows:
                share.measured = share.block_sums(rows, "buffer", squares=measures == "squares")
            share.squares = share.block_sums(plan.parameters, "parameters", squares=True)
        if plan.shards is not None:
            plan.shards.measure(rows, squares=measures == "squares")

    def settings(self, plan: CompiledPlan, groups: list[Group]) -> list[Any]:
        """Count a step of the parameters; return what the length has to know of each."""
        raise NotImplementedError

    def ahead(self, group: Group, stacks: Stacks, plan: CompiledPlan) -> Sequence[Tensor]:
        """Move the momenta; return the tensors along which the base would step."""
        return [stack.buffer for stack in stacks]

    def descend(self, plan: CompiledPlan) -> None:
        """Step along the directions in the plan's buffers."""
        groups, present, rows = self.optimizer.param_groups, plan.present, list[Tensor]()
        for stack in plan.stacks:
            rows += stack.buffer.unbind()
        for number, places in plan.kinds:
            moved = places if present is None else [i for i in places if present[i]]
            if moved:
                params = [plan.parameters[i] for i in moved]
                self._move(groups[number], params, [rows[i] for i in moved], plan)

    def _move(
        self, group: Group, params: list[Tensor], directions: list[Tensor], plan: CompiledPlan
    ) -> None:
        # Directions may be overwritten. Weights decay before they move, as in torch.
        if plan.has_shards:
            params = parts_here(params)
        lr, decay = group.get("lr"), group.get("weight_decay", 0.0)
        if isinstance(lr, Tensor):
            lr = rate_for(lr, params[0])
        elif lr is None:  # of a base that finds its rate in each step
            lr = 1.0
        if decay != 0:
            torch._foreach_mul_(params, 1 - lr * self.decay_of(group, decay))
        if not self.rated:
            lr = 1
        elif isinstance(lr, Tensor):
            torch._foreach_mul_(directions, lr)
            lr = 1
        torch._foreach_sub_(params, directions, alpha=lr)

    def decay_of(self, group: Group, decay: Any) -> Any:
        """Return the decay of a step, for the group's own."""
        return decay

    def step_uncovered(self, plan: CompiledPlan) -> None:
        """Let the base step the parameters that are not the plan's."""
        if not any(plan.uncovered):
            return
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, params in zip(groups, plan.uncovered, strict=True):
                group["params"] = params
            self.optimizer.base_step()
        finally:  # schedules, saves and later steps go through all parameters of the groups
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params


class RawStep(BaseStep):
    """Any base under the papers' rules: it steps all parameters by preconditioned gradients."""

    # The base turns gradients around itself, where it maximizes: a second turn would descend.
    turns = measures = False

    def adopt(self, plan: CompiledPlan) -> None:
        """Leave the entries to the base, which could not step without its second moments."""

    def descend(self, plan: CompiledPlan) -> None:
        rows = [row for stack in plan.stacks for row in stack.buffer.unbind()]
        pairs: Pairs = []
        for i, (p, row) in enumerate(zip(plan.parameters, rows, strict=True)):
            # The base must not see a gradient where the user's backward pass left none.
            if plan.present is None or plan.present[i]:
                pairs.append((p, sharded_like(p, row) if is_sharded(p) else row))
        with gradients_of(pairs):
            self.optimizer.base_step()

    def step_uncovered(self, plan: CompiledPlan) -> None:
        """Do nothing: the base steps all parameters in :meth:`descend`."""

    def open(self, plan: CompiledPlan) -> None:
        """Let the base make its entries, by gradients of zero."""
        graded = [p for p in plan.parameters if p.grad is not None]
        # Raw gradients would enter momenta that are of preconditioned ones.
        with gradients_of([(p, torch.zeros_like(p)) for p in graded]):
            self.optimizer.base_step()


class AdamStep(BaseStep):
    """Adam and AdamW: directions follow the first moment, looking ahead as Nesterov's."""

    length = AdamLength
    second = "exp_avg_sq"
    counts = True
    idle = AdamSettings(0.0, 1.0, 1.0, 1.0, 1.0, 1.0)

    def settings(self, plan: CompiledPlan, groups: list[Group]) -> list[Any]:
        present = plan.present
        if plan.counts is not None:
            plan.counts.add_(1 if present is None else torch.tensor(present, device="cpu"))
            counts = plan.counts.tolist()
        else:
            counts = [groups[number].get("step", 0) + 1 for number in plan.numbers]
        of_pair: dict[tuple[int, float], AdamSettings] = {}
        settings: list[AdamSettings] = []
        for i, (number, count) in enumerate(zip(plan.numbers, counts, strict=True)):
            if present is not None and not present[i]:
                settings.append(self.idle)
                continue
            # One object for a kind of parameters: for several, the length makes tensors of numbers.
            if (number, count) not in of_pair:
                group = groups[number]
                beta1, beta2 = map(float, group["betas"])
                # The look ahead is one step further.
                rest1, rest2 = 1 - beta1 ** (count + 1), 1 - beta2**count
                all2 = rest2
                if not group.get("bias_correction", True):
                    rest1 = rest2 = 1.0
                made = AdamSettings(beta2, 1 - beta2, all2, rest1, rest2, float(group["eps"]))
                of_pair[number, count] = made
            settings.append(of_pair[number, count])
        return settings

    def ahead(self, group: Group, stacks: Stacks, plan: CompiledPlan) -> Sequence[Tensor]:
        momenta: list[Any] = [stack.momentum for stack in stacks]
        gradients, beta = [stack.buffer for stack in stacks], float(group["betas"][0])
        if group.get("grad_averaging", True):
            torch._foreach_lerp_(momenta, gradients, 1 - beta)
            return torch._foreach_lerp(gradients, momenta, beta)
        torch._foreach_mul_(momenta, beta)
        torch._foreach_add_(momenta, gradients)
        return torch._foreach_add(gradients, momenta, alpha=beta)


class LAMBStep(AdamStep):
    """LAMB: Adam's length, then weight decay and the trust ratio; a group counts its steps."""

    limits = True
    counts = False

    def step_uncovered(self, plan: CompiledPlan) -> None:
        present, groups = plan.present, self.optimizer.param_groups
        stepped = {n for i, n in enumerate(plan.numbers) if present is None or present[i]}
        counts = [group.get("step", 0) + (i in stepped) for i, group in enumerate(groups)]
        limits = [group["max_grad_norm"] for group in groups]
        try:
            # The gradients are limited already, by a norm that the plan's parameters were part of.
            for group in groups:
                group["max_grad_norm"] = None
            super().step_uncovered(plan)
        finally:
            for group, limit, count in zip(groups, limits, counts, strict=True):
                group["max_grad_norm"] = limit
                # The base has counted this step already, if it stepped parameters of the group.
                group["step"] = max(count, group.get("step", 0))

    def _move(
        self, group: Group, params: list[Tensor], directions: list[Tensor], plan: CompiledPlan
    ) -> None:
        if is_sharded(params[0]):  # norms are over all ranks' parts
            directions = [sharded_like(p, x) for p, x in zip(params, directions, strict=True)]
        wide = [p.to(math_dtype(p.dtype)) for p in params]  # itself, unless in half precision
        directions = [x.to(wide[0].dtype) for x in directions]
        decay, decoupled = group["weight_decay"], bool(group["adam_w_mode"])
        if decay != 0 and not decoupled:
            torch._foreach_mul_(wide, 1 - rate_for(group["lr"], wide[0]) * decay)
        lamb.descend(wide, directions, group["lr"], decay, decoupled, group["use_nvlamb"])
        if wide[0] is not params[0]:
            torch._foreach_copy_(parts_here(params), parts_here(wide))


class SGDStep(BaseStep):
    """SGD: directions follow its momentum, or the gradient where it has none."""

    length = SGDLength
    momentum = "momentum_buffer"

    def keeps(self, group: Group, entries: Sequence[Entry]) -> bool:
        return bool(group["momentum"] != 0)

    def ahead(self, group: Group, stacks: Stacks, plan: CompiledPlan) -> Sequence[Tensor]:
        gradients: list[Any] = [stack.buffer for stack in stacks]
        if group["momentum"] == 0:
            return gradients
        momenta: list[Any] = [stack.momentum for stack in stacks]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients, alpha=1 - group["dampening"])
        if group["nesterov"]:
            return torch._foreach_add(gradients, momenta, alpha=group["momentum"])
        return momenta

    def _begin(self, stack: ParameterStack, plan: CompiledPlan) -> list[int]:
        begun, group = super()._begin(stack, plan), self.optimizer.param_groups[stack.number]
        if begun and stack.momentum is not None and stack.buffer is not None:
            # The first momentum is to be the gradient, as in torch: dampening begins in the second
            # step. ahead() multiplies by the momentum and adds 1 - dampening of the gradient.
            share = float(group["dampening"]) / float(group["momentum"])
            for row in begun if share else ():
                stack.momentum[row].add_(stack.buffer[row], alpha=share)
        return begun

    def decay_of(self, group: Group, decay: Any) -> Any:
        """Return what SGD's own decay, which goes through its momentum, comes to."""
        momentum = group["momentum"]
        if momentum == 0:
            return decay
        if momentum >= 1:
            raise invalid("momentum", momentum, "beside weight_decay, it must be below 1")
        return decay * (1 - group["dampening"]) / (1 - momentum)


class AnyStep(BaseStep):
    """Any other base: its step by raw gradients tells the fall, and is taken back, on all ranks."""

    length = FallLength
    measures = False  # before the base's step is known
    momentum = MOMENTUM
    rated = False  # the rate is in the lengths already

    def keeps(self, group: Group, entries: Sequence[Entry]) -> bool:
        # All ranks have the base's entries: none before its first step, so that _steps asks again.
        return not any(["exp_avg" in entry for entry in entries])

    def follow(self, plan: CompiledPlan) -> BaseNumbers:
        steps = self._steps(plan)
        numbers = super().follow(plan)
        # The length needs the sums of ⟨M, -U⟩, and takes what it measures from the buffers. The
        # gradients return there, for parts that no layer covers.
        gradients = [stack.buffer for stack in plan.stacks]
        for stack, step in zip(plan.stacks, steps, strict=True):
            stack.buffer = stack.ahead * step if stack.keeps_momenta else stack.buffer
        self._measure(plan)
        for stack, gradient in zip(plan.stacks, gradients, strict=True):
            stack.buffer = gradient
        return numbers

    def ahead(self, group: Group, stacks: Stacks, plan: CompiledPlan) -> Sequence[Tensor]:
        ahead: list[Tensor] = []
        for stack in stacks:
            if stack.momentum is not None:
                ahead.append(stack.momentum.lerp_(stack.buffer, 1 - _DECAY))
                continue
            pairs = zip(plan.entries[stack.at], stack.parameters, strict=True)
            # A parameter without a gradient makes no direction, whatever momentum it has.
            momenta: Any = [None if p.grad is None else entry["exp_avg"] for entry, p in pairs]
            ahead.append(stack.stacked(parts_here(momenta)))
        return ahead

    def _steps(self, plan: CompiledPlan) -> list[Tensor]:
        # Let the base step all parameters, and put the plan's back where they were. Return how far
        # the base moved these down, in stacks.
        # Call the base once a step, for all parameters: some bases count their steps in the group,
        # and a second call for the other parameters would count twice.
        parts = parts_here(plan.parameters)
        # Copies: the base is about to overwrite the parameters.
        former = [stack.stacked(parts[stack.at]) for stack in plan.stacks]
        with _without_decay_of(plan, self.optimizer.param_groups):
            self.optimizer.base_step()
        if not all(plan.entries):  # the base has made new ones
            plan.entries = [self.optimizer.state.get(p, {}) for p in plan.parameters]
            for stack in plan.stacks:
                group = self.optimizer.param_groups[stack.number]
                if not self.keeps(group, plan.entries[stack.at]):
                    # Else K-FAC would keep, and save, a second momentum beside the base's.
                    stack.momentum, stack.momenta, stack.fresh = None, [], []
        moved = [stack.stacked(parts[stack.at]) for stack in plan.stacks]
        for stack, tensor in zip(plan.stacks, former, strict=True):
            torch._foreach_copy_(parts[stack.at], list(tensor.unbind()))
        return [before - after for before, after in zip(former, moved, strict=True)]

    def step_uncovered(self, plan: CompiledPlan) -> None:
        """Do nothing: the base has stepped the other parameters in :meth:`_steps`."""

    def open(self, plan: CompiledPlan) -> None:
        """Let the base make its entries, in a step that is taken back."""
        self._steps(plan)
        super().open(plan)

    def release(self, entry: Entry) -> None:
        entry.pop(MOMENTUM, None)


@contextmanager
def _without_decay_of(plan: CompiledPlan, groups: list[Group]) -> Iterator[None]:
    # Let the base decay all parameters but the plan's, in groups of their own at the end.
    count, changed = len(groups), []
    try:
        for i, (group, decayed) in enumerate(zip(groups[:], plan.uncovered, strict=True)):
            directed = [p for p, n in zip(plan.parameters, plan.numbers, strict=True) if n == i]
            if not (group.get("weight_decay") and directed):
                continue
            changed.append((group, group["params"], group["weight_decay"]))
            # The plan's parameters stay in the group itself: some bases estimate a rate there, of
            # gradients, and would estimate it of nothing. Without gradients, no group is needed.
            if any(p.grad is not None for p in decayed):
                # Copy the values: a count may be a tensor, which both groups would move on.
                values = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
                groups.append({**values, "params": decayed})
            group["params"], group["weight_decay"] = directed, 0.0
        yield
    finally:
        del groups[count:]
        for group, params, decay in changed:
            group["params"], group["weight_decay"] = params, decay


def step_of(base: type[Optimizer], defaults: Group) -> type[BaseStep]:
    """Return the part of a base: of torch's classes themselves, and of LAMB."""
    if base in (Adam, AdamW):
        tensors = any(isinstance(beta, Tensor) for beta in defaults["betas"])
        return AnyStep if defaults["amsgrad"] or tensors else AdamStep
    # Look up the class itself: a subclass of SGD may have another step than SGD's.
    kinds: dict[type[Optimizer], type[BaseStep]] = {LAMB: LAMBStep, SGD: SGDStep}
    return kinds.get(base, AnyStep)


@contextmanager
def gradients_of(new: Pairs) -> Iterator[None]:
    """Let the base see these gradients, and leave ``p.grad`` as the user's backward made it."""
    former = [(p, p.grad) for p, _ in new]
    try:
        for p, gradient in new:
            p.grad = gradient
        yield
    finally:
        for p, gradient in former:
            p.grad = gradient
