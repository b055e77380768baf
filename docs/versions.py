"""Writes the column of this torch into the table of versions.md; of the others it stays as it is.

python docs/versions.py            write it anew
python docs/versions.py --check    is it what would be written? Else the exit status is 1
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from customops._cli.doctor import missing, probes
from customops._versions import release, spelled

PAGE = Path(__file__).parent / "versions.md"
HERE = spelled(release(torch.__version__) or (0, 0))
YES, NO, UNKNOWN = "yes", "no", "?"
_HEAD = ("part of torch", "without it")


def column() -> dict[tuple[str, str], str]:
    """What this torch has, by row."""
    found = {(f"`{probe.subsystem}`", probe.without): not missing(probe) for probe in probes()}
    return {row: YES if has else NO for row, has in found.items()}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read(text: str) -> dict[str, dict[tuple[str, str], str]]:
    """The columns of the first table in a page, by version."""
    lines = [cells(line) for line in re.findall(r"(?m)(?:^\|.*\n)+", f"{text}\n|\n")[0].splitlines()]
    versions = lines[0][len(_HEAD) :] if lines else []
    rows = {(line[0], line[1]): line[2:] for line in lines[2:]}
    return {version: {row: found[i] for row, found in rows.items()} for i, version in enumerate(versions)}


def table(columns: dict[str, dict[tuple[str, str], str]], rows: Iterable[tuple[str, str]]) -> str:
    """The rows that differ come first."""
    versions = sorted(columns, key=release)
    lines = [(*row, *(columns[version].get(row, UNKNOWN) for version in versions)) for row in rows]
    lines.sort(key=lambda line: set(line[2:]) == {YES})
    head = ["| " + " | ".join([*_HEAD, *versions]) + " |", "|---|---|" + "---|" * len(versions)]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def page(text: str) -> str:
    """The page with the column of this torch."""
    columns = read(text) | {HERE: column()}
    made = table(columns, columns[HERE])
    return re.sub(r"(?m)(^\|.*\n)+", lambda _: made, text, count=1)


def main() -> int:
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if "--check" in sys.argv[1:]:
        print("as it should be" if new == old else f"{PAGE.name} is stale: python docs/versions.py")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
