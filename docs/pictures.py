"""The pictures of docs: plots of the kept numbers, and drawings of how things fit together.

`python -m docs.tables` draws them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import traffic
from benchmarks.convergence.rates import best
from docs.tables import (
    CONTESTANTS,
    CONTESTS,
    GAINS,
    MACHINES,
    PAGES,
    RATED,
    RATES,
    ROOT,
    STEPS,
    curve,
    fullest,
    ratio,
    reached,
)
from kaisa_optim.plan.assignment import Hybrid
from kaisa_optim.plan.schedule import Schedule

OURS, OTHERS, PALE = "#3f51b5", "#9e9e9e", "#c5cae9"
IMAGES = ROOT / "docs/images"


def plot_convergence(plt: Any) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 5.2), sharey=True, layout="constrained")
    names, colours = ["KFACAdam", "SOAP", "Muon"], [OURS, "#bdbdbd", "#757575"]
    for axis, which, title in zip(axes, (0, 1), ("steps", "seconds"), strict=True):
        for k, (name, colour) in enumerate(zip(names, colours, strict=True)):
            found = [reached(contest, CONTESTANTS[name]) for contest in CONTESTS]
            places = [i + 0.25 * (k - 1) for i, x in enumerate(found) if x]
            axis.barh(places, [x[which] for x in found if x], 0.23, color=colour, label=name)
        axis.axvline(1, color="black", linewidth=1)
        axis.set_xlabel(f"{title} to the baseline's loss; the baseline takes 1")
    labels = [f"{contest.title}\n{contest.baseline}" for contest in CONTESTS]
    axes[0].set_yticks(range(len(CONTESTS)), labels, fontsize=8)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    _save(plt, figure, PAGES / "convergence.png")


def plot_rates(plt: Any) -> None:
    """Draw the last loss over the learning rate; a dot marks the best one."""
    for file, panels in RATES.items():
        lines = 1 + (len(panels) > 4)
        columns = -(-len(panels) // lines)
        size = 2.75 * columns, 2.5 * lines
        figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained")
        for axis, (base, ours, task) in zip(axes.flat, panels, strict=True):
            for name, colour, style in ((base, OTHERS, "--"), (ours, OURS, "-")):
                found = {lr: loss for lr, loss in curve(task, name).items() if loss < math.inf}
                axis.plot(list(found), list(found.values()), style, color=colour, label=name)
                axis.plot(best(found), min(found.values()), "o", color=colour)
            axis.set(xscale="log", yscale="log")
            axis.set_title(RATED[task], fontsize=9)
            axis.legend(fontsize=7)
            axis.minorticks_off()
            low, high = axis.get_ylim()
            axis.set_yticks([low, high], [f"{low:.2g}", f"{high:.2g}"])
        figure.supxlabel("learning rate", fontsize=9)
        figure.supylabel("loss at the end", fontsize=9)
        _save(plt, figure, IMAGES / f"{file}.png")


def plot_step_time(plt: Any) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    colours = [OURS, PALE, OTHERS]
    for axis, network in zip(axes, ("resnet32", "transformer"), strict=True):
        for k, (label, colour) in enumerate(zip(STEPS, colours, strict=True)):
            name = STEPS[label]
            found = [ratio(network, machine, "10/100", name) or 0 for machine in MACHINES]
            places = [i + 0.17 * (k - 1) for i in range(len(found))]
            axis.bar(places, found, 0.15, color=colour, label=label)
        axis.axhline(1, color="black", linewidth=1)
        axis.set_xticks(range(len(MACHINES)), MACHINES)
        axis.set_ylabel("time of a step; SGD's is 1")
        axis.set_title({"resnet32": "ResNet-32"}.get(network, network))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    _save(plt, figure, PAGES / "step_time.png")


def plot_bytes(plt: Any) -> None:
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for kind, scheme, colour in ((0, "ours", OURS), (1, "papers", OTHERS)):
        points = []
        for name in traffic.STRATEGIES:
            found = traffic.schemes("BERT-Large", name, 64, traffic.GATHERED, traffic.REFRESHED)[
                scheme
            ]
            keeps = fullest("BERT-Large", name)[kind]
            points.append((traffic.mean(found) / 1e9, keeps / 1e9))
        label = "kaisa_optim" if kind == 0 else "the papers' scheme"
        axis.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
        for name, point in zip(traffic.STRATEGIES, points, strict=True):
            axis.annotate(name, point, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axis.set_xlim(0, 2.8)
    axis.set_ylim(0, 9.5)
    axis.set_xlabel("GB that arrive at a rank in a step")
    axis.set_ylabel("GB of K-FAC's state on the fullest rank")
    axis.legend()
    _save(plt, figure, PAGES / "memory_traffic.png")


def draw_strategies(plt: Any) -> None:
    """Draw which of four ranks does what for each of four layers."""
    kinds = {"owner and worker": OURS, "worker": "#9fa8da", "receiver": "#eeeeee"}
    # The workers of each layer; the first one owns its factors.
    chosen: dict[str, list[tuple[int, ...]]] = {
        "layer_wise": [(0,), (1,), (2,), (3,)],
        "hybrid": [(0, 2), (1, 3), (2, 0), (3, 1)],
        "opt": [(0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 1, 3), (3, 0, 1, 2)],
    }
    for name, layers in chosen.items():
        figure, axis = plt.subplots(figsize=(6.4, 2.4), layout="constrained")
        for row, workers in enumerate(layers):
            for rank in range(4):
                kind = "worker" if rank in workers else "receiver"
                kind = "owner and worker" if rank == workers[0] else kind
                box = plt.Rectangle((rank, row), 0.94, 0.88, facecolor=kinds[kind])
                axis.add_patch(box)
                colour = "white" if kind == "owner and worker" else "black"
                spot = rank + 0.47, row + 0.44
                axis.text(*spot, kind, ha="center", va="center", fontsize=8, color=colour)
        axis.set_xlim(0, 4)
        axis.set_ylim(4, 0)
        axis.set_xticks([i + 0.47 for i in range(4)], [f"rank {i}" for i in range(4)])
        axis.set_yticks([i + 0.44 for i in range(4)], [f"layer {i}" for i in range(4)])
        axis.xaxis.tick_top()
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_visible(False)
        _save(plt, figure, ROOT / f"docs/guides/{name}.png")


def plot_gains(plt: Any) -> None:
    """Draw losses as shares of the base's: at the base's rate, and at the best rate."""
    figure, axis = plt.subplots(figsize=(7, 2.9), layout="constrained")
    labels = []
    for row, (task, base_name, kfac) in enumerate(GAINS):
        base, ours = curve(task, base_name), curve(task, kfac)
        rate = best(base)
        axis.barh(row - 0.17, ours[rate] / base[rate], 0.3, color=OURS)
        axis.barh(row + 0.17, ours[best(ours)] / base[rate], 0.3, color=PALE)
        labels.append(f"{RATED[task]}\n{kfac} for {base_name}")
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(GAINS)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(
        "last loss over the base's at its best rate (dark: at that rate; light: at ours)"
    )
    _save(plt, figure, IMAGES / "gains.png")


def plot_memory(plt: Any) -> None:
    """Draw weights, Adam's state and K-FAC's on the fullest rank, by model and ranks."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, model in zip(axes, ("ResNet-50", "BERT-Large"), strict=True):
        weights = 4 * traffic.parameters(traffic.MODELS[model]()) / 1e9
        rows = [("AdamW", 2 * weights, 0.0)]
        for world, workers in ((1, 1), (8, 8), (8, 1), (64, 64), (64, 1)):
            kept = traffic.account(traffic.MODELS[model](), Hybrid(workers / world), world).memory()
            share = "1" if workers == world else f"1/{world}"
            title = f"{world} rank{'s' * (world > 1)}" + f", {share}" * (world > 1)
            rows.append((title, workers / world * weights, traffic.largest(kept) / 1e9))
        for row, (_, base, ours) in enumerate(rows):
            left = 0.0
            for size, colour in ((weights, OTHERS), (base, PALE), (ours, OURS)):
                axis.barh(row, size, 0.7, left=left, color=colour)
                left += size
        axis.set_yticks(range(len(rows)), [title for title, *_ in rows], fontsize=8)
        axis.invert_yaxis()
        axis.set(title=model, xlabel="GB: weights, the base's state (pale), K-FAC's (blue)")
    _save(plt, figure, IMAGES / "memory.png")


