"""The time of each stage of a step, in training steps that are run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from torch import nn

from kaisa_optim import KFACSGD
from kaisa_optim.tools.profile import REST, own_times, profile
from tests.test_stages import PREFIX, STAGES


class Net(nn.Module):
    """Has a parameter and a buffer that no module draws, a gap, and an output beside a number."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(5, 6), nn.BatchNorm1d(4)
        self.w = nn.Parameter(torch.ones(6, 3))
        self.register_parameter("gap", None)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> dict[str, object]:
        hidden = self.norm(self.words(tokens) * scale)
        return {"logits": hidden @ self.w + self.shift, "count": 3, "tokens": tokens}


def test_all_stages_of_one_process_have_a_time():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    found = profile(model, torch.randn(10, 6), steps=4)
    *stages, last = [row.stage for row in found.rows]
    assert {*stages} == STAGES - {"hand out"} and last == REST
    assert found.steps == 4 and (found.optimizer, found.device) == ("KFACAdam", "cpu")
    own = {row.stage: row for row in found.rows}
    assert all(row.first > 0 for row in found.rows)
    # Nothing is refreshed in the four steps behind the first.
    assert own["decompose"].mean == 0 < own["precondition"].mean
    assert "whole step" in repr(found) and "100.0 %" in repr(found)
    rows = json.loads(found.to_json())["rows"]
    assert [row["stage"] for row in rows] == list(own)


def test_the_interval_reaches_from_one_refresh_to_the_next():
    options = {"inv_update_steps": 3, "factor_update_steps": 2, "compute_method": "eigen"}
    found = profile(nn.Linear(3, 2), torch.randn(4, 3), optimizer=KFACSGD, lr=0.1, **options)
    own = {row.stage: row for row in found.rows}
    assert found.steps == 3 and own["decompose"].mean > 0 and "length" not in own


def test_a_model_on_the_meta_device_is_filled():
    with torch.device("meta"):
        model = Net()
        batch = {"tokens": torch.zeros(7, 4, dtype=torch.long), "scale": torch.ones(7, 4, 6)}
    found = profile(model, batch, steps=1)
    assert {row.stage for row in found.rows} > {"capture", "decompose"}
    assert all(p.isfinite().all() for p in model.parameters())
    assert model.shift.eq(0).all() and model.norm.running_var.isfinite().all()
    assert 0 < model.w.std() < 0.1


def test_a_loss_of_the_users_own():
    outputs = []

    def loss(output):
        outputs.append(output)
        return output.square().sum()

    profile(nn.Linear(3, 2), torch.randn(4, 3), loss, steps=2)
    assert len(outputs) == 3


def test_a_stage_counts_without_the_stages_within_it():
    cpu = torch._C._autograd.DeviceType.CPU

    def event(name, took, parent=None, kind=cpu):
        times = {"cpu_time_total": took, "device_time_total": 2 * took}
        return SimpleNamespace(name=name, cpu_parent=parent, device_type=kind, **times)

    outer = event(PREFIX + "hand out", 9000)
    between = event("aten::add", 100, outer)
    inner = event(PREFIX + "precondition", 4000, between)
    twin = event(PREFIX + "hand out", 9000, kind=torch._C._autograd.DeviceType.CUDA)
    events = [outer, between, inner, twin]
    assert own_times(events, on_gpu=False) == {"hand out": 5, "precondition": 4}
    assert own_times(events, on_gpu=True) == {"hand out": 10, "precondition": 8}
