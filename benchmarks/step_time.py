"""What a K-FAC step costs beside the base optimizer's, and beside peers' steps.

    python -m benchmarks.step_time [--short] [--tasks resnet32 transformer] [--threads N]
        [--steps N] [--device cpu|cuda] [--out DIRECTORY]

All contestants of a task train copies of one network on the same batch, in turns of ten steps. A
ratio compares the means of two contestants over the same interval of refreshes; what is printed is
the median over the intervals. Peers are kfac-pytorch (``import kfac``), SOAP from
pytorch-optimizer, and torch's Muon; those that are not installed are named.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kaisa_optim import KFACSGD

from .machine import describe, peak_mb
from .networks import CifarResNet, Transformer

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TURN = 10  # steps of one contestant before the next one's


@dataclass(frozen=True)
class Task:
    """A network, its batch, and the (factor, inverse) intervals to measure."""

    network: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, Tensor]]
    options: dict[str, Any]  # that K-FAC needs for this loss
    intervals: tuple[tuple[int, int], ...] = ((10, 100), (1, 10))


def images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def tokens(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(96, (batch, 128)), torch.randint(96, (batch, 128))


TASKS = {
    "resnet32": Task(CifarResNet, lambda: images(128), {}),
    "transformer": Task(Transformer, lambda: tokens(16), {"loss_terms": "positions"}),
}
SHORT = {
    "resnet32": Task(lambda: CifarResNet(8), lambda: images(16), {}, ((2, 4),)),
    "transformer": Task(
        lambda: Transformer(layers=1), lambda: tokens(2), {"loss_terms": "positions"}, ((2, 4),)
    ),
}


class Trainer:
    """One contestant: a network and what steps it."""

    def __init__(self, task: Task, device: str, make: Maker, intervals: tuple[int, int]) -> None:
        torch.manual_seed(0)
        self.model = task.network().to(device)
        self.inputs, self.labels = (t.to(device) for t in task.inputs())
        self.device = device
        self.optimizers = make(self.model, task, *intervals)

    def run(self, steps: int) -> list[tuple[float, float]]:
        """Seconds of each step: forward and backward, and the optimizer's part."""
        times = []
        for _ in range(steps):
            start = self._now()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            out = self.model(self.inputs)
            F.cross_entropy(out.flatten(0, -2), self.labels.flatten()).backward()
            middle = self._now()
            for optimizer in self.optimizers:
                optimizer.step()
            times.append((middle - start, self._now() - middle))
        return times

    def quiet(self, steps: int) -> list[tuple[float, float]]:
        """Steps of K-FAC that only precondition, with the decompositions as they are."""
        kfac = self.optimizers[0].preconditioner
        kfac.factor_update_steps = kfac.inv_update_steps = 10**9
        return self.run(steps)

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


# What steps a network, one after the other; of ours there is one, with its preconditioner.
Maker = Callable[[nn.Module, Task, int, int], Sequence[Any]]


def sgd(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
    return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]


