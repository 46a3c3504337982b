"""Rounding without bias: averages in half precision follow theirs in float32, and runs repeat."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from kaisa_optim.linalg import rounding
from tests.support.training import (
    METHODS,
    assert_same,
    network,
    train,
)

EIGEN: dict[str, Any] = {"compute_method": "eigen", "kl_clip": None}


def averaged(decay: float, dtype: torch.dtype | None) -> Tensor:
    """Mean eigenvalues of A and G, 600 steps after inputs have become larger."""
    torch.manual_seed(0)
    model = nn.Linear(48, 48)
    options = {"factor_decay": decay, "factor_dtype": dtype, "factor_update_steps": 1}
    opt = KFACSGD(model, lr=1e-9, inv_update_steps=1000, **EIGEN, **options)
    for i in range(620):
        x = torch.randn(512, 48) * (1 if i < 20 else 1.5)
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    both = opt.preconditioner.factors("")
    assert all(torch.equal(f, f.mT) for f in both)
    return torch.stack([f[0].diagonal().float().mean() for f in both])


@pytest.mark.parametrize("decay", [0.95, 0.99, 0.999])
def test_averages_in_half_precision_do_not_stall(decay):
    """A change below half a unit of the last place was rounded away, in every step."""
    wanted = averaged(decay, None)
    for dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(averaged(decay, dtype), wanted, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_rounding_follows_from_step_and_factor(method, dtype):
    """A resumed run rounds alike, and torch's own generator is left alone."""
    models = network(), network()
    first, second = (KFACSGD(m, lr=0.1, factor_dtype=dtype, **METHODS[method]) for m in models)
    train(models[0], first, range(3))
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, opt in zip(models, (first, second), strict=True):
        before = torch.get_rng_state()
        train(model, opt, range(3, 6))
        assert torch.equal(before, torch.get_rng_state())
    assert_same(models[1], models[0])
    numbers = torch.full((1, 90, 90), 3e-6)  # below float16's least normal number
    kept = rounding.rounded(numbers.clone(), dtype, 1)
    assert len(kept.unique()) == 2 and abs(kept.double().mean() / 3e-6 - 1) < 1e-3
