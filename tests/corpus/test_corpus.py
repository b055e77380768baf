"""Run `customops.check` on the corpus: it reports each broken op, and neither corrected twins nor right ops.

The ordinary suite runs one broken op for each check and a few right ops. The tests with the mark `full` run the rest.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from corpus import entries
from corpus.entries import FAULTS, RIGHT_OPS, Fault, RightOp, sample_of

import customops
from customops.checks import CHECKS

entries.load()

#: One op for each check that finds some: the one that takes the least time.
ORDINARY_FAULTS = (
    "gain_or_itself",  # inputs
    "windowed",  # test_aot_backward
    "stable_softplus",  # test_backward
    "mean_over_time",  # test_batches
    "stochastic_round",  # test_determinism
    "window",  # test_faketensor
    "forward_cube",  # test_forward_mode
    "annotated_mean",  # test_grad_modes
    "silu_with_gate",  # test_gradients
    "cell_index",  # test_kernels
    "flat_negation",  # test_layouts
    "loss_and_slope",  # test_modes
    "lane_sum",  # test_permutations
    "centred",  # test_pointwise
    "dequantize",  # test_precision
    "log_softmax_half",  # test_schema
    "sine_gate",  # test_second_order
    "np_silu",  # test_stability
    "fast_tanh",  # test_state
    "doubled_reshape",  # test_symbolic_sizes
    "foreach_scale_",  # test_symmetries
    "harmonics",  # test_threads
    "fill_ramp",  # test_uninitialized_memory
    "batched_energy",  # test_vmap
    "block_max",  # test_writes
)
#: Every second right op, with only the checks that would report it without a special case.
ORDINARY_RIGHT_OPS = list(RIGHT_OPS)[::2]


@pytest.fixture(autouse=True)
def scope() -> Any:
    with customops.default_registry.scope():
        yield


def some(names: Any, ordinary: Any) -> list[Any]:
    """Return a parameter for each name, with the mark `full` unless it belongs to the ordinary suite."""
    return [pytest.param(name, marks=[] if name in ordinary else pytest.mark.full) for name in names]


def test_each_kind_of_fault_has_one_op() -> None:
    kinds = [fault.kind for fault in FAULTS.values()]
    assert len(set(kinds)) == len(kinds) >= 150


def test_the_ordinary_suite_has_an_op_for_each_check() -> None:
    assert sorted(FAULTS[name].found_by for name in ORDINARY_FAULTS) == sorted({f.found_by for f in FAULTS.values()})


def test_each_right_op_names_special_cases_of_the_checker() -> None:
    root = Path(customops.__file__).parent
    for op in RIGHT_OPS.values():
        assert op.witness, f"{op.name} is the witness of no special case"
        for case, check in op.witness.items():
            assert check in ("inputs", *CHECKS), f"{op.name}: {check}"
            file, _, function = case.partition(": ")
            tree = ast.parse((root / file).read_text(encoding="utf-8"))
            defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert function.rpartition(".")[2] in defined, (
                f"{op.name} is the witness of {function}, which is not in {file}"
            )


def checks_of(found_by: str) -> str:
    """Return a check to select. The run reports faults of the inputs whichever checks are selected."""
    return found_by if found_by in CHECKS else "test_schema"


@pytest.mark.parametrize("name", some(FAULTS, ORDINARY_FAULTS))
def test_a_broken_op_is_found_and_its_twin_passes(name: str, ns: str) -> None:
    fault: Fault = FAULTS[name]
    only = checks_of(fault.found_by)
    broken = fault.build(f"{ns}::broken", True)
    sample = sample_of(fault, broken)
    # Some faults show only after the calls of other checks.
    reports = (customops.check(broken, [sample], only=names) for names in (only, None))
    assert any(fault.found_by in {failure.check for failure in report.failures} for report in reports)
    right = fault.build(f"{ns}::right", False)
    report = customops.check(right, [sample_of(fault, right)], only=only)
    assert not report.failures, str(report)


@pytest.mark.parametrize("name", some(RIGHT_OPS, ORDINARY_RIGHT_OPS))
def test_a_right_op_passes(name: str, ns: str) -> None:
    entry: RightOp = RIGHT_OPS[name]
    op = entry.build(f"{ns}::{name}")
    only = None if name not in ORDINARY_RIGHT_OPS else [*dict.fromkeys(map(checks_of, entry.witness.values()))]
    report = customops.check(op, [sample_of(entry, op)], only=only)
    assert not report.failures, str(report)
