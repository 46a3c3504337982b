"""Cases of layer kinds, and the check of a layer against the dense reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from tests.support import reference as ref
from tests.support.watch import Body
from tests.support.watch import normal as normal

DAMPING = 0.07
SHARING = ("expand", "reduce")


def tokens(*shape: int, high: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


@dataclass
class Case:
    """A layer, its input, and ``call``: what else its forward is given."""

    layer: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    call: dict[str, Any] = field(default_factory=dict)
    terms: float | None = None  # the K that the optimizer must find itself; None: the batch size
    prepare: Callable[[nn.Module], None] | None = None


def wrapped(layer: nn.Module) -> nn.Module:
    return Body(lambda m, *args, **call: m.layer(*args, **call), layer=layer)


def build(case: Case) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(2)
    layer = case.layer().double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    if case.prepare is not None:
        case.prepare(layer)
    return wrapped(layer), case.inputs()


def loss_of(output: Tensor) -> Tensor:
    """Not linear in the output, so that output gradients depend on it."""
    count = output.numel()
    mix = torch.linspace(-1.0, 1.3, count, dtype=torch.float64).view(output.shape)
    return torch.sum(torch.sin(output + mix) * (1 + mix)) / max(len(output), 1)


def changed(layer: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
    picked = [
        tensors.get(f"layer.{key}") if ref.trained(getattr(layer, key, None)) else None
        for key in ("weight", "bias")
    ]
    return ref.matrix(layer, *picked)


# Each sharing with half of the methods: a method sees no more of a layer than its factors.
WAYS = [
    *(("expand", method) for method in ("eigen", "inverse-full")),
    *(("reduce", method) for method in ("eigen-outer", "inverse-pi")),
]
ALL_WAYS = [(sharing, method) for sharing in SHARING for method in ref.METHODS]


def optimizer(net: nn.Module, sharing: str, method: str, **options: Any) -> KFACSGD:
    """Return an optimizer whose step is the preconditioned gradient."""
    options = {"damping": DAMPING, "kl_clip": None, **ref.METHODS[method], **options}
    return KFACSGD(net, lr=1.0, weight_sharing=sharing, **options)


def check(
    case: Case,
    ways: list[tuple[str, str]] = WAYS,
    diagonal: tuple[bool, bool] = (False, False),
    **options: Any,
) -> None:
    net, x = build(case)
    a = ref.input_rows(net.layer, x, **case.call)
    g = ref.gradient_rows(net.layer, loss_of, x, **case.call)
    terms = len(x) if case.terms is None else case.terms
    for sharing, method in ways:
        net, x = build(case)
        opt = optimizer(net, sharing, method, **options)
        loss_of(net(x, **case.call)).backward()
        gradient = changed(net.layer, ref.gradients_of(net))
        ref.assert_close(torch.einsum("bnpg,bnpa->bga", g, a), gradient, what="reference's rows")
        expected = ref.factors(a, g, terms, sharing, *diagonal)
        check_step(opt, net, expected, gradient, f"{sharing}, {method}", method)


def check_step(
    opt: KFACSGD, net: nn.Module, expected: Any, gradient: Tensor, what: str, method: str
) -> None:
    layouts = [p.stride() for p in net.parameters()]
    step = changed(net.layer, ref.take_step(opt, net))
    assert layouts == [p.stride() for p in net.parameters()], what
    found = opt.preconditioner.factors("layer")
    for actual, wanted, label in zip(found, expected, "AG", strict=True):
        ref.assert_close(actual, wanted, what=f"{what}: factor {label}")
    wanted = ref.precondition(*expected, gradient, DAMPING, method)
    ref.assert_close(step, wanted, what=f"{what}: step")


def freeze(name: str) -> Callable[[nn.Module], None]:
    return lambda layer: getattr(layer, name).requires_grad_(False)


def channels_last(layer: nn.Module) -> None:
    layer.to(memory_format=torch.channels_last)


def each(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases.values(), ids=list(cases))


each_sharing = pytest.mark.parametrize("sharing", SHARING)
