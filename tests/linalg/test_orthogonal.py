"""Polar factors of momenta, and roots of damped factors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kaisa_optim.linalg import kronecker, orthogonal
from tests.support.reference import MUON_POLYNOMIAL as POLYNOMIAL
from tests.support.reference import dense_metric, muon_direction
from tests.support.training import assert_near, assert_same


def psd(n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rows = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return rows.T @ rows


sizes = st.integers(1, 9)


@pytest.mark.parametrize("steps", [5, 15])
@pytest.mark.parametrize("in_half", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (48, 300), (300, 48)])
def test_directions_of_low_rank_stay_near_one(shape, in_half, steps):
    """Rounding in X Xᵀ, outside of the range of X, must not grow with every polynomial."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 4, generator=generator) for n in shape)
    found = orthogonal.polar(
        (left @ right.T)[None], None, [POLYNOMIAL] * steps, 1e-7, in_half=in_half
    )
    assert torch.linalg.matrix_norm(found, 2) < 1.3


@given(sizes, st.integers(0, 99), st.sampled_from([1e-3, 0.1, 10.0]))
def test_a_root_of_the_damped_inverse(n, seed, damping):
    g = torch.stack([psd(n, seed), 1e-6 * psd(n, seed + 1), torch.zeros(n, n).double()])
    root = kronecker.damped_root(g, torch.full((3,), damping, dtype=g.dtype))
    assert_same(root, root.triu())
    for one, factor in zip(root, g, strict=True):
        metric = dense_metric(factor, damping)
        assert_near(one @ one.T, metric @ metric, rtol=1e-6, atol=1e-8)
    diagonals = g.diagonal(0, 1, 2)
    found = kronecker.damped_root_of_diagonal(diagonals, torch.full((3,), damping, dtype=g.dtype))
    for one, diagonal in zip(found, diagonals, strict=True):
        assert_near(one.diag(), dense_metric(diagonal.diag(), damping))


def test_an_indefinite_factor_has_no_root():
    bad = torch.eye(4).double()
    bad[0, 0] = -5
    root = kronecker.damped_root(torch.stack([bad, torch.eye(4).double()]), torch.full((2,), 0.1))
    assert root[0].isnan().all() and root[1].isfinite().all()


@given(sizes, sizes, st.integers(0, 99))
def test_any_root_of_the_metric_gives_its_step(g, a, seed):
    """Wide, tall and square: the symmetric root and the triangular one, and no root at all."""
    momentum = torch.randn(g, a, generator=torch.Generator().manual_seed(seed)).double()
    factor, damping = psd(g, seed), torch.tensor([0.1]).double()
    metric = dense_metric(factor, 0.1)
    polynomials = [POLYNOMIAL] * 5

    def found(root: Tensor | None) -> Tensor:
        return orthogonal.polar(momentum[None], root, polynomials, 1e-7, in_half=False)[0]

    expected = metric @ muon_direction(metric @ momentum)
    assert_near(found(kronecker.damped_root(factor[None], damping)), expected, 1e-7, 1e-8)
    assert_near(found(metric[None]), expected, 1e-7, 1e-8)
    assert_near(found(None), muon_direction(momentum), 1e-7, 1e-8)
    scale = torch.rand(g).double() + 0.1
    assert_near(found(scale[None]), found(scale.diag()[None]), 1e-7, 1e-8)


@pytest.mark.parametrize(("g", "a"), [(80, 80), (70, 300), (300, 70)])
def test_in_half_precision_it_is_about_the_same(g, a):
    momentum = torch.randn(2, g, a, generator=torch.Generator().manual_seed(0))
    roots = kronecker.damped_root(torch.stack([psd(g, i, torch.float32) for i in range(2)]),
                                torch.full((2,), 0.1))  # fmt: skip
    for root in (None, roots):
        whole, half = (
            orthogonal.polar(momentum, root, [POLYNOMIAL] * 5, 1e-7, in_half=half)
            for half in (False, True)
        )
        assert half.dtype == torch.float32
        assert 0 < (whole - half).norm() / whole.norm() < 0.03


@pytest.mark.parametrize("in_half", [False, True])
@pytest.mark.parametrize(("rows", "off"), [(32, 1.5), (1024, 0.02)])
def test_rounding_stays_small_where_the_metric_is_large(rows, off, in_half):
    """With few examples G and M vanish in most directions, where R is largest.

    There steps in half precision are mostly rounding, but not longer than without rounding. R in
    half precision suits where there are enough examples.
    """
    generator = torch.Generator().manual_seed(0)
    g, a = (torch.randn(rows, n, generator=generator) for n in (256, 128))
    momentum, factor = (g.T @ a)[None], (g.T @ g)[None]
    root = kronecker.damped_root(factor.double(), torch.tensor([0.1]).double())
    polynomials = [POLYNOMIAL] * 5
    expected = orthogonal.polar(momentum.double(), root, polynomials, 1e-7, in_half=False)
    for dtype in (torch.float32, torch.bfloat16) if rows > 256 else (torch.float32,):
        found = orthogonal.polar(momentum, root.to(dtype), polynomials, 1e-7, in_half=in_half)
        assert found.dtype == torch.float32
        assert (found - expected).norm() < (off if in_half else 0.01) * expected.norm()
        most = torch.linalg.matrix_norm(expected, 2)
        assert torch.linalg.matrix_norm(found, 2) < 1.3 * most
