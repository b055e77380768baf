"""Fixtures that several files of this folder use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.cpp_device import (
    python,
)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the extension is built, by the first process that needs it."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    missing = python("import toy; print(*toy.missing_tools())").stdout.split()
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    return tmp_path_factory.mktemp("cpp_device")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, build: Path) -> dict[str, str]:
    """What was raised by each of the checks of a file, which runs as a script for that."""
    python(request.path, build)
    outcomes: dict[str, str] = json.loads((build / "outcomes.json").read_text())
    return outcomes
