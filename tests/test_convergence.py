"""The search behind the convergence benchmark: fair, resumable, and honest about targets."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.convergence import search
from benchmarks.convergence.contestants import CONTESTANTS, Contestant, one_of
from benchmarks.convergence.tasks import TASKS, Task


def line(steps: int = 40) -> Task:
    """Fits y = 3 x; the loss is known at every slope."""

    def network() -> nn.Module:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    def whole(data):
        yield data, 3 * data

    return Task(
        "line", "a line", network, lambda folder: (torch.ones(4, 1),) * 2,
        lambda data, generator: (data, 3 * data),
        lambda out, target: (out - target).square().mean(), whole, steps, 10, {},
    )  # fmt: skip


def plain(*rates: float) -> Contestant:
    def build(model, config, kfac):
        return [torch.optim.SGD(model.parameters(), **config)]

    return Contestant("plain", build, {"lr": one_of(*rates)})


DATA = (torch.ones(4, 1),) * 2


def test_the_best_settings_are_found_and_the_worse_ones_stop_early(tmp_path):
    store = search.Store(tmp_path / "runs.json")
    one, task = plain(1e-4, 1e-3, 1e-2, 1e-1), line()
    best = search.search(task, DATA, one, store, trials=12)
    assert best == {"lr": 0.1}
    lengths = sorted(run["steps"] for run in store.runs.values())
    # Equal draws share a run, so four settings: all are tried, two of these go on to the end.
    assert lengths.count(10) == 4 and lengths.count(40) <= 2


def test_a_search_that_was_broken_off_goes_on(tmp_path):
    one, task = plain(1e-3, 1e-1), line()
    first = search.Store(tmp_path / "runs.json")
    search.search(task, DATA, one, first)
    again = search.Store(tmp_path / "runs.json")
    assert json.dumps(again.runs) == json.dumps(first.runs)
    with mock.patch.object(search, "train", side_effect=AssertionError("ran again")):
        assert search.search(task, DATA, one, again) == {"lr": 0.1}


def test_a_run_that_diverges_ends(tmp_path):
    run = search.train(line(), DATA, plain(5.0), {"lr": 5.0}, 0, 40)
    assert run.loss == math.inf and run.curve[-1][0] < 40


def test_the_shortest_horizon_has_a_schedule_of_its_own(tmp_path):
    store = search.Store(tmp_path / "runs.json")
    task, one = line(), plain(0.1)
    target = search.train(task, DATA, one, {"lr": 0.1}, 0, 20).loss
    part, runs = search.shortest(
        task, DATA, one, {"lr": 0.1}, (1, 2, 3), target, store, (1.0, 0.75, 0.5, 0.25)
    )
    assert part == 0.5 and [run.steps for run in runs] == [20] * 3
    out_of_reach, whole = search.shortest(
        task, DATA, one, {"lr": 0.1}, (1, 2, 3), -1.0, store, (1.0, 0.5)
    )
    assert out_of_reach == math.inf and [run.steps for run in whole] == [40] * 3


@pytest.mark.parametrize("name", [n for n, one in CONTESTANTS.items() if one.needs is None])
def test_every_contestant_learns(name):
    task = dataclasses.replace(TASKS["digits-256"], steps=30)
    one = CONTESTANTS[name]
    data = task.load(None)
    losses = []
    for seed in range(4):  # some draw is bad, not all
        run = search.train(task, data, one, one.draw(random.Random(seed)), 0, 40)
        losses.append(run.loss / run.curve[0][2])
    assert min(losses) < 0.9
