"""Products by oneDNN, where torch's own are slow: the same numbers, asked for by a rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kaisa_optim import KFACSGD
from kaisa_optim.linalg import kronecker, moments, products
from tests.support.training import EVERY_STEP, assert_near

try:
    LINEAR = products.onednn_linear()
except AttributeError:
    LINEAR = None
needs_onednn = pytest.mark.skipif(LINEAR is None, reason="torch has no such operator here")


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the products that oneDNN is asked for, whatever the CPU."""
    found = []

    def linear(x, w):
        found.append((*x.shape, len(w)))
        return LINEAR(x, w)

    monkeypatch.setattr(products, "_onednn", lambda: linear)
    return found


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def near(actual, expected, within=2e-6):
    """``expected`` is of float64."""
    difference = (actual.double() - expected).norm() / expected.norm()
    assert difference < within
    assert actual.dtype == torch.float32


@needs_onednn
@pytest.mark.parametrize("n, rows", [(127, 1 << 13), (128, 4095), (128, 4096), (150, 1 << 13)])
def test_half_of_a_tall_product_is_all_of_it(calls, n, rows):
    x = random(1, rows, n)
    found = moments.second_moment(x, x.dtype, diagonal=False)
    near(found, x.double().mT @ x.double())
    by_halves = n >= 128 and rows >= 32 * n
    assert sum(m * w for m, _, w in calls) < (0.7 if by_halves else 1.01) * n * n
    assert (len(calls) > 1) == by_halves


@pytest.mark.parametrize(
    ("matrices", "rows", "n", "by_halves"),
    [
        (1, 3700, 191, False),
        (1, 3700, 192, True),
        (2, 500, 517, False),
        (2, 600, 517, True),
        (1, 274, 1100, False),  # few rows
        (1, 275, 1100, True),
    ],
)
@pytest.mark.parametrize("append_one", [False, True])
def test_half_of_torchs_own_product_is_all_of_it(
    matrices, rows, n, by_halves, append_one, monkeypatch
):
    monkeypatch.setattr(products, "_onednn", lambda: None)
    x = random(matrices, rows, n)
    with FlopCounterMode(display=False) as counter:
        found = moments.second_moment(x, x.dtype, diagonal=False, append_one=append_one)
    whole = torch.cat([x.double(), torch.ones(matrices, rows, append_one).double()], 2)
    near(found, whole.mT @ whole)
    assert torch.equal(found, found.mT)
    full = 2 * matrices * rows * n * n
    assert counter.get_total_flops() < (0.65 if by_halves else 1.01) * full
    assert (counter.get_total_flops() < full) == by_halves


@pytest.mark.parametrize("append_one", [False, True])
def test_the_moment_of_many_narrow_rows(append_one):
    x = random(2, 9000, 9)
    whole = torch.cat([x.double(), torch.ones(2, 9000, append_one).double()], 2)
    near(moments.second_moment(x, x.dtype, diagonal=False, append_one=append_one), whole.mT @ whole)


@needs_onednn
@pytest.mark.parametrize(("rows", "n"), [(300, 127), (600, 256), (520, 300), (70, 257)])
@pytest.mark.parametrize("append_one", [False, True])
@pytest.mark.parametrize("by_column", [False, True])
def test_second_moments(calls, rows, n, append_one, by_column):
    x = random(1, n, rows).mT if by_column else random(1, rows, n)
    found = moments.second_moment(x, x.dtype, diagonal=False, append_one=append_one)
    wide = x.double()
    if append_one:
        wide = torch.cat([wide, wide.new_ones(1, rows, 1)], 2)
    near(found, wide.mT @ wide)
    assert_near(found, found.mT, 1e-5, 1e-4)
    quarter = -(-n // 4)
    if n >= 256 and rows >= n / 4:  # one block is the other's copy
        assert torch.equal(found[:, quarter:n, :quarter], found[:, :quarter, quarter:n].mT)
    # Of wide ones only the blocks on and under the diagonal.
    part = 1 if n < 256 or rows < n / 4 else 0.66
    assert 0 < sum(m * w for m, _, w in calls) <= part * (n + append_one) ** 2


@needs_onednn
@pytest.mark.parametrize(("k", "g", "a"), [(1, 256, 257), (3, 300, 256)])
def test_between_two_matrices(calls, k, g, a):
    left, middle, right = random(k, g, g), random(k, g, a), random(k, a, a)
    double = [t.double() for t in (left, middle, right)]
    near(kronecker.into_basis(middle, left, right), double[0].mT @ double[1] @ double[2])
    near(kronecker.out_of_basis(middle, left, right), double[0] @ double[1] @ double[2].mT)
    inverses = left + left.mT, right + right.mT
    expected = inverses[0].double() @ double[1] @ inverses[1].double()
    near(kronecker.apply_inverse(middle, *inverses), expected)
    assert len(calls) == 3 * 2 * k


@needs_onednn
@pytest.mark.parametrize("turned", [False, True])
def test_one_product(calls, turned):
    left, right = random(2, 200, 300), random(2, 300, 150)
    if turned:
        left, right = random(2, 300, 200).mT, random(2, 150, 300).mT
    near(products.product(left, right), left.double() @ right.double())
    assert calls == [(200, 300, 150)] * 2


@needs_onednn
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 600, 256), torch.float64), ((2, 600, 256), torch.float32), ((1, 16, 64), torch.float32)],
    ids=["float64", "several", "small"],
)
def test_others_are_torchs_own(calls, shape, dtype):
    moments.second_moment(random(*shape, dtype=dtype), dtype, diagonal=False)
    small = random(2, 64, 300, dtype=dtype)
    kronecker.into_basis(small, random(2, 64, 64, dtype=dtype), random(2, 300, 300, dtype=dtype))
    assert not calls


