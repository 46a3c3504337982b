"""Measured profiles: complete, and read back."""

from __future__ import annotations

import pytest
import torch

from kaisa_optim.tools import calibration, hardware


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(calibration, "SIDES", {"cpu": (8, 16)})
    monkeypatch.setattr(calibration, "_ENOUGH", 0.0)
    monkeypatch.setattr(calibration, "_SMALL", 64)
    monkeypatch.setattr(calibration, "_LARGE", 1 << 22)


def test_a_machine_is_measured(short, tmp_path):
    seen = []

    def watch(items):
        for item in items:
            seen.append(item)
            yield item

    measured = calibration.measure("cpu", 2, watch)
    assert {side for side, _ in seen} == {8, 16} and len(seen) == 8
    path = tmp_path / "mine.toml"
    path.write_text(hardware.text(measured, calibration.COMMENT))
    found = hardware.load(path)
    assert found.device == "cpu" and found.memory > 2**30
    assert {kind: times.sides for kind, times in found.times.items()} == dict.fromkeys(
        ("products", "roots", "eigenvectors", "inverses"), (8, 16)
    )
    assert 0 < found.inside.latency < 10 and found.inside == found.between
    assert found.ranks_per_node == 2 and "between 2 ranks" in found.sources[1]
    same = {row[4] for row in calibration.compare(found, measured)}
    assert same <= {"+0 %", "-0 %"}


def stopped(rank, ranks, port, to):
    """A rank that ends before it has exchanged anything."""


def test_ranks_that_end_early_are_told(monkeypatch):
    monkeypatch.setattr(calibration, "_exchange", stopped)
    with pytest.raises(ValueError, match="Invalid ranks: 1 ranks did not exchange anything"):
        calibration.links(1)


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_a_device_that_is_not_there_is_refused(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=f"Invalid device: '{device}'; it must be"):
        calibration.measure(device, 1)


@pytest.mark.parametrize("times", [(1.0, 0.5), (1.0, 8.0)])
def test_a_profile_has_no_time_of_zero(times, monkeypatch):
    """Timings vary: many layers may seem to take less time than a few, or a group none."""
    few, many = times
    monkeypatch.setattr(calibration, "_host", lambda copies, device: few if copies == 1 else many)
    assert all(seconds > 0 for seconds in calibration.host("cpu"))
