"""A GPT on the characters of a text, with the loss on its last tenth.

    python -m benchmarks.applications.gpt --data FOLDER [--optimizer KFACAdam]
    torchrun --standalone --nproc-per-node 4 -m benchmarks.applications.gpt --data FOLDER ...

FOLDER has ``shakespeare.txt``, or ``--text`` names another file in it. Embeddings, norms and biases
may have a rate of their own, ``--ends-lr``; Muon steps them as AdamW does. The rates are those that
the convergence benchmark found best for 300 steps of this network. No paper of K-FAC trained a GPT,
so that there is no preset.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import data as sets
from benchmarks.networks import Transformer

from .arguments import Defaults, tell_terms, with_ends
from .common import Job, Ranks, draws, entry, seeded, warm_cosine

DEFAULTS: Defaults = {
    "all": {"batch": 32, "steps": 300, "every": 15, "save_every": 100},
    "AdamW": {"lr": 0.0067, "ends_lr": 0.024, "weight_decay": 0.0},
    "KFACAdam": {"lr": 0.1},
    "KFACAdamW": {"lr": 0.1, "weight_decay": 0.0},
    "Muon": {"lr": 0.028, "ends_lr": 0.041, "momentum": 0.9, "weight_decay": 0.0},
}
SMOKE: Defaults = {
    "all": {"batch": 4, "length": 16, "width": 16, "layers": 1, "steps": 4, "every": 2},
}
HELD = 8  # batches that the loss is measured on


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(optimizer="AdamW")
    parser.add_argument("--text", default="shakespeare.txt", help="file in the data folder")
    parser.add_argument("--length", type=int, default=64, help="characters in an example")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ends-lr", type=float, help="of embeddings, last layer, norms, biases")


def text(options: argparse.Namespace) -> tuple[Tensor, int]:
    """Return the text as numbers of characters, and how many different ones there are."""
    if options.smoke:
        return torch.arange(2000) % 7, 7
    return sets.characters(options.data, options.text)


def passages(data: Tensor, count: int, length: int, own: torch.Generator) -> Tensor:
    """Return ``count`` passages with one character more than ``length``."""
    starts = torch.randint(len(data) - length, (count, 1), generator=own)
    return data[starts + torch.arange(length + 1)]


def next_character(net: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(net(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())


def job(options: argparse.Namespace, ranks: Ranks) -> Job:
    data, alphabet = text(options)
    cut = len(data) * 9 // 10
    train, held = data[:cut], data[cut:]
    torch.manual_seed(options.seed)
    heads = max(1, options.width // 32)
    model = Transformer(
        alphabet, options.length, options.width, options.layers, heads, 4 * options.width
    )
    tell_terms(options, "positions")  # the loss averages over all tokens
    fixed = passages(held, HELD * options.batch, options.length, seeded(0))

    def batches(step: int) -> Iterator[Tensor]:
        for own in draws(options, ranks, step):
            yield passages(train, options.batch, options.length, own).to(ranks.device)

    def evaluate(net: nn.Module) -> dict[str, float]:
        mine = fixed[list(ranks.share(len(fixed)))].to(ranks.device)
        loss = sum(next_character(net, rows).item() * len(rows) for rows in mine.split(64))
        return {"loss": ranks.means([loss], len(mine))[0]}

    groups = with_ends(model, model.blocks, options)
    rate = warm_cosine(options.steps)
    return Job(model, options.steps, rate, batches, next_character, evaluate, groups=groups)


main = entry(__doc__, job, DEFAULTS, {}, SMOKE, arguments)

if __name__ == "__main__":
    main()
