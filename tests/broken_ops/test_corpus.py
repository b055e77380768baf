"""`customops.check` on the corpus: what it is known to find it goes on finding, and right ops pass.

`found_by.json` says by which check each broken op is found, and null for those that are missed;
``python benchmarks/detection.py --write`` writes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from broken_ops import corpus

import customops
from customops.checks import CHECKS

corpus.load()
FOUND_BY: dict[str, str | None] = json.loads(Path(__file__).with_name("found_by.json").read_text())


@pytest.fixture(autouse=True)
def scope() -> Any:
    with customops.default_registry.scope():
        yield


def test_the_corpus_is_large() -> None:
    kinds = {fault.kind for fault in corpus.FAULTS.values()}
    assert len(corpus.FAULTS) >= 100
    assert len(kinds) >= 35
    assert len(corpus.TRAPS) >= 40
    assert FOUND_BY.keys() == corpus.FAULTS.keys()


def first_of_kinds(name: str) -> list[str]:
    """Of each kind of a corpus, the first op that is found."""
    found = {fault: corpus.FAULTS[fault] for fault, check in reversed(FOUND_BY.items()) if check}
    return list({fault.kind: each for each, fault in found.items() if fault.corpus == name}.values())


#: The first of some kinds that are found; ``benchmarks/detection.py`` tries all.
SOME = [*first_of_kinds(corpus.FIRST)[::2], *first_of_kinds("48 kinds")[::4]]


def test_the_figures_of_the_docs() -> None:
    """The tables are those of `found_by.json`, and the sums those of the tables."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "checking_finds.md").read_text(encoding="utf-8")
    ops, found = Counter[str](), Counter[str]()
    for name, fault in corpus.FAULTS.items():
        for group in (fault.corpus, fault.kind):
            ops[group] += 1
            found[group] += FOUND_BY[name] is not None
    rows = re.findall(r"^\| ([^|*]+) \| (\d+) of (\d+) \|$", page, re.MULTILINE)
    assert [(kind, int(right), int(of)) for kind, right, of in rows] == [(k, found[k], ops[k]) for k, _, _ in rows]
    sums = f"{sum(int(right) for _, right, _ in rows)} of {sum(int(of) for _, _, of in rows)}"
    assert f"| **all, of {len(rows)} kinds** | **{sums}** |" in page
    others = ops[corpus.FIRST] - sum(int(of) for _, _, of in rows)  # with one op a kind
    others_found = found[corpus.FIRST] - sum(int(right) for _, right, _ in rows)
    assert f"finds {others_found} of the {others} now, and {found['48 kinds']} of the {ops['48 kinds']}" in page
    blind = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if ": found, of" in line]
    of = sum(int(re.findall(r"of (\d+) broken", row[1])[0]) for row in blind)
    ours, torch_s = (sum(int(row[i].partition(";")[0]) for row in blind) for i in (2, 5))
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert f"{torch_s} of {of} broken ops found" in readme
    assert f"[{ours} of {of}](docs/checking_finds.md)" in readme


@pytest.mark.parametrize("name", SOME)
def test_a_broken_op_is_found_and_its_twin_passes(name: str, ns: str) -> None:
    fault, check = corpus.FAULTS[name], FOUND_BY[name]
    only = check if check in CHECKS else "test_schema"  # "inputs" are tried by all
    broken = fault.build(f"{ns}::broken", True)
    # Some ops are found by the calls of other checks before.
    sample = corpus.sample_of(fault, broken)
    assert any(customops.check(broken, [sample], only=names).failures for names in (only, None))
    right = fault.build(f"{ns}::right", False)
    report = customops.check(right, [corpus.sample_of(fault, right)], only=only)
    assert not report.failures, str(report)


@pytest.mark.parametrize("name", list(corpus.TRAPS)[::5])
def test_a_right_op_passes(name: str, ns: str) -> None:
    trap = corpus.TRAPS[name]
    op = trap.build(f"{ns}::{name}")
    report = customops.check(op, [corpus.sample_of(trap, op)], effort="quick")
    assert not report.failures, str(report)
