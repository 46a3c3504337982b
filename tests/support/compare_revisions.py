"""Compare two revisions bit for bit: ``python -m tests.support.compare_revisions OLD [NEW]``.

The tool trains the same small networks with the package of both revisions, on one process and on
groups of 2 and 4 ranks, and names the first step and tensor whose bits differ. NEW is the working
tree if it is left out, with its uncommitted changes.

``--sets`` chooses option sets by a pattern, ``--worlds`` numbers of ranks.
``--ignore`` leaves out what a change is meant to alter: a pattern, searched for in texts such as
``state head.weight: kfac_status``, ``memory pending`` and ``volume gradients``.
``--write-golden`` writes names, shapes and dtypes of the states of one process.

Only public names of the package are used here, so that one driver serves both revisions.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 20
WORLDS = (1, 2, 4)
FEW = (1, 2)  # of cases whose like is trained on 4 ranks
ROWS = 8  # examples of a step, of all ranks together
PATIENCE = 120  # seconds that a rank waits for others

GOLDEN = Path(__file__).parents[1] / "data" / "golden_state.json"


class Images(nn.Module):
    """All kinds of layers for images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False)
        self.groups = nn.GroupNorm(2, 4)
        # Of a kernel as wide as its stride A has each eigenvalue four times: any basis would do.
        self.wider = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1)
        self.same = nn.Conv2d(2, 2, 3, padding=1)
        self.last = nn.Linear(72, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.tanh(self.wider(self.groups(self.grouped(x))))
        return self.last(self.same(x).flatten(1))


class Tokens(nn.Module):
    """All kinds of layers for sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.near = nn.Conv1d(6, 6, 3, padding=1)
        self.mix = nn.MultiheadAttention(6, 2, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.root = nn.RMSNorm(6)
        self.hidden = nn.Linear(6, 6)
        self.last = nn.Linear(6, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x + self.near(x.mT).mT
        x = self.norm(x + self.mix(x, x, x, need_weights=False)[0])
        return self.last(torch.tanh(self.hidden(self.root(x))))


class Chain(nn.Module):
    """Layers of one shape in the middle, and a branch that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 8)
        self.middle = nn.ModuleList(nn.Linear(8, 8, bias=i == 1) for i in range(4))
        self.branch = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4, bias=False)
        self.through = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for layer in self.middle:
            x = layer(x).tanh()
        if self.through:
            x = x + self.branch(x).tanh()
        return self.head(x)


NETWORKS: dict[str, type[nn.Module]] = {"images": Images, "tokens": Tokens, "chain": Chain}
SHAPES = {"images": (3, 8, 8), "chain": (7,)}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    network: str = "images"
    optimizer: str = "KFACSGD"
    options: dict[str, Any] = field(default_factory=dict)
    micro: int = 1  # backward passes of a step
    dtype: torch.dtype = torch.float32
    worlds: tuple[int, ...] = WORLDS
    freezes: str = ""  # a layer that is frozen in step 7 and trained again from step 12
    branches: bool = False  # steps leave a branch out by turns
    draws: bool = False
    sharded: bool = False
    resumes: bool = False  # from its saved state before step 11


brain = torch.bfloat16
inverse, hybrid = {"compute_method": "inverse"}, {"grad_worker_fraction": 0.5}
CASES: dict[str, Case] = {
    "eigen": Case(),
    "tokens": Case("tokens"),
    "double": Case(dtype=torch.float64, worlds=FEW),
    "inverse pi": Case(options=inverse),
    "inverse full": Case("tokens", options={**inverse, "damping_split": "full"}),
    "inverse split owners": Case(
        "chain", options={**inverse, "assignment": "opt", "colocate_factors": False}
    ),
    "stored products": Case(options={"compute_eigenvalue_outer_product": True}),
    "sgd": Case("tokens", options={"compute_method": "polar"}),
    "sgd images": Case(options={"compute_method": "polar"}),
    "adam": Case("tokens", "KFACAdam"),
    "adam images": Case(optimizer="KFACAdam", options={"weight_decay": 0.01}, worlds=FEW),
    "adam branches": Case("chain", "KFACAdam", branches=True),
    "adamw": Case("tokens", "AdamW"),
    "lamb": Case("tokens", "KFACLAMB"),
    "lamb images": Case(optimizer="KFACLAMB", worlds=FEW),
    "layer-wise": Case(options={"assignment": "layer-wise"}, worlds=(2, 4)),
    "layer-wise adam": Case("tokens", "KFACAdam", {"assignment": "layer-wise"}, worlds=(2, 4)),
    "opt": Case("chain", options={"assignment": "opt"}, worlds=(2, 4)),
    "hybrid": Case("tokens", options={"assignment": "hybrid"}, worlds=(2, 4)),
    "hybrid lamb": Case("chain", "KFACLAMB", hybrid, worlds=(4,)),
    "hybrid small buckets": Case(options={**hybrid, "bucket_cap_mb": 1e-3}, worlds=(2, 4)),
    "accumulation": Case(micro=2),
    "fraction": Case("tokens", options={"statistics_fraction": 0.5}),
    "reduce": Case("tokens", options={"weight_sharing": "reduce"}),
    "positions": Case("tokens", options={"loss_terms": "positions", "kl_clip": None}, worlds=FEW),
    "kaisa": Case(options={"normalization": "kaisa", "damping": 0.01}),
    "kaisa inverse": Case(options={"normalization": "kaisa", **inverse}, worlds=FEW),
    "halves": Case(options={"inv_dtype": brain, "comm_dtype": brain}),
    "bfloat16 wire": Case("tokens", options={"comm_dtype": brain, "assignment": "layer-wise"}),
    "all at once": Case("chain", options={"staggered": False}),
    "slots": Case("chain", options={"factor_update_steps": 2, "inv_update_steps": 3}),
    "skipped": Case(options={"skip_layers": ["last"], "max_factor_size": 20}),
    "diagonal inverse": Case(options={**inverse, "max_factor_size": 20}),
    "frozen": Case("chain", freezes="middle.1"),
    "frozen adam": Case("chain", "KFACAdam", freezes="branch", worlds=FEW),
    "branches": Case("chain", branches=True),
    "drawn": Case("chain", draws=True),
    "sharded": Case("chain", sharded=True, worlds=(2, 4)),
    "sharded adam": Case("tokens", "KFACAdam", sharded=True, worlds=(2, 4)),
    "resumed": Case("tokens", resumes=True),
    "resumed adam": Case("chain", "KFACAdam", resumes=True),
    "schedules": Case("chain", options={"damping": lambda step: 0.1 / (1 + step)}, worlds=FEW),
}
BASES: dict[str, dict[str, Any]] = {
    "KFACSGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "compute_method": "eigen"},
    "KFACAdam": {"lr": 0.005},
    "KFACLAMB": {"lr": 0.01},
    "AdamW": {"lr": 0.005},
}


