"""schema=: a schema by hand must fit the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import customops
from customops._schema.parse import parse
from customops.errors import SchemaError

# Manual schemas -------------------------------------------------------------------------------------------------


@pytest.mark.parity(16)
def test_manual_functional_schema(registry: customops.Registry, ns: str) -> None:
    def double(x, by=2.0):  # type: ignore[no-untyped-def]
        return x * by

    op = registry.custom_op(f"{ns}::double", double, mutates_args=(), schema="(Tensor x, float by=3.0) -> Tensor")
    assert op(torch.ones(2)).tolist() == [3, 3]  # the schema's default counts
    assert str(op._opoverload._schema) == f"{ns}::double(Tensor x, float by=3.) -> Tensor"
    assert op.schema == parse("(Tensor x, float by=3.0) -> Tensor")


@pytest.mark.parity(16)
@pytest.mark.parametrize("mutates_args", [("x",), {"x"}, "unknown"])
def test_manual_mutating_schema(registry: customops.Registry, ns: str, mutates_args: Any) -> None:
    def fill(x):  # type: ignore[no-untyped-def]
        x.fill_(5)

    op = registry.custom_op(f"{ns}::fill", fill, mutates_args=mutates_args, schema="(Tensor(a!) x) -> ()")
    x = torch.zeros(2)
    version = x._version
    assert op(x) is None
    assert x.tolist() == [5, 5]
    assert x._version > version


@pytest.mark.parity(6, 16, 20)
@pytest.mark.parametrize(
    ("type_", "wrap"),
    [
        ("Tensor(a!)?", lambda x: x),
        ("Tensor(a!)[]", lambda x: [x]),
        ("Tensor(a!)?[]", lambda x: [None, x]),
    ],
)
def test_manual_mutating_schema_of_every_form(
    registry: customops.Registry, ns: str, type_: str, wrap: Callable[[Tensor], Any]
) -> None:
    def fill(x):  # type: ignore[no-untyped-def]
        (x if isinstance(x, Tensor) else x[-1]).fill_(5)

    op = registry.custom_op(f"{ns}::fill", fill, mutates_args={"x"}, schema=f"({type_} x) -> ()")
    x = torch.zeros(2)
    version = x._version
    op(wrap(x))
    assert x.tolist() == [5, 5]
    assert x._version > version


@pytest.mark.parity(16)
@pytest.mark.parametrize(
    ("schema", "mutates_args", "match"),
    [
        ("(Tensor(a!) x) -> ()", (), r"the op mutates \{'x'\}"),
        ("(Tensor(a!)?[] x) -> ()", (), r"the op mutates \{'x'\}"),
        ("(Tensor(a!) x, Tensor y) -> ()", ("y",), r"the op mutates \{'x'\}"),
        ("(Tensor x) -> Tensor", ("x",), r"the op mutates \{\}"),
        ("(Tensor(a) x) -> Tensor", {"x"}, r"the op mutates \{\}"),
    ],
)
def test_manual_schema_must_agree_with_mutates_args(
    registry: customops.Registry, ns: str, schema: str, mutates_args: Any, match: str
) -> None:
    def fn(*args: Any) -> None: ...

    with pytest.raises(ValueError, match=match) as caught:
        registry.custom_op(f"{ns}::op", fn, mutates_args=mutates_args, schema=schema)
    message = str(caught.value)
    assert len(message.splitlines()) < 8
    assert f"fn ({fn.__code__.co_filename}:{fn.__code__.co_firstlineno})" in message
    assert schema in message


@pytest.mark.parity(16)
@pytest.mark.parametrize("schema", ["(Foo x) -> Tensor", "(Tensor x, int n=2j", "(Tensor x, float f=1e-320) -> Tensor"])
def test_manual_schema_that_is_none(registry: customops.Registry, ns: str, schema: str) -> None:
    with pytest.raises(ValueError, match="the schema cannot be parsed"):
        registry.custom_op(f"{ns}::op", lambda x: x, mutates_args=(), schema=schema)
    assert len(registry) == 0


@pytest.mark.parity(16)
def test_manual_schema_has_no_name(registry: customops.Registry, ns: str) -> None:
    with pytest.raises(ValueError, match=r"expected schema to look like .* the name is given already"):
        registry.custom_op(f"{ns}::op", lambda x: x, mutates_args=(), schema="op(Tensor x) -> Tensor")


@pytest.mark.parity(16)
def test_message_for_a_manual_schema_that_disagrees(registry: customops.Registry, ns: str) -> None:
    def fn(x: Tensor) -> None: ...

    with pytest.raises(SchemaError) as caught:
        registry.custom_op(f"{ns}::op", fn, mutates_args=(), schema="(Tensor(a!) x) -> ()")
    message = (
        str(caught.value)
        .replace(f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}", "FILE:LINE")
        .replace(ns, "NS")
    )
    assert_expected_inline(
        message,
        """\
NS::op: the schema and mutates_args disagree: by the schema, the op mutates {'x'}
  expected: mutates_args=('x',)
  got:      mutates_args=(), schema='(Tensor(a!) x) -> ()'
  at:       fn (FILE:LINE)
  fix:      leave mutates_args out: the schema says it""",
    )
