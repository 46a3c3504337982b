"""Gradients of a model's outputs whose outer products are the Fisher information.

With labels drawn from the model's own distribution, E[(∂ℓ/∂f)(∂ℓ/∂f)ᵀ] is the Hessian H of a loss ℓ
by its outputs f, and the Fisher is the generalised Gauss-Newton matrix (Martens and Grosse 2015,
section 2; Martens 2020, section 9). The columns of a square root of H give it without drawing.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ..comm.ranks import Ranks
from ..errors import invalid, invalid_because
from .forward_pass import ForwardPass
from .hooks import Capture

KINDS = ("cross_entropy", "mse", "bce")
_NAMES = ", ".join(f'"{name}"' for name in KINDS)
Kind = str | Callable[[Tensor], Tensor]


class Counts(Protocol):
    """The options that define K, and the number of terms that follows from them."""

    loss_reduction: str
    loss_terms: str | float

    def terms_of(self, passes: Iterable[ForwardPass]) -> float: ...


class Fisher:
    """The way to differentiate the outputs of one forward pass; raises for invalid requests."""

    def __init__(
        self,
        outputs: Tensor,
        kind: Kind,
        dim: int | None,
        weight: Tensor | None,
        exact: bool,
        generator: torch.Generator | None,
    ) -> None:
        self.outputs, self.kind, self.weight, self.exact = outputs, kind, weight, exact
        self.generator = generator
        _check(outputs, kind, exact, {"dim": dim, "weight": weight, "generator": generator})
        classes = kind == "cross_entropy"
        sides = outputs.dim()
        if dim is None:  # the dimension of classes in torch's losses, or of features in layers
            dim = min(1, sides - 1) if classes or sides > 3 else -1
        self.dim = dim % sides if -sides <= dim < sides else sides
        if self.dim == sides or (self.dim == 0 and sides > 1):
            why = (
                f"{dim} for outputs of shape {tuple(outputs.shape)}; it must be the dimension of "
                "classes or features, which comes after the batch"
            )
            raise invalid_because("dim", why)
        # The shape is [examples, positions, width]. A single dimension holds one example's classes,
        # or one number for each example.
        self._moved = outputs.movedim(self.dim, -1).shape
        if sides > 1:
            self.shape = (self._moved[0], self._moved[1:-1].numel(), self._moved[-1])
        else:
            self.shape = (1, 1, len(outputs)) if classes else (len(outputs), 1, 1)
        self.width = 1 if classes else self.shape[2]  # losses at each position
        self.count = self.shape[0] * self.shape[1] * self.width
        self._check_weight()

    def _check_weight(self) -> None:
        if self.weight is None:
            return
        allowed = [self._moved[:-1]] if self.outputs.dim() > 1 else [torch.Size()]
        if self.kind != "cross_entropy":
            allowed.append(self.outputs.shape)
        if not isinstance(self.weight, Tensor) or self.weight.shape not in allowed:
            given = getattr(self.weight, "shape", None)
            said = repr(self.weight) if given is None else f"shape {tuple(given)}"
            shapes = " or ".join(str(tuple(shape)) for shape in allowed)
            why = (
                f"{said}; it must be a tensor of shape {shapes}, one number for each loss, 0 for "
                "those that do not count"
            )
            raise invalid_because("weight", why)

    def seed(self, *numbers: int) -> None:
        """Draw from a stream that these numbers seed, unless the user has given a generator."""
        if self.generator is None and not self.exact and not callable(self.kind):
            digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
            self.generator = torch.Generator(self.outputs.device)
            self.generator.manual_seed(int.from_bytes(digest, "big"))

    def draw(self, capture: Capture, sums: Counts) -> None:
        """Gather G, on the scale of the sum of the terms that K counts."""
        summed = sums.loss_reduction == "sum" or callable(self.kind)
        counted = isinstance(sums.loss_terms, str)

        def scale(passes: Iterable[ForwardPass]) -> float:
            if summed:
                return 1.0
            # The loss is a mean over all losses. A number in loss_terms counts positions.
            return sums.terms_of(passes) / max(1, self.count) if counted else 1 / self.width

        capture.draw(self.outputs, self.columns(relative=counted and not summed), scale)

    def columns(self, relative: bool) -> Iterator[Tensor]:
        """Yield gradients of the outputs; if ``relative``, weights are shares of their sum."""
        if callable(self.kind):
            yield _own(self.kind, self.outputs)
            return
        factor = self._root_of_weight(relative)
        outputs = self._as_rows(self.outputs.detach()).to(self._dtype)
        for column in _exact(outputs, self.kind) if self.exact else self._drawn(outputs):
            rows = column if factor is None else column * factor
            back = rows.reshape(self._moved).movedim(-1, self.dim)
            yield back.to(self.outputs.dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.outputs.dtype, torch.float32)

    def _as_rows(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(self.dim, -1).reshape(self.shape)

    def _root_of_weight(self, relative: bool) -> Tensor | None:
        if self.weight is None:
            return None
        weight = self.weight.detach().to(self.outputs.device, self._dtype)
        if weight.shape == self.outputs.shape and self.kind != "cross_entropy":
            weight = self._as_rows(weight)
        else:
            weight = weight.reshape(*self.shape[:2], 1)
        if relative:
            # Scale the weights to a mean of 1: small numbers of half precision get no smaller.
            total = weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)
            weight = weight * (weight.numel() / total)
        return weight.sqrt()

    def _drawn(self, outputs: Tensor) -> Iterator[Tensor]:
        if self.kind == "mse":
            yield torch.empty_like(outputs).normal_(0, math.sqrt(2), generator=self.generator)
        elif self.kind == "bce":
            p = outputs.sigmoid()
            yield p - (torch.empty_like(p).uniform_(generator=self.generator) < p).to(p.dtype)
        else:
            p = outputs.softmax(-1)
            # The first of competing exponential clocks with rates p rings with probability p.
            clocks = torch.empty_like(p).exponential_(generator=self.generator)
            label = (p / clocks).argmax(-1, keepdim=True)
            yield p - torch.zeros_like(p).scatter_(-1, label, 1.0)


def _exact(outputs: Tensor, kind: str) -> Iterator[Tensor]:
    """Yield each column of H's square root, at one position of all examples at a time."""
    if kind == "mse":
        deviation = torch.full_like(outputs, math.sqrt(2))
    elif kind == "bce":
        deviation = (outputs.sigmoid() * (-outputs).sigmoid()).sqrt()
    else:
        p = outputs.softmax(-1)
        deviation = p.sqrt()
    for position in range(outputs.shape[1]):
        for i in range(outputs.shape[2]):
            column = torch.zeros_like(outputs)
            if kind == "cross_entropy":  # √pᵢ (eᵢ − p)
                column[:, position] = p[:, position] * -deviation[:, position, i, None]
            column[:, position, i] += deviation[:, position, i]
            yield column


