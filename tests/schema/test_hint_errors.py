"""What hints cannot say, and the message."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Dict, List, Literal, NamedTuple, Optional, Tuple, Union

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from helpers.hint_classes import Mode, Table
from helpers.hints import complaint
from torch import Tensor
from torch.types import Number

import customops
from customops import Tag, infer_schema
from customops._schema.types import tuple_to_list
from customops.errors import DefinitionError

# Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parity(10)
def test_varkwargs() -> None:
    def fn(x: Tensor, **rest: Tensor) -> Tensor: ...

    complaint(fn, r"varkwargs \(\*\*rest\) are not supported")


@pytest.mark.parity(10)
def test_unannotated_parameter() -> None:
    def fn(x: Tensor, y) -> Tensor: ...  # type: ignore[no-untyped-def]
    def several(*args) -> Tensor: ...  # type: ignore[no-untyped-def]
    def named(**kwargs) -> Tensor: ...  # type: ignore[no-untyped-def]

    complaint(fn, "parameter y must have a type annotation")
    complaint(several, r"varargs \(\*args\) must have a type annotation")
    complaint(named, r"varkwargs \(\*\*kwargs\) must have a type annotation")


@pytest.mark.parity(10)
def test_unbound_method_has_an_unannotated_self() -> None:
    class Model:
        def forward(self, x: Tensor) -> Tensor: ...

    complaint(Model.forward, "a method cannot be an op: its first parameter is self")


@pytest.mark.parity(10)
@pytest.mark.parametrize(
    "hint",
    [
        Tuple[float, ...],
        Optional[int],
        List[float],
        bytes,
        torch.dtype,
        Dict[str, Tensor],
        tuple,
        Tuple[()],
        Tuple,
        np.ndarray,
        Any,
    ],
    ids=str,
)
def test_unsupported_return(hint: Any) -> None:
    def fn(x: Tensor) -> hint: ...

    complaint(fn, "the return has unsupported type")


@pytest.mark.parity(10)
@pytest.mark.parametrize(
    ("mutates_args", "match"),
    [
        (("n",), "parameter n is in mutates_args, but only Tensors or collections of Tensors can be mutated"),
        (("y",), r"\{'y'\} in mutates_args were not found"),
        (("z", "x", "y"), r"\{'y', 'z'\} in mutates_args were not found"),
        ("x", "the string 'unknown', not 'x'"),
        ("", "the string 'unknown', not ''"),
        (3, "an iterable of names or the string 'unknown'"),
        ([["x"]], "an iterable of names or the string 'unknown'"),
        ([1], "an iterable of names or the string 'unknown'"),
    ],
)
def test_wrong_mutates_args(mutates_args: Any, match: str) -> None:
    def fn(x: Tensor, n: int) -> Tensor: ...

    complaint(fn, match, mutates_args=mutates_args)


@pytest.mark.parity(10)
@pytest.mark.parametrize("hint", [List[int], Optional[str], Number, torch.dtype], ids=str)
def test_only_tensors_can_be_mutated(hint: Any) -> None:
    def fn(x: Tensor, y: hint) -> Tensor: ...

    complaint(fn, "parameter y is in mutates_args, .* can be mutated", mutates_args={"y"})


@pytest.mark.parity(10)
def test_no_return_annotation() -> None:
    def fn(x: Tensor): ...  # type: ignore[no-untyped-def]

    complaint(fn, r"No return type annotation was provided\. Please add one\.")


def test_name_that_no_schema_can_hold() -> None:
    def fn(x: Tensor, größe: int) -> Tensor: ...

    complaint(fn, "parameter größe: names in a schema are ASCII")


class Pair(NamedTuple):
    low: int
    high: int


@pytest.mark.parity(11)
@pytest.mark.parametrize(
    "hint",
    [
        List[Optional[int]],
        List[Pair],
        Callable,
        Callable[[int], int],
        dict,
        Dict[str, int],
        set,
        object,
        Any,
        None,
        3,
        [int],
        Ellipsis,
        bytes,
        List[List[int]],
        Optional[List[List[int]]],
        Union[int, str],
        Literal[b"a"],
        torch.SymInt,
        np.ndarray,
        Path,
        type,
    ],
    ids=str,
)
def test_unsupported_parameter(hint: Any) -> None:
    def fn(x: Tensor, y: hint) -> Tensor: ...

    complaint(fn, "parameter y has unsupported type")


@pytest.mark.parity(12)
@pytest.mark.parametrize("t", [int, float, bool, str, torch.device, Tensor, torch.dtype, Number], ids=str)
def test_tuple_to_list(t: Any) -> None:
    assert tuple_to_list(Tuple[t]) == list[t]
    assert tuple_to_list(Tuple[t, ...]) == list[t]
    assert tuple_to_list(Tuple[t, t, t]) == list[t]
    assert tuple_to_list(tuple[t, t]) == list[t]
    assert tuple_to_list(Tuple[t, Optional[t]]) == list[Optional[t]]
    assert tuple_to_list(Tuple[t, t, Optional[t]]) == list[Optional[t]]


@pytest.mark.parity(12)
def test_tuple_to_list_without_items() -> None:
    assert tuple_to_list(Tuple) is list
    assert tuple_to_list(tuple) is list


@pytest.mark.parity(12)
def test_tuple_to_list_of_mixed_items() -> None:
    assert tuple_to_list(Tuple[int, float]) == list[int | float]
    assert tuple_to_list(Tuple[int, float, str]) == list[int | float | str]


@pytest.mark.parity(12)
def test_tuple_to_list_gives_the_builtin_list() -> None:
    assert str(tuple_to_list(Tuple[int, int])) == "list[int]"


def test_failed_inference_defines_nothing(registry: customops.Registry, ns: str) -> None:
    def fn(x: Tensor, y: dict) -> Tensor: ...

    with pytest.raises(ValueError, match="unsupported type"):
        registry.custom_op(f"{ns}::op", fn, mutates_args=())
    assert len(registry) == 0
    assert not hasattr(getattr(torch.ops, ns), "op")


# Messages -------------------------------------------------------------------------------------------------------


def test_message_for_a_type() -> None:
    def scale(x: Tensor, sizes: List[List[int]]) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter sizes has unsupported type typing.List[typing.List[int]]
  at:       FUNCTION (FILE:LINE)
  fix:      sizes: list[int], sizes_counts: list[int], all items, and how many are in each list""",
    )


