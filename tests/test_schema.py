"""Schema text <-> `Schema`, manual schemas, and what a schema says about its op."""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import customops
from customops._schema.defaults import default_text
from customops._schema.model import REQUIRED, Alias, Argument, Return, Schema
from customops._schema.parse import from_dispatcher, parse
from customops._schema.tags import check_tags, normalize_tags
from customops.errors import DefinitionError, SchemaError, TagError

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)

#: Tests may share the machine.
LOADED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def exact(value: Any) -> Any:
    """A form that is equal only for values that a kernel cannot tell apart (1, 1.0 and True; 0.0 and -0.0)."""
    if isinstance(value, (list, tuple)):
        return type(value), [exact(item) for item in value]
    return type(value), repr(value)


def only(text: str) -> Argument:
    """The argument of ``(text) -> ()``."""
    (argument,) = parse(f"({text}) -> ()").arguments
    return argument


def refusal(text: str) -> str:
    """The message for a schema that is none: short, and it shows the text."""
    with pytest.raises(SchemaError) as caught:
        parse(text)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert len(message.splitlines()) < 8
    assert repr(text) in message
    return message


# Parsing --------------------------------------------------------------------------------------------------------


def test_parse() -> None:
    schema = parse('(Tensor(a!) x, Tensor?[] ys, float by=2.5, *, SymInt[] dims=[1, 2], str s="a") -> (Tensor, int)')
    assert schema == Schema(
        arguments=(
            Argument("Tensor", Alias(frozenset("a"), write=True), "x"),
            Argument("Tensor?[]", None, "ys"),
            Argument("float", None, "by", 2.5),
            Argument("SymInt[]", None, "dims", (1, 2), kwarg_only=True),
            Argument("str", None, "s", "a", kwarg_only=True),
        ),
        returns=(Return("Tensor"), Return("int")),
    )
    assert [a.name for a in schema.positional] == ["x", "ys", "by"]
    assert [a.name for a in schema.keyword_only] == ["dims", "s"]


@pytest.mark.parametrize("text", ["(Tensor x) -> Tensor", "  (Tensor x) -> Tensor", "foo(Tensor x) -> Tensor"])
def test_name_is_optional_and_dropped(text: str) -> None:
    assert (
        parse(text)
        == parse("ns::foo.bar(Tensor x) -> Tensor")
        == Schema((Argument("Tensor", None, "x"),), (Return("Tensor"),))
    )


@pytest.mark.parametrize(
    ("text", "returns"),
    [
        ("()", []),
        ("Tensor", ["Tensor"]),
        ("(Tensor)", ["Tensor"]),
        ("((Tensor))", ["(Tensor)"]),
        ("((Tensor, int))", ["(Tensor, int)"]),
        ("(Tensor, SymInt)", ["Tensor", "SymInt"]),
        ("(Tensor out, Tensor[] rest)", ["Tensor", "Tensor[]"]),
        ("Tensor out", ["Tensor"]),
        ("((Tensor, int), Dict(str, int))", ["(Tensor, int)", "Dict(str, int)"]),
        ("Tensor?", ["Tensor?"]),
    ],
)
def test_returns(text: str, returns: list[str]) -> None:
    assert [r.type for r in parse(f"(Tensor x) -> {text}").returns] == returns


@pytest.mark.parametrize(
    ("text", "type_", "sets", "write"),
    [
        ("Tensor(a) x", "Tensor", "a", False),
        ("Tensor(a!) x", "Tensor", "a", True),
        ("Tensor(b|a!) x", "Tensor", "ab", True),
        ("Tensor(*) x", "Tensor", "*", False),
        ("Tensor(a!)? x", "Tensor?", "a", True),
        ("Tensor(a!)[] x", "Tensor[]", "a", True),
        ("Tensor(a!)[3] x", "Tensor[3]", "a", True),
        ("Tensor(a!)?[] x", "Tensor?[]", "a", True),
        ("Tensor(a!)[]? x", "Tensor[]?", "a", True),
        ("Tensor(a!)?[]? x", "Tensor?[]?", "a", True),
        ("Tensor[](a!) x", "Tensor[]", "a", True),
        ("Tensor(a -> *) x", "Tensor", "a", False),
        ("Tensor(a! -> a|b) x", "Tensor", "a", True),
    ],
)
def test_alias_of_an_argument(text: str, type_: str, sets: str, write: bool) -> None:  # 6
    argument = only(text)
    assert (argument.type, argument.alias) == (type_, Alias(frozenset(sets), write))
    assert argument.is_mutated is write
    assert argument.holds_tensors


