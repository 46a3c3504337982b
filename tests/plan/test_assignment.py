"""Which rank works for which layer: valid, balanced, the same on every rank, and checked."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import traffic
from kaisa_optim import Grid, Hybrid, LayerWise, Opt, Placement, Task, WorkAssignment
from kaisa_optim.plan.assignment import assign, balance, choose, loads, make_grid

property_test = settings(max_examples=100)
NEARLY = 1 + 1e-9  # sums of floats in another order


class Two(WorkAssignment):
    """A strategy that a user writes."""

    def gradient_workers(self, world):
        return 2


def divisors(n):
    return [k for k in range(1, n + 1) if n % k == 0]


def named(shapes):
    return [Task(f"layer{i}", a, g) for i, (a, g) in enumerate(shapes)]


def items(strategy, tasks, colocate):
    """What is spread: layers if both factors stay together, else factors."""
    costs = [
        [t.blocks * strategy.cost(t.a, t.diagonal_a), t.blocks * strategy.cost(t.g, t.diagonal_g)]
        for t in tasks
    ]
    return [sum(pair) for pair in costs] if colocate else [*itertools.chain(*costs)]


def simple_bound(costs, ranks):
    return max(math.fsum(costs) / ranks, max(costs))


def pigeonhole_bound(costs, ranks):
    """One rank gets k + 1 of the k·ranks + 1 largest: no less than the k + 1 last of them."""
    ordered = sorted(costs, reverse=True)
    holes = [
        math.fsum(ordered[k * ranks - k : k * ranks + 1])
        for k in range(len(costs))
        if k * ranks < len(costs)
    ]
    return max(simple_bound(costs, ranks), *holes)


def optimum(costs, load):
    """The lowest peak, by trying everything."""
    costs, held, best = sorted(costs, reverse=True), list(load), math.inf

    def go(i):
        nonlocal best
        if i == len(costs):
            best = min(best, max(held))
            return
        for there in set(held):  # ranks of equal load are alike
            if max(there + costs[i], *held) < best:
                rank = held.index(there)
                held[rank] += costs[i]
                go(i + 1)
                held[rank] = there

    go(0)
    return best


def peak_of(costs, load, owners):
    held = list(load)
    for cost, owner in zip(costs, owners, strict=True):
        held[owner] += cost
    return max(held)


MODELS = {"resnet50": traffic.resnet50(), "bert_large": traffic.bert_large()}
WORLDS = [1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 31, 32, 48, 64, 96, 127, 128, 256, 1000, 1024]


@st.composite
def grids(draw, most=24):
    world = draw(st.integers(1, most))
    return Grid(world, draw(st.sampled_from(divisors(world))))


@st.composite
def models(draw, most=30):
    sizes = st.one_of(st.integers(1, 5000), st.sampled_from([1, 64, 65, 576, 1024]))
    blocks = st.sampled_from([1, 1, 1, 8])
    layer = st.tuples(sizes, sizes, st.booleans(), st.booleans(), blocks)
    layers = draw(st.lists(layer, max_size=most))
    return [Task(f"layer{i}", *each) for i, each in enumerate(layers)]


small_costs = st.one_of(
    *(
        st.lists(st.sampled_from([float(n) for n in costs]), min_size=1, max_size=10)
        for costs in (range(1, 13), range(90, 131), [n**3 for n in (64, 65, 128, 147, 256, 1024)])
    )
)


def test_receivers_are_neighbours_and_workers_are_a_stride_apart():
    grid = Grid(12, 3)
    assert list(grid.receivers_of(5)) == [4, 5, 6, 7]
    assert list(grid.workers_of(5)) == [1, 5, 9]


def test_every_divisor_of_the_world_is_reached_by_its_fraction():
    for world in (*range(1, 513), 1024, 2048, 3600, 4095, 4096):
        for workers in divisors(world):
            share = workers / world
            for fraction in (share, Fraction(workers, world), 1 / world * workers):
                assert make_grid(choose(None, fraction), world) == Grid(world, workers)
            # As a person would write it.
            assert make_grid(Hybrid(float(f"{share:.4g}")), world).workers == workers


@pytest.mark.parametrize("world", [*range(1, 33), 48, 64, 96, 100, 128])
def test_a_fraction_makes_a_grid_or_an_error_whose_remedies_work(world):
    for percent in range(0, 101, 3):
        strategy = Hybrid(percent / 100)
        try:
            grid = make_grid(strategy, world)
        except ValueError as error:
            assert world % max(1, round(percent / 100 * world)) != 0
            remedies = str(error).split("; use ")[1].split(" or ")
            assert 1 <= len(remedies) <= 4
            for remedy in remedies:
                ratio, shown = remedy.split(" = ")
                assert make_grid(Hybrid(float(shown)), world).workers == int(ratio.split("/")[0])
        else:
            assert grid.workers == max(1, round(percent / 100 * world))


def test_one_rank_is_a_grid_whatever_the_strategy_says():
    for strategy in (Two(), LayerWise(), Opt(), Hybrid(0.3)):
        assert make_grid(strategy, 1) == make_grid(strategy, 1, 0.7) == Grid(1, 1)
    assert make_grid(Two(), 6) == Grid(6, 2)


def test_choose():
    mine = Two()
    for asked, answer in {
        (None, None): LayerWise(),
        (None, 0.25): Hybrid(0.25),
        (None, 0): Hybrid(0.0),
        (None, 1): Hybrid(1.0),
        ("hybrid", None): Hybrid(0.5),
        ("hybrid", 0.25): Hybrid(0.25),
        ("layer-wise", None): LayerWise(),
        ("opt", None): Opt(),
        ("opt", 1.0): Opt(),
        (Hybrid(0.125), None): Hybrid(0.125),
    }.items():
        assert choose(*asked) == answer, asked
    assert choose(mine) is mine
    assert choose(mine, 0.5) is mine


def test_costs():
    assert LayerWise().cost(10, False) == 100
    assert Opt().cost(10, False) == Hybrid().cost(10, False) == 1000
    assert {s.cost(10, True) for s in (LayerWise(), Hybrid(), Opt())} == {10}
    tasks = [Task("x", 10, 3, diagonal_a=True, blocks=4), Task("y", 2, 1)]
    placed = {"x": Placement(0, 2), "y": Placement(2, 2)}
    assert loads(Opt(), tasks, placed, 3) == [40, 0, 4 * 27 + 8 + 1]
    assert loads(LayerWise(), tasks, placed, 3) == [40, 0, 4 * 9 + 4 + 1]


def test_a_fraction_beside_a_strategy_must_mean_the_same_in_this_world():
    for strategy, world, fraction, workers in (
        (LayerWise(), 8, 0, 1),
        (LayerWise(), 8, 1 / 8, 1),
        (LayerWise(), 2, 0.5, 1),
        (Opt(), 8, 1, 8),
        (Hybrid(0.5), 8, 0.5, 4),
        (Hybrid(0.5), 8, 0.48, 4),  # rounds to the same number
        (Two(), 8, 0.25, 2),
    ):
        assert make_grid(strategy, world, fraction) == Grid(world, workers)


class Answering(WorkAssignment):
    """A strategy that a user writes: so many workers, this placement, and this cost of size 7."""

    def __init__(self, workers=2, placement="balanced", cost=1.0):
        self.workers, self.placement, self.answer = workers, placement, cost

    def gradient_workers(self, world):
        return self.workers

    def place(self, tasks, grid, **options):
        balanced = super().place(tasks, grid, **options)
        return balanced if self.placement == "balanced" else self.placement

    def cost(self, size, diagonal):
        return self.answer if size == 7 else 1.0


FRACTIONS = 1.5, -0.1, math.nan, math.inf, -math.inf, True, False, "0.5", [0.5], 2, 10**400
UNKNOWN = LayerWise, Hybrid, Opt, Two, "layerwise", "", "OPT", 3, 0.5, True, object, int
COUNTS = 0, -1, 9, 16, 2.0, "2", None, True, math.nan
COSTS = math.nan, -1.0, math.inf, "5", None, True
PLACEMENTS = {
    "returned None for 2 layers; return a list": None,
    "returned [(0, 0)] for 2 layers; return a list with one Placement(a, g)": [(0, 0)],
    "returned {'layer0': (0, 0)} for 2 layers; return a list": {"layer0": (0, 0)},
    "put 'layer1' at 1; return Placement(a, g)": [(0, 0), 1],
    "put 'layer1' at (1, 1, 1); return": [(0, 0), (1, 1, 1)],
    "put 'layer1' at (4, 0); return Placement(a, g), two ranks from 0 to 3": [(0, 0), (4, 0)],
    "put 'layer1' at (0, -1); return": [(0, 0), (0, -1)],
    "put 'layer0' at (0, 1.0); return": [(0, 1.0), (0, 0)],
    "put 'layer0' at (True, 0); return": [(True, 0), (0, 0)],
    "put 'layer1' on ranks 0 and 2, but colocate is True; place both": [(0, 0), (0, 2)],
    "put 'layer1' on ranks 3 and 2, which share no layer; G must be": [(0, 0), (3, 2)],
}
ERRORS = [
    # a text, a function, and its arguments
    *((f"grad_worker_fraction: {x!r}; it must be between 0 and 1", Hybrid, x) for x in FRACTIONS),
    *((f'{x!r}; choose from "layer-wise", "hybrid", "opt", or', choose, x) for x in UNKNOWN),
    ("0.5 makes 4 of .* LayerWise() makes 1; leave out one", make_grid, LayerWise(), 8, 0.5),
    ("0.25 makes 2 .*Hybrid(grad_worker_fraction=0.5)", make_grid, Hybrid(0.5), 8, 0.25),
    *(("world: .*at least 1", make_grid, Opt(), x) for x in (0, -4, 2.0, True, "8", None)),
    *(
        (f"Answering.gradient_workers(8) returned {x!r}", make_grid, Answering(x), 8)
        for x in COUNTS
    ),
    ("returned 3; .* divides 8, such as 2 or 4", make_grid, Answering(3), 8),
    ("returned 5; .* divides 8, such as 4 or 8", make_grid, Answering(5), 8),
    (
        "colocate_factors: False .*LayerWise() .*larger grad_worker_fraction",
        *(assign, LayerWise(), named([(9, 9)]), Grid(8, 1), False),
    ),
    *(
        (
            f"Answering.place {text}",
            *(assign, Answering(2, answer), named([(1, 2), (3, 4)]), Grid(4, 2)),
            "colocate" in text,
        )
        for text, answer in PLACEMENTS.items()
    ),
    *(
        (
            f"Answering.cost(7, False) returned {x!r} for 'layer1'; it must be a finite number",
            *(assign, Answering(cost=x), named([(1, 2), (3, 7)]), Grid(4, 2)),
        )
        for x in COSTS
    ),
]


@pytest.mark.parametrize(("text", "function", "arguments"), [(t, f, x) for t, f, *x in ERRORS])
def test_a_wrong_answer_is_named_with_the_remedy(text, function, arguments):
    pattern = ".*".join(map(re.escape, text.split(".*")))
    with pytest.raises(ValueError, match=f"Invalid .*{pattern}"):
        function(*arguments)


def colocated(strategy, grid, colocate):
    a, g = assign(strategy, [Task("x", 9, 9)], grid, colocate)["x"]
    return a == g


def test_who_stays_together():
    wide, narrow, one = Grid(8, 4), Grid(8, 1), Grid(1, 1)
    assert [colocated(s, wide, None) for s in (LayerWise(), Hybrid(), Opt())] == [True, True, False]
    for strategy in (LayerWise(), Hybrid(), Opt()):
        assert colocated(strategy, wide, True) is True
        assert colocated(strategy, wide, False) is False
        assert colocated(strategy, narrow, None) is True
        assert {colocated(strategy, one, c) for c in (True, False, None)} == {True}


@property_test
@given(models(), grids(), st.sampled_from([LayerWise(), Hybrid(), Opt()]), st.booleans())
def test_every_layer_has_ranks_in_one_column(tasks, grid, strategy, colocate):
    colocate = colocate or grid.workers == 1
    placed = assign(strategy, tasks, grid, colocate)
    assert list(placed) == [task.name for task in tasks]
    for a, g in placed.values():
        assert 0 <= a < grid.world
        assert 0 <= g < grid.world
        assert g in grid.workers_of(a)
        assert not colocate or a == g
    total = math.fsum(items(strategy, tasks, True))
    held = loads(strategy, tasks, placed, grid.world)
    assert math.fsum(held) == pytest.approx(total, rel=1e-9)


PACKAGE = Path(__file__).parents[2] / "kaisa_optim"
WAYS = ((7, 7, True), (8, 4, False), (12, 12, False), (64, 1, None))
# The package's own __init__ imports torch, which is refused.
ALONE = f"""
import json, sys, types
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split('.')[0] not in ('torch', 'numpy'), name
sys.meta_path.insert(0, Refuse())
package = sys.modules['kaisa_optim'] = types.ModuleType('kaisa_optim')
package.__path__ = [{str(PACKAGE)!r}]
from kaisa_optim.plan import assignment as alone
tasks = [alone.Task(*task) for task in json.load(sys.stdin)]
for strategy in (alone.LayerWise(), alone.Opt()):
    for world, workers, colocate in {WAYS}:
        print(alone.assign(strategy, tasks, alone.Grid(world, workers), colocate))
