"""A schema's text is parsed to the same schema again, by us and by torch."""

from __future__ import annotations

import re
import string
from typing import Any

import pytest
import torch
from helpers.schemas import aliases, only, returns
from helpers.tensors import exact
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from customops._schema.model import REQUIRED, Argument, Schema
from customops._schema.parse import from_dispatcher, parse
from customops._schema.types import default_text

pytestmark = pytest.mark.slow


DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)


#: Tests may share the machine.
LOADED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


# Round trips ----------------------------------------------------------------------------------------------------

TENSORS = ("Tensor", "Tensor?", "Tensor[]", "Tensor?[]", "Tensor[]?", "Tensor[2]")
integers = st.integers(-(2**63), 2**63 - 1)
#: What schema text can hold: not inf or nan, and no subnormal numbers.
floats = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)
strings = st.text(st.characters(exclude_categories=("Cs",)))
devices = st.sampled_from(["cpu", "cpu:0", "cuda", "cuda:7", "meta"]).map(torch.device)
#: Values by schema type; every one may be written as a default.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": integers,
    "SymInt": integers,
    "float": floats,
    "bool": st.booleans(),
    "str": strings,
    "Scalar": st.one_of(integers, floats, st.booleans()),
    "ScalarType": st.sampled_from(DTYPES),
    "Device": devices,
    "Layout": st.sampled_from(LAYOUTS),
    "MemoryFormat": st.sampled_from(MEMORY_FORMATS),
}
DEFAULTS = VALUES | {
    **{f"{type_}?": st.one_of(st.none(), values) for type_, values in VALUES.items()},
    **{f"{t}[]": st.lists(VALUES[t]).map(tuple) for t in ("int", "SymInt", "float", "bool", "ScalarType", "Layout")},
    **{f"{t}[2]": st.tuples(VALUES[t], VALUES[t]) for t in ("int", "SymInt", "float", "bool")},
    **{f"{t}[]?": st.none() for t in ("int", "SymInt", "float", "bool", "Tensor")},
    "Tensor?": st.none(),
}
OTHERS = (*VALUES, *(f"{t}?" for t in VALUES), "SymInt[]", "float[]?", "bool[3]", "Scalar[]", "str[]", "Generator?")
names = st.text(string.ascii_lowercase, min_size=1, max_size=3)


@st.composite
def arguments(draw: st.DrawFn) -> tuple[Argument, ...]:
    """Positional and keyword-only arguments of all types, with and without alias and default."""
    count = draw(st.integers(0, 6))
    first_keyword = draw(st.integers(0, count))
    first_default = draw(st.integers(0, count))
    result = []
    for i in range(count):
        must = first_default <= i < first_keyword  # as in Python: no positional without a default after one with
        may = must or i >= first_keyword
        type_ = draw(st.sampled_from(sorted(DEFAULTS if must else {*TENSORS, *OTHERS, *DEFAULTS})))
        alias = draw(aliases) if type_ in TENSORS else None
        default = draw(DEFAULTS[type_]) if must or (may and type_ in DEFAULTS and draw(st.booleans())) else REQUIRED
        result.append(Argument(type_, alias, f"{draw(names)}{i}", default, kwarg_only=i >= first_keyword))
    return tuple(result)


schemas = st.builds(Schema, arguments(), returns())


@settings(LOADED, max_examples=300)
@given(schemas)
def test_text_reads_back_as_the_same_schema(schema: Schema) -> None:
    again = parse(str(schema))
    assert again == schema
    assert hash(again) == hash(schema)
    # `==` of Python takes 1, 1.0 and True for one value.
    assert [exact(a.default) for a in again.arguments] == [exact(a.default) for a in schema.arguments]
    assert str(again) == str(schema)


