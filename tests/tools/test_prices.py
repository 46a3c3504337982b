"""Times of steps, against sums by hand."""

from __future__ import annotations

import pytest

from kaisa_optim.account import Account
from kaisa_optim.plan.assignment import (
    Grid,
    Hybrid,
    LayerWise,
    Opt,
    Placement,
    Task,
    assign,
    make_grid,
)
from kaisa_optim.plan.facts import LayerFacts, Sizes, TensorSpec, Work
from kaisa_optim.plan.schedule import Schedule
from kaisa_optim.tools import hardware
from kaisa_optim.tools.prices import STAGES, Clock, Passes
from tests.tools.test_hardware import PLAIN

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


def times(made, gather=10, refresh=20):
    account = made.account
    schedule = Schedule(account.layers, True)
    slots = account.per_slot(schedule, gather, refresh)
    turns = schedule.gathering_slots(gather), schedule.refresh_slots(gather, refresh)
    return made.times(slots, *turns, (gather, refresh))


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


@pytest.mark.parametrize("world", [1, 4, 8])
def test_strategies_differ_in_the_stages_that_they_should(world):
    lw, half, opt = (times(clock(x, world)).mean for x in (LayerWise(), Hybrid(0.5), Opt()))
    assert set(lw) == set(STAGES)
    if world == 1:
        assert lw == pytest.approx(opt)
        assert lw["reduce"] == lw["hand out"] == lw["average gradients"] == 0
        return
    assert opt["hand out"] == 0 and lw["share"] == 0
    assert 0 < half["share"] < opt["share"]
    assert 0 < half["hand out"] < lw["hand out"]
    assert lw["precondition"] < half["precondition"] < opt["precondition"]


def test_ranks_of_one_row_are_on_one_node():
    """Two neighbours hand gradients to each other by the faster link."""
    made = clock(Hybrid(0.5), 4)
    assert made.account.grid == Grid(4, 2)
    arriving = 10**8
    handed = made.always(arriving)["hand out"]
    calls = 2 * 4  # 100 MB in buckets of 25 MiB, each passed on once
    assert handed == pytest.approx(HARDWARE.transfer(arriving, 2, 2, calls))
    shared = made.refreshing(["0"], arriving)["share"]
    assert shared == pytest.approx(HARDWARE.transfer(arriving, 2, 1, calls))
    assert shared > handed
