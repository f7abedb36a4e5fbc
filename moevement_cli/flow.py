"""Layout of cells in lines of a terminal. A cell is never cut, however narrow the terminal is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text

GAP = 2
"""Columns of space between cells."""


def flow(cells: Iterable[Text], width: int, indent: int = 0) -> Iterator[Text]:
    """Yield lines of cells, filled up to ``width`` columns. A cell stays in one piece."""
    line = Text(" " * indent)
    for cell in cells:
        if line.cell_len > indent and line.cell_len + GAP + cell.cell_len > width:
            yield line
            line = Text(" " * indent)
        line.append(" " * GAP if line.cell_len > indent else "").append_text(cell)
    if line.cell_len > indent:
        yield line


def columns(cells: Sequence[Text], width: int) -> Iterator[Text]:
    """Yield lines of cells, padded to columns as wide as the widest cell."""
    widest = max((cell.cell_len for cell in cells), default=0)
    for cell in cells:
        cell.pad_right(widest - cell.cell_len)
    yield from flow(cells, width)


def facts(pairs: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    """Yield pairs of lines: a line of names, and below it a line of their values. ``width`` limits both."""
    row = list[tuple[str, str, int]]()
    for name, value in pairs:
        wide = max(len(name), len(value)) + GAP
        if row and sum(wide for *_, wide in row) + wide - GAP > width:
            yield from _pairs(row)
            row = []
        row.append((name, value, wide))
    yield from _pairs(row)


def _pairs(row: Sequence[tuple[str, str, int]]) -> Iterator[Text]:
    yield Text("".join(name.ljust(wide) for name, _, wide in row).rstrip(), "cyan")
    yield Text("".join(value.ljust(wide) for _, value, wide in row).rstrip(), "bold")


def shortened(text: str, width: int) -> str:
    """Return a path that fits into ``width`` columns. The function keeps the end of the path, where paths differ."""
    return text if len(text) <= width else f"…{text[len(text) - max(0, width - 1) :]}"
