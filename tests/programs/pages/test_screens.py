"""docs/screens.md is what its script writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from helpers.warm import PYTHON

ROOT = Path(__file__).parents[3]


@pytest.mark.process
def test_the_page_is_up_to_date() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [PYTHON, ROOT / "docs" / "screens.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "screens.md is up to date\n", done.stderr


def test_screens_keep_to_their_width() -> None:
    """But for paths, names and schemas, which are kept whole: lines of 60 columns have at most a few over."""
    text = (ROOT / "docs" / "screens.md").read_text(encoding="utf-8")
    for width in (60, 120):
        blocks = text.split(f"\n{width} columns:\n\n```text\n")[1:]
        lines = [line for block in blocks for line in block.partition("\n```")[0].splitlines() if "  -> " not in line]
        assert [line for line in lines if len(line) > width] == []
