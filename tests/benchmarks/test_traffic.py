"""What docs/results/traffic.csv says of bytes is what the account says today."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from torch import nn

from benchmarks import traffic
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


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    traffic.main(["--plot", str(tmp_path / "fraction.png")])
    assert (tmp_path / "fraction.png").stat().st_size > 0
