"""What a plan knows of an optimizer, against the optimizer itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam, with_kfac
from kaisa_optim.tools.survey import survey


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Embedding(50, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10)
    found = nn.Sequential(*layers)
    found[1].bias.requires_grad_(False)
    found.register_buffer("scale", torch.ones(3))
    return found


def state_bytes(optimizer: Any) -> int:
    """The bytes of the base's state."""
    return sum(
        x.nbytes
        for entry in optimizer.state.values()
        for name, x in entry.items()
        if isinstance(x, Tensor) and not name.startswith("kfac_")
    )


OPTIM = torch.optim
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (KFACSGD, {}),
    "SGD with momentum": (KFACSGD, {"momentum": 0.9}),
    "Adam": (KFACAdam, {}),
    "Adam, AMSGrad": (KFACAdam, {"amsgrad": True}),
    "Adam, eigen": (KFACAdam, {"compute_method": "eigen"}),
    "Adam, a tensor as lr": (KFACAdam, {"lr": torch.tensor(0.01), "foreach": False}),
    "LAMB": (KFACLAMB, {}),
    "AdamW": (with_kfac(OPTIM.AdamW), {}),
    "RMSprop": (with_kfac(OPTIM.RMSprop), {}),
    "NAdam": (with_kfac(OPTIM.NAdam), {}),
    "Adafactor": (with_kfac(OPTIM.Adafactor), {}),
    "Rprop": (with_kfac(OPTIM.Rprop), {}),
    "Adagrad": (with_kfac(OPTIM.Adagrad), {}),  # makes the entries of frozen parameters, too
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_state_are_those_of_the_optimizer(name):
    kind, options = CASES[name]
    net = model()
    optimizer = kind(net, **{"lr": 0.01, **options})
    case = survey(optimizer)[0]
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randint(50, (8, 5))).square().mean().backward()
        optimizer.step()
    assert case.base + sum(x.size for x in case.momenta) == state_bytes(optimizer)
    held = {*net.parameters(), *net.buffers()}
    assert case.weights == sum(x.nbytes for x in held)
    assert case.gradients == sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
    assert [x.name for x in case.layers] == list(optimizer.preconditioner.layers)
    assert case.sizes == optimizer.preconditioner.groups.sizes


def test_nothing_of_the_model_changes():
    net = model()
    optimizer = KFACAdam(net)
    hooks = len(net[1]._forward_hooks), len(net[1]._forward_pre_hooks)
    survey(optimizer)
    assert hooks == (len(net[1]._forward_hooks), len(net[1]._forward_pre_hooks))
    assert all(p.grad is None for p in net.parameters())


class Strange(OPTIM.SGD):
    """A base whose step fails before it has any state."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no step without a device")


def test_a_base_that_can_not_step_on_meta_is_named():
    with pytest.raises(ValueError, match="the entries of Strange are not known before a step: no"):
        survey(with_kfac(Strange)(model(), lr=0.1))
