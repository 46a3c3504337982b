"""Muon in pure PyTorch, with AdamW beside it: the base of KFACMuon."""

from __future__ import annotations

import dataclasses
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
from ..linalg import orthogonal, precision, products
from .lamb import math_dtype, rate_for

Coefficients = tuple[float, float, float]
Group = dict[str, Any]

# Of a group, beside lr; other optimizers' groups lack some.
_OPTIONS = (
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
    "use_muon",
    "adam_betas",
    "adam_eps",
    "maximize",
)
_MOMENTS = "momentum_buffer", "exp_avg", "exp_avg_sq"
_ADJUSTMENTS = None, "original", "match_rms_adamw"


class Muon(Optimizer):
    r"""Muon (Jordan et al., 2024) for matrices and kernels, AdamW for the rest.

    A momentum M of the gradient is made orthogonal, M = U S Vᵀ to about U Vᵀ, by ``ns_steps`` of
    X ← aX + bXXᵀX + c(XXᵀ)²X on M / ‖M‖, and the weight moves along it. A kernel is the matrix of
    which its first side counts the rows. Vectors have no such direction: AdamW takes them.

    Arguments are those of ``torch.optim.Muon``, with the same meaning and defaults, then AdamW's:

    Args:
        lr: for both. The step of a matrix ``[A, B]`` is lr √max(1, A/B) by ``adjust_lr_fn=None`` or
            "original", and lr 0.2 √max(A, B) by "match_rms_adamw", which lets AdamW's lr and
            weight decay be used for both.
        weight_decay: decoupled from the gradients, of both.
        use_muon: of a group, who takes its parameters: True Muon, False AdamW, None Muon for those
            of two dimensions or more. Embeddings and the layer of the outputs are best given to
            AdamW: ``{"params": [...], "use_muon": False, "lr": 3e-4}``.
        adam_betas, adam_eps: AdamW's.
        maximize: ascend rather than descend.

    Matrices of one shape are stepped together; in bfloat16 where the device is fast at it, else in
    float32 (float64 for float64). Sharded ones are gathered for it, and each rank steps its part.
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
                raise ValueError(
                    f"Invalid betas: {param_group['betas']!r} in a parameter group, which nobody "
                    "would read; AdamW's are called adam_betas here, and its eps adam_eps"
                )
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
        for p, entry in state["state"].items():  # before this takes it: memory may not do
            for name, value in entry.items() if isinstance(entry, dict) else ():
                if isinstance(value, _Kept):
                    entry[name] = value.moved(p)
        super().__setstate__(state)
        for i, group in enumerate(self.param_groups):
            _adopt(group, present[i] if i < len(present) else self.defaults)

    def takes_muon(self, group: Group, p: Tensor) -> bool:
        """Return whether Muon steps a parameter of this group, or AdamW."""
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
            fast = products.multiplies_in_half(torch.bfloat16, stacked)
            in_half = fast and not orthogonal.narrow(stacked)
            with precision.full_precision(device.type), precision.without_autocast(device.type):
                found = orthogonal.muon_step(stacked, None, muon_step(group), in_half).to(dtype)
            matrices = (x.view(p.shape) for x, p in zip(found, some, strict=True))
            directions = [sharding.laid_out(x, some[0]) for x in matrices]
            descend(some, directions, group["lr"], group["weight_decay"])

    def _buffer(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
                state.pop(name, None)  # of a time when it was AdamW's
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        # It may be new, or the parameter have another dtype by now.
        state["momentum_buffer"] = state["momentum_buffer"].to(math_dtype(p.dtype))
        return cast(Tensor, state["momentum_buffer"])

    def _step_adamw(self, group: Group, params: list[Tensor]) -> None:
        if not params:
            return
        for p in params:
            state = self.state[p]
            # A sub-class may keep entries of its own there; LAMB's have no step.
            if "exp_avg" not in state or "step" not in state:
                state.pop("momentum_buffer", None)  # of a time when it was Muon's
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
            for name in ("exp_avg", "exp_avg_sq"):  # as Muon's buffer
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
    """All that a load does not cast to the parameter's dtype, as it does with tensors."""

    tensor: Tensor

    def moved(self, p: Any) -> Tensor:
        if not isinstance(p, Tensor):  # of no parameter here
            return self.tensor
        return self.tensor.to(p.device, math_dtype(p.dtype), copy=True)


