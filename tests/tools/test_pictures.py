"""Pictures hold what the plan says."""

from __future__ import annotations

import struct

import pytest

from kaisa_optim.tools import plan
from kaisa_optim.tools.choice import candidates
from kaisa_optim.tools.pictures import draw_plan, draw_timeline
from kaisa_optim.tools.simulation import simulate
from tests.support.cluster import network
from tests.tools.test_prices import HARDWARE
from tests.tools.test_simulation import CASE_WITH_PASSES

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("budget", ["1GB", 20_000, 5_000])
def test_memory_against_traffic(tmp_path, monkeypatch, budget):
    from matplotlib.axes import Axes

    lines: list[list[float]] = []
    titles: list[str] = []
    plot, annotate = Axes.plot, Axes.annotate

    def spy_plot(self, x, y, *args, **kwargs):
        lines.append([*y])
        return plot(self, x, y, *args, **kwargs)

    def spy_annotate(self, text, *args, **kwargs):
        titles.append(text)
        return annotate(self, text, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", spy_plot)
    monkeypatch.setattr(Axes, "annotate", spy_annotate)
    found = plan(network("tokens"), 4, budget)
    path = tmp_path / "plan.png"
    draw_plan(found, path)
    names = [one.candidate.title.partition(" =")[0] for one in found.priced]
    assert set(titles) <= set(names) and titles[0] == names[0]
    assert found.best is None or found.best.candidate.title.partition(" =")[0] in titles
    needs = [one.needs / 1e9 for one in found.priced]
    best = [] if found.best is None else [[found.best.needs / 1e9]]
    assert lines == [needs, *best]
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert (width, height) == (720, 480)


def test_points_that_lie_upon_each_other_have_one_name(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    titles: list[str] = []
    monkeypatch.setattr(Axes, "annotate", lambda axes, text, *args, **kwargs: titles.append(text))
    found = plan(network("tokens"), 8, "1GB")
    one, other, *_ = found.priced
    assert one is found.best and abs(one.needs - other.needs) < 0.01 * one.needs
    draw_plan(found, tmp_path / "plan.png")
    assert titles == ["layer-wise", "4/8", "opt"]  # 2/8 lies upon layer-wise


@pytest.mark.parametrize("world", [1, 4])
def test_a_timeline_has_a_bar_for_each_event(tmp_path, monkeypatch, world):
    from matplotlib.axes import Axes

    bars: dict[str, list[tuple[int, float, float]]] = {}
    barh = Axes.barh

    def spy(self, ranks, lengths, height, starts, *, label, **kwargs):
        bars[label] = [*zip(ranks, starts, lengths, strict=True)]
        return barh(self, ranks, lengths, height, starts, label=label, **kwargs)

    monkeypatch.setattr(Axes, "barh", spy)
    found = simulate(CASE_WITH_PASSES, candidates(world)[0], world, HARDWARE)
    path = tmp_path / "steps.png"
    draw_timeline(found, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    expected: dict[str, list[tuple[int, float, float]]] = {}
    for one in found.events:
        if one.step < 2:
            bar = one.rank, 1e3 * one.start, 1e3 * one.seconds
            expected.setdefault(one.stage, []).append(bar)
    assert bars == expected
    assert ("hand out" in bars) == (world > 1)
