"""Slots of layers: by shape, balanced by cost, alike on all ranks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kaisa_optim.plan.assignment import Placement, Task
from kaisa_optim.plan.facts import LayerFacts
from kaisa_optim.plan.schedule import Schedule, even_slots, turns

SIDES = st.integers(1, 4)


@st.composite
def models(draw: st.DrawFn) -> list[LayerFacts]:
    """Layers of few shapes, in any order."""
    sides = draw(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=40))
    return [layer(str(i), a, g) for i, (a, g) in enumerate(sides)]


def layer(name: str, a: int, g: int, owner: int = 0, frozen: bool = False) -> LayerFacts:
    return LayerFacts(Task(name, a, g), Placement(owner, owner), frozen=frozen)


def cost(facts: LayerFacts) -> int:
    return sum(factor.operations for factor in facts.factors)


@given(models(), st.integers(1, 9), st.integers(1, 30))
def test_turns_hold_each_layer_once_and_as_many_as_asked_for(layers, at_once, slots):
    together = turns(layers, list(map(cost, layers)), at_once, slots)
    assert sorted(itertools.chain(*together)) == [*range(len(layers))]
    assert all(len(turn) >= at_once for turn in together[:-1])


@given(models(), st.integers(1, 30))
def test_layers_of_one_shape_take_their_turn_together_unless_they_cost_too_much(layers, slots):
    """Alone, a turn has one shape; a shape is divided where it costs more than 1.5 fair shares."""
    costs = list(map(cost, layers))
    together = turns(layers, costs, 1, slots)
    found: dict[object, int] = {}
    for turn in together:
        (shape,) = {layers[place].shape for place in turn}
        found[shape] = found.get(shape, 0) + 1
    fair = sum(costs) / slots
    for shape, number in found.items():
        own = [c for one, c in zip(layers, costs, strict=True) if one.shape == shape]
        if sum(own) < 1.5 * fair:
            assert number == 1
        # No part of a shape costs more than two fair shares and a layer.
        assert max(own) * -(-len(own) // number) <= 2 * fair + max(own)


@given(st.lists(st.integers(1, 10), max_size=20), st.integers(1, 30))
def test_slots_have_even_costs(costs, slots):
    steps = even_slots(costs, slots)
    assert steps == sorted(steps) and all(0 <= step < slots for step in steps)
    for step in set(steps):
        own = [c for c, at in zip(costs, steps, strict=True) if at == step]
        assert sum(own) <= sum(costs) / slots + max(own)


@given(models(), st.integers(0, 3), st.integers(1, 12), st.data())
def test_a_schedule_knows_shapes_alone(layers, at_once, interval, data):
    """All assignments have the same slots, and frozen layers keep their places."""
    frozen = data.draw(st.sets(st.sampled_from([x.name for x in layers])))
    others = [
        x._replace(placement=Placement(i, i + 1), frozen=x.name in frozen)
        for i, x in enumerate(layers)
    ]
    one, other = Schedule(layers, at_once), Schedule(others, at_once)
    for slots in ("gathering_slots", "refresh_slots"):
        wanted = {step: names - frozen for step, names in getattr(one, slots)(interval).items()}
        found = getattr(other, slots)(interval)
        assert found == {step: names for step, names in wanted.items() if names}
