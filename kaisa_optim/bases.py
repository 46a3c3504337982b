"""The base optimizer's part in a step along K-FAC's directions: its momentum, its fall, its step.

The momentum of a parameter that K-FAC steps stays in the base's own entry and format, so that
checkpoints go from one to the other. Ranks that only receive a direction keep no momentum of it.
"""

from __future__ import annotations

import copy
import itertools
import operator
import weakref
from collections.abc import Collection, Iterator, Sequence
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
from .lamb import LAMB, clipped_gradients, math_dtype, rate_for
from .options import Group, rate_of

if TYPE_CHECKING:
    from .optimizer import KFACMixin

MOMENTUM = "kfac-momentum"  # of a base that keeps no momentum of the gradient
_DECAY = 0.9  # of that momentum

# What a plan depends on of each parameter.
_FACTS = id, operator.attrgetter("device", "dtype"), operator.methodcaller("stride")

Entry = dict[str, Any]
Pairs = list[tuple[Tensor, Tensor | None]]  # parameters, and gradients for the base


class BaseStep:
    """Steps one optimizer, of one kind of base, along K-FAC's directions."""

    length: type[Length]
    momentum = "exp_avg"  # the momentum's key in the base's entry
    second: tuple[str, ...] = ()  # keys of second moments; one number a block takes their place
    measures: str | None = ""  # what the length measures of gradients; None: nothing of them
    turns = True  # gradients are turned around where the base maximizes
    limits = False  # the base limits gradients of all parameters together
    counts = False  # entries have a count of steps, on all ranks
    idle: Any = ()  # the settings of a parameter without a gradient; empty: there are none
    held: tuple[str, ...] = ("exp_avg", "step")  # keys of K-FAC's tensors in the entries

    def __init__(self, optimizer: KFACMixin) -> None:
        # A strong reference would be a circle, which keeps a model's tensors until Python looks.
        self.optimizer: KFACMixin = weakref.proxy(optimizer)
        self.stepped: set[Tensor] = set()  # parameters that K-FAC stepped in place of the base

    def limited(self) -> Pairs:
        """Return gradients that the base limits for all parameters together."""
        return []

    # ---- entries ----

    def adopt(self, plan: CompiledPlan) -> None:
        """Take over the entries of the plan's parameters: momenta, counts, second moments.

        The entries get views of the plan's tensors; momenta are kept where ``mine`` says so alone.
        """
        plan.entries = [self.optimizer.state.get(p, {}) for p in plan.parameters]
        for stack in plan.stacks:
            entries = plan.entries[stack.at]
            former: list[Any] = [entry.pop(name, None) for name in self.second for entry in entries]
            former = former[: len(entries)]  # of the first name alone
            if stack.mine and any(x is not None for x in former):
                stack.former = stack.stacked(parts_here(former))
            stack.fresh = []
            if stack.mine and self.keeps(self.optimizer.param_groups[stack.number]):
                self._adopt(stack, entries, self.momentum)
            else:
                stack.momentum, stack.momenta = None, []
                for entry in entries:
                    entry.pop(self.momentum, None)
            if self.counts:
                without = [i for i, entry in enumerate(entries) if "step" not in entry]
                stack.fresh = sorted({*stack.fresh, *without})
        if self.counts:
            counts = [float(entry.get("step", 0)) for entry in plan.entries]
            # Counting in place must not change a state that was loaded, whose tensors torch keeps.
            plan.counts = torch.tensor(counts, dtype=torch.float32, device="cpu")
            plan.count_rows = plan.counts.unbind()
            for entry, count in zip(plan.entries, plan.count_rows, strict=True):
                if "step" in entry:
                    entry["step"] = count

    def _adopt(self, stack: ParameterStack, entries: Sequence[Entry], key: str) -> None:
        (p, *_) = stack.parameters
        if not is_sharded(p):
            stack.adopt(key, entries)
            return
        momentum = entries[0].get(key)
        stack.fresh = [0] if momentum is None else []
        if momentum is None:
            momentum = torch.zeros_like(p, memory_format=torch.preserve_format)
        stack.momentum, stack.momenta = local(momentum)[None], [momentum]

    def _begin(self, stack: ParameterStack, plan: CompiledPlan) -> list[int]:
        """Give entries to parameters that take their first gradient; return their rows."""
        flags, start = plan.present, stack.at.start
        begun = [row for row in stack.fresh if flags is None or flags[start + row]]
        stack.fresh = [row for row in stack.fresh if row not in begun]
        for row in begun:
            entry = self.optimizer.state[stack.parameters[row]] = plan.entries[start + row]
            if stack.momenta:
                entry[self.momentum] = stack.momenta[row]
            if self.counts:
                entry["step"] = plan.count_rows[start + row]
        return begun

    def facts(self, plan: CompiledPlan) -> list[Any]:
        """Return what a plan depends on: parameters, their layouts, kept momenta, and entries.

        An id is safe here, since the plan holds the parameters. Users may replace entries, or their
        tensors. Which layers have a state is no part of the facts: what changes that sets the
        plan's facts to None.
        """
        groups, entries = self.optimizer.param_groups, [*self.optimizer.state.values()]
        parameters = [p for group in groups for p in group["params"]]
        counts = [x.get(checkpoint.STEP) for x in entries if isinstance(x, dict)]
        tensors = [entry.get(key) for key in self.held for entry in plan.entries]
        return [
            *[[*map(fact, parameters)] for fact in _FACTS],
            [(len(group["params"]), group.get("momentum") == 0) for group in groups],
            *[[*map(id, parts)] for parts in (entries, counts, tensors)],
        ]

    def let_go(self, plan: CompiledPlan) -> None:
        """Empty the entries of parameters that leave, before the base steps them."""
        for p in plan.leaving:
            if p.grad is not None and p in self.stepped:
                if p in self.optimizer.state:  # it may have left the optimizer, too
                    self.release(self.optimizer.state[p])
                self.stepped.discard(p)
                self.optimizer._published = -1, 0  # the entry lacks K-FAC's part now

    def keeps(self, group: Group) -> bool:
        """Return whether parameters of this group have a momentum."""
        return True

    def spreads(self, group: Group, entry: Entry) -> bool:
        """Return whether a parameter has a momentum that gradient workers alone keep."""
        return self.keeps(group)

    def momenta(self, ready: Collection[Tensor], mine: Collection[Tensor]) -> dict[Tensor, Tensor]:
        """Return the momenta of ``ready`` parameters; of those that are not ``mine``, an empty one.

        The keys are alike on all ranks.
        """
        momenta: dict[Tensor, Tensor] = {}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p in ready and self.spreads(group, self.optimizer.state[p]):
                    momentum = self.optimizer.state[p].get(self.momentum) if p in mine else None
                    if momentum is None:
                        shape = p.shape if p in mine else (0,)
                        momentum = torch.zeros(shape, dtype=p.dtype, device=p.device)
                    momenta[p] = momentum
        return momenta

    def release(self, entry: Entry) -> None:
        """Empty the entry of a parameter that the base is to step again: it starts anew.

        Only some ranks have the momentum.
        """
        entry.clear()

    def open(self, plan: CompiledPlan) -> None:
        """Let the parameters have entries without a step, so that a checkpoint can be loaded."""
        for stack in plan.stacks:
            self._begin(stack, plan)

    # ---- a step ----

    def follow(self, plan: CompiledPlan) -> BaseNumbers:
        """Take gradients into the momenta; leave what directions are made of in the stacks.

        A parameter without a gradient keeps its momentum, and makes no direction.
        """
        groups, gradients = self.optimizer.param_groups, [p.grad for p in plan.parameters]
        if plan.has_shards:
            gradients = parts_here(gradients)  # type: ignore[arg-type, assignment]
        flags = [gradient is not None for gradient in gradients]
        plan.present = present = None if all(flags) else flags
        of_group: list[list[ParameterStack]] = [[] for _ in groups]
        for stack in plan.stacks:
            if stack.mine or stack.is_partial:
                stack.buffer = stack.stacked(gradients[stack.at])
            else:
                stack.buffer = stack.empty()
            if stack.mine:
                of_group[stack.number].append(stack)
        settings = self.settings(plan, groups) if self.idle else []
        if present is not None and settings:
            settings = [x if own else self.idle for x, own in zip(settings, present, strict=True)]
        # Receivers, too: a part that no layer covers moves by the buffer as it is.
        up = [x.buffer for x in plan.stacks if self.turns and groups[x.number].get("maximize")]
        if up:
            torch._foreach_neg_(up)
        for stack in plan.stacks:
            if stack.fresh:
                self._begin(stack, plan)
        if self.measures is not None:
            self._measure(plan, self.measures)
        missing = [] if present is None else plan.missing(present)
        rests = [(x, rows, x.momentum[rows]) for x, rows in missing if x.momentum is not None]
        for group, stacks in zip(groups, of_group, strict=True):
            if stacks:
                self.ahead(group, stacks, plan)
        for stack, rows, momenta in rests:
            if stack.ahead is stack.momentum:
                stack.ahead = stack.momentum.clone()
            stack.ahead[rows] = 0
            assert stack.momentum is not None
            stack.momentum[rows] = momenta
        # The last of each list is of a parameter without a place.
        rates: list[Any] = [1.0 if group.get("lr") is None else group["lr"] for group in groups]
        for i, rate in enumerate(rates):
            if isinstance(rate, Tensor) and rate.device.type == "cpu":
                rates[i] = float(rate)
        return BaseNumbers(
            [*rates, 0.0], [*settings, self.idle], None if present is None else [*present, False]
        )

    def _measure(self, plan: CompiledPlan, measures: str) -> None:
        """Sum over blocks what the length needs: of the buffers, and of the parameters' squares."""
        rows: list[Tensor] = []
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
        return []

    def ahead(self, group: Group, stacks: list[ParameterStack], plan: CompiledPlan) -> None:
        """Move the momenta; leave the tensors along which the base would step in the stacks."""
        raise NotImplementedError

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
        """Step along directions, which may be overwritten; weights decay apart from them."""
        if plan.has_shards:
            params = parts_here(params)
        lr, decay = group["lr"], group.get("weight_decay", 0.0)
        if isinstance(lr, Tensor):
            lr = rate_for(lr, params[0])
        if decay != 0:
            torch._foreach_mul_(params, 1 - lr * self.decay_of(group, decay))
        if isinstance(lr, Tensor):
            torch._foreach_mul_(directions, lr)
        torch._foreach_sub_(params, directions, alpha=1 if isinstance(lr, Tensor) else lr)

    def decay_of(self, group: Group, decay: Any) -> Any:
        """Return the decay of a step, for the group's own."""
        return decay

    def rest(self, plan: CompiledPlan) -> None:
        """Let the base step the parameters that are not the plan's."""
        if not any(plan.rest):
            return
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, params in zip(groups, plan.rest, strict=True):
                group["params"] = params
            self.optimizer.base_step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params


