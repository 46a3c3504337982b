"""``statistics_precision``: what the statistics' float32 products are taken in, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from kaisa_optim.layers import base as layer_base
from kaisa_optim.linalg import products
from tests.linalg.test_moments import off
from tests.support.training import EVERY_STEP, descend, network, train

SETTINGS = "highest", "high", "medium"
BY_BACKEND = {"highest": ["ieee"] * 2, "high": ["tf32"] * 2, "medium": ["tf32", "bf16"]}
NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def backends() -> list[Any]:
    found = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return [b for b in found if hasattr(b, "fp32_precision")]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Puts the process's settings back, whatever a test made of them."""
    saved = [b.fp32_precision for b in backends()]
    yield
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = "none"
    for backend in backends():
        backend.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for backend, value in zip(backends(), saved, strict=True):
        backend.fp32_precision = "none"
        backend.fp32_precision = value


def matmuls() -> list[str]:
    return [b.fp32_precision for b in backends()]


def all_settings() -> list[str]:
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "mixed"
    return [older, *matmuls()]


def one_setting(value: str) -> Any:
    return lambda: torch.set_float32_matmul_precision(value)


def by_backend() -> None:
    if not NEWER:
        pytest.skip("this torch has no fp32_precision")
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def highest_below_its_name() -> None:
    """Torch's older name tells what a backend is no longer at."""
    by_backend()
    torch.set_float32_matmul_precision("medium")
    backends()[1].fp32_precision = "ieee"


USERS = {
    "nothing": lambda: None,
    "by backend": by_backend,
    "other than its name": highest_below_its_name,
    **{x: one_setting(x) for x in SETTINGS},
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_it_holds_for_statistics_alone(setting, user, monkeypatch):
    seen: dict[str, list[Any]] = {"statistics": [], "decompositions": [], "directions": []}

    def spied(kind: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Where torch has no settings by backend, there is but one.
            seen[kind].append(matmuls() if NEWER else torch.get_float32_matmul_precision())
            return function(*args, **kwargs)

        return call

    USERS[user]()
    before = all_settings()
    moments = spied("statistics", layer_base.second_moment)
    monkeypatch.setattr(layer_base, "second_moment", moments)
    eigh = spied("decompositions", products.eigendecompose)
    monkeypatch.setattr(products, "eigendecompose", eigh)
    polar = spied("directions", products.orthogonalized)
    monkeypatch.setattr(products, "orthogonalized", polar)
    model = network(dtype=torch.float32)
    opt = KFACSGD(model, lr=0.1, statistics_precision=setting, **EVERY_STEP)
    train(model, opt, range(2))
    assert len(seen["statistics"]) >= 8 and len(seen["decompositions"]) >= 4
    other = network(dtype=torch.float32)
    train(other, KFACSGD(other, lr=0.1, statistics_precision=setting), range(2))
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
    with (
        pytest.raises(ZeroDivisionError),
        products.full_precision("medium"),
    ):
        raise ZeroDivisionError
    assert all_settings() == before


# ---- what becomes of the numbers ----


def factor_a(x: Tensor, setting: str, autocast: bool = False) -> Tensor:
    net = nn.Sequential(nn.Linear(x.shape[1], 4))
    opt = KFACSGD(net, lr=0.1, statistics_precision=setting, **EVERY_STEP)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = net(x).float().square().mean()
    descend(opt, loss)
    return opt.preconditioner.factors("0")[0][0]


@pytest.mark.parametrize("n", [80, 300])
def test_medium_is_near_the_exact_moment(n):
    """By the rounding of bfloat16, on CPUs on which torch multiplies in it."""
    x = torch.randn(1500, n) + 0.3
    rows = torch.cat([x, torch.ones(1500, 1)], 1).double()
    assert off(factor_a(x, "medium"), rows.mT @ rows / 1500) < 3e-3
    assert off(factor_a(x, "highest"), rows.mT @ rows / 1500) < 1e-6


LAYERS = {
    "linear": (lambda: nn.Linear(100, 4), (100,)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (3, 9, 9)),
    "strided": (lambda: nn.Conv2d(3, 4, 3, stride=2), (3, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 5, 5)),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("setting", ["high", "medium"])
def test_factors_stay_positive_where_inputs_hardly_vary(setting, kind, sharing):
    """Sums of exact rows beside products of rounded ones would be no moment."""
    make, shape = LAYERS[kind]
    net = nn.Sequential(make())
    opt = KFACSGD(net, lr=0.1, weight_sharing=sharing, statistics_precision=setting, **EVERY_STEP)
    x = torch.linspace(5, 15, shape[0]).view(-1, *[1] * (len(shape) - 1))
    descend(opt, net(x + 0.01 * torch.randn(500, *shape)).square().mean())
    values = torch.linalg.eigvalsh(opt.preconditioner.factors("0")[0].double())
    assert values.min() > -1e-5 * values.max()


def test_medium_takes_nothing_from_rows_that_autocast_has_rounded():
    x = torch.randn(1500, 300) + 0.3
    expected = factor_a(x, "highest", autocast=True).double()
    assert off(factor_a(x, "medium", autocast=True), expected) < 1e-5
