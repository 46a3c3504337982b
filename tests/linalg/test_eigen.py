"""Eigenvalues and eigenvectors of factors."""

from __future__ import annotations

import pytest
import torch

from kaisa_optim.linalg.products import eigendecompose


@pytest.mark.parametrize("n", [1, 5])
def test_the_largest_come_first_and_none_is_below_zero(n):
    x = torch.randn(3, n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors = x + x.mT
    kept = factors.clone()
    values, vectors = eigendecompose(factors)
    wanted = torch.linalg.eigvalsh(factors).flip(-1)
    assert (wanted < 0).any() and (wanted > 0).any()
    torch.testing.assert_close(values, wanted.clamp(min=0))
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(n).double().expand(3, n, n))
    torch.testing.assert_close(factors @ vectors, vectors * wanted[:, None, :])
    assert torch.equal(factors, kept)
