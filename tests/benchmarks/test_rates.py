"""The benchmark of losses over learning rates: resumable, and in the order that tells most."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import rates
from benchmarks.convergence.tasks import TASKS

ASKED = ["digits-256", "--pairs", "AdamW", "--rates", "0.01", "0.1", "--seeds", "3", "4"]
LOSSES = {
    ("AdamW", 0.01): 1.0,
    ("AdamW", 0.1): math.inf,
    ("KFACAdam", 0.01): 1.1,
    ("KFACAdam", 0.1): 0.5,
}


@pytest.fixture
def runs(monkeypatch):
    """Orders that came, answered without training."""
    seen: list[rates.Order] = []

    def made(orders, options):
        for one in orders:
            seen.append(one)
            yield one, LOSSES[one.optimizer, one.lr], 1.0

    monkeypatch.setattr(rates, "made", made)
    return seen


def test_first_seeds_come_first_and_runs_that_are_kept_are_not_made_again(runs, tmp_path, capsys):
    rates.main([*ASKED, "--out", str(tmp_path)])
    assert len(runs) == 8 and [one.seed for one in runs] == [3] * 4 + [4] * 4
    assert [one.optimizer for one in runs[:2]] == ["AdamW", "KFACAdam"]
    rates.main([*ASKED, "5", "--out", str(tmp_path)])
    assert {one.seed for one in runs[8:]} == {5} and len(runs) == 12
    kept = json.loads((tmp_path / "rates_digits-256.json").read_text())
    assert kept["steps"] == TASKS["digits-256"].steps // 2
    assert {row["loss"] for row in kept["runs"]} == {1.0, None, 1.1, 0.5}
    assert (tmp_path / "rates_digits-256.png").exists()
    # At 0.01, where the base is at its best, ours is above it; at 0.1 it is below.
    assert "KFACAdam               0.01: 1.1!  0.1: 0.5; within 1.1" in capsys.readouterr().out


def test_runs_of_other_lengths_do_not_join(runs, tmp_path):
    rates.main([*ASKED, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="has runs of 1000 steps, not of 2000"):
        rates.main([*ASKED, "--part", "1", "--out", str(tmp_path)])
    assert len(runs) == 8


def test_settings_of_the_best_rate(runs, tmp_path):
    rates.main([*ASKED, "--out", str(tmp_path)])
    task = TASKS["digits-256"]
    found = rates.best_settings(tmp_path, task, ["AdamW", "KFACAdam", "KFACAdam, defaults"])
    betas = {"beta1": 0.9, "beta2": 0.999}
    assert found["AdamW"] == {"lr": 0.01, **betas}
    assert found["KFACAdam"] == {"lr": 0.1, **betas}
    assert found["KFACAdam, defaults"] == {"lr": 0.1}
    assert rates.best_settings(tmp_path, task, ["SGD"]) == {}
    with pytest.raises(SystemExit, match="--rated SGD: no rates on digits-256 in"):
        convergence.main(["digits-256", "--rated", "SGD", "--out", str(tmp_path)])
