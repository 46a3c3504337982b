"""What the documentation shows must run, and the options that it lists must be the real ones."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from docs import messages, tables
from tests.support.ranks import CAN_SHARD, run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md"))
OUTSIDE = ["README.md", "CHANGELOG.md", "benchmarks/README.md", "examples/README.md"]
# The README again, and what docstrings and messages say.
MADE = ["docs/index.md", "docs/reference/api.md", "docs/reference/errors.md"]
# Pages whose examples run on two ranks.
GUIDES = "checkpoints", "fsdp", "launch", "ranks", "troubleshooting"
OF_RANKS = [f"docs/guides/{name}.md" for name in GUIDES]
# Whole scripts, for several ranks; variables of the environment make their networks small.
RECIPES = [page for page in PAGES if page.startswith("docs/recipes/")]
SMALL = {"WIDTH": "64", "LAYERS": "1", "LENGTH": "16", "BATCH": "2", "STEPS": "4", "SAVE": "2"}
WORDS, OF_README = 11_000, 800  # of prose: in all, and on the first page


def blocks(page):
    """Return the examples; of a change, the lines that it leaves, unless it shows a part alone."""
    found = []
    text = (ROOT / page).read_text()
    for kind, code in re.findall(r"```(python|diff)\n(.*?)```", text, flags=re.S):
        if kind == "diff":
            code = re.sub(r"^-.*\n|^[+ ]", "", code, flags=re.M)
        found += [code] * (kind == "python" or code.startswith("import"))
    return found


def examples(pages):
    found = [(page, i) for page in pages for i in range(len(blocks(page)))]
    return pytest.mark.parametrize("page, i", found, ids=[f"{page}-{i}" for page, i in found])


def execute(page, i):
    torch.manual_seed(0)
    found = {"__name__": "example"}
    exec(compile(blocks(page)[i], f"{page}, example {i}", "exec"), found)
    models = [value for value in found.values() if isinstance(value, torch.nn.Module)]
    assert all(p.isfinite().all() for model in models for p in model.parameters())
    return found


def execute_on_rank(page, i, folder):
    """In the process group that is there, and in a folder of its own."""
    os.chdir(folder)
    begin = mock.patch.object(dist, "init_process_group", autospec=True)
    with begin, mock.patch.object(dist, "destroy_process_group"):
        return execute(page, i)


@examples(x for x in ["README.md", *PAGES] if x not in [*OF_RANKS, *RECIPES])
def test_examples_run(page, i):
    execute(page, i)


@examples(OF_RANKS)
def test_examples_run_on_two_ranks(page, i, tmp_path):
    if "fully_shard" in blocks(page)[i] and not CAN_SHARD:
        pytest.skip("fully_shard on CPUs needs torch 2.7")
    run(2, execute_example, page, i, tmp_path)


def execute_example(page, i, folder):
    execute_on_rank(page, i, folder)  # without its variables, which no process can send


def starts_of_the_gpt(steps, folder):
    """Return where the passages of the last step begin, on this rank."""
    page = "docs/recipes/gpt_fsdp2.md"
    with mock.patch.dict(os.environ, {**SMALL, "STEPS": steps}):
        variables = execute_on_rank(page, 0, folder)
    assert variables["optimizer"].preconditioner.steps == int(steps)
    return variables["starts"].tolist() if "starts" in variables else None


@pytest.mark.skipif(not CAN_SHARD, reason="fully_shard on CPUs needs torch 2.7")
@pytest.mark.filterwarnings("error:state_dict")
def test_the_recipe_of_a_sharded_gpt_goes_on_in_a_longer_run_without_a_passage_twice(tmp_path):
    folder, other = tmp_path / "stopped", tmp_path / "straight"
    for path in (folder, other):
        path.mkdir()
    run(2, starts_of_the_gpt, "4", folder)
    assert run(2, starts_of_the_gpt, "4", folder) == [None, None]  # no step is left
    resumed = run(2, starts_of_the_gpt, "6", folder)
    assert {path.name for path in (folder / "checkpoint").iterdir()} == {"2", "4", "6"}
    assert resumed == run(2, starts_of_the_gpt, "6", other)
    assert not set(resumed[0]) & set(resumed[1])


@pytest.mark.parametrize("best", [False, pytest.param(True, marks=pytest.mark.maintainer)])
def test_the_recipe_of_the_trainer_saves_what_all_ranks_hold(best, tmp_path):
    """With "best", the Trainer decides on a save after the callbacks of the step."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script, code = tmp_path / "train.py", blocks("docs/recipes/trainer.md")[0]
    if best:
        new = 'save_strategy="best", metric_for_best_model="loss", eval_strategy="steps"'
        code = code.replace("save_steps=10", f"{new}, eval_steps=10, greater_is_better=True")
        code = code.replace("train_dataset=data", "train_dataset=data, eval_dataset=data[:32]")
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", "2", str(script)]
    paths = {"FOLDER": str(tmp_path / "runs"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    folders = sorted((tmp_path / "runs").glob("checkpoint-*"), key=lambda x: int(x.name[11:]))
    saved = torch.load(folders[-1] / "optimizer.pt", weights_only=True)
    entries = saved["state"].values()
    assert any("kfac_a_average" in entry for entry in entries)
    weights = [entry for entry in entries if "kfac_g_average" in entry]
    assert len(weights) == 17, "the layers of both ranks"
    assert all("exp_avg" in entry for entry in entries), "the momenta, too"
    log = json.loads((folders[-1] / "trainer_state.json").read_text())["log_history"]
    # The mean of two classes begins at 0.69; a loss times the number of ranks, at 1.39.
    assert 0.3 < next(entry["loss"] for entry in log if "loss" in entry) < 1


def test_geometric_means_are_of_common_tasks_and_count_what_was_missed(tmp_path, monkeypatch):
    def keep(name, **shares):
        rows = []
        for x, share in shares.items():
            row = {"baseline": "AdamW", "optimizer": tables.CONTESTANTS[x]}
            rows.append({**row, "of_its_steps": share, "of_its_seconds": share and 2 * share})
        kept = json.dumps({"to the baseline's loss": rows})
        (tmp_path / f"convergence_{name}.json").write_text(kept)

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "CONTESTS", [tables.Contest(x, x, "AdamW") for x in "abc"])
    keep("a", KFACAdam=0.2, SOAP=0.4, Muon=None)
    keep("b", KFACAdam=0.05, SOAP=0.1, Muon=0.25)
    keep("c", KFACAdam=0.01, SOAP=0.01)  # Muon was not measured
    rows = tables.averages().splitlines()[2:]
    assert rows == [
        "| KFACAdam | 2 | 0 | 0.10 | 0.20 |",
        "| SOAP | 2 | 0 | 0.20 | 0.40 |",
        "| Muon | 2 | 1 | 0.50 | 0.71 |",  # √(1 × ¼), √(1 × ½)
    ]


def test_tables_are_the_kept_numbers_and_the_options():
    for path, page in tables.pages():
        assert path.read_text() == page, f"{path.name}: run python -m docs.tables"


def listed(entry):
    """Return the pages that an entry of mkdocs.yml names."""
    text = (ROOT / "mkdocs.yml").read_text()
    part = re.search(rf"^{entry}:.*\n((?: .*\n)+)", text, flags=re.M)[1]
    return ["docs/" + page.lstrip("/") for page in re.findall(r"[\w/]+\.md", part)]


def test_the_menu_has_every_page():
    """Those beside it have their links on a page of the menu."""
    menu, beside = listed("nav"), listed("not_in_nav")
    assert sorted([*menu, *beside]) == PAGES
    assert set(beside) <= {target for page in menu for target in linked(page)}


def words(page):
    """Return how many words a page has, without code, tables, and the signs of Markdown."""
    lines = [line for line in prose(page).splitlines() if not line.startswith(("|", "<!--"))]
    return len(re.findall(r"\S*\w\S*", "\n".join(lines)))


def test_the_documentation_is_short():
    assert sum(map(words, {*OUTSIDE, *PAGES} - {*MADE})) <= WORDS
    assert words("README.md") <= OF_README
    (picture,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert (ROOT / picture).stat().st_size < 150_000


def test_the_first_page_links_every_page():
    """Those beside the menu have their links elsewhere."""
    assert {*listed("nav")} - {"docs/index.md"} <= linked("README.md") | {*MADE}


def told():
    """Yield each literal of some words in the calls that make an error or a warning."""
    for path in sorted(messages.PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not messages.is_source(messages.called(node)):
                continue
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield from re.split(r"; ?", part.value)


def test_each_message_of_the_source_is_in_the_reference():
    source = messages.Source()
    known = source.messages
    plain = [x.text for x in known if x.text.startswith(tables.ANY_OPTION)]
    page = (DOCS / "reference/errors.md").read_text()
    shown = "\n".join([page, *plain]).replace("\\", "").lower()
    lacking = {x.strip() for x in told() if len(x.split()) > 3 and x.strip().lower() not in shown}
    assert not lacking
    assert len(known) > 180 and not source.unknown
    sections = tuple(x for modules in tables.SECTIONS.values() for x in modules)
    assert not {m.module for m in known if not m.module.startswith(sections)}
    assert not [part for part in tables.REMEDIES if not any(part in m.text for m in known)]


def prose(page):
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.S | re.M)


def anchors(page):
    """As Python-Markdown's table of contents makes them, but for what is not ASCII."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


def linked(page):
    """Return the pages that a page links."""
    targets = re.findall(r"\]\(([^)#\s]+\.md)", prose(page))
    here = (ROOT / page).parent
    return {os.path.relpath(here / target, ROOT) for target in targets if ":" not in target}


@pytest.mark.parametrize("page", [*OUTSIDE, *PAGES])
def test_links_lead_somewhere(page):
    here = (ROOT / page).parent
    for target, place in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", prose(page)):
        if ":" in target:
            continue  # another site's
        found = (here / target).resolve() if target else ROOT / page
        assert found.exists(), f"{page}: {target}"
        if page in PAGES:  # the site has no other files
            assert found.is_relative_to(DOCS), f"{page}: {target}"
        if place and found.suffix == ".md":
            assert place in anchors(found.relative_to(ROOT)), f"{page}: {target}#{place}"
