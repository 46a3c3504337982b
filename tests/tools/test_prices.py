"""Prices: profiles, times against sums by hand, strategies, simulated ranks, and pictures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct

import pytest

from kaisa_optim import Grid, Hybrid, LayerWise, Opt, Placement, Task
from kaisa_optim.account import Account
from kaisa_optim.plan.assignment import assign, make_grid
from kaisa_optim.plan.facts import LayerFacts, Sizes, TensorSpec, Work
from kaisa_optim.tools import hardware, plan
from kaisa_optim.tools.choice import Case, Momentum, candidates, price
from kaisa_optim.tools.hardware import OPERATIONS, PROFILES, Times
from kaisa_optim.tools.pictures import draw_plan, draw_timeline
from kaisa_optim.tools.prices import Clock, Passes
from kaisa_optim.tools.simulation import Stage, columns, everyone, rows, run, simulate
from tests.support.cluster import network

NAMES = sorted(path.stem for path in PROFILES.glob("*.toml"))
ROWS = [[100, 1.0, 0.5], [1000, 100.0, 50.0]]
PLAIN = {
    **{"title": "A device", "device": "cpu", "memory_gb": 16, "ranks_per_node": 2},
    **{"tflops": 0.5, "memory_gb_per_s": 10.0, "host_us": 100},
    **{"host_layer_us": 10, "margin": 0.25},
    "sources": ["a measurement", 'a "quoted" one'],
    "links": {
        "inside": {"gb_per_s": 10, "latency_us": 5, "each_us": 1},
        "between": {"gb_per_s": 1, "latency_us": 50},
    },
    "times_ms": dict.fromkeys(OPERATIONS, ROWS),
}


def test_times_between_and_beyond_the_sizes_that_were_measured():
    times = Times.of(ROWS)
    assert times.seconds(100) == 1e-3
    assert times.seconds(10) == 1e-3  # a call takes its time
    assert times.seconds(10**2.5) == pytest.approx(1e-2)
    assert times.seconds(2000) == pytest.approx(8 * 0.1)
    assert times.seconds(1000, 3) == pytest.approx(0.2)
    assert times.seconds(1000, 0) == 0


def test_bytes_take_the_slower_link_to_other_nodes_and_a_ring_crosses_it_once():
    found = hardware.parse("x", PLAIN)
    assert found.transfer(10**9, 1, 1) == found.transfer(0, 4, 2) == 0
    assert found.transfer(10**9, 2, 2, calls=0) == pytest.approx(0.1)
    # Of three others, one is on the node.
    assert found.transfer(3 * 10**9, 4, 2, calls=0) == pytest.approx(0.1 + 2)
    calls = found.transfer(3 * 10**9, 4, 2, calls=2) - 2.1
    assert calls == pytest.approx(2 * (50e-6 + 1e-6))
    assert found.ring(10**9, 1) == 0
    assert found.ring(10**9, 2) == pytest.approx(5e-6 + 0.1)
    assert found.ring(10**9, 8) == pytest.approx(50e-6 + 0.5)  # two ranks' shares of the line


@pytest.mark.parametrize("name", NAMES)
def test_profiles_of_the_package_say_their_sources(name):
    found = hardware.load(name)
    assert found.name == name and found.sources and 0 < found.margin < 1
    for kind in OPERATIONS:
        times = found.times.get(kind, found.times["products"])
        assert list(times.sides) == sorted(times.sides)
        assert list(times.first) == sorted(times.first), kind
        assert all(x > 0 for x in times.further)
    assert found.between.bandwidth <= found.inside.bandwidth


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"margin": 0}, "margin must be a number above 0"),
        ({"host_us": "many"}, "'many' in the profile 'mine'; host_us must be"),
        ({"title": None}, "lacks 'title'"),
        ({"times_ms": {"products": ROWS}}, "lacks 'roots'"),
        ({"links": {"inside": {}}}, "lacks 'gb_per_s'"),
        (None, "mine.toml is no TOML file"),
    ],
)
def test_a_profile_with_a_fault_is_refused_by_name(tmp_path, change, said):
    values = {name: x for name, x in (PLAIN | (change or {})).items() if x is not None}
    path = tmp_path / "mine.toml"
    path.write_text("title = " if change is None else hardware.text(values))
    with pytest.raises(ValueError, match=f"Invalid device: .*{said}"):
        hardware.load(path)


def test_profiles_by_torchs_names_of_devices():
    names = {"Tesla V100-SXM2-16GB": "v100", "NVIDIA A100-SXM4-40GB": "a100", "NVIDIA B200": "h100"}
    assert {title: hardware.named_for("cuda", title) for title in names} == names
    assert hardware.named_for("cpu") == "cpu"


HARDWARE = hardware.parse("x", PLAIN)
SIZES = Sizes((TensorSpec("root", "roots"),), packed=True)
POLAR = Work("roots", 2, lambda shorter: 3)
TASKS = [Task(f"{i}", 200, 300) for i in range(8)]


def clock(strategy, world, tasks=TASKS, work=POLAR, passes=None):
    grid = make_grid(strategy, world)
    places = assign(strategy, tasks, grid)
    layers = [LayerFacts(task, places[task.name]) for task in tasks]
    account = Account(layers, grid, SIZES)
    parameters = sum(4 * layer.gradient for layer in layers)
    return Clock(account, HARDWARE, work, passes or Passes(), parameters)


def test_products_of_a_stack_by_hand():
    layer = LayerFacts(Task("x", 200, 300), Placement(0, 0))
    made = clock(LayerWise(), 1, [layer.task])
    product = HARDWARE.times["products"].seconds
    a, g = (200 * 200 * 300) ** (1 / 3), (300 * 200 * 300) ** (1 / 3)
    polar = 3 * (2 * product(a) + product(200))  # the shorter side is A's
    host = HARDWARE.host + HARDWARE.host_layer
    moved = host + 12 * 4 * 200 * 300 / HARDWARE.memory_bandwidth
    found = made.precondition([layer])
    assert found == pytest.approx(2 * (product(a) + product(g)) + polar + moved)
    inverse = clock(LayerWise(), 1, [layer.task], Work("inverses", 1))
    assert inverse.precondition([layer]) == pytest.approx(product(a) + product(g) + moved)
    diagonal = layer._replace(task=layer.task._replace(diagonal_a=True))
    assert inverse.precondition([diagonal]) == pytest.approx(product(g) + moved)


LAYERS = [LayerFacts(Task(f"{i}", 200 + 10 * i, 300), Placement(0, 0)) for i in range(6)]
CASE = Case(
    *(LAYERS, SIZES, POLAR, (10, 20), True),
    **{"weights": 10**6, "gradients": 10**6, "base": 500},
    momenta=[Momentum((x.name,), 4 * x.gradient) for x in LAYERS],
    passes=Passes(1e9, {layer.name: 500 for layer in LAYERS}),
)


def test_candidates_are_all_divisors():
    assert [one.strategy for one in candidates(1)] == [LayerWise()]
    assert [one.strategy for one in candidates(7)] == [LayerWise(), Opt()]
    fractions = [Hybrid(n / 12) for n in (2, 3, 4, 6)]
    assert [one.strategy for one in candidates(12)] == [LayerWise(), *fractions, Opt()]


def test_a_momentum_of_two_layers_is_kept_wherever_one_of_them_is():
    shared = Momentum(tuple(x.name for x in LAYERS), 1000)
    case = dataclasses.replace(CASE, momenta=[shared])
    assert price(case, candidates(4)[0], 4, HARDWARE).momenta == [1000] * 4


def test_ranks_wait_for_the_last_of_their_group():
    grid = Grid(4, 2)
    assert columns(grid) == [range(0, 4, 2), range(1, 4, 2)]
    assert rows(grid) == [range(2), range(2, 4)]
    stages = [
        Stage("decompose", [1.0, 0.0, 3.0, 0.0]),
        Stage("share", [0.5] * 4, columns),
        Stage("hand out", [0.25] * 4, rows),
        Stage("average gradients", [0.0] * 4, everyone),
    ]
    found = run(grid, [stages, stages], shown=2)
    # Rank 0 waits for rank 2 of its column, and rank 1 for rank 0 of its row.
    assert found.steps == [3.75, 3.75]
    events = [one[:1] + one[2:] for one in found.events if one.step == 0]
    assert events == [
        *((0, "decompose", 0.0, 1.0), (0, "wait", 1.0, 2.0)),
        *((0, "share", 3.0, 0.5), (1, "share", 0.0, 0.5)),
        *((1, "wait", 0.5, 3.0), (0, "hand out", 3.5, 0.25), (1, "hand out", 3.5, 0.25)),
    ]
    assert found.mean == 3.75
    assert sum(found.busy.values()) == pytest.approx(3.75)
    assert found.busy["wait"] == pytest.approx((2 + 0 + 3 + 3) / 4)


@pytest.mark.parametrize("world", [1, 4, 8])
def test_a_simulated_interval_takes_at_most_what_the_plan_says(world):
    """A plan adds up each stage's slowest rank; ranks that are slow in turns overlap."""
    for candidate in candidates(world):
        found = simulate(CASE, candidate, world, HARDWARE)
        planned = price(CASE, candidate, world, HARDWARE).step
        assert 0.8 * planned < found.mean <= planned * (1 + 1e-9)
        assert len(found.steps) == CASE.intervals[1]
        assert ("hand out" in found.busy) == (found.grid.columns > 1)
        assert ("share" in found.busy) == (found.grid.workers > 1)


