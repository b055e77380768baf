"""Each type of a signature in each way to run an op: the table of docs/types_table.md.

``make types-table`` writes the table again. Each cell has a test here, which asserts that the op agrees with the same
function in plain torch, or that torch raises the error of the cell.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.covers import beyond, cover
from products.typed_ops import OPS, ROWS
from products.typed_ops.row import COLUMNS, NAMESPACE, Row, inputs
from products.typed_ops.same import outcome, same, tensors
from products.typed_ops.table import table, written
from torch import Tensor

import customops
from customops import Registry

#: The cells that `make test` tries: all rows in eager, and at least 20 rows in each other way to run an op.
COVER = cover(list(ROWS), COLUMNS, of_first=4, of_second=20) | {(name, "eager") for name in ROWS}


def rows(column: str) -> Callable[[Any], Any]:
    """Parametrize a test with the rows to which `column` applies."""
    chosen = [name for name, row in ROWS.items() if row.cell(column) != "-"]
    return pytest.mark.parametrize("name", [name if (name, column) in COVER else beyond(name) for name in chosen])


def check(column: str, row: Row, run: Callable[[], None]) -> None:
    """`run`, which raises if the table says so."""
    refusal = row.refusal(column)
    if refusal is None:
        run()
        return
    with pytest.raises(refusal.error, match=refusal.match):
        run()


def calling(op: Any, row: Row, case: int) -> Callable[..., Any]:
    """A function of tensors that makes the arguments and calls the op."""
    arguments = row.cases[case].arguments

    def program(*tensors: Tensor) -> Any:
        args, kwargs = arguments(*tensors)
        return op(*args, **kwargs)

    return program


def agrees(program: Callable[..., Any], row: Row, case: int, size: int = 3) -> None:
    """Fails unless a program does what the case says in plain torch."""
    same(outcome(program, inputs(row, size)), outcome(row.cases[case].expected, inputs(row, size)))


PAGE = Path(customops.__file__).parents[1] / "docs" / "types_table.md"


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PAGE.write_text(written(text), encoding="utf-8")
    print(table())
    assert written(text) == PAGE.read_text(encoding="utf-8"), "make types-table, and review what changed"


@pytest.mark.parametrize("column", [column for column in COLUMNS if column != "export"])
def test_each_column_has_a_test(column: str) -> None:
    assert f"test_{column}" in globals()


# Eager ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_schema(name: str) -> None:
    assert str(OPS[name].schema) == ROWS[name].schema


@pytest.mark.parametrize("case", [0, 1])
@rows("eager")
def test_eager(name: str, case: int) -> None:
    agrees(calling(OPS[name], ROWS[name], case), ROWS[name], case)


@pytest.mark.parametrize("case", [0, 1])
@rows("torch_ops")
def test_torch_ops(name: str, case: int) -> None:
    row = ROWS[name]
    op = getattr(getattr(torch.ops, NAMESPACE), name)

    def program(*tensors: Tensor) -> Any:
        args, kwargs = row.cases[case].lowered(*tensors)
        return op(*args, **kwargs)

    def expected(*tensors: Tensor) -> Any:
        return row.flat(row.cases[case].expected(*tensors))

    same(outcome(program, inputs(row)), outcome(expected, inputs(row)))


@pytest.mark.parametrize("case", [0, 1])
@rows("torch_ops")
def test_lower_gives_the_arguments_for_torch_ops(name: str, case: int) -> None:
    row, given = ROWS[name], inputs(ROWS[name])
    arguments = row.cases[case].arguments(*given)
    lowered = bound(name, *OPS[name].lower(*arguments[0], **arguments[1]))
    by_hand = bound(name, *row.cases[case].lowered(*given))
    for argument in OPS[name].schema.arguments:
        found = lowered[argument.name]
        if argument.name not in by_hand:
            assert found is None or found == argument.default
        elif isinstance(found, torch.Generator):
            assert found.initial_seed() == by_hand[argument.name].initial_seed()
        else:
            same(list(found) if isinstance(found, (tuple, torch.Size)) else found, by_hand[argument.name])


def bound(name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments for ``torch.ops`` by name."""
    arguments = OPS[name].schema.arguments
    return {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}


@pytest.mark.parametrize("case", [0, 1])
@rows("fake")
def test_fake(name: str, case: int) -> None:
    row = ROWS[name]
    given = inputs(row)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in given]
        found = calling(OPS[name], row, case)(*fakes)
    assert all(isinstance(each, torch._subclasses.FakeTensor) for each in tensors(found))
    same(found, row.cases[case].expected(*given), values=False)


@rows("default")
def test_default(registry: Registry, ns: str, name: str) -> None:
    row = ROWS[name]
    op = row.define(registry, f"{ns}::{name}", row.with_default())
    before = len(inspect.signature(row.fn).parameters) - 1

    def program(call: Any) -> Callable[..., Any]:
        return lambda *tensors: call(*row.cases[0].arguments(*tensors)[0][:before])

    expected = outcome(row.by_default, inputs(row))
    same(outcome(program(op), inputs(row)), expected)
    same(outcome(program(getattr(getattr(torch.ops, ns), name)), inputs(row)), expected)


