"""Tables of plain text."""

from kaisa_optim.tools.texts import aligned


def test_numbers_stand_under_each_other():
    rows = [["strategy", "bytes"], ["opt", "12 kB"], ["layer-wise", "1 kB"]]
    assert list(aligned(rows)) == ["strategy    bytes", "opt         12 kB", "layer-wise   1 kB"]