@needs_onednn
def test_a_network_learns_the_same(calls, monkeypatch):
    def learned():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 280), nn.Tanh(), nn.Linear(280, 260))
        options = {**EVERY_STEP, "inv_update_steps": 2}
        opt = KFACSGD(model, lr=0.01, damping=1.0, **options)
        for i in range(4):
            x = torch.randn(512, 300, generator=torch.Generator().manual_seed(i))
            opt.zero_grad()
            model(x).square().sum(1).mean().backward()
            opt.step()
        return [p.detach() for p in model.parameters()]

    quick = learned()
    assert calls
    monkeypatch.setattr(products, "_onednn", lambda: None)
    assert_near(quick, learned(), 1e-4, 1e-6)


@needs_onednn
def test_what_is_not_dense_is_copied(monkeypatch):
    """The operator takes a thousand times as long over such a second operand."""
    taken = []

    def recorded(x, w, *rest):
        taken.append(w.is_contiguous() or w.mT.is_contiguous())
        return x @ w.mT

    class Operators:
        _linear_pointwise = staticmethod(recorded)

    monkeypatch.setattr(torch.ops, "mkldnn", Operators, raising=False)
    linear = products.onednn_linear()
    x, wide = random(5, 4), random(6, 9)
    for w in (wide[:, :4], wide[:, ::2][:, :4], random(1, 4).expand(6, 4), random(4, 6).mT):
        torch.testing.assert_close(linear(x, w), x @ w.mT)
    assert all(taken) and len(taken) == 5


@needs_onednn
def test_it_is_found_whatever_the_default_dtype_is():
    torch.set_default_dtype(torch.float64)
    try:
        linear = products.onednn_linear()
    finally:
        torch.set_default_dtype(torch.float32)
    x, w = random(5, 4), random(6, 4)
    torch.testing.assert_close(linear(x, w), x @ w.mT)


@needs_onednn
def test_torchs_own_switch_turns_it_off(calls):
    with torch.backends.mkldnn.flags(enabled=False):
        moments.second_moment(random(1, 600, 256), torch.float32, diagonal=False)
    assert not calls


AMD, INTEL = "vendor_id\t: AuthenticAMD\n", "vendor_id\t: GenuineIntel\n"


@needs_onednn
@pytest.mark.parametrize(
    ("maker", "capability", "taken"),
    [
        (AMD, "AVX512", True),
        (AMD, "AVX2", False),
        (INTEL, "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_who_has_them(monkeypatch, maker, capability, taken):
    def read(path):
        if maker is None:
            raise FileNotFoundError(path)
        return maker

    monkeypatch.setattr(products.Path, "read_text", read)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert (products._onednn.__wrapped__() is not None) == taken


@pytest.mark.parametrize("wrong", [None, lambda x, w, *rest: x @ w.mT + 1])
def test_another_operator_of_that_name_is_not_called(monkeypatch, wrong):
    def refuse(*arguments):
        raise RuntimeError("Could not run")

    class Operators:
        _linear_pointwise = staticmethod(wrong or refuse)

    monkeypatch.setattr(torch.ops, "mkldnn", Operators, raising=False)
    with pytest.raises(AttributeError):
        products.onednn_linear()
    monkeypatch.setattr(products.Path, "read_text", lambda path: AMD)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert products._onednn.__wrapped__() is None
