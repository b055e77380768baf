"""What is derived from a schema, and its tags."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.schemas import only

import customops
from customops import Tag
from customops._schema.parse import parse
from customops._schema.tags import check_tags, normalize_tags
from customops._versions import cached_property
from customops.errors import DefinitionError, SchemaError, TagError

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
    assert bool(schema.tensors) == argument.holds_tensors
    assert [a.name for a in schema.operands] == ["n"] + ["x"] * argument.holds_tensors
    assert [a.name for a in parse(f"({type_} x) -> Tensor").operands] == ["x"]


@pytest.mark.parity(23)
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
def test_device_argument(text: str, found: bool) -> None:
    argument = parse(text).device_argument
    assert (argument is not None) == found
    assert argument is None or argument.name == "device"


def test_mutated_are_the_written_arguments_in_order() -> None:
    schema = parse("(Tensor(b!) y, Tensor(a) x, Tensor(c!)?[] z, *, Tensor(d!) out) -> ()")
    assert [a.name for a in schema.mutated] == ["y", "z", "out"]


# Tags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity(25)
def test_tags_become_a_tuple_without_repetitions() -> None:
    pointwise, inplace = torch.Tag.pointwise, Tag.inplace
    assert normalize_tags(None) == normalize_tags(()) == ()
    assert normalize_tags(pointwise) == normalize_tags([pointwise]) == (pointwise,)
    assert normalize_tags((inplace, pointwise, inplace)) == (inplace, pointwise)


@pytest.mark.parity(25)
@pytest.mark.parametrize("tags", ["out", 3, [None], [[Tag.out]]])
def test_tags_that_are_none(tags: Any) -> None:
    with pytest.raises(DefinitionError, match=r"tags must be torch\.Tag members"):
        normalize_tags(tags)


@pytest.mark.parity(33)
def test_inplace_and_out_exclude_each_other() -> None:
    with pytest.raises(TagError, match="mutually exclusive"):
        normalize_tags([Tag.out, Tag.inplace])
    assert issubclass(TagError, AssertionError)
    assert issubclass(TagError, ValueError)


INPLACE_PROBLEMS = [
    ("() -> Tensor", r"torch\.Tag\.inplace needs a positional argument"),
    ("(*, Tensor(a!) x) -> Tensor(a!)", r"torch\.Tag\.inplace needs a positional argument"),
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
PROBLEMS = [(Tag.inplace, *row) for row in INPLACE_PROBLEMS] + [(Tag.out, *row) for row in OUT_PROBLEMS]


@pytest.mark.parity(33, 39)
@pytest.mark.parametrize(("tag", "text", "match"), PROBLEMS)
def test_tag_and_schema_disagree(tag: torch.Tag, text: str, match: str) -> None:
    with pytest.raises(SchemaError, match=match) as caught:
        check_tags(parse(text), (tag,), op="ns::op", where="op (file.py:1)")
    message = str(caught.value)
    assert message.startswith(f"ns::op: torch.{tag}")
    assert "file.py:1" in message
    assert str(parse(text)) in message
    assert len(message.splitlines()) < 8


@pytest.mark.parity(33, 39)
@pytest.mark.parametrize(("tag", "text", "match"), PROBLEMS)
def test_manual_schema_with_a_tag_is_checked(
    registry: customops.Registry, ns: str, tag: torch.Tag, text: str, match: str
) -> None:
    written = [argument.name for argument in parse(text).mutated]
    with pytest.raises(ValueError, match=match) as caught:
        registry.custom_op(f"{ns}::op", lambda *args, **kwargs: None, mutates_args=written, schema=text, tags=tag)
    assert f"{ns}::op" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
    assert len(registry) == 0


@pytest.mark.parity(28, 34)
@pytest.mark.parametrize(
    ("tag", "text"),
    [
        (Tag.inplace, "(Tensor(a!) x, Tensor y) -> Tensor(a!)"),
        (Tag.inplace, "(Tensor(z!) x, *, int n) -> Tensor(z!)"),
        (Tag.out, "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"),
        (Tag.out, "(*, Tensor(a!) p, int n, Tensor(b!) q) -> (Tensor(a!), Tensor(b!))"),
        (torch.Tag.pointwise, "(Tensor(a!) x) -> ()"),
    ],
)
def test_tag_and_schema_agree(tag: torch.Tag, text: str) -> None:
    check_tags(parse(text), (tag,))


@pytest.mark.parity(28)
def test_manual_inplace_op(registry: customops.Registry, ns: str) -> None:
    def add_(x: Any, y: Any) -> Any:
        return x.add_(y)

    schema = "(Tensor(a!) x, Tensor y) -> Tensor(a!)"
    op = registry.custom_op(f"{ns}::add_", add_, mutates_args={"x"}, schema=schema, tags=Tag.inplace)
    x = torch.ones(2)
    assert op(x, torch.ones(2)) is x
    assert x.tolist() == [2, 2]


@pytest.mark.parity(34)
def test_manual_out_op(registry: customops.Registry, ns: str) -> None:
    def add(x: Any, *, out: Any) -> Any:
        return out.copy_(x + 1)

    schema = "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"
    op = registry.custom_op(f"{ns}::add", add, mutates_args={"out"}, schema=schema, tags=Tag.out)
    out = torch.zeros(2)
    assert op(torch.ones(2), out=out) is out
    assert out.tolist() == [2, 2]


def test_a_property_is_computed_by_two_threads_at_once() -> None:
    """Python's own had a lock of all instances before 3.12: whoever waits in it for another thread waits forever."""
    both = threading.Barrier(2, timeout=30)

    class Slow:
        @cached_property
        def value(self) -> object:
            both.wait()
            return object()

    slow = Slow(), Slow()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda each: each.value, slow)
    assert [each.value for each in slow] == [first, second]
