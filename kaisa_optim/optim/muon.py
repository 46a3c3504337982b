"""Muon in pure PyTorch, with AdamW beside it: the base of KFACMuon."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from ..checks import check_flag, is_real
from ..comm import sharding
from ..core.muon_groups import muon_step, takes_muon
from ..core.options import Group
from ..errors import invalid, invalid_because
from ..linalg import orthogonal, precision
from .lamb import math_dtype, rate_for

Coefficients = tuple[float, float, float]

_MOMENTS = "momentum_buffer", "exp_avg", "exp_avg_sq"
_ADJUSTMENTS = None, "original", "match_rms_adamw"


class Muon(Optimizer):
    r"""Muon (Jordan et al., 2024) for matrices and kernels, AdamW for the rest.

    A momentum M = U S Vᵀ of the gradient is made orthogonal, about U Vᵀ, by ``ns_steps`` steps
    X ← aX + bXXᵀX + c(XXᵀ)²X from M / ‖M‖. The weight moves along the result. A kernel counts as a
    matrix with one row for each entry of its first side. AdamW takes vectors.

    Arguments are those of ``torch.optim.Muon``, with the same meaning and defaults, then AdamW's:

    Args:
        lr: the learning rate of both. The step of a matrix ``[A, B]`` is lr √max(1, A/B) with
            ``adjust_lr_fn=None`` or "original". With "match_rms_adamw" it is lr 0.2 √max(A, B), so
            that AdamW's lr and weight decay suit both.
        weight_decay: the decay of both, decoupled from the gradients.
        use_muon: the optimizer of a group's parameters: True for Muon, False for AdamW, None for
            Muon where there are two dimensions or more. AdamW suits embeddings and the output
            layer better: ``{"params": [...], "use_muon": False, "lr": 3e-4}``.
        adam_betas, adam_eps: AdamW's betas and eps.
        maximize: ascend rather than descend.

    Matrices of one shape are stepped together, in bfloat16 where the device is fast at it, else in
    float32 (float64 for float64). A sharded matrix is gathered, and each rank steps its own part.
    Moments of half-precision parameters are in float32.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        defaults: Group = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
            "adam_betas": adam_betas,
            "adam_eps": adam_eps,
            "maximize": maximize,
        }
        _check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            if "betas" in param_group:
                why = (
                    f"{param_group['betas']!r} in a parameter group of Muon, where this key has no "
                    "effect; give adam_betas, and for AdamW's eps adam_eps"
                )
                raise invalid_because("betas", why)
            _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for p in group["params"] if group["use_muon"] else ():
                _refuse_vector(p)
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, torch's Muon, or AdamW; moments stay in float32."""
        handle = self.register_load_state_dict_pre_hook(_keep_moments)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        present = self.__dict__.get("param_groups", [])
        for p, entry in state["state"].items():  # before self changes: memory may run out here
            for name, value in entry.items() if isinstance(entry, dict) else ():
                if isinstance(value, _Kept):
                    entry[name] = value.moved(p)
        super().__setstate__(state)
        for i, group in enumerate(self.param_groups):
            _adopt(group, present[i] if i < len(present) else self.defaults)

    def takes_muon(self, group: Group, p: Tensor) -> bool:
        """Return whether Muon steps a parameter of this group; else AdamW does."""
        return takes_muon(group, p)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure``, if given, re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            for p in found:
                if p.grad.layout is not torch.strided:
                    raise RuntimeError(
                        "Muon does not support sparse gradients; build the embedding without sparse"
                    )
                if p.is_complex():
                    raise RuntimeError("Muon does not support complex parameters")
            matrices = [p for p in found if self.takes_muon(group, p)]
            taken = set(matrices)
            self._step_muon(group, matrices)
            self._step_adamw(group, [p for p in found if p not in taken])
        return loss

    def _step_muon(self, group: Group, params: list[Tensor]) -> None:
        """Step matrices; matrices of one shape are stepped together."""
        places: dict[Any, list[Tensor]] = {}
        for p in params:
            _refuse_vector(p)
            if p.numel() > 0:
                rows = p.shape[0]
                place = p.device, p.dtype, rows, p.numel() // rows, sharding.layout(p)
                places.setdefault(place, []).append(p)
        for (device, dtype, *_), some in places.items():
            buffers = [self._buffer(p) for p in some]
            gradients = [g.to(math_dtype(dtype)) for g in _gradients(group, some)]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            ahead = buffers
            if group["nesterov"]:
                ahead = list(torch._foreach_lerp(gradients, buffers, group["momentum"]))
            whole = [sharding.whole(x) for x in ahead]
            stacked = torch.stack([x.flatten(1) for x in whole])
            fast = precision.multiplies_in_half(torch.bfloat16, stacked)
            in_half = fast and not orthogonal.narrow(stacked)
            with precision.full_precision(), precision.without_autocast(device.type):
                found = orthogonal.muon_step(stacked, muon_step(group), in_half).to(dtype)
            matrices = (x.view(p.shape) for x, p in zip(found, some, strict=True))
            directions = [sharding.laid_out(x, some[0]) for x in matrices]
            descend(some, directions, group["lr"], group["weight_decay"])

    def _buffer(self, p: Tensor) -> Tensor:
        """Return the momentum of a matrix, which begins at zero."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
                state.pop(name, None)  # left by AdamW, if it stepped this parameter before
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        # The parameter's dtype may have changed since the last step.
        state["momentum_buffer"] = state["momentum_buffer"].to(math_dtype(p.dtype))
        return cast(Tensor, state["momentum_buffer"])

    def _step_adamw(self, group: Group, params: list[Tensor]) -> None:
        if not params:
            return
        for p in params:
            state = self.state[p]
            # An entry may hold a subclass's tensors alone. A state of LAMB has no "step".
            if "exp_avg" not in state or "step" not in state:
                state.pop("momentum_buffer", None)  # left by Muon
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(math_dtype(p.dtype))
        names = ("exp_avg", "exp_avg_sq", "step")
        first, second, steps = ([self.state[p][name] for p in params] for name in names)
        beta1, beta2 = group["adam_betas"]
        wide = [p.to(math_dtype(p.dtype)) for p in params]  # itself, unless in half precision
        adamw(
            wide,
            [p.grad.to(w.dtype) for p, w in zip(params, wide, strict=True) if p.grad is not None],
            first,
            second,
            [],
            steps,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adam_eps"],
            maximize=group["maximize"],
        )
        for p, w in zip(params, wide, strict=True):
            if p is not w:
                p.copy_(w)


@dataclasses.dataclass
class _Kept:
    """A moment that a load must not cast to the parameter's dtype, as it casts tensors."""

    tensor: Tensor

    def moved(self, p: Any) -> Tensor:
        if not isinstance(p, Tensor):  # the state has an entry without a parameter
            return self.tensor
        return self.tensor.to(p.device, math_dtype(p.dtype), copy=True)


