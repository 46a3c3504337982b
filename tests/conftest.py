"""What holds for every test, and the end of a test session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

# The same cases in every run, however slow the machine.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
# With a planted fault: to look for the smallest case that fails takes minutes.
settings.register_profile("faults", phases=[Phase.explicit, Phase.generate])

# Files and folders that are a maintainer's as a whole; single tests have the marker themselves.
MAINTAINERS = [Path(__file__).parent / x for x in ("benchmarks", "capture/test_programs.py")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests make their tensors: cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":
        torch.set_default_device(config.getoption("--device"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not {item.path, *item.path.parents}.isdisjoint(MAINTAINERS):
            item.add_marker("maintainer")


def pytest_sessionfinish() -> None:
    # Before the coverage of this process's ranks is combined, they must have written it.
    if "tests.support.ranks" in sys.modules:
        sys.modules["tests.support.ranks"].end_all()
