"""Storage of state in half precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.curvature.test_sums import step

HALF = {
    "stored product": {"compute_eigenvalue_outer_product": True, "damping": 1e-6},
    "full": {"compute_method": "inverse", "damping_split": "full", "damping": 1e-6},
    "pi": {"compute_method": "inverse", "damping": 1e-9},
}


@pytest.mark.parametrize("name", HALF)
def test_half_precision_storage_never_overflows(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    opt = step(net, torch.randn(3, 6), inv_dtype=torch.float16, **HALF[name])
    assert all(p.isfinite().all() for p in net.parameters())
    stored = [t for n, t in opt.preconditioner.store.applied.tensors() if n in ("scale", "inverse")]
    # The test is about values beyond what the dtype holds: some must have come to its limit.
    assert any((t.abs() == torch.finfo(torch.float16).max).any() for t in stored)
