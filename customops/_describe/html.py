"""Tables for notebooks. Plain HTML without scripts or style sheets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_COLORS = {
    "yes": "#2e7d32",
    "handles": "#2e7d32",
    "slow": "#9e7700",
    "derived": "#9e7700",
    "no": "#c62828",
    "missing": "#c62828",
    "raises": "#c62828",
}


def page(title: str, *parts: str) -> str:
    return f"<div><b><code>{escape(title)}</code></b>{''.join(parts)}</div>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells that are one word with a colour have it."""
    titles = "".join(f'<th style="text-align:left">{escape(title)}</th>' for title in head)
    return f"<table><tr>{titles}</tr>{''.join(map(_row, rows))}</table>"


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(map(_cell, cells))}</tr>"


def _cell(text: str) -> str:
    color = f";color:{_COLORS[text]}" if text in _COLORS else ""
    return f'<td style="text-align:left{color}">{escape(text)}</td>'
