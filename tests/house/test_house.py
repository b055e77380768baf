"""Budgets for the size of the package and for the walks through it; each error message is in a test or on a page."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Lines and files of the package, and of the pytest plugin.
SIZES = {"customops": (43357, 179), "customops_pytest": (1048, 7)}

#: Calls of functions of the package, and changes of file between them.
WALKS = {
    "define": (165, 100),
    "register_fake": (17, 13),
    "register_autograd": (30, 18),
    "first call": (109, 57),
    "call": (2, 1),
    "first call with gradient": (94, 37),
    "call with gradient": (7, 5),
    "backward, default given": (1, 0),
    "backward, default left out": (1, 0),
    "list, call and backward": (15, 7),
}


@pytest.mark.process
def test_the_house_stays_within_its_budgets() -> None:
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "house.py"), "--json"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(run.stdout)
    for what, budgets in (("sizes", SIZES), ("walks", WALKS)):
        assert found[what].keys() == budgets.keys()
        assert {
            title: pair
            for title, pair in found[what].items()
            if pair[0] > budgets[title][0] or pair[1] > budgets[title][1]
        } == {}


# Messages ---------------------------------------------------------------------------------------------------------


def triples(text: str) -> set[tuple[str, ...]]:
    """The groups of three consecutive words of a text."""
    words = re.findall(r"\w+", text)
    return set(zip(words, words[1:], words[2:], strict=False))


def raised_texts(path: Path) -> Iterator[list[str]]:
    """The literal parts of the message of each error that a module raises, where the message stands in the ``raise``.

    What a check raises if it has nothing to try (`NotExercised`) is not an error.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            if ast.unparse(node.exc.func).endswith("Error"):
                message = node.exc.args[0]
                parts = message.values if isinstance(message, ast.JoinedStr) else [message]
                yield [each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)]


@pytest.mark.slow
def test_each_message_is_shown() -> None:
    """Three consecutive words of each message that is raised are in a test, on a page or in an example."""
    shown = {
        triple
        for folder in ("tests", "docs", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md") and path != Path(__file__)
        for triple in triples(path.read_text(encoding="utf-8"))
    }
    unshown = set()
    for package in ("customops", "customops_pytest"):
        for path in (ROOT / package).rglob("*.py"):
            for parts in raised_texts(path):
                found = [part for part in parts if triples(part)]
                if found and not any(triples(part) & shown for part in found):
                    unshown.add(" ".join(re.findall(r"\w+", " ".join(found))))
    assert not unshown
