"""Convolutions whose moments take other ways than products of patches, and inputs that change."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kaisa_optim import KFACSGD
from kaisa_optim.layers import conv
from tests.layers.test_layers import WIDEST
from tests.support.close import assert_close
from tests.support.training import descend
from tests.support.watch import Body, normal

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

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


def patches(module: nn.Module, x: Tensor) -> Tensor:
    """Rows ``[blocks, images, positions, inputs]``: the output of an identity for a weight."""
    channels, kernel = module.in_channels // module.groups, module.kernel_size
    inputs = channels * math.prod(kernel)
    weight = torch.eye(inputs, dtype=x.dtype).view(inputs, channels, *kernel)
    twin = copy.deepcopy(module)
    weight = weight.transpose(0, 1) if twin.transposed else weight
    twin.weight = nn.Parameter(torch.cat([weight] * twin.groups))
    twin.bias = None
    return twin(x).detach().unflatten(1, (twin.groups, inputs)).flatten(3).permute(1, 0, 3, 2)


def assert_moment(
    module: nn.Module, x: Tensor, sharing: str = "expand", widest: int = WIDEST
) -> None:
    """A is the mean of its patches' outer products, or the diagonal of it."""
    net = nn.Sequential(module)
    opt = KFACSGD(net, lr=0.0, weight_sharing=sharing, max_factor_size=widest)
    descend(opt, net(x).square().sum())
    rows = patches(module, x.clone(memory_format=torch.contiguous_format))
    if module.bias is not None:
        rows = torch.cat([rows, torch.ones_like(rows[..., :1])], 3)
    rows = rows.mean(2) if sharing == "reduce" else rows.flatten(1, 2)
    moment = rows.mT @ rows / rows.shape[1]
    if moment.shape[1] > widest:
        moment = moment.diagonal(dim1=1, dim2=2)
    assert_close(opt.preconditioner.factors("0")[0], moment)


MODES = "zeros", "replicate", "circular", "reflect"


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A plain or transposed convolution, and the size of its images."""
    transposed, stride = draw(st.booleans()), draw(st.sampled_from([1, 4]))
    ranges = {"size": (1, 6), "kernel_size": (1, 5), "stride": (1, stride), "dilation": (1, 4)}
    ranges |= {"padding": (0, 5), "output_padding": (0, 3 * transposed)}
    mode = draw(st.sampled_from(MODES[: 1 if transposed else None]))

    def fits(side: tuple[int, ...]) -> bool:
        size, kernel, stride, dilation, padding, more = side
        reach = dilation * (kernel - 1)
        if not transposed:
            most = {"zeros": 5, "replicate": 5, "circular": size, "reflect": size - 1}[mode]
            return size + 2 * padding > reach and padding <= most
        return more < max(stride, dilation) and (size - 1) * stride + reach + more >= 2 * padding

    side = st.tuples(*[st.integers(*range_) for range_ in ranges.values()]).filter(fits)
    sides = draw(st.lists(side, min_size=1, max_size=2 if transposed else 3))
    geometry = dict(zip(ranges, zip(*sides, strict=True), strict=True))
    size, groups = geometry.pop("size"), draw(st.integers(1, 3))
    if not transposed:
        del geometry["output_padding"]
        if stride == 1 and mode in ("zeros", "replicate") and draw(st.booleans()):
            geometry["padding"] = "same"
        elif not any(geometry["padding"]):
            geometry["padding"] = "valid"
    plain, turned = (nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.ConvTranspose1d, nn.ConvTranspose2d)
    kind = (turned if transposed else plain)[len(size) - 1]
    options = {"groups": groups, "bias": draw(st.booleans()), "padding_mode": mode}
    return kind(2 * groups, 3 * groups, **geometry, **options).double(), (3, 2 * groups, *size)


@pytest.mark.parametrize("at_once", [1 << 24, 1])
@given(
    convolutions(),
    st.sampled_from(["expand", "reduce"]),
    st.sampled_from([WIDEST, 1]),
    st.integers(0, 99),
)
@settings(max_examples=150)
def test_moments_are_those_of_the_patches(at_once, drawn, sharing, widest, seed):
    module, shape = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "_PATCH_ELEMENTS", at_once)
        assert_moment(module, normal(*shape, seed=seed), sharing, widest)


def test_moments_of_kernels_of_several_rows_take_a_third_of_the_products():
    net = nn.Sequential(nn.Conv2d(16, 4, 3, padding=1, bias=False)).double()
    opt = KFACSGD(net, lr=0.1)
    loss = net(normal(2, 16, 32, 32)).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    opt.step()
    assert counter.get_total_flops() < 0.42 * 2 * (2 * 32 * 32) * (9 * 16) ** 2


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
    module = nn.Conv2d(4, 4, 3, padding=pad, groups=2).double()
    assert_moment(module, LAYOUTS[layout](normal(2, 4, 9, 8)))


@pytest.mark.parametrize("name", ["kernel_size", "dilation", "padding"])
def test_what_was_set_to_a_list(name):
    module = nn.Conv2d(4, 3, 3, padding=1).double()
    setattr(module, name, list(getattr(module, name)))
    assert_moment(module, normal(2, 4, 12, 12))
