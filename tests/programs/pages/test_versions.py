"""docs/versions.md, and the torch versions that the package says it is for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from customops import _versions
from customops._cli.doctor import without
from customops._torch.patches import PATCHES, STAGES

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("docs_versions_script", ROOT / "docs" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_page_has_the_column_of_this_torch(script: Any) -> None:
    columns = script.read(script.PAGE.read_text(encoding="utf-8"))
    if script.HERE not in columns:
        pytest.skip(f"the page has no column for torch {script.HERE}")
    assert columns[script.HERE] == script.column(), f"make versions-table TORCH={torch.__version__}"


def test_the_page_lists_the_places_of_torch_that_are_changed(script: Any) -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    rows = [(f"`{patch.place.replace(':', '.')}`", STAGES[patch.stage], without(patch)) for patch in PATCHES]
    assert "\n".join(f"| {' | '.join(row)} |" for row in rows) in text


def test_the_page_has_all_supported_versions(script: Any) -> None:
    columns = script.read(script.PAGE.read_text(encoding="utf-8"))
    assert next(iter(columns)) == _versions.spelled(_versions.OLDEST)
    assert list(columns)[-1] == _versions.spelled(_versions.NEWEST)
    assert {cell for column in columns.values() for cell in column.values()} <= {script.YES, script.NO}


def test_a_column_replaces_that_of_its_version_alone(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "HERE", "2.9")
    monkeypatch.setattr(script, "column", lambda: {("a", "b"): "yes", ("c", "d"): "no"})
    before = "text\n\n| part of torch | without it | 2.10 |\n|---|---|---|\n| a | b | yes |\n\nmore\n"
    assert script.page(before).splitlines()[2:-2] == [
        "| part of torch | without it | 2.9 | 2.10 |",
        "|---|---|---|---|",
        "| c | d | no | ? |",
        "| a | b | yes | yes |",
    ]
    assert script.page(script.page(before)) == script.page(before)


def test_one_oldest_torch() -> None:
    oldest = _versions.spelled(_versions.OLDEST)
    assert f'dependencies = ["torch>={oldest}", ' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.13.0+cpu", (2, 13)), ("2.9.1", (2, 9)), ("3.0.0a0+git12", (3, 0)), ("source", None)]
)
def test_release(version: str, numbers: tuple[int, int] | None) -> None:
    assert _versions.release(version) == numbers


@pytest.mark.parametrize("version", ["2.13.0", "2.16.0.dev20270101", "source"])
def test_what_is_not_older_is_not_refused(version: str) -> None:
    _versions.refuse_older(version, None)


@pytest.mark.process
def test_an_older_torch_is_refused_before_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('__version__ = "2.12.1+cpu"\n')
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", "import customops"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith(
        "ImportError: customops: the installed torch is too old\n"
        "  expected: torch 2.13 or newer\n"
        f"  got:      torch 2.12.1+cpu ({tmp_path / 'torch.py'})\n"
        '  fix:      pip install --upgrade "torch>=2.13"\n'
    )
