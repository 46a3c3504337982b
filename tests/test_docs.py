"""What the documentation shows must run, and the options that it lists must be the real ones."""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from kaisa_optim.optim import arguments
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


def test_the_table_of_options_is_current():
    text = (ROOT / "docs/reference/options.md").read_text()
    begin, end = "<!-- options: begin -->\n", "\n<!-- options: end -->"
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    assert shown == arguments.table().replace("](docs/", "](../"), (
        "put the output of this between the markers in docs/reference/options.md, with ../ in "
        "place of docs/: "
        'python -c "from kaisa_optim.optim.arguments import table; print(table())"'
    )


def test_the_readme_is_short():
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.S)
    prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    assert len(prose.split()) <= 1000


def test_pictures_of_the_readme_are_small():
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(pictures) == 2
    for picture in pictures:
        assert (ROOT / picture).stat().st_size < 150_000


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, OF_RANKS, "docs/from_kfac_pytorch.md"]:
        here = (ROOT / page).parent
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert (here / target).exists(), f"{page}: {target}"
