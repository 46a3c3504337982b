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
from tests.tools.test_simulation import CASE

pytest.importorskip("matplotlib")


def spy(monkeypatch, name, note):
    """Note each call of a method of axes, which still draws."""
    from matplotlib.axes import Axes

    real = getattr(Axes, name)

    def spied(self, *args, **kwargs):
        note(*args, **kwargs)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Axes, name, spied)


@pytest.mark.parametrize("budget", ["1GB", 20_000, 5_000])
def test_memory_against_traffic(tmp_path, monkeypatch, budget):
    lines: list[list[float]] = []
    titles: list[str] = []
    spy(monkeypatch, "plot", lambda x, y, *_, **__: lines.append([*y]))
    spy(monkeypatch, "annotate", lambda text, *_, **__: titles.append(text))
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


@pytest.mark.parametrize("world", [1, 4])
def test_a_timeline_has_a_bar_for_each_event(tmp_path, monkeypatch, world):
    bars: dict[str, list[tuple[int, float, float]]] = {}

    def note(ranks, lengths, height, starts, *, label, **_):
        bars[label] = [*zip(ranks, starts, lengths, strict=True)]

    spy(monkeypatch, "barh", note)
    found = simulate(CASE, candidates(world)[0], world, HARDWARE)
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
