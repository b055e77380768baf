"""The reference has every public name, each with a sentence that says what it is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import customops

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def public_names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_public_names", DOCS / "public_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_name_is_there(public_names: ModuleType) -> None:
    text = public_names.text()
    sections = dict(re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert {"customops", "customops.errors", "customops.checks", "customops.languages"} <= set(sections)
    for module in public_names.modules():
        rows = dict(re.findall(r"^\| (?:{py:obj})?`(\w+)[^`]*` \| (.*) \|$", sections[module.__name__], re.MULTILINE))
        assert sorted(rows) == sorted(public_names.names(module)), module.__name__
        silent = [name for name, sentence in rows.items() if not sentence.strip()]
        assert not silent, "a docstring, or a `#:` comment above it, is missing"
    assert set(public_names.names(customops)) == set(customops.__all__)


def test_links_lead_to_an_entry(public_names: ModuleType) -> None:
    text = public_names.text()
    entries = set(public_names.entries()) | set(re.findall(r"^\.\. \w+:: ([\w.]+)", text, re.MULTILINE))
    assert {target for target in re.findall(r"<(customops[\w.]+)>", text)} <= entries


def test_every_name_is_on_a_page(public_names: ModuleType) -> None:
    assert public_names.without_a_page() == []
