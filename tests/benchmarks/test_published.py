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


def test_longer_intervals_gain_ever_less():
    minutes = [row.predicted for row in rows() if "minutes" in row.what]
    assert minutes == sorted(minutes, reverse=True)
    assert minutes[0] - minutes[1] > minutes[1] - minutes[2] > 0
    for row in rows():
        if "minutes" in row.what:
            assert row.predicted == pytest.approx(row.published, rel=0.1)


def test_opt_scales_better_than_layer_wise():
    layer_wise, opt = (row for row in rows() if "efficiency" in row.what)
    assert layer_wise.predicted < opt.predicted
    for row in (layer_wise, opt):
        assert row.predicted == pytest.approx(row.published, abs=8)


def test_gains_over_sgd_are_near_the_published_ones():
    for row in rows():
        if "ahead" in row.what:
            assert row.predicted == pytest.approx(row.published, abs=2 if "opt" in row.what else 5)