def test_alias_of_a_return() -> None:
    (ret,) = parse("(Tensor(a) x) -> Tensor(a)[]").returns
    assert (ret.type, ret.alias) == ("Tensor[]", Alias(frozenset("a")))
    assert str(ret) == "Tensor(a)[]"


def test_alias_text() -> None:
    assert str(Alias.parse("e|c|d|a|b")) == "a|b|c|d|e"
    assert str(Alias.parse("a!")) == "a!"
    assert Alias.parse("a! -> a|b") == Alias(frozenset("a"), write=True)


@pytest.mark.parametrize(
    ("text", "default"),
    [
        ("int n=3", 3),
        ("SymInt n=-1", -1),
        ("float f=3", 3.0),
        ("float f=-0.0", -0.0),
        ("bool b=True", True),
        ("bool b=1", True),
        ("float? f=3", 3.0),
        ("Scalar s=1", 1),
        ("Scalar s=1.0", 1.0),
        ("Scalar s=False", False),
        ("Scalar s=2j", 2j),
        ("int? n=None", None),
        ("str s='a\"b'", 'a"b'),
        (r'str s="a\nb\\c"', "a\nb\\c"),
        (r'str s="\007\303\251"', "\aé"),
        ("ScalarType d=float", torch.float32),
        ("ScalarType? d=int", torch.int32),
        ("ScalarType[] d=[float, bool]", (torch.float32, torch.bool)),
        ("Device d='cpu:0'", torch.device("cpu:0")),
        ("Device? d='cpu:0'", torch.device("cpu:0")),
        ("Layout l=strided", torch.strided),
        ("Layout[] l=[1]", (torch.sparse_coo,)),
        ("MemoryFormat? m=2", torch.channels_last),
        ("int[] n=[]", ()),
        ("int[2] n=1", (1, 1)),
        ("float[] f=[1, 2.5]", (1.0, 2.5)),
        ("bool[] b=[True, False]", (True, False)),
    ],
)
def test_default_in_python_form(text: str, default: Any) -> None:  # 17
    argument = only(text)
    assert exact(argument.default) == exact(default)
    assert argument.has_default


def test_no_default() -> None:
    assert only("int n").default is REQUIRED
    assert not only("int n").has_default
    assert repr(REQUIRED) == "REQUIRED"


@pytest.mark.parametrize("text", ["a, b", "a) -> (b", "a]", 'a"b', "\\", "*", "(a!)", "...", "a=1, Tensor y"])
def test_string_default_that_looks_like_schema(text: str) -> None:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    schema = parse(f'(Tensor(a!) x, str s="{escaped}", *, int n=1) -> (Tensor, int)')
    assert [a.name for a in schema.arguments] == ["x", "s", "n"]
    assert schema.arguments[1].default == text
    assert schema.arguments[2].kwarg_only
    assert len(schema.returns) == 2
    assert parse(str(schema)) == schema


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(Tensor x",
        "(Tensor x)",
        "Tensor x -> Tensor",
        "(Foo x) -> Tensor",
        "(Tensor x) -> Tensor y z",
        "(int n=a) -> ()",
        "(int n=99999999999999999999) -> ()",
        "(float f=1e999) -> ()",
        "(float f=5e-324) -> ()",
        "(float f=inf) -> ()",
        '(str s="a) -> ()',
        "(Device d='bogus') -> ()",
        "(int[] n=[True]) -> ()",
        "(Tensor größe) -> ()",
    ],
)
def test_text_that_is_no_schema(text: str) -> None:
    assert "the schema cannot be parsed: " in refusal(text)


@pytest.mark.parametrize(
    "text", ["(...) -> ()", "(Tensor x, ...) -> Tensor", "(Tensor x) -> ...", "() -> (Tensor, ...)"]
)
def test_open_ended_schema(text: str) -> None:
    with pytest.raises(SchemaError, match=r"a schema with \.\.\. is not supported"):
        parse(text)


