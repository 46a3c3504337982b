"""Muon in float32, and an experiment: Muon in the metric of K-FAC's output factors.

Of a momentum M the experiment takes the step L polar(L M), with L = (G + λI)^-½ and G of mean
eigenvalue 1. Tuned by as many trials as Muon on the character GPT it came to Muon's loss in 0.90 of
its steps and 0.91 of its seconds (docs/benchmarks.md). The package has no class for it yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kaisa_optim.algebra import eigendecompose, full_precision, orthogonalizer
from kaisa_optim.capture import Capture
from kaisa_optim.collectives import Ranks
from kaisa_optim.coverage import cover
from kaisa_optim.layers import Layer
from kaisa_optim.stacks import Shelf, alike
from kaisa_optim.statistics import Statistics, Tally

Coefficients = tuple[float, float, float]
_Muon: Any = getattr(torch.optim, "Muon", Optimizer)  # of torch 2.9 and newer


class Muon32(_Muon):
    """torch.optim.Muon with products in float32.

    CPUs without bfloat16 units take some twenty times as long for torch's own; small matrices are
    faster so on any.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            for p, ahead in zip(found, self._ahead(group, found), strict=True):
                direction = self._direction(p, ahead, group["ns_coefficients"], group["ns_steps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                wide = max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.add_(direction, alpha=-group["lr"] * wide)

    def _ahead(self, group: dict[str, Any], found: list[Tensor]) -> list[Tensor]:
        """Gradients after (Nesterov's) momentum."""
        gradients = [p.grad for p in found if p.grad is not None]
        for p in found:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in found]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        if not group["nesterov"]:
            return buffers
        return list(torch._foreach_lerp(gradients, buffers, group["momentum"]))

    def _direction(
        self, p: Tensor, ahead: Tensor, coefficients: Coefficients, steps: int
    ) -> Tensor:
        return polar(ahead, coefficients, steps)


def as_matrices(kind: type[Optimizer], weights: list[Tensor], **options: Any) -> Optimizer:
    """Of that kind, for matrices and for kernels, whose first side counts their rows."""
    if all(w.dim() == 2 for w in weights):
        return kind(weights, **options)
    matrices = [nn.Parameter(w.detach().view(len(w), -1)) for w in weights]
    optimizer = kind(matrices, **options)

    def lend(*_: Any) -> None:
        for matrix, weight in zip(matrices, weights, strict=True):
            if weight.grad is not None:
                matrix.grad, weight.grad = weight.grad.flatten(1), None

    optimizer.register_step_pre_hook(lend)
    return optimizer


def polar(matrix: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """Newton and Schulz's iteration to a matrix with singular values near 1."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class MetricMuon(Muon32):
    """L polar(L M), one process alone."""

    def __init__(
        self,
        model: nn.Module,
        params: list[Tensor],
        *,
        damping: float = 0.1,
        decay: float = 0.9,
        factor_update_steps: int = 10,
        root_steps: int = 20,
        loss_terms: str | float = "examples",
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self.damping, self.decay = damping, decay
        self.factor_update_steps, self.root_steps = factor_update_steps, root_steps
        self.steps = 0
        covered = cover(
            model,
            set(params),
            skip_layers=(),
            max_factor_size=2**20,
            papers_only=False,
            warn=None,
        )
        self.layers = list(covered.layers.values())
        self.layer_of: dict[Any, Layer] = {layer.weight: layer for layer in self.layers}
        ranks = Ranks(None, bucket_cap_mb=25.0, comm_dtype=None, device=params[0].device)
        self.statistics = Statistics(ranks, papers=False, loss_reduction="mean", factor_dtype=None)
        self.statistics.loss_terms = loss_terms
        self.shelf = Shelf()
        for members in alike(self.layers):
            for layer in members:
                self.shelf.put(layer, "g")
                # Without inputs, A is not worth a product.
                layer.needs_input = lambda covers: False  # type: ignore[method-assign]
        self.statistics.allocate(self.shelf)
        self.capture = Capture(
            model, self.layers, self.statistics.add, self.statistics.drop, reduce=False
        )
        self.roots: dict[Layer, Tensor] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.statistics.clear()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.steps % self.factor_update_steps == 0:
            self._average()
        if self.steps % self.root_steps == 0:
            self._refresh()
        super().step()
        self.steps += 1
        self.capture.missing.clear()
        self.capture.reset()
        gathers = self.steps % self.factor_update_steps == 0
        self.capture.wanted = frozenset(self.layers if gathers else ())

    def _average(self) -> None:
        rows = {layer: self.statistics.counts([layer]) for layer in self.layers}
        terms = self.statistics.terms()
        givers = {layer: [1.0] * layer.sections for layer in self.layers}
        tally = Tally(terms, terms, rows, givers)
        for _ in self.statistics.update(
            self.shelf, tally, [], lambda layer, side: 0, lambda layer: self.decay
        ):
            pass

    def _refresh(self) -> None:
        """(G + λI)^-½ of wide matrices; its square of tall ones."""
        with full_precision():
            for stack in self.shelf.stacks.values():
                values, vectors = eigendecompose(stack.tensors["average"])
                values = values / values.mean(1, keepdim=True) + self.damping
                for factor in stack.factors:
                    own, basis = values[factor.slots][0], vectors[factor.slots][0]
                    weight = factor.layer.weight
                    assert weight is not None
                    power = -1.0 if weight.shape[0] > weight.shape[1] else -0.5
                    self.roots[factor.layer] = basis * own.pow(power) @ basis.mT

    def _direction(
        self, p: Tensor, ahead: Tensor, coefficients: Coefficients, steps: int
    ) -> Tensor:
        root = self.roots[self.layer_of[p]]
        if p.shape[0] == p.shape[1]:
            return root @ polar(root @ ahead, coefficients, steps)
        # With L = (G + λI)^-½ and X = L M, polar X is (X Xᵀ)^-½ X, and X (Xᵀ X)^-½.
        if p.shape[0] > p.shape[1]:
            new = root @ ahead
            return new @ _far_from_square(ahead.mT @ new, coefficients, steps)
        gram = root @ (ahead @ ahead.mT) @ root
        return root @ _far_from_square(gram, coefficients, steps) @ root @ ahead


def _far_from_square(gram: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """What :func:`polar` multiplies X by, on its smaller side, from X Xᵀ."""
    square = gram.trace().clamp(min=1e-14)
    return orthogonalizer(gram[None] / square, [coefficients] * steps)[0] / square.sqrt()
