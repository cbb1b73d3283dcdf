"""Columns of text."""

from tpuscope.tables import table


def test_columns_are_aligned_as_asked_and_lines_have_no_trailing_blanks():
    rows = [("name", "bytes", "note"), ("a", "12", ""), ("longer", "3", "x")]
    assert table(rows, "<>").splitlines() == [
        "name    bytes  note",
        "a          12",
        "longer      3  x",
    ]


def test_no_rows_are_no_lines():
    assert table([]) == ""
