"""What K-FAC adds to a step, against the number of layers and against their width.

Networks of equal square layers, all sizes in turns within one run, factors every step and a refresh
every ten. A straight line through the logarithms of size and milliseconds gives the exponent: 1 is
linear growth. Small layers cost calls, not operations, so the last doubling is reported as well.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure as Drawing
from torch import Tensor, nn

from .contestants import BASES, Trainer, ours, race
from .report import Figure, Report, Settings
from .tasks import OFTEN, Task

DEPTHS, DEPTHS_WIDTH = (12, 24, 48, 96), 128
WIDTHS, WIDTHS_DEPTH = (64, 128, 256, 512, 1024), 4
ROWS = 1024  # no fewer than a layer is wide, so that no factor is singular
# Exponents, at most. Measured growth that is linear scatters about 1.
WANTED = {"layers": 1.1, "width": 3.0}


class Equal(nn.Module):
    """Layers of one width, each added to what it saw."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / len(self.layers)
        return x


class Cost(NamedTuple):
    """Milliseconds of a step."""

    base: float
    part: float  # that K-FAC adds


def run(settings: Settings) -> Report:
    print(f"K-FAC part against size, {settings.device}", flush=True)
    shapes = sizes(settings.short)
    costs = measure(
        {(count, width) for each in shapes.values() for count, width in each.values()}, settings
    )
    found = {
        axis: {size: costs[shape] for size, shape in each.items()} for axis, each in shapes.items()
    }
    figures = []
    for axis, of in found.items():
        for size, cost in of.items():
            print(f"{axis:8} {size:5} SGD {cost.base:9.1f} ms, K-FAC adds {cost.part:9.1f} ms")
        whole, last = exponents(of)
        figures.append(
            Figure(f"K-FAC part grows as {axis} to the power of", whole, "", WANTED[axis])
        )
        figures.append(
            Figure(f"its last doubling as {axis} to the power of", last, "", WANTED[axis])
        )
    print()
    results = {
        axis: {
            "exponents": exponents(of),
            "ms": {size: cost._asdict() for size, cost in of.items()},
        }
        for axis, of in found.items()
    }
    return Report(results, figures, functools.partial(plot, found))


def sizes(short: bool) -> dict[str, dict[int, tuple[int, int]]]:
    """Layers and width of each network, by what grows and its size."""
    if short:
        return {
            "layers": {n: (n, 16) for n in (4, 8)},
            "width": {n: (2, n) for n in (16, 32)},
        }
    return {
        "layers": {n: (n, DEPTHS_WIDTH) for n in DEPTHS},
        "width": {n: (WIDTHS_DEPTH, n) for n in WIDTHS},
    }


def measure(shapes: set[tuple[int, int]], settings: Settings) -> dict[tuple[int, int], Cost]:
    intervals = OFTEN
    makers = {"SGD": BASES["SGD"], "KFACSGD": ours()}
    trainers = {
        (shape, name): Trainer(_task(*shape), settings.device, make, intervals)
        for shape in sorted(shapes)
        for name, make in makers.items()
    }
    rounds = race(trainers, intervals[1], settings.rounds(intervals[1]))

    def cost(shape: tuple[int, int]) -> Cost:
        base, kfac = (
            [1e3 * statistics.fmean(map(sum, round_[shape, name])) for round_ in rounds]
            for name in makers
        )
        parts = [b - a for a, b in zip(base, kfac, strict=True)]
        return Cost(statistics.median(base), statistics.median(parts))

    return {shape: cost(shape) for shape in shapes}


def _task(count: int, width: int) -> Task:
    return Task(
        f"{count} layers of {width}",
        lambda: Equal(count, width),
        lambda: (torch.randn(ROWS, width), torch.randint(width, (ROWS,))),
        {},
    )


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The power p of the least squares fit cost = c·sizeᵖ, in logarithms.

    Not a number where a cost is lost in the noise, zero or below.
    """
    if min(costs) <= 0:
        return math.nan
    x, y = ([math.log(value) for value in values] for values in (sizes, costs))
    return statistics.linear_regression(x, y).slope


def exponents(of: Mapping[int, Cost]) -> tuple[float, float]:
    """Over all sizes, and from the last but one to the last."""
    numbers, parts = list(of), [cost.part for cost in of.values()]
    return exponent(numbers, parts), exponent(numbers[-2:], parts[-2:])


def plot(found: Mapping[str, Mapping[int, Cost]], path: Path) -> None:
    figure = Drawing(figsize=(10, 4.5), layout="tight")
    for axes, (axis, of) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        numbers = list(of)
        lines = {
            "SGD's step": [c.base for c in of.values()],
            "K-FAC adds": [c.part for c in of.values()],
        }
        for label, costs in lines.items():
            slope = exponent(numbers, costs)
            axes.loglog(numbers, costs, "o-", label=f"{label}: {axis}^{slope:.2f}")
        axes.set_xticks(numbers, map(str, numbers), minor=False)
        axes.minorticks_off()
        axes.set_xlabel(axis)
        axes.set_ylabel("ms a step")
        axes.legend()
    figure.savefig(path, dpi=120)
