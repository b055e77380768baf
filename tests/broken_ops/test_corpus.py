"""`customops.check` on the corpus: what it is known to find it goes on finding, and right ops pass.

`found_by.json` says by which check each broken op is found, and null for those that are missed;
``python benchmarks/detection.py --write`` writes it.
"""

from __future__ import annotations

import json
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
