"""The base optimizer's part in a step along K-FAC's directions: its momentum, its fall, its step.

The momentum of a parameter that K-FAC steps stays in the base's own entry and format, so that
checkpoints go from one to the other. Ranks that only receive a direction keep no momentum of it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..comm.sharding import parts_here
from ..core import checkpoint
from ..core.hyperparameters import rate_of
from ..core.options import Group
from ..curvature.lengths import (
    AdamLength,
    AdamSettings,
    FallLength,
    Length,
    OfBase,
    SGDLength,
)
from ..errors import invalid
from . import lamb
from .lamb import LAMB, clipped_gradients, math_dtype, rate_for

if TYPE_CHECKING:
    from .mixin import KFACMixin

MOMENTUM = "kfac-momentum"  # of a base that keeps no momentum of the gradient
_DECAY = 0.9  # of that momentum

Entry = dict[str, Any]
Directions = Mapping[Tensor, Tensor]


class BaseStep:
    """Steps one optimizer, of one kind of base, along K-FAC's directions; it keeps no state."""

    length: type[Length]
    momentum = "exp_avg"  # the momentum's key in the base's entry
    second: tuple[str, ...] = ()  # keys of second moments; one number a block takes their place
    counts = False  # entries have a count of steps, on all ranks
    idle: Any = ()  # the settings of a parameter without a gradient

    def __init__(self, optimizer: KFACMixin) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups

    def limited(self) -> dict[Tensor, Tensor]:
        """Return gradients that the base limits for all parameters together."""
        return {}

    def follow(self, ready: Collection[Tensor], mine: Collection[Tensor]) -> OfBase:
        """Take this step's gradients into the momenta that this rank keeps.

        ``ready`` are the parameters that K-FAC steps, ``mine`` those whose momenta are kept here.
        """
        found, second = self._found(), frozenset(self.second)
        for group in self.groups:
            stepped = [p for p in group["params"] if p in ready and p.grad is not None]
            found.settings |= self.settings(group, stepped)
            keeps = self.keeps(group)
            for p in stepped:
                entry = self.optimizer.state[p]
                is_settled = (self.momentum in entry) == (keeps and p in mine)
                if not is_settled or not second.isdisjoint(entry):
                    self._settle(entry, p, found if p in mine else None, group)
            for params in _alike([p for p in stepped if p in mine]):
                entries = [self.optimizer.state[p] for p in params]
                gradients = _gradients(group, params)
                ahead = self.ahead(group, entries, gradients)
                found.momenta.update(zip(params, ahead, strict=True))
                if self.length.measures:
                    found.measured.update(zip(params, gradients, strict=True))
        return found

    def _found(self) -> OfBase:
        rates: dict[Tensor, float | Tensor] = {}
        for group in self.groups:
            rate = rate_of(group)
            host = isinstance(rate, Tensor) and rate.device.type == "cpu"
            rates |= dict.fromkeys(group["params"], float(rate) if host else rate)
        return OfBase(idle=self.idle, rates=rates)

    def kept(self, ready: Collection[Tensor], mine: Collection[Tensor]) -> dict[Tensor, Tensor]:
        """Return the momenta of ``ready`` parameters; of those that are not ``mine``, an empty one.

        The keys are alike on all ranks.
        """
        found: dict[Tensor, Tensor] = {}
        for group in self.groups:
            for p in group["params"]:
                if p in ready and self.spreads(group, self.optimizer.state[p]):
                    momentum = self.optimizer.state[p].get(self.momentum) if p in mine else None
                    if momentum is None:
                        shape = p.shape if p in mine else (0,)
                        momentum = torch.zeros(shape, dtype=p.dtype, device=p.device)
                    found[p] = momentum
        return found

    def open(self, ready: Collection[Tensor], mine: Collection[Tensor]) -> None:
        """Make the entries of parameters, so that a checkpoint can be loaded into them."""
        for group in self.groups:
            for p in group["params"]:
                if p in ready:
                    entry = self.optimizer.state[p]
                    self._settle(entry, p, OfBase() if p in mine else None, group)
                    if self.counts:
                        zero = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                        entry.setdefault("step", zero)

    def _settle(self, entry: Entry, p: Tensor, found: OfBase | None, group: Group) -> None:
        """Complete a parameter's entry where its momentum is kept, else remove the momentum.

        Second moments of a base that stepped the parameter so far are taken out.
        """
        former = [entry.pop(name, None) for name in self.second]
        if found is None:
            entry.pop(self.momentum, None)
            return
        if former and former[0] is not None:
            (found.former[p],) = parts_here([former[0]])
        if entry.get(self.momentum) is None and self.keeps(group):
            entry[self.momentum] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def keeps(self, group: Group) -> bool:
        """Return whether parameters of this group have a momentum."""
        return True

    def spreads(self, group: Group, entry: Entry) -> bool:
        """Return whether a parameter has a momentum that gradient workers alone keep."""
        return self.keeps(group)

    def settings(self, group: Group, stepped: list[Tensor]) -> dict[Tensor, Any]:
        """Count a step of these parameters; return what the length has to know of each."""
        return {}

    def ahead(
        self, group: Group, entries: list[Entry], gradients: list[Tensor]
    ) -> Iterable[Tensor]:
        """Move the momenta; return the tensors along which the base would step."""
        raise NotImplementedError

    def rest(self, directions: Directions) -> None:
        """Let the base step the parameters that have no direction."""
        with gradients_of(dict.fromkeys(directions)):
            self.optimizer.base_step()

    def release(self, entry: Entry) -> None:
        """Empty the entry of a parameter that the base is to step again: it starts anew.

        Only some ranks have the momentum.
        """
        entry.clear()

    def move(self, directions: Directions) -> None:
        """Step along directions, which may be overwritten."""
        for group in self.groups:
            for params in _alike([p for p in group["params"] if p in directions]):
                self._move(group, params, [directions[p] for p in params])

    def _move(self, group: Group, params: list[Tensor], directions: list[Tensor]) -> None:
        descend(params, directions, group["lr"], group.get("weight_decay", 0.0))


