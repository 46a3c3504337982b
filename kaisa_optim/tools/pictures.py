"""Pictures of plans and of simulated steps, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from .planner import Plan
from .prices import STAGES
from .simulation import WAIT, Simulation

_NEAR = 0.04  # share of the largest memory, within which points have one name

_LINES = 16  # ranks of a timeline
_COLORS = (
    *("#c5cae9", "#7986cb", "#3f51b5", "#ef6c00", "#2e7d32", "#f9a825", "#6a1b9a", "#c62828"),
    *("#455a64", "#eeeeee"),
)


def draw_plan(planned: Plan, path: Path) -> None:
    """Draw memory against traffic, a point a strategy; the best is marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    priced, best, budget = planned.priced, planned.best, planned.budget
    traffic = [fmean(point.received) / 1e6 for point in priced]
    memory = [point.needs / 1e9 for point in priced]
    axes.plot(traffic, memory, "o-", color="#9e9e9e", zorder=1)
    named: list[float] = []
    for point, x, y in zip(priced, traffic, memory, strict=True):
        is_free = all(abs(y - other) > _NEAR * max(memory) for other in named)
        if is_free or point is best:  # other names would lie upon each other
            name = point.candidate.title.partition(" =")[0]
            axes.annotate(name, (x, y), (6, 4), textcoords="offset points", fontsize=8)
            named.append(y)
        if point is best:
            axes.plot([x], [y], "o", color="#3f51b5", markersize=10, label="best", zorder=2)
    if budget is not None and budget / 1e9 < 1.5 * max(memory):
        axes.axhline(budget / 1e9, color="#c62828", linestyle="--", label="budget")
    axes.set(xlabel="MB that a rank receives a step", ylabel="GB on the fullest rank")
    axes.set(title=f"{planned.optimizer} on {planned.world} ranks", ylim=(0, None))
    axes.margins(x=0.15, y=0.15)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()  # something is named: where nothing is best, the budget is
    figure.savefig(path, dpi=120)


def draw_timeline(simulated: Simulation, path: Path) -> None:
    """Draw what the first ranks do, from a refresh to the next but one."""
    from matplotlib.figure import Figure

    lines = min(_LINES, simulated.grid.world)
    figure = Figure(figsize=(10, 1.5 + 0.22 * lines), layout="constrained")
    axes = figure.subplots()
    for stage, color in zip((*STAGES, WAIT), _COLORS, strict=True):
        events = [x for x in simulated.events if x.stage == stage and x.rank < lines and x.step < 2]
        if not events:
            continue
        starts, lengths = [1e3 * x.start for x in events], [1e3 * x.seconds for x in events]
        ranks = [x.rank for x in events]
        axes.barh(ranks, lengths, 0.8, starts, color=color, label=stage)
    axes.set(
        xlabel="ms", ylabel="rank", title=f"The first two steps of {simulated.grid.world} ranks"
    )
    axes.invert_yaxis()
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=8)
    figure.savefig(path, dpi=110)
