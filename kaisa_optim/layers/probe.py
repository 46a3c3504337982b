"""A probe of a small module: one call on the meta device shows its product, computing nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Product(NamedTuple):
    """The weight that multiplies a module's input, and the bias that the same call adds."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool


def probed(module: nn.Module) -> Product | None:
    """Return a module's product if the module does nothing else, as far as a call can tell.

    Only modules with one matrix and at most one vector are called, and without their hooks.
    """
    own = {name: p for name, p in module._parameters.items() if p is not None}
    dims = sorted(p.dim() for p in own.values())
    plain = dims in ([2], [1, 2]) and not module._modules and not module._buffers
    if not plain or isinstance(module, torch.jit.ScriptModule):
        return None
    if any(type(p) is not nn.Parameter for p in own.values()):
        return None
    weight = next(p for p in own.values() if p.dim() == 2)
    for width in dict.fromkeys(weight.shape):
        seen = _Seen()
        try:
            with _on_meta(module) as twins, torch.random.fork_rng([]), torch.no_grad(), seen:
                twin_of = {twins[name]: p for name, p in own.items()}
                x = torch.empty(3, width, dtype=weight.dtype, device="meta")
                type(module).forward(module, x)
        except Exception:  # other arguments, or another width
            continue
        return seen.product(twin_of)
    return None


@contextlib.contextmanager
def _on_meta(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Put empty twins in the place of a module's parameters; undo all that a call does to it."""
    own, before = dict(module._parameters), dict(vars(module))
    twins = {
        name: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        for name, p in own.items()
        if p is not None
    }
    vars(module)["_parameters"] = {**own, **twins}
    try:
        yield dict(twins)
    finally:
        vars(module).clear()
        vars(module).update(before)


class _Seen(TorchFunctionMode):
    """Records the products of a call, with the weight of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor | None, bool]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            self.calls.append((args[1] if len(args) > 1 else kwargs["weight"], bias, False))
        elif func in (torch.addmm, torch.Tensor.addmm) and len(args) == 3 and not kwargs:
            self.calls.append((args[2], args[0], True))
        return func(*args, **kwargs)

    def product(self, twin_of: dict[Tensor, nn.Parameter]) -> Product | None:
        if len(self.calls) != 1:
            return None
        weight, bias, transposed = self.calls[0]
        if not isinstance(weight, Tensor) or weight not in twin_of:
            return None
        own_bias = twin_of.get(bias) if isinstance(bias, Tensor) else None
        if own_bias is not None and own_bias.dim() != 1:
            own_bias = None
        return Product(twin_of[weight], own_bias, transposed)