# Compilers --------------------------------------------------------------------------------------------------------


def both(program: Callable[[int], Callable[..., Any]]) -> Callable[..., Any]:
    """The results of both cases, of one function."""
    return lambda *tensors: [program(case)(*tensors) for case in (0, 1)]


def compiled_agrees(name: str, backend: str) -> None:
    row = ROWS[name]
    compiled = torch.compile(both(lambda case: calling(OPS[name], row, case)), backend=backend, fullgraph=True)
    expected = both(lambda case: row.cases[case].expected)
    check(backend, row, lambda: same(outcome(compiled, inputs(row)), outcome(expected, inputs(row))))


@pytest.mark.compile
@rows("aot_eager")
def test_aot_eager(name: str) -> None:
    compiled_agrees(name, "aot_eager")


@pytest.mark.compile
@pytest.mark.parametrize("case", [0, 1])
@rows("aot_eager")
def test_the_object_is_the_compiled_function(name: str, case: int) -> None:
    row = ROWS[name]
    compiled = torch.compile(OPS[name], backend="aot_eager", fullgraph=True)
    check("aot_eager", row, lambda: agrees(calling(compiled, row, case), row, case))


@pytest.mark.compile
@rows("inductor")
def test_inductor(name: str) -> None:
    compiled_agrees(name, "inductor")


@pytest.mark.compile
@rows("dynamic")
def test_dynamic(name: str) -> None:
    """The values are arguments of the compiled function; another one compiles anew only if it is traced."""
    row, op = ROWS[name], OPS[name]
    compiled = torch.compile(
        lambda *args, **kwargs: op(*args, **kwargs), backend="aot_eager", fullgraph=True, dynamic=True
    )

    def again(case: int, *sizes: int) -> None:
        with torch.compiler.set_stance("fail_on_recompile"):
            for size in sizes:
                agrees(calling(compiled, row, case), row, case, size)

    def run() -> None:
        agrees(calling(compiled, row, 0), row, 0, 3)
        again(0, 5, 7)
        if row.recompiles:
            with pytest.raises(RuntimeError, match="fail_on_recompile"):
                again(1, 3)
        if row.recompiles is not False:
            agrees(calling(compiled, row, 1), row, 1)
        again(1, 3)
        again(0, 3)

    check("dynamic", row, run)


# Gradients and batches ----------------------------------------------------------------------------------------------


def differentiated(name: str, case: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function of tensors whose results are tensors, and inputs that require a gradient."""
    row = ROWS[name]
    program = calling(OPS[name], row, case)
    given = [each.requires_grad_() for each in inputs(row)]
    return lambda *given: tensors(program(*(each.clone() for each in given))), given


@pytest.mark.parametrize("case", [0, 1])
@rows("reverse")
def test_reverse(name: str, case: int) -> None:
    program, given = differentiated(name, case)
    if program(*given):
        assert torch.autograd.gradcheck(program, given)


@pytest.mark.parametrize("case", [0, 1])
@rows("forward")
def test_forward(name: str, case: int) -> None:
    program, given = differentiated(name, case)
    if program(*given):
        assert torch.autograd.gradcheck(program, given, check_forward_ad=True, check_backward_ad=False)


@pytest.mark.parametrize("case", [0, 1])
@rows("vmap")
def test_vmap(name: str, case: int) -> None:
    row, given = ROWS[name], inputs(ROWS[name])
    program, expected = calling(OPS[name], row, case), row.cases[case].expected
    batches = [torch.stack([each, each + 1]) for each in given]

    def run() -> None:
        agree = [batches, [each.clone() for each in batches]]
        found = torch.vmap(lambda *given: tensors(program(*given)))(*agree[0])
        wanted = torch.vmap(lambda *given: tensors(expected(*given)))(*agree[1])
        same((found, agree[0]), (wanted, agree[1]))

    check("vmap", row, run)


# The rest -----------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("case", [0, 1])
@rows("opcheck")
def test_opcheck(name: str, case: int) -> None:
    row = ROWS[name]
    given = [each.requires_grad_("reverse" not in row.without).clone() for each in inputs(row)]
    args, kwargs = row.cases[case].arguments(*given)
    check("opcheck", row, lambda: all_pass(customops.opcheck(OPS[name], args, kwargs)))


def all_pass(results: dict[str, Any]) -> None:
    assert set(results.values()) == {"SUCCESS"}


@rows("bypass")
def test_bypass(registry: Registry, ns: str, name: str) -> None:
    row = ROWS[name]

    def run() -> None:
        op = row.define(registry, f"{ns}::{name}", bypass=True)
        for case in (0, 1):
            agrees(calling(op, row, case), row, case)

    check("bypass", row, run)


@pytest.mark.parametrize("case", [0, 1])
@rows("pickle")
def test_pickle(name: str, case: int) -> None:
    row, given = ROWS[name], inputs(ROWS[name])

    def run() -> None:
        op, arguments = pickle.loads(pickle.dumps((OPS[name], row.cases[case].arguments(*given))))
        assert op is OPS[name]
        same(op(*arguments[0], **arguments[1]), row.cases[case].expected(*given))

    check("pickle", row, run)
