"""States that users have saved: their names and shapes stay."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.compare_revisions import golden

DATA = Path(__file__).parents[1] / "data"


def test_names_shapes_and_dtypes_of_states_are_a_contract():
    assert golden() == json.loads((DATA / "golden_state.json").read_text())