def test_a_trace_has_a_line_for_each_rank_without_overlaps():
    found = simulate(CASE, candidates(4)[1], 4, HARDWARE, shown=3)
    events = json.loads(found.trace())["traceEvents"]
    assert {one["tid"] for one in events} == {0, 1, 2}
    for rank in range(3):
        own = sorted((one["ts"], one["dur"]) for one in events if one["tid"] == rank)
        for (start, length), (later, _) in itertools.pairwise(own):
            assert start + length <= later * (1 + 1e-9)
        assert sum(own[-1]) == pytest.approx(1e6 * sum(found.steps), rel=1e-6)


def spy(monkeypatch, name, note):
    """Note each call of a method of axes, which still draws."""
    Axes = pytest.importorskip("matplotlib.axes").Axes
    real = getattr(Axes, name)

    def spied(self, *args, **kwargs):
        note(*args, **kwargs)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Axes, name, spied)


@pytest.mark.parametrize("budget", ["1GB", 20_000, 5_000])
def test_memory_against_traffic(tmp_path, monkeypatch, budget):
    lines, titles = [], []
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
    bars = {}

    def note(ranks, lengths, height, starts, *, label, **_):
        bars[label] = [*zip(ranks, starts, lengths, strict=True)]

    spy(monkeypatch, "barh", note)
    found = simulate(CASE, candidates(world)[0], world, HARDWARE)
    path = tmp_path / "steps.png"
    draw_timeline(found, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    expected = {}
    for one in found.events:
        if one.step < 2:
            bar = one.rank, 1e3 * one.start, 1e3 * one.seconds
            expected.setdefault(one.stage, []).append(bar)
    assert bars == expected
    assert ("hand out" in bars) == (world > 1)
