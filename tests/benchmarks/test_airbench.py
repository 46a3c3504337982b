"""The recipe of airbench94: its parts as published, and a rehearsal in tiny sizes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional as F

from benchmarks import airbench
from benchmarks.airbench import CONTESTANTS, Network, patches, share


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
