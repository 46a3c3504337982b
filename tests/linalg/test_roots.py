"""Eigenvalues, and symmetric inverse roots of damped factors, against those of float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kaisa_optim.linalg import products
from kaisa_optim.linalg.products import inverse_root

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
    root, good = inverse_root(factors, damping, diagonal=False, by_products=by_products)
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
    both = [
        inverse_root(factors, damping, diagonal=False, by_products=by_products)
        for by_products in (False, True)
    ]
    for by_products, (root, good) in zip((False, True), both, strict=True):
        assert good.all()
        assert off(root.double(), damped) <= bar(condition, by_products)
    (one, _), (other, _) = both
    assert (one - other).norm() <= 3e-3 * one.norm()


@paths
@given(st.integers(1, 40), st.integers(0, 2**16), st.integers(-90, 90))
@settings(max_examples=30)
def test_powers_of_two_cancel(by_products, n, seed, exponent):
    factor, damping = spectrum("power 1", n, 1e3, seed)
    factors, damping = factor[None].float(), damping[None]
    found, expected = (
        inverse_root(some, damping, diagonal=False, by_products=by_products)[0]
        for some in (factors * 2.0**exponent, factors)
    )
    assert torch.equal(found, expected)


@paths
@given(st.integers(1, 30), st.integers(0, 2**16), st.sampled_from([1e-30, 1.0, 1e30]))
@settings(max_examples=30)
def test_a_diagonal_is_the_dense_matrix_of_it(by_products, n, seed, scale):
    values = scale * torch.rand(3, n, generator=torch.Generator("cpu").manual_seed(seed),
                                device="cpu")  # fmt: skip
    values = values.to(torch.get_default_device())
    values[1] = 0
    damping = torch.tensor([1e-3, 1e-3, 0.1])
    found, good = inverse_root(values, damping, diagonal=True)
    dense, as_good = inverse_root(
        values.diag_embed(), damping, diagonal=False, by_products=by_products
    )
    assert good.all() and as_good.all()
    assert found.shape == (3, n) and found.dtype == dense.dtype == torch.float32
    torch.testing.assert_close(found.diag_embed(), dense, rtol=1e-4, atol=1e-5)
    exact = values[0].double() / values[0].double().mean() + damping[0].double()
    torch.testing.assert_close(found[0].double(), exact**-0.5)


@paths
@pytest.mark.parametrize("n", [1, 2, 65])
def test_a_zero_factor_counts_as_the_identity(by_products, n):
    factors = torch.zeros(2, n, n)
    factors[1] = torch.finfo(torch.float32).tiny * torch.rand(n, n)  # most of its digits are lost
    factors[1] = torch.eye(n)
    damping = torch.tensor([1e-2, 3.0])
    found, good = inverse_root(factors, damping, diagonal=False, by_products=by_products)
    assert good.all()
    torch.testing.assert_close(found[0], torch.eye(n), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], torch.eye(n) / 2, rtol=0, atol=1e-5)


@paths
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [(0, 0), (2, 1), (8, 8)])
def test_a_number_that_is_not_finite_leaves_neighbours_alone(by_products, number, at):
    factors = torch.stack([spectrum("power 1", 9, 1e3, seed)[0] for seed in range(3)]).float()
    damping = torch.full((3,), 0.01)
    expected, _ = inverse_root(factors, damping, diagonal=False, by_products=by_products)
    factors[1, at[0], at[1]] = factors[1, at[1], at[0]] = number
    found, good = inverse_root(factors, damping, diagonal=False, by_products=by_products)
    assert good.tolist() == [True, False, True]
    # The paths differ by more: the neighbours must not change to the other one.
    torch.testing.assert_close(found[::2], expected[::2], rtol=1e-6, atol=1e-6)
    diagonals = factors.diagonal(dim1=1, dim2=2)
    if at[0] == at[1]:
        found, good = inverse_root(diagonals, damping, diagonal=True)
        assert good.tolist() == [True, False, True]
        assert found[::2].isfinite().all()


@paths
def test_an_indefinite_factor_is_flagged(by_products):
    factors = torch.eye(5).repeat(3, 1, 1)
    factors[0, 0, 0] = -1
    factors[2] *= -1
    damping = torch.full((3,), 0.1)
    _, good = inverse_root(factors, damping, diagonal=False, by_products=by_products)
    assert good.tolist() == [False, True, False]
    _, good = inverse_root(factors.diagonal(dim1=1, dim2=2), damping, diagonal=True)
    assert good.tolist() == [False, True, False]
    assert residual(factors, damping, factors)[0].isnan()


def test_roots_that_are_off_are_flagged(monkeypatch):
    factors, damping = torch.diag(torch.arange(1.0, 9.0))[None], torch.tensor([0.1])
    root, good = inverse_root(factors, damping, diagonal=False, by_products=True)
    assert good.all()
    assert residual(factors, damping, root) < 1e-4
    assert residual(factors, damping, 1.5 * root) > 1.2
    monkeypatch.setattr(products, "_OF_ROOTS", products._OF_ROOTS[:-3])
    _, good = inverse_root(factors, damping, diagonal=False, by_products=True)
    assert not good.any()


@paths
def test_condition_numbers_beyond_float32_are_flagged(by_products):
    factors = torch.ones(1, 9, 9).double()
    for condition, expected in ((1e5, True), (1e14, False)):
        damping = torch.tensor([9 / condition]).double()
        _, good = inverse_root(factors.float(), damping, diagonal=False, by_products=by_products)
        assert good.tolist() == [expected]


def test_no_number_is_needed_on_the_host():
    """Tensors on the meta device have shapes but no numbers: to ask for one raises."""
    factors, damping = torch.empty(2, 5, 5, device="meta"), torch.empty(2, device="meta")
    found, good = inverse_root(factors, damping, diagonal=False)
    assert good.shape == (2,) and found.shape == (2, 5, 5)
    assert residual(factors, damping, found).shape == (2,)
    inverse_root(torch.empty(2, 5, device="meta"), damping, diagonal=True)


@paths
def test_float64_factors_give_float64_roots(by_products):
    factor, damping = spectrum("power 1", 30, 1e4, 0)
    found, good = inverse_root(factor[None], damping[None], diagonal=False, by_products=by_products)
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
