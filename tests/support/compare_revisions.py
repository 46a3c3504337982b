"""Compare two revisions bit for bit: ``python -m tests.support.compare_revisions OLD [NEW]``.

The tool trains the same small networks with the package of both revisions, on one process and on
groups of 2 and 4 ranks, and names the first step and tensor whose bits differ. NEW is the working
tree if it is left out. ``--ignore`` leaves out state entries by a pattern, for changes that are
meant. ``--write-golden FILE`` writes names, shapes and dtypes of the states of one process.

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 20
WORLDS = (1, 2, 4)
ROWS = 8  # examples of a step, of all ranks together

Step = dict[str, str]  # a hash of each parameter's bits


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.grouped = nn.Conv2d(4, 4, 3, stride=2, groups=2)
        self.batch = nn.BatchNorm2d(4)
        self.back = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.wide = nn.Linear(32, 160)
        self.head = nn.Linear(160, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        x = self.back(self.batch(self.grouped(x)).tanh())
        return self.head(self.wide(x.flatten(1)).tanh())


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.wide = nn.Linear(4, 8)
        self.narrow = nn.Linear(8, 4, bias=False)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = x + self.narrow(self.wide(x).tanh())
        return self.head(x.mean(1))


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


half, brain = torch.float16, torch.bfloat16
inverse = {"compute_method": "inverse"}
eigenbasis = {"moments": "eigenbasis"}
CASES: dict[str, Case] = {
    "eigen": Case(),
    "tokens": Case("tokens"),
    "double": Case(dtype=torch.float64),
    "inverse pi": Case(options=inverse),
    "inverse full": Case("tokens", options={**inverse, "damping_split": "full"}),
    "inverse split owners": Case("chain", options={**inverse, "colocate_factors": False}),
    "stored products": Case(options={"compute_eigenvalue_outer_product": True}),
    "ekfac examples": Case("tokens", options={"eigenvalue_correction": "examples"}),
    "ekfac images": Case(options={"eigenvalue_correction": "examples"}, micro=2),
    "ekfac gradients": Case(options={"eigenvalue_correction": "gradients"}),
    "truncated": Case("tokens", options={"truncation": 0.5}),
    "refined": Case(options={"basis_tolerance": 0.3}),
    "refined, often anew": Case("chain", options={"basis_tolerance": 0.01}),
    "adam": Case("tokens", "KFACAdam"),
    "adam images": Case(optimizer="KFACAdam", options={"weight_decay": 0.01}),
    "adam by name": Case("chain", "KFACAdam", options=eigenbasis, branches=True),
    "adam parameters": Case("chain", "KFACAdam", options={"moments": "parameters"}),
    "adamw": Case("tokens", "AdamW"),
    "lamb": Case("tokens", "KFACLAMB"),
    "lamb parameters": Case(optimizer="KFACLAMB", options={"moments": "parameters"}),
    "muon": Case("tokens", "KFACMuon"),
    "muon images": Case(optimizer="KFACMuon", options={"nesterov": False}),
    "layer-wise": Case(options={"assignment": "layer-wise"}, worlds=(2, 4)),
    "layer-wise adam": Case("tokens", "KFACAdam", {"assignment": "layer-wise"}, worlds=(2, 4)),
    "hybrid": Case("tokens", options={"assignment": "hybrid"}, worlds=(2, 4)),
    "hybrid lamb": Case("chain", "KFACLAMB", {"grad_worker_fraction": 0.5}, worlds=(4,)),
    "hybrid small buckets": Case(
        options={"grad_worker_fraction": 0.5, "bucket_cap_mb": 1e-3}, worlds=(2, 4)
    ),
    "accumulation": Case(micro=2),
    "fraction": Case("tokens", options={"statistics_fraction": 0.5}),
    "reduce": Case("tokens", options={"weight_sharing": "reduce"}),
    "positions": Case("tokens", options={"loss_terms": "positions", "kl_clip": None}),
    "kaisa": Case(options={"normalization": "kaisa", "damping": 0.01}),
    "kaisa inverse": Case(options={"normalization": "kaisa", **inverse}),
    "halves": Case(options={"factor_dtype": brain, "inv_dtype": brain, "comm_dtype": brain}),
    "float16 wire": Case("tokens", options={"comm_dtype": half, "assignment": "layer-wise"}),
    "grafting": Case(options={"grafting": True, "kl_clip": None, "warmup_steps": 6}),
    "all at once": Case("chain", options={"staggered": False, "early_refreshes": (1, 5)}),
    "two at once": Case("chain", options={"staggered": 2, "inv_update_steps": 3}),
    "skipped": Case(options={"skip_layers": ["head"], "max_factor_size": 20}),
    "diagonal inverse": Case(options={**inverse, "max_factor_size": 20}),
    "frozen": Case("chain", freezes="middle.1"),
    "frozen adam": Case("chain", "KFACAdam", freezes="branch"),
    "branches": Case("chain", branches=True),
    "drawn": Case("chain", draws=True),
    "sharded": Case("chain", sharded=True, worlds=(2, 4)),
    "sharded adam": Case("tokens", "KFACAdam", sharded=True, worlds=(2, 4)),
    "resumed": Case("tokens", resumes=True),
    "resumed adam": Case("chain", "KFACAdam", resumes=True),
    "resumed refined": Case(options={"basis_tolerance": 0.3}, resumes=True),
    "schedules": Case("chain", options={"damping": lambda step: 0.1 / (1 + step)}),
}
RATES = {"KFACSGD": 0.05, "KFACAdam": 0.005, "KFACLAMB": 0.01, "KFACMuon": 0.02, "AdamW": 0.005}


# ---- training, with the package that PYTHONPATH finds ----


def build(case: Case, model: nn.Module) -> Any:
    import kaisa_optim

    name = case.optimizer
    base = {"momentum": 0.9, "weight_decay": 0.01} if name == "KFACSGD" else {}
    intervals = {"factor_update_steps": 2, "inv_update_steps": 4}
    options = {"lr": RATES[name], **base, **intervals, **case.options}
    if name == "KFACSGD" and "damping" not in options:
        options["damping"] = 0.05
    if name == "AdamW":
        return kaisa_optim.with_kfac(torch.optim.AdamW)(model, **options)
    return getattr(kaisa_optim, name)(model, **options)


def batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    labels = torch.randint(4, (ROWS,), generator=generator)
    if case.network == "tokens":
        return torch.randint(9, (ROWS, 3), generator=generator), labels
    shape = (ROWS, 2, 5, 5) if case.network == "images" else (ROWS, 7)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype), labels


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
        (F.cross_entropy(outputs, ys) / case.micro).backward()
    if world > 1 and not case.sharded:
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= world


def train(case: Case, steps: int = STEPS) -> tuple[list[Step], dict[str, Any]]:
    """Return the hashes of every step, and at the end those of the optimizer's state."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, opt = prepared(case)
    hashes = []
    for step in range(steps):
        if case.freezes and step in (7, 12):
            model.get_submodule(case.freezes).requires_grad_(step == 12)
        if case.resumes and step == 11:
            saved = io.BytesIO()
            states = [complete_state(opt)]
            if world > 1:
                dist.broadcast_object_list(states)
            torch.save((model.state_dict(), states[0]), saved)
            weights, state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
            model, opt = prepared(case)
            model.load_state_dict(weights)
            opt.load_state_dict(state)
        opt.zero_grad()
        backward(case, model, opt, step, rank, world)
        opt.step()
        hashes.append({name: bits(p) for name, p in model.named_parameters()})
    kfac = opt.preconditioner
    end: dict[str, Any] = {
        "memory": kfac.memory_usage(),
        "volume": {kind: f"{size:.6g}" for kind, size in kfac.communication_volume().items()},
    }
    state = complete_state(opt)
    if rank == 0 and not case.sharded:
        end["state"] = entries(model, opt, state)
    return hashes, end


