"""Convolutions against the dense reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from tests.layers.cases import Case, channels_last, check, each, freeze, normal

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

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.layer = type(made := COPYING[name]())(4, 6, 1), made

        def forward(self, x: Tensor, in_place: bool) -> Tensor:
            h = self.first(x).float()  # autocast casts it again
            out = self.layer(h)
            return h.add_(out) if in_place else h + out

    factors = []
    for in_place in (False, True):
        model = Residual()
        opt = KFACSGD(model, lr=0.1)
        x = torch.randn(3, 4, *[5] * model.layer.weight[0, 0].dim())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x, in_place)
        out.float().square().mean().backward()
        opt.step()
        factors.append([f for name in ("first", "layer") for f in opt.preconditioner.factors(name)])
    for apart, within in zip(*factors, strict=True):
        torch.testing.assert_close(within, apart, rtol=1e-2 if autocast else 1e-6, atol=1e-6)
