"""What K-FAC keeps and sends: this package's account beside that of the papers' scheme.

And how long ranks wait for each other's decompositions.

    python -m benchmarks.traffic [--plot FILE.png]

Nothing is trained and no rank is started: bytes follow from the models' shapes. With ``--plot``,
memory is drawn against traffic over ``grad_worker_fraction``, on 16 and on 64 ranks.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.papers_account import Papers
from benchmarks.recipes import command_line
from kaisa_optim.account import Account, Means, Usage
from kaisa_optim.curvature.lengths import AdamLength
from kaisa_optim.curvature.rules import PolarRule
from kaisa_optim.plan.assignment import (
    Hybrid,
    LayerWise,
    Opt,
    Task,
    WorkAssignment,
    assign,
    make_grid,
)
from kaisa_optim.plan.facts import LayerFacts, widest
from kaisa_optim.plan.schedule import Schedule

STRATEGIES: dict[str, WorkAssignment] = {
    "layer-wise": LayerWise(),
    "hybrid 1/4": Hybrid(0.25),
    "hybrid 1/2": Hybrid(0.5),
    "opt": Opt(),
}
GATHERED = 10  # factor_update_steps by default
REFRESHED = 100  # inv_update_steps by default, and usual with the papers' methods
# KFACAdam's defaults. KFACSGD keeps no sum of squares, and sends five numbers with each block.
SIZES = PolarRule(None, AdamLength()).sizes
BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}  # of ResNets by depth
MB = 1e6


def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Task:
    a = inputs + bias
    most = widest(inputs, outputs)
    return Task(name, a, outputs, a > most, outputs > most)


def conv(name: str, inputs: int, outputs: int, kernel: int, bias: bool = False) -> Task:
    return linear(name, inputs * kernel**2, outputs, bias)


def embedding(name: str, entries: int, features: int) -> Task:
    return Task(name, entries, features, True, features > widest(entries, features))


def resnet(depth: int) -> list[Task]:
    """All that K-FAC covers; the base steps the norms' scales and shifts."""
    tasks = [conv("conv1", 3, 64, 7)]
    inputs = 64
    for stage, count in enumerate(BLOCKS[depth], 1):
        width = 32 * 2**stage
        for block in range(count):
            name, outputs = f"layer{stage}.{block}", 4 * width
            shapes = [(inputs, width, 1), (width, width, 3), (width, outputs, 1)]
            tasks += [conv(f"{name}.conv{i}", *shape) for i, shape in enumerate(shapes, 1)]
            if block == 0:
                tasks.append(conv(f"{name}.downsample.0", inputs, outputs, 1))
            inputs = outputs
    return [*tasks, linear("fc", inputs, 1000)]


def resnet50() -> list[Task]:
    return resnet(50)


def bert_large(width: int = 1024, vocabulary: int = 30522) -> list[Task]:
    """For pre-training, with a decoder of its own."""
    sizes = {"word": vocabulary, "position": 512, "token_type": 2}
    tasks = [embedding(f"{name}_embeddings", size, width) for name, size in sizes.items()]
    for i in range(24):
        tasks += [linear(f"{i}.{name}", width, width) for name in ("query", "key", "value", "out")]
        tasks += [linear(f"{i}.wide", width, 4 * width), linear(f"{i}.narrow", 4 * width, width)]
    tasks += [linear("pooler", width, width), linear("next_sentence", width, 2)]
    return [*tasks, linear("transform", width, width), linear("decoder", width, vocabulary)]


def mask_rcnn_heads(classes: int = 91) -> list[Task]:
    """All but the backbone."""
    tasks = [conv(f"fpn.inner.{i}", 256 * 2**i, 256, 1, True) for i in range(4)]
    tasks += [conv(f"fpn.layer.{i}", 256, 256, 3, True) for i in range(4)]
    tasks.append(conv("rpn.conv", 256, 256, 3, True))
    tasks += [conv("rpn.cls", 256, 3, 1, True), conv("rpn.bbox", 256, 12, 1, True)]
    tasks += [linear("box.fc6", 256 * 7 * 7, 1024), linear("box.fc7", 1024, 1024)]
    tasks += [linear("box.cls", 1024, classes), linear("box.bbox", 1024, 4 * classes)]
    tasks += [conv(f"mask.{i}", 256, 256, 3, True) for i in range(4)]
    return [
        *tasks,
        conv("mask.deconv", 256, 256, 2, True),
        conv("mask.logits", 256, classes, 1, True),
    ]


MODELS: dict[str, Callable[[], list[Task]]] = {
    "ResNet-50": resnet50,
    "BERT-Large": bert_large,
    "Mask R-CNN heads": mask_rcnn_heads,
}