class AdamStep(BaseStep):
    """Adam and AdamW: directions follow the first moment, looking ahead as Nesterov's."""

    length = AdamLength
    second = ("exp_avg_sq", "max_exp_avg_sq")
    counts = True
    idle = AdamSettings(0.0, 1.0, 1.0, 1.0, 1.0, 1.0)

    def settings(self, group: Group, stepped: list[Tensor]) -> dict[Tensor, Any]:
        entries = [self.optimizer.state[p] for p in stepped]
        counts = [int(entry.get("step", 0)) + 1 for entry in entries]
        # Each entry gets a tensor of its own: one in common would also count for parameters that
        # rest, and counting in place would change the state that was loaded, whose tensors torch
        # keeps.
        steps = torch.tensor(counts, dtype=torch.float32, device="cpu").unbind()
        for entry, step in zip(entries, steps, strict=True):
            entry["step"] = step
        of_count = {count: _adam_settings(group, count) for count in set(counts)}
        return {p: of_count[count] for p, count in zip(stepped, counts, strict=True)}

    def ahead(
        self, group: Group, entries: list[Entry], gradients: list[Tensor]
    ) -> Iterable[Tensor]:
        moments = parts_here([entry["exp_avg"] for entry in entries])
        beta = float(group["betas"][0])
        if group.get("grad_averaging", True):
            torch._foreach_lerp_(moments, gradients, 1 - beta)
            return torch._foreach_lerp(gradients, moments, beta)
        torch._foreach_mul_(moments, beta)
        torch._foreach_add_(moments, gradients)
        return torch._foreach_add(gradients, moments, alpha=beta)


