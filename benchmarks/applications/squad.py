"""Fine-tuning BERT on questions in SQuAD's format, with exact match and F1.

    python -m benchmarks.applications.squad --data FOLDER --weights phase1/last.pt
        --vocab phase1/vocab.txt [--optimizer KFACAdam]

FOLDER has ``--train-file``; without ``--test-file`` every fifth paragraph of it is held out. The
network must be the one that was pretrained (--width, --layers, --heads, --positions). Long
paragraphs are cut into overlapping pieces; the span with the highest sum of logits in any piece
answers. Exact match and F1 are SQuAD's: over words, without case, punctuation and articles, the
best of a question's answers. ``--preset paper``: BERT-Large, 384 tokens, 32 questions a step.
"""

from __future__ import annotations

import argparse
import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForQuestionAnswering

from benchmarks.data import find

from .arguments import Defaults
from .bert import LARGE, SMALL, TINY, config, of_network, weights
from .common import Job, Order, Ranks, entry, warm_cosine
from .words import lines, vocabulary

DEFAULTS: Defaults = {
    "all": {**SMALL, "length": 192, "batch": 16, "epochs": 6, "every": 50, "save_every": 100},
    # The best rates of AdamW and KFACAdam over 60 steps of a small network.
    "AdamW": {"lr": 1.5e-3, "weight_decay": 0.01},
    "Adam": {"lr": 1.5e-3},
    "KFACAdam": {"lr": 6e-3},
    "KFACAdamW": {"lr": 6e-3, "weight_decay": 0.003},
}
PRESETS: dict[str, Defaults] = {
    "paper": {
        "all": {**LARGE, "length": 384, "positions": 512, "batch": 32, "epochs": 2, "warm": 0.1},
        "AdamW": {"lr": 3e-5},
    }
}
SMOKE: Defaults = {"all": {**TINY, "length": 24, "stride": 4}}
LONGEST = 30  # tokens of an answer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(optimizer="AdamW")
    of_network(parser, warm=0.1)
    parser.add_argument("--positions", type=int, default=512, help="places of the pretrained one")
    parser.add_argument("--stride", type=int, default=64, help="tokens that two pieces share")
    parser.add_argument("--train-file", default="xquad_en.json")
    parser.add_argument("--test-file")


@dataclass(frozen=True)
class Question:
    question: str
    context: str
    answers: tuple[str, ...]
    start: int  # of the first answer, in characters


def read(path: Path) -> list[list[Question]]:
    """Return the questions of each paragraph of a file in SQuAD's format."""
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    return [
        [
            Question(
                qa["question"],
                paragraph["context"],
                tuple(answer["text"] for answer in qa["answers"]),
                qa["answers"][0]["answer_start"],
            )
            for qa in paragraph["qas"]
            if qa["answers"]
        ]
        for article in articles
        for paragraph in article["paragraphs"]
    ]


def generated(options: argparse.Namespace) -> list[list[Question]]:
    """Ask for the word that follows another one."""
    found = []
    for line in lines(options):
        words = line.split()
        start = len(words[0]) + 1
        found.append([Question(words[0], line, (words[1],), start)])
    return found


@dataclass
class Pieces:
    """Questions with pieces of their paragraphs, as rows of tokens."""

    inputs: Tensor  # [3, n, length]: tokens, kinds, mask
    spans: Tensor  # [n, 2]: first and last token of the answer; 0 where the piece lacks it
    owners: list[int]  # the question of each piece
    offsets: list[list[tuple[int, int]]]  # characters of the context by token; (0, 0) for others


def pieces(questions: list[Question], tokenizer: Any, options: argparse.Namespace) -> Pieces:
    tokenizer.enable_truncation(options.length, stride=options.stride, strategy="only_second")
    tokenizer.enable_padding(length=options.length)
    inputs, spans, owners, offsets = [], [], [], []
    for owner, one in enumerate(questions):
        whole = tokenizer.encode(one.question, one.context)
        first, last = one.start, one.start + len(one.answers[0])
        for piece in (whole, *whole.overflowing):
            both = zip(piece.offsets, piece.sequence_ids, strict=True)
            ours = [span if sequence == 1 else (0, 0) for span, sequence in both]
            covered = [i for i, (a, b) in enumerate(ours) if b > first and a < last]
            complete = covered and ours[covered[0]][0] <= first and ours[covered[-1]][1] >= last
            inputs.append([piece.ids, piece.type_ids, piece.attention_mask])
            spans.append([covered[0], covered[-1]] if complete else [0, 0])
            owners.append(owner)
            offsets.append(ours)
    return Pieces(torch.tensor(inputs).transpose(0, 1), torch.tensor(spans), owners, offsets)