def parameters(tasks: Sequence[Task]) -> int:
    return sum(task.blocks * task.a * task.g for task in tasks)


def account(tasks: Sequence[Task], strategy: WorkAssignment, world: int) -> Account:
    """With KFACAdam's defaults, in float32."""
    grid = make_grid(strategy, world)
    placements = assign(strategy, tasks, grid)
    facts = [LayerFacts(task, placements[task.name]) for task in tasks]
    return Account(facts, grid, SIZES)


@functools.cache
def plan(model: str, strategy: str, world: int) -> Account:
    return account(MODELS[model](), STRATEGIES[strategy], world)


def mean(ranks: Sequence[Means] | Sequence[Usage], kind: str = "total") -> float:
    return statistics.fmean(one[kind] for one in ranks)


def largest(ranks: Sequence[Means] | Sequence[Usage]) -> float:
    return max(one["total"] for one in ranks)


@functools.cache
def schemes(
    model: str, strategy: str, world: int, every: int, refreshed: int
) -> dict[str, list[Means]]:
    """What arrives at each rank in a step: ours, ours with bfloat16 on the wire, the papers'."""
    ours = plan(model, strategy, world)
    schedule = Schedule(ours.layers, True)
    halved = replace(ours, sizes=SIZES._replace(wire=2))
    return {
        "ours": ours.per_step(schedule, every, refreshed),
        "bf16": halved.per_step(schedule, every, refreshed),
        "papers": Papers(ours).per_step(every, refreshed),
        "packed": Papers(ours, packed=True).per_step(every, refreshed),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    align = [":--" if i == 0 else "--:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, align, *rows])


def mb(size: float) -> str:
    size /= MB
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}" if size else "0"


def traffic_in_full(model: str, world: int, every: int, refreshed: int) -> str:
    head = [
        "assignment, MB", "factors", "second order", "gradients", "status", "**total**",
        "busiest rank", "bf16", "KAISA: factors", "**total**", "busiest rank", "packed",
        "ours / KAISA", "ours / packed",
    ]  # fmt: skip
    rows = []
    for name in STRATEGIES:
        found = schemes(model, name, world, every, refreshed)
        ours, papers = found["ours"], found["papers"]
        row = [mean(ours, kind) for kind in ("factors", "second_order", "gradients", "status")]
        row += [mean(ours), largest(ours), mean(found["bf16"])]
        row += [mean(papers, "factors"), mean(papers), largest(papers), mean(found["packed"])]
        ratios = [f"{mean(ours) / mean(found[other]):.2f}" for other in ("papers", "packed")]
        rows.append([name, *map(mb, row), *ratios])
    return table(head, rows)


def traffic_in_short(world: int) -> str:
    head = ["model, assignment, MB", "ours", "bf16", "KAISA", "packed", "ours / KAISA"]
    rows = []
    for model in MODELS:
        for name in STRATEGIES:
            found = schemes(model, name, world, GATHERED, REFRESHED)
            sizes = [mean(ranks) for ranks in found.values()]
            rows.append([f"{model}, {name}", *map(mb, sizes), f"{sizes[0] / sizes[2]:.2f}"])
    return table(head, rows)


def memory(world: int) -> str:
    head = ["model, assignment, MB", "fullest", "mean", "KAISA: fullest", "mean", "ours / KAISA"]
    rows = []
    for model in MODELS:
        for name in STRATEGIES:
            found = plan(model, name, world)
            ours, papers = found.memory(), Papers(found).memory()
            sizes = [largest(ours), mean(ours), largest(papers), mean(papers)]
            ratio = f"{largest(ours) / largest(papers):.2f}"
            rows.append([f"{model}, {name}", *map(mb, sizes), ratio])
    return table(head, rows)


def pending() -> str:
    """Sums that wait for their reduction; the same on every rank, whatever the assignment."""
    head = ["model, MB", "factors every 1, or not staggered", "every 10", "every 100"]
    rows = []
    for model in MODELS:
        found = plan(model, "layer-wise", 64)
        schedule = Schedule(found.layers, True)
        slots = [schedule.gathering_slots(n).values() for n in (1, 10, 100)]
        most = [max(map(found.pending, names)) for names in slots]
        rows.append([model, *map(mb, most)])
    return table(head, rows)


class Waiting(NamedTuple):
    """Decompositions in shares: 1 is all of them, spread evenly and done at one time."""

    whole: float  # what the busiest rank decomposes in each step of an interval, added up
    longest: float  # in one step
    arriving: int  # bytes of the second order at one rank, in the step in which they are the most


def operations(found: Account, names: Collection[str]) -> list[int]:
    """Return each rank's work where these layers are decomposed anew: cubes of widths."""
    got = [0] * found.grid.world
    for layer in found.layers:
        for factor in layer.factors if layer.name in names else ():
            got[factor.owner] += factor.operations
    return got


def waiting(model: str, strategy: str, world: int, staggered: bool) -> Waiting:
    found = plan(model, strategy, world)
    slots = Schedule(found.layers, staggered).refresh_slots(GATHERED, REFRESHED).values()
    busiest = [max(operations(found, names)) for names in slots]
    fair = sum(operations(found, found.names)) / world
    arriving = max(max(found.state(names)) for names in slots)
    return Waiting(sum(busiest) / fair, max(busiest) / fair, arriving)


def waits(worlds: Sequence[int]) -> str:
    kinds = "in all", "in one step", "MB"
    head = ["model, ranks, assignment"]
    head += [f"`staggered={name}`: {kind}" for name in (True, False) for kind in kinds]
    rows = []
    for model in MODELS:
        for world in worlds:
            for name in ("layer-wise", "opt"):
                found = [waiting(model, name, world, flag) for flag in (True, False)]
                cells = [(f"{x.whole:.2f}", f"{x.longest:.2f}", mb(x.arriving)) for x in found]
                rows.append([f"{model}, {world}, {name}", *itertools.chain(*cells)])
    return table(head, rows)


def report(world: int = 64, fewer: int = 16) -> Iterator[str]:
    yield f"### Traffic on {world} ranks"
    for model, make in MODELS.items():
        count = parameters(make())
        reduced = mb(2 * 4 * count * (world - 1) / world)
        yield (
            f"**{model}**, factors every {GATHERED}, refresh every {REFRESHED}; for reference, "
            f"the all-reduce of its {count / MB:.1f} M covered gradients: {reduced} MB."
        )
        yield traffic_in_full(model, world, GATHERED, REFRESHED)
    yield f"### Traffic on {fewer} ranks"
    yield traffic_in_short(fewer)
    for ranks in (world, fewer):
        yield f"### Memory on {ranks} ranks"
        yield memory(ranks)
    yield "### Sums that wait for their reduction, at most"
    yield pending()
    yield "### Ranks that wait for decompositions"
    yield waits((fewer, world))


def fractions(model: str, world: int) -> list[tuple[float, float, float]]:
    """Return fraction, fullest rank's bytes and mean bytes per rank and step."""
    found = []
    workers = 1
    while workers <= world:
        ours = account(MODELS[model](), Hybrid(workers / world), world)
        steps = ours.per_step(Schedule(ours.layers, True), GATHERED, REFRESHED)
        found.append((workers / world, largest(ours.memory()), mean(steps)))
        workers *= 2
    return found


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for panel, model in zip(panels, ("ResNet-50", "BERT-Large"), strict=True):
        for world, color, offset in ((16, "tab:blue", (-24, -14)), (64, "tab:red", (6, 4))):
            points = fractions(model, world)
            memory, traffic = ([p[i] / MB for p in points] for i in (1, 2))
            panel.plot(traffic, memory, "o-", color=color, label=f"{world} ranks")
            for place, text in ((0, f"1/{world}"), (-1, "1")):
                at = traffic[place], memory[place]
                panel.annotate(text, at, offset, textcoords="offset points", color=color)
        panel.set(title=model, xlabel="MB that a rank receives per step")
        panel.set(xlim=(0, 1.15 * panel.get_xlim()[1]), ylim=(0, 1.1 * panel.get_ylim()[1]))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("MB of K-FAC state, fullest rank")
    panels[0].legend(title="grad_worker_fraction\nfrom 1/ranks to 1", loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def as_csv() -> str:
    """Return all tables as lines of table, row, column and value."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["table", "row", "column", "value"])
    heading = part = ""
    for text in report():
        if text.startswith("### "):
            heading, part = text.removeprefix("### "), ""
        elif not text.startswith("|"):
            part = f", {text.partition(';')[0].replace('**', '')}"
        else:
            head, _, *rows = (line.strip("| ").split(" | ") for line in text.splitlines())
            for row in rows:
                for column, value in zip(head[1:], row[1:], strict=True):
                    name = column.replace("*", "").replace("`", "")
                    writer.writerow([heading + part, row[0], name, value.replace(",", "")])
    return file.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("traffic", __doc__)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw memory against traffic")
    options = parser.parse_args(arguments)
    if options.plot is None:
        print("\n\n".join(report()))
    else:
        plot(options.plot)
        print(f"plot: {options.plot}")


if __name__ == "__main__":
    main()
