"""Slots of layers: by shape, balanced by cost, alike on any number of ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaisa_optim.plan.assignment import Placement, Task
from kaisa_optim.plan.facts import LayerFacts
from kaisa_optim.plan.schedule import Schedule

SIDES = st.integers(1, 4)


@st.composite
def models(draw: st.DrawFn) -> list[LayerFacts]:
    """Layers of few shapes, in any order."""
    sides = draw(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=40))
    return [layer(str(i), a, g) for i, (a, g) in enumerate(sides)]


def layer(name: str, a: int, g: int, owner: int = 0, frozen: bool = False) -> LayerFacts:
    return LayerFacts(Task(name, a, g), Placement(owner, owner), frozen=frozen)


def cost(layers: list[LayerFacts]) -> int:
    return sum(factor.operations for facts in layers for factor in facts.factors)


@given(models(), st.integers(1, 12), st.integers(1, 30))
def test_each_layer_gathers_once_and_is_refreshed_where_it_gathers(layers, gathering, interval):
    """Whole shapes share a slot, and slots cost the same."""
    schedule = Schedule(layers, True)
    gathers = schedule.gathering_slots(gathering)
    refreshes = schedule.refresh_slots(gathering, interval)
    for slots in (gathers, refreshes):
        assert sorted(itertools.chain(*slots.values())) == sorted(x.name for x in layers)
    assert set(gathers) <= {0, gathering // 2}
    if interval >= gathering:
        assert refreshes == gathers
    else:
        assert set(refreshes) <= {0, interval // 2}
    slots = [[x for x in layers if x.name in names] for names in gathers.values()]
    shapes = [{x.shape for x in in_slot} for in_slot in slots]
    assert len(set.union(*shapes)) == sum(map(len, shapes))
    costs = [*map(cost, slots)]
    most = max(cost([x for x in layers if x.shape == shape]) for shape in set.union(*shapes))
    assert max(costs) - min(costs) <= most
    assert len(slots) == 2 or gathering == 1 or len(shapes[0]) == 1


def test_large_sums_are_spread_over_more_slots_than_two():
    """In each slot they take four times the weights at most; a single shape is cut."""
    layers = [layer(str(i), 100, 1) for i in range(12)]
    slots = Schedule(layers, True).gathering_slots(20)
    pending = [
        sum(f.size for x in layers if x.name in s for f in x.factors) for s in slots.values()
    ]
    assert len(slots) == 12 and max(pending) <= 4 * sum(x.gradient for x in layers) * 1.1
    few = [layer(str(i), 14, 1) for i in range(12)]  # less than eight times the weights
    assert len(Schedule(few, True).gathering_slots(20)) == 1


@given(models(), st.integers(1, 12), st.integers(1, 30), st.booleans(), st.booleans())
def test_each_step_knows_the_next_that_is_not_quiet(layers, gathering, interval, staggered, late):
    schedule = Schedule(layers, staggered, early=(5, 10))
    each = [schedule.at(step, gathering, interval, late=late) for step in range(40)]
    works = [step for step, (due, refreshed, _) in enumerate(each) if due is not None or refreshed]
    assert works[0] == 0
    for before, step in itertools.pairwise(works):
        assert {following for *_, following in each[before:step]} == {step}


@given(models(), st.integers(1, 12), st.integers(1, 30))
def test_early_steps_do_all_and_leave_the_others_their_turns(layers, gathering, interval):
    names, schedules = {x.name for x in layers}, [Schedule(layers, True, x) for x in ((2, 9), ())]
    for step in range(30):
        early, plain = (schedule.at(step, gathering, interval)[:2] for schedule in schedules)
        assert early == ((names, names) if step in (2, 9) else plain)


@pytest.mark.parametrize("interval", [1, 2, 3, 10])
def test_late_layers_have_one_more_step_of_each_interval_and_meet_every_rhythm(interval):
    """The step moves on, so that in so many intervals it has had each place."""
    schedule = Schedule([layer("one", 2, 2)], False)
    late = [schedule.at(s, interval, interval, late=True)[0] for s in range(interval**2)]
    steps = [s for s, due in enumerate(late) if due is not None]
    assert {step % interval for step in steps} == set(range(interval))
    for start in range(0, interval**2, interval):
        assert len([s for s in steps if start <= s < start + interval]) <= 2
    without = [s for s in range(interval**2) if schedule.at(s, interval, interval)[0] is not None]
    assert without == [*range(0, interval**2, interval)]


@given(models(), st.booleans(), st.integers(1, 12), st.integers(1, 12), st.data())
def test_a_schedule_knows_shapes_alone(layers, staggered, gathering, interval, data):
    """All assignments have the same slots, and frozen layers keep their places: a slot may be
    empty, where ranks still meet.
    """
    frozen = data.draw(st.sets(st.sampled_from([x.name for x in layers])))
    placed = [
        x._replace(placement=Placement(i, i + 1), frozen=x.name in frozen)
        for i, x in enumerate(layers)
    ]
    slots = Schedule(layers, staggered).refresh_slots(gathering, interval)
    expected = {step: names - frozen for step, names in slots.items()}
    assert Schedule(placed, staggered).refresh_slots(gathering, interval) == expected
