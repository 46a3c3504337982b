"""Recipes of whole trainings: airbench's, ResNet-20 on CIFAR-10, nanoGPT's, and the demo's."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from benchmarks import airbench, cifar, nanogpt, recipes
from benchmarks.airbench import CONTESTANTS, Network, patches, share

GRIDS = {0.2: [0.1, 0.2, 0.4], 0.8: [0.1, 0.2, 0.4, 0.8, 1.6], 0.05: [0.025, 0.05, 0.1, 0.2, 0.4]}

# ---- airbench ----


def images(count: int = 40) -> torch.Tensor:
    """Return smooth noise: neighbours and colours depend on each other."""
    torch.manual_seed(0)
    noise = F.avg_pool2d(torch.randn(count, 3, 34, 34), 3, 1)
    return 4 * (noise + noise.mean(1, keepdim=True))


def test_the_first_layer_whitens():
    net, some = Network(images(), (8, 8, 8)), images()
    assert not net.whiten.weight.requires_grad and net.whiten.bias.requires_grad
    before = patches(some)
    assert (before.T @ before / len(before) - torch.eye(12)).abs().max() > 1
    out = net.whiten(some).permute(0, 2, 3, 1).flatten(0, 2)
    moments = out[:, :12].T @ out[:, :12] / len(out)
    torch.testing.assert_close(moments, torch.eye(12), rtol=0, atol=0.02)
    torch.testing.assert_close(out[:, 12:], -out[:, :12])


def test_schedules_end_where_they_should():
    rises = [share("SGD", part) for part in (0, 0.23, 1)]
    assert rises == pytest.approx([0.2, 1, 0.07])
    assert [share("Muon", part) for part in (0, 0.5, 1)] == [1, 0.5, 0]


def test_the_rehearsal_writes_rows_with_their_spread(tmp_path):
    out = tmp_path / "air" / "bench.json"
    airbench.main(["--rehearse", "--out", str(out)])
    kept = json.loads(out.read_text())
    assert [row["optimizer"] for row in kept["rows"]] == list(CONTESTANTS)
    for row in kept["rows"]:
        runs = kept["runs"][row["optimizer"]]
        values = [run["accuracy"] for run in runs]
        assert row["n"] == len({run["seed"] for run in runs}) == 2
        assert row["accuracy"] == pytest.approx(sum(values) / 2)
        assert row["σ of accuracy"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
        assert row["seconds"] > 0 and "autocast" in row["differs from the publication"]
        tried = {x["lr"]: x["accuracy"] for x in kept["tries"] if x["name"] == row["optimizer"]}
        assert tried[row["lr"]] == max(tried.values())


# ---- CIFAR-10 ----


class Ends:
    """Runs whose accuracy at the end is given by rate, seed and length."""

    def __init__(self, accuracy):
        self.accuracy, self.asked = accuracy, []

    def get(self, name, lr, seed, length):
        self.asked.append((lr, seed, length))
        end = self.accuracy(lr, seed, length)
        curve = [[100 * i, (10 + seed) * i, end - 0.04 * (length - i)] for i in range(1, length)]
        return {"curve": [*curve, [100 * length, (10 + seed) * length, end]]}


@pytest.mark.parametrize(("peak", "grid"), GRIDS.items())
def test_a_grid_goes_on_until_its_best_rate_is_inside(peak, grid):
    ends = Ends(lambda lr, seed, length: 0.99 - abs(lr - peak))
    assert cifar.row("SGD", 1, ends.get)["lr"] == peak
    assert sorted({lr for lr, _, length in ends.asked if length == 6}) == grid
    assert {(lr, seed) for lr, seed, length in ends.asked if length > 6} == {(peak, 0)}


def test_lengths_are_bisected_by_the_first_seed_and_grow_until_the_mean_is_at_the_target():
    ends = Ends(lambda lr, seed, length: 0.805 + length / 100 - 0.02 * seed - abs(lr - 0.2))
    row = cifar.row("SGD", 2, ends.get)
    assert [length for lr, seed, length in ends.asked if seed == 1] == [10, 12]
    assert (row["lr"], row["epochs"], row["seeds"]) == (0.2, 12, 2)
    assert row["accuracies"] == pytest.approx([0.925, 0.905])
    assert (row["steps"], row["seconds"], row["ms per step"]) == (1200, 126, 105)


@pytest.mark.parametrize("longer", [24, 37])
def test_a_longer_schedule_may_take_half_of_the_best_rate_where_little_is_missing(longer):
    ends = Ends(lambda lr, _, n: 0.92 - (longer - n) / 100 - (lr / 6 if n > 6 else abs(lr - 0.2)))
    row = cifar.row("SGD", 1, ends.get)
    assert (row["lr"], row["epochs"]) == (0.1, longer)
    assert {n for lr, _, n in ends.asked if lr == 0.1} == {6, longer}


def test_a_row_tells_that_no_length_reaches_the_target():
    row = cifar.row("SGD", 2, Ends(lambda lr, seed, length: 0.5 - abs(lr - 0.1)).get)
    assert (row["epochs"], row["steps"], row["seconds"]) == (37, None, None)
    rows = [{"optimizer": "SGD", "steps": 200, "seconds": 50.0}, row]
    assert cifar.with_shares(rows)[1]["of SGD's steps"] is None
    row |= {"steps": 100, "seconds": 20.0}
    assert [cifar.with_shares(rows)[1][f"of SGD's {x}"] for x in ("steps", "seconds")] == [0.5, 0.4]


def test_a_run_is_measured_at_the_ends_of_epochs(monkeypatch):
    monkeypatch.setattr(cifar, "BATCH", 8)
    monkeypatch.setattr(cifar, "DEPTH", 8)
    pairs = torch.randint(256, (20, 3, 32, 32)).byte(), torch.arange(20) % 10
    curve = cifar.train((pairs, pairs), "KFACSGD", 0.1, 0, 3, "float32")
    assert [step for step, _, _ in curve] == [4, 6]  # two whole batches an epoch
    assert all(seconds > 0 and 0 <= share <= 1 for _, seconds, share in curve)


# ---- nanoGPT ----

TEXT = torch.arange(3000) % 65


def test_network_and_rates_are_those_of_the_recipe():
    model = nanogpt.GPT(65)
    counted = sum(p.numel() for p in model.parameters()) - model.places.weight.numel()
    assert counted == 795_904  # nanoGPT prints 0.80M
    assert model.head.weight is model.words.weight
    ends = [p.std().item() for name, p in model.named_parameters() if name.endswith("out.weight")]
    assert all(end == pytest.approx(0.02 / math.sqrt(8), rel=0.05) for end in ends)
    rates = [nanogpt.share_of_rate(step, 2000) for step in (0, 99, 100, 1050, 2000)]
    assert rates == pytest.approx([1 / 101, 100 / 101, 1, 0.55, 0.1])


def test_the_loss_is_of_the_next_character():
    rows = nanogpt.passages(TEXT, 12, nanogpt.LENGTH, torch.Generator().manual_seed(0))
    assert rows.shape == (12, 65) and ((rows[:, 1:] - rows[:, :-1]) % 65 == 1).all()
    torch.manual_seed(0)
    assert nanogpt.measure(nanogpt.GPT(65), rows) == pytest.approx(math.log(65), rel=0.02)


def test_a_command_that_is_started_again_goes_on(tmp_path, capsys):
    path, key = tmp_path / "x_runs.json", {"name": "AdamW", "lr": 0.003, "steps": 50, "seed": 0}
    get = recipes.going_on(recipes.Runs(path), partial(nanogpt.train, TEXT), nanogpt.tell)
    first = get(**key)
    assert nanogpt.last(first) < 1.88 and nanogpt.reached(first)[0] == 50
    assert list(first) == [*key, "curve"] and "lr 0.003," in capsys.readouterr().out
    again = recipes.going_on(recipes.Runs(path), pytest.fail, nanogpt.tell)
    assert nanogpt.last(again(**key)) == nanogpt.last(first)
    assert not capsys.readouterr().out


def test_a_row_has_means_over_seeds_and_the_first_step_at_the_target():
    curves = [[(50, 1.0, 2.0), (100, 2.0, 1.5), (150, 3.0, 1.9), (200, 4.0, 1.0)], []]
    curves[1] = [(step, 2 * seconds, loss + 0.2) for step, seconds, loss in curves[0]]
    runs = [{"name": "x", "lr": 1.0, "steps": 200, "curve": curve} for curve in curves]
    row = nanogpt.row(runs, 30.0)
    assert row["losses"] == [2.1, 1.6, 2.0, 1.1] and row["ms per step"] == 30.0
    assert row["of a step"] == 2.0  # AdamW takes 30 s for 2,000
    assert (row["steps to the target"], row["seconds to the target"]) == (100, 3.0)


# ---- the demo ----


@pytest.fixture
def demo():
    return pytest.importorskip("benchmarks.demo")


def test_shares_are_of_steps_and_of_seconds_to_the_bases_last_loss(demo):
    def run(*losses, pace=1.0):
        times = [pace * step for step in range(len(losses))]
        return demo.Run(losses, times, times)

    base = [run(4.0, 3.0, 2.5, 2.0, 1.0), run(4.0, 3.0, 2.5, 2.0, 2.0)]
    ours = [run(4.0, 1.5, 1.0, pace=2), run(4.0, 1.4, 0.5, pace=2)]
    rows = demo.summary({"Adam": base, "KFACAdam": ours}, {"Adam": 0.01, "KFACAdam": 0.03})
    found = [(row["target"], row["steps"], row["seconds"]) for row in rows]
    assert found == [(1.5, 4, 4), (1.5, 1, 2)]
    assert demo.verdict(rows, "steps").endswith("in 0.25 of its steps")
    assert demo.verdict(rows, "seconds").endswith("in 0.50 of its seconds")


def test_rates_are_those_of_the_kept_search(demo):
    kept = json.loads(demo.RATES.read_text())
    assert kept["steps"] == demo.STEPS
    assert not set(kept["seeds"]) & set(demo.SEEDS)
    for name, losses in kept["losses"].items():
        assert [float(rate) for rate in losses] == list(demo.GRID)
        assert kept["rates"][name] == demo.best(losses)
        assert min(demo.GRID) < kept["rates"][name] < max(demo.GRID)


def test_the_demo_ends_with_a_table_and_a_plot(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "STEPS", {"Adam": 4, "KFACAdam": 2})
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    plot, result = tmp_path / "demo.png", tmp_path / "demo.json"
    demo.main(["--short", "--plot", str(plot), "--json", str(result)])
    torch.set_num_threads(threads)
    assert plot.stat().st_size > 0
    assert [row["optimizer"] for row in json.loads(result.read_text())["rows"]] == list(demo.BUILD)
    assert "of its steps" in (text := capsys.readouterr().out) or "misses" in text
