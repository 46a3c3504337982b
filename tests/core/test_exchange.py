"""What a step works out once, and what it does in every step alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kaisa_optim import KFACSGD, KFACAdam
from tests.support import groups
from tests.support.training import early


class Operations(TorchDispatchMode):
    """Records each operation with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.seen.append((str(func), [tuple(x.shape) for x in tensors]))
        return func(*args, **(kwargs or {}))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)  # stepped by the base
        self.hidden = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).mean((2, 3))
        for layer in self.hidden:
            x = layer(x).tanh()
        return self.head(x)


def addresses(model: nn.Module, opt: Any) -> dict[Any, int]:
    """Return where parameters, momenta, averages and decompositions lie; counts are numbers."""
    found: dict[Any, Tensor] = dict(model.named_parameters())
    for name, p in model.named_parameters():
        for key, value in opt.state[p].items():
            if isinstance(value, Tensor) and key != "step":
                found[name, key] = value
    for i, (name, tensor) in enumerate(groups.tensors(opt)):
        found[i, name] = tensor
    return {key: tensor.data_ptr() for key, tensor in found.items()}


@pytest.mark.parametrize(
    ("cls", "options", "kept"),
    [
        (KFACSGD, {"momentum": 0.9}, "momentum_buffer"),
        (KFACAdam, {}, "exp_avg"),
        (KFACSGD, {"momentum": 0.9, "compute_method": "eigen"}, "momentum_buffer"),
    ],
    ids=["KFACSGD", "KFACAdam", "eigen"],
)
def test_quiet_steps_are_alike_and_move_nothing(cls, options, kept):
    """A step that neither gathers nor refreshes makes the same operations as the one before."""
    model = Images()
    with early():
        long = {"factor_update_steps": 1000, "inv_update_steps": 1000}
        opt = cls(model, lr=0.01, weight_decay=0.01, **long, **options)
    seen, places = [], []
    for _ in range(5):
        opt.zero_grad()
        model(torch.randn(8, 2, 6, 6)).square().mean().backward()
        with Operations() as operations:
            opt.step()
        seen.append(operations.seen)
        places.append(addresses(model, opt))
    assert len(seen[0]) > len(seen[3]) > 10
    assert seen[3] == seen[4]
    assert ("conv.weight", kept) in places[0]
    assert places[1] == places[2] == places[3] == places[4]
