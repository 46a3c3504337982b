"""Write checkpoints for the tests: ``python -m tests.support.make_checkpoints FOLDER``.

The files in ``tests/data/checkpoints`` were written with the package of revision 32ae206. Its state
had two more numbers in each status and could hold decompositions that were under way
(``refresh_lag``). To write them again, run a copy of ``tests/support`` in an empty folder, with
PYTHONPATH at a worktree of that revision.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from tests.support.compare_revisions import CASES, Case, backward, prepared

SAVED_AT, STEPS = 7, 10
TWO_RANKS = "two ranks"  # consolidated from them; a single process goes on
NAMES = (
    "eigen",
    "inverse pi",
    "muon",
    "kaisa",
    "halves",
    TWO_RANKS,
)


def case_of(name: str) -> Case:
    # By default, as many layers are refreshed at a time as there are ranks.
    shared = Case(options={"assignment": "layer-wise", "staggered": 1})
    case = shared if name == TWO_RANKS else CASES[name]
    return dataclasses.replace(case, network="small", dtype=torch.float64)


def go_on(case: Case, model: Any, opt: Any, steps: range, rank: int = 0, world: int = 1) -> None:
    """Train for some steps."""
    for step in steps:
        opt.zero_grad()
        backward(case, model, opt, step, rank, world)
        opt.step()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def write(path: Path, case: Case, rank: int = 0, world: int = 1) -> None:
    """Write a model's and its optimizer's state, and the weights after some more steps."""
    model, opt = prepared(case)
    go_on(case, model, opt, range(SAVED_AT), rank, world)
    opt.consolidate_state_dict()
    buffer = io.BytesIO()
    torch.save({"model": weights(model), "optimizer": opt.state_dict()}, buffer)
    go_on(case, model, opt, range(SAVED_AT, STEPS), rank, world)
    if rank == 0:
        saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        torch.save({**saved, "expected": weights(model)}, path)


def write_of_rank(rank: int, world: int, path: Path, case: Case, folder: str) -> None:
    """Write what rank 0 has consolidated."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", None, world, rank)
    write(path, case, rank, world)
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in NAMES:
        path = folder / f"{name.replace(' ', '_')}.pt"
        if name == TWO_RANKS:
            with tempfile.TemporaryDirectory() as meeting:
                spawn(write_of_rank, (2, path, case_of(name), meeting), 2)
        else:
            write(path, case_of(name))
    # Only the revision named above takes this option.
    lagging = dataclasses.replace(case_of("eigen"), options={"refresh_lag": 2, "staggered": 1})
    write(folder / "under_way.pt", lagging)


if __name__ == "__main__":
    main()
