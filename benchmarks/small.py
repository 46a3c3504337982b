"""What K-FAC adds to the steps of a small network, where the host takes longer than the products.

    python -m benchmarks.small [--rounds N] [--out FILE]

The network is transformers' BERT with two layers of width 64; a batch has 8 sequences of 32 tokens.
KFACSGD and KFACAdam take turns of ten steps with their bases, on one thread, in time of the CPU.
"10/20" are all steps at these default intervals; "quiet" steps only precondition.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from transformers import BertConfig, BertForMaskedLM

from benchmarks.machine import keep
from kaisa_optim import KFACSGD, KFACAdam

TURN = 10  # steps of one optimizer before the next one's
WARM_UP = 6  # turns that do not count: steps up to the 50th refresh everything
NEVER = 10**9  # steps
SIZES: dict[str, Any] = {
    **{"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 256},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
}
STAGES = "forward", "backward", "step"
MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
    "KFACSGD": lambda model: KFACSGD(model, lr=0.01, momentum=0.9),
    "Adam": lambda model: Adam(model.parameters(), lr=1e-3),
    "KFACAdam": lambda model: KFACAdam(model, lr=1e-3),
}
BASES = {"KFACSGD": "SGD", "KFACAdam": "Adam"}
Times = list[tuple[float, ...]]  # ms of the stages of each step


class Trainer:
    def __init__(self, make: Callable[[nn.Module], Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = BertForMaskedLM(BertConfig(**SIZES))
        self.optimizer = make(self.model)
        self.words = torch.randint(1000, (8, 32))

    def run(self, steps: int) -> Times:
        found = []
        for _ in range(steps):
            marks = [time.process_time()]
            self.optimizer.zero_grad()
            loss = self.model(input_ids=self.words, labels=self.words).loss
            marks.append(time.process_time())
            loss.backward()
            marks.append(time.process_time())
            self.optimizer.step()
            marks.append(time.process_time())
            found.append(tuple(1e3 * (b - a) for a, b in itertools.pairwise(marks)))
        return found

    def be_quiet(self) -> None:
        """Let all further steps only precondition."""
        if isinstance(self.optimizer, KFACSGD | KFACAdam):
            kfac = self.optimizer.preconditioner
            kfac.factor_update_steps = kfac.inv_update_steps = NEVER
        self.run(2)


def race(trainers: Mapping[str, Trainer], rounds: int) -> dict[str, list[Times]]:
    found: dict[str, list[Times]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            found[name].append(trainer.run(TURN))
    return found


def summary(found: Mapping[str, list[Times]], average: Callable[[Any], float]) -> dict[str, Any]:
    """Return the average step of each optimizer, its stages, and its ratio to its base."""
    result: dict[str, Any] = {}
    turns = {name: [average(list(map(sum, turn))) for turn in own] for name, own in found.items()}
    for name, own in turns.items():
        stages = zip(STAGES, zip(*itertools.chain(*found[name]), strict=True), strict=True)
        result[name] = {"ms": statistics.median(own)} | {name: average(x) for name, x in stages}
        if name in BASES:
            pairs = zip(own, turns[BASES[name]], strict=True)
            result[name]["ratio"] = statistics.median(mine / base for mine, base in pairs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each optimizer")
    parser.add_argument("--out", type=Path, help="where to keep the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainers = {name: Trainer(make) for name, make in MAKERS.items()}
    race(trainers, WARM_UP)
    results = {"10/20": summary(race(trainers, options.rounds), statistics.fmean)}
    for trainer in trainers.values():
        trainer.be_quiet()
    results["quiet"] = summary(race(trainers, options.rounds), statistics.median)
    for title, of_all in results.items():
        print(title)
        for name, figures in of_all.items():
            print(f"  {name:9}", *(f"{key} {value:.2f}" for key, value in figures.items()))
    if options.out is not None:
        keep(options.out, threads=1, results=results)


if __name__ == "__main__":
    main()
