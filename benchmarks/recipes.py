"""What recipes of whole trainings share: their arguments, and the file of runs that are done."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Curve = list[tuple[int, float, float]]  # steps, seconds of training, and what was measured


def command_line(command: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser of ``python -m benchmarks.COMMAND``, without arguments."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def arguments(
    about: str | None, data: str, contestants: Iterable[str], seeds: int, out: str
) -> argparse.ArgumentParser:
    """Return a parser of what every recipe is told."""
    parser = command_line(out.removesuffix(".json"), about)
    names = [*contestants]
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {data}")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results") / out)
    return parser


class Runs:
    """Runs that are done, by their keys, in a file: what is started again goes on there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = json.loads(path.read_text()) if path.exists() else {}
        self.listed = isinstance(content, list)  # recipes' runs, which have their keys in them
        self.done: dict[str, Any] = {_name(x): x for x in content} if self.listed else content

    def get(self, key: Any, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the run of this key, which training takes."""
        name = _name(key)
        if name not in self.done:
            self.done[name] = train()
            replace(self.path, [*self.done.values()] if self.listed else self.done)
        return self.done[name]


def _name(key: Any) -> str:
    if isinstance(key, dict):
        key = sorted(pair for pair in key.items() if pair[0] != "curve")
    return json.dumps(key)


def going_on(
    runs: Runs, train: Callable[..., Curve], tell: Callable[[dict[str, Any]], str]
) -> Callable[..., dict[str, Any]]:
    """Return a function of a key that trains what is not done yet, and tells of it."""

    def get(**key: Any) -> dict[str, Any]:
        def trained() -> dict[str, Any]:
            run = {**key, "curve": train(**key)}
            print(*(f"{field} {value}," for field, value in key.items()), tell(run), flush=True)
            return run

        return runs.get(key, trained)

    return get


def best_rate(rates: list[float], loss_at: Callable[[float], float]) -> float:
    """Return the rate of the lowest loss, inside of a grid that goes on at its end if need be."""
    grid = [*rates]
    while True:
        best = min(grid, key=loss_at)
        if best == grid[0]:
            grid.insert(0, float(f"{grid[0] ** 2 / grid[1]:.2g}"))
        elif best == grid[-1]:
            grid.append(float(f"{grid[-1] ** 2 / grid[-2]:.2g}"))
        else:
            return best


def replace(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a file of JSON whole: an interruption leaves the file of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(json.dumps(content, indent=indent) + "\n")
    written.replace(path)
