"""The command line: tables, JSON, pictures, exit codes, times of stages, and measured profiles."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from kaisa_optim.tools import app, calibration, command, hardware, plan
from kaisa_optim.tools.profile import own_times, profile
from tests.tools.test_prices import PLAIN

HERE = "tests.tools.test_app"
NET = f"{HERE}:net"
runner = CliRunner()


def net(width=8):
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    return model, torch.zeros(10, 6)


class Chatty(nn.Linear):
    def forward(self, x):
        print("a pass")
        return super().forward(x)


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


def plan_of(factory, *arguments):
    return "plan", factory, "--ranks", 2, *arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (plan_of("net"), "'net'; it must be package.module:factory"),
        (plan_of("no_module:x"), "no_module:x' can't be imported"),
        (plan_of(f"{HERE}:missing"), f"'missing'; see python -c 'import {HERE}'"),
        (plan_of("platform:node"), "returned str; it must return a module"),
        (plan_of(NET, "--arg", "depth=3"), "keyword argument 'depth'; give its arguments"),
        (plan_of(NET, "--arg", "a b=1"), "Invalid argument: 'a b=1'; it must be name=value"),
        (plan_of(NET, "--device", "abacus"), "device: 'abacus'; choose from 'a100', 'cpu', 'h100'"),
        (plan_of(NET, "--memory", "lots"), "Invalid memory_budget: 'lots'"),
        (plan_of(NET, "--optimizer", "Magic"), "no optimizer 'Magic'; choose from KFACAdam"),
        (plan_of(NET, "--option", "grad_worker_fraction=0.3", "--ranks", 5), "does not divide 5"),
        (plan_of(NET, "--option", "dampng=1"), "unexpected keyword argument 'dampng'"),
        (plan_of(NET, "--device", "[a-z]*"), "Invalid device: '[a-z]*'"),
        (plan_of(NET, "--device", "[/tag]:x:"), "Invalid device: '[/tag]:x:'"),
        (plan_of(NET, "--plot", "no/such/folder.png"), "No such file or directory"),
        (("profile", "torch.nn:Tanh"), "return a model and one rank's input"),
        (("calibrate", "--check", "abacus"), "Invalid device: 'abacus'"),
        (("calibrate", "--device", "tpu"), "Invalid device: 'tpu'; it must be"),
        pytest.param(
            ("calibrate", "--device", "cuda"),
            "Invalid device: 'cuda'; it must be",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_faults_are_one_line_and_exit_with_2(arguments, said):
    told = kaisa(*arguments)
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


STAGES = {"capture", "agree", "reduce", "average", "decompose", "share"}
STAGES |= {"precondition", "length", "base step"}  # of one process


def test_all_stages_of_a_step_have_a_time():
    arguments = "profile", NET, "--steps", 4
    values = json.loads(kaisa(*arguments, "--json").stdout)
    assert values["steps"] == 4 and values["optimizer"] == "KFACAdam" and values["device"] == "cpu"
    rows = {row["stage"]: row for row in values["rows"]}
    *stages, last = rows
    assert {*stages} == STAGES and last == "passes and the rest"
    assert all(row["first"] > 0 <= row["mean"] for row in rows.values())
    # Nothing is refreshed in the four steps behind the first.
    assert rows["decompose"]["mean"] == 0 < rows["precondition"]["mean"]
    printed = kaisa(*arguments).output
    assert all(text in printed for text in (*rows, "whole step", "100.0 %"))


def test_the_interval_reaches_from_one_refresh_to_the_next():
    options = {"inv_update_steps": 3, "factor_update_steps": 2, "compute_method": "eigen"}
    given = [
        text for name, x in ({"lr": 0.1} | options).items() for text in ("--option", f"{name}={x}")
    ]
    told = kaisa("profile", NET, "--optimizer", "KFACSGD", *given, "--json")
    values = json.loads(told.stdout)
    means = {row["stage"]: row["mean"] for row in values["rows"]}
    assert values["steps"] == 3 and values["optimizer"] == "KFACSGD"
    assert means["decompose"] > 0 and "length" not in means


class Net(nn.Module):
    """Has a parameter and a buffer that no module draws, a gap, and an output beside a number."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(5, 6), nn.BatchNorm1d(4)
        self.w = nn.Parameter(torch.ones(6, 3))
        self.register_parameter("gap", None)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, tokens, scale):
        hidden = self.norm(self.words(tokens) * scale)
        return {"logits": hidden @ self.w + self.shift, "count": 3, "tokens": tokens}


