"""Tables, amounts of memory and times as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *numbers in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def shown(size: float) -> str:
    """Return bytes as people write them: ``"1.23 GB"``."""
    for unit, bytes_of_unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= 0.9995 * bytes_of_unit:
            return f"{digits(size / bytes_of_unit)} {unit}"
    return f"{size:.0f} byte{'s' * (round(size) != 1)}"


def milliseconds(seconds: float) -> str:
    return digits(1e3 * seconds)


def digits(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 99.95 else f"{number:.3g}"
