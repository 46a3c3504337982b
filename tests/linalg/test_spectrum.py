"""Autocorrelations by frequencies, against their definition and convolutions."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kaisa_optim.layers.conv import ConvLayer
from kaisa_optim.linalg import spectrum
from kaisa_optim.linalg.moments import second_moment
from kaisa_optim.linalg.patches import patch_moment
from kaisa_optim.linalg.precision import statistics_precision


def by_definition(x, kernel, dilation, groups):
    """Each image beside itself, moved, where zeros lie around it."""
    x = x.unflatten(1, (groups, -1))
    dims, size = len(kernel), x.shape[3:]
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    padded = F.pad(x, [side for r in reversed(reach) for side in (r, r)])
    found = []
    for shift in itertools.product(*(range(1 - k, k) for k in kernel)):
        if shift >= (0,) * dims:
            moved = padded
            for axis in range(dims):
                start = reach[axis] + shift[axis] * dilation[axis]
                moved = moved.narrow(3 + axis, start, size[axis])
            found.append(torch.einsum("bgcq,bgdq->gcd", x.flatten(3), moved.flatten(3)))
    return torch.stack(found, 1)


@st.composite
def geometries(draw):
    dims = draw(st.integers(1, 3))
    parts = st.integers(1, 7), st.integers(1, 4), st.integers(1, 3)
    return [tuple(draw(st.lists(p, min_size=dims, max_size=dims))) for p in parts]


LITTLE = {"_AT_ONCE": 1, "_TOGETHER": 2, "_KEPT": 1}


@pytest.mark.parametrize("little", [{}, LITTLE, {"_KEPT": 100}], ids=["all", "each", "some"])
@given(geometries(), st.integers(1, 3), st.integers(0, 2**16))
@settings(max_examples=100)
def test_frequencies_say_what_shifts_do(little, geometry, groups, seed):
    size, kernel, dilation = geometry
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 2 * groups, *size, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in little.items():
            patch.setattr(spectrum, name, value)
        spectrum._at_once.cache_clear()
        try:
            found = spectrum.autocorrelation(x, kernel, dilation, groups)
        finally:
            spectrum._at_once.cache_clear()
    expected = by_definition(x, kernel, dilation, groups)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("pad", [0, 1, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_moments_of_patches_by_frequencies(pad, layout, monkeypatch):
    monkeypatch.setattr(spectrum, "pays", lambda *geometry: True)
    x = torch.randn(3, 6, 9, 8, dtype=torch.float64).to(memory_format=layout)
    moment = patch_moment(x, (3, 2), (1, 2), ((pad, pad), (pad, pad)), 2)
    monkeypatch.setattr(spectrum, "pays", lambda *geometry: False)
    expected = patch_moment(x, (3, 2), (1, 2), ((pad, pad), (pad, pad)), 2)
    torch.testing.assert_close(moment, expected, rtol=1e-11, atol=1e-11)
    assert torch.equal(moment, moment.mT)


def wide():
    """Images and a layer for which frequencies pay on any CPU."""
    module = nn.Conv2d(64, 8, 3, padding=1)
    layer = ConvLayer("", module)
    layer.trained = layer.covers = (True, True)
    torch.manual_seed(0)
    # As after a rectifier: means stand out, and the moment's smallest eigenvalues are far below.
    return layer, torch.randn(96, 64, 8, 8).relu_()


def moment_of(layer, x):
    grad = torch.empty(len(x), 8, 8, 8)
    ways = {"reduce": False, "diagonal": False, "append_one": True, "dtype": torch.float32}
    return layer.input_moment(x, grad, **ways)[0]


def test_wide_layers_take_them_and_round_less_than_convolutions(monkeypatch):
    layer, x = wide()
    rows = layer.input_rows(x.double(), torch.empty(96, 8, 8, 8)).flatten(1, 2)
    exact = second_moment(rows, rows.dtype, diagonal=False, append_one=True)[0]
    calls = []
    real = spectrum.autocorrelation
    monkeypatch.setattr(spectrum, "autocorrelation", lambda *a: calls.append(a) or real(*a))
    found = moment_of(layer, x)
    assert len(calls) == 1
    monkeypatch.setattr(spectrum, "pays", lambda *geometry: False)
    off, before = ((m - exact).abs().max() for m in (found, moment_of(layer, x)))
    assert len(calls) == 1
    assert off < before
    assert off < 1e-6 * exact.abs().max()
    # As definite as in exact numbers, but for what float32 rounds.
    assert torch.linalg.eigvalsh(found.double())[0] > -1e-6 * exact.diagonal().sum()


def test_they_are_multiplied_in_full_precision_whatever_rows_are(monkeypatch):
    layer, x = wide()
    precisions = []
    real = spectrum.autocorrelation

    def watched(*args):
        precisions.append(torch.get_float32_matmul_precision())
        return real(*args)

    monkeypatch.setattr(spectrum, "autocorrelation", watched)
    with statistics_precision("medium", "cpu", in_half=False):
        moment_of(layer, x)
        assert torch.get_float32_matmul_precision() == "medium"
    assert precisions == ["highest"]


WHERE = {  # channels, sizes, kernel's side, images: as measured on a CPU with AVX2
    (64, (8, 8), 3, 128): True,
    (32, (16, 16), 3, 128): True,
    (64, (32, 32), 3, 32): True,
    (256, (14, 14), 3, 32): True,
    (16, (32, 32), 5, 128): True,
    (64, (32, 32), 7, 4): True,
    (3, (32, 32), 3, 128): False,  # what is transformed is more than what is multiplied
    (16, (128, 128), 3, 8): False,
    (256, (14, 14), 3, 4): False,  # products of few images are mostly written and read
    (64, (128, 128), 3, 8): False,
    (128, (56, 56), 7, 1): False,  # and added up for many shifts
    (64, (56, 56), 7, 1): False,
    (128, (16, 16, 16), 3, 2): False,
    # What would be kept is much larger than the result: products of one wave, and phases.
    (256, (112, 112), 3, 32): False,
    (8, (64, 64, 64), 5, 64): False,
}


@pytest.mark.parametrize("shape", WHERE, ids=str)
def test_where_they_pay(shape):
    channels, size, kernel, images = shape
    ones = (1,) * len(size)
    geometry = size, (kernel,) * len(size), ones, channels, 1, images
    assert spectrum.pays(*geometry, False) == WHERE[shape]


def test_they_pay_less_where_convolutions_are_twice_as_fast():
    geometry = (32, 32), (3, 3), (1, 1), 16, 1, 128
    assert spectrum.pays(*geometry, False)
    assert not spectrum.pays(*geometry, True)


def test_nothing_is_no_reason():
    for channels, size, images in ((0, 8, 4), (64, 8, 0)):
        assert not spectrum.pays((size, size), (3, 3), (1, 1), channels, 1, images, False)


def test_transforms_are_made_once():
    x = torch.randn(2, 4, 6, 5)
    spectrum.autocorrelation(x, (3, 3), (1, 1), 1)
    before = spectrum._transforms.cache_info().misses, spectrum._phases.cache_info().misses
    spectrum.autocorrelation(x, (3, 3), (1, 1), 2)
    assert before == (
        spectrum._transforms.cache_info().misses,
        spectrum._phases.cache_info().misses,
    )
