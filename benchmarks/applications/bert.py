"""BERT's masked words and next sentences, in two phases: passages of 128 tokens, then of 512.

    python -m benchmarks.applications.bert --data FOLDER [--optimizer KFACLAMB] --out phase1
    python -m benchmarks.applications.bert --data FOLDER --length 512 --weights phase1/last.pt ...
    torchrun --standalone --nproc-per-node 8 -m benchmarks.applications.bert --preset paper ...

FOLDER has text files; ``--text`` is their pattern. ``--vocab`` names a vocab.txt of BERT's; without
it one of ``--words`` pieces is learnt from the text and kept in ``--out``. A passage's second half
follows the first one, or comes from elsewhere in the text, in equal shares. LAMB uses apex kernels
where apex is installed. ``--preset paper``: BERT-Large, phase 1 with 65,536 passages a step over
all ranks; ``--preset paper-512``: phase 2 with 32,768. Set --batch and --accumulate to these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForPreTraining

from .arguments import Defaults, kaisa, with_ends
from .common import Job, Ranks, draws, entry, seeded, warm_cosine
from .words import stream, vocabulary

SMALL = {"width": 128, "layers": 4, "heads": 4, "length": 128, "words": 4000}
LARGE = {"width": 1024, "layers": 24, "heads": 16, "words": 30522}
DEFAULTS: Defaults = {
    "all": {**SMALL, "batch": 16, "accumulate": 2, "steps": 400, "every": 50, "save_every": 100},
    # The rates that the convergence benchmark found best for a small BERT on masked characters.
    "LAMB": {"lr": 0.039, "ends_lr": 0.0072},
    "KFACLAMB": {"lr": 0.0059, "ends_lr": 0.038},
    "AdamW": {"lr": 0.003, "weight_decay": 0.01},
    "KFACAdamW": {"lr": 0.01, "weight_decay": 0.003},
}
# Phase 1 and phase 2 as NVIDIA's recipe for LAMB has them, which KAISA's experiments started from.
_KFAC = kaisa(0.003, 10, 100)
PRESETS: dict[str, Defaults] = {
    "paper": {
        "all": {**LARGE, "length": 128, "steps": 7038, "warm": 0.2843, "amp": "fp16"},
        "LAMB": {"lr": 6e-3, "ends_lr": None},
        "KFACLAMB": {"lr": 6e-3, "ends_lr": None, **_KFAC},
    },
    "paper-512": {
        "all": {**LARGE, "length": 512, "steps": 1563, "warm": 0.128, "amp": "fp16"},
        "LAMB": {"lr": 4e-3, "ends_lr": None},
        "KFACLAMB": {"lr": 4e-3, "ends_lr": None, **_KFAC},
    },
}
SMOKE: Defaults = {
    "all": {
        **{"width": 32, "layers": 1, "heads": 2, "words": 200, "length": 32},
        **{"batch": 4, "steps": 4, "every": 2, "save_every": 2},
    }
}
IGNORED = -100  # cross_entropy's own sign for a token outside of the loss
HELD = 8  # batches that the loss is measured on


def config(options: argparse.Namespace, tokenizer: Any) -> BertConfig:
    """Return the network's sizes; the vocabulary is rounded up to a multiple of 8."""
    return BertConfig(
        vocab_size=-(-tokenizer.get_vocab_size() // 8) * 8,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=4 * options.width,
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(optimizer="LAMB")
    for name, number in SMALL.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--warm", type=float, default=0.05, help="share of steps that warm up")
    parser.add_argument("--vocab", type=Path, help="vocab.txt of BERT's, or of the run before")
    parser.add_argument("--weights", type=Path, help="checkpoint of the run before")
    parser.add_argument("--ends-lr", type=float, help="of embeddings, heads, norms and biases")
    parser.add_argument("--text", default="wikitext*.txt", help="pattern of the text files")


class Pretraining(nn.Module):
    """The losses of masked tokens and of next sentences; logits of masked tokens alone."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.model = BertForPreTraining(config)

    def forward(self, tokens: Tensor, kinds: Tensor, labels: Tensor, follows: Tensor) -> Tensor:
        """Return the two losses and the share of masked tokens that are found, [3]."""
        hidden, pooled = self.model.bert(tokens, token_type_ids=kinds)[:2]
        chosen = labels != IGNORED
        words = self.model.cls.predictions(hidden[chosen]).float()
        order = self.model.cls.seq_relationship(pooled).float()
        right = (words.argmax(1) == labels[chosen]).float().mean()
        return torch.stack(
            [F.cross_entropy(words, labels[chosen]), F.cross_entropy(order, follows), right]
        )


Example = tuple[Tensor, Tensor, Tensor, Tensor]  # tokens, kinds, labels, follows


@dataclass(frozen=True)
class Passages:
    """Draws examples of one length from a row of tokens."""

    data: Tensor
    tokenizer: Any
    length: int

    def __call__(self, count: int, own: torch.Generator) -> Example:
        """Return ``count`` rows with 15 % masked: 80 % hidden, 10 % replaced, 10 % kept."""
        first = (self.length - 3) // 2
        second = self.length - 3 - first
        starts = torch.randint(len(self.data) - first - second, (2, count, 1), generator=own)
        follows = torch.rand(count, generator=own) < 0.5
        others = torch.where(follows[:, None], starts[0] + first, starts[1])
        one, two = (
            self.data[s + torch.arange(n)] for s, n in ((starts[0], first), (others, second))
        )
        number = self.tokenizer.token_to_id
        cls, sep = (torch.full((count, 1), number(piece)) for piece in ("[CLS]", "[SEP]"))
        rows = torch.cat([cls, one, sep, two, sep], 1)
        kinds = (torch.arange(self.length) > first + 1).long().expand_as(rows)
        chosen = torch.rand(rows.shape, generator=own) < 0.15
        chosen[:, 1] = True  # at least one in each passage
        chosen[:, [0, first + 1, -1]] = False  # [CLS] and [SEP]
        way = torch.rand(rows.shape, generator=own)
        drawn = torch.randint(self.tokenizer.get_vocab_size(), rows.shape, generator=own)
        shown = torch.where(way < 0.8, number("[MASK]"), torch.where(way < 0.9, drawn, rows))
        labels = torch.where(chosen, rows, IGNORED)
        return torch.where(chosen, shown, rows), kinds, labels, (~follows).long()


def job(options: argparse.Namespace, ranks: Ranks) -> Job:
    tokenizer = vocabulary(options, ranks)
    data = stream(tokenizer, options)
    cut = len(data) * 9 // 10
    train, held = (Passages(part, tokenizer, options.length) for part in (data[:cut], data[cut:]))
    torch.manual_seed(options.seed)
    model = Pretraining(config(options, tokenizer))
    if options.weights is not None:
        kept = torch.load(options.weights, weights_only=True, map_location="cpu")
        model.load_state_dict(kept["model"])
    fixed = held(HELD * options.batch, seeded(0))

    def batches(step: int) -> Iterator[Example]:
        for own in draws(options, ranks, step):
            drawn = train(options.batch, own)
            yield tuple(part.to(ranks.device) for part in drawn)  # type: ignore[misc]

    def evaluate(net: nn.Module) -> dict[str, float]:
        mine = [part[list(ranks.share(len(part)))].to(ranks.device) for part in fixed]
        sums = torch.zeros(3)
        for batch in zip(*(part.split(16) for part in mine), strict=True):
            sums += len(batch[0]) * net(*batch).cpu()
        words, order, right = ranks.means(sums.tolist(), len(mine[0]))
        return {"loss": words + order, "masked": words, "next": order, "accuracy": right}

    return Job(
        model,
        options.steps,
        warm_cosine(options.steps, options.warm),
        batches,
        lambda net, batch: net(*batch)[:2].sum(),
        evaluate,
        terms=lambda batch: int((batch[2] != IGNORED).sum()),
        groups=with_ends(model, model.model.bert.encoder, options),
    )


main = entry(__doc__, job, DEFAULTS, PRESETS, SMOKE, arguments)

if __name__ == "__main__":
    main()
