"""ResNet-20 on CIFAR-10: rates inside of their grids, and the shortest length to the target."""

from __future__ import annotations

import pytest
import torch

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


def test_a_run_is_measured_at_the_ends_of_epochs(monkeypatch):
    monkeypatch.setattr(cifar, "BATCH", 8)
    monkeypatch.setattr(cifar, "DEPTH", 8)
    pairs = torch.randint(256, (20, 3, 32, 32)).byte(), torch.arange(20) % 10
    curve = cifar.train((pairs, pairs), "KFACSGD", 0.1, 0, 3, "float32")
    assert [step for step, _, _ in curve] == [4, 6]  # two whole batches an epoch
    assert all(seconds > 0 and 0 <= share <= 1 for _, seconds, share in curve)
