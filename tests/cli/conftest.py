"""A directory of its own for each test of the command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import Command, Result

import customops
from customops._cli import main as command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what is imported from it, and the ops that defines, are gone after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for variable in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    with customops.default_registry.scope():
        yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``customops`` in this process; the path of the directory is masked."""

    def run(*arguments: str) -> Result:
        code = command.main(list(arguments))
        out, err = (stream.replace(f"{here}{os.sep}", "") for stream in capsys.readouterr())
        return Result(code, out, err)

    return run