def plot_timeline(plt: Any) -> None:
    """Draw how many layers gather and are refreshed in each step of ResNet-50, on 16 ranks."""
    figure, axis = plt.subplots(figsize=(8, 2.4), layout="constrained")
    layers = traffic.plan("ResNet-50", "opt", 16).layers
    schedule = Schedule(layers, True)
    gathering = schedule.gathering_slots(traffic.GATHERED)
    refreshed = schedule.refresh_slots(traffic.GATHERED, traffic.REFRESHED)
    steps = range(2 * traffic.REFRESHED)
    for slots, interval, sign, colour in (
        (gathering, traffic.GATHERED, 1, PALE),
        (refreshed, traffic.REFRESHED, -1, OURS),
    ):
        axis.bar(
            steps, [sign * len(slots.get(step % interval, ())) for step in steps], color=colour
        )
    axis.axhline(0, color="black", linewidth=0.5)
    axis.set(xlabel="step", ylabel="layers")
    axis.set_title(
        "up: layers that gather statistics; down: layers whose roots are renewed", fontsize=9
    )
    _save(plt, figure, IMAGES / "timeline.png")


def draw_choice(plt: Any) -> None:
    """Draw the questions that lead to an optimizer and to its assignment."""
    figure, axis = _canvas(plt, 9, 3.4)
    question, answer = "#eeeeee", PALE
    _box(axis, 0.0, 4, 2.4, "Which optimizer\ntrains your network now?", question)
    answers = [
        ("SGD", "KFACSGD"),
        ("Adam", "KFACAdam"),
        ("AdamW", "with_kfac(AdamW)"),
        ("LAMB", "KFACLAMB"),
        ("Muon", "KFACAdam"),
        ("another", "with_kfac(Base)"),
    ]
    for row, (base, ours) in enumerate(answers):
        _box(axis, 3.2, 6.5 - row, 1.0, base, question, 0.6)
        _box(axis, 4.6, 6.5 - row, 2.0, ours, answer, 0.6)
        _arrow(axis, (2.4, 4.4), (3.2, 6.8 - row))
        _arrow(axis, (4.2, 6.8 - row), (4.6, 6.8 - row))
    _box(axis, 7.2, 4, 2.3, "On how many hosts\nare your ranks?", question)
    _arrow(axis, (6.6, 4.4), (7.2, 4.4))
    last = [
        "one host: the default,\nlayer-wise",
        "hosts of R ranks:\ngrad_worker_fraction=1/R",
        "weights in shards:\nfully_shard",
    ]
    for row, text in enumerate(last):
        _box(axis, 10.0, 5.9 - 1.7 * row, 2.3, text, answer, 1.0)
        _arrow(axis, (9.5, 4.4), (10.0, 6.4 - 1.7 * row))
    axis.set(xlim=(-0.1, 12.4), ylim=(1, 7.4))
    _save(plt, figure, IMAGES / "choice.png")