def test_message_for_a_type_with_a_relative() -> None:
    def scale(x: np.ndarray) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter x has unsupported type numpy.ndarray
  at:       FUNCTION (FILE:LINE)
  fix:      x: Tensor, which torch.from_numpy makes""",
    )


def test_message_for_a_dict() -> None:
    def scale(x: Tensor, options: Dict[str, int]) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter options has unsupported type typing.Dict[str, int]
  at:       FUNCTION (FILE:LINE)
  fix:      options: Annotated[dict[str, int], Keys("a", "b")], with the keys that it has""",
    )


def test_message_for_a_return() -> None:
    def scale(x: Tensor) -> Tuple[float, ...]: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: the return has unsupported type typing.Tuple[float, ...]
  at:       FUNCTION (FILE:LINE)
  fix:      -> Tensor, of torch.float64""",
    )


def test_message_for_a_default_of_an_enum() -> None:
    def scale(x: Tensor, mode: Mode = "FAST") -> Tensor: ...  # type: ignore[assignment]

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter mode has an unsupported default: it is not one of Mode.FAST, Mode.SLOW
  expected: one of Mode.FAST, Mode.SLOW
  got:      'FAST'
  at:       FUNCTION (FILE:LINE)
  fix:      mode: Mode = Mode.FAST""",
    )


def test_message_for_a_field() -> None:
    def scale(x: Tensor, table: Table) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter table.named has unsupported type dict[str, int]
  at:       FUNCTION (FILE:LINE)
  fix:      table.named: Annotated[dict[str, int], Keys("a", "b")], with the keys that it has""",
    )


def test_message_for_a_missing_annotation() -> None:
    def scale(x: Tensor, by) -> Tensor: ...  # type: ignore[no-untyped-def]

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter by must have a type annotation
  at:       FUNCTION (FILE:LINE)
  fix:      e.g. by: torch.Tensor""",
    )


def test_message_for_a_missing_return() -> None:
    def scale(x: Tensor): ...  # type: ignore[no-untyped-def]

    assert_expected_inline(
        complaint(scale),
        """\
scale: No return type annotation was provided. Please add one.
  at:       FUNCTION (FILE:LINE)
  fix:      e.g. -> torch.Tensor, or -> None for an op that only mutates""",
    )


