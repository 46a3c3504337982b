"""Tables and numbers of plain text."""

from kaisa_optim.tools.texts import aligned, mega, milliseconds, shown


def test_numbers_stand_under_each_other():
    rows = [["strategy", "bytes"], ["opt", "12 kB"], ["layer-wise", "1 kB"]]
    assert list(aligned(rows)) == ["strategy    bytes", "opt         12 kB", "layer-wise   1 kB"]


def test_bytes_as_people_write_them():
    sizes = {999: "999 bytes", 1e3: "1 kB", 12_345: "12.3 kB", 999_960_000: "1 GB"}
    sizes |= {123.4e6: "123 MB", 5.4e15: "5,400 TB", -2e9: "-2 GB"}
    assert {size: shown(size) for size in sizes} == sizes


def test_numbers_have_three_digits():
    assert [mega(x) for x in (0, 12_345, 99.94e6, 5_432.1e6)] == ["0", "0.0123", "99.9", "5,432"]
    times = (0.0, 1.2345e-4, 0.09994, 12.3456)
    assert [milliseconds(x) for x in times] == ["0", "0.123", "99.9", "12,346"]
