"""Write checkpoints for the tests: ``python -m tests.support.make_checkpoints FOLDER``.

The files in ``tests/data/checkpoints`` were written at revision 32ae206, whose state had two more
numbers in each status and could hold decompositions that were under way (``refresh_lag``).
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.compare_revisions import CASES, Case, backward, prepared

SAVED_AT, STEPS = 7, 10
NAMES = (
    "tokens",
    "inverse pi",
    "ekfac gradients",
    "truncated",
    "refined",
    "adam",
    "lamb",
    "muon",
    "kaisa",
    "halves",
)


def case_of(name: str) -> Case:
    case = CASES[name]
    return dataclasses.replace(case, network="chain", dtype=torch.float64)


def go_on(case: Case, model: Any, opt: Any, steps: range) -> None:
    for step in steps:
        opt.zero_grad()
        backward(case, model, opt, step, 0, 1)
        opt.step()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def write(path: Path, case: Case) -> None:
    model, opt = prepared(case)
    go_on(case, model, opt, range(SAVED_AT))
    saved = {"model": weights(model), "optimizer": opt.state_dict()}
    saved = torch.load(_bytes(saved), weights_only=True)  # a copy
    go_on(case, model, opt, range(SAVED_AT, STEPS))
    torch.save({**saved, "expected": weights(model)}, path)


def _bytes(thing: Any) -> Any:
    import io

    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return buffer


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in NAMES:
        write(folder / f"{name.replace(' ', '_')}.pt", case_of(name))
    # Only the revision named above takes this option.
    lagging = dataclasses.replace(case_of("tokens"), options={"refresh_lag": 2, "staggered": 1})
    write(folder / "under_way.pt", lagging)


if __name__ == "__main__":
    main()
