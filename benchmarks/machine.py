"""The machine that a benchmark ran on."""

from __future__ import annotations

import contextlib
import platform
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.recipes import replace


def describe(device: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """What a kept result says of where it comes from."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = f"{len(models)} × {models[0]}" if models else name
    return {
        "date": date.today().isoformat(),
        "cpu": f"{name}, {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": threads or torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_versions("kaisa_optim", "numpy", "kfac-pytorch", "pytorch-optimizer"),
    }


def keep(path: Path, threads: int | None = None, device: str = "cpu", **figures: Any) -> None:
    """Write figures beside the machine that they come from."""
    replace(path, {"machine": describe(device, threads), **figures}, indent=1)


def _versions(*names: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def peak_mb() -> float:
    """The most memory that this process has had."""
    # Not getrusage: its peak begins with the parent's.
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) / 2**10
