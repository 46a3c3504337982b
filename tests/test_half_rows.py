"""Statistics of half-precision rows: multiplied by its units, and nothing lost beside float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD, KFACAdam, KFACMuon, algebra
from kaisa_optim.layers import kind_of

HALVES = torch.bfloat16, torch.float16
has_units = pytest.mark.skipif(not algebra.rounds_on_cpus(), reason="the CPU has no AMX")
has_settings = pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="torch has these settings since 2.9"
)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of a mean, so that what is rounded does not average out."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) + 0.3).to(dtype)


def off(found: Tensor, expected: Tensor) -> float:
    """By how much of its norm."""
    return float((found.double() - expected).norm() / expected.norm())


def settings() -> list[tuple[Any, str]]:
    backends = torch.backends.cuda, torch.backends.mkldnn, torch.backends.cudnn
    parts = [getattr(x, name, None) for x in backends for name in ("matmul", "conv")]
    return [(x, x.fp32_precision) for x in parts if hasattr(x, "fp32_precision")]


# ---- products ----


@pytest.mark.parametrize("append_one", [False, True])
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("count", "n"), [(700, 20), (900, 300), (100, 300)])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_moments_are_those_of_float32(dtype, count, n, diagonal, append_one):
    x = rows(2, count, n, dtype=dtype)
    found = algebra.second_moment(x, torch.float32, diagonal=diagonal, append_one=append_one)
    wide = torch.cat([x.double(), torch.ones(2, count, append_one).double()], 2)
    expected = wide.square().sum(1) if diagonal else wide.mT @ wide
    assert found.dtype == torch.float32
    assert off(found, expected) < 1e-6


@has_units
@pytest.mark.parametrize("shape", [(1, 700, 90), (3, 900, 300)])
def test_what_is_rounded_is_what_is_multiplied_alone(shape):
    x = rows(*shape)
    with algebra.rounded_products("cpu"):
        found = algebra.second_moment(x, torch.float32, diagonal=False)
    rounded = x.bfloat16().double()
    assert off(found, rounded.mT @ rounded) < 1e-6 < off(found, x.double().mT @ x.double())
    assert torch.equal(found, found.mT)


@has_units
def test_oneDNN_that_is_off_does_not_round():
    x = rows(1, 900, 300)
    with torch.backends.mkldnn.flags(enabled=False), algebra.rounded_products("cpu"):
        found = algebra.second_moment(x, torch.float32, diagonal=False)
    assert off(found, x.double().mT @ x.double()) < 1e-6


@has_settings
@pytest.mark.parametrize("user", ["highest", "high", "medium", "mixed"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_are_what_they_were(monkeypatch, device, user):
    """Whatever the user's are; float16 has more digits than bfloat16, and no more than TF32."""
    monkeypatch.setattr(algebra, "rounds_on_cpus", lambda: True)
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    x = rows(1, 2000, 50)
    before = settings()
    try:
        if user == "mixed":
            matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision(user)
        asked = settings()
        with algebra.full_precision(device):
            precise = settings()
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                exact = dtype != torch.float32 and (dtype, device) != (torch.float16, "cpu")
                with pytest.raises(KeyError), algebra.products_of(dtype, device):
                    if exact and device == "cuda":
                        assert matmul.fp32_precision == conv.fp32_precision == "tf32"
                    else:
                        assert settings() == precise
                    assert algebra._rounds(x) == exact
                    inside = settings()
                    algebra.second_moment(x, torch.float32, diagonal=False)
                    assert settings() == inside
                    raise KeyError
                assert not algebra._rounds(x)
                assert settings() == precise
        assert settings() == asked
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
        algebra._restore(before)
    assert settings() == before


@has_settings
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_units_products_are_as_ever(monkeypatch, device):
    monkeypatch.setattr(algebra, "rounds_on_cpus", lambda: False)
    x = rows(1, 2000, 50)
    with algebra.rounded_products(device):
        assert not algebra._rounds(x)


