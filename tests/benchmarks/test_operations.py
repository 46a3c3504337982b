"""What the host does in a step stays as little as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import operations

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
