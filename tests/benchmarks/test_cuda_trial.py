"""The trial on a CUDA device, rehearsed on the CPU: what one part does, no other suffers from."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from benchmarks.cuda_trial import __main__ as trial
from benchmarks.cuda_trial import parts
from benchmarks.cuda_trial.__main__ import PARTS, main
from benchmarks.cuda_trial.parts import Part
from benchmarks.cuda_trial.steps import mean_step


def recorded(folder):
    return json.loads((folder / "cuda_trial_rehearsal.json").read_text())


@pytest.mark.parametrize("name", sorted(PARTS.keys() - {"proofs", "bert-large"}))
def test_each_part_rehearses(tmp_path, name):
    """BERT-Large is timed as ResNet-50 is, and its rehearsal takes as long as all others."""
    assert main(["--rehearse", "--out", str(tmp_path), "--parts", name]) == 0
    part = recorded(tmp_path)["parts"][name]
    assert part["state"] == "done" and part["results"]


def test_the_tests_are_run_and_told(tmp_path):
    assert main(["--rehearse", "--out", str(tmp_path), "--parts", "proofs"]) == 0
    _, exactness = recorded(tmp_path)["parts"]["proofs"]["results"]
    assert exactness["code"] == 0 and "1 passed" in exactness["said"]


@pytest.mark.parametrize("steps", [30, 40])
def test_a_mean_step_has_the_interval_s_share_of_refreshes(steps):
    """Steps of an interval that cost 1, 5 more where they gather, and 150 in its two refreshes."""
    interval = [1 + 5 * (step % 5 == 0) + {0: 100, 5: 50}.get(step, 0) for step in range(100)]
    times = [interval[number % 100] for number in range(980, 980 + steps)]
    assert mean_step(times, 100) == pytest.approx((sum(interval) / 100, 150))
    assert mean_step(times, 10) == (sum(times) / steps, 0)  # a refresh in each turn


def fails(settings):
    yield {"before": 1}
    raise ValueError("planted")


def hangs(settings):
    yield {"before": 2}
    time.sleep(600)


def goes_well(settings):
    yield {"after": 3}


def test_a_part_that_fails_or_hangs_keeps_what_it_found(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    received = parts._receive

    def receive(pipe, record):
        received(pipe, record)
        if record.results == [{"before": 2}]:
            clock.now += 3600  # the part has begun: its time is over

    monkeypatch.setattr(parts, "time", clock)
    monkeypatch.setattr(parts, "_receive", receive)
    made = {"proofs": fails, "resnet50": hangs, "gpt2": goes_well}
    monkeypatch.setattr(trial, "PARTS", {name: Part(run, 10, 0) for name, run in made.items()})
    chosen = ["--parts", "proofs", "resnet50", "gpt2"]
    assert main(["--rehearse", "--out", str(tmp_path), *chosen]) == 1
    kept = recorded(tmp_path)["parts"]
    assert {name: part["state"] for name, part in kept.items()} == {
        "proofs": "failed",
        "resnet50": "cut off",
        "gpt2": "done",
    }
    assert "planted" in kept["proofs"]["error"]
    assert [part["results"] for part in kept.values()] == [
        [{"before": 1}],
        [{"before": 2}],
        [{"after": 3}],
    ]
