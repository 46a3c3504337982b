"""Times and operations of steps: what is trained and compared, and the CUDA trial, rehearsed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import operations
from benchmarks.cuda_trial import __main__ as trial
from benchmarks.cuda_trial import parts
from benchmarks.cuda_trial.__main__ import PARTS, main
from benchmarks.cuda_trial.parts import Part
from benchmarks.cuda_trial.steps import mean_step
from benchmarks.networks import Bert, ResNet
from benchmarks.step_time import __main__ as benchmark
from benchmarks.step_time import steps
from benchmarks.step_time.apart import Apart
from benchmarks.step_time.contestants import OURS, TURN, Trainer, ours
from benchmarks.step_time.tasks import DEFAULT, SHORT, Task


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_resnet50_is_the_published_one():
    with torch.device("meta"):
        network = ResNet()
        out = network(torch.empty(2, 3, 224, 224))
        pixels = [56] * 3 + [28] * 4 + [14] * 6 + [7] * 3
        x = torch.empty(2, 64, 56, 56)
        for block, size in zip(network.blocks, pixels, strict=True):
            x = block(x)
            assert x.shape[2:] == (size, size)
    assert parameters(network) == 25_557_032
    assert out.shape == (2, 1000)


def test_bert_large_is_the_published_one():
    with torch.device("meta"):
        network = Bert()
        out = network(torch.empty(2, 128, dtype=torch.long))
    assert parameters(network) == 335_174_458  # the published model for masked words
    assert out.shape == (2, len(range(0, 128, Bert.EVERY)), 30522)


def fail(trainer: Trainer) -> None:
    raise ValueError(trainer.task.title)


def end(trainer: Trainer) -> None:
    os._exit(7)


def test_a_contestant_trains_in_a_process_of_its_own():
    with contextlib.closing(Apart("resnet32", True, "KFACSGD", "cpu", (2, 4), 1)) as apart:
        here = Trainer(SHORT["resnet32"], "cpu", ours(), (2, 4))
        assert len(apart.run(3)) == len(here.run(3)) == 3
        assert apart(steps.preconditioning) == steps.preconditioning(here)
        with pytest.raises(RuntimeError, match=r"in fail\n[^$]*ValueError: ResNet-8"):
            apart(fail)
        assert apart(Trainer.operations) == here.operations()  # it goes on
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ended with code 7"):
                apart(end)


@pytest.mark.parametrize("name", OURS)
def test_steps_are_timed_as_if_training_had_begun_long_ago(name):
    """In 100 steps each layer gathers ten times, and is refreshed in one turn of them."""

    def batch():
        return torch.randn(4, 3), torch.randint(2, (4,))

    task = Task("a line", lambda: nn.Linear(3, 2), batch, {})
    trainer = Trainer(task, "cpu", OURS[name], DEFAULT)
    trainer.run(3)  # as the trial on a GPU does before its turns
    kfac = trainer.optimizers[0].preconditioner
    gathered, refreshed = [], []
    for step in range(100):
        trainer.run(1)
        gathered += [step] * len(kfac.work.average)
        refreshed += [step] * len(kfac.work.refresh)
    assert len(gathered) == 10 and len(refreshed) == 1
    assert refreshed[0] // TURN == 2 and refreshed[0] in gathered


KNOWN = json.loads(Path("benchmarks/results/operations.json").read_text())["results"]
MORE = 1.05  # counts may grow by so much


@pytest.mark.parametrize(("network", "optimizer"), operations.ROWS)
def test_counts_do_not_grow(network, optimizer):
    """Counts of first, quiet, gathering and mean steps: operations, functions, files and calls."""
    known = KNOWN[f"{network}, {optimizer}"]
    found = operations.counted(network, optimizer)
    assert found.keys() == known.keys()
    above = {
        (kind, name): (n, known[kind][name])
        for kind, row in found.items()
        for name, n in row.items()
        if name != "steps" and n > MORE * known[kind][name]
    }
    assert not above


def test_views_allocations_and_counters_are_no_operations():
    x = torch.zeros(3, 4)
    counters = [torch.tensor(1.0) for _ in range(3)]
    with operations.Operations() as seen:
        torch.empty(3).new_empty(2)
        x.mT.flatten()[:2].detach()  # flatten copies
        torch._foreach_add_(counters, 1)
        counters[0].add_(1).item()
        x.sum().item()  # reads a number of the network: a float like a counter, on the CPU
        torch.relu(x)
    assert dict(seen.found) == {"clone": 1, "sum": 1, "relu": 1}


def test_results_are_kept_where_they_are_asked_for(tmp_path, monkeypatch, capsys):
    def measure(task, names, intervals, settings):
        return [steps.Measured(name, 1.0, 1.0, 0.0, peak_mb=0.0) for name in names]

    monkeypatch.setattr(steps, "measure", measure)  # which takes no time
    monkeypatch.setattr(steps, "add_peaks", lambda results, peak_of, times: None)
    monkeypatch.chdir(tmp_path)
    shortly = ["--short", "--threads", "1", "--tasks", "transformer"]
    benchmark.main([*shortly, "--out", "kept"])
    shown = capsys.readouterr().out
    stem = "step_time_steps_cpu_transformer_short"
    names = [f"{stem}.{kind}" for kind in ("json", "png")]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == names
    record = json.loads((tmp_path / "kept" / f"{stem}.json").read_text())
    assert record["machine"]["torch"] == torch.__version__
    assert record["settings"]["short"] and record["settings"]["threads"] == 1
    assert record["summary"] and all(f"  {line}\n" in shown for line in record["summary"])
    assert "wanted" not in "".join(record["summary"])
    benchmark.main(shortly)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def recorded(folder):
    return json.loads((folder / "cuda_trial_rehearsal.json").read_text())


@pytest.mark.parametrize("name", sorted(PARTS.keys() - {"bert-large"}))
def test_each_part_rehearses(tmp_path, name):
    """BERT-Large is timed as ResNet-50 is, and its rehearsal takes as long as all others."""
    assert main(["--rehearse", "--out", str(tmp_path), "--parts", name]) == 0
    part = recorded(tmp_path)["parts"][name]
    assert part["state"] == "done" and part["results"]
    if name == "proofs":
        _, exactness = part["results"]
        assert exactness["code"] == 0 and " passed" in exactness["said"]


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
    assert {name: (part["state"], part["results"]) for name, part in kept.items()} == {
        "proofs": ("failed", [{"before": 1}]),
        "resnet50": ("cut off", [{"before": 2}]),
        "gpt2": ("done", [{"after": 3}]),
    }
    assert "planted" in kept["proofs"]["error"]
