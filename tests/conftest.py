"""The end of a test session."""

from __future__ import annotations

import sys


def pytest_sessionfinish() -> None:
    # Before the coverage of this process's ranks is combined, they must have written it.
    if "ranks" in sys.modules:
        sys.modules["ranks"].end_all()
