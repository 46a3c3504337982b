"""The papers' figures beside predictions by the profiles of their machines.

    python -m benchmarks.published

Nothing is measured: times are prices of moves, of the papers' own scheme and of this package's. The
published figures are those of Pauloski et al., SC '20 and SC '21. SGD's step on 64 ranks and its
scaling efficiency are taken from the paper, and everything else is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import traffic
from benchmarks.traffic import BLOCKS, bert_large, table
from kaisa_optim.account import Account
from kaisa_optim.curvature.rules import EigenRule, PolarRule
from kaisa_optim.plan.assignment import LayerWise, Opt, Task, WorkAssignment
from kaisa_optim.plan.facts import Work
from kaisa_optim.plan.schedule import Schedule
from kaisa_optim.tools import hardware
from kaisa_optim.tools.hardware import Hardware
from kaisa_optim.tools.prices import Clock, Passes

GIGAFLOPS = {50: 4.1, 101: 7.8, 152: 11.5}  # multiplications and additions of one image, forward
BATCH = 32  # images of a rank
IMAGES = 1_281_167
EPOCHS, EPOCHS_OF_SGD = 55, 90
MINUTES_OF_SGD = 178  # ResNet-50 on 64 V100
EFFICIENCY_OF_SGD = 0.686  # on 256 ranks: the step's time on 16, over that on 256
STRATEGIES: dict[str, WorkAssignment] = {"layer-wise": LayerWise(), "opt": Opt()}
RANKS = (16, 32, 64, 128, 256)
OFTEN = 500  # steps between refreshes on 64 ranks; as many images on other numbers of ranks


def steps(epochs: int, ranks: int) -> float:
    return epochs * IMAGES / (BATCH * ranks)


def resnet(depth: int) -> tuple[list[Task], dict[str, int]]:
    """Return a ResNet's layers, and the rows of each for one image."""
    tasks = traffic.resnet(depth)
    rows = {"conv1": 112**2, "fc": 1}
    for task in tasks:
        if task.name not in rows:
            stage = int(task.name.removeprefix("layer")[0])
            rows[task.name] = (112 // 2**stage) ** 2
    return tasks, rows


class Stages(NamedTuple):
    """Seconds of the papers' scheme."""

    sgd: float
    average: float  # of the factors, by a ring
    statistics: float
    decompose: float
    share: float  # eigenvectors to gradient workers
    precondition: float
    hand_out: float

    def step(self, gather: int, refresh: int) -> float:
        often = self.sgd + self.precondition + self.hand_out
        gathered = self.statistics + self.average
        return often + gathered / gather + (self.decompose + self.share) / refresh


def seconds_of_sgd(depth: int, ranks: int) -> float:
    """Return the paper's seconds of a step; by operations for other depths than 50.

    Each doubling of the ranks adds the same time, so that SGD scales as published.
    """
    on_64 = 60 * MINUTES_OF_SGD / steps(EPOCHS_OF_SGD, 64)
    grown = 1 / EFFICIENCY_OF_SGD - 1  # from 16 to 256 ranks, four doublings
    by_ranks = (1 + grown * math.log2(ranks / 16) / 4) / (1 + grown / 2)
    return on_64 * by_ranks * GIGAFLOPS[depth] / GIGAFLOPS[50]


def clock_of(account: Account, device: Hardware, work: Work, passes: Passes) -> Clock:
    parameters = sum(4 * layer.gradient for layer in account.layers)
    return Clock(account, device, work, passes, parameters)


def broadcast(device: Hardware, size: float, calls: int, members: int) -> float:
    """Return the seconds of broadcasts, one after the other, each down a binary tree."""
    levels = math.ceil(math.log2(members))
    return levels * (calls * device.between.latency + device.ring(size, members))


def papers(depth: int, strategy: str, world: int) -> Stages:
    """Return the stages of the papers' scheme on V100: whole factors, all refreshed at once."""
    tasks, rows = resnet(depth)
    device = hardware.load("v100")
    account = traffic.account(tasks, STRATEGIES[strategy], world)
    passes = Passes(0.0, {name: BATCH * n for name, n in rows.items()})
    clock = clock_of(account, device, EigenRule.work, passes)
    factors = [f for layer in account.layers for f in layer.factors]
    whole = sum(4 * f.elements for f in factors)
    gradients = sum(4 * layer.gradient for layer in account.layers)
    columns, workers = account.grid.columns, account.grid.workers
    count = len(tasks)
    return Stages(
        seconds_of_sgd(depth, world),
        device.ring(2 * whole, world),
        clock.row_products(account.names),
        max(clock.decompose(account.names).values()),
        broadcast(device, whole, 2 * count, workers),
        max(clock.by_column().values()),
        broadcast(device, gradients, count, columns),
    )


def ours(depth: int, strategy: str, world: int, gather: int, refresh: int) -> float:
    """Return the mean seconds of a step under this package's defaults and moves."""
    tasks, rows = resnet(depth)
    account = traffic.account(tasks, STRATEGIES[strategy], world)
    passes = Passes(0.0, {name: BATCH * n for name, n in rows.items()})
    clock = clock_of(account, hardware.load("v100"), PolarRule.work, passes)
    mean = clock.times(Schedule(account.layers, True), gather, refresh).mean
    mean["average gradients"] = mean["base step"] = 0.0  # they are in SGD's step
    return seconds_of_sgd(depth, world) + sum(mean.values())


def both(depth: int, strategy: str, ranks: int) -> tuple[float, float]:
    """Return the seconds of a step by the papers' scheme and by ours, as often refreshed."""
    every = interval(ranks)
    theirs = papers(depth, strategy, ranks).step(every // 10, every)
    return theirs, ours(depth, strategy, ranks, every // 10, every)


def minutes(seconds: float, epochs: int, ranks: int) -> float:
    return seconds * steps(epochs, ranks) / 60


def interval(ranks: int) -> int:
    return OFTEN * 64 // ranks


def ahead(step: float, sgd: float) -> float:
    """Return by how many per cent the training ends earlier than SGD's."""
    return 100 * (1 - EPOCHS * step / (EPOCHS_OF_SGD * sgd))


class Row(NamedTuple):
    """A published figure, and what is predicted."""

    what: str
    published: float
    predicted: float
    ours: float | None = None

    def cells(self) -> list[str]:
        error = f"{100 * (self.predicted / self.published - 1):+.0f} %"
        if self.what.startswith("%"):
            error = f"{self.predicted - self.published:+.1f} points"
        mine = "" if self.ours is None else f"{self.ours:.3g}"
        return [self.what, f"{self.published:g}", f"{self.predicted:.3g}", error, mine]


def rows() -> Iterator[Row]:
    opt = papers(50, "opt", 64)
    for every, published in ((100, 152), (500, 128), (1000, 124)):
        gather = every // 10
        found = minutes(opt.step(gather, every), EPOCHS, 64)
        mine = minutes(ours(50, "opt", 64, gather, every), EPOCHS, 64)
        yield Row(f"minutes on 64 V100, opt, refresh every {every}", published, found, mine)
    for name, least, most in (("layer-wise", 2.8, 19.1), ("opt", 17.7, 25.2)):
        by_ranks: list[tuple[float, ...]] = []
        for ranks in RANKS:
            sgd = seconds_of_sgd(50, ranks)
            by_ranks.append(tuple(ahead(x, sgd) for x in both(50, name, ranks)))
        for title, value, pick in (("least", least, min), ("most", most, max)):
            theirs, mine = (pick(column) for column in zip(*by_ranks, strict=True))
            what = f"% ahead of SGD, {name}, {title} on 16 to 256 V100"
            yield Row(what, value, theirs, mine)
    for name, value in (("layer-wise", 62.4), ("opt", 71.8)):
        few, many = (both(50, name, ranks) for ranks in (16, 256))
        theirs, mine = (100 * x / y for x, y in zip(few, many, strict=True))
        what = f"% scaling efficiency, {name}, 256 V100 against 16"
        yield Row(what, value, theirs, mine)
    layer_wise = papers(50, "layer-wise", 64)
    ratio = opt.share / layer_wise.hand_out
    yield Row("eigenvectors' broadcast, opt, over gradients', layer-wise", 3.4, ratio)
    yield Row("seconds of BERT-Large's refresh on 16 A100", 25, bert_refresh("a100"))


def bert_refresh(device: str) -> float:
    account = traffic.account(bert_large(), LayerWise(), 16)
    clock = clock_of(account, hardware.load(device), EigenRule.work, Passes())
    return max(clock.decompose(account.names).values())


def by_depth() -> Iterator[list[str]]:
    """Yield milliseconds of steps by depth and ranks: layer-wise, opt, and which is ahead."""
    for depth in BLOCKS:
        for ranks in RANKS:
            pairs = [both(depth, name, ranks) for name in STRATEGIES]
            theirs, own = zip(*pairs, strict=True)
            times = [f"{1e3 * x:.0f}" for x in (seconds_of_sgd(depth, ranks), *theirs, *own)]
            yield [f"ResNet-{depth}, {ranks}", *times]


def report() -> str:
    head = ["figure", "published", "predicted", "error", "this package"]
    first = table(head, [row.cells() for row in rows()])
    head = ["model, V100", "SGD", "papers, layer-wise", "papers, opt", "ours, layer-wise", "opt"]
    return f"{first}\n\nMilliseconds of a step, predicted:\n\n{table(head, [*by_depth()])}"


if __name__ == "__main__":
    print(report())
