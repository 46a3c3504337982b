"""The demo trains, measures and draws; its learning rates come from the kept search."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from benchmarks import demo


def a_run(losses, pace=1.0):
    times = [pace * step for step in range(len(losses))]
    return demo.Run(losses, times, times)


def test_shares_are_of_steps_and_of_seconds_to_the_bases_last_loss():
    base = [a_run([4.0, 3.0, 2.5, 2.0, 1.0]), a_run([4.0, 3.0, 2.5, 2.0, 2.0])]
    ours = [a_run([4.0, 1.5, 1.0], pace=2), a_run([4.0, 1.4, 0.5], pace=2)]
    rows = demo.summary({"Adam": base, "KFACAdam": ours}, {"Adam": 0.01, "KFACAdam": 0.03})
    assert [row["target"] for row in rows] == [1.5, 1.5]
    assert [row["steps"] for row in rows] == [4, 1]
    assert [row["seconds"] for row in rows] == [4, 2]
    assert demo.verdict(rows, "steps").endswith("in 0.25 of its steps")
    assert demo.verdict(rows, "seconds").endswith("in 0.50 of its seconds")


def test_rates_are_those_of_the_kept_search():
    kept = json.loads(demo.RATES.read_text())
    assert kept["steps"] == demo.STEPS
    assert not set(kept["seeds"]) & set(demo.SEEDS)
    for name, losses in kept["losses"].items():
        assert [float(rate) for rate in losses] == list(demo.GRID)
        assert kept["rates"][name] == demo.best(losses)
        assert min(demo.GRID) < kept["rates"][name] < max(demo.GRID)


def test_the_demo_ends_with_a_table_and_a_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(demo.STEPS, "Adam", 4)
    monkeypatch.setitem(demo.STEPS, "KFACAdam", 2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    plot, result = tmp_path / "demo.png", tmp_path / "demo.json"
    demo.main(["--short", "--plot", str(plot), "--json", str(result)])
    torch.set_num_threads(threads)
    assert plot.stat().st_size > 0
    assert [row["optimizer"] for row in json.loads(result.read_text())["rows"]] == list(demo.BUILD)
    assert "of its steps" in (text := capsys.readouterr().out) or "misses" in text