def test_message_for_varkwargs() -> None:
    def scale(**xs: Tensor) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: varkwargs (**xs) are not supported
  got:      torch.Tensor
  at:       FUNCTION (FILE:LINE)
  fix:      **xs: Unpack[Options], of a class Options(TypedDict), or a named parameter for each""",
    )


def test_message_for_a_quoted_name() -> None:
    def scale(x: "Vector") -> Tensor: ...  # noqa: F821

    assert_expected_inline(
        complaint(scale),
        """\
scale: Unsupported type annotation Vector. It is not a type. (NameError: name 'Vector' is not defined)
  argument: x
  at:       FUNCTION (FILE:LINE)
  fix:      a quoted annotation (or any, after `from __future__ import annotations`) is evaluated in the function's module: import or define the name there, not inside a function""",  # noqa: E501
    )


def test_message_for_a_plain_string() -> None:
    def scale_(x: Tensor) -> None: ...

    assert_expected_inline(
        complaint(scale_, mutates_args="x"),
        """\
scale_: mutates_args must be an iterable of names or the string 'unknown', not 'x'
  at:       FUNCTION (FILE:LINE)
  fix:      mutates_args=('x',)""",
    )


def test_message_for_an_unknown_name() -> None:
    def scale_(x: Tensor, by: float) -> None: ...

    assert_expected_inline(
        complaint(scale_, mutates_args={"y"}),
        """\
scale_: {'y'} in mutates_args were not found among the parameters
  got:      (x, by)
  at:       FUNCTION (FILE:LINE)
  fix:      mutates_args=('x',)""",
    )


def test_message_for_what_cannot_be_mutated() -> None:
    def scale_(x: Tensor, by: float) -> None: ...

    assert_expected_inline(
        complaint(scale_, mutates_args={"by"}),
        """\
scale_: parameter by is in mutates_args, but only Tensors or collections of Tensors can be mutated
  at:       FUNCTION (FILE:LINE)
  fix:      leave by out of mutates_args""",
    )


def test_message_for_a_default() -> None:
    def scale(x: Tensor, by: int = 2**64) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter by has an unsupported default: the dispatcher's integers have 64 bits
  expected: int
  got:      18446744073709551616
  at:       FUNCTION (FILE:LINE)
  fix:      by: int | None = None, and the value in the kernel""",
    )


def test_message_for_a_default_of_an_optional() -> None:
    def scale(x: Tensor, by: Optional[float] = float("inf")) -> Tensor: ...

    assert_expected_inline(
        complaint(scale),
        """\
scale: parameter by has an unsupported default: schema text cannot hold it, and None has its own meaning here
  expected: float?
  got:      inf
  at:       FUNCTION (FILE:LINE)
  fix:      drop Optional[...] from by, or default to None and fill the value in the kernel""",
    )


def test_message_for_an_inplace_tag() -> None:
    def scale_(x: Tensor, y: Tensor) -> Tensor: ...

    assert_expected_inline(
        complaint(scale_, mutates_args={"y"}, tags=Tag.inplace),
        """\
scale_: torch.Tag.inplace: mutates_args must hold the first argument 'x' alone, not ['y']
  got:      (Tensor x, Tensor(a1!) y) -> Tensor
  at:       FUNCTION (FILE:LINE)""",
    )


def test_message_for_an_out_tag() -> None:
    def scale(x: Tensor, *, out: Tensor) -> Tuple[Tensor]: ...

    assert_expected_inline(
        complaint(scale, mutates_args={"out"}, tags=Tag.out),
        """\
scale: torch.Tag.out: the returns must be the mutated arguments (out) in order: the return annotation is torch.Tensor, each aliasing its argument
  got:      (Tensor x, *, Tensor(a1!) out) -> ((Tensor(a1!)))
  at:       FUNCTION (FILE:LINE)""",  # noqa: E501
    )


def test_message_for_contradicting_tags() -> None:
    def scale_(x: Tensor) -> Tensor: ...

    with pytest.raises(DefinitionError) as caught:
        infer_schema(scale_, mutates_args={"x"}, tags=(Tag.inplace, Tag.out))
    assert_expected_inline(
        str(caught.value),
        """\
torch.Tag.inplace and torch.Tag.out are mutually exclusive
  argument: tags""",
    )


T1 = "T1"
T2 = "T3"
T3 = "T2"


@pytest.mark.parametrize("hint", ["T1", "T2", "list[T1]"])
def test_a_name_that_stands_for_itself(hint: str) -> None:
    def fn(x: Any) -> Tensor: ...

    fn.__annotations__ = {"x": hint, "return": Tensor}
    complaint(fn, "stands for itself")
