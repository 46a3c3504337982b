"""Each application runs its smoke test, and goes on exactly from its checkpoint."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from tests.support.ranks import run

pytest.importorskip("tqdm", reason="tqdm is not installed ([applications])")
from benchmarks.applications import arguments, common, shards, unet

ROOT = Path(__file__).parents[2]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "workloads"
OTHER_PAGES = {"membranes": "unet"}  # the others are named as their result
IN_WORDS = {"maskrcnn": "mask_ap"}  # what pages without a table tell of the ends
NEEDS = {"bert": ("transformers", "tokenizers"), "imagenet": ("torchvision",)}
NEEDS["maskrcnn"] = "torchvision", "pycocotools"
SMOKES = [
    *(("unet", "SGD"), ("unet", "KFACAdam"), ("gpt", "AdamW"), ("gpt", "Muon"), ("bert", "LAMB")),
    *(("bert", "KFACLAMB"), ("imagenet", "KFACSGD"), ("maskrcnn", "KFACSGD")),
]

SHORT = ("--smoke", "--quiet", "--device", "cpu")

pytestmark = [
    pytest.mark.filterwarnings("ignore:the base optimizer updates these"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def numbers_as_they_were():
    """The loop seeds torch's generator in each step."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize(("name", "optimizer"), SMOKES)
def test_smoke(name, optimizer, tmp_path):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"{package} is not installed ([applications])")
    application = importlib.import_module(f"benchmarks.applications.{name}")
    found = application.main([*SHORT, "--optimizer", optimizer, "--out", str(tmp_path)])
    assert found and all(torch.isfinite(torch.tensor(list(found[-1].values()))))
    assert (tmp_path / "last.pt").exists() and not (tmp_path / "last.part").exists()
    record = json.loads((tmp_path / "curve.json").read_text())
    assert record["curve"] == found and record["optimizer"] == optimizer
    assert str(tmp_path) not in record["command"]
    if importlib.util.find_spec("tensorboard") is not None:
        assert list(tmp_path.glob("events.out.tfevents.*"))


SETTINGS = (*SHORT, "--optimizer", "KFACSGD", "--steps", "6")
INTERVALS = ("--every", "3", "--factor_update_steps", "2", "--inv_update_steps", "4")
HOW = (*INTERVALS, "--accumulate", "2", "--assignment", "layer-wise")


def in_two_calls(folder):
    """The curve and the weights of one call, and of two with a stop between evaluations."""
    ends = []
    for name, stops in (("whole", (6,)), ("parts", (4, 6))):
        out = folder / name
        for stop in stops:
            ranks = common.Ranks(dist.get_rank(), dist.get_world_size(), "cpu")
            given = [*SETTINGS, *HOW, "--out", str(out), "--stop", str(stop)]
            settings = unet.DEFAULTS, unet.PRESETS, unet.SMOKE
            options = arguments.parse(None, given, *settings, unet.arguments)
            trained = common.Run(unet.job(options, ranks), options, ranks)
            trained.fit()
        points = [{n: v for n, v in p.items() if n != "seconds"} for p in trained.points]
        weights = [p.detach().clone() for p in trained.job.model.parameters()]
        ends.append((points, weights))
    (points, weights), (others, same) = ends
    assert len(points) == 2
    for one, other in zip(points, others, strict=True):
        # The ranks' sums of training losses are joined when a checkpoint is written.
        assert one.pop("train") == pytest.approx(other.pop("train"), rel=1e-6)
        assert one == other
    return all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


def test_two_ranks_go_on_exactly(tmp_path):
    assert run(2, in_two_calls, tmp_path) == [True, True]


DIES = """
import os, signal, sys
from benchmarks.applications import common, unet

save = common.Run.save

def save_then_die(self):
    save(self)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and self.step == 4 and self.ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

common.Run.save = save_then_die
unet.main(sys.argv[1:])
"""


def test_torchrun_starts_a_killed_rank_again_from_the_checkpoint(tmp_path):
    script, out = tmp_path / "dies.py", tmp_path / "out"
    script.write_text(DIES)
    launch = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    given = [*SETTINGS, "--every", "2", "--save-every", "2", "--out", str(out)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *launch, "--max-restarts", "1"]
    # With the launcher's own store, which torch shares, restarted ranks find dead ones' addresses.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    how = {"env": environment, "capture_output": True, "text": True, "timeout": 180}
    found = subprocess.run([*torchrun, str(script), *given], **how)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "exitcode: -9" in found.stderr
    curve = json.loads((out / "curve.json").read_text())["curve"]
    assert [point["step"] for point in curve] == [2, 4, 6]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    given = [*SETTINGS, "--out", str(tmp_path)]
    unet.main([*given, "--stop", "3"])
    with pytest.raises(SystemExit, match=r"another run \(batch: 2 there, 4 here\)"):
        unet.main([*given, "--batch", "4"])


