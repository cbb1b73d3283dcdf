"""Tables for people: rows of text as aligned columns."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], align: str = "") -> str:
    """Return rows as lines of aligned columns, two spaces apart.

    Args:
        rows: cells of each row; all rows have the same number.
        align: ``<`` or ``>`` for each column; left if not given.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = align.ljust(len(widths), "<")
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(align, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in rows)
