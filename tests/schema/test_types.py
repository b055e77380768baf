"""The rows of types: a type is added by adding one, because all that asks about a type reads its row."""

# No `from __future__ import annotations` here: the ops need annotations that are objects.

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, List, Optional, Sequence

import pytest
import torch
from torch import Tensor

import customops
from customops import _torch, infer_schema
from customops._dispatch.results import fits_type
from customops._schema import parse, types
from customops._schema.types import ROWS, TypeRow
from customops.errors import KernelError, SchemaError

PACKAGE = Path(customops.__file__).parent

COMPLEX = TypeRow(
    "complex",
    (complex,),
    forms=("", "?", "[]"),
    return_forms=("",),
    defaults=(int, complex),
    list_defaults=True,
    canonical_default=complex,
    results=(complex,),
    unchanged=(complex,),
)
LAYOUT = TypeRow(
    "Layout",
    (torch.layout,),
    defaults=(torch.layout,),
    write_default=_torch.schema.enum_text,
    read_default=functools.partial(_torch.schema.enum_from, "Layout"),
    unchanged=(torch.layout,),
)

AddRow = Callable[[TypeRow], None]


@pytest.fixture
def add_row(monkeypatch: pytest.MonkeyPatch) -> AddRow:
    """Adds a row to the table for the length of a test, as if it stood in `_rows`."""

    def add(row: TypeRow) -> None:
        monkeypatch.setitem(ROWS, row.schema, row)
        for hint, type_ in types.hints_of(row).items():
            monkeypatch.setitem(types.SUPPORTED_PARAM_TYPES, hint, type_)
        for hint, type_ in types.hints_of(row, returns=True).items():
            monkeypatch.setitem(types.SUPPORTED_RETURN_TYPES, hint, type_)

    return add


# A new row ------------------------------------------------------------------------------------------------------


def test_hints_of_a_new_row(add_row: AddRow) -> None:
    def fn(x: Tensor, a: torch.qscheme, b: Optional[torch.qscheme]) -> torch.qscheme: ...

    with pytest.raises(SchemaError, match=r"parameter a has unsupported type torch\.qscheme"):
        infer_schema(fn, mutates_args=())
    add_row(TypeRow("QScheme", (torch.qscheme,), forms=("", "?"), return_forms=("",)))
    assert infer_schema(fn, mutates_args=()) == "(Tensor x, QScheme a, QScheme? b) -> QScheme"


def test_defaults_of_a_new_row(add_row: AddRow) -> None:
    add_row(COMPLEX)
    add_row(LAYOUT)

    def fn(x: Tensor, a: complex = 2j, b: List[complex] = [1j, 2j], c: torch.layout = torch.sparse_coo) -> Tensor: ...  # noqa: B006

    text = infer_schema(fn, mutates_args=())
    assert text == "(Tensor x, complex a=2.0j, complex[] b=[1.0j, 2.0j], Layout c=1) -> Tensor"
    assert [argument.default for argument in parse.parse(text).arguments[1:]] == [2j, (1j, 2j), torch.sparse_coo]

    def wrong(x: Tensor, a: complex = "1") -> Tensor: ...  # type: ignore[assignment]

    with pytest.raises(SchemaError, match="a str cannot be the default of a complex"):
        infer_schema(wrong, mutates_args=())


def test_calls_of_a_new_row(add_row: AddRow, registry: customops.Registry, ns: str) -> None:
    add_row(COMPLEX)
    add_row(LAYOUT)
    seen: list[Any] = []

    @registry.custom_op(f"{ns}::f", mutates_args=())
    def f(x: Tensor, a: complex = 1, b: torch.layout = torch.sparse_csr) -> complex:  # type: ignore[assignment]
        seen.append((a, b))
        return a if a != 3 else "3"  # type: ignore[return-value]

    x = torch.ones(1)
    assert f(x) == 1
    assert f(x, 2j, torch.strided) == 2j
    assert seen == [(1 + 0j, torch.sparse_csr), (2j, torch.strided)]
    assert type(seen[0][0]) is complex
    with pytest.raises(KernelError, match="does not fit the schema"):
        f(x, 3)


