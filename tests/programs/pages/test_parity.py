"""The table of docs/parity.md is whole and in order, and each row has tests: those marked with its number."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parents[2]
PAGE = TESTS.parent / "docs" / "parity.md"
MARKS = ("same (torch's own)", "same", "better")


class Row(NamedTuple):
    number: int
    what: str
    mark: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| \d", line):
            number, what, mark = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append(Row(int(number), what, mark))
    return found


def marked() -> dict[int, list[str]]:
    """The tests of each row, by their `pytest.mark.parity`."""
    found = defaultdict(list)
    for path in TESTS.rglob("test_*.py"):
        for test in ast.parse(path.read_text(encoding="utf-8")).body:
            for decorator in test.decorator_list if isinstance(test, ast.FunctionDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parity":
                    for row in decorator.args:
                        found[ast.literal_eval(row)].append(test.name)
    return found


def test_every_item_once_and_in_order() -> None:
    assert [row.number for row in rows()] == list(range(1, 102))


def test_every_row_has_tests_and_no_other() -> None:
    assert marked().keys() == {row.number for row in rows()}


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row.number))
def test_row(row: Row) -> None:
    mark, _, remark = re.match(r"([^:,]*)([:,]?)(.*)", row.mark).groups()  # type: ignore[union-attr]
    assert mark in MARKS
    assert remark or mark.startswith("same"), "say how it is better, or why it is not there"
