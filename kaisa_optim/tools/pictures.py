"""Pictures of plans, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from .planner import Plan

_NEAR = 0.04  # share of the largest memory, within which points have one name


def draw_plan(found: Plan, path: Path) -> None:
    """Draw memory against traffic, a point a strategy; the best is marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    priced, best, budget = found.choice.priced, found.best, found.choice.budget
    traffic = [fmean(one.received) / 1e6 for one in priced]
    memory = [one.needs / 1e9 for one in priced]
    axes.plot(traffic, memory, "o-", color="#9e9e9e", zorder=1)
    named: list[float] = []
    for one, x, y in zip(priced, traffic, memory, strict=True):
        apart = all(abs(y - other) > _NEAR * max(memory) for other in named)
        if apart or one is best:  # other names would lie upon each other
            name = one.candidate.title.partition(" =")[0]
            axes.annotate(name, (x, y), (6, 4), textcoords="offset points", fontsize=8)
            named.append(y)
        if one is best:
            axes.plot([x], [y], "o", color="#3f51b5", markersize=10, label="best", zorder=2)
    if budget is not None and budget / 1e9 < 1.5 * max(memory):
        axes.axhline(budget / 1e9, color="#c62828", linestyle="--", label="budget")
    axes.set(xlabel="MB that a rank receives a step", ylabel="GB on the fullest rank")
    axes.set(title=f"{found.optimizer} on {found.choice.world} ranks", ylim=(0, None))
    axes.margins(x=0.15, y=0.15)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)
