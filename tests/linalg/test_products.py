"""Eigenvalues, roots of damped factors, polar factors, and directions that roots have softened."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kaisa_optim.linalg import products
from tests.support import reference as ref
from tests.support.training import assert_near

# ---- eigenvalues and symmetric inverse roots, against those of float64 ----

KINDS = "geometric", "halves", "first", "power 1", "power 2"
paths = pytest.mark.parametrize("by_products", [False, True], ids=["eigenvectors", "products"])


def eigenvalues(kind: str, n: int, condition: float) -> Tensor:
    i = torch.arange(1, n + 1, device="cpu").double()
    if kind == "geometric":
        return condition ** (-(i - 1) / max(1, n - 1))
    if kind == "halves":
        return (i <= (n + 1) // 2).double()
    return (i <= 1).double() if kind == "first" else i ** -float(kind.split()[1])


def spectrum(kind: str, n: int, condition: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return a float64 factor, and the damping that gives about this condition number."""
    values = eigenvalues(kind, n, condition)
    generator = torch.Generator("cpu").manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, device="cpu").double())
    factor = (q * values) @ q.T
    damping = torch.full((), 1 / condition / values.mean().item(), dtype=torch.float64)
    return ((factor + factor.T) / 2).to(damping.device), damping


def exactly_damped(factors: Tensor, damping: Tensor) -> Tensor:
    exact = factors.double()
    mean = exact.diagonal(dim1=1, dim2=2).mean(1)
    eye = torch.eye(factors.shape[-1], dtype=torch.float64)
    return exact / mean[:, None, None] + damping.double()[:, None, None] * eye


def off(root: Tensor, damped: Tensor) -> Tensor:
    """Return the spectral norm of S F̂ S - I."""
    rest = root @ damped @ root - torch.eye(root.shape[-1], dtype=torch.float64)
    return torch.linalg.eigvalsh((rest + rest.mT) / 2).abs().amax(-1)