def draw_step(plt: Any) -> None:
    """Draw a step's way through the package."""
    figure, axis = _canvas(plt, 9, 2.6)
    boxes = [
        ("gather", "capture/hooks.py\nlayers/", "passes"),
        ("report, agree", "exchange.py\nagree.py", "step()"),
        ("plan", "plan/schedule.py\nplan/facts.py", "step()"),
        ("average, refresh", "curvature/averages.py\ncurvature/refresh.py", "step()"),
        ("directions", "compiled.py\ncurvature/rules.py", "step()"),
        ("lengths, base", "curvature/lengths.py\nbases.py", "step()"),
    ]
    for place, (title, modules, when) in enumerate(boxes):
        left = 2.2 * place
        colour = PALE if when == "step()" else "#eeeeee"
        _box(axis, left, 1, 1.9, f"{title}\n\n{modules}", colour, 1.6)
        axis.text(left + 0.95, 0.7, when, ha="center", fontsize=8)
        if place:
            _arrow(axis, (left - 0.3, 1.8), (left, 1.8))
    axis.set(xlim=(-0.1, 13.1), ylim=(0.5, 2.8))
    _save(plt, figure, IMAGES / "step.png")


def _canvas(plt: Any, width: float, height: float) -> tuple[Any, Any]:
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    axis.axis("off")
    return figure, axis


def _box(
    axis: Any, left: float, low: float, width: float, text: str, colour: str, height: float = 0.9
) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch(
        (left, low), width, height, "round,pad=0,rounding_size=0.1", fc=colour, ec="none"
    )
    axis.add_patch(shape)
    axis.text(left + width / 2, low + height / 2, text, ha="center", va="center", fontsize=8)


def _arrow(axis: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axis.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": OTHERS, "lw": 0.8})


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_all() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    draws: Sequence[Any] = (
        *(plot_convergence, plot_rates, plot_step_time, plot_bytes, draw_strategies),
        *(plot_gains, plot_memory, plot_timeline, draw_choice, draw_step),
    )
    for draw in draws:
        draw(plt)
