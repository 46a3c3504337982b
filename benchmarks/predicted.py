"""Predicted times of steps beside measured ones, on this machine's CPU, after calibration.

    python -m benchmarks.predicted [--out benchmarks/results/predicted_cpu.json]

Four gloo ranks train three models with three fractions. Times are CPU seconds of the busiest rank,
which other work on the machine changes little; the profile is calibrated by the same clock. A
rank's waits are not in them, nor is the averaging of gradients, which DistributedDataParallel does
during the backward pass.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.machine import keep
from benchmarks.networks import Block, CifarResNet
from benchmarks.recipes import command_line
from kaisa_optim import KFACAdam
from kaisa_optim.tools import calibration, hardware, plan

RANKS = 4
FRACTIONS: dict[str, dict[str, Any]] = {
    "layer-wise": {"assignment": "layer-wise"},
    "1/2": {"grad_worker_fraction": 0.5},
    "opt": {"assignment": "opt"},
}
EARLY, STEPS = 41, 20  # steps before, and one interval of refreshes, none of them early


class Characters(nn.Module):
    """A transformer over bytes, with one head and no places."""

    def __init__(self, width: int = 192, blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(96, width)
        self.blocks = nn.Sequential(*(Block(width, 1, 4 * width) for _ in range(blocks)))
        self.head = nn.Linear(width, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(x))).flatten(0, 1)


def autoencoder() -> nn.Module:
    sides = [784, 512, 256, 64, 256, 512, 784]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sides):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "autoencoder": (autoencoder, lambda: torch.rand(256, 784)),
    "ResNet-20": (lambda: CifarResNet(20), lambda: torch.rand(16, 3, 32, 32)),
    "characters": (Characters, lambda: torch.randint(96, (8, 64))),
}


def calibrated() -> dict[str, Any]:
    """Return a profile by CPU seconds; links come from the ranks."""
    torch.set_num_threads(1)
    clock: Any = SimpleNamespace(perf_counter=time.process_time, monotonic=time.monotonic)
    calibration.time = clock  # type: ignore[attr-defined]
    return calibration.measure("cpu", 1)


def measured(store: str, rank: int) -> dict[str, Any]:
    """Return one rank's CPU seconds of a step by model and fraction, and those of exchanges."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    found: dict[str, Any] = {"links": [_exchanged(1 << 10), _exchanged(1 << 21)]}
    for name, (make, batch) in MODELS.items():
        for fraction, options in FRACTIONS.items():
            torch.manual_seed(0)
            model, x = make(), batch()
            optimizer = KFACAdam(model, lr=1e-3, inv_update_steps=STEPS, **options)
            taken = 0.0
            for step in range(EARLY + STEPS):
                start = time.process_time()
                optimizer.zero_grad()
                model(x).float().square().mean().backward()
                passes = time.process_time() - start
                average(model)
                start = time.process_time()
                optimizer.step()
                if step >= EARLY:
                    taken += passes + time.process_time() - start
            found[f"{name}, {fraction}"] = taken / STEPS
    dist.destroy_process_group()
    return found


def average(model: nn.Module) -> None:
    """Average gradients over all ranks."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    parts = flat.div_(RANKS).split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))


def _exchanged(size: int) -> float:
    x = torch.zeros(RANKS * size, dtype=torch.uint8)
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    start = time.process_time()
    for _ in range(20):
        dist.all_to_all_single(y, x)
    return (time.process_time() - start) / 20


def run() -> dict[str, Any]:
    profile = calibrated()
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(RANKS, context) as pool,
    ):
        ranks = list(pool.map(functools.partial(measured, f"{folder}/store"), range(RANKS)))
    small, large = (max(rank["links"][i] for rank in ranks) for i in (0, 1))
    rate = (RANKS - 1) * ((1 << 21) - (1 << 10)) / (large - small) / 1e9
    link = {"gb_per_s": rate, "latency_us": 1e6 * small}
    profile |= {"links": {"inside": link, "between": link}, "ranks_per_node": RANKS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.toml"
        path.write_text(hardware.text(profile))
        rows = list(_compared(path, ranks))
    return {"profile": profile, "ranks": RANKS, "rows": rows}


def _compared(profile: Path, ranks: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield predicted and measured milliseconds of each model and fraction."""
    for name, (make, batch) in MODELS.items():
        how: Any = {"lr": 1e-3, "inv_update_steps": STEPS}
        for fraction, options in FRACTIONS.items():
            found = plan(make(), RANKS, batch=batch(), device=str(profile), **how, **options)
            assert found.best is not None
            seen = max(rank[f"{name}, {fraction}"] for rank in ranks)
            mean = found.best.times.mean
            seconds = {stage: x for stage, x in mean.items() if stage != "average gradients"}
            yield {
                "model": name,
                "fraction": fraction,
                "measured ms": 1e3 * seen,
                "predicted ms": 1e3 * sum(seconds.values()),
                "error": sum(seconds.values()) / seen - 1,
                "stages": {stage: 1e3 * x for stage, x in seconds.items()},
            }


def main() -> None:
    parser = command_line("predicted", __doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = run()
    for row in found["rows"]:
        times = f"{row['measured ms']:8.2f} {row['predicted ms']:8.2f}"
        print(f"{row['model']:12} {row['fraction']:10} {times} {100 * row['error']:+5.0f} %")
    if options.out is not None:
        keep(options.out, 1, **found)


if __name__ == "__main__":
    main()
