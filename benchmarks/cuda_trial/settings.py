"""What every part of the trial is told."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Settings(NamedTuple):
    device: str
    rehearse: bool  # in tiny sizes
    only: str = ""  # of a contest's contestants: the base, and those that this pattern finds
    brief: bool = False  # each part's first contest alone, and nobody's steps looked into


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
