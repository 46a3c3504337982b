"""Polar factors of momenta, and roots of damped factors."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kaisa_optim.linalg import kronecker, orthogonal
from tests.support import reference as ref
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


# ---- without a root ----

TOWARDS_ONE = (7.7110, -22.1138, 16.2488), (3.2153, -2.4112, 0.5013), (2.2183, -1.5940, 0.4107)
FROM_FURTHER = (
    (8.2987, -24.4305, 18.0903),
    (3.9152, -2.9211, 0.5592),
    (3.1746, -2.3804, 0.4978),
    (2.1895, -1.5672, 0.4079),
)


def evened(matrix: Tensor) -> Tensor:
    """Return the matrix with singular values that polynomials make alike."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    even = 0.98 * s / s.norm()
    for a, b, c in FROM_FURTHER if min(matrix.shape) > 256 else TOWARDS_ONE:
        even = a * even + b * even**3 + c * even**5
    return u @ even.diag() @ v


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(0, 10_000))
def test_orthogonalized_matrices(k, g, a, seed):
    """As by a decomposition, each for itself, whatever its scale and shape."""
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(k, g, a, generator=generator, dtype=torch.float64)
    scales = 10.0 ** torch.arange(-60, -60 + 60 * k, 60, dtype=torch.float64)
    found = orthogonal.orthogonalized(matrices * scales[:, None, None], in_half=False)
    for matrix, one in zip(matrices, found, strict=True):
        ref.assert_close(one, evened(matrix), what="a matrix")


IN_HALF = pytest.mark.parametrize("half", [True, False], ids=["bf16", "full"])


@IN_HALF
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthogonalized_at_the_ends_of_a_dtype(dtype, half):
    """Where squares are not there any more: a moment without gradients comes to any number."""
    half = half and dtype == torch.float32
    torch.manual_seed(0)
    matrix = torch.randn(6, 4, dtype=dtype)
    info = torch.finfo(dtype)
    wanted = evened(matrix)
    for scale in (info.tiny * 10, info.tiny**0.5, 1e-20, 1e10, info.max**0.5, info.max / 10):
        found = orthogonal.orthogonalized(matrix[None] * scale, in_half=half)[0]
        coarse = {"rtol": 0.1, "atol": 0.02} if half else {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(found, wanted, **coarse)


@IN_HALF
@pytest.mark.parametrize(("g", "a"), [(64, 64), (300, 64), (64, 300), (1, 5), (280, 257)])
def test_orthogonalized_in_float32(g, a, half):
    """Nearly equal singular values where they differ by ten, of wide matrices by 28; nothing
    stays nothing."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, n)).Q[:, : min(g, a)] for n in (g, a))
    matrix = u * torch.logspace(0, -1.45 if a == 257 else -1, min(g, a)) @ v.T
    rows = torch.stack([matrix, 0 * matrix, matrix * math.nan])
    found = orthogonal.orthogonalized(rows, in_half=half)
    s = torch.linalg.svdvals(found[0])
    assert s.max() <= (1.25 if half else 1.21) * s.min()
    wanted = evened(matrix.double()).float()
    assert (found[0] - wanted).norm() < (0.05 if half else 1e-3) * wanted.norm()
    assert torch.equal(found[1], 0 * matrix) and found[2].isnan().all()
    with mock.patch.object(orthogonal, "_AT_ONCE", 1):  # one after the other
        again = orthogonal.orthogonalized(rows[:2], in_half=half)
    assert (again - found[:2]).norm() < (0.02 if half else 1e-5) * wanted.norm()


@IN_HALF
def test_orthogonalized_of_rank_one(half, monkeypatch):
    """What is rounded must not take the singular value beyond 1, where polynomials grow fast."""
    norms: list[float] = []
    real = orthogonal._towards_one

    def watched(wide: Tensor, polynomials: Any, in_half: bool) -> Tensor:
        found = real(wide, polynomials, in_half)
        norms.append(float(found.norm()))
        return found

    monkeypatch.setattr(orthogonal, "_towards_one", watched)
    for g in range(65, 130):
        ones = torch.ones(1, g, 130)
        orthogonal.orthogonalized(ones, in_half=half)
    assert min(norms) > 0.85 and max(norms) < 1.15
