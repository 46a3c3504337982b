"""Moments of patches without patches, against the patches themselves."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from kaisa_optim.layers import conv
from kaisa_optim.layers.conv import ConvLayer, ConvTransposeLayer
from kaisa_optim.linalg import moments
from kaisa_optim.linalg import patches as correlation
from kaisa_optim.linalg.moments import second_moment
from kaisa_optim.linalg.patches import patch_moment, pays, windows


def rows_of(x, kernel, dilation, pad, groups):
    """The patches as rows, ``[groups, N, C·k]``."""
    dims = len(kernel)
    x = F.pad(x, [side for pair in reversed(pad) for side in pair])
    patches = windows(x, kernel, [1] * dims, dilation).unflatten(1, (groups, -1))
    order = (1, 0, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims))
    return patches.permute(order).reshape(groups, -1, x.shape[1] // groups * math.prod(kernel))


@st.composite
def geometries(draw):
    dims = draw(st.integers(1, 3))
    sides = st.tuples(st.integers(0, 4), st.integers(0, 4))
    size, kernel, dilation, pad = (
        draw(st.lists(part, min_size=dims, max_size=dims))
        for part in (st.integers(1, 7), st.integers(1, 4), st.integers(1, 3), sides)
    )
    outputs = [
        n + sum(p) - d * (k - 1) for n, k, d, p in zip(size, kernel, dilation, pad, strict=True)
    ]
    assume(min(outputs) >= 1)
    return *map(tuple, (size, kernel, dilation, pad)), draw(st.integers(1, 3))


@pytest.mark.parametrize("large", [False, True])
@given(geometries(), st.integers(0, 2**16))
@settings(max_examples=100)
def test_moments_are_those_of_the_patches(large, geometry, seed):
    size, kernel, dilation, pad, groups = geometry
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2 * groups, *size, generator=generator, dtype=torch.float64)
    rows = rows_of(x, kernel, dilation, pad, groups)
    with pytest.MonkeyPatch.context() as patch:
        if large:  # image by image, and lines by convolutions
            patch.setattr(correlation, "_AT_ONCE", 1)
            patch.setattr(correlation, "_FEW", 0)
        moment = patch_moment(x, kernel, dilation, pad, groups)
    torch.testing.assert_close(moment, rows.mT @ rows, rtol=1e-10, atol=1e-10)


LAYOUTS = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "a part of the channels": lambda x: torch.cat([x, x], 1)[:, 4:8],
    "every other row": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "some of the images": lambda x: torch.cat([x, x, x])[2:4],
    "the same image twice": lambda x: x[:1].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_however_it_lies_in_memory(layout, pad):
    x = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = LAYOUTS[layout](x)
    geometry = (3, 3), (1, 1), ((pad, pad), (pad, pad)), 2
    expected = patch_moment(x.clone(memory_format=torch.contiguous_format), *geometry)
    torch.testing.assert_close(patch_moment(x, *geometry), expected, rtol=1e-12, atol=1e-12)


def test_places_are_those_of_any_size():
    correlation._places.cache_clear()
    for n in (8, 9, 31):
        patch_moment(torch.randn(1, 2, n, n), (3, 3), (1, 1), ((1, 1), (1, 1)), 1)
    assert correlation._places.cache_info().misses == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pad", [0, 1, 2])
def test_a_moment_is_exactly_symmetric(dtype, pad):
    x = torch.randn(7, 10, 13, 13, generator=torch.Generator().manual_seed(0), dtype=dtype)
    moment = patch_moment(x, (5, 3), (1, 2), ((pad, pad), (pad, pad)), 2)
    assert torch.equal(moment, moment.mT)


MODULES = {
    "same": nn.Conv2d(4, 3, 3, padding=1),
    "no padding": nn.Conv2d(4, 3, 3),
    "wide padding": nn.Conv2d(4, 3, 3, padding=(3, 0)),
    "without bias": nn.Conv2d(4, 3, 3, padding=1, bias=False),
    "groups": nn.Conv2d(4, 6, (1, 3), padding="same", groups=2),
    "depthwise": nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "dilated": nn.Conv2d(4, 3, 3, padding=2, dilation=2),
    "circular": nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"),
    "reflected": nn.Conv2d(4, 3, (3, 1), padding=(1, 0), padding_mode="reflect"),
    "signals": nn.Conv1d(4, 3, 5, padding=2),
    "volumes": nn.Conv3d(4, 3, 3, padding=1),
}
STRIDED = {
    "strides": nn.Conv2d(4, 3, 3, stride=(2, 1), padding=1),
    "strides beyond the kernel": nn.Conv2d(4, 3, 2, stride=3),
    "strides and dilation": nn.Conv1d(4, 6, 3, stride=3, dilation=2, padding=1, groups=2),
    "strides, reflected": nn.Conv2d(4, 3, 3, stride=2, padding=2, padding_mode="reflect"),
    "strided volumes": nn.Conv3d(4, 3, (2, 1, 3), stride=2),
}
WAYS = {
    "all": {"reduce": False, "diagonal": False},
    "a diagonal": {"reduce": False, "diagonal": True},
    "means": {"reduce": True, "diagonal": False},
    "means, a diagonal": {"reduce": True, "diagonal": True},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def said_by(layer, x, grad, way, dtype=torch.float64):
    return layer.input_moment(x, grad, **way, append_one=layer.covers[1], dtype=dtype)


def said_by_rows(layer, x, grad, way):
    rows = layer.input_rows(x, grad)
    rows = rows.mean(2) if way["reduce"] else rows.flatten(1, 2)
    return second_moment(rows, rows.dtype, diagonal=way["diagonal"], append_one=layer.covers[1])


@each_way
@pytest.mark.parametrize("name", [*MODULES, *STRIDED])
def test_a_layer_says_of_patches_what_their_rows_do(name, way):
    module = (MODULES | STRIDED)[name].double()
    layer = ConvLayer("", module)
    layer.trained = (True, module.bias is not None)
    layer.cover(layer.trained)
    torch.manual_seed(0)
    x = torch.randn(2, 4, *((12,) * layer.dims), dtype=torch.float64)
    grad = module(x).detach()
    said, expected = said_by(layer, x, grad, way), said_by_rows(layer, x, grad, way)
    torch.testing.assert_close(said, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MODULES)
def test_a_layer_takes_the_short_way(name, monkeypatch):
    module = MODULES[name].double()
    layer = ConvLayer("", module)
    layer.trained = (True, module.bias is not None)
    layer.cover(layer.trained)
    torch.manual_seed(0)
    x = torch.randn(2, 4, *((12,) * layer.dims), dtype=torch.float64)
    grad = module(x).detach()
    used = []
    real = patch_moment
    monkeypatch.setattr(
        "kaisa_optim.layers.conv.patch_moment", lambda *args: used.append(1) or real(*args)
    )
    said_by(layer, x, grad, WAYS["all"])
    assert used


def test_it_pays_where_the_image_is_larger_than_the_kernel():
    geometry = (3, 3), (1, 1), ((1, 1), (1, 1))
    assert all(pays((n, n), *geometry) for n in (4, 8, 32))
    assert not pays((32, 32), (1, 1), (1, 1), ((0, 0), (0, 0)))  # no two taps meet
    assert not pays((7, 7), (7, 7), (1, 1), ((0, 0), (0, 0)))  # one position
    assert not pays((2, 2), *geometry)  # nearly all of it is border


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_it_takes_little_more_memory_than_the_result(dims):
    """Kernels of usual sizes and padding pay, wide ones without it would not fit."""
    ones = (1,) * dims

    def geometry(k, pad):
        return (40,) * dims, (k,) * dims, ones, ((pad, pad),) * dims

    for k in (3, 5, 7):
        for pad in (0, k // 2):
            rows = correlation._rows(correlation._alike(*geometry(k, pad)))
            fits = rows <= 3 * k ** (2 * dims)
            assert fits or pad == 0
            assert pays(*geometry(k, pad)) == (fits and k**dims <= 256)
    assert pays(*geometry(3, 0)) == (dims < 3)
    assert dims == 1 or not pays(*geometry(7, 0))
    assert not pays((99, 99), (31, 31), (1, 1), ((15, 15), (15, 15)))  # pairs of taps by millions


def test_pieces_grow_with_the_taps_and_not_with_the_dilation():
    def count(d, pad):
        return len(list(correlation._pieces((99, 99), (3, 3), (d, d), ((pad, pad),) * 2)))

    assert {count(d, d) for d in (1, 2, 12, 24)} == {9}
    assert {count(d, 0) for d in (1, 2, 12, 24)} == {25}


@pytest.mark.parametrize("name", ["kernel_size", "dilation", "padding"])
def test_what_was_set_to_a_list(name):
    module = nn.Conv2d(4, 3, 3, padding=1).double()
    layer = ConvLayer("", module)
    layer.trained = (True, True)
    layer.cover(layer.trained)
    x = torch.randn(2, 4, 12, 12, dtype=torch.float64)
    expected = said_by(layer, x, module(x).detach(), WAYS["all"])
    setattr(module, name, list(getattr(module, name)))
    assert torch.equal(said_by(layer, x, module(x).detach(), WAYS["all"]), expected)


@pytest.fixture
def products_by_parts(monkeypatch):
    """From 192 columns on, however little there is to multiply."""
    monkeypatch.setattr(moments, "_HALVED_MUCH", 0)


@pytest.mark.parametrize("n", [191, 192, 257, 700])
def test_half_of_a_wide_product_is_all_of_it(n, products_by_parts):
    torch.manual_seed(0)
    rows = torch.randn(2, 200, n, dtype=torch.float64)
    moment = second_moment(rows, rows.dtype, diagonal=False)
    torch.testing.assert_close(moment, rows.mT @ rows, rtol=1e-12, atol=1e-12)
    quarter = -(-(n - 1) // 64) * 16
    if n >= 192:  # one part is the other's copy
        assert torch.equal(moment[:, quarter:, :quarter], moment[:, :quarter, quarter:].mT)


@pytest.mark.parametrize("append_one", [False, True])
@pytest.mark.parametrize("n", [191, 192, 259])  # under, at and unevenly over what goes by parts
def test_wide_moments_by_parts_are_the_whole_product(n, append_one, products_by_parts):
    rows = torch.randn(2, 80, n, dtype=torch.float64)
    whole = F.pad(rows, (0, 1), value=1.0) if append_one else rows
    moment = second_moment(rows, rows.dtype, diagonal=False, append_one=append_one)
    torch.testing.assert_close(moment, whole.mT @ whole)


@st.composite
def transposed(draw):
    dims = draw(st.integers(1, 2))
    sizes = {"size": (1, 6), "kernel_size": (1, 5), "stride": (1, 4), "dilation": (1, 4)}
    sizes |= {"padding": (0, 6), "output_padding": (0, 3)}
    drawn = {
        name: draw(st.lists(st.integers(*range_), min_size=dims, max_size=dims))
        for name, range_ in sizes.items()
    }
    for i in range(dims):
        fits = max(drawn["stride"][i], drawn["dilation"][i])
        assume(drawn["output_padding"][i] < fits)
        reach = drawn["dilation"][i] * (drawn["kernel_size"][i] - 1) + drawn["output_padding"][i]
        assume((drawn["size"][i] - 1) * drawn["stride"][i] + reach >= 2 * drawn["padding"][i])
    size = drawn.pop("size")
    return size, drawn, draw(st.integers(1, 3)), draw(st.booleans())


@pytest.mark.parametrize("at_once", [1 << 24, 1])
@given(transposed(), st.integers(0, 2**16))
@settings(max_examples=80)
def test_transposed_convolutions_phase_by_phase_say_what_their_patches_do(at_once, drawn, seed):
    size, geometry, groups, bias = drawn
    dims = len(size)
    kind = nn.ConvTranspose1d if dims == 1 else nn.ConvTranspose2d
    module = kind(2 * groups, 3 * groups, **geometry, groups=groups, bias=bias).double()
    layer = ConvTransposeLayer("", module)
    layer.trained = (True, bias)
    layer.cover(layer.trained)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2 * groups, *size, generator=generator, dtype=torch.float64)
    grad = module(x).detach()
    for way in WAYS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conv, "_PATCH_ELEMENTS", at_once)
            said = said_by(layer, x, grad, way)
        expected = said_by_rows(layer, x, grad, way)
        torch.testing.assert_close(said, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stride, kernel", [(1, 3), (2, 2), (2, 4)])
def test_a_border_however_large_leaves_transposed_convolutions_exact(stride, kernel):
    torch.manual_seed(0)
    module = nn.ConvTranspose2d(4, 2, kernel, stride=stride, padding=kernel // 2 - stride // 2)
    layer = ConvTransposeLayer("", module)
    layer.trained = (True, True)
    layer.cover(layer.trained)
    x = torch.randn(2, 4, 8, 8)
    x[:, :, 0] *= 1e4
    grad = module(x).detach()
    expected = said_by(layer, x.double(), grad, WAYS["all"])
    moment = said_by(layer, x, grad, WAYS["all"], torch.float32)
    scale = expected.diagonal(dim1=1, dim2=2).sqrt()
    error = (moment - expected).abs() / (scale[:, :, None] * scale[:, None])
    assert error.max() < 1e-5


GRADIENTS = {
    "as torch leaves it": lambda g: g,
    "channels last": lambda g: g.to(memory_format=torch.channels_last),
    "some of the images": lambda g: torch.cat([g, g, g])[3:6],
    "of one number": lambda g: torch.full_like(g, 0.5)[:1, :1, :1, :1].expand_as(g),
    "an image without a batch": lambda g: g[0],
}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("lies", GRADIENTS)
def test_a_gradients_moment_image_by_image_is_that_of_its_rows(lies, groups, monkeypatch):
    module = nn.Conv2d(6, 12, 3, padding=1, groups=groups)
    layer = ConvLayer("", module)
    layer.trained = (True, True)
    layer.cover(layer.trained)
    torch.manual_seed(0)
    grad = GRADIENTS[lies](torch.randn(3, 12, 8, 7, dtype=torch.float64))
    ways = {"reduce": False, "diagonal": False, "dtype": torch.float64}
    calls = []
    by_images = conv.moment_of_images
    monkeypatch.setattr(conv, "moment_of_images", lambda g: calls.append(g) or by_images(g))
    moment, *counts = layer._output_moment(None, grad, **ways)
    # Several groups that lie apart in each image would be copied.
    assert len(calls) == (lies != "channels last" or groups == 1)
    rows = layer.output_rows(None, grad)
    assert counts == list(rows.shape[1:3])
    rows = rows.flatten(1, 2)
    torch.testing.assert_close(moment, rows.mT @ rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "slowly"),
    [((12, 6, 7), False), ((192, 28, 28), False), ((12, 8, 7), True)],
    ids=["few positions", "wide", "slow products"],
)
def test_where_a_gradients_rows_are_multiplied(shape, slowly, monkeypatch):
    """Of few positions for each channel each image's product is large; that of wide rows is
    halved; and oneDNN's, where torch's are slow, takes all rows at once."""
    channels, *size = shape
    layer = ConvLayer("", nn.Conv2d(1, channels, 3, padding=1))
    layer.trained = (True, True)
    layer.cover(layer.trained)
    monkeypatch.setattr(conv, "moment_of_images", None)
    monkeypatch.setattr(moments, "multiplies_slowly", lambda like: slowly)
    torch.manual_seed(0)
    grad = torch.randn(2, channels, *size, dtype=torch.float64)
    moment, *_ = layer._output_moment(None, grad, reduce=False, diagonal=False, dtype=grad.dtype)
    rows = grad.flatten(2).movedim(1, 2).flatten(0, 1)
    torch.testing.assert_close(moment[0], rows.T @ rows)


def test_a_subclass_with_rows_of_its_own_is_asked_for_them():
    class Doubled(ConvLayer):
        def output_rows(self, x, grad):
            return 2 * super().output_rows(x, grad)

    plain, doubled = (kind("", nn.Conv2d(1, 2, 3, padding=1)) for kind in (ConvLayer, Doubled))
    grad = torch.randn(2, 2, 8, 7, dtype=torch.float64)
    ways = {"reduce": False, "diagonal": False, "dtype": torch.float64}
    expected, *_ = plain._output_moment(None, grad, **ways)
    moment, *_ = doubled._output_moment(None, grad, **ways)
    torch.testing.assert_close(moment, 4 * expected)
