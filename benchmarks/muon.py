"""Muon (Jordan et al., 2024) in float32, as a baseline that is not slowed down.

On CPUs without bfloat16 units, torch's takes some twenty times as long. Equations and defaults are
torch's, with Nesterov's momentum, and a kernel counts as a matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from kaisa_optim.linalg import products

COEFFICIENTS, EPS = (3.4445, -4.7750, 2.0315), 1e-7


class Muon(torch.optim.Optimizer):
    """Steps matrices of one shape together; AdamW steps vectors and groups without ``use_muon``."""

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "use_muon": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            places: dict[Any, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    matrix = group["use_muon"] and p.dim() > 1
                    places[(len(p), p.numel() // len(p)) if matrix else ()].append(p)
            for shape, params in places.items():
                (self._step_matrices if shape else self._step_adamw)(group, params)

    def _step_matrices(self, group: dict[str, Any], params: list[Tensor]) -> None:
        buffers = self._moments(params, "momentum_buffer")
        gradients: list[Any] = [p.grad for p in params]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
        x = torch.stack([each.flatten(1) for each in ahead])
        x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=EPS)
        tall = x.shape[1] > x.shape[2]
        narrow = x.is_cpu and min(x.shape[1:]) <= 64  # halves would take longer
        in_half = products.multiplies_in_half(x.dtype, x.device) and not narrow
        x = x.mT if tall else x
        for steps in (4, 1):  # rounding grows with each polynomial in a row
            x = _towards_one(x, [COEFFICIENTS] * steps, in_half)
        x = x.mT.contiguous() if tall else x
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        directions = [d.view_as(p) for d, p in zip(x, params, strict=True)]
        scale = max(1, x.shape[1] / x.shape[2]) ** 0.5
        torch._foreach_add_(params, directions, alpha=-group["lr"] * scale)

    def _step_adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        moments = [self._moments(params, name) for name in ("exp_avg", "exp_avg_sq")]
        steps = [self.state[p].setdefault("step", torch.tensor(0.0)) for p in params]
        how: Any = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}
        how |= {name: group[name] for name in ("lr", "weight_decay")}
        lists: Any = [[p.grad for p in params], *moments, [], steps]
        adamw(params, *lists, **how)

    def _moments(self, params: list[Tensor], name: str) -> list[Tensor]:
        return [self.state[p].setdefault(name, torch.zeros_like(p)) for p in params]


def hidden_and_rest(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return matrices and kernels inside of the network, which Muon takes, and the rest."""
    hidden: list[Tensor] = []
    rest: list[Tensor] = []
    for name, p in model.named_parameters():
        outer = p.dim() < 2 or name.startswith(("head", "words", "places"))
        (rest if outer else hidden).append(p)
    return hidden, rest


def muons_groups(model: nn.Module, rate: float) -> list[dict[str, Any]]:
    """Return the groups of a network whose ends and vectors AdamW steps at a rate of their own."""
    hidden, rest = hidden_and_rest(model)
    return [{"params": hidden}, {"params": rest, "lr": rate, "use_muon": False}]


def _towards_one(x: Tensor, polynomials: list[products.Polynomial], in_half: bool) -> Tensor:
    """Take singular values through polynomials, by powers of X Xᵀ where that is less work."""
    if not in_half and x.shape[2] > 1.5 * x.shape[1]:
        return torch.bmm(products.orthogonalizer(torch.bmm(x, x.mT), polynomials), x)
    near = x.bfloat16() if in_half else x
    for a, b, c in polynomials:
        gram = torch.bmm(near, near.mT)
        near = torch.baddbmm(near, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), near, beta=a)
    return near.to(x.dtype)
