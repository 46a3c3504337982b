"""Losses over the learning rate: what is kept of them, and what is told."""

import json
import math

import pytest

from benchmarks.convergence import rates
from benchmarks.convergence.rates import Kept, Order
from benchmarks.convergence.tasks import TASKS

TASK = TASKS["digits-256"]


def filled(folder, losses, part=0.5):
    """Return a file's runs: of ``{(optimizer, lr): [loss of each seed]}``."""
    kept = Kept.here(folder, TASK, part)
    for (optimizer, lr), found in losses.items():
        for seed, loss in enumerate(found, 1):
            kept.add(Order(TASK.name, optimizer, lr, seed), loss, 1.0, "cpu")
    return kept


def test_runs_are_kept(tmp_path):
    filled(tmp_path, {("AdamW", 0.01): [1.0, math.inf], ("KFACAdam", 0.1): [0.5]})
    again = Kept.here(tmp_path, TASK, 0.5)
    assert again.curves() == {"AdamW": {0.01: [1.0, math.inf]}, "KFACAdam": {0.1: [0.5]}}
    assert again.has(Order(TASK.name, "AdamW", 0.01, 2))
    assert not again.has(Order(TASK.name, "AdamW", 0.01, 3))
    found = json.loads((tmp_path / f"rates_{TASK.name}.json").read_text())
    assert found["steps"] == TASK.steps // 2 and len(found["runs"]) == 3
    with pytest.raises(SystemExit, match=f"has runs of {TASK.steps // 2} steps, not of 200"):
        Kept.here(tmp_path, TASK, 0.1)


def test_the_best_rate_is_that_of_the_mean(tmp_path):
    losses = {
        ("KFACAdam", 0.01): [0.3, 0.3],
        ("KFACAdam", 0.03): [0.1, math.inf],
        ("SOAP", 0.01): [1.0],
    }
    filled(tmp_path, losses)
    found = rates.best_settings(tmp_path, TASK, ["KFACAdam, defaults", "KFACAdam", "SOAP"])
    assert found["KFACAdam, defaults"] == {"lr": 0.01}
    assert found["KFACAdam"] == {"lr": 0.01, "beta1": 0.9, "beta2": 0.999}
    assert found["SOAP"]["frequency"] == 10
    with pytest.raises(SystemExit, match="--rated Muon: its rates on digits-256 are not in"):
        rates.best_settings(tmp_path, TASK, ["Muon"])


def test_where_ours_is_worse_is_marked(tmp_path, capsys):
    """Only where a user of the base may be: at rates that end within 1.5 times its best loss."""
    losses = {
        ("AdamW", 0.001): [1.0],
        ("AdamW", 0.01): [1.4],
        ("AdamW", 0.1): [2.0],
        ("KFACAdam", 0.001): [1.01],
        ("KFACAdam", 0.01): [1.5],
        ("KFACAdam", 0.1): [3.0],
    }
    rates.report(filled(tmp_path, losses))
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "digits-256: KFACAdam for AdamW" and len(told) == 3  # SOAP has no runs
    assert "0.001: 1.01  0.01: 1.5!  0.1: 3?; within 1.1 of the best: 0.001-0.001" in told[2]
    assert "!" not in told[1] and "?" not in told[1]


def test_what_is_made_first_tells_most():
    """All rates of the first seed come before the second seed's."""

    class Options:
        tasks, pairs, seeds, rates = ["digits-256"], ["AdamW", "SOAP"], [1, 2], [0.003, 0.01]

    found = list(dict.fromkeys(rates.ordered(Options)))
    assert [(o.optimizer, o.lr, o.seed) for o in found] == [
        (name, lr, seed)
        for seed in (1, 2)
        for lr in (0.003, 0.01)
        for name in ("AdamW", "KFACAdam", "SOAP")
    ]


def test_runs_in_the_file_are_not_made_again(tmp_path, monkeypatch):
    """And each run that two pairs share is made once."""
    filled(tmp_path, {("KFACAdam", 0.01): [0.5]})
    asked = []

    def made(orders, options):
        asked.extend(orders)
        yield from ((one, 1.0, 2.0) for one in orders)

    monkeypatch.setattr(rates, "made", made)
    pairs = ["--pairs", "AdamW", "SOAP", "--rates", "0.01", "0.03", "--seeds", "1"]
    rates.main([TASK.name, *pairs, "--out", str(tmp_path)])
    assert [(o.optimizer, o.lr) for o in asked] == [
        ("AdamW", 0.01),
        ("SOAP", 0.01),
        ("AdamW", 0.03),
        ("KFACAdam", 0.03),
        ("SOAP", 0.03),
    ]
    found = Kept.here(tmp_path, TASK, 0.5).curves()
    assert found["KFACAdam"] == {0.01: [0.5], 0.03: [1.0]}
    assert (tmp_path / f"rates_{TASK.name}.png").stat().st_size > 1000