class RawStep(BaseStep):
    """Any base under the papers' rules: it steps all parameters by preconditioned gradients."""

    turns = False  # the base does, where it maximizes
    measures = None

    def adopt(self, plan: CompiledPlan) -> None:
        """Leave the entries to the base."""

    def ahead(self, group: Group, stacks: list[ParameterStack], plan: CompiledPlan) -> None:
        for stack in stacks:
            stack.ahead = stack.buffer

    def descend(self, plan: CompiledPlan) -> None:
        rows = [row for stack in plan.stacks for row in stack.buffer.unbind()]
        pairs: Pairs = [
            (p, sharded_like(p, x) if is_sharded(p) else x)
            for p, x in zip(plan.parameters, rows, strict=True)
        ]
        if plan.present is not None:
            pairs = [*itertools.compress(pairs, plan.present)]
        with gradients_of(pairs):
            self.optimizer.base_step()

    def rest(self, plan: CompiledPlan) -> None:
        """Do nothing: the base steps all parameters in :meth:`descend`."""

    def open(self, plan: CompiledPlan) -> None:
        """Let the base make entries of parameters with a gradient, by gradients of zero."""
        self.follow(plan)
        for stack in plan.stacks:
            stack.buffer.zero_()
        self.descend(plan)


class AdamStep(BaseStep):
    """Adam and AdamW: directions follow the first moment, looking ahead as Nesterov's."""

    length, measures = AdamLength, AdamLength.measures
    second = ("exp_avg_sq", "max_exp_avg_sq")
    counts = True
    idle = AdamSettings(0.0, 1.0, 1.0, 1.0, 1.0, 1.0)

    def settings(self, plan: CompiledPlan, groups: list[Group]) -> list[Any]:
        if self.counts:
            assert plan.counts is not None
            present = plan.present
            plan.counts.add_(1 if present is None else torch.tensor(present, device="cpu"))
            pairs = [*zip(plan.numbers, plan.counts.tolist(), strict=True)]
        else:
            pairs = [(number, groups[number].get("step", 0) + 1) for number in plan.numbers]
        of_pair: dict[tuple[int, float], AdamSettings] = {}
        for number, count in set(pairs):
            group = groups[number]
            beta1, beta2 = map(float, group["betas"])
            # The look ahead is one step further.
            rest1, rest2 = 1 - beta1 ** (count + 1), 1 - beta2**count
            all2 = rest2
            if not group.get("bias_correction", True):
                rest1 = rest2 = 1.0
            settings = AdamSettings(beta2, 1 - beta2, all2, rest1, rest2, float(group["eps"]))
            of_pair[number, count] = settings
        return [of_pair[pair] for pair in pairs]

    def ahead(self, group: Group, stacks: list[ParameterStack], plan: CompiledPlan) -> None:
        momenta, gradients = ([getattr(x, n) for x in stacks] for n in ("momentum", "buffer"))
        beta = float(group["betas"][0])
        if group.get("grad_averaging", True):
            torch._foreach_lerp_(momenta, gradients, 1 - beta)
            ahead = torch._foreach_lerp(gradients, momenta, beta)
        else:
            torch._foreach_mul_(momenta, beta)
            torch._foreach_add_(momenta, gradients)
            ahead = torch._foreach_add(gradients, momenta, alpha=beta)
        for stack, tensor in zip(stacks, ahead, strict=True):
            stack.ahead = tensor


