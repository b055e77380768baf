"""What the package may grow to, and how long the walks through it may be: budgets, to be lowered where they can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Lines and files of the package and the pytest plugin.
LINES, FILES = 45000, 191

#: Calls of functions of the package, and changes of file between them.
WALKS = {
    "define": (289, 170),
    "register_fake": (26, 16),
    "register_autograd": (43, 28),
    "first call": (131, 68),
    "call": (2, 1),
    "first call with gradient": (126, 55),
    "call with gradient": (10, 7),
    "backward, default given": (2, 1),
    "backward, default left out": (2, 1),
    "list, call and backward": (19, 10),
}


@pytest.mark.process
def test_the_house_stays_within_its_budgets() -> None:
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "house.py"), "--json"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(run.stdout)
    assert found["lines"] <= LINES
    assert found["files"] <= FILES
    assert found["walks"].keys() == WALKS.keys()
    over = {
        title: walk for title, walk in found["walks"].items() if walk[0] > WALKS[title][0] or walk[1] > WALKS[title][1]
    }
    assert over == {}
