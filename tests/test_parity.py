"""The table of docs/parity.md: whole, in order, and each test it names is there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "parity.md"
MARKS = ("same (torch's own)", "same", "better")


class Row(NamedTuple):
    number: int
    what: str
    mark: str
    tests: list[str]


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| \d", line):
            number, what, mark, tests = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append(Row(int(number), what, mark, re.findall(r"`(\S+)`", tests)))
    return found


@functools.cache
def defined(file: str) -> set[str]:
    """The names of the tests that a file has."""
    path = TESTS / file
    nodes = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_item_once_and_in_order() -> None:
    assert [row.number for row in rows()] == list(range(1, 102))


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row.number))
def test_row(row: Row) -> None:
    mark, _, remark = re.match(r"([^:,]*)([:,]?)(.*)", row.mark).groups()  # type: ignore[union-attr]
    assert mark in MARKS
    assert remark or mark.startswith("same"), "say how it is better, or why it is not there"
    assert row.tests
    missing = [test for test in row.tests if test.partition("::")[2] not in defined(test.partition("::")[0])]
    assert not missing
