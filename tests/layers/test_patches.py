"""Moments of patches that share products, against the patches themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kaisa_optim.layers import conv
from kaisa_optim.layers.base import PassSettings
from kaisa_optim.layers.conv import ConvLayer, ConvTransposeLayer
from kaisa_optim.linalg.moments import second_moment


@st.composite
def geometries(draw):
    """Sizes of images, and arguments of a convolution of stride 1."""
    dims = draw(st.integers(1, 3))
    size, kernel, dilation, pad = (
        draw(st.lists(st.integers(*part), min_size=dims, max_size=dims))
        for part in ((1, 7), (1, 4), (1, 3), (0, 4))
    )
    sides = zip(size, kernel, dilation, pad, strict=True)
    assume(all(n + 2 * p > d * (k - 1) for n, k, d, p in sides))
    return size, {"kernel_size": kernel, "dilation": dilation, "padding": pad}


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


def covered(kind, module):
    layer = kind("", module.double())
    layer.trained = (True, module.bias is not None)
    layer.cover(layer.trained)
    return layer


def said_by(layer, x, grad, way, dtype=torch.float64):
    return layer.input_moment(x, grad, **way, append_one=layer.covers[1], dtype=dtype)


def said_by_rows(layer, x, grad, way):
    rows = layer.input_rows(x, grad)
    rows = rows.mean(2) if way["reduce"] else rows.flatten(1, 2)
    return second_moment(rows, rows.dtype, diagonal=way["diagonal"], append_one=layer.covers[1])


@each_way
@pytest.mark.parametrize("name", [*MODULES, *STRIDED])
def test_a_layer_says_of_patches_what_their_rows_do(name, way):
    module = (MODULES | STRIDED)[name]
    layer = covered(ConvLayer, module)
    torch.manual_seed(0)
    x = torch.randn(2, 4, *((12,) * layer.dims), dtype=torch.float64)
    grad = module(x).detach()
    said, expected = said_by(layer, x, grad, way), said_by_rows(layer, x, grad, way)
    torch.testing.assert_close(said, expected, rtol=1e-10, atol=1e-10)


@given(geometries(), st.integers(1, 3), st.booleans(), st.integers(0, 2**16))
@settings(max_examples=100)
def test_moments_are_those_of_the_patches(geometry, groups, bias, seed):
    size, arguments = geometry
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(size) - 1]
    layer = covered(ConvLayer, kind(2 * groups, groups, **arguments, groups=groups, bias=bias))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2 * groups, *size, generator=generator, dtype=torch.float64)
    grad = layer.module(x).detach()
    said, expected = said_by(layer, x, grad, WAYS["all"]), said_by_rows(layer, x, grad, WAYS["all"])
    torch.testing.assert_close(said, expected, rtol=1e-10, atol=1e-10)


def test_moments_of_kernels_of_several_rows_take_a_third_of_the_products():
    layer = covered(ConvLayer, nn.Conv2d(16, 4, 3, padding=1, bias=False))
    x = torch.randn(2, 16, 32, 32, dtype=torch.float64)
    grad = layer.module(x).detach()
    with FlopCounterMode(display=False) as counter:
        said_by(layer, x, grad, WAYS["all"])
    assert counter.get_total_flops() < 0.4 * 2 * (2 * 32 * 32) * (9 * 16) ** 2


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
    layer = covered(ConvLayer, nn.Conv2d(4, 4, 3, padding=pad, groups=2))
    x = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = LAYOUTS[layout](x)
    grad = layer.module(x).detach()
    dense = x.clone(memory_format=torch.contiguous_format)
    expected = said_by(layer, dense, grad, WAYS["all"])
    torch.testing.assert_close(
        said_by(layer, x, grad, WAYS["all"]), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ["kernel_size", "dilation", "padding"])
def test_what_was_set_to_a_list(name):
    module = nn.Conv2d(4, 3, 3, padding=1)
    layer = covered(ConvLayer, module)
    x = torch.randn(2, 4, 12, 12, dtype=torch.float64)
    expected = said_by(layer, x, module(x).detach(), WAYS["all"])
    setattr(module, name, list(getattr(module, name)))
    assert torch.equal(said_by(layer, x, module(x).detach(), WAYS["all"]), expected)


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
def test_transposed_convolutions_say_what_their_patches_do(at_once, drawn, seed):
    size, geometry, groups, bias = drawn
    dims = len(size)
    kind = nn.ConvTranspose1d if dims == 1 else nn.ConvTranspose2d
    module = kind(2 * groups, 3 * groups, **geometry, groups=groups, bias=bias)
    layer = covered(ConvTransposeLayer, module)
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
    layer = covered(ConvTransposeLayer, module)
    x = torch.randn(2, 4, 8, 8)
    x[:, :, 0] *= 1e4
    grad = module(x.double()).detach()
    expected = said_by(layer, x.double(), grad, WAYS["all"])
    moment = said_by(layer, x, grad, WAYS["all"], torch.float32)
    scale = expected.diagonal(dim1=1, dim2=2).sqrt()
    error = (moment - expected).abs() / (scale[:, :, None] * scale[:, None])
    assert error.max() < 1e-5


def test_a_subclass_with_rows_of_its_own_is_asked_for_them():
    class Doubled(ConvLayer):
        def output_rows(self, x, grad):
            return 2 * super().output_rows(x, grad)

    plain, doubled = (kind("", nn.Conv2d(1, 2, 3, padding=1)) for kind in (ConvLayer, Doubled))
    grad = torch.randn(2, 2, 8, 7, dtype=torch.float64)
    moments = [
        layer.moments(None, grad, (False, True), PassSettings(False, torch.float64))
        for layer in (plain, doubled)
    ]
    torch.testing.assert_close(moments[1].g, 4 * moments[0].g)
