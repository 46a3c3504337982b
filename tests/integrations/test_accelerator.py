"""On a device of its own, pretended on the CPU: no tensor of the host's, and no waiting for it.

The device is registered with torch in a process of its own: elsewhere torch's own defaults would
change with it.
"""

from __future__ import annotations

import copy
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import backend_registration

from kaisa_optim import KFACLAMB, KFACSGD, KFACAdam
from kaisa_optim.curvature import group, refresh
from kaisa_optim.linalg import products
from tests.support.compare_revisions import Images, Tokens
from tests.support.training import descend, values
from tests.support.watch import Body

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices written in Python",
)
Make = Callable[[nn.Module], Any]
Elsewhere = Callable[..., Any]


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    """Calls a function in the process that has the device."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_begin) as pool:
        yield lambda function, *args: pool.submit(_with_device, function, *args).result()


def _with_device(function: Callable[..., Any], *args: Any) -> Any:
    from tests.support import accelerator

    return function(accelerator, *args)


def _begin() -> None:
    from tests.support import accelerator

    torch.set_num_threads(1)
    # Notes go to the host as they do from CUDA: beside the work, whole when they are looked at.
    group.WITH_STREAMS.add(accelerator.NAME)
    event = SimpleNamespace(synchronize=lambda: None)
    refresh.noted = lambda numbers: (accelerator.numbers_of(numbers).clone(), event)


def batches(
    network: type[nn.Module], steps: int, images: int = 8
) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(steps):
        if network is Images:
            yield torch.randn(images, 3, 8, 8, dtype=torch.float64), torch.randint(5, (images,))
        else:
            yield torch.randint(9, (32, 5)), torch.randint(9, (32, 5))


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


def train(
    network: type[nn.Module],
    make: Make,
    steps: int,
    where: Any,
    waits: Any = None,
    after_forward: Callable[[Any, Tensor], None] = lambda opt, out: None,
    dtype: torch.dtype = torch.float64,
    images: int = 8,
) -> tuple[dict[str, Tensor], list[list[str]]]:
    """The parameters, and for each step where the host waited in its passes and its update."""
    torch.manual_seed(0)
    model = network().to(dtype)
    data = list(batches(network, steps, images))
    model = model.to(where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        opt = make(model)
    found: list[list[str]] = []
    for x, y in data:
        x, y = (x.to(dtype) if x.is_floating_point() else x).to(where), y.to(where)
        if waits is not None:
            waits.taken()
        opt.zero_grad()
        out = model(x)
        after_forward(opt, out)
        loss_of(out, y).backward()
        opt.step()
        found.append([] if waits is None else waits.taken())
    return values(model), found


def train_there(
    accelerator: Any, network: type[nn.Module], make: Make, steps: int, **more: Any
) -> tuple[dict[str, Tensor], list[list[str]]]:
    with accelerator.device() as waits:
        weights, found = train(network, make, steps, accelerator.DEVICE, waits, **more)
    return {name: accelerator.numbers_of(p) for name, p in weights.items()}, found


SELDOM: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 1000}
EIGEN: dict[str, Any] = {"compute_method": "eigen", **SELDOM, "staggered": False}
OFTEN: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 2}
INVERSE: dict[str, Any] = {"compute_method": "inverse", **OFTEN}
CASES: dict[str, Make] = {
    "SGD": lambda m: KFACSGD(m, lr=0.05, momentum=0.9, weight_decay=1e-3, **SELDOM),
    "Adam": lambda m: KFACAdam(m, lr=0.01, **SELDOM),
    "inverse, often": lambda m: KFACSGD(m, lr=0.05, **INVERSE),
    "inverse, diagonal": lambda m: KFACSGD(m, lr=0.05, max_factor_size=5, **INVERSE),
    "Adam, often": lambda m: KFACAdam(m, lr=0.01, **OFTEN),
    "full": lambda m: KFACSGD(m, lr=0.05, damping_split="full", **{**INVERSE, **SELDOM}),
    "stored products": lambda m: KFACSGD(
        m, lr=0.05, compute_eigenvalue_outer_product=True, **EIGEN
    ),
    "papers": lambda m: KFACSGD(m, lr=0.05, normalization="kaisa", **EIGEN),
    "half of the rows": lambda m: KFACSGD(m, lr=0.05, statistics_fraction=0.5, **SELDOM),
    "reduced": lambda m: KFACSGD(m, lr=0.05, weight_sharing="reduce", **{**SELDOM, **EIGEN}),
    "diagonal": lambda m: KFACSGD(m, lr=0.05, max_factor_size=5, **SELDOM),
    "halves": lambda m: KFACSGD(m, lr=0.05, inv_dtype=torch.bfloat16, **SELDOM),
    "scaled": lambda m: KFACSGD(
        m, lr=0.05, grad_scaler=torch.ones((), dtype=torch.float64, device=_device(m)), **EIGEN
    ),
    "LAMB, lr a tensor": lambda m: KFACLAMB(
        m, lr=torch.tensor(0.01, dtype=torch.float64), **SELDOM
    ),
    "lr a tensor, clipped by it": lambda m: KFACSGD(
        m, lr=torch.tensor([0.05], dtype=torch.float64), kl_clip_lr="current", **EIGEN
    ),
    "two groups": lambda m: KFACAdam(
        [{"params": own, "lr": 0.01 * i, "betas": (0.9, 0.9 + 0.01 * i)} for i, own in _halves(m)],
        model=m, **SELDOM,
    ),
}  # fmt: skip


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _halves(model: nn.Module) -> list[tuple[int, list[Tensor]]]:
    modules = list(model.children())
    return [(i, [p for m in modules[i - 1 :: 2] for p in m.parameters()]) for i in (1, 2)]


# What depends on the kinds of the layers runs on both networks.
OF_KINDS = ["SGD", "Adam", "inverse, often", "papers"]
OF_KINDS += ["half of the rows", "reduced", "diagonal", "halves"]
OF_IMAGES = ["Adam, often", "LAMB, lr a tensor", "full", "lr a tensor, clipped by it"]
OF_TOKENS = [name for name in CASES if name not in {*OF_KINDS, *OF_IMAGES}]
ON = {Images: [*OF_KINDS, *OF_IMAGES], Tokens: [*OF_KINDS, *OF_TOKENS]}


@pytest.mark.parametrize(
    ("network", "name", "halves"),
    [
        *((network, name, False) for network, names in ON.items() for name in names),
        *((network, name, True) for network in ON for name in ("Adam", "halves")),
    ],
)
def test_a_device_is_trained_on_as_the_cpu_is(elsewhere, network, name, halves):
    """And the host waits for it in full refreshes alone: in the first step.

    With ``halves``, both multiply in bfloat16.
    """
    elsewhere(trains_as_the_cpu, network, name, halves)


def trains_as_the_cpu(accelerator: Any, network: Any, name: str, halves: bool) -> None:
    how = {"dtype": torch.float32 if halves else torch.float64}
    with mock.patch.object(products, "_multiplies_brain_floats", lambda device: halves):
        wanted, _ = train(network, CASES[name], 4, "cpu", **how)
        got, found = train_there(accelerator, network, CASES[name], 4, **how)
    # Sums are split otherwise there, and directions in which factors are nearly alike turn by that.
    near = {"rtol": 0.1, "atol": 0.02} if halves else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(got, wanted, **near)
    assert found[0]  # else waits would not be seen
    assert found[1:] == [[]] * 3


def labels_are_drawn_without_waiting(accelerator: Any) -> None:
    def draw(opt: Any, out: Tensor) -> None:
        opt.preconditioner.sample_fisher(out, "cross_entropy")

    generator = torch.Generator()  # the device has none
    with mock.patch.object(torch, "Generator", lambda device: generator):
        _, found = train_there(accelerator, Images, CASES["SGD"], 5, after_forward=draw)
    assert found[0] and found[1:] == [[]] * 4


def what_is_saved_on_the_cpu_goes_on_there(accelerator: Any) -> None:
    torch.manual_seed(0)
    model, data = Images().double(), list(batches(Images, 6))

    def make(model: nn.Module) -> Any:
        return KFACAdam(model, lr=0.01, **OFTEN)

    def steps(model: nn.Module, opt: Any, part: slice, where: Any) -> None:
        for x, y in data[part]:
            descend(opt, loss_of(model(x.to(where)), y.to(where)))

    opt = make(model)
    steps(model, opt, slice(3), "cpu")
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    steps(model, opt, slice(3, 6), "cpu")
    with accelerator.device():
        again = Images().double().to(accelerator.DEVICE)
        again.load_state_dict(saved[0])
        loaded = make(again)
        loaded.load_state_dict(saved[1])
        steps(again, loaded, slice(3, 6), accelerator.DEVICE)
        tensors = [x for state in loaded.state.values() for x in state.values()]
    assert {x.device for x in tensors if x.dim() > 1} == {accelerator.DEVICE}
    got = {name: accelerator.numbers_of(p) for name, p in values(again).items()}
    torch.testing.assert_close(got, values(model), rtol=1e-3, atol=1e-4)


# ---- what is launched ----


def block() -> nn.Module:
    part = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    return Body(lambda m, x: x + m.part(x), part=part)


# Quiet in every second step.
QUIET: dict[str, Any] = {"lr": 0.1, **SELDOM, "staggered": False}
GATHERING: dict[str, Any] = {**QUIET, "factor_update_steps": 1, "foreach": True}
# And how much more for each block.
LAUNCHING: dict[str, tuple[Make, int]] = {
    "SGD": (lambda m: KFACSGD(m, foreach=True, **QUIET), 0),
    "inverse": (lambda m: KFACSGD(m, compute_method="inverse", foreach=True, **QUIET), 0),
    "Adam": (lambda m: KFACAdam(m, foreach=True, **QUIET), 0),
    "LAMB": (lambda m: KFACLAMB(m, **QUIET), 0),
    # Broken sums are blotted out one by one.
    "gathering": (lambda m: KFACSGD(m, **GATHERING), 2 * 2),
}


@pytest.mark.parametrize("name", LAUNCHING)
def test_a_step_of_more_layers_launches_as_much(elsewhere, name):
    few, many = elsewhere(launches_of, name)
    assert few > 0 and many - few == 3 * LAUNCHING[name][1]


def launches_of(accelerator: Any, name: str) -> list[int]:
    found, make = [], LAUNCHING[name][0]
    for depth in (2, 5):
        torch.manual_seed(0)
        model, data = nn.Sequential(*(block() for _ in range(depth))), torch.randn(16, 6)
        with accelerator.device():
            model, x = model.to(accelerator.DEVICE), data.to(accelerator.DEVICE)
            opt = make(model)
            for _ in range(4):
                opt.zero_grad()
                model(x).square().mean().backward()
                with accelerator.Launches() as launches:
                    opt.step()
        found.append(launches.count)
    return found


# ---- the device itself ----


def tensors_of_both_devices_do_not_meet(accelerator: Any) -> None:
    with accelerator.device():
        there, here = torch.ones(3, device=accelerator.DEVICE), torch.ones(3)
        places = torch.tensor([0, 2], device=accelerator.DEVICE)
        for meet in (
            lambda: there + here,
            lambda: here[places],
            lambda: here.__setitem__(places, torch.ones(2)),
        ):
            with pytest.raises(RuntimeError, match="on the CPU"):
                meet()


WAITS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "a look at numbers"),
    "bool": (lambda x: bool((x > 0).all()), "a look at numbers"),
    "cpu": (lambda x: x.cpu(), "a copy to cpu"),
    "tensor": (lambda x: torch.tensor([1.0, 2.0], device=x.device), "a copy to pretended"),
    "copy": (lambda x: x.copy_(torch.ones(3)), "a copy between devices"),
    "overlapping": (lambda x: x.to("cpu", non_blocking=True), "a copy to cpu"),
    "onto the host": (lambda x: torch.ones(3).copy_(x, non_blocking=True), "a copy between"),
    "mask": (lambda x: x[x > 0], "indices from a mask"),
    "index": (lambda x: x[torch.tensor([0, 2])], "indices on the host"),
    "eigh": (lambda x: torch.linalg.eigh(torch.outer(x, x)), "a look at numbers"),
    "cholesky": (lambda x: torch.linalg.cholesky(torch.outer(x, x).exp().diag().diag()),
                 "a look at numbers"),
}  # fmt: skip


def each_wait_is_noted(accelerator: Any) -> None:
    with accelerator.device() as waits:
        for name, (wait, why) in WAITS.items():
            x = torch.tensor([1.0, -2.0, 3.0], device=accelerator.DEVICE)
            waits.taken()
            wait(x)
            assert [why in found for found in waits.taken()] == [True], name


# ---- calls on another device than the weight's ----


def sums_come_to_the_layers_device(accelerator: Any) -> None:
    """As of weights that are offloaded to the host."""
    weights = []
    for where in ("cpu", accelerator.DEVICE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        x = torch.randn(8, 4, dtype=torch.float64)
        opt = KFACSGD(model, lr=0.1)
        for layer in opt.preconditioner.layers.values():
            real = layer.moments
            layer.moments = lambda x, g, *how, real=real, to=where: real(x.to(to), g.to(to), *how)
        with accelerator.device():
            descend(opt, model(x).square().mean())
        weights.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "check",
    [
        labels_are_drawn_without_waiting,
        what_is_saved_on_the_cpu_goes_on_there,
        tensors_of_both_devices_do_not_meet,
        each_wait_is_noted,
        sums_come_to_the_layers_device,
    ],
)
def test_on_the_device(elsewhere, check):
    elsewhere(check)
