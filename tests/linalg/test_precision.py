"""``statistics_precision``: what the statistics' float32 products are taken in, and no others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kaisa_optim import KFACSGD
from kaisa_optim.capture import hooks as capture
from kaisa_optim.layers import base as layer_base
from kaisa_optim.linalg import eigen, precision
from tests.linalg.test_moments import off
from tests.support.training import EVERY_STEP, network, train

SETTINGS = "highest", "high", "medium"
BY_BACKEND = {"highest": ["ieee"] * 2, "high": ["tf32"] * 2, "medium": ["tf32", "bf16"]}
NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def backends() -> list[Any]:
    found = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    found += [getattr(part, "conv", None) for part in (torch.backends.cudnn, torch.backends.mkldnn)]
    return [b for b in found if hasattr(b, "fp32_precision")]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Puts the process's settings back, whatever a test made of them."""
    saved = [b.fp32_precision for b in backends()]
    allowed = torch.backends.cudnn.allow_tf32
    yield
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = "none"
    for backend in backends():
        backend.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    if not NEWER:
        torch.backends.cudnn.allow_tf32 = allowed
    for backend, value in zip(backends(), saved, strict=True):
        backend.fp32_precision = "none"
        backend.fp32_precision = value


def matmuls() -> list[str]:
    return [b.fp32_precision for b in backends()[:2]]


def all_settings() -> list[str]:
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "mixed"
    return [older, *matmuls(), convolutions()]


def convolutions() -> str:
    if not NEWER:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    return str(torch.backends.cudnn.conv.fp32_precision)


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


def inherited() -> None:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    torch.backends.fp32_precision = "ieee"


USERS = {
    "nothing": lambda: None,
    "by backend": by_backend,
    "other than its name": highest_below_its_name,
    "inherited": inherited,
    **{x: one_setting(x) for x in SETTINGS},
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_it_holds_for_statistics_alone(setting, user, monkeypatch):
    seen: dict[str, list[Any]] = {"statistics": [], "decompositions": []}

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
    eigh = spied("decompositions", eigen.eigendecompose)
    monkeypatch.setattr(eigen, "eigendecompose", eigh)
    model = network(dtype=torch.float32)
    opt = KFACSGD(model, lr=0.1, statistics_precision=setting, **EVERY_STEP)
    train(model, opt, range(2))
    assert len(seen["statistics"]) >= 8 and len(seen["decompositions"]) >= 4
    for kind, of_kind in {"statistics": setting, "decompositions": "highest"}.items():
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
        precision.statistics_precision("medium", "cuda", in_half=True),
    ):
        raise ZeroDivisionError
    assert all_settings() == before


@pytest.mark.parametrize("when", ["begin", "end"])
def test_settings_come_back_where_one_of_them_fails(when, monkeypatch):
    torch.set_float32_matmul_precision("high")
    before, end = all_settings(), precision._CUDNN.end

    def fails(level: int) -> None:
        if when == "end":
            end(level)
        raise ZeroDivisionError

    monkeypatch.setattr(precision._CUDNN, when, fails)
    rows = torch.randn(9, 9)
    with (
        pytest.raises(ZeroDivisionError),
        precision.statistics_precision("medium", "cuda", in_half=False),
    ):
        assert precision.rounded(rows) is not rows
    assert all_settings() == before
    assert precision.rounded(rows) is rows


