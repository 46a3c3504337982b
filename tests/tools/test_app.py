"""The command line: tables, JSON, pictures, and exit codes for scripts."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from kaisa_optim.tools import app, calibration, command, hardware, plan
from tests.tools.test_prices import PLAIN

HERE = "tests.tools.test_app"
NET = f"{HERE}:net"
runner = CliRunner()


def net(width=8):
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    return model, torch.zeros(10, 6)


def alone():
    return nn.Linear(3, 2)


class Chatty(nn.Linear):
    def forward(self, x):
        print("a pass")
        return super().forward(x)


def nothing():
    return "a model"


def chatty():
    print("a factory")
    return Chatty(6, 3), torch.zeros(10, 6)


def failing(how):
    if how == "exit":
        sys.exit(1)
    raise getattr(builtins, how)("a factory's own fault")


def kaisa(*arguments):
    return runner.invoke(app.app, [*map(str, arguments)], env={"COLUMNS": "200"})


def test_a_plan_is_a_table():
    told = kaisa("plan", NET, "--ranks", 4, "--memory", "1GB", "--arg", "width=16")
    assert told.exit_code == 0, told.output
    with torch.device("meta"):
        model, batch = net(16)
    found = plan(model, 4, "1GB", batch=batch)
    for cells in found.cells():
        assert any(all(cell in line for cell in cells) for line in told.output.splitlines()), cells
    assert " ".join(found.reason.split()) in " ".join(told.output.split())
    assert "activations" in told.output


def test_the_plan_in_the_readme_is_what_the_command_prints():
    pytest.importorskip("transformers")
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    asked, shown = re.search(r"^\$ kaisa (plan .*)\n((?:.+\n)+?)```", readme, flags=re.M).groups()
    printed = [line.split() for line in kaisa(*asked.split()).output.splitlines()]
    for line in shown.splitlines():
        assert line.split() in printed, line


def test_nothing_fits_and_scripts_hear_of_it(tmp_path):
    path = tmp_path / "plan.png"
    told = kaisa("plan", NET, "--ranks", 2, "--memory", "1k", "--plot", path)
    assert told.exit_code == app.NOTHING_FITS == 1
    assert "no strategy fits into 1 kB" in told.output
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("net", "--ranks", 2), "'net'; it must be package.module:factory"),
        (("no_module:x", "--ranks", 2), "no_module:x' can't be imported"),
        ((f"{HERE}:missing", "--ranks", 2), f"'missing'; see python -c 'import {HERE}'"),
        ((f"{HERE}:nothing", "--ranks", 2), "returned str; it must return a module"),
        ((NET, "--ranks", 2, "--arg", "depth=3"), "keyword argument 'depth'; give its arguments"),
        ((NET, "--ranks", 2, "--arg", "a b=1"), "Invalid argument: 'a b=1'; it must be name=value"),
        ((NET, "--ranks", 2, "--device", "abacus"), "Invalid device: 'abacus'"),
        ((NET, "--ranks", 2, "--memory", "lots"), "Invalid memory_budget: 'lots'"),
        ((NET, "--ranks", 2, "--optimizer", "Magic"), "no optimizer 'Magic'; choose from KFACAdam"),
        ((NET, "--ranks", 5, "--option", "grad_worker_fraction=0.3"), "does not divide 5"),
        ((NET, "--ranks", 2, "--option", "dampng=1"), "unexpected keyword argument 'dampng'"),
        ((NET, "--ranks", 2, "--device", "[a-z]*"), "Invalid device: '[a-z]*'"),
        ((NET, "--ranks", 2, "--device", "[/tag]:x:"), "Invalid device: '[/tag]:x:'"),
        ((NET, "--ranks", 2, "--plot", "no/such/folder.png"), "No such file or directory"),
    ],
)
def test_faults_are_one_line_and_exit_with_2(arguments, said):
    told = kaisa("plan", *arguments)
    assert told.exit_code == app.WRONG == 2
    assert said in told.output and "Traceback" not in told.output


@pytest.mark.parametrize("how", ["RuntimeError", "ValueError", "TypeError", "OSError", "exit"])
@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_a_failing_factory_does_not_look_as_if_nothing_fits(name, how):
    told = kaisa(name, f"{HERE}:failing", "--ranks", 2, "--arg", f"how={how}")
    assert told.exit_code == app.FAILED == 3
    assert "Traceback" in told.stderr and "in failing" in told.stderr


def test_printing_does_not_break_json():
    for name, *how in (("plan", "--ranks", 2), ("profile", "--steps", 1)):
        told = kaisa(name, f"{HERE}:chatty", *how, "--json")
        assert json.loads(told.stdout)["optimizer"] == "KFACAdam", told.output
        assert "a factory" in told.stderr and "a pass" in told.stderr


def test_all_numbers_as_json_and_dtypes_as_options():
    sizes = []
    for name in ("float32", "bfloat16"):
        option = "--option", f"inv_dtype=torch.{name}"
        told = kaisa("plan", NET, "--ranks", 2, "--json", "--optimizer", "RMSprop", *option)
        assert told.exit_code == 0, told.output
        values = json.loads(told.stdout)
        sizes.append(values["strategies"][0]["kfac"]["mean"])
    assert sizes[1] < sizes[0]
    assert values["optimizer"] == "KFACRMSprop" and values["ranks"] == 2
    assert [one["strategy"] for one in values["strategies"]] == ["layer-wise", "opt"]


def test_a_terminal_without_unicode_shows_plans(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(hardware.text(PLAIN | {"title": "Grüße"}, "mine"), "utf-8")
    arguments = "plan", NET, "--ranks", "2", "--device", str(path)
    told = subprocess.run(
        [sys.executable, "-m", "kaisa_optim.tools.command", *arguments],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert "estimated within" in told.stdout and "Gr\\xfc\\xdfe" in told.stdout


def test_an_interval_is_simulated(tmp_path):
    trace, plot = tmp_path / "trace.json", tmp_path / "steps.png"
    told = kaisa("simulate", NET, "--ranks", 4, "--trace", trace, "--plot", plot)
    assert told.exit_code == 0, told.output
    stages = {line.strip().split("  ")[0] for line in told.output.splitlines()}
    assert stages >= {"passes", "decompose", "hand out", "wait", "step"}
    assert "layer-wise" in told.output and "opt" in told.output
    events = json.loads(trace.read_text())["traceEvents"]
    assert {one["tid"] for one in events} == {0, 1, 2, 3}
    assert plot.read_bytes().startswith(b"\x89PNG")
    one = kaisa("simulate", NET, "--ranks", 4, "--option", "grad_worker_fraction=0.5")
    assert "layer-wise" not in one.output and "0.5" in one.output


def test_stages_of_a_step_are_timed():
    arguments = ("profile", NET, "--optimizer", "KFACSGD", "--option", "lr=0.1")
    told = kaisa(*arguments)
    assert told.exit_code == 0, told.output
    for stage in ("capture", "decompose", "precondition", "length", "base step", "whole step"):
        assert stage in told.output
    values = json.loads(kaisa(*arguments, "--steps", 3, "--json").stdout)
    assert values["steps"] == 3 and values["optimizer"] == "KFACSGD"
    assert all(row["mean"] >= 0 for row in values["rows"])


def test_a_profile_needs_an_input():
    told = kaisa("profile", f"{HERE}:alone")
    assert told.exit_code == app.WRONG
    assert "return a model and one rank's input" in told.output


def test_a_profile_is_written_and_checked(tmp_path, monkeypatch):
    asked = []

    def measure(device, ranks, watch):
        asked.append((device, ranks))
        return PLAIN

    monkeypatch.setattr(calibration, "measure", measure)
    path = tmp_path / "mine.toml"
    told = kaisa("calibrate", "--out", path, "--ranks", 3)
    assert told.exit_code == 0 and f"profile: {path}" in told.output
    assert hardware.load(path) == hardware.parse("mine", PLAIN)
    told = kaisa("calibrate", "--check", path)
    assert told.exit_code == 0 and "measured ms" in told.output and "+0 %" in told.output
    assert asked == [("cpu", 3), ("cpu", 2)]
    assert kaisa("calibrate", "--check", "abacus").exit_code == 2


# ---- without its libraries ----


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
    """From Python, neither typer nor rich is imported."""
    code = "import kaisa_optim.tools, sys; sys.exit({'typer', 'rich'} & {*sys.modules} or None)"
    subprocess.run([sys.executable, "-c", code], check=True)
