"""Gradients of a model's outputs whose outer products are the Fisher information.

With labels drawn from the model's own distribution, E[(∂ℓ/∂f)(∂ℓ/∂f)ᵀ] is the Hessian H of a loss ℓ
by its outputs f, and the Fisher is the generalised Gauss-Newton matrix (Martens and Grosse 2015,
section 2; Martens 2020, section 9).
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from ..errors import invalid, invalid_because
from ..layers import Moments
from .hooks import Call, Capture


def dimension(outputs: Tensor, kind: str, dim: int | None) -> int:
    """Return the dimension of classes or features; refuse what can't be drawn for."""
    if kind not in ("cross_entropy", "mse"):
        raise invalid("kind", kind, 'it must be "cross_entropy" or "mse"')
    if not isinstance(outputs, Tensor) or outputs.dim() == 0 or not outputs.is_floating_point():
        why = "they are no real numbers by example; pass the tensor that the loss is of"
        raise invalid_because("outputs", why)
    shape, sides = tuple(outputs.shape), outputs.dim()
    if not outputs.requires_grad:
        why = "they have no graph; pass what the model returned with gradients enabled, before"
        raise invalid_because("outputs", f"{why} loss.backward()")
    if dim is None:  # the dimension of classes in torch's losses, or of features in layers
        dim = min(1, sides - 1) if kind == "cross_entropy" or sides > 3 else -1
    if not -sides <= dim < sides or (dim % sides == 0 and sides > 1):
        why = f"{dim} for outputs of shape {shape}; it must be the dimension of classes or "
        why += "features, which comes after the batch"
        raise invalid_because("dim", why)
    return dim % sides


def draw(
    outputs: Tensor, kind: str, dim: int, seed: tuple[int, ...], capture: Capture, sums: Any
) -> None:
    """Gather G of drawn labels, on the scale of the sum of the terms that K counts."""
    # The calls keep the drawn G, which replaces the G of the training pass to come.
    # Not from torch's own generator: training must draw the same numbers with and without this.
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=8).digest()
    generator = torch.Generator(outputs.device)
    generator.manual_seed(int.from_bytes(digest, "big"))
    gradients = drawn(outputs, kind, dim, generator)
    capture.draws += 1
    drawing: dict[Call, Moments] = {}
    capture.drawing = drawing
    try:
        # A derivative by the taps' probe, and not backward(): no parameter's gradient may grow.
        torch.autograd.grad(outputs, capture.probe, gradients, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise RuntimeError(
            "sample_fisher came after loss.backward(), which freed the graph of outputs; "
            "call it before, right after the forward pass"
        ) from error
    finally:
        capture.drawing = None
    if drawing and sums.loss_reduction != "sum":
        # A single dimension holds one example's classes, or one number for each example.
        classes = kind == "cross_entropy"
        width = 1 if classes or outputs.dim() == 1 else outputs.shape[dim]  # losses a position
        count = outputs.numel() // max(1, outputs.shape[dim]) if classes else outputs.numel()
        # The loss is a mean over all losses. A number in loss_terms counts positions.
        scale = 1 / width
        if isinstance(sums.loss_terms, str):
            scale = sums.terms({call.forward_pass for call in drawing}) / max(1, count)
        torch._foreach_mul_([moments.g for moments in drawing.values()], scale)
    for call, moments in drawing.items():
        if call.moments is not None:
            moments = moments._replace(g=call.moments.g + moments.g)
        call.moments, call.drawn = moments, True


def drawn(outputs: Tensor, kind: str, dim: int, generator: torch.Generator) -> Tensor:
    """Return the gradients of the losses of drawn labels, of the outputs' shape."""
    outputs, dtype = outputs.detach(), outputs.dtype
    wide = outputs.to(torch.promote_types(dtype, torch.float32))
    if kind == "mse":
        return torch.empty_like(wide).normal_(0, math.sqrt(2), generator=generator).to(dtype)
    p = wide.softmax(dim)
    # The first of competing exponential clocks with rates p rings with probability p.
    clocks = torch.empty_like(p).exponential_(generator=generator)
    label = (p / clocks).argmax(dim, keepdim=True)
    return (p - torch.zeros_like(p).scatter_(dim, label, 1.0)).to(dtype)
