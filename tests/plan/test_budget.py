"""Amounts of memory: what texts mean, and which are refused."""

from __future__ import annotations

import pytest

from kaisa_optim.plan.budget import check_budget, mega, shown


@pytest.mark.parametrize(
    ("given", "size"),
    [
        *(("80GB", 80 * 10**9), ("4GiB", 4 * 2**30), ("1.5 MiB", 3 * 2**19), ("12k", 12_000)),
        *(("100", 100), (4096, 4096), (1e9, 10**9), (0.25, 0.25), (None, None), ("2 TB", 2e12)),
    ],
)
def test_texts_numbers_and_shares(given, size):
    found = check_budget("memory_budget", given)
    assert found == size
    assert isinstance(found, float) == (size == 0.25)


@pytest.mark.parametrize(
    "bad", ["", "4 apples", "GB", "-1GB", "0.5", 0, -3, True, float("nan"), []]
)
def test_other_values_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=r"Invalid memory_budget: .*a number of bytes, a text"):
        check_budget("memory_budget", bad)


def test_bytes_as_people_write_them():
    sizes = {999: "999 bytes", 1e3: "1 kB", 12_345: "12.3 kB", 999_960_000: "1 GB"}
    sizes |= {123.4e6: "123 MB", 5.4e15: "5,400 TB", -2e9: "-2 GB"}
    assert {size: shown(size) for size in sizes} == sizes


def test_megabytes_have_three_digits():
    assert [mega(x) for x in (0, 12_345, 99.94e6, 5_432.1e6)] == ["0", "0.0123", "99.9", "5,432"]
