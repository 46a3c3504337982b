"""CPU time of a refresh of BERT-Base's factors, beside torch.linalg.eigh on each factor.

One thread; bases follow their factors (``basis_tolerance``). The optimizer has the Linear layers of
some of the 12 equal blocks, and refreshes all of them in one step. Between two refreshes running
averages take in ten updates of 2,048 rows with decay 0.95, as in training: a basis of the last
refresh says much about the next, but not all.

Rows are made, not gathered: a quarter of their directions are loadings that many coordinates share,
with a spectrum that decays, above noise of its own size for each coordinate; the loadings wander a
little with every update.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure as Drawing
from torch import Tensor, nn

from kaisa_optim import KFACSGD

from .contestants import NEVER, TOLERANCE
from .report import Figure, Report, Settings

BLOCKS = 12
WIDTH, SHORT_WIDTH = 768, 48
ROWS, DECAY, UPDATES = 2048, 0.95, 10
BURN_IN = 20  # updates before the first refresh
WANDER = 0.03  # how much of the loadings is new in each update
REFRESHES = 2  # that are timed, after the first two
WANTED = 1 / 3


class Rows:
    """Rows with a covariance of low rank above a decaying diagonal; it moves slowly."""

    def __init__(self, size: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        rank = max(1, size // 4)
        self.scale = torch.arange(1, rank + 1) ** -0.5
        places = torch.randperm(size, generator=self.generator)
        self.noise = 0.3 * (places + 1.0) ** -0.25
        self.loadings: Tensor = self._normal(rank, size)

    def draw(self, count: int) -> Tensor:
        rank, size = self.loadings.shape
        fresh = self._normal(rank, size)
        self.loadings = (1 - WANDER**2) ** 0.5 * self.loadings + WANDER * fresh
        shared = (self._normal(count, rank) * self.scale) @ self.loadings
        return shared + self.noise * self._normal(count, size)

    def _normal(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator)


class Average:
    """A decayed mean of such rows' second moments."""

    def __init__(self, size: int, seed: int, rows: int) -> None:
        self.rows, self.count = Rows(size, seed), rows
        self.value = torch.zeros(size, size)
        self.weight = 0.0

    def update(self) -> None:
        rows = self.rows.draw(self.count)
        self.weight = DECAY * self.weight + 1 - DECAY
        self.value.lerp_(rows.T @ rows / self.count, (1 - DECAY) / self.weight)


def blocks_layers(blocks: int, width: int) -> list[nn.Linear]:
    """A block's query, key, value, output, and feed-forward layers."""
    shapes = [*[(width, width)] * 4, (width, 4 * width), (4 * width, width)]
    return [nn.Linear(*shape) for _ in range(blocks) for shape in shapes]


class Result(NamedTuple):
    """CPU seconds of all blocks that were measured."""

    ours: float
    eigh: float
    left: float  # off-diagonal part of QᵀFQ over F's norm, the worst factor's
    anew: float  # share of the factors that were decomposed


def run(settings: Settings) -> Report:
    blocks, width = (1, SHORT_WIDTH) if settings.short else (settings.blocks, WIDTH)
    shown = f"{blocks} of {BLOCKS} equal blocks, width {width}"
    print(f"CPU time of one refresh, {shown}", flush=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = measure(blocks, width, rows=256 if settings.short else ROWS)
    finally:
        torch.set_num_threads(threads)
    ratio = result.ours / result.eigh
    print(
        f"the package {result.ours:.2f} s, eigh on each factor {result.eigh:.2f} s; decomposed: "
        f"{result.anew:.0%} of the factors; off-diagonal part that the bases leave, worst factor: "
        f"{result.left:.1e}\n"
    )
    name = "BERT-Base" if width == WIDTH else f"a BERT of width {width}"
    figure = Figure(
        f"one refresh of {name}'s factors ({shown})", ratio, " of eigh's CPU time", WANTED
    )
    results = {"blocks": blocks, "width": width, "ratio": ratio, **result._asdict()}
    return Report(results, [figure], functools.partial(plot, result))


def measure(blocks: int, width: int, rows: int) -> Result:
    layers = blocks_layers(blocks, width)
    optimizer = KFACSGD(
        nn.ModuleList(layers),
        lr=1e-3,
        staggered=False,
        factor_decay=DECAY,
        basis_tolerance=TOLERANCE,
        early_refreshes=(),
    )
    kfac = optimizer.preconditioner
    # The first step's statistics are replaced; it only has to see some of every layer.
    for layer in layers:
        layer(torch.randn(8, layer.in_features)).square().sum().backward()
    optimizer.step()
    kfac.factor_update_steps = NEVER
    for layer in layers[1:]:  # preconditioning one small gradient makes a step, too
        layer.weight.grad = layer.bias.grad = None
    averages = [
        [Average(factor.shape[-1], 2 * number + side, rows) for side, factor in enumerate(pair)]
        for number, pair in enumerate(map(kfac.factors, kfac.layers))
    ]

    def train(updates: int) -> None:
        for name, pair in zip(kfac.layers, averages, strict=True):
            for average, factor in zip(pair, kfac.factors(name), strict=True):
                for _ in range(updates):
                    average.update()
                factor.copy_(average.value)

    def refresh() -> tuple[float, int]:
        """All layers at once; a part of the work may come in the steps after.

        With the CPU time, how many factors were decomposed.
        """
        seconds, anew = 0.0, 0
        for interval in (1, NEVER, NEVER):  # three steps: refreshes look at other vectors
            kfac.inv_update_steps = interval
            seconds += cpu_seconds(optimizer.step)
            anew += len(kfac.plan.decompose)
        return seconds, anew

    train(BURN_IN)
    refresh()
    train(UPDATES)
    refresh()  # the first that has a basis of such averages behind it
    found = []
    for _ in range(REFRESHES):
        train(UPDATES)
        found.append(refresh())
    eigh = sum(
        cpu_seconds(functools.partial(torch.linalg.eigh, average.value))
        for pair in averages
        for average in pair
    )
    flat = [average.value for pair in averages for average in pair]
    left = max(map(off_diagonal, flat, bases(optimizer)))
    ours, anew = (statistics.mean(part) for part in zip(*found, strict=True))
    return Result(ours, eigh, left, anew / len(flat))


def bases(optimizer: KFACSGD) -> list[Tensor]:
    """Copies of the eigenvectors of each layer's A and G."""
    entries = [optimizer.state[p] for p in optimizer.preconditioner.registry.parameters]
    return [
        entry[f"kfac_{side}_vectors"][0].clone()
        for entry in entries
        if "kfac_a_vectors" in entry
        for side in "ag"
    ]


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def off_diagonal(factor: Tensor, basis: Tensor) -> float:
    inside = basis.T @ factor @ basis
    return float((inside - inside.diagonal().diag()).norm() / factor.norm())


def plot(result: Result, path: Path) -> None:
    figure = Drawing(figsize=(6, 2.5), layout="tight")
    axes = figure.subplots()
    axes.barh(["eigh on each factor", "the package's refresh"], [result.eigh, result.ours])
    axes.set_xlabel("CPU seconds")
    figure.savefig(path, dpi=120)