# ---- training, with the package that PYTHONPATH finds ----


def build(case: Case, model: nn.Module) -> Any:
    import kaisa_optim

    intervals = {"factor_update_steps": 2, "inv_update_steps": 4}
    options = {**BASES[case.optimizer], **intervals, **case.options}
    if not case.sharded and "grad_worker_fraction" not in options:
        options.setdefault("assignment", "opt")  # the default may differ between revisions
    if options.get("compute_method", "polar") != "polar":
        options.setdefault("damping", 0.05)
    if case.optimizer == "AdamW":
        return kaisa_optim.with_kfac(torch.optim.AdamW)(model, **options)
    return getattr(kaisa_optim, case.optimizer)(model, **options)


def batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    if case.network == "tokens":
        return tuple(torch.randint(9, (2, ROWS, 3), generator=generator))
    labels = torch.randint(4, (ROWS,), generator=generator)
    x = torch.randn(ROWS, *SHAPES[case.network], generator=generator, dtype=torch.float64)
    return x.to(case.dtype), labels


def prepared(case: Case) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = NETWORKS[case.network]().to(case.dtype)
    if case.sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, build(case, model)


def backward(case: Case, model: nn.Module, opt: Any, step: int, rank: int, world: int) -> None:
    x, y = batch(case, step)
    own = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    if case.branches:
        model.through = bool(step % 3)  # type: ignore[assignment]
    for xs, ys in zip(x[own].chunk(case.micro), y[own].chunk(case.micro), strict=True):
        outputs = model(xs)
        if case.draws:
            opt.preconditioner.sample_fisher(outputs, "cross_entropy")
        (F.cross_entropy(outputs.flatten(0, -2), ys.flatten()) / case.micro).backward()
    for p in model.parameters() if world > 1 and not case.sharded else ():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world


