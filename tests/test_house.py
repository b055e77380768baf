"""What the package may grow to, and how long the walks through it may be: budgets, to be lowered where they can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Lines and files of the package and the pytest plugin.
LINES, FILES = 46300, 196

#: Calls of functions of the package, and changes of file between them.
WALKS = {
    "define": (380, 198),
    "register_fake": (28, 18),
    "register_autograd": (71, 35),
    "first call": (314, 145),
    "call": (2, 1),
    "first call with gradient": (314, 142),
    "call with gradient": (11, 7),
    "backward, default given": (5, 2),
    "backward, default left out": (12, 7),
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
