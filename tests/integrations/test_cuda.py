"""On a CUDA device, where there is one: the CPU's results, and no waiting for the device.

What test_accelerator checks on a device that is pretended, on a real one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kaisa_optim import KFACAdam
from tests.integrations.test_accelerator import CASES, Images, Tokens, batches, loss_of, train

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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("network", [Images, Tokens])
def test_training_is_the_cpus(network: type[nn.Module], name: str) -> None:
    """And the host waits in full refreshes alone: in the first step."""
    if name == "corrected by examples" and network is Images:
        pytest.skip("it has layers that eigenvalues can't be corrected for by examples")
    wanted, _ = train(network, CASES[name], 7, "cpu")
    with watched() as waits:
        got, found = train(network, CASES[name], 7, "cuda", waits)
    for key, value in wanted.items():
        torch.testing.assert_close(got[key].cpu(), value, rtol=1e-3, atol=1e-4)
    if "beside" not in name:  # whose decompositions wait on a thread of their own
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
        scale = {"grad_scaler": scaler} if scaler.is_enabled() else {}
        opt = KFACAdam(model, lr=0.05, **scale)
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