def test_message_points_at_the_word() -> None:
    assert_expected_inline(
        refusal("(Tensor x) -> Tensor y z"),
        """\
the schema cannot be parsed: expected eof but found 'ident' at 'z'
  got:      '(Tensor x) -> Tensor y z'
  fix:      a schema looks like "(Tensor x, float scale=1.0) -> Tensor\"""",
    )


def test_message_for_a_number_out_of_range() -> None:
    assert_expected_inline(
        refusal("(Tensor x, int n=99999999999999999999) -> Tensor"),
        """\
the schema cannot be parsed: a number in it is out of range
  got:      '(Tensor x, int n=99999999999999999999) -> Tensor'
  fix:      a schema looks like "(Tensor x, float scale=1.0) -> Tensor\"""",
    )


def test_message_for_a_default_before_an_argument_without_one() -> None:
    assert_expected_inline(
        refusal("(int n=1, int m) -> Tensor"),
        """\
the schema cannot be parsed: Non-default positional argument follows default argument. Parameter m in op(int n=1, int m) -> Tensor
  got:      '(int n=1, int m) -> Tensor'
  fix:      a schema looks like "(Tensor x, float scale=1.0) -> Tensor\"""",  # noqa: E501
    )


def test_message_for_a_name_that_is_not_ascii() -> None:
    assert "names must be ASCII" in refusal("(Tensor größe) -> Tensor")


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
aliases = st.none() | st.builds(Alias, st.frozensets(st.sampled_from("abcd"), min_size=1), st.booleans())


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


@st.composite
def returns(draw: st.DrawFn) -> tuple[Return, ...]:
    types = ("Tensor", "Tensor[]", "Tensor?", "SymInt", "int", "float", "bool", "Scalar", "str", "(Tensor)")
    chosen = draw(st.lists(st.sampled_from(types), max_size=4))
    return tuple(Return(type_, draw(aliases) if type_.startswith("Tensor") else None) for type_ in chosen)


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


@settings(LOADED, max_examples=300)
@given(strings)
def test_any_string_is_a_default(text: str) -> None:  # 7
    written = default_text("str", text)
    assert written is not None
    assert written.startswith('"')
    assert written.endswith('"')
    (theirs,) = torch._C.parse_schema(f"f(str s={written}) -> ()").arguments
    assert theirs.default_value == text


@settings(LOADED, max_examples=300)
@given(st.floats())
def test_text_of_a_float_is_exact_or_there_is_none(value: float) -> None:  # 7
    written = default_text("float", value)
    if written is None:
        assert value != value or value in (float("inf"), float("-inf")) or 0 < abs(value) < 2.0**-1022
    else:
        (theirs,) = torch._C.parse_schema(f"f(float f={written}) -> ()").arguments
        assert exact(theirs.default_value) == exact(value)


@pytest.mark.parametrize("value", [2.0**-1022, -(2.0**-1022), 1.7976931348623157e308, 0.1, 1e22, -0.0], ids=repr)
def test_edges_of_the_floats_have_text(value: float) -> None:  # 7
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


@pytest.mark.parametrize("type_", ["Layout", "MemoryFormat"])
def test_enum_numbers_are_those_of_the_dispatcher(ns: str, type_: str) -> None:  # 65
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


# Facts about a schema ---------------------------------------------------------------------------------------------


def test_values_are_frozen() -> None:
    schema = parse("(Tensor x) -> Tensor")
    for value, field in ((schema, "arguments"), (schema.arguments[0], "name"), (schema.returns[0], "type")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, None)


@pytest.mark.parametrize(
    ("text", "is_functional", "is_view", "is_differentiable"),
    [
        ("(Tensor x) -> Tensor", True, False, True),
        ("() -> Tensor", True, False, True),
        ("(Tensor(a) x) -> Tensor", True, False, True),
        ("(Tensor(a!) x) -> Tensor", False, False, True),
        ("(Tensor(a!)?[] x) -> Tensor", False, False, True),
        ("(Tensor(a!) x) -> Tensor(a!)", False, False, True),
        ("(Tensor x) -> ()", False, False, False),
        ("(Tensor(a) x, int n) -> Tensor(a)", False, True, True),
        ("(Tensor(a) x) -> Tensor(a)[]", False, True, False),
        ("(Tensor(a) x, Tensor y) -> Tensor(a)", False, True, False),
        ("(Tensor(a) x) -> (Tensor(a), Tensor)", False, True, False),
    ],
)
def test_kinds_of_schema(text: str, is_functional: bool, is_view: bool, is_differentiable: bool) -> None:
    schema = parse(text)
    assert (schema.is_functional, schema.is_view, schema.is_differentiable) == (
        is_functional,
        is_view,
        is_differentiable,
    )


