"""Adam's moments in the eigenbasis of a layer's factors, and the steps that follow from them.

Moments are kept where gradients are preconditioned, for all layers of one shape together. What the
preconditioner then hands out is Adam's direction, turned back: the base optimizer's own moments
stay empty for these parameters, and :func:`move` takes the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from ...comm.sharding import parts_here
from ...linalg.kronecker import out_of_basis
from ...optim import muon
from ...optim.lamb import LAMB, clipped_gradients, descend, math_dtype
from ..stacks import Specs

Group = dict[str, Any]
Number = float | Tensor  # a tensor has one entry a block, ``[count, 1, 1]``


BASES = Adam, AdamW, LAMB  # with the moments that can live in an eigenbasis


class Settings(NamedTuple):
    """How a layer's moments move; of several layers, each field may be a tensor."""

    keep1: Number  # of the first moment, in a step
    take1: Number  # of the gradient
    keep2: Number
    take2: Number
    log1: Number  # of β₁; -inf leaves out the bias correction
    log2: Number
    eps: Number


def settings(group: Group) -> Settings:
    if len(group["betas"]) != 2:
        raise ValueError(f"Invalid betas: {group['betas']}; two numbers are needed")
    (beta1, beta2), averaged = group["betas"], group.get("grad_averaging", True)
    corrected = group.get("bias_correction", True)
    log1, log2 = (math.log(b) if corrected and b > 0 else -math.inf for b in (beta1, beta2))
    take1 = 1 - beta1 if averaged else 1.0
    return Settings(beta1, take1, beta2, 1 - beta2, log1, log2, group["eps"])


def argument_against(arguments: Group) -> str:
    """The base's argument that :func:`check` would refuse, if any."""
    if arguments.get("amsgrad"):
        return "amsgrad=True"
    betas = arguments.get("betas", ())
    tensors = isinstance(betas, tuple | list) and any(isinstance(beta, Tensor) for beta in betas)
    return f"betas={betas!r}" if tensors else ""


def check(optimizer: Optimizer, group: Group) -> None:
    """Refuse bases without Adam's moments, and options that have no meaning in the eigenbasis."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, BASES):
        raise ValueError(
            f'Invalid moments: "eigenbasis" needs Adam, AdamW or LAMB as its base, {name} has none '
            'of them; use moments="parameters"'
        )
    group = {**optimizer.defaults, **group}
    if group.get("amsgrad"):
        raise ValueError(
            "Invalid amsgrad: True; a largest second moment has no meaning while its basis turns: "
            'leave it out, or use moments="parameters"'
        )
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        raise ValueError(
            f'Invalid betas: {group["betas"]}; with moments="eigenbasis" they must be numbers'
        )


def specs(count: int, g: int, a: int, dtype: torch.dtype) -> Specs:
    """What is kept of ``count`` gradients of one shape."""
    moment = ((count, g, a), dtype)
    return {"exp_avg": moment, "exp_avg_sq": moment, "adam_steps": ((count,), dtype)}


def direction(
    state: dict[str, Tensor],
    slots: slice | Tensor,
    gradient: Tensor,
    present: Tensor | None,
    adam: Settings,
    nesterov: bool,
) -> Tensor:
    """Take gradients, in the basis, into the moments at ``slots``; Adam's direction there.

    ``present`` says which blocks have a gradient; the others' moments stay as they are. With
    ``nesterov`` the direction is that of a first moment which takes the gradient in once more.
    """
    names = ("exp_avg", "exp_avg_sq", "adam_steps")
    moving = first, second, steps = tuple(state[name][slots] for name in names)
    former = [] if present is None else [tensor.clone() for tensor in moving]
    first.mul_(adam.keep1)
    second.mul_(adam.keep2)
    _take(first, gradient, adam.take1)
    if isinstance(adam.take2, Tensor):
        second.add_(gradient.square().mul_(adam.take2))
    else:
        second.addcmul_(gradient, gradient, value=adam.take2)
    steps.add_(1)
    if present is not None:
        for tensor, old in zip(moving, former, strict=True):
            absent = ~present if tensor.dim() == 1 else ~present[:, None, None]
            tensor.copy_(torch.where(absent, old, tensor))
    if not isinstance(slots, slice):  # then these are copies
        for name, tensor in zip(names, moving, strict=True):
            state[name][slots] = tensor
    count = steps.clamp(min=1)[:, None, None]  # 0 where no gradient has come yet
    taken = count
    if nesterov:
        first, taken = first * adam.keep1, count + 1
        _take(first, gradient, adam.take1)
    # 1 - β^t as it stands would lose its digits for a β near 1.
    rest1, rest2 = -torch.expm1(taken * adam.log1), -torch.expm1(count * adam.log2)
    scale = (second / rest2).sqrt_().add_(adam.eps)
    return (first / rest1).div_(scale)


def _take(moment: Tensor, gradient: Tensor, part: Number) -> None:
    """Without a copy where the part is one for all."""
    if isinstance(part, Tensor):
        moment.add_(gradient * part)
    else:
        moment.add_(gradient, alpha=part)


def turn(
    state: dict[str, Tensor], slots: slice | Tensor, turn_g: Tensor | None, turn_a: Tensor | None
) -> None:
    """Express moments in a new basis: ``turn_g`` is Q_newᵀ Q_old of the G side; None: no change.

    The second moment, a diagonal of variances, is carried by the squares of the turn's entries:
    the diagonal of the turned matrix. It stays non-negative and keeps its sum.
    """
    squares = [None if t is None else t.square() for t in (turn_g, turn_a)]
    for name, turns in (("exp_avg", (turn_g, turn_a)), ("exp_avg_sq", squares)):
        state[name][slots] = out_of_basis(state[name][slots], *turns)


# ---- parameters ----


def limited(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Gradients under LAMB's limit on the norm of all, also of those that it will not see."""
    return clipped_gradients(optimizer.param_groups) if isinstance(optimizer, LAMB) else {}


