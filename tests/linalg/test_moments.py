"""Statistics of half-precision rows: multiplied by its units, and nothing lost beside float32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam
from kaisa_optim.layers import kind_of
from kaisa_optim.layers.base import PassSettings, take_sizes
from kaisa_optim.linalg import moments
from tests.support.watch import Body

HALVES = torch.bfloat16, torch.float16


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of a mean, so that what is rounded does not average out."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) + 0.3).to(dtype)


def off(found: Tensor, expected: Tensor) -> float:
    """By how much of its norm."""
    return float((found.double() - expected).norm() / expected.norm())


# ---- products ----


@pytest.mark.parametrize("append_one", [False, True])
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("count", "n"), [(700, 20), (900, 300), (100, 300)])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_moments_are_those_of_float32(dtype, count, n, diagonal, append_one):
    x = rows(2, count, n, dtype=dtype)
    found = moments.second_moment(x, torch.float32, diagonal=diagonal, append_one=append_one)
    wide = torch.cat([x.double(), torch.ones(2, count, append_one).double()], 2)
    expected = wide.square().sum(1) if diagonal else wide.mT @ wide
    assert found.dtype == torch.float32
    assert off(found, expected) < 1e-6


def emulated(monkeypatch: Any) -> list[Any]:
    """As on a device that multiplies halves into float32; the shapes that it is asked for."""
    asked = []

    def product(left: Tensor, right: Tensor) -> Tensor:
        assert left.dtype == right.dtype != torch.float32
        asked.append((left.shape, right.shape))
        return left.float() @ right.float()

    monkeypatch.setattr(moments, "_into_float32", product)
    monkeypatch.setattr(moments, "_multiplies_into_float32", lambda dtype, device: True)
    return asked


@pytest.mark.parametrize("append_one", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("count", "n"), [(700, 90), (900, 300)])
def test_a_device_that_multiplies_halves_into_float32(count, n, dtype, append_one, monkeypatch):
    asked = emulated(monkeypatch)
    x = rows(2, count, n, dtype=dtype)
    found = moments.second_moment(x, torch.float32, diagonal=False, append_one=append_one)
    wide = torch.cat([x.double(), torch.ones(2, count, append_one).double()], 2)
    assert off(found, wide.mT @ wide) < 1e-6
    assert len(asked) == 1
    asked.clear()
    moments.second_moment(x.double(), torch.float64, diagonal=False)
    moments.second_moment(x.float(), torch.float32, diagonal=False)
    moments.second_moment(x[:, :8], torch.float32, diagonal=False)
    assert not asked  # those of other precisions, and few rows


# ---- layers ----

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(40, 30), (64, 40)),
    "tokens": (nn.Linear(40, 30), (16, 9, 40)),
    "convolution": (nn.Conv2d(8, 12, 3, padding=1), (6, 8, 12, 12)),
    "strides": (nn.Conv2d(8, 12, 3, stride=2), (6, 8, 13, 13)),
    "circular": (nn.Conv1d(8, 12, 3, padding=1, padding_mode="circular"), (6, 8, 40)),
    "transposed": (nn.ConvTranspose2d(8, 12, 2, stride=2), (6, 8, 7, 7)),
    "words": (nn.Embedding(20, 16), (6, 30)),
}


@pytest.mark.parametrize("wide", [16384, 1])
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_lose_nothing_but_what_is_rounded_already(name, dtype, reduce, wide):
    """Means over positions, which half precision does not hold, are multiplied in float32."""
    module, shape = LAYERS[name]
    kind, _ = kind_of(module)
    assert kind is not None
    (layer,) = kind.layers_of("it", module)
    take_sizes(layer)
    layer.wide = wide
    layer.trained = (True, layer.bias is not None)
    layer.cover(layer.covers_now())
    x = torch.arange(180).view(shape) % 20 if name == "words" else rows(*shape, dtype=dtype)
    like = module(x if name == "words" else x.float()).detach()
    grad = (rows(*like.shape) * 1e-2).to(dtype)

    def moments(dtype: torch.dtype, *given: Tensor) -> Any:
        return layer.moments(*given, layer.covers, PassSettings(reduce, dtype))

    found = moments(torch.float32, x, grad)
    expected = moments(torch.float64, x if name == "words" else x.double(), grad.double())
    for one, other in ((found.a, expected.a), (found.g, expected.g)):
        assert one.dtype == torch.float32
        assert one.numel() and off(one, other) < 2e-6


# ---- optimizers ----


CLASSES = pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])


def train(cls: Any, autocast: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    image = nn.Conv2d(3, 16, 3, padding=1)
    parts = {"image": image, "body": nn.Linear(16, 40), "head": nn.Linear(40, 5)}
    model = Body(lambda m, x: m.head(m.body(m.image(x).relu().mean((2, 3))).relu()), **parts)
    opt = cls(model, lr=1e-6, factor_update_steps=1, inv_update_steps=2, **options)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(64, 3, 8, 8, generator=generator)
        y = torch.randint(5, (64,), generator=generator)
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        opt.step()
    return model, opt


def factors(opt: Any) -> dict[tuple[str, int], Tensor]:
    kfac = opt.preconditioner
    return {(n, i): f for n in kfac.layers for i, f in enumerate(kfac.factors(n))}


@CLASSES
def test_under_autocast_units_change_nothing(cls, monkeypatch):
    monkeypatch.setattr(moments, "_MUCH", 1)
    monkeypatch.setattr(moments, "_LEAST", 1)
    _, plain = train(cls, autocast=True)
    asked = emulated(monkeypatch)
    _, opt = train(cls, autocast=True)
    assert asked
    for key, expected in factors(plain).items():
        assert off(factors(opt)[key], expected.double()) < 1e-4


def test_packing_loses_nothing():
    for n in range(1, 18):
        matrices = torch.randn(3, n, n, dtype=torch.float64)
        matrices = matrices + matrices.mT
        matrices[1, 0, n - 1] = matrices[1, n - 1, 0] = math.nan
        matrices[2, n // 2, n // 2] = math.inf
        packed = moments.pack(matrices)
        assert packed.shape == (3, moments.packed_size(n)) == (3, n * (n + 1) // 2)
        unpacked = moments.unpack(packed, n)
        assert torch.equal(unpacked.isnan(), matrices.isnan())
        assert torch.equal(unpacked.nan_to_num(7.0), matrices.nan_to_num(7.0))
