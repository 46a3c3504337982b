"""What second-order state and statistics must keep at their edges: storage, failures, parts."""

import copy

import pytest
import torch
from torch import nn

from kaisa_optim import KFACSGD
from kaisa_optim.layers import conv
from kaisa_optim.linalg import eigen


def step(net, x, **options):
    opt = KFACSGD(net, lr=1.0, **{"compute_method": "eigen", "kl_clip": None, **options})
    net(x).square().sum(1).mean().backward()
    opt.step()
    return opt


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


def test_a_stored_product_follows_the_factor_that_did_not_fail(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4)).double()
    opt = step(
        net,
        torch.randn(8, 6).double(),
        compute_eigenvalue_outer_product=True,
        factor_update_steps=1,
        inv_update_steps=1,
        damping=0.1,
    )
    whole = eigen.eigendecompose

    def only_g(factors):
        if factors.shape[-1] == 7:
            raise torch.linalg.LinAlgError("planted")
        return whole(factors)

    monkeypatch.setattr(eigen, "eigendecompose", only_g)
    opt.zero_grad()
    net(torch.randn(8, 6).double()).square().sum(1).mean().backward()
    with pytest.warns(UserWarning, match="layer '0' failed, 1 in a row; its older state"):
        opt.step()
    kfac = opt.preconditioner
    a, g = (kfac.store.applied.by_key[kfac.layers["0"], side] for side in "ag")
    expected = 1 / (g["values"][:, :, None] * a["values"][:, None, :] + 0.1)
    torch.testing.assert_close(kfac.store.applied.groups[0].tensors["scale"], expected)


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
