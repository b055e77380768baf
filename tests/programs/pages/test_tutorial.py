"""The notebook of the tutorial is made of its pages. tests/programs/pages/test_docs.py runs the pages."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorial"
PAGES = sorted(TUTORIAL.glob("*.md"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tutorial_notebook", TUTORIAL / "notebook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_files(text: str) -> str:
    return re.sub(r"\([^()\s]+\.py:\d+\)", "(file)", text).strip()


def test_the_notebook_has_the_pages(script: ModuleType) -> None:
    written = json.loads(script.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    pages = script.cells()
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in written] == [
        (kind, source.rstrip("\n")) for kind, source, _ in pages
    ], "run `make notebook`"
    for cell, (_, _, output) in zip(written, pages, strict=True):
        if output is not None:
            (printed,) = cell["outputs"]
            assert without_files("".join(printed["text"])) == without_files(output)


def test_each_block_is_a_cell(script: ModuleType) -> None:
    blocks = [block for page in PAGES for block in re.findall(r"^```python\n", page.read_text("utf-8"), re.MULTILINE)]
    assert len(blocks) == sum(kind == "code" for kind, _, _ in script.cells()) - 1  # and the one that sets up


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_begins_with_its_end(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert text.split("\n\n")[1].startswith("At the end of this page")