class Reader(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.model = BertForQuestionAnswering(config)

    def forward(self, tokens: Tensor, kinds: Tensor, mask: Tensor) -> Tensor:
        """Return the logits of first and last tokens, [2, batch, length]."""
        out = self.model(tokens, token_type_ids=kinds, attention_mask=mask)
        return torch.stack([out.start_logits, out.end_logits]).float()


def normalized(text: str) -> list[str]:
    """Return the words without case, punctuation and articles."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def scores(found: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return exact match and F1, each the best over the answers."""
    best, exact, words = 0.0, 0.0, normalized(found)
    for answer in map(normalized, answers):
        exact = max(exact, float(words == answer))
        common = sum((Counter(words) & Counter(answer)).values())
        if common:
            best = max(best, 2 * common / (len(words) + len(answer)))
        elif not words and not answer:
            best = 1.0
    return exact, best


def answers(net: nn.Module, rows: Pieces, questions: list[Question], device: str) -> list[str]:
    """Return the text of the best span of each question."""
    best: dict[int, tuple[float, str]] = {}
    for places in torch.arange(len(rows.owners)).split(32):
        first, last = net(*rows.inputs[:, places].to(device)).log_softmax(-1).cpu()
        both = first[:, :, None] + last[:, None, :]
        length = both.shape[-1]
        near = torch.ones(length, length).triu().tril(LONGEST - 1).bool()
        for score, place in zip(both.masked_fill(~near, -1e9), places.tolist(), strict=True):
            inside = torch.tensor([b > 0 for _, b in rows.offsets[place]])
            score = score.masked_fill(~(inside[:, None] & inside), -1e9)
            a, b = divmod(int(score.argmax()), length)
            owner, spans = rows.owners[place], rows.offsets[place]
            text = questions[owner].context[spans[a][0] : spans[b][1]]
            best[owner] = max(best.get(owner, (-1e10, "")), (score.max().item(), text))
    return [best[owner][1] for owner in range(len(questions))]


def job(options: argparse.Namespace, ranks: Ranks) -> Job:
    tokenizer = vocabulary(options, ranks)
    if options.smoke:
        paragraphs = generated(options)
    else:
        paragraphs = read(find(options.data, options.train_file))
    if options.test_file:
        tested = read(find(options.data, options.test_file))
    else:
        tested = paragraphs[4::5]
        paragraphs = [one for i, one in enumerate(paragraphs) if i % 5 != 4]
    train, held = ([one for group in groups for one in group] for groups in (paragraphs, tested))
    mine = [held[i] for i in ranks.share(len(held))]
    rows, asked = (pieces(group, tokenizer, options) for group in (train, mine))
    torch.manual_seed(options.seed)
    model = Reader(config(options, tokenizer, max_position_embeddings=options.positions))
    if options.weights is not None:
        kept = weights(options.weights).items()
        body = {n.removeprefix("model.bert."): v for n, v in kept if "model.bert." in n}
        model.model.bert.load_state_dict({n: v for n, v in body.items() if "pooler" not in n})
    order = Order(len(rows.owners), ranks, options)

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _, places in order(step):
            yield rows.inputs[:, places].to(ranks.device), rows.spans[places].to(ranks.device)

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, last = net(*batch[0])
        ends = batch[1].T
        return (F.cross_entropy(first, ends[0]) + F.cross_entropy(last, ends[1])) / 2

    def evaluate(net: nn.Module) -> dict[str, float]:
        found = answers(net, asked, mine, ranks.device)
        pairs = [scores(text, q.answers) for text, q in zip(found, mine, strict=True)]
        total = sum(
            loss(net, (asked.inputs[:, p].to(ranks.device), asked.spans[p].to(ranks.device))).item()
            * len(p)
            for p in torch.arange(len(asked.owners)).split(32)
        )
        exact, f1, count, total, rows_ = ranks.sum(
            sum(e for e, _ in pairs), sum(f for _, f in pairs), len(pairs), total, len(asked.owners)
        )
        return {"loss": total / rows_, "exact": 100 * exact / count, "f1": 100 * f1 / count}

    return Job(model, order.steps, warm_cosine(order.steps, options.warm), batches, loss, evaluate)


main = entry(__doc__, job, DEFAULTS, PRESETS, SMOKE, arguments)

if __name__ == "__main__":
    main()
