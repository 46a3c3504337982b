"""Polar factors of momenta, and directions that roots have softened."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kaisa_optim.linalg import products
from tests.support import reference as ref
from tests.support.training import assert_near

# ---- nearly equal singular values ----

TOWARDS_ONE = (7.7110, -22.1138, 16.2488), (3.2153, -2.4112, 0.5013)
FROM_FURTHER = (8.2987, -24.4305, 18.0903), (3.9152, -2.9211, 0.5592), (3.1746, -2.3804, 0.4978)


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
    scales = 10.0 ** torch.arange(-25, -25 + 25 * k, 25, dtype=torch.float64)
    found = products.orthogonalized(matrices * scales[:, None, None], in_half=False)
    for matrix, one in zip(matrices, found, strict=True):
        ref.assert_close(one, evened(matrix), what="a matrix")


IN_HALF = pytest.mark.parametrize("half", [True, False], ids=["bf16", "full"])


@IN_HALF
@pytest.mark.parametrize(("g", "a"), [(64, 64), (300, 64), (64, 300), (1, 5), (280, 257)])
def test_orthogonalized_in_float32(g, a, half):
    """Nearly equal singular values where they differ by ten, of wide matrices by 28; nothing
    stays nothing."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, n)).Q[:, : min(g, a)] for n in (g, a))
    matrix = u * torch.logspace(0, -1.45 if a == 257 else -1, min(g, a)) @ v.T
    rows = torch.stack([matrix, 0 * matrix, matrix * math.nan])
    found = products.orthogonalized(rows, in_half=half).float()
    s = torch.linalg.svdvals(found[0])
    assert s.max() <= 1.54 and s.min() >= 0.47
    wanted = evened(matrix.double()).float()
    assert (found[0] - wanted).norm() < (0.1 if half else 1e-3) * wanted.norm()
    assert torch.equal(found[1], 0 * matrix) and found[2].isnan().all()
    with mock.patch.object(products, "_AT_ONCE", 1):  # one after the other
        again = products.orthogonalized(rows[:2], in_half=half)
    assert (again - found[:2]).norm() < (0.02 if half else 1e-5) * wanted.norm()


@IN_HALF
def test_orthogonalized_of_rank_one(half):
    """What is rounded must not take the singular value beyond 1, where polynomials grow fast."""
    for g in range(65, 130):
        norm = products.orthogonalized(torch.ones(1, g, 130), in_half=half).norm()
        assert 0.45 < norm < 1.55


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 99), st.sampled_from([0.0, 0.5, 0.9, 1.0])
)
def test_softened_directions(g, a, seed, kept):
    """T_G D T_A with T = αI + (1 - α) R, roots as matrices or as diagonals."""
    generator = torch.Generator().manual_seed(seed)
    root_g, root_a = (
        torch.randn(2, n, n, generator=generator, dtype=torch.float64) for n in (g, a)
    )
    root_g, root_a = root_g + root_g.mT, root_a + root_a.mT
    direction = torch.randn(2, g, a, generator=generator, dtype=torch.float64)
    for of_g, of_a in itertools.product((root_g, root_g.diagonal(0, 1, 2)), (root_a, root_a[:, 0])):
        found = products.softened(direction.clone(), of_g, of_a, kept)
        for one, d, r, s in zip(found, direction, of_g, of_a, strict=True):
            r, s = (x.diag() if x.dim() == 1 else x for x in (r, s))
            eye_g, eye_a = (torch.eye(len(x), dtype=torch.float64) for x in (r, s))
            outer = kept * eye_g + (1 - kept) * r, kept * eye_a + (1 - kept) * s
            assert_near(one, outer[0] @ d @ outer[1], 1e-10, 1e-10)
