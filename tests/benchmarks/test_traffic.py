"""Bytes from shapes, as docs/results/traffic.csv has them, and the papers' figures."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from torch import nn

from benchmarks import traffic
from benchmarks.published import BLOCKS, RANKS, interval, papers, resnet, rows
from benchmarks.traffic import parameters
from kaisa_optim import KFACAdam, LayerWise

TABLES = Path(__file__).parents[2] / "docs" / "results" / "traffic.csv"


def test_the_tables_are_current():
    assert TABLES.read_text() == traffic.as_csv(), "run: python -m docs.tables"


def test_settings_are_kfacadams_defaults():
    kfac = KFACAdam(nn.Linear(3, 2)).preconditioner
    ours = traffic.account([traffic.linear("", 3, 2)], LayerWise(), 1)
    facts = {"layers": ours.layers, "grid": ours.grid}
    assert dataclasses.replace(kfac.account, **facts) == ours
    intervals = kfac.factor_update_steps, kfac.inv_update_steps
    assert intervals == (traffic.GATHERED, traffic.REFRESHED)
    assert kfac.options.max_factor_size is None
    scales = KFACAdam(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))).preconditioner
    assert list(scales.layers) == ["0"]  # norms are left to the base


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("strategy", list(traffic.STRATEGIES))
@pytest.mark.parametrize("model", list(traffic.MODELS))
def test_factors_take_half_of_the_papers_traffic_at_most(model, strategy, every):
    found = traffic.schemes(model, strategy, 64, every, 10 * every)
    ours, papers = (traffic.mean(found[name], "factors") for name in ("ours", "papers"))
    assert 0 < ours <= papers / 2


@pytest.mark.parametrize("world", [2, 8, 16, 64, 512])
@pytest.mark.parametrize("strategy", list(traffic.STRATEGIES))
@pytest.mark.parametrize("model", list(traffic.MODELS))
def test_ranks_decompose_side_by_side_also_where_layers_take_turns(model, strategy, world):
    if world == 2 and strategy == "hybrid 1/4":
        pytest.skip("a quarter of two ranks is one of them, as layer-wise")
    one_by_one, by_ranks, at_once = (
        traffic.waiting(model, strategy, world, n) for n in (1, True, False)
    )
    found = traffic.plan(model, strategy, world)
    # About the costliest layer beside what one step for all would take: a rank may own two of a
    # turn, as layers of one shape take their turn together.
    costs = [sum(traffic.operations(found, [name])) for name in found.names]
    assert by_ranks.whole <= at_once.whole + 1.1 * max(costs) / (sum(costs) / world)
    assert at_once.longest == at_once.whole <= by_ranks.whole <= one_by_one.whole
    # Small layers may be on the same rank, or take their turn in the same step.
    assert by_ranks.longest <= 1.1 * one_by_one.longest


@pytest.mark.parametrize(("depth", "millions"), [(50, 25.5), (101, 44.5), (152, 60.1)])
def test_the_resnets_have_their_parameters(depth, millions):
    tasks, seen = resnet(depth)
    assert parameters(tasks) == pytest.approx(1e6 * millions, rel=0.01)
    assert seen.keys() == {task.name for task in tasks}


@pytest.mark.parametrize("depth", BLOCKS)
def test_opt_is_ahead_of_layer_wise_and_falls_back_with_more_ranks(depth):
    steps = {}
    for ranks, name in itertools.product(RANKS, ("layer-wise", "opt")):
        every = interval(ranks)
        steps[name, ranks] = papers(depth, name, ranks).step(every // 10, every)
    for ranks in RANKS:
        assert steps["opt", ranks] < steps["layer-wise", ranks]
    for name in ("layer-wise", "opt"):
        found = [steps[name, ranks] for ranks in RANKS]
        assert found == sorted(found)


def test_predictions_are_near_the_published_figures():
    near = {"minutes": 0.1, "efficiency": 8, "ahead of SGD, opt": 2, "ahead of SGD, layer-wise": 5}
    found = {kind: [row for row in rows() if kind in row.what] for kind in near}
    for kind, within in near.items():
        for row in found[kind]:
            of = row.published if kind == "minutes" else 1
            assert row.predicted == pytest.approx(row.published, abs=within * of), row.what
    often, middle, seldom = (row.predicted for row in found["minutes"])
    assert often - middle > middle - seldom > 0  # longer intervals gain ever less
    layer_wise, opt = found["efficiency"]
    assert layer_wise.predicted < opt.predicted
