"""The dtype of stacks: float32 or better, whatever the activations and the parameters are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD
from tests.support.watch import (
    assert_close,
    check_step,
    normal,
    seeded,
)


def state_dtypes(opt) -> set[torch.dtype]:
    kfac = opt.preconditioner
    tensors = [t for shelf in (kfac.store.owned, kfac.store.applied) for _, t in shelf.tensors()]
    return {t.dtype for t in tensors if t.is_floating_point()}


def test_float64_model_is_really_float64():
    net = seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    x = 1 + 1e-9 * normal(6, 2)  # float32 would see six equal rows, and A of rank one
    opt = check_step(net, lambda model: model(x).square().sum(1).mean().backward(), ["0", "2"], 6.0)
    assert state_dtypes(opt) == {torch.float64}
    a, _ = opt.preconditioner.factors("0")
    centred = x - x.mean(0)
    spread = a[0, :2, :2] - a[0, :2, 2:] @ a[0, 2:, :2]
    assert spread.abs().max() < 1e-15 and centred.abs().max() > 1e-10


@pytest.mark.parametrize("how", ["half model", "autocast"])
def test_activations_around_300_in_fp16(how):
    # 300² is beyond fp16's 65504.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4))
    x = 300 + torch.randn(8, 3)
    if how == "half model":
        net, x = net.half(), x.half()
    opt = KFACSGD(net, lr=0.1, damping=0.01)
    with torch.autocast("cpu", dtype=torch.float16, enabled=how == "autocast"):
        out = net(x)
    (out.float() / 100).square().mean().backward()
    opt.step()
    a, g = opt.preconditioner.factors("0")
    assert a.dtype == g.dtype == torch.float32
    # What the layer sees: autocast rounds its input, too.
    rows = torch.cat([x.half().double(), torch.ones(8, 1, dtype=torch.float64)], 1)
    assert_close(a, (rows.T @ rows / 8)[None], 1e-6)
    assert g.isfinite().all() and g.abs().max() > 0
    assert all(p.isfinite().all() for p in net.parameters())
