"""Whole steps of large networks: base optimizers, ours and peers in turns, and where time goes."""

from __future__ import annotations

import re
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.networks import Transformer
from benchmarks.step_time.contestants import (
    NEVER,
    PEERS,
    TURN,
    Maker,
    Trainer,
    is_installed,
    ours,
    sgd,
)
from benchmarks.step_time.steps import applying
from benchmarks.step_time.tasks import LONG, OFTEN, SHORT, TASKS, Task, shown
from kaisa_optim import KFACLAMB, LAMB, KFACAdam, KFACMuon
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


# ---- makers ----


def plain(kind: Any, **options: Any) -> Maker:
    def make(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
        return [kind(model.parameters(), **options)]

    return make


def kfac(kind: Any, **options: Any) -> Maker:
    def make(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
        intervals: dict[str, Any] = {"factor_update_steps": every, "inv_update_steps": 1}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the base optimizer updates these")
            optimizer = kind(model, **intervals, **task.options, **options)
        # No early refreshes, as if training had begun long ago.
        optimizer.preconditioner.inv_update_steps = refreshed
        return [optimizer]

    return make


def _hidden(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Matrices inside of the network, which Muon takes, and the rest."""
    named = list(model.named_parameters())
    inside = [p for n, p in named if p.dim() == 2 and not n.startswith(("head", "words", "places"))]
    known = set(inside)
    return inside, [p for _, p in named if p not in known]


def kfac_muon(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
    inside, rest = _hidden(model)
    groups = [{"params": inside}, {"params": rest, "use_muon": False, "lr": 1e-3}]
    own = kfac(lambda model, **options: KFACMuon(groups, model=model, lr=0.02, **options))
    return own(model, task, every, refreshed)


# ---- contests ----


# What an eigendecomposition takes on a GPU, Cholesky's inverse takes in a tenth and less.
LEAN: dict[str, Any] = {"compute_method": "inverse", "inv_dtype": torch.bfloat16}


def resnet50(settings: Settings) -> Iterator[dict[str, Any]]:
    task = (SHORT if settings.rehearse else TASKS)["resnet50"]
    scaled = replace(task, title=f"{task.title}, float16", half=torch.float16)
    some = {
        "SGD": sgd,
        "KFACSGD": ours(),
        "KFACSGD, inverse": ours(compute_method="inverse"),
        "KFACSGD, inverse, bfloat16": ours(**LEAN),
    }
    few = {name: make for name, make in some.items() if name != "KFACSGD"}
    lean = "KFACSGD, inverse, bfloat16"
    yield from compete(Contest(task, some | peers("SOAP"), LONG, 40, lean), settings)
    yield from compete(Contest(task, few | peers("kfac-pytorch"), OFTEN, 20), settings)
    if settings.device == "cuda":  # CPUs have no loss scaling to try
        yield from compete(Contest(scaled, few, LONG, 30), settings)


def bert_large(settings: Settings) -> Iterator[dict[str, Any]]:
    task = (SHORT if settings.rehearse else TASKS)["bert-large"]
    lean = LEAN | {"lr": 1e-3}
    some = {
        "LAMB": plain(LAMB, lr=1e-3),
        "KFACLAMB": kfac(KFACLAMB, lr=1e-3),
        "KFACLAMB, inverse, bfloat16": kfac(KFACLAMB, **lean),
        "KFACLAMB, inverse, bfloat16, a quarter": kfac(KFACLAMB, **lean, statistics_fraction=0.25),
    }
    contest = Contest(task, some, LONG, 10, "KFACLAMB, inverse, bfloat16")
    yield from compete(contest, settings)


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
    some = {"AdamW": plain(torch.optim.AdamW, lr=1e-3)}
    some |= peers("Muon")
    some |= {"KFACAdam": kfac(KFACAdam, lr=1e-3)}
    some["KFACAdam, inverse, bfloat16"] = kfac(KFACAdam, lr=1e-3, **LEAN)
    some["KFACMuon"] = kfac_muon
    yield from compete(Contest(task, some | peers("SOAP"), LONG, 30, "KFACMuon"), settings)


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
    operations = next(iter(trainers.values())).operations()
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
            "floor": floor(trainers[name], operations),
        }
    if contest.profiled in trainers:
        yield {"contest": title, "contestant": contest.profiled} | looked_into(
            trainers[contest.profiled]
        )


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


def floor(trainer: Trainer, operations: int) -> float | None:
    """The step over the base's, were preconditioning's operations as fast as the passes'."""
    (first, *_) = trainer.optimizers
    if not isinstance(first, KFACMixin) or isinstance(first, KFACMuon):
        return None
    inverse = first.preconditioner.options.compute_method == "inverse"
    return 1 + applying(first.preconditioner.layers.values(), inverse) / operations


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