# ---- layers ----

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(40, 30), (64, 40)),
    "tokens": (nn.Linear(40, 30), (16, 9, 40)),
    "convolution": (nn.Conv2d(8, 12, 3, padding=1), (6, 8, 12, 12)),
    "strides": (nn.Conv2d(8, 12, 3, stride=2), (6, 8, 13, 13)),
    "circular": (nn.Conv1d(8, 12, 3, padding=1, padding_mode="circular"), (6, 8, 40)),
    "transposed": (nn.ConvTranspose2d(8, 12, 2, stride=2), (6, 8, 7, 7)),
    "words": (nn.Embedding(20, 16), (6, 30)),
    "norm": (nn.LayerNorm(24), (6, 30, 24)),
}


@pytest.mark.parametrize("wide", [16384, 1])
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_lose_nothing_but_what_is_rounded_already(name, dtype, reduce, wide):
    """Means over positions, which half precision does not hold, are multiplied in float32."""
    module, shape = LAYERS[name]
    kind = kind_of(module)
    assert kind is not None
    (layer,) = kind.layers_of("it", module)
    layer.wide = wide
    layer.trained = (True, layer.bias is not None)
    layer.covers = layer.covers_now()
    x = torch.arange(180).view(shape) % 20 if name == "words" else rows(*shape, dtype=dtype)
    like = module(x if name == "words" else x.float()).detach()
    grad = (rows(*like.shape) * 1e-2).to(dtype)

    def moments(dtype: torch.dtype, *given: Tensor) -> Any:
        return layer.moments(*given, layer.covers, reduce=reduce, dtype=dtype)

    found = moments(torch.float32, x, grad)
    expected = moments(torch.float64, x if name == "words" else x.double(), grad.double())
    for one, other in ((found.a, expected.a), (found.g, expected.g)):
        assert one.dtype == torch.float32
        assert one.numel() and off(one, other) < 2e-6


# ---- optimizers ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 16, 3, padding=1)
        self.body, self.head = nn.Linear(16, 40), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.image(x).relu().mean((2, 3))
        return self.head(self.body(x).relu())


CLASSES = pytest.mark.parametrize("cls", [KFACSGD, KFACAdam, KFACMuon])


def train(cls: Any, autocast: bool = False, **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
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
    _, opt = train(cls, autocast=True)
    found = factors(opt)
    monkeypatch.setattr(algebra, "rounds_on_cpus", lambda: False)
    _, plain = train(cls, autocast=True)
    for key, expected in factors(plain).items():
        assert off(found[key], expected.double()) < 1e-4


@has_units
def test_statistics_dtype_rounds_what_is_gathered(monkeypatch):
    """But for what is too small for oneDNN; and not where there are no units for it."""
    monkeypatch.setattr(algebra, "_MUCH", 1)
    asked = {"statistics_dtype": torch.bfloat16}
    _, opt = train(KFACSGD, **asked)
    _, plain = train(KFACSGD)
    apart = {key: off(factors(opt)[key], f.double()) for key, f in factors(plain).items()}
    assert all(share < 1e-2 for share in apart.values())
    assert apart["body", 0] > 1e-5 and apart["body", 1] > 1e-5
    monkeypatch.setattr(algebra, "rounds_on_cpus", lambda: False)
    _, nowhere = train(KFACSGD, **asked)
    for key, expected in factors(plain).items():
        assert torch.equal(factors(nowhere)[key], expected)


def test_gradients_and_what_is_made_of_them_stay_precise(monkeypatch):
    """Moments alone are taken in rounded products."""
    inside: list[str] = []
    real = algebra.rounded_products

    def watched(device: str) -> Any:
        inside.append(device)
        return real(device)

    monkeypatch.setattr("kaisa_optim.capture.rounded_products", watched)
    _, opt = train(KFACSGD, statistics_dtype=torch.bfloat16)
    assert len(inside) == 6 * len(opt.preconditioner.layers)
    inside.clear()
    train(KFACSGD)
    assert not inside
