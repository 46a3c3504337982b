"""States of earlier revisions: their names and shapes stay, and their files load."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compare_revisions import CASES, golden, prepared
from tests.support.make_checkpoints import NAMES, SAVED_AT, STEPS, case_of, go_on, weights

DATA = Path(__file__).parents[1] / "data"


def load(name: str) -> Any:
    path = DATA / "checkpoints" / f"{name.replace(' ', '_')}.pt"
    return torch.load(path, weights_only=True)


def test_names_shapes_and_dtypes_of_states_are_a_contract():
    assert golden() == json.loads((DATA / "golden_state.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_from_a_file_of_an_earlier_revision(name):
    saved, case = load(name), case_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model, opt = prepared(case)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
        go_on(case, model, opt, range(SAVED_AT, STEPS))
    for key, value in weights(model).items():
        # Averages in half precision are rounded up or down now, and not to the nearest.
        rtol, atol = (0.05, 1e-3) if name == "halves" else (1e-9, 1e-12)
        torch.testing.assert_close(value, saved["expected"][key], rtol=rtol, atol=atol)


def test_a_file_with_decompositions_under_way_loads():
    """The factors as saved are decomposed in their place, at the first step."""
    saved, case = load("under way"), dataclasses.replace(CASES["eigen"], network="small")
    assert saved["optimizer"]["kfac_under_way"]
    begun = [
        entry["kfac_status"][6:]
        for entry in saved["optimizer"]["state"].values()
        if "kfac_status" in entry
    ]
    assert (torch.stack(begun) >= 0).any()
    case = dataclasses.replace(case, dtype=torch.float64, options={"staggered": 1})
    model, opt = prepared(case)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    stale = {name for name, state in opt.preconditioner.states.items() if state.stale}
    assert len(stale) == sum(bool((one >= 0).any()) for one in begun)
    go_on(case, model, opt, range(SAVED_AT, STEPS))
    assert not any(state.stale for state in opt.preconditioner.states.values())
    for key, value in weights(model).items():
        # Refreshed two steps earlier than in the run that was saved.
        torch.testing.assert_close(value, saved["expected"][key], rtol=0.1, atol=0.02)
