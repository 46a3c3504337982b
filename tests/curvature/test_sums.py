"""What second-order state and statistics must keep at their edges: storage, failures, parts."""

import copy

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD
from kaisa_optim.layers import conv


def step(net, x, **options):
    opt = KFACSGD(net, lr=1.0, **{"compute_method": "eigen", "kl_clip": None, **options})
    net(x).square().sum(1).mean().backward()
    opt.step()
    return opt


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: nn.Conv2d(4, 3, 2), (7, 4, 3, 3)),
        (lambda: nn.ConvTranspose1d(4, 3, 2), (7, 4, 5)),
    ],
)
@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
def test_a_batch_taken_in_parts_is_the_same_batch(monkeypatch, make, shape, weight_sharing):
    torch.manual_seed(0)
    net = nn.Sequential(make().double(), nn.Flatten())
    x = torch.randn(shape).double()
    whole = step(copy.deepcopy(net), x, weight_sharing=weight_sharing)
    monkeypatch.setattr(conv, "_PATCH_ELEMENTS", 60)
    parts = step(net, x, weight_sharing=weight_sharing)
    for one, other in zip(*(o.preconditioner.factors("0") for o in (whole, parts)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