class LAMBStep(AdamStep):
    """LAMB: Adam's length, then weight decay and the trust ratio; a group counts its steps."""

    limits = True
    counts = False

    def limited(self) -> Pairs:
        return clipped_gradients(self.optimizer.param_groups)

    def rest(self, plan: CompiledPlan) -> None:
        present, groups = plan.present, self.optimizer.param_groups
        stepped = {n for i, n in enumerate(plan.numbers) if present is None or present[i]}
        counts = [group.get("step", 0) + (i in stepped) for i, group in enumerate(groups)]
        limits = [group["max_grad_norm"] for group in groups]
        try:
            for group in groups:  # the gradients are limited already
                group["max_grad_norm"] = None
            super().rest(plan)
        finally:
            for group, limit, count in zip(groups, limits, counts, strict=True):
                group["max_grad_norm"] = limit
                group["step"] = max(count, group.get("step", 0))

    def _move(
        self, group: Group, params: list[Tensor], directions: list[Tensor], plan: CompiledPlan
    ) -> None:
        if is_sharded(params[0]):  # norms are over all ranks' parts
            pairs = zip(params, directions, strict=True)
            directions = [sharded_like(p, x) for p, x in pairs]
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

    length, measures = SGDLength, SGDLength.measures
    momentum, held = "momentum_buffer", ("momentum_buffer",)

    def keeps(self, group: Group) -> bool:
        return bool(group["momentum"] != 0)

    def ahead(self, group: Group, stacks: list[ParameterStack], plan: CompiledPlan) -> None:
        gradients = [stack.buffer for stack in stacks]
        if group["momentum"] == 0:
            for stack in stacks:
                stack.ahead = stack.buffer
            return
        momenta: list[Any] = [stack.momentum for stack in stacks]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients, alpha=1 - group["dampening"])
        ahead: Any = momenta
        if group["nesterov"]:
            ahead = torch._foreach_add(gradients, momenta, alpha=group["momentum"])
        for stack, tensor in zip(stacks, ahead, strict=True):
            stack.ahead = tensor

    def _begin(self, stack: ParameterStack, plan: CompiledPlan) -> list[int]:
        begun, group = super()._begin(stack, plan), self.optimizer.param_groups[stack.number]
        if begun and stack.momentum is not None and stack.buffer is not None:
            # The first momentum is to be the gradient: dampening begins in the second step.
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
    """Any other base: it steps by the raw gradient, and the step is taken back.

    Its step says how far the loss is to fall. Its state is kept on all ranks.
    """

    length, measures = FallLength, None
    momentum, held = MOMENTUM, (MOMENTUM,)

    def adopt(self, plan: CompiledPlan) -> None:
        plan.entries = [self.optimizer.state.get(p, {}) for p in plan.parameters]
        for stack in plan.stacks:
            entries, stack.fresh = plan.entries[stack.at], []
            if not stack.mine:
                for entry in entries:
                    entry.pop(MOMENTUM, None)  # a loaded state has those of all ranks
            elif any(MOMENTUM in entry for entry in entries):
                self._adopt(stack, entries, MOMENTUM)
            else:  # a load may have taken the momenta away
                stack.momentum, stack.momenta = None, []

    def keeps(self, group: Group) -> bool:
        return False  # as a rule, the base keeps one on all ranks

    def spreads(self, group: Group, entry: Entry) -> bool:
        return "exp_avg" not in entry

    def follow(self, plan: CompiledPlan) -> BaseNumbers:
        steps = self._steps(plan)
        if not all(plan.entries):  # the base has made new ones
            plan.entries = [self.optimizer.state.get(p, {}) for p in plan.parameters]
        numbers = super().follow(plan)
        gradients = [stack.buffer for stack in plan.stacks]
        for stack, step in zip(plan.stacks, steps, strict=True):
            stack.buffer = stack.ahead * step if stack.mine else stack.buffer
        self._measure(plan, FallLength.measures)
        for stack, gradient in zip(plan.stacks, gradients, strict=True):
            stack.buffer = gradient
        return numbers

    def ahead(self, group: Group, stacks: list[ParameterStack], plan: CompiledPlan) -> None:
        for stack in stacks:
            entries = plan.entries[stack.at]
            graded = [True] * len(entries) if plan.present is None else plan.present[stack.at]
            both = [*zip(entries, graded, strict=True)]
            if all("exp_avg" in entry for entry, is_graded in both if is_graded):
                own: Any = [entry["exp_avg"] if is_graded else None for entry, is_graded in both]
                stack.ahead = stack.stacked(parts_here(own))
                continue
            if stack.momentum is None:  # the base has none: K-FAC keeps them
                self._adopt(stack, entries, MOMENTUM)
                self._begin(stack, plan)
            assert stack.momentum is not None
            stack.ahead = stack.momentum.lerp_(stack.buffer, 1 - _DECAY)

    def _steps(self, plan: CompiledPlan) -> list[Tensor]:
        """Let the base step all parameters, and put the plan's back where they were.

        Return how far the base moved these down, in stacks. It is called once a step, since some
        bases count their steps in the group.
        """
        parts = parts_here(plan.parameters)
        former = [stack.stacked(parts[stack.at]) for stack in plan.stacks]
        with _without_decay_of(plan, self.optimizer.param_groups):
            self.optimizer.base_step()
        parts = parts_here(plan.parameters)
        moved = [stack.stacked(parts[stack.at]) for stack in plan.stacks]
        for stack, tensor in zip(plan.stacks, former, strict=True):
            torch._foreach_copy_(parts[stack.at], list(tensor.unbind()))
        return [before - after for before, after in zip(former, moved, strict=True)]

    def rest(self, plan: CompiledPlan) -> None:
        """Do nothing: the base has stepped the other parameters in :meth:`_steps`."""

    def open(self, plan: CompiledPlan) -> None:
        """Let the base make its entries, in a step that is taken back."""
        self._steps(plan)
        plan.entries = [self.optimizer.state[p] for p in plan.parameters]
        for stack in plan.stacks:
            entries = plan.entries[stack.at]
            if stack.mine and not all("exp_avg" in entry for entry in entries):
                self._adopt(stack, entries, MOMENTUM)
                self._begin(stack, plan)

    def release(self, entry: Entry) -> None:
        entry.pop(MOMENTUM, None)

    def _move(
        self, group: Group, params: list[Tensor], directions: list[Tensor], plan: CompiledPlan
    ) -> None:
        # The learning rate is in the lengths already; a decay goes by it.
        params = parts_here(params)
        if group.get("weight_decay", 0.0) != 0:
            rate = rate_for(rate_of(group), params[0])
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(params, directions)


