"""The papers' figures: orderings and crossings must come out of the predictions."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.published import BLOCKS, RANKS, interval, papers, resnet, rows
from benchmarks.traffic import parameters


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