def ours(**options: Any) -> Maker:
    def make(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the base optimizer updates these")
            optimizer = KFACSGD(
                model,
                lr=0.01,
                momentum=0.9,
                factor_update_steps=every,
                inv_update_steps=refreshed,
                **task.options,
                **options,
            )
        return [optimizer]

    return make


class Preconditioner:
    """The papers' preconditioner, as one of the optimizers."""

    def __init__(self, preconditioner: Any) -> None:
        self.step = preconditioner.step

    def zero_grad(self) -> None:
        pass


def kfac_pytorch(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
    """The papers' code, with its defaults; it covers Linear and Conv2d."""
    from kfac.preconditioner import KFACPreconditioner

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    preconditioner = KFACPreconditioner(
        model, factor_update_steps=every, inv_update_steps=refreshed, lr=0.01
    )
    return [Preconditioner(preconditioner), optimizer]


def soap(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
    """Its factors are updated in every step, its bases in every tenth, as its authors do."""
    from pytorch_optimizer import SOAP

    return [SOAP(model.parameters(), lr=1e-3, precondition_frequency=10)]


def muon(model: nn.Module, task: Task, every: int, refreshed: int) -> Sequence[Any]:
    """torch's, for matrices inside of the network; AdamW for the rest."""
    hidden = {
        p
        for name, p in model.named_parameters()
        if p.dim() == 2 and not name.startswith(("head", "words", "places"))
    }
    return [
        torch.optim.Muon(list(hidden), lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p not in hidden], lr=1e-3),
    ]


OURS = {"KFACSGD": ours(), "KFACSGD, inverse": ours(compute_method="inverse")}
PEERS = {"kfac-pytorch": kfac_pytorch, "SOAP": soap, "Muon": muon}
NEEDS = {"kfac-pytorch": "kfac", "SOAP": "pytorch_optimizer"}


def contestants(name: str, device: str) -> tuple[dict[str, Maker], list[str]]:
    """Those that can run on this machine, the base first, and the names of the absent."""
    found: dict[str, Maker] = {"SGD": sgd, **OURS}
    absent = []
    for peer, make in PEERS.items():
        try:
            if peer in NEEDS:
                __import__(NEEDS[peer])
            elif not hasattr(torch.optim, "Muon"):
                raise ImportError
        except ImportError:
            absent.append(peer)
            continue
        # Muon takes no convolutions, and bfloat16 products of CPUs are no measure of it.
        if peer != "Muon" or (name == "transformer" and device == "cuda"):
            found[peer] = make
    return found, absent


@dataclass
class Measured:
    """One contestant at one pair of intervals."""

    name: str
    ms: float  # mean step, the median over the intervals
    ratio: float  # to the base
    part: float  # what it adds to the base's step, in ms
    slowest: float  # 95th percentile of the steps that refresh, over steps of equal capture
    stages: dict[str, float] = field(default_factory=dict)
    peak_mb: float | None = None  # above the base's


def measure(
    task: Task, makers: dict[str, Maker], device: str, intervals: tuple[int, int], steps: int
) -> list[Measured]:
    _, refreshed = intervals
    trainers = {name: Trainer(task, device, make, intervals) for name, make in makers.items()}
    for trainer in trainers.values():
        trainer.run(2)  # the first steps gather and refresh everything
    rounds: list[dict[str, list[tuple[float, float]]]] = []
    for _ in range(max(1, steps // refreshed)):
        rounds.append({name: [] for name in trainers})
        for start in range(0, refreshed, TURN):
            for name, trainer in trainers.items():
                rounds[-1][name] += trainer.run(min(TURN, refreshed - start))
    results = []
    for name in trainers:
        own = [round_[name] for round_ in rounds]
        means = [1e3 * statistics.fmean(map(sum, times)) for times in own]
        bases = [1e3 * statistics.fmean(map(sum, round_["SGD"])) for round_ in rounds]
        one = Measured(
            name,
            statistics.median(means),
            statistics.median(m / b for m, b in zip(means, bases, strict=True)),
            statistics.median(m - b for m, b in zip(means, bases, strict=True)),
            0.0,
        )
        if name.startswith("KFACSGD"):
            flat = [times for round_ in own for times in round_]
            one.stages, one.slowest = stages(flat, trainers[name].quiet(TURN))
        results.append(one)
    return results


def stages(
    times: Sequence[tuple[float, float]], quiet: Sequence[tuple[float, float]]
) -> tuple[dict[str, float], float]:
    """Where K-FAC's time goes, in ms a step: beside ``quiet`` steps, which only precondition.

    Also the slowest steps, over the median: as layers take turns, all gather about alike.
    """
    passes, applied = (1e3 * statistics.median(part) for part in zip(*quiet, strict=True))
    all_passes, all_steps = (1e3 * statistics.fmean(part) for part in zip(*times, strict=True))
    whole = sorted(map(sum, times))
    slowest = whole[int(0.95 * (len(whole) - 1))] / statistics.median(whole)
    return {
        "forward and backward": passes,
        "gather factors": all_passes - passes,
        "precondition and step": applied,
        "update and refresh": all_steps - applied,
    }, slowest


# ---- memory ----


def peak(task_name: str, short: bool, contestant: str, intervals: tuple[int, int]) -> float:
    """Peak of a process that trains three steps, in MB; on the CPU, of its whole memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak, (task_name, short, contestant, intervals))


def _peak(task_name: str, short: bool, contestant: str, intervals: tuple[int, int]) -> float:
    torch.set_num_threads(1)
    task = (SHORT if short else TASKS)[task_name]
    makers, _ = contestants(task_name, "cpu")
    Trainer(task, "cpu", makers[contestant], intervals).run(3)
    return peak_mb()


# ---- output ----


def table(results: Sequence[Measured], base: Measured) -> Iterator[str]:
    yield f"{'':20} {'ms/step':>9} {'ratio':>6} {'adds ms':>8} {'slowest':>8} {'peak MB':>8}"
    for one in results:
        added = "" if one is base else f"{one.part:.1f}"
        slowest = f"{one.slowest:.2f}" if one.slowest else ""
        memory = "" if one.peak_mb is None else f"{one.peak_mb:+.0f}"
        yield (f"{one.name:20} {one.ms:9.1f} {one.ratio:6.2f} {added:>8} {slowest:>8} {memory:>8}")


def plot(found: dict[str, list[Measured]], path: Path) -> None:
    """Stages of our steps, one bar for each task, interval and method."""
    bars = [(f"{title}\n{one.name}", one) for title, all_ in found.items() for one in all_]
    bars = [(title, one) for title, one in bars if one.stages]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.6 * len(bars)))
    left = [0.0] * len(bars)
    for stage in (
        "forward and backward",
        "gather factors",
        "update and refresh",
        "precondition and step",
    ):
        widths = [max(0.0, one.stages.get(stage, 0.0)) for _, one in bars]
        axes.barh([title for title, _ in bars], widths, left=left, label=stage)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time", description="Times of K-FAC's steps, in ratios."
    )
    parser.add_argument("--short", action="store_true", help="tiny networks, to try it out")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--steps", type=int, default=30, help="of each contestant; one interval at least"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    where = describe(options.device, options.threads)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    found: dict[str, list[Measured]] = {}
    for name in options.tasks:
        task = (SHORT if options.short else TASKS)[name]
        makers, absent = contestants(name, options.device)
        if absent:
            print(f"not installed, so absent: {', '.join(absent)}")
        for intervals in task.intervals:
            title = f"{name}, factors every {intervals[0]}, refresh every {intervals[1]}"
            print(f"\n{title}", flush=True)
            results = measure(task, makers, options.device, intervals, options.steps)
            if options.device == "cpu":
                peaks = {
                    one.name: peak(name, options.short, one.name, intervals) for one in results
                }
                for one in results[1:]:
                    one.peak_mb = peaks[one.name] - peaks["SGD"]
            print("\n".join(table(results, results[0])), flush=True)
            found[title] = results
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"step_time_{options.device}{'_short' if options.short else ''}"
    record = {"machine": where, "results": {k: [asdict(x) for x in v] for k, v in found.items()}}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    plot(found, stem.with_suffix(".png"))
    print(f"\nsaved as {stem}.json and {stem}.png")


if __name__ == "__main__":
    main()