def roots_of(
    factors: Tensor, damping: Tensor, by_products: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return inverse roots, and whether each is good."""
    diagonal = factors.dim() == 2
    return products.inverse_root(factors, damping, diagonal=diagonal, by_products=by_products)


def residual(factors: Tensor, damping: Tensor, root: Tensor) -> Tensor:
    """Return the estimate of the norm of S F̂ S - I that flags go by."""
    damped = products._damped(factors, damping, diagonal=False)
    lower, info = torch.linalg.cholesky_ex(damped)
    lower = lower.to(root.dtype).masked_fill_((info != 0)[:, None, None], torch.nan)
    return products._residual(lower, root)


def bar(condition: float, by_products: bool) -> float:
    if by_products:
        return 0.05 if condition > 1e4 else 1e-3
    return 0.02  # by eigenvectors in float32, or in float64 where these would leave more


stacks = st.lists(
    st.tuples(st.sampled_from(KINDS), st.floats(0, 6), st.floats(-28, 30), st.integers(0, 2**16)),
    min_size=1,
    max_size=3,
)


def stacked(n: int, drawn: list[tuple[str, float, float, int]]) -> tuple[Tensor, Tensor]:
    pairs = [(spectrum(kind, n, 10**c, seed), 10**scale) for kind, c, scale, seed in drawn]
    factors = torch.stack([(scale * factor).float() for (factor, _), scale in pairs])
    return factors, torch.stack([damping for (_, damping), _ in pairs]).float()


@paths
@given(st.integers(2, 48), stacks)
@settings(max_examples=150)
def test_roots_of_any_spectrum_and_scale(by_products, n, drawn):
    factors, damping = stacked(n, drawn)
    root, good = roots_of(factors, damping, by_products)
    assert good.all()
    damped = exactly_damped(factors, damping)
    most = torch.tensor([bar(10**c, by_products) for _, c, _, _ in drawn])
    assert root.dtype == torch.float32
    assert torch.equal(root, root.mT)
    assert (torch.linalg.eigvalsh(root.double()) > 0).all()
    norm = off(root.double(), damped)
    assert (norm <= most).all()
    estimate = residual(factors, damping, root)
    # Both are rounded: float32 roots are, by 1e-7 times the root of the condition number.
    assert (estimate >= 0.7 * norm - 1e-3).all()
    assert (estimate <= 1.1 * n**0.25 * norm + 1e-3).all()


@pytest.mark.parametrize("n", [128, 300])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_both_paths_agree_on_larger_factors(kind, n, condition):
    factor, damping = spectrum(kind, n, condition, 0)
    factors, damping = factor[None].float(), damping[None].float()
    damped = exactly_damped(factors, damping)
    both = []
    for by_products in (False, True):
        root, good = roots_of(factors, damping, by_products)
        assert good.all()
        assert off(root.double(), damped) <= bar(condition, by_products)
        both.append(root)
    one, other = both
    assert (one - other).norm() <= 3e-3 * one.norm()


@paths
@given(st.integers(1, 40), st.integers(0, 2**16), st.integers(-90, 90))
@settings(max_examples=30)
def test_powers_of_two_cancel(by_products, n, seed, exponent):
    factor, damping = spectrum("power 1", n, 1e3, seed)
    factors, damping = factor[None].float(), damping[None]
    root, _ = roots_of(factors, damping, by_products)
    assert torch.equal(roots_of(factors * 2.0**exponent, damping, by_products)[0], root)


@paths
@given(st.integers(1, 30), st.integers(0, 2**16), st.sampled_from([1e-30, 1.0, 1e30]))
@settings(max_examples=30)
def test_a_diagonal_is_the_dense_matrix_of_it(by_products, n, seed, scale):
    generator = torch.Generator("cpu").manual_seed(seed)
    values = scale * torch.rand(3, n, generator=generator, device="cpu")
    values = values.to(torch.get_default_device())
    values[1] = 0
    damping = torch.tensor([1e-3, 1e-3, 0.1])
    found, good = roots_of(values, damping)
    dense, as_good = roots_of(values.diag_embed(), damping, by_products)
    assert good.all() and as_good.all()
    assert found.shape == (3, n) and found.dtype == dense.dtype == torch.float32
    torch.testing.assert_close(found.diag_embed(), dense, rtol=1e-4, atol=1e-5)
    exact = values[0].double() / values[0].double().mean() + damping[0].double()
    torch.testing.assert_close(found[0].double(), exact**-0.5)


@paths
@pytest.mark.parametrize("n", [1, 2, 65])
def test_a_zero_factor_counts_as_the_identity(by_products, n):
    factors = torch.stack([torch.zeros(n, n), torch.eye(n)])
    damping = torch.tensor([1e-2, 3.0])
    found, good = roots_of(factors, damping, by_products)
    assert good.all()
    torch.testing.assert_close(found[0], torch.eye(n), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], torch.eye(n) / 2, rtol=0, atol=1e-5)


@paths
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [(0, 0), (2, 1), (8, 8)])
def test_a_number_that_is_not_finite_leaves_neighbours_alone(by_products, number, at):
    factors = torch.stack([spectrum("power 1", 9, 1e3, seed)[0] for seed in range(3)]).float()
    damping = torch.full((3,), 0.01)
    expected, _ = roots_of(factors, damping, by_products)
    factors[1, at[0], at[1]] = factors[1, at[1], at[0]] = number
    found, good = roots_of(factors, damping, by_products)
    assert good.tolist() == [True, False, True]
    # The paths differ by more: the neighbours must not change to the other one.
    torch.testing.assert_close(found[::2], expected[::2], rtol=1e-6, atol=1e-6)
    diagonals = factors.diagonal(dim1=1, dim2=2)
    if at[0] == at[1]:
        found, good = roots_of(diagonals, damping)
        assert good.tolist() == [True, False, True]
        assert found[::2].isfinite().all()


@paths
def test_an_indefinite_factor_is_flagged(by_products):
    factors = torch.eye(5).repeat(3, 1, 1)
    factors[0, 0, 0] = -1
    factors[2] *= -1
    damping = torch.full((3,), 0.1)
    _, good = roots_of(factors, damping, by_products)
    assert good.tolist() == [False, True, False]
    _, good = roots_of(factors.diagonal(dim1=1, dim2=2), damping)
    assert good.tolist() == [False, True, False]
    assert residual(factors, damping, factors)[0].isnan()


def test_roots_that_are_off_are_flagged(monkeypatch):
    factors, damping = torch.diag(torch.arange(1.0, 9.0))[None], torch.tensor([0.1])
    root, good = roots_of(factors, damping, by_products=True)
    assert good.all()
    assert residual(factors, damping, root) < 1e-4
    assert residual(factors, damping, 1.5 * root) > 1.2
    monkeypatch.setattr(products, "_OF_ROOTS", products._OF_ROOTS[:-3])
    _, good = roots_of(factors, damping, by_products=True)
    assert not good.any()


@paths
def test_condition_numbers_beyond_float32_are_flagged(by_products):
    factors = torch.ones(1, 9, 9).double()
    for condition, expected in ((1e5, True), (1e14, False)):
        damping = torch.tensor([9 / condition]).double()
        _, good = roots_of(factors.float(), damping, by_products)
        assert good.tolist() == [expected]


def test_no_number_is_needed_on_the_host():
    """Tensors on the meta device have shapes but no numbers: to ask for one raises."""
    factors, damping = torch.empty(2, 5, 5, device="meta"), torch.empty(2, device="meta")
    found, good = roots_of(factors, damping)
    assert good.shape == (2,) and found.shape == (2, 5, 5)
    assert residual(factors, damping, found).shape == (2,)
    roots_of(torch.empty(2, 5, device="meta"), damping)


@paths
def test_float64_factors_give_float64_roots(by_products):
    factor, damping = spectrum("power 1", 30, 1e4, 0)
    found, good = roots_of(factor[None], damping[None], by_products)
    assert good.all() and found.dtype == torch.float64
    damped = exactly_damped(factor[None], damping[None])
    assert off(found, damped) < (2e-5 if by_products else 1e-10)


@pytest.mark.parametrize("n", [1, 5])
def test_the_largest_eigenvalues_come_first_and_none_is_below_zero(n):
    x = torch.randn(3, n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors = x + x.mT
    before = factors.clone()
    values, vectors = products.eigendecompose(factors)
    wanted = torch.linalg.eigvalsh(factors).flip(-1)
    assert (wanted < 0).any() and (wanted > 0).any()
    torch.testing.assert_close(values, wanted.clamp(min=0))
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(n).double().expand(3, n, n))
    torch.testing.assert_close(factors @ vectors, vectors * wanted[:, None, :])
    assert torch.equal(factors, before)


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
