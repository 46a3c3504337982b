"""Whole steps of large networks: base optimizers, ours and peers in turns, and where time goes."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.networks import Transformer
from benchmarks.step_time.contestants import (
    BASES,
    NEVER,
    PAPERS,
    PEERS,
    TORCH_MUON,
    TURN,
    Maker,
    Trainer,
    is_installed,
    ours,
)
from benchmarks.step_time.steps import floor, preconditioning
from benchmarks.step_time.tasks import DEFAULT, LONG, OFTEN, SHORT, TASKS, Task, shown
from kaisa_optim.optim.mixin import KFACMixin

from .settings import Settings, synchronize

_PROFILED = 10  # steps
_SLOWEST = 0.95  # quantile


@dataclass(frozen=True)
class Contest:
    """Who trains what, the base first, and for how many steps each."""

    task: Task
    makers: dict[str, Maker]
    intervals: tuple[int, int]
    steps: int
    profiled: str | None = None  # whose steps are looked into


# ---- contests ----

# The papers' gradients at their fastest: Cholesky's inverse takes a tenth of an eigendecomposition.
INVERSE: dict[str, Any] = {"compute_method": "inverse"}
HALF: dict[str, Any] = {"inv_dtype": torch.bfloat16}


def resnet50(settings: Settings) -> Iterator[dict[str, Any]]:
    task = (SHORT if settings.rehearse else TASKS)["resnet50"]
    scaled = replace(task, title=f"{task.title}, float16", half=torch.float16)
    some = {"SGD": BASES["SGD"], "KFACSGD": ours(), "KFACSGD, bfloat16": ours(**HALF)}
    papers = {"KFACSGD, inverse, bfloat16": ours(**INVERSE, **HALF)}
    everyone = some | papers | peers("SOAP")
    yield from compete(Contest(task, everyone, DEFAULT, 40, "KFACSGD"), settings)
    yield from compete(Contest(task, some | papers, LONG, 40), settings)
    yield from compete(Contest(task, some | papers | peers(PAPERS), OFTEN, 20), settings)
    if settings.device == "cuda":  # CPUs have no loss scaling to try
        yield from compete(Contest(scaled, some | papers, LONG, 30), settings)


def bert_large(settings: Settings) -> Iterator[dict[str, Any]]:
    task = (SHORT if settings.rehearse else TASKS)["bert-large"]
    some = {
        "LAMB": BASES["LAMB"],
        "KFACLAMB": ours("LAMB"),
        "KFACLAMB, bfloat16": ours("LAMB", **HALF),
        "KFACLAMB, bfloat16, a quarter": ours("LAMB", **HALF, statistics_fraction=0.25),
        "KFACLAMB, inverse, bfloat16": ours("LAMB", **INVERSE, **HALF),
    }
    yield from compete(Contest(task, some, DEFAULT, 20, "KFACLAMB"), settings)


def _gpt2() -> nn.Module:
    return Transformer(50257, 1024, 768, 12, 12, 3072, tied=True)


def _words() -> tuple[Tensor, Tensor]:
    words = torch.randint(50257, (16, 1025))
    return words[:, :-1], words[:, 1:]


def gpt2(settings: Settings) -> Iterator[dict[str, Any]]:
    if settings.rehearse:
        task = SHORT["transformer"]
    else:
        options = {"loss_terms": "positions"}
        task = Task("GPT-2 of 124M", _gpt2, _words, options, half=torch.bfloat16)
    some = {
        "AdamW": BASES["AdamW"],
        "Muon": BASES["Muon"],
        "KFACAdam": ours("AdamW"),
        "KFACAdam, bfloat16": ours("AdamW", **HALF),
        "KFACAdam, inverse, bfloat16": ours("AdamW", **INVERSE, **HALF),
    }
    everyone = some | peers(TORCH_MUON, "SOAP")
    yield from compete(Contest(task, everyone, DEFAULT, 40, "KFACAdam"), settings)


def peers(*names: str) -> dict[str, Maker]:
    return {name: PEERS[name] for name in names if is_installed(name)}


# ---- one contest ----


def compete(contest: Contest, settings: Settings) -> Iterator[dict[str, Any]]:
    """First how each begins, then each one's steps in turns, then whose time goes where."""
    task, device = contest.task, settings.device
    title = f"{task.title}, {shown(contest.intervals)}"
    trainers: dict[str, Trainer] = {}
    base, *others = contest.makers
    some = [base, *(name for name in others if re.search(settings.only, name))]
    for name in some:
        make = contest.makers[name]
        trainers[name], first = begun(contest, make, device)
        yield {"contest": title, "contestant": name} | first
    stages: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    steps = 4 if settings.rehearse else contest.steps
    for start in range(0, steps, TURN):
        for name, trainer in trainers.items():
            stages[name] += trainer.run(min(TURN, steps - start))
    times = {name: [1e3 * sum(pair) for pair in both] for name, both in stages.items()}
    base_times, *_ = times.values()
    for name, own in times.items():
        ordered = sorted(own)
        yield {
            "contest": title,
            "contestant": name,
            "ms": statistics.fmean(own),
            "ratio": statistics.fmean(own) / statistics.fmean(base_times),
            "median": statistics.median(own),
            "95th percentile": ordered[int(_SLOWEST * (len(own) - 1))],
            "passes": 1e3 * statistics.fmean(a for a, _ in stages[name]),
            "step()": 1e3 * statistics.fmean(b for _, b in stages[name]),
        }
    if contest.profiled in trainers:
        yield {"contest": title, "contestant": contest.profiled} | looked_into(
            trainers[contest.profiled]
        )
    # Last, as it lets K-FAC only precondition from then on.
    of_base = trainers[base]
    operations, plain = of_base.operations(), preconditioning(of_base)
    for name, trainer in trainers.items():
        least = floor(operations, preconditioning(trainer), plain)
        yield {"contest": title, "contestant": name, "floor": least}