@contextmanager
def _without_decay_of(plan: CompiledPlan, groups: list[Group]) -> Iterator[None]:
    """Let the base decay all parameters but the plan's.

    While the base steps, the plan's parameters may stand in groups of their own at the end.
    """
    count, changed = len(groups), []
    try:
        for i, (group, decayed) in enumerate(zip(groups[:], plan.rest, strict=True)):
            params, decay = group["params"], group.get("weight_decay")
            apart = [p for p, n in zip(plan.parameters, plan.numbers, strict=True) if n == i]
            if not (decay and apart):
                continue
            changed.append((group, params, decay))
            if any(p.grad is not None for p in decayed):
                # Copy the values: a count may be a tensor, which both groups would move on.
                values = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
                groups.append({**values, "params": apart, "weight_decay": 0.0})
                group["params"] = decayed
            else:
                group["weight_decay"] = 0.0
        yield
    finally:
        del groups[count:]
        for group, params, decay in changed:
            group["params"], group["weight_decay"] = params, decay


def lacks_second(base: BaseStep | type[BaseStep], entry: Any) -> bool:
    """Return whether an entry is as K-FAC leaves it, so that the base can't step by it."""
    if not (base.second and entry and isinstance(entry, dict)):  # some bases keep other values
        return False
    own = {key for key in entry if not str(key).startswith(checkpoint.PREFIX)}
    return own <= {base.momentum, "step"}


def step_of(base: type[Optimizer], defaults: Group) -> type[BaseStep]:
    """Return the part of a base: of torch's classes themselves, and of LAMB.

    A subclass may have a step of its own, and counts as any other base; so does Adam with amsgrad
    or with betas on a device.
    """
    if base in (Adam, AdamW):
        tensors = any(isinstance(beta, Tensor) for beta in defaults["betas"])
        return AnyStep if defaults["amsgrad"] or tensors else AdamStep
    kinds: dict[type[Optimizer], type[BaseStep]] = {LAMB: LAMBStep, SGD: SGDStep}
    return kinds.get(base, AnyStep)


@contextmanager
def gradients_of(new: Pairs) -> Iterator[None]:
    """Let the base see these gradients, and leave ``p.grad`` as the user's backward made it."""
    old = [(p, p.grad) for p, _ in new]
    try:
        for p, gradient in new:
            p.grad = gradient
        yield
    finally:
        for p, own in old:
            p.grad = own
