"""The tables of docs/types_table.md, as text."""

from __future__ import annotations

from collections import Counter

from products.typed_ops import PARTS
from products.typed_ops.row import COLUMNS

MEANINGS = {
    "yes": "right: what the same function does in plain torch",
    "-": "does not apply",
    "refused": "an error that says so",
    "unsaved": "the exported program is right, but torch cannot save it or read it again",
}


def schemas() -> str:
    """What each type is in the schema."""
    lines = ["| type | schema |", "|---|---|"]
    for title, rows in PARTS.items():
        lines += [
            f"| **{title}** | |",
            *(f"| {row.title} | `{row.schema.replace('|', chr(92) + '|')}` |" for row in rows),
        ]
    return "\n".join(lines)


def table() -> str:
    """Each type in each way to run an op."""
    titles = {row.name: row.title.replace("`", "").replace("\\|", "|") for rows in PARTS.values() for row in rows}
    width = max(map(len, titles.values()))
    counts: Counter[str] = Counter()
    lines = [" ".join(["".ljust(width), *(column.ljust(9) for column in COLUMNS)])]
    for title, rows in PARTS.items():
        lines += ["", title]
        for row in rows:
            cells = [row.cell(column) for column in COLUMNS]
            counts.update(cells)
            lines.append(" ".join([titles[row.name].ljust(width), *(cell.ljust(9) for cell in cells)]))
    assert counts.keys() == MEANINGS.keys()
    legend = [f"{word:8}{counts[word]:5}  {meaning}" for word, meaning in MEANINGS.items()]
    return "\n".join(["```text", *(line.rstrip() for line in lines), "", *legend, "```"])


def between(text: str, name: str) -> tuple[int, int]:
    """Where the part of a page is that is written for it."""
    start, end = f"<!-- {name}: make types-table -->\n", f"\n<!-- end of {name} -->"
    return text.index(start) + len(start), text.index(end)


def written(text: str) -> str:
    """A page with its tables made anew."""
    for name, made in (("schemas", schemas()), ("table", table())):
        start, end = between(text, name)
        text = text[:start] + made + text[end:]
    return text