@contextmanager
def without_limit(optimizer: Optimizer) -> Iterator[None]:
    """LAMB's step on gradients that :func:`limited` has made."""
    groups = optimizer.param_groups if isinstance(optimizer, LAMB) else []
    limits = [group["max_grad_norm"] for group in groups]
    try:
        for group in groups:
            group["max_grad_norm"] = None
        yield
    finally:
        for group, limit in zip(groups, limits, strict=True):
            group["max_grad_norm"] = limit


def taken_in(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Gradients as the moments take them, where these are not as they stand."""
    result: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        decay = 0.0 if _decoupled(optimizer, group) else group["weight_decay"]
        if decay == 0 and not group["maximize"]:
            continue
        for params in _alike(p for p in group["params"] if p.grad is not None):
            gradients = [p.grad for p in params if p.grad is not None]
            if group["maximize"]:
                gradients = list(torch._foreach_neg(gradients))
            if decay != 0:
                gradients = list(torch._foreach_add(gradients, params, alpha=decay))
            result.update(zip(params, gradients, strict=True))
    return result


def move(optimizer: Optimizer, directions: dict[Tensor, Tensor]) -> None:
    """Step along Adam's directions, which may be overwritten."""
    for group in optimizer.param_groups:
        for params in _alike(p for p in group["params"] if p in directions):
            _move(optimizer, group, params, [directions[p] for p in params])


def _alike(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters that one foreach call can take."""
    places: dict[Any, list[Tensor]] = {}
    for p in params:
        places.setdefault((p.device, p.dtype, type(p)), []).append(p)
    return list(places.values())


def _move(
    optimizer: Optimizer, group: Group, params: list[Tensor], directions: list[Tensor]
) -> None:
    lr, decay, decoupled = group["lr"], group["weight_decay"], _decoupled(optimizer, group)
    if isinstance(optimizer, LAMB):
        wide = [p.to(math_dtype(p.dtype)) for p in params]  # itself, unless in half precision
        directions = [x.to(wide[0].dtype) for x in directions]
        descend(wide, directions, lr, decay, decoupled, group["use_nvlamb"])
        if wide[0] is not params[0]:
            torch._foreach_copy_(parts_here(params), parts_here(wide))
        return
    muon.descend(params, directions, lr, decay if decoupled else 0.0)


def _decoupled(optimizer: Optimizer, group: Group) -> bool:
    """Whether weight decay passes the moments by, as in AdamW and in LAMB's own mode."""
    if isinstance(optimizer, muon.Muon):
        return True
    if isinstance(optimizer, LAMB):
        return bool(group["adam_w_mode"])
    return isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))