@pytest.mark.parametrize(
    ("type_", "is_tensor", "is_tensor_list"),
    [
        ("Tensor", True, False),
        ("Tensor?", True, False),
        ("Tensor[]", False, True),
        ("Tensor?[]", False, True),
        ("Tensor[]?", False, True),
        ("Tensor?[]?", False, True),
        ("Tensor[4]", False, True),
        ("int[]", False, False),
        ("Scalar", False, False),
    ],
)
def test_what_holds_tensors(type_: str, is_tensor: bool, is_tensor_list: bool) -> None:
    argument = only(f"{type_} x")
    assert (argument.is_tensor, argument.is_tensor_list) == (is_tensor, is_tensor_list)
    assert argument.holds_tensors == (is_tensor or is_tensor_list)
    schema = parse(f"(int n, *, {type_} x) -> Tensor")
    assert schema.takes_tensors == argument.holds_tensors
    assert [a.name for a in schema.keyword_only_tensors] == ["x"] * argument.holds_tensors
    assert parse(f"({type_} x) -> Tensor").keyword_only_tensors == ()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(Device device) -> Tensor", True),
        ("(int n, *, Device device='cpu') -> Tensor", True),
        ("(Device d) -> Tensor", False),
        ("(str device) -> Tensor", False),
        ("() -> Tensor", False),
    ],
)
def test_device_argument(text: str, found: bool) -> None:  # 23
    argument = parse(text).device_argument
    assert (argument is not None) == found
    assert argument is None or argument.name == "device"


def test_mutated_are_the_written_arguments_in_order() -> None:
    schema = parse("(Tensor(b!) y, Tensor(a) x, Tensor(c!)?[] z, *, Tensor(d!) out) -> ()")
    assert [a.name for a in schema.mutated] == ["y", "z", "out"]


# Tags -----------------------------------------------------------------------------------------------------------


def test_tags_become_a_tuple_without_repetitions() -> None:  # 25
    pointwise, inplace = torch.Tag.pointwise, torch.Tag.inplace
    assert normalize_tags(None) == normalize_tags(()) == ()
    assert normalize_tags(pointwise) == normalize_tags([pointwise]) == (pointwise,)
    assert normalize_tags((inplace, pointwise, inplace)) == (inplace, pointwise)


@pytest.mark.parametrize("tags", ["out", 3, [None], [[torch.Tag.out]]])
def test_tags_that_are_none(tags: Any) -> None:  # 25
    with pytest.raises(DefinitionError, match=r"tags must be torch\.Tag members"):
        normalize_tags(tags)


def test_inplace_and_out_exclude_each_other() -> None:  # 33
    with pytest.raises(TagError, match="mutually exclusive"):
        normalize_tags([torch.Tag.out, torch.Tag.inplace])
    assert issubclass(TagError, AssertionError)
    assert issubclass(TagError, ValueError)


