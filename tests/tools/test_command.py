"""The console script without its libraries."""

from __future__ import annotations

import importlib
import sys

import pytest

from kaisa_optim.tools import command


def lacking(name):
    def import_module(asked):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    return import_module


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_a_missing_extra_is_named(monkeypatch, capsys, name):
    monkeypatch.setattr(importlib, "import_module", lacking(name))
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert f"kaisa needs {name}: pip install 'kaisa_optim[tools]'" in capsys.readouterr().err


def test_another_missing_module_is_no_missing_extra(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lacking("torch"))
    with pytest.raises(ModuleNotFoundError, match="torch"):
        command.main()


def test_plans_need_no_extra():
    """From Python, neither typer nor rich nor matplotlib is imported."""
    import subprocess

    code = (
        "import kaisa_optim.tools, sys; print({'typer', 'rich', 'matplotlib'} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"
