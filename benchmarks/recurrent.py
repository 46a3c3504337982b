"""An LSTM's recurrent weights, stepped by Adam or covered by K-FAC, and what covering them costs.

    python -m benchmarks.recurrent [--steps N] [--rates LR ...] [--seeds N ...] [--out FILE]

A network has to say which token it saw eight positions before. ``nn.LSTM`` runs a fused kernel,
which shows none of its steps: K-FAC leaves its weights to Adam. The same LSTM is also unrolled by
hand, with ``F.linear`` on the same parameters, and K-FAC covers those calls by use.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import keep
from kaisa_optim import KFACAdam

TOKENS, WIDTH, LENGTH, DELAY, BATCH = 16, 64, 32, 8, 32
LAST = 20  # steps whose mean loss is told


class Network(nn.Module):
    """An embedding, one LSTM and a head."""

    def __init__(self, unrolled: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.lstm = Cells(lstm) if unrolled else lstm
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.lstm(self.embedding(tokens))[0])


class Cells(nn.Module):
    """The LSTM's parameters and results, with every step as a call of its own."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        for name, parameter in lstm.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        w_in, w_back, b_in, b_back = self.parameters()
        h = c = x.new_zeros(len(x), WIDTH)
        inputs, outputs = F.linear(x, w_in, b_in), []
        for at in range(LENGTH):
            gates = inputs[:, at] + F.linear(h, w_back, b_back)
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return (torch.stack(outputs, 1),)


def train(unrolled: bool, kfac: bool, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """Train one network; return its losses, the share K-FAC covers and the time of a step."""
    torch.manual_seed(seed)
    model = Network(unrolled)
    draws = torch.Generator().manual_seed(1000 + seed)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=lr)
    if kfac:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the base optimizer updates these")
            optimizer = KFACAdam(model, lr=lr)
    losses, seconds = [], []
    for _ in range(steps):
        tokens = torch.randint(TOKENS, (BATCH, LENGTH), generator=draws)
        start = time.perf_counter()
        optimizer.zero_grad()
        logits = model(tokens)[:, DELAY:].flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, :-DELAY].flatten())
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return {
        "optimizer": f"{'KFACAdam' if kfac else 'Adam'}, {'unrolled' if unrolled else 'fused'}",
        "lr": lr,
        "seed": seed,
        "loss": {at: statistics.fmean(losses[at - LAST : at]) for at in range(100, steps + 1, 50)},
        "ms per step": 1e3 * statistics.fmean(seconds[LAST:]),
        "covered": optimizer.preconditioner.coverage().share if kfac else 0.0,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recurrent",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.01])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    runs = []
    each = itertools.product((False, True), (False, True), options.rates, options.seeds)
    for unrolled, kfac, lr, seed in each:
        runs.append(train(unrolled, kfac, lr, seed, options.steps))
        print(runs[-1], flush=True)
        if options.out is not None:
            keep(options.out, steps=options.steps, runs=runs)


if __name__ == "__main__":
    main()