"""


def test_all_processes_find_the_same_whatever_their_hash_seed():
    tasks = MODELS["resnet50"]
    here = [
        str(assign(strategy, tasks, Grid(world, workers), together))
        for strategy, (world, workers, together) in itertools.product((LayerWise(), Opt()), WAYS)
    ]
    run = subprocess.run(
        [sys.executable, "-c", ALONE],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    assert run.stdout.splitlines() == here


@property_test
@given(small_costs, st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_fullest_rank_has_at_most_a_third_more_than_in_the_best_balance(costs, ranks, rnd):
    load = [0.0] * ranks
    best = optimum(costs, load)
    peak = peak_of(costs, load, balance(costs, load))
    assert best <= peak * NEARLY
    assert peak <= (4 / 3 - 1 / (3 * ranks)) * best * NEARLY
    mixed = rnd.sample(costs, len(costs))  # the order of the costs changes no peak
    assert peak_of(mixed, load, balance(mixed, load)) == pytest.approx(peak, rel=1e-12)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("model", MODELS)
def test_real_models_are_balanced(model, world):
    ways = [
        *itertools.product((LayerWise(), Opt()), [world], {True, world == 1}),
        *((Opt(), workers, False) for workers in divisors(world)[1:-1]),
    ]
    for strategy, workers, colocate in ways:
        placed = assign(strategy, MODELS[model], Grid(world, workers), colocate)
        peak = max(loads(strategy, MODELS[model], placed, world))
        costs = items(strategy, MODELS[model], colocate)
        assert peak <= 1.1 * pigeonhole_bound(costs, world)
        # BERT has 48 equal large layers: on 24 to 47 ranks, some rank must get one too many.
        if workers == world and (model == "resnet50" or not 24 <= world < 50):
            assert peak <= 4 / 3 * simple_bound(costs, world)


@property_test
@given(models(12), models(12), grids(12), st.booleans())
def test_later_layers_go_where_there_is_room(first, second, grid, colocate):
    colocate = colocate or grid.workers == 1
    second = [task._replace(name="later " + task.name) for task in second]
    strategy = Hybrid()
    old = loads(strategy, first, assign(strategy, first, grid, colocate), grid.world)
    kept = list(old)
    new = loads(strategy, second, assign(strategy, second, grid, colocate, old), grid.world)
    assert old == kept  # the caller's list is left alone
    if not second:
        return
    peak = max(o + n for o, n in zip(old, new, strict=True))
    if colocate or grid.columns == 1:
        costs = items(strategy, second, colocate)
        assert peak <= peak_of(costs, old, balance(costs, old)) * NEARLY


@pytest.mark.parametrize(
    ("workers", "colocate", "busy", "taken"),
    [(1, True, [2], {0, 1, 3}), (4, False, [2], {0, 1, 3}), (2, False, [1, 3], {0, 2})],
)
def test_a_busy_rank_or_column_gets_nothing(workers, colocate, busy, taken):
    load = [1e9 if rank in busy else 0.0 for rank in range(4)]
    placed = assign(Opt(), named([(5, 5)] * 3), Grid(4, workers), colocate, load)
    assert {r for ranks in placed.values() for r in ranks} == taken


def test_a_strategy_needs_only_its_gradient_workers():
    tasks = named([(3, 4), (5, 6), (7, 8), (9, 10)])
    grid = make_grid(choose(Two()), 4)
    placed = assign(Two(), tasks, grid)
    assert placed == assign(Hybrid(0.5), tasks, grid)
    assert all(a == g for a, g in placed.values())


def test_an_own_cost_is_what_is_balanced_and_an_own_preference_counts():
    class Own(Hybrid):
        colocate = False

        def cost(self, size, diagonal):
            return 1.0

    tasks = named([(n, n) for n in range(1, 9)])
    assert sorted(p.a for p in assign(Own(), tasks, Grid(4, 2), True).values()) == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert all(a != g for a, g in assign(Own(), tasks[:1], Grid(2, 2)).values())
    assert all(a == g for a, g in assign(Own(), tasks[:1], Grid(2, 2), True).values())


def test_an_own_place_is_followed_and_told_all():
    seen = []

    class Reversed(Two):
        def place(self, tasks, grid, *, colocate, load):
            seen.append((tuple(tasks), grid, colocate, list(load)))
            load[0] = 1e9  # its own copy
            return [(len(tasks) - i - 1, len(tasks) - i - 1) for i in range(len(tasks))]

    tasks, load = named([(1, 2), (3, 4), (5, 6)]), [1.0, 2.0, 3.0, 4.0]
    placed = assign(Reversed(), tasks, Grid(4, 2), True, load)
    assert placed == {"layer0": (2, 2), "layer1": (1, 1), "layer2": (0, 0)}
    assert all(isinstance(p, Placement) for p in placed.values())
    assert seen == [(tuple(tasks), Grid(4, 2), True, [1.0, 2.0, 3.0, 4.0])]
    assert load == [1.0, 2.0, 3.0, 4.0]
