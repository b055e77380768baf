"""The benchmark prints what it measures. That its contenders do the same is for `make bench-check`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from helpers.versions import needs_torch
from helpers.warm import PYTHON

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    command = [PYTHON, "benchmarks/call_overhead.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_torch(2, 13, because="torch.library.custom_op takes no in-place ops before")
def test_figures(tmp_path: Path) -> None:
    table = run("--quick", "--only", "no gradient", "--json", str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["cases"]
    assert figures.keys() == {"no gradient", "no gradient, torch.ops"}
    for case, contenders in figures.items():
        assert case in table
        assert "customops" in contenders
        assert len(contenders) > 1
        for name, numbers in contenders.items():
            assert numbers["ratio"] == pytest.approx(contenders["customops"]["us"] / numbers["us"])
            assert f"{numbers['us']:.2f}" in table, name
