"""What the documentation shows must run, and the options that it lists must be the real ones."""

import inspect
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from kaisa_optim import KFACAdam
from tests.support.ranks import CAN_SHARD, run

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/guide.md"]
OF_RANKS = "docs/launch.md"  # its examples run on two ranks


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


EXAMPLES = [(page, i, code) for page in PAGES for i, code in enumerate(blocks(page))]


def execute(page, i, code):
    torch.manual_seed(0)
    exec(compile(code, f"{page}, example {i}", "exec"), {"__name__": "example"})


def execute_on_rank(i, code):
    """In the process group that is there."""
    stand_in = mock.create_autospec(dist.init_process_group)
    with (
        mock.patch.object(dist, "init_process_group", stand_in),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        execute(OF_RANKS, i, code)


@pytest.mark.parametrize("page, i, code", EXAMPLES, ids=[f"{p}-{i}" for p, i, _ in EXAMPLES])
def test_examples_run(page, i, code):
    execute(page, i, code)


@pytest.mark.parametrize("i, code", list(enumerate(blocks(OF_RANKS))))
def test_examples_run_on_two_ranks(i, code):
    if "fully_shard" in code and not CAN_SHARD:
        pytest.skip("fully_shard on CPUs needs torch 2.7")
    run(2, execute_on_rank, i, code)


def test_readme_lists_every_kfac_option_with_its_default():
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| option | default") :]
    listed = {}
    for line in re.findall(r"^\| (`.*?) \| (.*?) \| .* \|$", table, flags=re.M):
        names, default = re.findall(r"`(\w+)`", line[0]), line[1].replace("`", "")
        values = [default] if len(names) == 1 else default.split(", ")
        listed.update(zip(names, values * (len(names) if len(values) == 1 else 1), strict=True))
    base = inspect.signature(torch.optim.Adam).parameters
    ours = inspect.signature(KFACAdam).parameters  # SGD has a nesterov of its own
    options = {k: p.default for k, p in ours.items() if k not in base and k != "model"}
    # None: they follow from other options.
    settled = {
        "kl_clip_lr": "initial",
        "staggered": True,
        "inv_update_steps": 50,
        "basis_tolerance": 0.0,
    }
    told_elsewhere = {"damping_split"}
    assert set(listed) == set(options) - told_elsewhere
    for name, default in options.items():
        if name in told_elsewhere or (default is None and listed[name] == "float32"):
            continue
        expected = settled.get(name, default)
        shown = listed[name].strip('"')
        assert shown == str(expected) or float(shown) == expected, name


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, OF_RANKS, "docs/from_kfac_pytorch.md"]:
        here = (ROOT / page).parent
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert (here / target).exists(), f"{page}: {target}"
