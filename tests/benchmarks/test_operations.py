"""What the host does in a step stays as little as it was, and as a bare loop needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import operations

KNOWN = json.loads(Path("benchmarks/results/operations.json").read_text())["results"]
MORE = 1.05  # counts may grow by so much


@pytest.mark.parametrize(("network", "optimizer"), operations.ROWS)
def test_counts_do_not_grow(network, optimizer):
    """Counts of a step, its functions, calls and files; operations of the passes."""
    known = KNOWN[f"{network}, {optimizer}"]
    found = operations.counted(network, optimizer, 20)
    above = {name: (n, known[name]) for name, n in found.items() if n > MORE * known[name]}
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


def test_functions_of_the_package_alone_are_visited():
    from kaisa_optim import KFACSGD

    model = nn.Linear(2, 2)
    visited = operations.Visited()
    with visited.watched():
        torch.relu(torch.ones(2))
        opt = KFACSGD(model, lr=0.1)
    functions, calls, files = visited.numbers()
    assert 0 < files < functions < calls
    assert all(file.startswith(operations.HOUSE) for file, _ in visited.functions)
    assert opt is not None


@pytest.mark.parametrize(("network", "optimizer"), operations.ROWS)
def test_the_bare_loop_is_as_it_was_counted(network, optimizer):
    known = KNOWN[f"{network}, {optimizer}"]
    assert operations.bare(network, optimizer, 20) == pytest.approx(known["bare step"])


def test_a_bare_loop_takes_fewer_operations():
    known = {f"{network}, {ours}": KNOWN[f"{network}, {ours}"] for network, ours in operations.ROWS}
    assert all(0.75 < row["bare step"] / row["step"] < 1 for row in known.values())
