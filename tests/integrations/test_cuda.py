"""On a CUDA device, where there is one: the CPU's results, and no waiting for the device.

What test_accelerator checks on a device that is pretended, on a real one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kaisa_optim import KFACSGD, KFACAdam
from tests.integrations.test_accelerator import CASES, batches, loss_of, train
from tests.support import ranks
from tests.support.compare_revisions import Images, Tokens

# Asked for by cuBLAS where reruns are to have the same bits, before its first call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Waits:
    """Where the host waited for the device since this was last asked, as torch warns of it."""

    def __init__(self, caught: list[Any]) -> None:
        self.caught = caught

    def taken(self) -> list[str]:
        found = [f"{w.filename}:{w.lineno}" for w in self.caught if "synchron" in str(w.message)]
        self.caught.clear()
        return found


@contextmanager
def watched() -> Iterator[Waits]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield Waits(caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# So many that each A has its full rank: solvers differ in the basis of what no row has.
IMAGES = 160


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("network", [Images, Tokens])
def test_training_is_the_cpus(network: type[nn.Module], name: str) -> None:
    """And the host waits in full refreshes alone: in the first step."""
    wanted, _ = train(network, CASES[name], 7, "cpu", images=IMAGES)
    with watched() as waits:
        got, found = train(network, CASES[name], 7, "cuda", waits, images=IMAGES)
    for key, value in wanted.items():
        torch.testing.assert_close(got[key].cpu(), value, rtol=1e-3, atol=1e-4)
    assert found[0]  # else waits would not be seen
    assert found[1:] == [[]] * 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_comes_near_full(dtype: torch.dtype) -> None:
    """Of half-precision inputs and gradients statistics are taken in float32."""
    losses = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = Images().cuda()
        scaler = torch.amp.GradScaler("cuda", enabled=enabled and dtype is torch.float16)
        opt = KFACAdam(model, lr=0.05)
        x, y = next(batches(Images, 1))
        x, y = x.float().cuda(), y.cuda()
        for _ in range(20):
            opt.zero_grad()
            with torch.autocast("cuda", dtype, enabled=enabled):
                loss = loss_of(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        losses.append(F.cross_entropy(model(x), y).item())
    assert max(losses) < 0.1, losses  # of 1.6 at the beginning


# ---- reruns ----

STEADY = {"Adam", "LAMB", "SGD", "inverse, often"}


@pytest.mark.parametrize("name", sorted(STEADY))
def test_reruns_have_the_same_bits_under_deterministic_algorithms(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        runs = [train(Tokens, CASES[name], 5, "cuda")[0] for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for key, value in runs[0].items():
        assert torch.equal(value, runs[1][key]), key


# ---- ranks ----


def trained_on_ranks(
    backend: str, device: str, fraction: float, steps: int = 4
) -> dict[str, Tensor]:
    """Each rank has its share of the batches; all ranks of a group share one card."""
    group = dist.new_group(backend=backend)
    torch.manual_seed(0)
    model = Images().double()
    data = list(batches(Images, 4))
    model = model.to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        passed = DistributedDataParallel(model, process_group=group)
        opt = KFACSGD(
            model,
            lr=0.05,
            inv_update_steps=2,
            factor_update_steps=1,
            grad_worker_fraction=fraction,
            process_group=group,
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    for x, y in data:
        opt.zero_grad()
        x, y = x[rank::world].to(device), y[rank::world].to(device)
        loss_of(passed(x), y).backward()
        opt.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("world", "backend", "fraction"), [(2, "gloo", 0.0), (2, "gloo", 1.0), (1, "nccl", 1.0)]
)
def test_ranks_of_one_card_take_the_cpus_steps(world: int, backend: str, fraction: float) -> None:
    """Two by gloo: NCCL refuses two ranks of one card."""
    wanted = ranks.run(world, trained_on_ranks, "gloo", "cpu", fraction)
    how = f"cpu:gloo,cuda:{backend}", "cuda", fraction
    found = ranks.run(world, trained_on_ranks, *how, timeout=120)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
