"""The choice among strategies: what each needs, and the fastest that fits."""

from __future__ import annotations

import dataclasses
import re

import pytest

from kaisa_optim.plan.assignment import Hybrid, LayerWise, Opt, Placement, Task
from kaisa_optim.plan.facts import LayerFacts
from kaisa_optim.tools.choice import Case, Choice, Momentum, candidates, price
from tests.tools.test_prices import HARDWARE, POLAR, SIZES

LAYERS = [LayerFacts(Task(f"{i}", 200 + 10 * i, 300), Placement(0, 0)) for i in range(6)]
CASE = Case(
    LAYERS,
    SIZES,
    POLAR,
    (10, 20),
    lambda world: world,
    weights=10**6,
    gradients=10**6,
    base=500,
    momenta=[Momentum((x.name,), 4 * x.gradient) for x in LAYERS],
)


def choice(world: int = 4, budget: int | None = None, case: Case = CASE) -> Choice:
    priced = [price(case, x, world, HARDWARE) for x in candidates(world)]
    return Choice(case, HARDWARE, world, budget, priced)


def test_candidates_are_all_divisors():
    assert [one.strategy for one in candidates(1)] == [LayerWise()]
    assert [one.strategy for one in candidates(7)] == [LayerWise(), Opt()]
    found = [one.strategy for one in candidates(12)]
    fractions = [Hybrid(n / 12) for n in (2, 3, 4, 6)]
    assert found == [LayerWise(), *fractions, Opt()]
    assert [one.title for one in candidates(4)] == ["layer-wise", "2/4 = 0.5", "opt"]
    assert LayerWise() not in [one.strategy for one in candidates(4, colocate=False)]


def test_a_momentum_of_two_layers_is_kept_wherever_one_of_them_is():
    shared = Momentum(tuple(x.name for x in LAYERS), 1000)
    case = dataclasses.replace(CASE, momenta=[shared])
    assert price(case, candidates(4)[0], 4, HARDWARE).momenta == [1000] * 4


def test_what_is_missing_is_said_where_nothing_fits():
    least = choice().nearest
    none = choice(budget=least.needs - 1000)
    assert none.best is None and none.fitting == []
    said = "no strategy fits into .*layer-wise, needs .*, 1 kB more"
    with pytest.raises(ValueError, match=f"Invalid memory_budget: {said}.*; give at least") as told:
        none.refuse_if_none_fits()
    advised = re.search(r"give at least ([\d,]+) bytes", str(told.value))
    assert advised is not None
    assert choice(budget=int(advised[1].replace(",", ""))).best == least