def parsed(*given):
    defaults = {"all": {"lr": 1.0}, "KFAC": {"damping": 0.5}, "KFACSGD": {"momentum": 0.3}}
    presets = {"paper": {"KFACSGD": {"damping": 0.1, "epochs": 7}}}
    return arguments.parse(None, given, defaults, presets, {"all": {"steps": 2}})


def test_the_command_line_comes_before_the_preset_and_that_before_defaults(capsys):
    assert parsed().settings == {"lr": 1.0}
    assert parsed("--optimizer", "KFACSGD").settings == {"lr": 1.0, "damping": 0.5, "momentum": 0.3}
    options = parsed("--optimizer", "KFACSGD", "--preset", "paper", "--momentum", "0.7")
    assert options.settings == {"lr": 1.0, "damping": 0.1, "momentum": 0.7}
    assert options.epochs == 7 and options.steps is None
    assert parsed("--smoke", "--steps", "5").steps == 5 and parsed("--smoke").steps == 2
    with pytest.raises(SystemExit):
        parsed("--damping", "0.1")
    assert "--damping does not go with --optimizer SGD" in capsys.readouterr().err


def test_an_order_is_the_same_from_any_step_on():
    options = parsed("--batch", "3", "--accumulate", "2", "--seed", "5")
    order = common.Order(20, common.Ranks(1, 2, "cpu"), options)

    def taken(step, count):
        found = order(step)
        return [(n, p.tolist()) for n, p in (next(found) for _ in range(count))]

    whole = taken(0, 10)
    assert taken(2, 6) == whole[4:] and [n for n, _ in whole] == list(range(10))
    other = common.Order(20, common.Ranks(0, 2, "cpu"), options)(0)
    assert not set(next(other)[1].tolist()) & set(whole[0][1])


def written(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def image(value):
    file = io.BytesIO()
    Image.new("RGB", (6, 5), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_shards_are_read_by_place(tmp_path):
    written(tmp_path / "bad" / "0.tar", {"x.png": image(1), "x.cls": b"0", "y.png": image(1)})
    with pytest.raises(ValueError, match="y needs both an image"):
        shards.Shards(tmp_path / "bad")
    for i in range(2):
        members = {}
        for j in range(3):
            members |= {f"a/{j}.cls": str(i + j).encode(), f"a/{j}.PNG": image(10 * i + j)}
        written(tmp_path / "good" / f"{i}.tar", {"about.txt": b"", **members})
    found = shards.Shards(tmp_path / "good")
    assert [found[i][1] for i in range(6)] == [0, 1, 2, 1, 2, 3] and len(found.classes) == 4
    assert [found[i][0].getpixel((0, 0))[0] for i in (4, 0, 5)] == [11, 0, 12]


def test_runs_are_compared_by_the_bases_last_loss(tmp_path, capsys):
    compare = pytest.importorskip("benchmarks.applications.compare")
    curves = {"SGD": (3.0, 2.0), "KFACSGD": (1.5, 1.0), "Adam": (3.5, 2.5)}
    for name, losses in curves.items():
        points = [
            {"step": 5 * i, "seconds": 7 * i, "train": 0, "loss": loss, "accuracy": 0.5}
            for i, loss in enumerate(losses, 1)
        ]
        (tmp_path / name).mkdir()
        record = {"optimizer": name, "curve": points}
        (tmp_path / name / "curve.json").write_text(json.dumps(record))
    compare.main([*(str(tmp_path / name) for name in curves), "--out", str(tmp_path / "all")])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| SGD | 10 | 14 | 14 | 2 | 0.5 |",
        "| KFACSGD | 5 | 7 | 14 | 1 | 0.5 |",
        "| Adam | - | - | 14 | 2.5 | 0.5 |",
    ]
    assert [r["optimizer"] for r in json.loads((tmp_path / "all.json").read_text())] == list(curves)
    assert (tmp_path / "all.png").stat().st_size > 1000


@pytest.mark.parametrize("path", sorted(RESULTS.glob("workload_*.json")), ids=lambda p: p.stem)
def test_the_table_on_a_page_is_that_of_the_kept_runs(path):
    compare = pytest.importorskip("benchmarks.applications.compare")
    records = json.loads(path.read_text())
    assert all("--data FOLDER" in record["command"] for record in records)
    name = path.stem.removeprefix("workload_")
    page = PAGES / f"{OTHER_PAGES.get(name, name)}.md"
    wanted = ["\n".join(compare.table(records))]
    if score := IN_WORDS.get(name):
        wanted = [f"{record['curve'][-1][score]:.3f}" for record in records]
    assert all(text in page.read_text() for text in wanted)
