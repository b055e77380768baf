"""Text for screens of 60 to 120 columns."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Sequence

NARROWEST, WIDEST = 60, 120


def width_of_screen() -> int:
    """The columns of the terminal, or those that ``COLUMNS`` says, but at least 60 and at most 120."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((100, 24)).columns))


def shorter_place(place: str, room: int = 48) -> str:
    """``file:line`` below the current directory, or else its end, in `room` columns where that can be done."""
    file, _, line = place.rpartition(":")
    if not file or not os.path.isabs(file):
        return place
    try:
        relative = os.path.relpath(file)
    except ValueError:  # another drive
        relative = file
    if not relative.startswith(os.pardir + os.sep):
        return f"{relative}:{line}"
    parts = file.split(os.sep)
    while len(parts) > 2 and sum(map(len, parts)) + len(parts) + len(line) > room:
        parts = parts[1:]
    shown = os.sep.join(parts)
    return f"{shown if len(shown) == len(file) else os.path.join('...', shown)}:{line}"


def entry(label: str, text: str, width: int, *, column: int = 21, indent: str = "  ") -> str:
    """``  label     text``, with further lines of the text below its first one."""
    start, blank = f"{indent}{label:<{column}}", " " * (len(indent) + column)
    if len(start) > len(blank):
        start += " "
    text = text or "-"
    if len(start) + len(text.split(maxsplit=1)[0]) > width and len(start) > len(blank):
        return f"{indent}{label}\n{filled(text, width, first=blank, rest=blank)}"
    return filled(text, width, first=start, rest=blank)


def plural(number: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def filled(text: str, width: int, *, first: str = "", rest: str = "") -> str:
    """A text in lines of `width` that begin so; long words stay whole."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def table(rows: Sequence[Sequence[str]], head: Sequence[str], width: int, *, right: Sequence[int] = ()) -> str:
    """Columns, two spaces apart. Where they are too many for the width, each row is a block of its own.

    `right` are the columns that are flush right. In blocks, the first column is a line, and the others follow.
    """
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    if sum(widths) + 2 * (len(widths) - 1) > width:
        return "\n".join(_block(row, head, width) for row in rows)
    lines.insert(1, ["-" * each for each in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(size) if i in right and cell.strip("-") else cell.ljust(size)
            for i, (cell, size) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _block(row: Sequence[str], head: Sequence[str], width: int) -> str:
    column = max(map(len, head[1:]), default=0) + 2
    pairs = [(title, cell) for title, cell in zip(head[1:], row[1:], strict=True) if cell]
    return "\n".join([row[0], *(entry(title, cell, width, column=column) for title, cell in pairs)])
