"""Parsing a schema, and what is said of one that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.schemas import only
from helpers.tensors import exact

from customops._schema.model import REQUIRED, Alias, Argument, Return, Schema
from customops._schema.parse import parse
from customops.errors import SchemaError


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


@pytest.mark.parity(6)
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
def test_alias_of_an_argument(text: str, type_: str, sets: str, write: bool) -> None:
    argument = only(text)
    assert (argument.type, argument.alias) == (type_, Alias(frozenset(sets), write))
    assert argument.is_mutated is write
    assert argument.holds_tensors


def test_alias_of_a_return() -> None:
    (ret,) = parse("(Tensor(a) x) -> Tensor(a)[]").returns
    assert (ret.type, ret.alias) == ("Tensor[]", Alias(frozenset("a")))
    assert str(ret) == "Tensor(a)[]"


def test_alias_text() -> None:
    several, written, both = parse("(Tensor(e|c|d|a|b) x, Tensor(a!) y, Tensor(a! -> a|b) z) -> ()").arguments
    assert str(several.alias) == "a|b|c|d|e"
    assert str(written.alias) == "a!"
    assert both.alias == Alias(frozenset("a"), write=True)


@pytest.mark.parity(17)
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
def test_default_in_python_form(text: str, default: Any) -> None:
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
