"""What every part of the trial is told."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch


class Settings(NamedTuple):
    device: str
    rehearse: bool  # in tiny sizes
    data: Path | None
    only: str = ""  # of a contest's contestants: the base, and those that this pattern finds


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
