"""Pictures hold what the plan says."""

from __future__ import annotations

import struct

import pytest

from kaisa_optim.tools import plan
from kaisa_optim.tools.pictures import draw_plan
from tests.support.cluster import network

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
    names = [one.candidate.title.partition(" =")[0] for one in found.choice.priced]
    assert set(titles) <= set(names) and titles[0] == names[0]
    assert found.best is None or found.best.candidate.title.partition(" =")[0] in titles
    needs = [one.needs / 1e9 for one in found.choice.priced]
    best = [] if found.best is None else [[found.best.needs / 1e9]]
    assert lines == [needs, *best]
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert (width, height) == (720, 480)
