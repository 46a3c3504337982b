"""The examples for other frameworks run, and train."""

from __future__ import annotations

import ast
import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

from tests.support.ranks import CAN_SHARD, run

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = {
    "lightning": ("lightning", 8.0),
    "accelerate": ("accelerate", 8.0),
    "trainer": ("transformers", 0.8),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:the base optimizer updates these"),
    pytest.mark.filterwarnings("ignore:.*bottleneck.*", "ignore:.*torch.jit", "ignore:.*LeafSpec"),
]


def loss(name):
    return runpy.run_path(str(EXAMPLES / f"with_{name}.py"), run_name="__main__")["loss"]


@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_trains(name, tmp_path, monkeypatch):
    package, first = PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        assert loss(name) < first / 2 if name != "trainer" else loss(name) < first
    if name == "accelerate":
        import accelerate

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.skipif(not CAN_SHARD, reason="torch 2.6 can't shard on CPUs")
def test_the_example_of_fully_shard_trains_on_two_ranks():
    first, second = run(2, loss, "fsdp2")
    assert first == second < 4


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_says_how_it_is_run_and_is_listed(path):
    about = ast.get_docstring(ast.parse(path.read_text()))
    assert path.name in about or "training specification" in about
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("slurm/*.sbatch")), ids=lambda p: p.stem)
def test_batch_scripts_start_the_applications_that_there_are(path):
    text = path.read_text()
    for name in text.split("benchmarks.applications.")[1:]:
        module = name.split()[0]
        assert (EXAMPLES.parent / "benchmarks" / "applications" / f"{module}.py").exists()
