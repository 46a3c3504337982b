"""WordPiece tokens for BERT: a vocabulary, from a file or learnt from the text, and a stream."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import BertWordPieceTokenizer
from torch import Tensor

from .common import Ranks, seeded

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def files(options: argparse.Namespace) -> list[Path]:
    """Return the text files, from the data folder or from a folder in it."""
    if options.data is None:
        raise SystemExit(f"--data: a folder with {options.text} is needed")
    found = sorted([*options.data.glob(options.text), *options.data.glob(f"*/{options.text}")])
    if not found:
        raise SystemExit(f"--data: neither {options.data} nor a folder in it has {options.text}")
    return found


def lines(options: argparse.Namespace) -> list[str]:
    """Return the paragraphs of the text; words drawn by ``seeded`` for a smoke test."""
    if options.smoke:
        drawn = torch.randint(40, (120, 20), generator=seeded(1)).tolist()
        return [" ".join(f"{chr(97 + n % 20)}{chr(97 + n // 2)}" for n in row) for row in drawn]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files(options))
    return [line.strip() for line in text.splitlines() if line.strip()]


def vocabulary(options: argparse.Namespace, ranks: Ranks) -> Any:
    """Return the tokenizer of --vocab, or of the one in --out, which the first rank learns."""
    kept: Path = options.vocab or options.out / "vocab.txt"
    if options.vocab is None and ranks.rank == 0 and not kept.exists():
        options.out.mkdir(parents=True, exist_ok=True)
        learnt = BertWordPieceTokenizer(lowercase=True)
        learnt.train_from_iterator(
            lines(options), vocab_size=options.words, special_tokens=PIECES, show_progress=False
        )
        learnt.save_model(str(options.out))
    if ranks.world > 1:
        dist.barrier()  # the file is whole
    return BertWordPieceTokenizer(str(kept), lowercase=True)


def stream(tokenizer: Any, options: argparse.Namespace) -> Tensor:
    """Return the whole text as one row of tokens."""
    found = tokenizer.encode_batch(lines(options), add_special_tokens=False)
    return torch.tensor([number for line in found for number in line.ids])
