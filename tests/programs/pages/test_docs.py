"""Run every python block of README.md and docs/: one test and one namespace a page."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from pathlib import Path

import pytest
from sybil import Document, Example
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser

import customops
from customops.testing import run_isolated

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[3]
FOLDERS = [ROOT / "docs", ROOT / "docs" / "tutorial", ROOT / "docs" / "howto"]
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted(folder.glob("*.md")))]
#: The pages beside the code, for those who change it.
BESIDE = sorted((ROOT / "customops").glob("*/README.md"))
#: Pages in a process of their own: some make a device, which stays, others run Triton's interpreter, which comes first.
DEVICES = {"backend", "backend_call", "backend_compile", "backend_distributed", "backend_memory"}
APART = {*DEVICES, "triton", "2_triton", "README"}
#: What pages need besides what all of them do.
NEEDS = {
    "triton": ("triton",),
    "2_triton": ("triton",),
    "4_ship": ("triton",),
    "README": ("triton",),
    "languages": ("numba", "tvm_ffi"),
}
PYTHON = {"py", "py3", "python3", "pycon", "ipython", "python"}
SHELL = {"sh", "bash", "zsh", "shell", "shell-session", "console"}


every_page = pytest.mark.parametrize(
    "page", [*PAGES, *BESIDE], ids=[*(page.stem for page in PAGES), *(page.parent.name for page in BESIDE)]
)


def infos(text: str) -> list[str]:
    """The info strings of the fenced blocks of a page, top-level ones only."""
    found = []
    closing = None
    for line in text.splitlines():
        fence = re.match(r"\s*(`{3,}|~{3,}|:{3,})\s*(.*?)\s*$", line)
        if fence is None:
            continue
        marks, info = fence.groups()
        if closing is None:
            closing = marks
            found.append(info)
        elif marks.startswith(closing) and not info:
            closing = None
    return found


def refused(info: str) -> bool:
    """Whether a fence is a second spelling of `python` or `console`, such as `python no-run`."""
    words = set(re.split(r"[^\w-]+", info.lower()))
    return bool(words & (PYTHON | SHELL)) and info not in ("python", "console")


@every_page
def test_blocks_are_marked_one_way(page: Path) -> None:
    wrong = [info for info in infos(page.read_text(encoding="utf-8")) if refused(info)]
    assert not wrong, f"{page.name}: write ```python (it runs) or ```console, not {wrong}"


@every_page
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for package in () if page in BESIDE else NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    if page.stem in APART and page not in BESIDE:
        run_isolated(run_blocks, page, cwd=tmp_path, timeout=300)
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, f"docs_page_{page.stem}", None)  # to be gone afterwards
    # What `pytest.main` does at its end: five times, through all objects of this process.
    monkeypatch.setattr("_pytest.unraisableexception.gc_collect_harder", lambda iterations: None, raising=False)
    before = list(customops.default_registry)
    try:
        run_blocks(page)
    finally:  # else each compilation of later tests looks at these ops: a formula may call any that there is
        while new := [op for op in customops.default_registry if op not in before]:
            new[0].unregister()


class Printed:
    """Compares an `output` block with what the python block before it printed."""

    text = ""

    def compare(self, example: Example) -> None:
        assert without_files(str(example.parsed)) == without_files(self.text), f"it printed:\n{self.text}"


def without_files(text: str) -> str:
    """Replace each ``file:line``, and the line break before a long one: the examples stand in a page, not in ops.py."""
    return re.sub(r"\s*\(?[^()\s]+\.(py|md):\d+\)?", " (file)", text).strip()


def run_blocks(page: Path) -> None:
    printed = Printed()
    document = Document.parse(str(page), PythonCodeBlockParser(), CodeBlockParser("output", printed.compare))
    # A real module, because torch.compile and the type hints look names up through sys.modules.
    module = types.ModuleType(f"docs_page_{page.stem}")
    sys.modules[module.__name__] = module
    document.namespace = module.__dict__

    examples = list(document.examples())
    blocks = infos(document.text).count("python")
    assert len({example.start for example in examples}) >= blocks, "sybil misses a block"
    for example in examples:
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            example.evaluate()
        printed.text = stdout.getvalue()


@pytest.mark.parametrize("info", ["python no-run", "py", "{code-block} python", "bash", "python {a=1}"])
def test_refused(info: str) -> None:
    assert refused(info)


@pytest.mark.parametrize("info", ["python", "console", "", "text", "{toctree}", "cpp"])
def test_accepted(info: str) -> None:
    assert not refused(info)