@settings(LOADED, max_examples=200)
@given(schemas)
def test_torch_reads_the_same_schema_in_the_text(schema: Schema) -> None:
    theirs = torch._C.parse_schema("op" + str(schema))
    assert [a.name for a in theirs.arguments] == [a.name for a in schema.arguments]
    assert [a.kwarg_only for a in theirs.arguments] == [a.kwarg_only for a in schema.arguments]
    assert [a.has_default_value() for a in theirs.arguments] == [a.has_default for a in schema.arguments]
    assert [a.is_write for a in theirs.arguments] == [a.is_mutated for a in schema.arguments]
    assert theirs.is_mutable == bool(schema.mutated)
    assert len(theirs.returns) == len(schema.returns)


@pytest.mark.parity(7)
@settings(LOADED, max_examples=300)
@given(strings)
def test_any_string_is_a_default(text: str) -> None:
    written = default_text("str", text)
    assert written is not None
    assert written.startswith('"')
    assert written.endswith('"')
    (theirs,) = torch._C.parse_schema(f"f(str s={written}) -> ()").arguments
    assert theirs.default_value == text


@pytest.mark.parity(7)
@settings(LOADED, max_examples=300)
@given(st.floats())
def test_text_of_a_float_is_exact_or_there_is_none(value: float) -> None:
    written = default_text("float", value)
    if written is None:
        assert value != value or value in (float("inf"), float("-inf")) or 0 < abs(value) < 2.0**-1022
    else:
        (theirs,) = torch._C.parse_schema(f"f(float f={written}) -> ()").arguments
        assert exact(theirs.default_value) == exact(value)


@pytest.mark.parity(7)
@pytest.mark.parametrize("value", [2.0**-1022, -(2.0**-1022), 1.7976931348623157e308, 0.1, 1e22, -0.0], ids=repr)
def test_edges_of_the_floats_have_text(value: float) -> None:
    assert exact(only(f"float f={default_text('float', value)}").default) == exact(value)


def registered() -> list[Any]:
    """Every schema torch has registered here that is about tensors and not open-ended."""
    written = re.compile(r"(?<!Tensor)(\[\]|\w\))?\(\w+!")  # lists, dicts and generators that are written to
    return [
        schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and "..." not in str(schema) and not written.search(str(schema))
    ]


def test_every_operator_of_torch() -> None:
    theirs = registered()
    assert len(theirs) > 2500
    for schema in theirs:
        ours = from_dispatcher(schema)
        assert [a.name for a in ours.arguments] == [a.name for a in schema.arguments], schema
        assert [a.kwarg_only for a in ours.arguments] == [a.kwarg_only for a in schema.arguments], schema
        assert [a.is_mutated for a in ours.arguments] == [a.is_write for a in schema.arguments], schema
        assert bool(ours.mutated) == schema.is_mutable, schema
        assert parse(str(ours)) == ours, schema
        again = torch._C.parse_schema("op" + str(ours))
        assert [str(a.type) for a in again.arguments] == [str(a.type) for a in schema.arguments]
        assert [repr(a.default_value) for a in again.arguments] == [repr(a.default_value) for a in schema.arguments]
        assert [str(r.type) for r in again.returns] == [str(r.type) for r in schema.returns]


@pytest.mark.parity(65)
@pytest.mark.parametrize("type_", ["Layout", "MemoryFormat"])
def test_enum_numbers_are_those_of_the_dispatcher(ns: str, type_: str) -> None:
    values = LAYOUTS if type_ == "Layout" else MEMORY_FORMATS
    seen = []
    with torch.library._scoped_library(ns, "FRAGMENT") as library:
        for value in values:
            name = str(value).removeprefix("torch.")
            number = default_text(type_, value)
            library.define(f"{name}(Tensor x, {type_} v={number}, int n=0) -> Tensor")
            library.impl(name, lambda x, v, n: seen.append(v) or x.clone(), "CPU")
            getattr(getattr(torch.ops, ns), name)(torch.ones(1), n=1)  # torch itself fills `v`
            assert only(f"{type_} v={number}").default == value
    assert seen == list(values)
