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


def test_memory_grows_and_traffic_falls_with_the_workers():
    found = choice(8).priced
    needs = [one.needs for one in found]
    received = [max(one.received) for one in found]
    assert needs == sorted(needs) and received == sorted(received, reverse=True)


def test_the_fullest_rank_has_the_most_of_both_together():
    one = price(CASE, candidates(4)[1], 4, HARDWARE)
    both = [a + b for a, b in zip(one.kfac, one.momenta, strict=True)]
    assert one.needs == CASE.fixed + one.sums + max(both)
    assert one.momenta[0] == one.momenta[2] and one.momenta[1] == one.momenta[3]
    assert sum(one.momenta[:2]) == sum(x.size for x in CASE.momenta)


def test_a_momentum_of_two_layers_is_kept_wherever_one_of_them_is():
    shared = Momentum(tuple(x.name for x in LAYERS), 1000)
    case = dataclasses.replace(CASE, momenta=[shared])
    assert price(case, candidates(4)[0], 4, HARDWARE).momenta == [1000] * 4


def test_the_fastest_that_fits_is_the_best():
    free = choice()
    assert free.best is min(free.priced, key=lambda one: one.step)
    assert "has the shortest step: " in free.reason
    least = free.nearest
    tight = choice(budget=least.needs)
    assert tight.fitting == [tight.best] and tight.best == least
    assert "of those that fit into" in tight.reason
    assert tight.refuse_if_none_fits() == least


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


def test_one_rank_has_one_strategy():
    found = choice(1)
    assert found.best is not None and found.best.momenta == [sum(x.size for x in CASE.momenta)]
    assert "is the only strategy" in found.reason


def test_options_name_the_strategy():
    from kaisa_optim.options import Options

    for one in candidates(12):
        settled = Options(**one.options)
        workers = settled.strategy.gradient_workers(12)
        assert settled.strategy == one.strategy and workers == one.strategy.gradient_workers(12)
