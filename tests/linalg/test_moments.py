"""Moments of half-precision rows, the precision of the statistics' products, and packing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from kaisa_optim.linalg import moments, products
from tests.support.training import EVERY_STEP, descend, network, train

HALVES = torch.bfloat16, torch.float16
both = pytest.mark.parametrize("append_one", [False, True])


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of a mean, so that what is rounded does not average out."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) + 0.3).to(dtype)


def off(actual: Tensor, expected: Tensor) -> float:
    """By how much of its norm."""
    return float((actual.double() - expected).norm() / expected.norm())


def assert_moment(x: Tensor, *, append_one: bool, diagonal: bool = False) -> None:
    moment = moments.second_moment(x, torch.float32, diagonal=diagonal, append_one=append_one)
    wide = F.pad(x.double(), (0, int(append_one)), value=1.0)
    expected = wide.square().sum(1) if diagonal else wide.mT @ wide
    assert moment.dtype == torch.float32
    assert off(moment, expected) < 1e-6


@both
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("count", "n"), [(700, 20), (900, 300), (100, 300)])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_moments_are_those_of_float32(dtype, count, n, diagonal, append_one):
    assert_moment(rows(2, count, n, dtype=dtype), append_one=append_one, diagonal=diagonal)


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


@both
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("count", "n"), [(700, 90), (900, 300)])
def test_a_device_that_multiplies_halves_into_float32(count, n, dtype, append_one, monkeypatch):
    asked = emulated(monkeypatch)
    x = rows(2, count, n, dtype=dtype)
    assert_moment(x, append_one=append_one)
    assert len(asked) == 1
    asked.clear()
    moments.second_moment(x.double(), torch.float64, diagonal=False)
    moments.second_moment(x.float(), torch.float32, diagonal=False)
    moments.second_moment(x[:, :8], torch.float32, diagonal=False)
    assert not asked  # those of other precisions, and few rows


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


# ---- ``statistics_precision``: of the statistics' float32 products, and no others ----

SETTINGS = "highest", "high", "medium"
BY_BACKEND = {"highest": ["ieee"] * 2, "high": ["tf32"] * 2, "medium": ["tf32", "bf16"]}
NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")


MATMULS = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
BACKENDS = [x for x in MATMULS if hasattr(x, "fp32_precision")]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Puts the process's settings back, whatever a test made of them."""
    saved = matmuls()
    yield
    for backend in (torch.backends, *BACKENDS) if NEWER else ():
        backend.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for backend, value in zip(BACKENDS, saved, strict=True):
        backend.fp32_precision = "none"
        backend.fp32_precision = value


def matmuls() -> list[str]:
    return [x.fp32_precision for x in BACKENDS]


def all_settings() -> list[str]:
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "mixed"
    return [older, *matmuls()]


def by_backend() -> None:
    if not NEWER:
        pytest.skip("this torch has no fp32_precision")
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def highest_below_its_name() -> None:
    """Torch's older name tells what a backend is no longer at."""
    by_backend()
    torch.set_float32_matmul_precision("medium")
    BACKENDS[1].fp32_precision = "ieee"


USERS = {
    "nothing": lambda: None,
    "by backend": by_backend,
    "other than its name": highest_below_its_name,
    **{x: partial(torch.set_float32_matmul_precision, x) for x in SETTINGS},
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_it_holds_for_statistics_alone(setting, user, monkeypatch):
    seen: dict[str, list[Any]] = {"statistics": [], "decompositions": [], "directions": []}

    def spy(kind: str, module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Where torch has no settings by backend, there is but one.
            seen[kind].append(matmuls() if NEWER else torch.get_float32_matmul_precision())
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    spy("statistics", moments, "_blocks")  # of the product that follows
    spy("decompositions", products, "eigendecompose")
    spy("directions", products, "orthogonalized")
    USERS[user]()
    before = all_settings()
    for options in (EVERY_STEP, {}):
        model = network(dtype=torch.float32)
        train(model, KFACSGD(model, lr=0.1, statistics_precision=setting, **options), range(2))
    assert len(seen["statistics"]) >= 12 and len(seen["decompositions"]) >= 4
    assert len(seen["directions"]) >= 4
    for kind in seen:
        of_kind = setting if kind == "statistics" else "highest"
        wanted = BY_BACKEND[of_kind] if NEWER else of_kind
        # What nobody has set is full precision, too.
        said = [[x.replace("none", "ieee") for x in one] if NEWER else one for one in seen[kind]]
        assert all(one == wanted for one in said), kind
    assert all_settings() == before


def test_settings_come_back_after_an_error():
    torch.set_float32_matmul_precision("high")
    before = all_settings()
    with pytest.raises(ZeroDivisionError), products.full_precision("medium"):
        raise ZeroDivisionError
    assert all_settings() == before


def factor_a(
    layer: nn.Module, x: Tensor, setting: str, autocast: bool = False, **options: Any
) -> Tensor:
    net = nn.Sequential(layer)
    opt = KFACSGD(net, lr=0.1, statistics_precision=setting, **EVERY_STEP, **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = net(x).float().square().mean()
    descend(opt, loss)
    return opt.preconditioner.factors("0")[0][0]


@pytest.mark.parametrize("n", [80, 300])
def test_medium_is_near_the_exact_moment(n):
    """By the rounding of bfloat16, on CPUs on which torch multiplies in it."""
    x, layer = torch.randn(1500, n) + 0.3, nn.Linear(n, 4)
    rows = F.pad(x.double(), (0, 1), value=1.0)
    assert off(factor_a(layer, x, "medium"), rows.mT @ rows / 1500) < 3e-3
    assert off(factor_a(layer, x, "highest"), rows.mT @ rows / 1500) < 1e-6


LAYERS = {
    "linear": (lambda: nn.Linear(100, 4), (100,)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (3, 9, 9)),
    "strided": (lambda: nn.Conv2d(3, 4, 3, stride=2), (3, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 5, 5)),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=list(LAYERS))
@pytest.mark.parametrize("setting", ["high", "medium"])
def test_factors_stay_positive_where_inputs_hardly_vary(setting, make, shape, sharing):
    """Sums of exact rows beside products of rounded ones would be no moment."""
    x = torch.linspace(5, 15, shape[0]).view(-1, *[1] * (len(shape) - 1))
    x = x + 0.01 * torch.randn(500, *shape)
    values = torch.linalg.eigvalsh(factor_a(make(), x, setting, weight_sharing=sharing).double())
    assert values.min() > -1e-5 * values.max()


def test_medium_takes_nothing_from_rows_that_autocast_has_rounded():
    x, layer = torch.randn(1500, 300) + 0.3, nn.Linear(300, 4)
    expected = factor_a(layer, x, "highest", autocast=True).double()
    assert off(factor_a(layer, x, "medium", autocast=True), expected) < 1e-5