def _keep_moments(optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    """In float16 second moments of small gradients would become zero."""

    def kept(name: str, value: Any) -> Any:
        return _Kept(value) if name in _MOMENTS and isinstance(value, Tensor) else value

    state = dict(loaded["state"])
    for p, entry in state.items():
        if isinstance(entry, dict):
            state[p] = {name: kept(name, value) for name, value in entry.items()}
    return {**loaded, "state": state}


def _refuse_vector(p: Tensor) -> None:
    if not isinstance(p, UninitializedParameter) and p.dim() < 2:
        raise ValueError(
            f"Invalid use_muon: True for a parameter of shape {tuple(p.shape)}, which is no "
            "matrix; leave use_muon out, or give it to a group with use_muon=False"
        )


def _adopt(saved: Group, here: Group) -> None:
    """Complete a checkpoint's group: one of torch.optim.Muon lacks some options, and one without
    ``ns_steps`` is another optimizer's, whose momentum and eps mean something else."""
    if "ns_steps" not in saved:
        given = [(ours, saved[name]) for name, ours in _OF_ADAMW.items() if name in saved]
        saved.update({key: here[key] for key in _OPTIONS if key not in _OF_ALL})
        if "betas" in saved:
            saved.update(given)
    for key in _OPTIONS:
        saved.setdefault(key, here[key])


_OF_ADAMW = {"eps": "adam_eps", "betas": "adam_betas"}
_OF_ALL = "weight_decay", "maximize"


def _gradients(group: Group, params: Iterable[Tensor]) -> list[Tensor]:
    gradients = [p.grad for p in params if p.grad is not None]
    return list(torch._foreach_neg(gradients)) if group["maximize"] else gradients


def descend(
    params: list[Tensor], directions: list[Tensor], lr: float | Tensor, decay: float
) -> None:
    """Along directions, which may be overwritten; weights decay on their own."""
    lr = rate_for(lr, params[0])
    if isinstance(lr, Tensor):
        torch._foreach_mul_(directions, lr)
    if decay != 0:
        torch._foreach_mul_(params, 1 - lr * decay)
    torch._foreach_sub_(params, directions, alpha=1 if isinstance(lr, Tensor) else lr)


def _check(options: Group) -> None:
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not (isinstance(lr, Tensor) or _is_number(lr)) or not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}; it must be a number, 0 or above")
    for name in ("weight_decay", "eps", "adam_eps"):
        value, least = options[name], "0 or above" if name == "weight_decay" else "above 0"
        if not _is_number(value) or value < 0 or (value == 0 and least == "above 0"):
            raise ValueError(f"Invalid {name}: {value!r}; it must be a number {least}")
    for name, count in (("momentum", 1), ("adam_betas", 2)):
        given = options[name]
        values = [given] if count == 1 else given
        if (
            not isinstance(values, list | tuple)
            or len(values) != count
            or not all(_is_number(value) and 0 <= value < 1 for value in values)
        ):
            what = "a number" if count == 1 else "two numbers"
            raise ValueError(f"Invalid {name}: {given!r}; it must be {what} in [0, 1)")
    numbers = options["ns_coefficients"]
    if (
        not isinstance(numbers, list | tuple)
        or len(numbers) != 3
        or not all(map(_is_number, numbers))
    ):
        raise ValueError(f"Invalid ns_coefficients: {numbers!r}; three numbers are needed")
    steps = options["ns_steps"]
    if not is_real(steps) or not isinstance(steps, int) or steps not in range(1, 100):
        raise ValueError(f"Invalid ns_steps: {steps!r}; it must be a whole number from 1 to 99")
    for name in ("nesterov", "maximize"):
        check_flag(name, options[name])
    if options["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ValueError(
            f"Invalid adjust_lr_fn: {options['adjust_lr_fn']!r}; choose from "
            f"{', '.join(map(repr, _ADJUSTMENTS))}"
        )
    if not any(options["use_muon"] is choice for choice in (None, True, False)):
        raise ValueError(
            f"Invalid use_muon: {options['use_muon']!r}; True for Muon, False for AdamW, None for "
            "Muon where there are two dimensions or more"
        )


def _is_number(value: Any) -> bool:
    return is_real(value) and math.isfinite(value)
