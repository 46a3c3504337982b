"""Gradients between the parameters and their stacks, and the clip over all of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layers import Layer
from .stacks import Pair


class Preconditioned(NamedTuple):
    """The gradients of some layers of one pair, ``[count, g, a]``, before and after."""

    members: list[Layer]
    raw: Tensor
    new: Tensor

    def by_layer(self) -> Iterator[tuple[Layer, Tensor, Tensor]]:
        sizes = [layer.blocks for layer in self.members]
        return zip(self.members, self.raw.split(sizes), self.new.split(sizes), strict=True)


def stack(pair: Pair, members: list[Layer]) -> Tensor:
    """The gradients of ``members`` as one tensor ``[count, g, a]``; a missing one is zero there."""
    sizes = [layer.blocks for layer in members]
    key = pair.g.key
    raw = torch.empty(sum(sizes), *pair.shape[1:], dtype=key.dtype, device=key.device)
    targets, sources = [], []
    for layer, matrix in zip(members, raw.split(sizes), strict=True):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters]
        targets += layer.matrix_parts(matrix)
        sources += layer.parameter_parts(gradients)
    torch._foreach_copy_(targets, sources)
    return raw


def unstack(stacks: list[Preconditioned], in_parts: Container[Tensor]) -> dict[Tensor, Tensor]:
    """New gradients, shaped like their parameters, for those that have a gradient.

    ``in_parts`` are parameters of which several layers cover a part each; a part whose layer is not
    among the stacks keeps its raw gradient.
    """
    new: dict[Tensor, Tensor] = {}
    targets, sources = [], []
    for one in stacks:
        for layer, _, matrix in one.by_layer():
            for p in layer.parameters:
                if p not in new:
                    gradient = p if p.grad is None else p.grad
                    new[p] = gradient.clone() if p in in_parts else torch.empty_like(gradient)
            targets += layer.parameter_parts([new[p] for p in layer.parameters])
            sources += layer.matrix_parts(matrix)
    if targets:
        torch._foreach_copy_(targets, sources)
    return {p: gradient for p, gradient in new.items() if p.grad is not None}


def clip(stacks: list[Preconditioned], kl_clip: float, alpha_of: Callable[[Tensor], Any]) -> None:
    """Scale all by ν = min(1, √(κ / |Σ α²⟨v, ∇⟩|)), on the device, without a look from the host."""
    device = stacks[0].raw.device
    alphas = [alpha_of(p) for one in stacks for layer in one.members for p in layer.parameters]
    if all(_same(alpha, alphas[0]) for alpha in alphas):
        terms = ((one.raw * one.new).sum().to(device) for one in stacks)
        total: Any = sum(terms) * alphas[0] ** 2
    else:
        total = sum(
            (x * y).sum().to(device) * alpha_of(p) ** 2
            for one in stacks
            for layer, raw, new in one.by_layer()
            for p, x, y in zip(
                layer.parameters, layer.matrix_parts(raw), layer.matrix_parts(new), strict=True
            )
        )
    scale = (kl_clip / total.abs()).sqrt_().clamp_(max=1)
    for one in stacks:
        one.new.mul_(scale.to(one.new.device, one.new.dtype))


def _same(a: Any, b: Any) -> bool:
    """Equal without comparing tensors, which would wait for the device."""
    return a is b or (not (isinstance(a, Tensor) or isinstance(b, Tensor)) and bool(a == b))