def train(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """Return parameters by step, and at the end the optimizer's state: their hashes, by name."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, opt = prepared(case)
    seen: dict[str, Any] = {}
    for step in range(steps):
        if case.freezes and step in (7, 12):
            model.get_submodule(case.freezes).requires_grad_(step == 12)
        if case.resumes and step == 11:
            saved, states = io.BytesIO(), [complete_state(opt)]
            if world > 1:
                dist.broadcast_object_list(states)
            torch.save((model.state_dict(), states[0]), saved)
            saved.seek(0)
            weights, state = torch.load(saved, weights_only=True)
            model, opt = prepared(case)
            model.load_state_dict(weights)
            opt.load_state_dict(state)
        opt.zero_grad()
        backward(case, model, opt, step, rank, world)
        opt.step()
        seen |= {f"step {step}: {name}": bits(p) for name, p in model.named_parameters()}
    kfac = opt.preconditioner
    seen |= {f"memory {key}": size for key, size in kfac.memory_usage().items()}
    seen |= {f"volume {key}": size for key, size in kfac.communication_volume().items()}
    # Consolidated on rank 0; other ranks' states are their own parts, as are shards.
    state = complete_state(opt)
    names = {p: name for name, p in model.named_parameters()}
    order = [names[p] for group in opt.param_groups for p in group["params"]]
    for index, entry in state.pop("state").items():
        seen |= {f"state {order[index]}: {key}": described(x) for key, x in entry.items()}
    for i, group in enumerate(state.pop("param_groups")):
        for key, value in group.items():
            seen[f"group {i}: {key}"] = "a function" if callable(value) else repr(value)
    return seen | {f"beside {key}": repr(value) for key, value in state.items()}


def complete_state(opt: Any) -> Any:
    opt.consolidate_state_dict()
    return opt.state_dict()


def described(value: Any) -> list[Any]:
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    return [list(tensor.shape), str(tensor.dtype), bits(tensor)]


def bits(tensor: Any) -> str:
    tensor = getattr(tensor, "to_local", lambda: tensor)().detach().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def train_all(rank: int, names: list[str], world: int, tree: str, out: str) -> None:
    """Train the cases in a row, in one process group, and write what came of them.

    A group ends where one of its ranks has failed: what the others wait for then is not known.
    """
    import kaisa_optim

    if not Path(kaisa_optim.__file__).resolve().is_relative_to(Path(tree).resolve()):
        raise SystemExit(f"{kaisa_optim.__file__} is not the package of {tree}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if world > 1:
        meeting, wait = f"file://{out}/store", timedelta(seconds=PATIENCE)
        dist.init_process_group("gloo", meeting, wait, world, rank)
    results = {}
    for name in names:
        try:
            results[name] = train(CASES[name])
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            if world > 1:
                break
    Path(out, f"{rank}.json").write_text(json.dumps(results))
    os._exit(0)  # destructors of the group would wait for its ranks


# ---- comparing ----

Results = dict[str, dict[str, Any]]  # by world and rank, then by case


def run_revision(tree: str, names: list[str], worlds: list[int]) -> Results:
    """Train with the package of a tree, in processes of its own."""
    found: Results = {}
    environment = {**os.environ, "PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}
    for world in worlds:
        chosen = [name for name in names if world in CASES[name].worlds]
        with tempfile.TemporaryDirectory() as out:
            told = [json.dumps([i, chosen, world, tree, out]) for i in range(world)]
            commands = [[sys.executable, __file__, "--train", text] for text in told]
            ranks = [subprocess.Popen(x, env=environment, cwd=out) for x in commands]
            if any([rank.wait() for rank in ranks]):
                raise SystemExit(f"{tree}: no training on {world} ranks")
            for i in range(world):
                found[f"world {world}, rank {i}"] = json.loads(Path(out, f"{i}.json").read_text())
    return found


def results_of(revision: str, names: list[str], worlds: list[int]) -> Results:
    """Return the results of a revision, or of the working tree."""
    root = Path(__file__).parents[2]
    if revision == ".":
        return run_revision(str(root), names, worlds)
    git = ["git", "-C", str(root), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = str(Path(folder, "tree"))
        subprocess.check_call([*git, "add", "--detach", "-q", tree, revision])
        try:
            return run_revision(tree, names, worlds)
        finally:
            subprocess.check_call([*git, "remove", "--force", tree])


def compare(pair: list[str], names: list[str], worlds: list[int], ignored: str) -> bool:
    """Print one line a case; return whether all are equal."""
    before, now = (results_of(revision, names, worlds) for revision in pair)
    equal = True
    for name in names:
        told, failed = [], []
        for place, cases in before.items():
            if all(place.partition(",")[0] != f"world {n}" for n in CASES[name].worlds):
                continue
            missing = {"error": "not trained, as another set or rank failed"}
            old, new = cases.get(name, missing), now[place].get(name, missing)
            told += [
                f"{place}, {key}: {old.get(key)} is now {new.get(key)}"
                for key in {**new, **old}
                if old.get(key) != new.get(key) and not (ignored and re.search(ignored, key))
            ]
            failed += [f"{place}: {new['error']}"] if "error" in new else []
        equal = equal and not told and not failed
        status = f"FAILS IN BOTH: {failed[0]}" if failed else "equal"
        status = f"DIFFERS {len(told)} times: {'; '.join(told[:4])}" if told else status
        print(f"{name}: {status}", flush=True)
    return equal


def golden() -> dict[str, Any]:
    """Return names, shapes and dtypes of each case's state after some steps of one process."""
    chosen = {n: case for n, case in CASES.items() if 1 in case.worlds and not case.resumes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = {name: train(case, steps=2).items() for name, case in chosen.items()}
    return {
        name: {key.removeprefix("state "): x[:2] for key, x in seen if key.startswith("state ")}
        for name, seen in trained.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revisions", nargs="*")
    parser.add_argument("--sets", default="", help="a pattern of the cases' names")
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--ignore", default="", help="a pattern of what may differ")
    parser.add_argument("--write-golden", action="store_true")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = [name for name in CASES if re.search(given.sets, name)]
    worlds = [int(world) for world in given.worlds.split(",")]
    if given.train:
        train_all(*json.loads(given.train))
    elif given.write_golden:
        GOLDEN.write_text(json.dumps(golden(), separators=(",", ":")) + "\n")
    elif not 1 <= len(given.revisions) <= 2 or not names:
        parser.error("name one or two revisions, and sets that there are")
    else:
        pair = [*given.revisions, "."][:2]
        raise SystemExit(not compare(pair, names, worlds, given.ignore))


if __name__ == "__main__":
    main()
