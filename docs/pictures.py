"""The pictures of docs: plots of the kept numbers, and drawings of how things fit together.

`python -m docs.tables` draws them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import traffic
from benchmarks.convergence.rates import best
from benchmarks.nanogpt import STEPS as ALL_STEPS
from benchmarks.nanogpt import TARGET
from docs.tables import (
    CONTESTANTS,
    CONTESTS,
    MACHINES,
    NANOGPT,
    PAGES,
    RATED,
    RATES,
    ROOT,
    STEPS,
    best_of_nanogpt,
    curve,
    fullest,
    kept,
    ratio,
    reached,
    widths,
)
from kaisa_optim.options import EARLY
from kaisa_optim.plan.assignment import Hybrid
from kaisa_optim.plan.schedule import Schedule

OURS, OTHERS, PALE = "#3f51b5", "#9e9e9e", "#c5cae9"
PEERS = {"KFACAdam": OURS, "Muon": "#ef6c00", "SOAP": "#2e7d32", "AdamW": OTHERS}
SHADES = "#c5cae9", "#7986cb", "#3f51b5", "#1a237e"  # the wider, the darker
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


def plot_nanogpt(plt: Any) -> None:
    """Draw the loss of nanoGPT's recipe over steps and over seconds, means of seeds."""
    rows = best_of_nanogpt()
    runs = kept(f"{NANOGPT}_runs").values()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for name, colour in PEERS.items():
        rate = rows[name]["lr"]
        same = [x for x in runs if (x["name"], x["lr"], x["steps"]) == (name, rate, ALL_STEPS)]
        curves = [x["curve"] for x in same if "width" not in x]
        points = [[fmean(x) for x in zip(*at, strict=True)] for at in zip(*curves, strict=True)]
        for axis, place in zip(axes, (0, 1), strict=True):
            places, losses = [x[place] for x in points], [x[2] for x in points]
            axis.plot(places, losses, color=colour, label=f"{name}, rate {rate:g}")
    for axis, title in zip(axes, ("steps", "seconds of one thread"), strict=True):
        axis.axhline(TARGET, color="black", linewidth=0.8, linestyle=":")
        axis.set(xlabel=title, ylim=(1.55, 2.2))
    axes[0].set_ylabel("validation loss (lower is better)")
    axes[0].annotate(
        f"{TARGET}, published", (0, TARGET), xytext=(2, 3), fontsize=8, textcoords="offset points"
    )
    axes[0].legend(fontsize=8)
    _save(plt, figure, IMAGES / "nanogpt.png")


def plot_widths(plt: Any) -> None:
    """Draw the last loss of nanoGPT's recipe over the rate, a line for each width."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, (name, lines) in zip(axes, widths().items(), strict=True):
        for (width, losses), colour in zip(lines.items(), SHADES, strict=True):
            axis.plot(list(losses), list(losses.values()), color=colour, label=f"{width} wide")
            axis.plot(best(losses), min(losses.values()), "o", color=colour)
        axis.set(title=name, xscale="log", xlabel="learning rate")
        axis.minorticks_off()
        axis.set_xticks(list(losses), [f"{lr:g}" for lr in losses])
    axes[0].set_ylabel("validation loss at the end (lower is better)")
    axes[1].legend(fontsize=8)
    _save(plt, figure, PAGES / "widths.png")


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
    """Draw how many layers gather and are refreshed in each step of ResNet-50."""
    figure, axis = plt.subplots(figsize=(8, 2.4), layout="constrained")
    schedule = Schedule(traffic.plan("ResNet-50", "opt", 16).layers, True, EARLY)
    steps = range(2 * traffic.REFRESHED + 20)
    work = [schedule.at(step, traffic.GATHERED, traffic.REFRESHED)[:2] for step in steps]
    work[0] = work[0][1], work[0][1]  # layers without an average gather in any step
    axis.bar(steps, [len(due or ()) for due, _ in work], color=PALE, label="gather statistics")
    downwards = [-len(refreshed) for _, refreshed in work]
    axis.bar(steps, downwards, color=OURS, label="roots found again")
    axis.axhline(0, color="black", linewidth=0.5)
    axis.set(xlabel="step", ylabel="layers")
    axis.set_yticks([-50, 0, 50], ["50", "0", "50"])
    figure.legend(fontsize=8, loc="outside upper right", ncols=2)
    _save(plt, figure, IMAGES / "timeline.png")


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_all() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    draws: Sequence[Any] = (
        *(plot_convergence, plot_rates, plot_step_time, plot_bytes, draw_strategies),
        *(plot_nanogpt, plot_widths, plot_memory, plot_timeline),
    )
    for draw in draws:
        draw(plt)
