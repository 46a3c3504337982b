"""Whole steps of large networks: base optimizers, ours and peers in turns, and where time goes."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.networks import Transformer
from benchmarks.step_time.contestants import (
    BASES,
    LONG_AGO,
    NEVER,
    PAPERS,
    PEERS,
    TORCH_MUON,
    TURN,
    Maker,
    Trainer,
    in_turns,
    is_installed,
    ours,
)
from benchmarks.step_time.steps import floor, preconditioning
from benchmarks.step_time.tasks import DEFAULT, OFTEN, SHORT, TASKS, Task, shown
from kaisa_optim.optimizer import KFACMixin

from .parts import Settings

_PROFILED = 10  # steps
_BEGUN = 3  # steps of each before the turns


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


def resnet50(settings: Settings) -> list[Contest]:
    task = (SHORT if settings.rehearse else TASKS)["resnet50"]
    scaled = replace(task, title=f"{task.title}, float16", half=torch.float16)
    some = {"SGD": BASES["SGD"], "KFACSGD": ours(), "Muon": BASES["Muon"]}
    halves = {"KFACSGD, bfloat16": ours(**HALF)}
    papers = halves | {"KFACSGD, inverse, bfloat16": ours(**INVERSE, **HALF)}
    contests = [
        Contest(task, some | papers | peers("SOAP"), DEFAULT, 40, "KFACSGD"),
        Contest(task, some | papers | peers(PAPERS), OFTEN, 20),
    ]
    if settings.device == "cuda":  # CPUs have no loss scaling to try
        contests.append(Contest(scaled, some | papers, DEFAULT, 30))
    return contests


def bert_large(settings: Settings) -> list[Contest]:
    task = (SHORT if settings.rehearse else TASKS)["bert-large"]
    some = {
        "AdamW": BASES["AdamW"],
        "Muon": BASES["Muon"],
        "KFACAdam": ours("AdamW"),
        "KFACAdam, bfloat16, a quarter": ours("AdamW", **HALF, statistics_fraction=0.25),
        "KFACAdam, inverse, bfloat16": ours("AdamW", **INVERSE, **HALF),
    }
    return [Contest(task, some, DEFAULT, 30, "KFACAdam")]


def _gpt2() -> nn.Module:
    return Transformer(50257, 1024, 768, 12, 12, 3072, tied=True)


def _words() -> tuple[Tensor, Tensor]:
    words = torch.randint(50257, (16, 1025))
    return words[:, :-1], words[:, 1:]


def gpt2(settings: Settings) -> list[Contest]:
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
    return [Contest(task, some | peers(TORCH_MUON, "SOAP"), DEFAULT, 40, "KFACAdam")]


def peers(*names: str) -> dict[str, Maker]:
    return {name: PEERS[name] for name in names if is_installed(name)}


# ---- one contest ----


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run(
    contests: Callable[[Settings], list[Contest]], settings: Settings
) -> Iterator[dict[str, Any]]:
    for contest in contests(settings)[: 1 if settings.brief else None]:
        yield from compete(contest, settings)


def mean_step(times: Sequence[float], interval: int) -> tuple[float, float]:
    """Return the mean step of a whole interval of refreshes, and what these add to it in all.

    The times are of whole turns. All slots to refresh lie in the turn that begins an interval; it
    counts once, and the mean of the other turns counts for the rest of the interval.
    """
    turns = range(0, len(times), TURN)
    means = {LONG_AGO - 1 + _BEGUN + i: statistics.fmean(times[i : i + TURN]) for i in turns}
    refreshing = [mean for number, mean in means.items() if number % interval == 0]
    others = [mean for number, mean in means.items() if number % interval]
    if interval <= TURN or not (refreshing and others):
        return statistics.fmean(times), 0.0
    usual = statistics.fmean(others)
    added = TURN * (statistics.fmean(refreshing) - usual)
    return usual + added / interval, added


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
    stages = in_turns(trainers, 4 if settings.rehearse and not settings.brief else contest.steps)
    of_base = 0.0
    for name, pairs in stages.items():
        times = [1e3 * sum(pair) for pair in pairs]
        mean, added = mean_step(times, contest.intervals[1])
        of_base = of_base or mean
        yield {
            "contest": title,
            "contestant": name,
            "ms": mean,
            "ratio": mean / of_base,
            "median": statistics.median(times),
            "slowest": max(times),
            "all refreshes of an interval": added,
            "passes": mean_step([1e3 * a for a, _ in pairs], contest.intervals[1])[0],
            "step()": mean_step([1e3 * b for _, b in pairs], contest.intervals[1])[0],
        }
    if contest.profiled in trainers and not settings.brief:
        yield {"contest": title, "contestant": contest.profiled} | looked_into(
            trainers[contest.profiled]
        )
    # Last, as it lets K-FAC only precondition from then on.
    operations, plain = trainers[base].operations(), preconditioning(trainers[base])
    for name, trainer in trainers.items():
        least = floor(operations, preconditioning(trainer), plain)
        yield {"contest": title, "contestant": name, "floor": least}


def begun(contest: Contest, make: Maker, device: str) -> tuple[Trainer, dict[str, Any]]:
    """A trainer after its first steps: the first one's seconds, and the memory's peak."""
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
    trainer.run(_BEGUN - 1)
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
