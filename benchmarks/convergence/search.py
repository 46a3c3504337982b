"""One training run, and the search for each optimizer's best settings."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.recipes import Runs
from kaisa_optim.optimizer import KFACMixin

from .contestants import Config, Contestant
from .tasks import Step, Task

WARMUP = 0.05  # of the steps; then a cosine to nothing, for all alike
TRIALS = 12
# Parts of the horizon that trials get, and of a rung's trials, how many go on to the next.
RUNGS = ((0.25, 1 / 3), (0.5, 1 / 2), (1.0, 0.0))
# A schedule of fewer steps prefers learning rates that are too high for a longer one.
FEWEST = 25
# Times the loss of the beginning. Less may pass: while batch normalization's running statistics lag
# behind, a loss of almost two hundred times the first one does.
HOPELESS = 10_000
# Seeds that settings are judged on, none of a final's. Settings that do well on one alone are often
# too bold: the first rung asks the first seed, all others ask both, and the worse one decides.
JUDGES: tuple[int, ...] = (0, 1000)


@dataclass
class Run:
    """What came of one run."""

    config: Config
    seed: int
    steps: int
    loss: float  # at the end; inf where it was broken off, having diverged
    seconds: float  # of training, without measurements; on CPUs of CPU time
    curve: list[tuple[int, float, float, float | None]]  # step, seconds, loss, score


class Training:
    """A network from a seed's weights, on its way through a schedule that ends at ``steps``."""

    def __init__(
        self,
        task: Task,
        data: tuple[Any, ...],
        one: Contestant,
        config: Config,
        seed: int,
        steps: int,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(seed)
        self.task, self.device = task, device
        self.model = task.network().to(device)
        self.batches = task.batches(data[0], torch.Generator().manual_seed(1000 + seed))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the base optimizer updates these")
            self.optimizers = one.build(self.model, config, task.kfac)
        self.schedules = [
            LambdaLR(o, lambda step: share_of_rate(step, steps)) for o in self.optimizers
        ]

    def step(self) -> None:
        backward(self.task, self.model, self.optimizers, next(self.batches), self.device)
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self.schedules:
            schedule.step()


def train(
    task: Task,
    data: tuple[Any, ...],
    one: Contestant,
    config: Config,
    seed: int,
    steps: int,
    device: str = "cpu",
) -> Run:
    """Train from a seed's weights on its batches, with a schedule that ends at ``steps``."""
    training = Training(task, data, one, config, seed, steps, device)
    model = training.model
    curve = [(0, 0.0, *task.measure(model, data, device))]
    seconds, start = 0.0, now(device)
    for step in range(1, steps + 1):
        training.step()
        if step % task.every == 0 or step == steps:
            seconds += now(device) - start
            curve.append((step, seconds, *task.measure(model, data, device)))
            if not curve[-1][2] < HOPELESS * curve[0][2]:
                return Run(config, seed, steps, math.inf, seconds, curve)
            start = now(device)
    return Run(config, seed, steps, curve[-1][2], seconds, curve)


def backward(
    task: Task, model: nn.Module, optimizers: Sequence[Optimizer], step: Step, device: str = "cpu"
) -> None:
    """Gradients of the loss that averages over all terms of a step's micro-batches."""
    terms = [task.weight(y) for _, y in step]
    for optimizer in optimizers if task.terms is not None else ():
        if isinstance(optimizer, KFACMixin):
            kfac = optimizer.preconditioner
            if kfac.options.compute_method != "polar":  # which has no use for it
                kfac.loss_terms = sum(terms)
    for optimizer in optimizers:
        optimizer.zero_grad()
    for (x, y), n in zip(step, terms, strict=True):
        loss = task.loss(model(x.to(device)), y.to(device))
        (loss * (n / sum(terms))).backward()


def now(device: str) -> float:
    """Seconds; on CPUs those that this process computes, whatever else the machine does."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def share_of_rate(step: int, steps: int, warm: float = WARMUP) -> float:
    """Return the share of the peak rate: up in a line, then down along a cosine."""
    first = max(1, round(warm * steps))
    if step < first:
        return (step + 1) / first
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - first) / max(1, steps - first))))


class Store(Runs):
    """A task's runs on one device."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        super().__init__(path)
        self.device = device

    def run(self, task: Task, data: Any, one: Contestant, config: Config, seed: int, n: int) -> Run:
        # Seconds of other devices and threads are no measure of these.
        where = self.device, torch.get_num_threads()
        key = [task.name, task.about, one.name, config, seed, n, *where]
        how = task, data, one, config, seed, n, self.device
        return Run(**self.get(key, lambda: vars(train(*how))))

    @property
    def seconds(self) -> float:
        return sum(run["seconds"] for run in self.done.values())


def search(task: Task, data: Any, one: Contestant, store: Store, trials: int = TRIALS) -> Config:
    """Successive halving: all trials run a little, the better ones longer; the best settings.

    One that diverges in a later rung makes room for the next best of the rung before.
    """
    ranked = one.draw(task.name, trials, task.ends, task.pace)
    count, judges = trials, JUDGES[:1]
    for part, kept in RUNGS:
        steps = max(1, round(part * task.steps))
        if steps < FEWEST and part < 1:
            continue
        tried: list[tuple[float, Config]] = []
        for config in ranked:
            runs = (store.run(task, data, one, config, seed, steps) for seed in judges)
            tried.append((_worst(runs), config))
            if sum(loss < math.inf for loss, _ in tried) == count:
                break
        tried.sort(key=lambda pair: pair[0])
        # None is tried again that diverged, unless all have.
        ranked = [config for loss, config in tried if loss < math.inf] or [tried[0][1]]
        print(
            f"  {one.name}: {len(tried)} × {steps} steps, best {tried[0][0]:.5g} {ranked[0]}",
            flush=True,
        )
        count, judges = max(1, round(kept * count)), JUDGES
        if count == 1:
            break
    return ranked[0]


def _worst(runs: Iterable[Run]) -> float:
    """The highest loss; no further run is made after one that diverged."""
    worst = -math.inf
    for run in runs:
        worst = max(worst, run.loss)
        if worst == math.inf:
            break
    return worst


def shortest(
    task: Task,
    data: Any,
    one: Contestant,
    config: Config,
    seeds: tuple[int, ...],
    target: float,
    store: Store,
    parts: tuple[float, ...],
) -> tuple[float, list[Run]]:
    """The shortest horizon, of some, whose runs' median loss ends at the target or below.

    Of parts from the longest to the shortest, found by halving: a longer horizon is taken to end
    no higher. No run is made that cannot move the median to the other side.
    """

    def run(part: float, seed: int) -> Run:
        return store.run(task, data, one, config, seed, max(1, round(part * task.steps)))

    def reaches(part: float) -> bool:
        needed, left = len(seeds) // 2 + 1, len(seeds)
        for seed in seeds:
            needed, left = needed - (run(part, seed).loss <= target), left - 1
            if not 0 < needed <= left:
                break
        return needed <= 0

    if not reaches(parts[0]):
        return math.inf, [run(1.0, seed) for seed in seeds]
    found, missed = 0, len(parts)
    while missed - found > 1:
        middle = (found + missed) // 2
        if reaches(parts[middle]):
            found = middle
        else:
            missed = middle
    return parts[found], [run(parts[found], seed) for seed in seeds]