INPLACE_PROBLEMS = [
    ("() -> Tensor", "torch.Tag.inplace needs a positional argument"),
    ("(*, Tensor(a!) x) -> Tensor(a!)", "torch.Tag.inplace needs a positional argument"),
    ("(int n, Tensor(a!) x) -> Tensor(a!)", "first positional argument must be a Tensor, 'n' is int"),
    ("(Tensor(a!)? x) -> Tensor(a!)", r"first positional argument must be a Tensor, 'x' is Tensor\?"),
    ("(Tensor(a!)[] x) -> Tensor(a!)", r"first positional argument must be a Tensor, 'x' is Tensor\[\]"),
    ("(Tensor x) -> Tensor", r"mutates_args must hold the first argument 'x' alone, not \[\]"),
    ("(Tensor x, Tensor(a!) y) -> Tensor(a!)", r"mutates_args must hold .* not \['y'\]"),
    ("(Tensor(a!) x, Tensor(b!) y) -> Tensor(a!)", r"mutates_args must hold .* not \['x', 'y'\]"),
    ("(Tensor(a!) x, *, Tensor(b!) y) -> Tensor(a!)", r"mutates_args must hold .* not \['x', 'y'\]"),
    ("(Tensor(a!) x) -> ()", "return annotation"),
    ("(Tensor(a!) x) -> Tensor", "return must alias"),
    ("(Tensor(a!) x) -> Tensor(b!)", "return must alias"),
    ("(Tensor(a!) x) -> Tensor(a)", "return must alias"),
    ("(Tensor(a!) x) -> Tensor(a!)[]", "return must alias"),
    ("(Tensor(a!) x) -> (Tensor(a!), Tensor)", "return annotation"),
]
OUT_PROBLEMS = [
    ("(Tensor(a!) x) -> Tensor(a!)", "'x' must be keyword-only"),
    ("(Tensor(a!) x, *, Tensor(b!) out) -> (Tensor(a!), Tensor(b!))", "'x' must be keyword-only"),
    ("(Tensor x, *, Tensor out) -> Tensor", "at least one"),
    ("(Tensor x) -> Tensor", "at least one"),
    ("(Tensor x, *, Tensor(a!)? out) -> Tensor(a!)", r"only supports Tensor outputs: 'out' is Tensor\?"),
    ("(Tensor x, *, Tensor(a!)[] out) -> Tensor(a!)", r"only supports Tensor outputs: 'out' is Tensor\[\]"),
    ("(Tensor x, *, Tensor(a!) p, Tensor(b!) q) -> Tensor(a!)", "return annotation"),
    ("(Tensor x, *, Tensor(a!) p, Tensor(b!) q) -> (Tensor(b!), Tensor(a!))", "in order.*return annotation"),
    ("(Tensor x, *, Tensor(a!) out) -> ()", "return annotation"),
    ("(Tensor x, *, Tensor(a!) out) -> Tensor", "return annotation"),
    ("(Tensor x, *, Tensor(a!) out) -> Tensor(b!)", "return annotation"),
    ("(Tensor x, *, Tensor(a!) out) -> ((Tensor))", "return annotation"),
    ("(Tensor x, *, Tensor(a!) out) -> (Tensor(a!), Tensor)", "return annotation"),
]
PROBLEMS = [(torch.Tag.inplace, *row) for row in INPLACE_PROBLEMS] + [(torch.Tag.out, *row) for row in OUT_PROBLEMS]


@pytest.mark.parametrize(("tag", "text", "match"), PROBLEMS)
def test_tag_and_schema_disagree(tag: torch.Tag, text: str, match: str) -> None:  # 33, 39
    with pytest.raises(SchemaError, match=match) as caught:
        check_tags(parse(text), (tag,), op="ns::op", where="op (file.py:1)")
    message = str(caught.value)
    assert message.startswith(f"ns::op: torch.{tag}")
    assert "file.py:1" in message
    assert str(parse(text)) in message
    assert len(message.splitlines()) < 8


@pytest.mark.parametrize(("tag", "text", "match"), PROBLEMS)
def test_manual_schema_with_a_tag_is_checked(
    registry: customops.Registry, ns: str, tag: torch.Tag, text: str, match: str
) -> None:  # 33, 39
    written = [argument.name for argument in parse(text).mutated]
    with pytest.raises(ValueError, match=match) as caught:
        registry.custom_op(f"{ns}::op", lambda *args, **kwargs: None, mutates_args=written, schema=text, tags=tag)
    assert f"{ns}::op" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
    assert len(registry) == 0


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        (torch.Tag.inplace, "(Tensor(a!) x, Tensor y) -> Tensor(a!)"),
        (torch.Tag.inplace, "(Tensor(z!) x, *, int n) -> Tensor(z!)"),
        (torch.Tag.out, "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"),
        (torch.Tag.out, "(*, Tensor(a!) p, int n, Tensor(b!) q) -> (Tensor(a!), Tensor(b!))"),
        (torch.Tag.pointwise, "(Tensor(a!) x) -> ()"),
    ],
)
def test_tag_and_schema_agree(tag: torch.Tag, text: str) -> None:  # 28, 34
    check_tags(parse(text), (tag,))


def test_manual_inplace_op(registry: customops.Registry, ns: str) -> None:  # 28
    def add_(x: Any, y: Any) -> Any:
        return x.add_(y)

    schema = "(Tensor(a!) x, Tensor y) -> Tensor(a!)"
    op = registry.custom_op(f"{ns}::add_", add_, mutates_args={"x"}, schema=schema, tags=torch.Tag.inplace)
    x = torch.ones(2)
    assert op(x, torch.ones(2)) is x
    assert x.tolist() == [2, 2]