def _adam_settings(group: Group, count: int) -> AdamSettings:
    """Return Adam's settings in its step number ``count``; the look ahead is one step further."""
    beta1, beta2 = map(float, group["betas"])
    rest1, rest2 = 1 - beta1 ** (count + 1), 1 - beta2**count
    all2 = rest2
    if not group.get("bias_correction", True):
        rest1 = rest2 = 1.0
    return AdamSettings(beta2, 1 - beta2, all2, rest1, rest2, float(group["eps"]))


class LAMBStep(AdamStep):
    """LAMB: Adam's length, then weight decay and the trust ratio; a group counts its steps."""

    counts = False

    def limited(self) -> dict[Tensor, Tensor]:
        return clipped_gradients(self.groups)

    def settings(self, group: Group, stepped: list[Tensor]) -> dict[Tensor, Any]:
        return dict.fromkeys(stepped, _adam_settings(group, group.get("step", 0) + 1))

    def rest(self, directions: Directions) -> None:
        groups = self.groups
        counts = [g.get("step", 0) + any(p in directions for p in g["params"]) for g in groups]
        limits = [group["max_grad_norm"] for group in groups]
        try:
            for group in groups:  # the gradients are limited already
                group["max_grad_norm"] = None
            super().rest(directions)
        finally:
            for group, limit, count in zip(groups, limits, counts, strict=True):
                group["max_grad_norm"] = limit
                group["step"] = max(count, group.get("step", 0))

    def _move(self, group: Group, params: list[Tensor], directions: list[Tensor]) -> None:
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

    def keeps(self, group: Group) -> bool:
        return bool(group["momentum"] != 0)

    def _settle(self, entry: Entry, p: Tensor, found: OfBase | None, group: Group) -> None:
        begins = found is not None and entry.get(self.momentum) is None
        super()._settle(entry, p, found, group)
        if begins and self.keeps(group) and p.grad is not None and group["dampening"] != 0:
            # Dampening begins in the second step: the first momentum is to be the gradient.
            sign = -1 if group["maximize"] else 1
            share = sign * float(group["dampening"]) / float(group["momentum"])
            entry[self.momentum].add_(p.grad, alpha=share)

    def ahead(
        self, group: Group, entries: list[Entry], gradients: list[Tensor]
    ) -> Iterable[Tensor]:
        if not self.keeps(group):
            return gradients
        buffers = parts_here([entry[self.momentum] for entry in entries])
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients, alpha=1 - group["dampening"])
        if group["nesterov"]:
            return torch._foreach_add(gradients, buffers, alpha=group["momentum"])
        return buffers

    def _move(self, group: Group, params: list[Tensor], directions: list[Tensor]) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        if decay != 0 and self.keeps(group):  # SGD's own decay goes through its momentum
            if momentum >= 1:
                raise invalid("momentum", momentum, "beside weight_decay, it must be below 1")
            decay = decay * (1 - group["dampening"]) / (1 - momentum)
        descend(params, directions, group["lr"], decay)


