"""The stored product of eigenvalues."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kaisa_optim.linalg import eigen
from tests.curvature.test_sums import step


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