def test_manual_out_op(registry: customops.Registry, ns: str) -> None:  # 34
    def add(x: Any, *, out: Any) -> Any:
        return out.copy_(x + 1)

    schema = "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"
    op = registry.custom_op(f"{ns}::add", add, mutates_args={"out"}, schema=schema, tags=torch.Tag.out)
    out = torch.zeros(2)
    assert op(torch.ones(2), out=out) is out
    assert out.tolist() == [2, 2]


# Manual schemas -------------------------------------------------------------------------------------------------


def test_manual_functional_schema(registry: customops.Registry, ns: str) -> None:  # 16
    def double(x, by=2.0):  # type: ignore[no-untyped-def]
        return x * by

    op = registry.custom_op(f"{ns}::double", double, mutates_args=(), schema="(Tensor x, float by=3.0) -> Tensor")
    assert op(torch.ones(2)).tolist() == [3, 3]  # the schema's default counts
    assert str(op._opoverload._schema) == f"{ns}::double(Tensor x, float by=3.) -> Tensor"
    assert op.schema == parse("(Tensor x, float by=3.0) -> Tensor")


@pytest.mark.parametrize("mutates_args", [("x",), {"x"}, "unknown"])
def test_manual_mutating_schema(registry: customops.Registry, ns: str, mutates_args: Any) -> None:  # 16
    def fill(x):  # type: ignore[no-untyped-def]
        x.fill_(5)

    op = registry.custom_op(f"{ns}::fill", fill, mutates_args=mutates_args, schema="(Tensor(a!) x) -> ()")
    x = torch.zeros(2)
    version = x._version
    assert op(x) is None
    assert x.tolist() == [5, 5]
    assert x._version > version


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
) -> None:  # 6, 16, 20
    def fill(x):  # type: ignore[no-untyped-def]
        (x if isinstance(x, Tensor) else x[-1]).fill_(5)

    op = registry.custom_op(f"{ns}::fill", fill, mutates_args={"x"}, schema=f"({type_} x) -> ()")
    x = torch.zeros(2)
    version = x._version
    op(wrap(x))
    assert x.tolist() == [5, 5]
    assert x._version > version


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
) -> None:  # 16
    def fn(*args: Any) -> None: ...

    with pytest.raises(ValueError, match=match) as caught:
        registry.custom_op(f"{ns}::op", fn, mutates_args=mutates_args, schema=schema)
    message = str(caught.value)
    assert len(message.splitlines()) < 8
    assert f"fn ({__file__}:{fn.__code__.co_firstlineno})" in message
    assert schema in message


@pytest.mark.parametrize("schema", ["(Foo x) -> Tensor", "(Tensor x, int n=2j", "(Tensor x, float f=1e-320) -> Tensor"])
def test_manual_schema_that_is_none(registry: customops.Registry, ns: str, schema: str) -> None:  # 16
    with pytest.raises(ValueError, match="the schema cannot be parsed"):
        registry.custom_op(f"{ns}::op", lambda x: x, mutates_args=(), schema=schema)
    assert len(registry) == 0


def test_manual_schema_has_no_name(registry: customops.Registry, ns: str) -> None:  # 16
    with pytest.raises(ValueError, match=r"expected schema to look like .* the name is given already"):
        registry.custom_op(f"{ns}::op", lambda x: x, mutates_args=(), schema="op(Tensor x) -> Tensor")


def test_message_for_a_manual_schema_that_disagrees(registry: customops.Registry, ns: str) -> None:  # 16
    def fn(x: Tensor) -> None: ...

    with pytest.raises(SchemaError) as caught:
        registry.custom_op(f"{ns}::op", fn, mutates_args=(), schema="(Tensor(a!) x) -> ()")
    message = str(caught.value).replace(f"{__file__}:{fn.__code__.co_firstlineno}", "FILE:LINE").replace(ns, "NS")
    assert_expected_inline(
        message,
        """\
NS::op: the schema and mutates_args disagree: by the schema, the op mutates {'x'}
  expected: mutates_args=('x',)
  got:      mutates_args=(), schema='(Tensor(a!) x) -> ()'
  at:       fn (FILE:LINE)""",
    )