def begun(contest: Contest, make: Maker, device: str) -> tuple[Trainer, dict[str, Any]]:
    """A trainer after its first three steps: the first one's seconds, and the memory's peak."""
    before = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    trainer = Trainer(contest.task, device, make, contest.intervals)
    start = time.perf_counter()
    trainer.run(1)
    synchronize(device)
    first = time.perf_counter() - start
    trainer.run(2)
    found: dict[str, Any] = {"first step, s": first}
    if device == "cuda":
        found["peak GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, KFACMixin):
            usage = optimizer.preconditioner.memory_usage()
            found["K-FAC's own, GiB"] = usage["total"] / 2**30
    return trainer, found


def looked_into(trainer: Trainer) -> dict[str, Any]:
    """Host time, device time, kernels, and steps that only precondition."""
    device = trainer.device
    start = time.perf_counter()
    run = trainer.run(_PROFILED)
    elapsed = time.perf_counter() - start
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as found:
        trainer.run(_PROFILED)
        synchronize(device)
    events = found.key_averages()
    on_device = (e for e in events if e.device_type.name == "CUDA")
    # Steps, which the profiler marks on the device, are no kernels.
    kernels = [e for e in on_device if e.self_device_time_total > 0 and "#" not in e.key]
    hosts = sorted(
        (e for e in events if e.device_type.name == "CPU"), key=lambda e: -e.self_cpu_time_total
    )
    kernels.sort(key=lambda e: -e.self_device_time_total)
    launches = sum(e.count for e in events if "LaunchKernel" in e.key)
    syncs = {e.key: e.count for e in events if "Synchronize" in e.key}
    kfac_ = trainer.optimizers[0].preconditioner
    intervals = kfac_.factor_update_steps, kfac_.inv_update_steps
    quiet = trainer.quiet(_PROFILED)
    kfac_.factor_update_steps, kfac_.inv_update_steps = intervals[0], NEVER
    gathering = trainer.run(_PROFILED)
    kfac_.inv_update_steps = intervals[1]
    return {
        "ms a step": 1e3 * elapsed / _PROFILED,
        "step() of all": 1e3 * statistics.fmean(b for _, b in run),
        "step() that gathers, no refresh": 1e3 * statistics.fmean(b for _, b in gathering),
        "passes that gather": 1e3 * statistics.fmean(a for a, _ in gathering),
        "step() that preconditions alone": 1e3 * statistics.median(b for _, b in quiet),
        "passes alone": 1e3 * statistics.median(a for a, _ in quiet),
        "device ms a step": sum(e.self_device_time_total for e in kernels) / 1e3 / _PROFILED,
        "launches a step": launches / _PROFILED,
        "synchronizations": syncs,
        "on the host": [
            f"{e.self_cpu_time_total / 1e3 / _PROFILED:8.2f} ms {e.count / _PROFILED:6.1f} × "
            f"{e.key[:60]}"
            for e in hosts[:10]
        ],
        "kernels": [
            f"{e.self_device_time_total / 1e3 / _PROFILED:8.2f} ms {e.count / _PROFILED:6.1f} × "
            f"{e.key[:90]}"
            for e in kernels[:10]
        ],
    }
