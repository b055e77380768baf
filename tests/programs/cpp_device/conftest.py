"""Fixtures that several files of this folder use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.cpp_device import python


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the extension is built, by the first process that needs it."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    missing = python("import toy; print(*toy.missing_tools())").stdout.split()
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # torch has one of its workers build it
    (shared / "cpp_device").mkdir(exist_ok=True)
    return shared / "cpp_device"


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, build: Path) -> dict[str, str]:
    """What was raised by each of the checks of a file, which runs as a script for that."""
    python(request.path, build)
    outcomes: dict[str, str] = json.loads((build / f"{request.path.stem}.json").read_text())
    return outcomes
