"""Convolutions against the dense reference, and moments that share products against patches."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kaisa_optim import KFACSGD
from kaisa_optim.layers import conv
from kaisa_optim.layers.base import take_sizes
from kaisa_optim.layers.conv import ConvLayer, ConvTransposeLayer
from kaisa_optim.linalg.moments import second_moment
from tests.layers.cases import Case, channels_last, check, each, freeze, normal
from tests.support.training import descend
from tests.support.watch import Body

pytestmark = [
    pytest.mark.filterwarnings("ignore:the base optimizer updates these"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]


def of(kind: type[nn.Module]) -> Callable[..., Callable[[], nn.Module]]:
    return lambda *args, **kwargs: lambda: kind(*args, **kwargs)


conv1, conv2, conv3 = of(nn.Conv1d), of(nn.Conv2d), of(nn.Conv3d)
deconv1, deconv2, deconv3 = map(of, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))


def image(*shape: int) -> Callable[[], Tensor]:
    return lambda: normal(*shape)


CONV = {
    "1d": Case(conv1(2, 3, 3), image(3, 2, 7)),
    "1d stride padding": Case(conv1(2, 3, 3, stride=2, padding=1), image(3, 2, 7)),
    "1d same dilated": Case(conv1(2, 3, 4, padding="same", dilation=2), image(2, 2, 9)),
    "1d circular": Case(conv1(2, 3, 3, padding=2, padding_mode="circular"), image(2, 2, 6)),
    "1d groups": Case(conv1(4, 6, 2, groups=2), image(2, 4, 5)),
    "1d unbatched": Case(conv1(2, 3, 3, padding=1), image(2, 6), terms=1.0),
    "1d no bias": Case(conv1(2, 3, 3, bias=False), image(2, 2, 6)),
    "2d": Case(conv2(2, 3, 2), image(3, 2, 4, 4)),
    "2d one by one": Case(conv2(3, 2, 1), image(3, 3, 2, 3)),
    "2d stride": Case(conv2(2, 3, 2, stride=(2, 1)), image(2, 2, 5, 4)),
    "2d stride leaves a rest": Case(conv2(1, 2, 3, stride=2), image(2, 1, 6, 6)),
    "2d padding": Case(conv2(2, 3, 3, padding=1), image(2, 2, 4, 3)),
    "2d uneven padding": Case(conv2(2, 3, (3, 2), padding=(2, 1)), image(2, 2, 3, 4)),
    "2d valid": Case(conv2(2, 3, 2, padding="valid"), image(2, 2, 3, 4)),
    "2d same odd": Case(conv2(2, 3, 3, padding="same"), image(2, 2, 4, 3)),
    "2d same even": Case(conv2(2, 3, (2, 4), padding="same"), image(2, 2, 3, 5)),
    "2d same dilated": Case(conv2(1, 2, (2, 3), padding="same", dilation=2), image(2, 1, 4, 5)),
    "2d same reflect": Case(
        conv2(1, 2, (2, 3), padding="same", padding_mode="reflect"), image(2, 1, 4, 5)
    ),
    "2d circular": Case(conv2(2, 2, 3, padding=1, padding_mode="circular"), image(2, 2, 3, 4)),
    "2d uneven circular": Case(
        conv2(2, 2, 3, padding=(0, 2), padding_mode="circular"), image(2, 2, 3, 4)
    ),
    "2d reflect": Case(conv2(2, 2, 3, padding=(1, 2), padding_mode="reflect"), image(2, 2, 3, 4)),
    "2d replicate": Case(
        conv2(2, 2, 3, padding=2, padding_mode="replicate", stride=2), image(2, 2, 3, 4)
    ),
    "2d dilation": Case(conv2(2, 3, 2, dilation=(2, 1)), image(2, 2, 4, 3)),
    "2d everything": Case(
        conv2(4, 6, (3, 2), (2, 1), (1, 2), dilation=(1, 2), groups=2, padding_mode="circular"),
        image(2, 4, 4, 3),
    ),
    "2d groups": Case(conv2(4, 6, 2, groups=2), image(2, 4, 3, 4)),
    "2d groups no bias": Case(conv2(4, 2, 2, groups=2, bias=False), image(2, 4, 3, 4)),
    "2d depthwise": Case(conv2(3, 3, 2, groups=3), image(2, 3, 3, 4)),
    "2d depthwise multiplied": Case(conv2(2, 4, 2, groups=2, padding=1), image(2, 2, 3, 2)),
    "2d unbatched": Case(conv2(2, 3, 2), image(2, 3, 4), terms=1.0),
    "2d unbatched groups": Case(conv2(2, 4, 2, groups=2), image(2, 3, 4), terms=1.0),
    "2d no bias": Case(conv2(2, 3, 2, bias=False), image(2, 2, 3, 4)),
    "2d frozen weight": Case(conv2(2, 3, 2), image(2, 2, 3, 4), prepare=freeze("weight")),
    "2d frozen bias": Case(conv2(2, 3, 2), image(2, 2, 3, 4), prepare=freeze("bias")),
    "2d frozen weight groups": Case(
        conv2(2, 4, 2, groups=2), image(2, 2, 3, 3), prepare=freeze("weight")
    ),
    "2d channels_last input": Case(
        conv2(3, 2, 2), lambda: normal(2, 3, 3, 4).to(memory_format=torch.channels_last)
    ),
    "2d channels_last": Case(
        conv2(3, 2, 2),
        lambda: normal(2, 3, 3, 4).to(memory_format=torch.channels_last),
        prepare=channels_last,
    ),
    "2d channels_last groups": Case(
        conv2(4, 6, 2, groups=2),
        lambda: normal(2, 4, 3, 4).to(memory_format=torch.channels_last),
        prepare=channels_last,
    ),
    "2d non-contiguous": Case(conv2(2, 3, 2), lambda: normal(2, 4, 3, 8)[:, ::2, :, ::2]),
    "2d transposed": Case(conv2(2, 3, 2), lambda: normal(4, 3, 2, 2).permute(3, 2, 1, 0)),
    "2d input with gradient": Case(
        conv2(2, 3, 2, padding=1), lambda: normal(2, 2, 3, 2).requires_grad_()
    ),
    "3d": Case(conv3(2, 3, 2), image(2, 2, 2, 3, 3)),
    "3d mixed": Case(
        conv3(1, 2, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), dilation=(1, 1, 2)),
        image(2, 1, 2, 3, 4),
    ),
    "3d same": Case(conv3(1, 2, (2, 1, 3), padding="same"), image(2, 1, 2, 2, 3)),
    "3d replicate": Case(conv3(1, 2, 2, padding=1, padding_mode="replicate"), image(1, 1, 2, 2, 2)),
    "3d groups": Case(conv3(2, 4, (1, 2, 2), groups=2, bias=False), image(2, 2, 2, 3, 2)),
    "3d unbatched": Case(conv3(1, 2, 2), image(1, 2, 3, 3), terms=1.0),
}


TRANSPOSED = {
    "1d": Case(deconv1(2, 3, 3), image(2, 2, 4)),
    "1d stride": Case(deconv1(2, 3, 3, stride=2, padding=1, output_padding=1), image(2, 2, 3)),
    "1d dilation groups": Case(deconv1(4, 2, 2, dilation=2, groups=2), image(2, 4, 3)),
    "1d output_size": Case(deconv1(2, 3, 3, stride=3), image(2, 2, 3), call={"output_size": [10]}),
    "1d unbatched": Case(deconv1(2, 3, 2, stride=2), image(2, 3), terms=1.0),
    "2d": Case(deconv2(2, 3, 2), image(2, 2, 3, 2)),
    "2d stride": Case(deconv2(2, 3, (2, 3), stride=(2, 1)), image(2, 2, 2, 3)),
    "2d padding": Case(deconv2(2, 3, 3, padding=(1, 2)), image(2, 2, 3, 4)),
    "2d output_padding": Case(
        deconv2(2, 3, 3, stride=(2, 3), padding=1, output_padding=(1, 2)), image(2, 2, 2, 2)
    ),
    "2d dilation": Case(
        deconv2(2, 2, 2, dilation=(1, 3), padding=(0, 1), output_padding=(0, 2)),
        image(2, 2, 2, 2),
    ),
    "2d groups": Case(deconv2(4, 6, 2, groups=2, stride=2), image(2, 4, 2, 2)),
    "2d depthwise": Case(deconv2(3, 3, 2, groups=3), image(2, 3, 2, 2)),
    "2d no bias": Case(deconv2(2, 3, 2, bias=False), image(2, 2, 2, 2)),
    "2d padding beyond the kernel": Case(deconv2(2, 3, 2, stride=2, padding=2), image(2, 2, 4, 4)),
    "2d output_size": Case(
        deconv2(2, 2, 3, stride=2, padding=1), image(2, 2, 2, 3), call={"output_size": (4, 5)}
    ),
    "2d unbatched": Case(deconv2(2, 3, 2), image(2, 2, 3), terms=1.0),
    "2d channels_last": Case(
        deconv2(3, 2, 2),
        lambda: normal(2, 3, 2, 3).to(memory_format=torch.channels_last),
        prepare=channels_last,
    ),
    "2d frozen weight": Case(deconv2(2, 3, 2), image(2, 2, 2, 2), prepare=freeze("weight")),
    "2d frozen bias": Case(deconv2(2, 3, 2), image(2, 2, 2, 2), prepare=freeze("bias")),
    "3d": Case(deconv3(1, 2, 2), image(2, 1, 2, 2, 1)),
    "3d mixed": Case(
        deconv3(
            2, 4, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 0), groups=2, output_padding=(0, 1, 0)
        ),
        image(1, 2, 2, 2, 2),
    ),
}


@each(CONV)
def test_convolution(case):
    check(case)


@each(TRANSPOSED)
def test_transposed_convolution(case):
    check(case)


COPYING = {
    "a linear layer": lambda: nn.Linear(6, 6),  # under autocast alone
    "circular": lambda: nn.Conv1d(6, 6, 3, padding=1, padding_mode="circular"),
    "same, an even kernel": lambda: nn.Conv1d(6, 6, 4, padding="same"),
    "same, an even kernel in one of two": lambda: nn.Conv2d(6, 6, (3, 2), padding="same"),
}


@pytest.mark.parametrize("name, autocast", [*itertools.product(COPYING, [False, True])][1:])
def test_an_input_that_changes_after_a_layer_which_copied_it(name, autocast):
    """Torch keeps alone what it has padded or cast: sums in place after it are allowed."""

    def residual(m: nn.Module, x: Tensor, in_place: bool) -> Tensor:
        h = m.first(x).float()  # autocast casts it again
        out = m.layer(h)
        return h.add_(out) if in_place else h + out

    factors = []
    for in_place in (False, True):
        torch.manual_seed(0)
        layer = COPYING[name]()
        model = Body(residual, first=type(layer)(4, 6, 1), layer=layer)
        opt = KFACSGD(model, lr=0.1)
        x = torch.randn(3, 4, *[5] * model.layer.weight[0, 0].dim())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x, in_place)
        descend(opt, out.float().square().mean())
        factors.append([f for name in ("first", "layer") for f in opt.preconditioner.factors(name)])
    for apart, within in zip(*factors, strict=True):
        torch.testing.assert_close(within, apart, rtol=1e-2 if autocast else 1e-6, atol=1e-6)


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
    take_sizes(layer)
    layer.trained = (True, module.bias is not None)
    layer.cover(layer.trained)
    return layer


def said_by(layer, x, grad, way):
    return layer.input_moment(x, grad, **way, append_one=layer.covers[1], dtype=torch.float64)


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