def test_a_model_on_the_meta_device_is_filled():
    with torch.device("meta"):
        model = Net()
        batch = {"tokens": torch.zeros(7, 4, dtype=torch.long), "scale": torch.ones(7, 4, 6)}
    found = profile(model, batch, steps=1)
    assert {row.stage for row in found.rows} > {"capture", "decompose"}
    assert all(p.isfinite().all() for p in model.parameters())
    assert model.shift.eq(0).all() and model.norm.running_var.isfinite().all()
    assert 0 < model.w.std() < 0.1


def test_a_loss_of_the_users_own():
    loss = mock.Mock(wraps=lambda output: output.square().sum())
    profile(nn.Linear(3, 2), torch.randn(4, 3), loss, steps=2)
    assert loss.call_count == 3


def test_a_stage_counts_without_the_stages_within_it():
    kinds = torch._C._autograd.DeviceType

    def event(name, took, parent=None, kind=kinds.CPU):
        times = {"cpu_time_total": took, "device_time_total": 2 * took}
        return SimpleNamespace(name=name, cpu_parent=parent, device_type=kind, **times)

    outer = event("kaisa::hand out", 9000)
    inner = event("kaisa::precondition", 4000, event("aten::add", 100, outer))
    twin = event("kaisa::hand out", 9000, kind=kinds.CUDA)
    events = [outer, inner.cpu_parent, inner, twin]
    assert own_times(events, on_gpu=False) == {"hand out": 5, "precondition": 4}
    assert own_times(events, on_gpu=True) == {"hand out": 10, "precondition": 8}


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


def test_a_machine_is_measured(monkeypatch, tmp_path):
    short = {"SIDES": {"cpu": (8, 16)}, "_ENOUGH": 0.0, "_SMALL": 64, "_LARGE": 1 << 22}
    for name, value in short.items():
        monkeypatch.setattr(calibration, name, value)
    seen = []

    def watch(items):
        for item in items:
            seen.append(item)
            yield item

    measured = calibration.measure("cpu", 2, watch)
    assert {side for side, _ in seen} == {8, 16} and len(seen) == 8
    path = tmp_path / "mine.toml"
    path.write_text(hardware.text(measured, calibration.COMMENT))
    found = hardware.load(path)
    assert found.device == "cpu" and found.memory > 2**30
    kinds = "products", "roots", "eigenvectors", "inverses"
    assert {kind: x.sides for kind, x in found.times.items()} == dict.fromkeys(kinds, (8, 16))
    assert 0 < found.inside.latency < 10 and found.inside == found.between
    assert found.ranks_per_node == 2 and "between 2 ranks" in found.sources[1]
    assert {row[4] for row in calibration.compare(found, measured)} <= {"+0 %", "-0 %"}


def stopped(rank, ranks, port, to):
    """A rank that ends before it has exchanged anything."""


def test_ranks_that_end_early_are_told(monkeypatch):
    monkeypatch.setattr(calibration, "_exchange", stopped)
    with pytest.raises(ValueError, match="Invalid ranks: 1 ranks did not exchange anything"):
        calibration.links(1)


@pytest.mark.parametrize("times", [(1.0, 0.5), (1.0, 8.0)])
def test_a_profile_has_no_time_of_zero(times, monkeypatch):
    """Timings vary: many layers may seem to take less time than a few, or a group none."""
    few, many = times
    monkeypatch.setattr(calibration, "_host", lambda copies, device: few if copies == 1 else many)
    assert all(seconds > 0 for seconds in calibration.host("cpu"))


def lacking(name):
    def import_module(asked):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    return import_module


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_a_missing_extra_is_named_and_no_other_module(monkeypatch, capsys, name):
    monkeypatch.setattr(importlib, "import_module", lacking(name))
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert f"kaisa needs {name}: pip install 'kaisa_optim[tools]'" in capsys.readouterr().err
    monkeypatch.setattr(importlib, "import_module", lacking("torch"))
    with pytest.raises(ModuleNotFoundError, match="torch"):
        command.main()


def test_plans_need_no_extra():
    code = "import kaisa_optim.tools, sys; sys.exit({'typer', 'rich'} & {*sys.modules} or None)"
    subprocess.run([sys.executable, "-c", code], check=True)
