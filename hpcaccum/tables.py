"""Tables of plain text, as the commands print them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)
) -> list[str]:
    """Return the lines of a table: the titles, a rule, and a line for each row.

    Columns of numbers are aligned right, those in ``left`` to the left.
    """
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    signs = ["<" if number in left else ">" for number in range(len(titles))]

    def line(cells: Sequence[str]) -> str:
        every = zip(cells, signs, widths, strict=True)
        return "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in every)

    lines = [line(cells).rstrip() for cells in (titles, *rows)]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