def _own(kind: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    """Return the gradient that a user's callable makes, or the gradient of the loss it returns."""
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        made = kind(leaf)
    if isinstance(made, Tensor) and made.shape == outputs.shape:
        return made.detach().to(outputs.dtype)
    if isinstance(made, Tensor) and made.dim() == 0 and made.requires_grad:
        return torch.autograd.grad(made, leaf)[0]
    said = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else repr(made)
    why = (
        f"its callable returned {said}; it must return a loss of its argument, as a scalar that "
        f"can be differentiated, or the gradient, of shape {tuple(outputs.shape)}"
    )
    raise invalid_because("kind", why)


def _check(outputs: Tensor, kind: Kind, exact: bool, others: dict[str, object]) -> None:
    if not callable(kind) and kind not in KINDS:
        raise invalid("kind", kind, f"it must be {_NAMES} or a callable")
    if not isinstance(outputs, Tensor):
        raise invalid_because(
            "outputs", f"{type(outputs).__name__}; pass the tensor that the loss is of"
        )
    if outputs.dim() == 0 or not outputs.is_floating_point():
        why = (
            f"shape {tuple(outputs.shape)}, {outputs.dtype}; they must be real numbers, the batch "
            "first"
        )
        raise invalid_because("outputs", why)
    if not outputs.requires_grad:
        why = (
            "they have no graph; pass what the model returned with gradients enabled, before "
            "loss.backward()"
        )
        raise invalid_because("outputs", why)
    if callable(kind):
        _check_call(kind)
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise invalid_because(
                given[0], "a callable kind makes the gradient alone; leave it out"
            )
    if exact and callable(kind):
        why = f"True for a callable kind, whose Hessian is unknown; name a kind: {_NAMES}"
        raise invalid_because("exact", why)
    if exact and others["generator"] is not None:
        raise invalid_because("generator", "exact=True draws nothing; leave it out")


def _check_call(kind: Callable[[Tensor], Tensor]) -> None:
    try:
        called = inspect.signature(kind.forward if isinstance(kind, nn.Module) else kind)
    except ValueError:  # a builtin without a known signature
        return
    try:
        called.bind(None)
    except TypeError as error:
        why = (
            f"{kind!r} can't be called with the outputs alone ({error}); give a callable that "
            f"draws its own labels, or name a loss of torch, {_NAMES}"
        )
        raise invalid_because("kind", why) from None


def raise_half(ranks: Ranks, calls: int, own: list[str]) -> None:
    """Raise on all ranks: gradients were drawn for some passes of a step only; name the others."""
    theirs = ranks.gather_objects((calls, own[:3]), "naming passes that were not drawn for")
    said = "; ".join(
        f"rank {rank}: {calls} calls" + (f", not for {', '.join(names)}" if names else "")
        for rank, (calls, names) in enumerate(theirs)
    )
    raise RuntimeError(
        f"sample_fisher was called for some passes of this step and not for others ({said}); call "
        "sample_fisher on every rank between each forward pass and its backward pass, with all "
        "outputs that the loss reads. Under torch.utils.checkpoint, use_reentrant=False is needed"
    )


def draw_before_backward(fisher: Fisher, capture: Capture, sums: Counts) -> None:
    """Gather G; raise an error with the remedy if the graph has been freed already."""
    try:
        fisher.draw(capture, sums)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise RuntimeError(
            "sample_fisher came after loss.backward(), which freed the graph of outputs; "
            "call it before, right after the forward pass"
        ) from error
