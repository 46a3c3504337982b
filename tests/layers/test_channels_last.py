"""Convolutions whose memory has the channels of a position side by side, as GPUs want them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kaisa_optim.layers import conv


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kernel", "stride"), [((3, 3), 1), ((3, 2), 2), ((1, 1), 1)])
def test_moments_are_those_of_other_memory_formats(monkeypatch, kernel, stride, bias):
    """On CPUs the way of GPUs is not taken: here it is, by what asks for the device."""
    torch.manual_seed(0)
    module = nn.Conv2d(3, 4, kernel, stride, 1, bias=bias).double()
    layer = conv.ConvLayer("conv", module)
    x = torch.randn(5, 3, 7, 6, dtype=torch.float64)
    grad = torch.randn(module(x).shape, dtype=torch.float64)
    asked = {"reduce": False, "diagonal": False, "dtype": torch.float64}
    monkeypatch.setattr(conv, "pays", lambda *_: False)
    wanted = layer.input_moment(x, grad, append_one=bias, **asked)
    wanted_g, *counts = layer._output_moment(x, grad, **asked)
    monkeypatch.setattr(conv, "_channels_last", lambda t: t.shape[1] > 1 and t.stride(1) == 1)
    x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))
    assert conv._channels_last(x) and conv._channels_last(grad)
    found = layer.input_moment(x, grad, append_one=bias, **asked)
    found_g, *found_counts = layer._output_moment(x, grad, **asked)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_g, wanted_g, rtol=1e-12, atol=1e-12)
    assert counts == found_counts
