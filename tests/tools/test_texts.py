"""Tables of plain text."""

from kaisa_optim.tools.texts import aligned, milliseconds


def test_numbers_stand_under_each_other():
    rows = [["strategy", "bytes"], ["opt", "12 kB"], ["layer-wise", "1 kB"]]
    assert list(aligned(rows)) == ["strategy    bytes", "opt         12 kB", "layer-wise   1 kB"]


def test_milliseconds_have_three_digits():
    assert [milliseconds(x) for x in (0.0, 1.2345e-4, 0.09994, 12.3456)] == [
        *("0", "0.123", "99.9", "12,346"),
    ]
