"""Decompositions by size, batch and method, in float32: what a device's defaults follow from."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kaisa_optim.linalg import kronecker, orthogonal, roots
from kaisa_optim.linalg.precision import full_precision

from .settings import Settings, synchronize

SIZES = {256: (1, 16, 64), 512: (1, 16), 1024: (1, 8), 2048: (1, 4), 4096: (1, 2), 8192: (1,)}
TINY = {8: (1, 3), 16: (1,)}
_TIMES = 3
_TOO_LONG = 0.4  # seconds, after which a method is not asked for larger sizes


def _matrices(factor: Tensor) -> Any:
    return orthogonal.orthogonalized(factor, in_half=factor.device.type == "cuda")


def _roots(factor: Tensor) -> Any:
    return roots.inverse_root(factor, torch.full_like(factor[:, 0, 0], 0.01), diagonal=False)


METHODS: dict[str, Callable[[Tensor], Any]] = {
    "roots": _roots,
    "polar factor": _matrices,
    "damped inverse": lambda f: kronecker.damped_inverse(f, torch.ones_like(f[:, 0, 0])),
    "eigh": torch.linalg.eigh,
    "eigh, float64": lambda f: torch.linalg.eigh(f.double()),
    "eigh on the host": lambda f: [t.to(f.device) for t in torch.linalg.eigh(f.cpu())],
    "QR": torch.linalg.qr,
    "one product": lambda f: f @ f,
}


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    device, skipped = settings.device, set()
    torch.manual_seed(0)
    for size, batches in (TINY if settings.rehearse else SIZES).items():
        for batch in batches:
            rows = torch.randn(batch, 2 * size, size, device=device)
            rows *= torch.logspace(0, -3, size, device=device)  # as factors: few values are large
            factor = rows.mT @ rows / len(rows[0])
            found: dict[str, float] = {}
            for name, method in METHODS.items():
                if name in skipped:
                    continue
                try:
                    with full_precision():
                        taken = timed(functools.partial(method, factor), device)
                except RuntimeError as error:
                    found[name] = float("nan")
                    print(f"  {name} of {batch} × {size}: {str(error).splitlines()[0]}")
                    continue
                found[name] = 1e3 * taken
                if taken > _TOO_LONG:
                    skipped.add(name)
            yield {"size": size, "batch": batch} | found


def timed(work: Callable[[], Any], device: str) -> float:
    """The median of some times, in seconds, after one that does not count."""
    work()
    taken = []
    for _ in range(_TIMES):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
