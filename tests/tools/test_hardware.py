"""Profiles: times between sizes, links of two levels, and files that are refused."""

from __future__ import annotations

import pytest

from kaisa_optim.tools import hardware
from kaisa_optim.tools.hardware import OPERATIONS, PROFILES, Times

NAMES = sorted(path.stem for path in PROFILES.glob("*.toml"))
ROWS = [[100, 1.0, 0.5], [1000, 100.0, 50.0]]
PLAIN = {
    **{"title": "A device", "device": "cpu", "memory_gb": 16, "ranks_per_node": 2},
    **{"tflops": 0.5, "memory_gb_per_s": 10.0, "host_us": 100},
    **{"host_layer_us": 10, "margin": 0.25},
    "sources": ["a measurement", 'a "quoted" one'],
    "links": {
        "inside": {"gb_per_s": 10, "latency_us": 5, "each_us": 1},
        "between": {"gb_per_s": 1, "latency_us": 50},
    },
    "times_ms": dict.fromkeys(OPERATIONS, ROWS),
}


def test_times_between_and_beyond_the_sizes_that_were_measured():
    times = Times.of(ROWS)
    assert times.seconds(100) == 1e-3
    assert times.seconds(10) == 1e-3  # a call takes its time
    assert times.seconds(10**2.5) == pytest.approx(1e-2)
    assert times.seconds(2000) == pytest.approx(8 * 0.1)
    assert times.seconds(1000, 3) == pytest.approx(0.2)
    assert times.seconds(1000, 0) == 0


def test_bytes_to_other_nodes_take_the_slower_link():
    found = hardware.parse("x", PLAIN)
    assert found.transfer(10**9, 1, 1) == found.transfer(0, 4, 2) == 0
    assert found.transfer(10**9, 2, 2, calls=0) == pytest.approx(0.1)
    # Of three others, one is on the node.
    assert found.transfer(3 * 10**9, 4, 2, calls=0) == pytest.approx(0.1 + 2)
    calls = found.transfer(3 * 10**9, 4, 2, calls=2) - 2.1
    assert calls == pytest.approx(2 * (50e-6 + 1e-6))


def test_a_ring_crosses_each_nodes_line_once():
    found = hardware.parse("x", PLAIN)
    assert found.ring(10**9, 1) == 0
    assert found.ring(10**9, 2) == pytest.approx(5e-6 + 0.1)
    assert found.ring(10**9, 8) == pytest.approx(50e-6 + 0.5)  # two ranks' shares of the line


@pytest.mark.parametrize("name", NAMES)
def test_profiles_of_the_package_say_their_sources(name):
    found = hardware.load(name)
    assert found.name == name and found.sources and 0 < found.margin < 1
    for kind in OPERATIONS:
        times = found.times.get(kind, found.times["products"])
        assert list(times.sides) == sorted(times.sides)
        assert list(times.first) == sorted(times.first), kind
        assert all(x > 0 for x in times.further)
    assert found.between.bandwidth <= found.inside.bandwidth


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"margin": 0}, "margin must be a number above 0"),
        ({"host_us": "many"}, "'many' in the profile 'mine'; host_us must be"),
        ({"title": None}, "lacks 'title'"),
        ({"times_ms": {"products": ROWS}}, "lacks 'roots'"),
        ({"links": {"inside": {}}}, "lacks 'gb_per_s'"),
    ],
)
def test_a_profile_with_a_fault_is_refused_by_name(tmp_path, change, said):
    values = {name: value for name, value in (PLAIN | change).items() if value is not None}
    path = tmp_path / "mine.toml"
    path.write_text(hardware.text(values))
    with pytest.raises(ValueError, match=f"Invalid device: .*{said}"):
        hardware.load(path)


def test_a_profile_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Invalid device: 'h200'; choose from .*'h100'"):
        hardware.load("h200")
    (tmp_path / "broken.toml").write_text("title = ")
    with pytest.raises(ValueError, match=r"broken.toml is no TOML file"):
        hardware.load(tmp_path / "broken.toml")


def test_profiles_by_torchs_names_of_devices():
    names = {"Tesla V100-SXM2-16GB": "v100", "NVIDIA A100-SXM4-40GB": "a100", "NVIDIA B200": "h100"}
    assert {title: hardware.named_for("cuda", title) for title in names} == names
    assert hardware.named_for("cpu") == "cpu"
