"""ResNet-20 on CIFAR-10: rates inside of their grids, and the shortest length to the target."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from benchmarks import cifar


class Ends:
    """Runs whose accuracy at the end is given by rate, seed and length."""

    def __init__(self, accuracy):
        self.accuracy, self.asked = accuracy, []

    def get(self, name, lr, seed, length):
        self.asked.append((lr, seed, length))
        end = self.accuracy(lr, seed, length)
        curve = [[100 * i, (10 + seed) * i, end - 0.04 * (length - i)] for i in range(1, length)]
        return {"curve": [*curve, [100 * length, (10 + seed) * length, end]]}


@pytest.mark.parametrize(
    ("peak", "grid"),
    [
        (0.1, [0.05, 0.1, 0.2, 0.4]),
        (0.8, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]),
        (0.025, [0.013, 0.025, 0.05, 0.1, 0.2, 0.4]),
    ],
)
def test_a_grid_goes_on_until_its_best_rate_is_inside(peak, grid):
    ends = Ends(lambda lr, seed, length: 0.99 - abs(lr - peak))
    assert cifar.row("SGD", 1, ends.get)["lr"] == peak
    assert sorted({lr for lr, _, _ in ends.asked}) == grid
    assert {(seed, length) for _, seed, length in ends.asked} == {(0, 6)}


def test_lengths_grow_until_the_mean_of_the_seeds_is_at_the_target():
    ends = Ends(lambda lr, seed, length: 0.79 + length / 100 + 0.06 * seed - abs(lr - 0.1))
    row = cifar.row("SGD", 2, ends.get)
    assert [length for lr, seed, length in ends.asked if seed == 1] == [6, 9]
    assert (row["lr"], row["epochs"], row["seeds"]) == (0.1, 9, 2)
    assert row["accuracies"] == pytest.approx([0.88, 0.94])
    assert (row["steps"], row["seconds"], row["ms per step"]) == (900, 94.5, 105)


def test_a_row_tells_that_no_length_reaches_the_target():
    row = cifar.row("SGD", 2, Ends(lambda lr, seed, length: 0.5 - abs(lr - 0.1)).get)
    assert (row["epochs"], row["steps"], row["seconds"]) == (28, None, None)
    rows = [{"optimizer": "SGD", "steps": 200, "seconds": 50.0}, row]
    cifar.with_shares(rows)
    assert row["of SGD's steps"] is None
    rows[1] |= {"steps": 100, "seconds": 20.0}
    cifar.with_shares(rows)
    assert (row["of SGD's steps"], row["of SGD's seconds"]) == (0.5, 0.4)


class Tiny(nn.Module):
    """Sums of the three channels, as the logits of three classes."""

    def __init__(self, depth):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        assert self.training == torch.is_grad_enabled()
        return self.scale * x.sum((2, 3))


class Still(torch.optim.SGD):
    """Keeps weights, and the rates of its steps."""

    def step(self, closure=None):
        RATES.append([group["lr"] for group in self.param_groups])


RATES: list[list[float]] = []


@pytest.fixture
def tiny(monkeypatch):
    """Ten images of 2 × 2 pixels, the n-th of colour n; two of four test images count as right."""
    RATES.clear()
    build = lambda model, lr: Still(model.parameters(), lr=lr)  # noqa: E731
    monkeypatch.setattr(cifar, "CifarResNet", Tiny)
    monkeypatch.setattr(cifar, "BATCH", 5)
    monkeypatch.setattr(cifar, "normalized", lambda images: images.float())
    monkeypatch.setitem(cifar.CONTESTANTS, "SGD", (build, [0.1, 0.2, 0.4]))
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).repeat(1, 3, 2, 2)
    held = torch.eye(3)[[0, 1, 2, 2]].view(4, 3, 1, 1).repeat(1, 1, 2, 2)
    return (images, torch.zeros(10, dtype=torch.int64)), (held, torch.tensor([0, 1, 0, 1]))


def test_an_epoch_has_all_images_once_and_the_rate_falls_to_zero(tiny, monkeypatch):
    batches = []
    keep = lambda images, drawn: batches.append(images[:, 0, 0, 0].tolist()) or images  # noqa: E731
    monkeypatch.setattr(cifar, "augmented", keep)
    curve = cifar.train(tiny, "SGD", 0.4, 0, 5, "float32")
    orders = [batches[i] + batches[i + 1] for i in range(0, 10, 2)]
    assert all(sorted(order) == list(range(10)) for order in orders) and orders[0] != orders[1]
    rates = [rate for (rate,) in RATES]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.4]) and rates[6] == pytest.approx(0.2)
    assert 0 < rates[-1] < 0.02
    # Epochs 2, 3, 4 and 5; seconds are of training alone.
    assert [step for step, _, _ in curve] == [4, 6, 8, 10]
    assert [accuracy for _, _, accuracy in curve] == [0.5] * 4


def test_done_runs_are_not_trained_again_and_rows_of_others_stay(tmp_path, tiny, monkeypatch):
    out, trained = tmp_path / "x.json", []

    def train(data, name, lr, seed, length, forward):
        trained.append((name, lr, seed, length))
        return [(2, 1.0, 0.95 - abs(lr - cifar.CONTESTANTS[name][1][1]))]

    def call(*names):
        given = ["cifar", "--data", "x", "--out", str(out), "--only", *names]
        monkeypatch.setattr(sys, "argv", given)
        cifar.main()
        return [row["optimizer"] for row in json.loads(out.read_text())["rows"]]

    monkeypatch.setattr(cifar, "cifar10", lambda folder: tiny)
    monkeypatch.setattr(cifar, "train", train)
    assert call("SGD") == ["SGD"]
    assert len(trained) == len(set(trained)) == 4  # three rates, and the best one's other seed
    assert call("AdamW", "SGD") == ["AdamW", "SGD"]
    assert len(trained) == len(set(trained)) == 9
    assert call("SGD") == ["AdamW", "SGD"] and len(trained) == 9
