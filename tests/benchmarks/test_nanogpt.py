"""The recipe is nanoGPT's, and a command that is started again goes on."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from benchmarks import nanogpt, recipes

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