@pytest.mark.parametrize("first", ["medium", "highest"])
def test_threads_leave_what_they_found(first):
    """Whoever is last puts it back, and full precision is full beside any other's."""
    torch.set_float32_matmul_precision("high")
    before, seen = all_settings(), []
    second = {"medium": "highest", "highest": "medium"}[first]
    both, over = threading.Barrier(2), threading.Barrier(2)

    def outer() -> None:
        with precision.statistics_precision(first, "cpu", in_half=False):
            both.wait()  # the other one begins within this
            both.wait()
            seen.append(torch.get_float32_matmul_precision())
        over.wait()

    def inner() -> None:
        both.wait()
        with precision.statistics_precision(second, "cpu", in_half=False):
            both.wait()
            over.wait()  # and ends after it
            seen.append(torch.get_float32_matmul_precision())

    threads = [threading.Thread(target=run) for run in (outer, inner)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["highest", second] and all_settings() == before


def test_what_is_inherited_stays_so():
    inherited()
    with precision.statistics_precision("medium", "cpu", in_half=False):
        pass
    torch.backends.fp32_precision = "tf32"
    assert matmuls() == ["tf32", "tf32"]


# ---- what becomes of the numbers ----


def factor_a(x: Tensor, setting: str, autocast: bool = False) -> Tensor:
    net = nn.Sequential(nn.Linear(x.shape[1], 4))
    opt = KFACSGD(net, lr=0.1, statistics_precision=setting, **EVERY_STEP)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = net(x).float().square().mean()
    loss.backward()
    opt.step()
    return opt.preconditioner.factors("0")[0][0]


@pytest.mark.parametrize("n", [80, 300])
def test_medium_is_of_rows_rounded_to_bfloat16_with_sums_in_float32(n):
    x = torch.randn(1500, n) + 0.3
    found = factor_a(x, "medium")
    rounded, exact = (
        torch.cat([rows, torch.ones(1500, 1)], 1).double() for rows in (x.bfloat16().float(), x)
    )
    assert off(found, rounded.mT @ rounded / 1500) < 1e-5
    assert 1e-5 < off(found, exact.mT @ exact / 1500) < 3e-3
    assert off(factor_a(x, "highest"), exact.mT @ exact / 1500) < 1e-6


def test_high_rounds_to_the_nearest_of_tf32():
    x = torch.randn(1500, 20) * torch.logspace(-30, 30, 20)
    with precision.statistics_precision("high", "cpu", in_half=False):
        found = precision.rounded(x)
        assert torch.equal(precision.rounded(found), found)
        assert precision.rounded(x.double()).equal(x.double())
    assert not (found.view(torch.int32) & ((1 << 13) - 1)).any()
    step = torch.exp2(torch.frexp(x)[1] - 11.0)
    assert ((found - x).abs() <= step / 2).all() and found.ne(x).any()
    assert precision.rounded(x) is x


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
    net(x + 0.01 * torch.randn(500, *shape)).square().mean().backward()
    opt.step()
    values = torch.linalg.eigvalsh(opt.preconditioner.factors("0")[0].double())
    assert values.min() > -1e-5 * values.max()


@pytest.mark.parametrize(
    ("kind", "bias"),
    # Rows without sums are left to the product, which not every CPU rounds.
    [*((kind, True) for kind in LAYERS), ("convolution", False), ("transposed", False)],
)
def test_all_of_an_inputs_moment_is_of_rounded_numbers(kind, bias):
    """Also what is taken off again at the borders of images, and sums."""
    make, shape = LAYERS[kind]
    x = torch.randn(200, *shape) + 5
    found = []
    for setting, inputs in (("medium", x), ("highest", x.bfloat16().float())):
        module = make()
        if not bias:
            module.bias = None
        opt = KFACSGD(nn.Sequential(module), lr=0.1, statistics_precision=setting, **EVERY_STEP)
        module(inputs).square().mean().backward()
        opt.step()
        found.append(opt.preconditioner.factors("0")[0].double())
    assert (
        off(found[0], found[1]) < 7e-6
    )  # 3e-6 by the order of sums, 1.5e-5 where a part is not rounded


def test_medium_takes_nothing_from_rows_that_autocast_has_rounded():
    x = torch.randn(1500, 300) + 0.3
    expected = factor_a(x, "highest", autocast=True).double()
    assert off(factor_a(x, "medium", autocast=True), expected) < 1e-5


# ---- convolutions, of which CUDA alone has units for TF32 ----


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("in_half", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_tf32_is_for_images_in_half_precision_and_for_lower_settings(setting, in_half, allowed):
    if NEWER:
        torch.backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = allowed
    before = convolutions()
    with precision.statistics_precision(setting, "cuda", in_half=in_half):
        assert convolutions() == ("tf32" if in_half or setting != "highest" else "ieee")
    assert convolutions() == before
    with precision.statistics_precision(setting, "cpu", in_half=in_half):
        assert not NEWER or torch.backends.mkldnn.conv.fp32_precision in ("none", "ieee")
    assert convolutions() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tf32_has_a_place_for_every_digit_of_half_precision(dtype):
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    bits = x[x.isfinite()].float().view(torch.int32)
    assert not (bits & ((1 << 13) - 1)).any()  # what TF32 leaves out of 23


def test_capture_says_what_images_are_in(monkeypatch):
    asked: list[tuple[str, bool]] = []

    def spied(setting: str, device: str, *, in_half: bool) -> Any:
        asked.append((setting, in_half))
        return precision.statistics_precision(setting, device, in_half=in_half)

    monkeypatch.setattr(capture, "statistics_precision", spied)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 2))
    opt = KFACSGD(net, lr=0.1, statistics_precision="high", **EVERY_STEP)
    for autocast in (False, True):
        asked.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = net(torch.randn(4, 2, 4, 4)).float().square().mean()
        loss.backward()
        assert asked == [("high", autocast)] * 2
        opt.step()
