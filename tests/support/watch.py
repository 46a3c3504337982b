"""What layers see in a plain run, and the step that follows from it, worked out the slow way.

Rows are ``[blocks, rows, width]``; a block is one Kronecker pair.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from tests.support.close import assert_close as assert_close
from tests.support.reference import input_rows, matrix, precondition, split_rows
from tests.support.reference import take_step as taken
from tests.support.training import stepped_blocks as stepped_blocks

DAMPING = 0.1
# Steps are preconditioned gradients, as long as these are.
PAPERS: dict[str, Any] = {"compute_method": "eigen", "kl_clip": None}


class Body(nn.Module):
    """Modules and parameters by their names, and a function that uses them as the forward pass."""

    def __init__(self, use: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.use = use
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return self.use(self, *inputs, **named)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A float64 model with values that do not depend on the tests before."""
    torch.manual_seed(1)
    model = make().double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


class Watch:
    """Adds a zero to each output of the named layers: its gradient is ∂L/∂s of that call."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        self.calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
        for name in names:
            hook = partial(self._see, name)
            model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)

    def _see(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Tensor
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        x = args[0] if args else kwargs["input"]
        zero = torch.zeros_like(output, requires_grad=True)
        self.calls[name].append((x.detach().clone(), zero))
        return output + zero

    def trained(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """Input and ∂L/∂s of each call that a backward pass reached."""
        return [(x, zero.grad) for x, zero in self.calls[name] if zero.grad is not None]


def rows_of(module: nn.Module, calls: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Rows of all calls together; a 1 appended to the inputs where a bias is trained."""
    a = [input_rows(module, x).flatten(1, 2) for x, _ in calls if len(x)]
    g = [split_rows(module, g).flatten(1, 2) for x, g in calls if len(x)]
    return torch.cat(a, 1), torch.cat(g, 1)


def factors_of(a: Tensor, g: Tensor, terms: float) -> tuple[Tensor, Tensor]:
    """A = Σ a aᵀ / rows and G = K Σ g gᵀ."""
    return a.mT @ a / a.shape[1], terms * g.mT @ g


def matrix_of(module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Weight- and bias-shaped tensors as ``[blocks, g, a]``, of those that are trained."""
    return matrix(
        module,
        weight if module.weight.requires_grad else None,
        bias if bias is not None and module.bias.requires_grad else None,
    )


def solved(a: Tensor, g: Tensor, gradient: Tensor, damping: float = DAMPING) -> Tensor:
    """(G ⊗ A + γI)⁻¹ ∇ as one dense system a block."""
    return precondition(a, g, gradient, damping, "eigen")


def assert_factors(
    opt: Any, name: str, expected: tuple[Tensor, Tensor], rtol: float = 1e-10
) -> None:
    for side, actual, wanted in zip("AG", opt.preconditioner.factors(name), expected, strict=True):
        assert_close(actual, wanted, rtol, f"{name}: {side}")


def exact(model: Any, /, **options: Any) -> Any:
    """An optimizer whose step is ``p -= v`` with v the preconditioned gradient."""
    return KFACSGD(model, **{**PAPERS, "lr": 1.0, "damping": DAMPING, **options})


def built(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    return model, exact(model, **options)


def check_step(
    model: nn.Module,
    train: Callable[[nn.Module], None],
    names: list[str],
    terms: float,
    **options: Any,
) -> Any:
    """``train`` runs forward and backward: gradients, factors and step must be those of a twin."""
    twin = copy.deepcopy(model)
    watch = Watch(twin, *names)
    train(twin)
    opt = exact(model, **options)
    assert set(names) <= set(opt.preconditioner.layers)
    train(model)
    for name, p in twin.named_parameters():
        mine = model.get_parameter(name).grad
        assert (mine is None) == (p.grad is None), name
        if p.grad is not None:
            assert_close(mine, p.grad, what=f"{name}: gradient")
    steps = taken(opt, model)
    for name in names:
        module = twin.get_submodule(name)
        expected = factors_of(*rows_of(module, watch.trained(name)), terms)
        assert_factors(opt, name, expected)
        gradient = matrix_of(module, module.weight.grad, getattr(module.bias, "grad", None))
        step = matrix_of(module, steps[f"{name}.weight"], steps.get(f"{name}.bias"))
        assert_close(step, solved(*expected, gradient), 1e-8, f"{name}: step")
    return opt