def test_bypass_of_a_new_row(add_row: AddRow, registry: customops.Registry, ns: str) -> None:
    def f(x: Tensor, by: complex, layout: torch.layout) -> Tensor:
        return x * by.real

    add_row(COMPLEX)
    add_row(LAYOUT._replace(unchanged=()))
    op = registry.custom_op(f"{ns}::f", mutates_args=(), bypass=True)(f)
    assert "the argument 'layout' is a Layout, which the dispatcher converts" in op.explain_call()
    add_row(LAYOUT)
    op = registry.custom_op(f"{ns}::g", mutates_args=(), bypass=True)(f)
    for _ in range(2):
        assert op(torch.ones(1), 2 + 1j, torch.strided).tolist() == [2]
        assert op(torch.ones(1), 2.0, torch.strided).tolist() == [2]  # converted


# The table ------------------------------------------------------------------------------------------------------


# A class has a dot in its name: the dispatcher prints PyObject for it.
@pytest.mark.parametrize("row", [row for row in ROWS.values() if "." not in row.schema], ids=lambda row: row.schema)
def test_rows_agree_with_the_dispatcher(row: TypeRow) -> None:
    for form in row.forms:
        assert str(parse.parse(f"(Tensor x, {row.schema}{form} y) -> ()").arguments[1]) == f"{row.schema}{form} y"
    for form in row.return_forms:
        assert str(parse.parse(f"(Tensor x) -> {row.schema}{form}").returns[0]) == f"{row.schema}{form}"


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.hints], ids=lambda row: row.schema)
def test_hints_come_from_the_rows(row: TypeRow) -> None:
    hints = types.hints_of(row)
    assert hints.items() <= types.SUPPORTED_PARAM_TYPES.items()
    assert {hint for hint, type_ in types.SUPPORTED_PARAM_TYPES.items() if types.row_of(type_) is row} == set(hints)
    assert types.hints_of(row, returns=True).items() <= types.SUPPORTED_RETURN_TYPES.items()


@pytest.mark.parametrize(
    ("form", "hints"),
    [
        ("", [int]),
        ("?", [Optional[int]]),
        ("[]", [Sequence[int], List[int], list[int]]),
        ("?[]", [Sequence[Optional[int]], list[Optional[int]]]),
        ("[]?", [Optional[List[int]], Optional[list[int]]]),
        ("?[]?", [Optional[list[Optional[int]]]]),
    ],
)
def test_forms(form: str, hints: list[Any]) -> None:
    table = types.hints_of(TypeRow("T", (int,), forms=(form,)))
    assert {table[hint] for hint in hints} == {f"T{form}"}


@pytest.mark.parametrize(
    ("type_", "item", "row"),
    [
        ("SymInt", None, "SymInt"),
        ("SymInt?", None, "SymInt"),
        ("SymInt[]", "SymInt", "SymInt"),
        ("int[2]", "int", "int"),
        ("Tensor?[]", "Tensor?", "Tensor"),
        ("Tensor?[]?", None, "Tensor"),
        ("Stream", None, ""),
    ],
)
def test_reading_a_type(type_: str, item: Optional[str], row: str) -> None:
    assert types.item_type(type_) == item
    assert types.row_of(type_).schema == row


@pytest.mark.parametrize(
    ("type_", "right", "wrong"),
    [
        ("Tensor", torch.ones(1), 1),
        ("Tensor?", None, 1),
        ("Tensor[]", [torch.ones(1)], torch.ones(1)),
        ("int[2]", (1, 2), 1),
        ("float", 1, "1"),
        ("bool", True, 1),
        ("str", "a", None),
        ("(Tensor)", (torch.ones(1),), torch.ones(1)),
        ("Stream", object(), None),
    ],
)
def test_results(type_: str, right: Any, wrong: Any) -> None:
    assert fits_type(right, type_)
    assert fits_type(wrong, type_) is (type_ == "Stream")  # of which no row says anything


def test_no_other_table_of_types() -> None:
    """A dict by names of types stands nowhere else in the package."""
    tables = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                if len(set(keys) & set(ROWS)) > 2:
                    tables.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert tables == []