def complete_state(opt: Any) -> Any:
    opt.consolidate_state_dict()
    return opt.state_dict()


def entries(model: nn.Module, opt: Any, state: Any) -> dict[str, list[Any]]:
    """Return shape, dtype and hash of each entry of a state, by names of parameters."""
    names = {p: name for name, p in model.named_parameters()}
    order = [names[p] for group in opt.param_groups for p in group["params"]]
    found = {}
    for index, entry in state["state"].items():
        for key, value in entry.items():
            tensor = torch.as_tensor(value)
            found[f"{order[index]}: {key}"] = [list(tensor.shape), str(tensor.dtype), bits(tensor)]
    return found


def bits(tensor: Any) -> str:
    tensor = getattr(tensor, "to_local", lambda: tensor)().detach().contiguous()
    # A zero may have either sign where it stands for a missing one: both are the same number.
    tensor = torch.where(tensor == 0, torch.zeros_like(tensor), tensor)
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def train_all(names: list[str], world: int, rank: int, port: int, out: str) -> None:
    """Train the cases in a row, in one process group."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for name in names:
        try:
            hashes, end = train(CASES[name])
            results[name] = {"steps": hashes, "end": end}
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    Path(out, f"{world}-{rank}.json").write_text(json.dumps(results))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


# ---- comparing ----


def run_revision(tree: str, names: list[str], worlds: list[int], out: str) -> None:
    """Train with the package of a tree, in processes of its own."""
    for world in worlds:
        chosen = [name for name in names if world in CASES[name].worlds]
        port = 20000 + os.getpid() % 20000 + world
        command = [sys.executable, __file__, "--train", json.dumps([chosen, world, port, out])]
        environment = {**os.environ, "PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, cwd=out)
            for rank in range(world)
        ]
        if sum(rank.wait() != 0 for rank in ranks):
            raise SystemExit(f"{tree}: training on {world} ranks failed")


def results_of(revision: str, names: list[str], worlds: list[int]) -> dict[str, Any]:
    """Return the results of a revision; those of a commit are kept, with all cases."""
    git = ["git", "-C", str(Path(__file__).parents[2])]
    top = subprocess.check_output([*git, "rev-parse", "--show-toplevel"], text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        if revision == ".":
            run_revision(top, names, worlds, folder)
            return load(Path(folder), worlds)
        commit = subprocess.check_output([*git, "rev-parse", revision], text=True).strip()
        key = repr([commit, Path(__file__).read_text(), torch.__version__])
        digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        kept = Path(tempfile.gettempdir(), "compare_revisions", digest)
        missing = [world for world in worlds if not (kept / f"{world}-0.json").exists()]
        if missing:
            kept.mkdir(parents=True, exist_ok=True)
            tree = str(Path(folder, "tree"))
            subprocess.check_call([*git, "worktree", "add", "--detach", "-q", tree, commit])
            try:
                run_revision(tree, list(CASES), missing, str(kept))
            finally:
                subprocess.check_call([*git, "worktree", "remove", "--force", tree])
        return load(kept, worlds)


def load(folder: Path, worlds: list[int]) -> dict[str, Any]:
    found = {}
    for world in worlds:
        for rank in range(world):
            found[f"{world}-{rank}"] = json.loads((folder / f"{world}-{rank}.json").read_text())
    return found


def differences(old: dict[str, Any], new: dict[str, Any], ignored: str) -> Iterator[str]:
    """Yield the first difference of one case on one rank, and all differences of its end."""
    if "error" in old or "error" in new:
        if old.get("error") != new.get("error"):
            yield f"old: {old.get('error', 'trained')}; new: {new.get('error', 'trained')}"
        return
    for step, (one, other) in enumerate(zip(old["steps"], new["steps"], strict=True)):
        different = [name for name in one if one[name] != other.get(name)]
        if different:
            yield f"step {step}: {different[0]} and {len(different) - 1} more parameters"
            break
    for kind in ("memory", "volume", "state"):
        one, other = old["end"].get(kind, {}), new["end"].get(kind, {})
        for key in sorted({*one, *other}):
            if one.get(key) != other.get(key) and not (ignored and re.search(ignored, key)):
                yield f"{kind} {key}: {one.get(key)} is now {other.get(key)}"
                break


def compare(old: str, new: str, names: list[str], worlds: list[int], ignored: str) -> bool:
    """Print one line a case; return whether all are equal."""
    results = [results_of(revision, names, worlds) for revision in (old, new)]
    equal = True
    for name in names:
        found = []
        for where in results[0]:
            if name in results[0][where]:
                pair = (result[where][name] for result in results)
                found += [f"{where}: {text}" for text in differences(*pair, ignored)]
        failed = [r[name]["error"] for r in results[1].values() if "error" in r.get(name, {})]
        status = f"fails in both: {failed[0]}" if failed and not found else "equal"
        print(f"{name}: {'; '.join(found[:4]) or status}")
        equal = equal and not found
    return equal


def golden() -> dict[str, Any]:
    """Return names, shapes and dtypes of each case's state after some steps of one process."""
    result: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in CASES.items():
            if 1 in case.worlds and not case.resumes:
                _, end = train(case, steps=2)
                result[name] = {key: value[:2] for key, value in end["state"].items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revisions", nargs="*")
    parser.add_argument("--sets", default="", help="a pattern of the cases' names")
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--ignore", default="")
    parser.add_argument("--write-golden")
    parser.add_argument("--train")
    parser.add_argument("--rank", type=int, default=0)
    given = parser.parse_args()
    if given.train:
        names, world, port, out = json.loads(given.train)
        train_all(names, world, given.rank, port, out)
    elif given.write_golden:
        Path(given.write_golden).write_text(json.dumps(golden(), separators=(",", ":")) + "\n")
    else:
        old, new = [*given.revisions, "."][:2]
        names = [name for name in CASES if re.search(given.sets, name)]
        worlds = [int(world) for world in given.worlds.split(",")]
        raise SystemExit(not compare(old, new, names, worlds, given.ignore))


if __name__ == "__main__":
    main()
