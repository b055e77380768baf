"""The output of the benchmark. `make bench-check` compares the results of its contenders."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from helpers.warm import PYTHON

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> str:
    command = [PYTHON, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_figures(tmp_path: Path) -> None:
    table = run("benchmarks/bench.py", "--quick", "--only", "no gradient", "--json", str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["cases"]
    assert figures.keys() == {"no gradient", "no gradient, torch.ops"}
    for case, contenders in figures.items():
        assert case in table
        assert "customops" in contenders
        assert len(contenders) > 1
        for name, numbers in contenders.items():
            assert numbers["ratio"] == pytest.approx(contenders["customops"]["us"] / numbers["us"])
            assert f"{numbers['us']:.2f}" in table, name


@pytest.mark.full
def test_cold_figures_have_their_unit(tmp_path: Path) -> None:
    """A case that starts a process for each measurement."""
    run("benchmarks/bench.py", "--quick", "--only", "import", "--json", str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["cases"]
    assert figures.keys() == {"import"}
    assert figures["import"].keys() == {"customops", "torch"}
    assert all(numbers["ms"] > 0 for numbers in figures["import"].values())


def test_names_of_cases_are_unique() -> None:
    """The figures in JSON are stored by name. Each group has cases."""
    code = """
import collections, sys
sys.path.insert(0, "benchmarks")
import cases
found = list(cases.table())
assert {case.group for case in found} == {*cases.GROUPS}
names = collections.Counter(case.name for case in found)
assert max(names.values()) == 1, names.most_common(3)
"""
    run("-c", code)


def test_a_wrong_result_is_found() -> None:
    code = """
import sys
sys.path.insert(0, "benchmarks")
from cases import Case, Statement
wrong = {"right": Statement("f(x, y)", lambda x, y: x + y), "wrong": Statement("f(x, y)", lambda x, y: x - y)}
try:
    Case("sum", "calls", lambda: wrong).verify()
except AssertionError:
    print("found")
"""
    assert run("-c", code) == "found\n"