class AnyStep(BaseStep):
    """Any other base: it steps by the raw gradient, and the step is taken back.

    Its step says how far the loss is to fall. Its state is kept on all ranks.
    """

    length = FallLength
    momentum = MOMENTUM

    def keeps(self, group: Group) -> bool:
        return False  # as a rule, the base keeps one on all ranks

    def spreads(self, group: Group, entry: Entry) -> bool:
        return "exp_avg" not in entry

    def follow(self, ready: Collection[Tensor], mine: Collection[Tensor]) -> OfBase:
        found, steps = self._found(), self._steps(ready)
        for p in steps.keys() - set(mine):
            self.optimizer.state[p].pop(MOMENTUM, None)  # a loaded state has those of all ranks
        for group in self.groups:
            for params in _alike([p for p in group["params"] if p in steps and p in mine]):
                entries = [self.optimizer.state[p] for p in params]
                gradients = _gradients(group, params)
                if all("exp_avg" in entry for entry in entries):
                    momenta = parts_here([entry["exp_avg"] for entry in entries])
                else:  # the base has none: K-FAC keeps them
                    for p, entry in zip(params, entries, strict=True):
                        _begin(entry, p)
                    momenta = parts_here([entry[MOMENTUM] for entry in entries])
                    torch._foreach_lerp_(momenta, gradients, 1 - _DECAY)
                found.momenta.update(zip(params, momenta, strict=True))
                falls = torch._foreach_mul(momenta, [steps[p] for p in params])
                found.measured.update(zip(params, falls, strict=True))
        return found

    def _steps(self, ready: Collection[Tensor]) -> dict[Tensor, Tensor]:
        """Let the base step all parameters, and put ``ready`` ones back where they were.

        Return how far the base moved these down. It is called once a step, since some bases count
        their steps in the group.
        """
        stepped = [
            p for group in self.groups for p in group["params"] if p in ready and p.grad is not None
        ]
        steps = {p: parts_here([p])[0].clone() for p in stepped}
        with _without_decay_of(steps.keys(), self.groups):
            self.optimizer.base_step()
        for p, former in steps.items():
            (moved,) = parts_here([p.data])
            step = former - moved
            moved.copy_(former)
            steps[p] = step
        return steps

    def rest(self, directions: Directions) -> None:
        """Do nothing: the base has stepped the other parameters in :meth:`_steps`."""

    def open(self, ready: Collection[Tensor], mine: Collection[Tensor]) -> None:
        """Let the base make its entries, in a step that is taken back."""
        for p in self._steps(ready):
            if p in mine and "exp_avg" not in self.optimizer.state[p]:
                _begin(self.optimizer.state[p], p)

    def release(self, entry: Entry) -> None:
        entry.pop(MOMENTUM, None)

    def _move(self, group: Group, params: list[Tensor], directions: list[Tensor]) -> None:
        # The learning rate is in the lengths already; a decay goes by it.
        if group.get("weight_decay", 0.0) != 0:
            rate = rate_for(rate_of(group), params[0])
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(params, directions)


@contextmanager
def _without_decay_of(stepped: Collection[Tensor], groups: list[Group]) -> Iterator[None]:
    """Let the base decay all parameters but ``stepped`` ones.

    While the base steps, ``stepped`` parameters may stand in groups of their own at the end.
    """
    count, changed = len(groups), []
    try:
        for group in groups[:]:
            params, decay = group["params"], group.get("weight_decay")
            apart = [p for p in params if p in stepped]
            if not (decay and apart):
                continue
            changed.append((group, params, decay))
            decayed = [p for p in params if p not in stepped]
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


def _begin(entry: Entry, p: Tensor) -> None:
    """Add the momentum that K-FAC keeps of a parameter, unless it is there."""
    if MOMENTUM not in entry:
        entry[MOMENTUM] = torch.zeros_like(p, memory_format=torch.preserve_format)


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


def descend(
    params: list[Tensor], directions: list[Tensor], lr: float | Tensor, decay: float
) -> None:
    """Step along directions, which may be overwritten; weights decay apart from them."""
    lr = rate_for(lr, params[0])
    if isinstance(lr, Tensor):
        torch._foreach_mul_(directions, lr)
    if decay != 0:
        torch._foreach_mul_(params, 1 - lr * decay)
    torch._foreach_sub_(params, directions, alpha=1 if isinstance(lr, Tensor) else lr)


@contextmanager
def gradients_of(new: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    """Let the base see these gradients, and leave ``p.grad`` as the user's backward made it."""
    old = [(p, p.grad) for p in new]
    try:
        for p, gradient in new.items():
            p.grad = gradient
        yield
    finally:
        for p, own in old:
            p.grad = own


def _gradients(group: Group, params: list[Tensor]) -> list[Tensor]:
    """Return this rank's parts of the gradients to descend along."""
    gradients = parts_here([p.grad for p in params if p.grad is not None])
    return list(torch._foreach_neg(gradients)) if group.get("maximize") else gradients


def _alike(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return lists of parameters that one foreach call can take."""
    places: dict[Any, list[Tensor]] = {}
    for p in params:
        places.setdefault((p.device, p.dtype, type(p)), []).append(p)
    return list(places.values())
