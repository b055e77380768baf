"""HTML for notebooks, without scripts or style sheets: each notebook shows it, on light and dark grounds alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_GREEN, _AMBER, _RED, _BLUE, _GREY = "#2e7d32", "#8a5a00", "#c62828", "#1565c0", "#616161"
#: What is shown as white letters on a colour.
_BADGES = {
    **dict.fromkeys(("passed", "yes", "handles"), _GREEN),
    **dict.fromkeys(("not exercised", "slow", "derived"), _AMBER),
    **dict.fromkeys(("failed", "no", "missing", "raises"), _RED),
    "redispatches": _BLUE,
    **dict.fromkeys(("rejected", "falls through"), _GREY),
}
_EDGE = "1px solid rgba(128,128,128,.5)"
_CELL = f"border:{_EDGE};padding:3px 8px;text-align:left;vertical-align:top;white-space:pre-line"
_HEAD = f"{_CELL};background:rgba(128,128,128,.15)"
_PRE = "font-family:monospace;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;margin:6px 0"
_BOX = f"border:{_EDGE};border-radius:6px;padding:4px 10px;text-align:center"


def page(title: str, *parts: str, status: str = "") -> str:
    """All that is shown of an object; a bar at its left has the colour of the status."""
    style = f"border-left:4px solid {_BADGES.get(status, _GREY)};padding-left:12px;max-width:70em;overflow-x:auto"
    return f'<div style="{style}"><code style="white-space:pre-wrap"><b>{_text(title)}</b></code>{"".join(parts)}</div>'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of cells. A cell that is a status is a badge; columns with nothing in them are left out."""
    rows = [*rows]
    used = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)] or range(len(head))
    head, rows = [head[i] for i in used] if head else (), [[row[i] for i in used] for row in rows]
    titles = "".join(f'<th style="{_HEAD}">{_text(title)}</th>' for title in head)
    lines = ("".join(f'<td style="{_CELL}">{_cell(cell)}</td>' for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in ([titles] if head else []) + [*lines])
    return f'<table style="border-collapse:collapse;margin:8px 0">{body}</table>'


def folded(summary: str, *parts: str, is_open: bool = False) -> str:
    """Parts below a line that opens and closes them."""
    line = f'<summary style="cursor:pointer">{_text(summary)}</summary>'
    return f'<details{" open" * is_open} style="margin:6px 0">{line}{"".join(parts)}</details>'


def preformatted(text: str) -> str:
    return f'<pre style="{_PRE}">{escape(text)}</pre>'


def paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>" if text else ""


def path(steps: Iterable[tuple[str, str]], end: str) -> str:
    """A picture of a call: a box for each place and what is done there, arrows between, and where it ends."""
    boxes = [f'<span style="{_BOX}">{_text(place)}<br>{_cell(action)}</span>' for place, action in steps]
    boxes.append(f'<span style="{_BOX};border-width:2px"><b>{_text(end)}</b></span>')
    inside = "<span>&rarr;</span>".join(boxes)
    return f'<div style="display:flex;flex-wrap:wrap;align-items:center;gap:6px;margin:8px 0">{inside}</div>'


def _cell(text: str) -> str:
    """A text; a status is a badge."""
    if text not in _BADGES:
        return _text(text)
    style = f"background:{_BADGES[text]};color:#fff;border-radius:4px;padding:0 6px;white-space:nowrap;font-size:90%"
    return f'<span style="{style}">{text}</span>'


def _text(text: str) -> str:
    """Text that may be broken after a slash: places are long."""
    return escape(text).replace("/", "/<wbr>")
