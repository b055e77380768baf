"""Fixtures that several files of this folder use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.projects import Project

import customops


@pytest.fixture
def project(pytester: pytest.Pytester, ns: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project with some ops. pytest runs on it in this process, unless it is told otherwise."""
    root = str(pytester.path)

    def restore(self: Any) -> None:
        """Take out of `sys.modules` what is of the project. pytest would take out all, which torch does not survive."""
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(root):
                del sys.modules[name]

    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", restore)
    monkeypatch.setenv("PYTHONPATH", str(Path(customops.__file__).parents[1]), prepend=os.pathsep)
    monkeypatch.delenv("CI", raising=False)  # there pytest shows each error twice, in full
    yield Project(pytester, ns)
    customops.default_registry.clear()