def _keep_moments(optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    """Wrap moments, so that they stay in float32: small second moments are zero in float16."""

    def kept(name: str, value: Any) -> Any:
        return _Kept(value) if name in _MOMENTS and isinstance(value, Tensor) else value

    state = dict(loaded["state"])
    for p, entry in state.items():
        if isinstance(entry, dict):
            state[p] = {name: kept(name, value) for name, value in entry.items()}
    return {**loaded, "state": state}


def _refuse_vector(p: Tensor) -> None:
    if not isinstance(p, UninitializedParameter) and p.dim() < 2:
        why = (
            f"True for a parameter of shape {tuple(p.shape)}, which is no matrix; leave use_muon "
            "out, or give it to a group with use_muon=False"
        )
        raise invalid_because("use_muon", why)


def _adopt(saved: Group, here: Group) -> None:
    """Complete a checkpoint's group: a group of torch.optim.Muon lacks some options.

    A group without ``ns_steps`` is another optimizer's: its momentum and eps mean something else.
    """
    if "ns_steps" not in saved:
        adams = {"adam_eps": saved.get("eps"), "adam_betas": saved.get("betas")}
        own = (key for key in _OPTIONS if key not in ("weight_decay", "maximize"))
        saved.update({key: here[key] for key in own})
        if adams["adam_betas"] is not None:
            saved.update({key: value for key, value in adams.items() if value is not None})
    for key in _OPTIONS:
        saved.setdefault(key, here[key])


def _gradients(group: Group, params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients to descend along."""
    gradients = [p.grad for p in params if p.grad is not None]
    return list(torch._foreach_neg(gradients)) if group["maximize"] else gradients


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


def _check(options: Group) -> None:
    """Refuse bad values of a group."""
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not (isinstance(lr, Tensor) or _is_number(lr)) or not lr >= 0.0:
        raise invalid_because("learning rate", f"{lr}; it must be a number, 0 or above")

    def refuse_unless(fits: bool, name: str, must: str) -> None:
        if not fits:
            raise invalid(name, options[name], must)

    decay, steps = options["weight_decay"], options["ns_steps"]
    fits = _is_number(decay) and decay >= 0
    refuse_unless(fits, "weight_decay", "it must be a number 0 or above")
    for name in ("eps", "adam_eps"):
        fits = _is_number(options[name]) and options[name] > 0
        refuse_unless(fits, name, "it must be a number above 0")
    refuse_unless(_is_share(options["momentum"]), "momentum", "it must be a number in [0, 1)")
    fits = _are(2, options["adam_betas"], _is_share)
    refuse_unless(fits, "adam_betas", "it must be two numbers in [0, 1)")
    fits = _are(3, options["ns_coefficients"], _is_number)
    refuse_unless(fits, "ns_coefficients", "three numbers are needed")
    fits = type(steps) is int and steps in range(1, 100)
    refuse_unless(fits, "ns_steps", "it must be a whole number from 1 to 99")
    for name in ("nesterov", "maximize"):
        check_flag(name, options[name])
    choices = f"choose from {', '.join(map(repr, _ADJUSTMENTS))}"
    refuse_unless(options["adjust_lr_fn"] in _ADJUSTMENTS, "adjust_lr_fn", choices)
    fits = any(options["use_muon"] is choice for choice in (None, True, False))
    must = "True for Muon, False for AdamW, None for Muon where there are two dimensions or more"
    refuse_unless(fits, "use_muon", must)


def _is_number(value: Any) -> bool:
    return is_real(value) and math.isfinite(value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _are(count: int, values: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, list | tuple) and len(values) == count and all(map(fits, values))


# Options of a group, after params and lr. Groups of other optimizers lack some.
_OPTIONS = tuple(inspect.signature(Muon).parameters)[2:]
