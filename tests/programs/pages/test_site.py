"""The pages of the site: how many groups the sidebar has, and how long pages are."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import customops

DOCS = Path(__file__).parents[3] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: The command line is one page, to be searched as one.
LONGER = {"cli"}


def entries(page: Path) -> list[str]:
    """What the toctrees of a page name."""
    found = []
    for block in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        found += [line for line in block.splitlines() if line and not line.startswith(":")]
    return found


def test_the_sidebar_has_few_groups() -> None:
    captions = re.findall(r"^:caption: (.*)$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(captions) == len(set(captions)) <= 7


def test_each_page_is_in_the_sidebar_once() -> None:
    named = Counter(entry for page in PAGES for entry in entries(page))
    assert named == Counter(path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES if path.stem != "index")


def test_titles_differ() -> None:
    titles = Counter(page.read_text(encoding="utf-8").partition("\n")[0].lower() for page in PAGES)
    assert [title for title, count in titles.items() if count > 1] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_not_long(page: Path) -> None:
    assert page.stem in LONGER or len(page.read_text(encoding="utf-8").splitlines()) <= 300, "divide the page"


@pytest.mark.parametrize("function", [customops.custom_op, customops.register_kernel])
def test_each_option_is_in_a_group(function: Any) -> None:
    """Of the tables of docs/api.md, in one row each."""
    page = (DOCS / "api.md").read_text("utf-8")
    table = page.partition(f"options of `{function.__name__}` |\n")[2].partition("\n\n")[0]
    named = re.findall("`([a-z_]+)`", table)
    parameters = inspect.signature(function).parameters.values()
    assert sorted(named) == sorted(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
