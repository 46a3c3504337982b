"""What is asked for, and what is told in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Settings:
    """What was asked for."""

    short: bool
    threads: int
    steps: int
    device: str
    tasks: Sequence[str]
    only: Sequence[str] | None = None  # who is measured; None: all

    def rounds(self, interval: int) -> int:
        """Intervals to measure: of a single one, nobody knows by how much it was disturbed."""
        return max(1 if self.short else 2, self.steps // interval)


class Figure(NamedTuple):
    """A number that stands for many, in plain words around it."""

    before: str
    value: float
    after: str = ""
    wanted: float | None = None  # at most

    def __str__(self) -> str:
        text = f"{self.before}: {self.value:.2f}{self.after}"
        if self.wanted is None:
            return text
        reached = "reached" if self.value <= self.wanted else "missed"
        return f"{text} (at most {self.wanted:.2f} wanted: {reached})"
