"""What the package may grow to, and how long the walks through it may be: budgets, to be lowered where they can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Lines and files of the package, and of the pytest plugin.
SIZES = {"customops": (48740, 182), "customops_pytest": (1054, 7)}

#: Calls of functions of the package, and changes of file between them.
WALKS = {
    "define": (178, 105),  # with torch 2.14 and later; 173 before
    "register_fake": (17, 13),
    "register_autograd": (32, 19),
    "first call": (109, 57),
    "call": (2, 1),
    "first call with gradient": (94, 37),
    "call with gradient": (7, 5),
    "backward, default given": (1, 0),
    "backward, default left out": (1, 0),
    "list, call and backward": (15, 7),
}


@pytest.mark.process
def test_the_house_stays_within_its_budgets() -> None:
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "house.py"), "--json"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(run.stdout)
    for what, budgets in (("sizes", SIZES), ("walks", WALKS)):
        assert found[what].keys() == budgets.keys()
        assert {
            title: pair
            for title, pair in found[what].items()
            if pair[0] > budgets[title][0] or pair[1] > budgets[title][1]
        } == {}
