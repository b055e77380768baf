"""What says a version says the same one."""

from __future__ import annotations

import re
from pathlib import Path

import customops

ROOT = Path(__file__).parents[3]


def first(pattern: str, file: str) -> str:
    found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, file
    return found[1]


def test_one_version() -> None:
    assert first(r'^version = "(.*)"$', "pyproject.toml") == customops.__version__
    assert first(r"^version: (.*)$", "CITATION.cff") == customops.__version__
    assert first(r"^## (\S+)", "CHANGELOG.md") == customops.__version__
