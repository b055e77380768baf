"""What annotations say is found wherever it stands, also where all of them are strings, as in this file."""

from __future__ import annotations

from typing import Any, List, Optional, Union

import pytest
from torch import Tensor
from typing_extensions import NotRequired, Required, TypedDict

from customops import infer_schema
from customops import Mut


class Some(TypedDict):
    a: Tensor
    b: NotRequired[Tensor]


class Most(TypedDict, total=False):
    a: Required[Tensor]
    b: Tensor


def some(some: Some) -> None: ...
def most(most: Most) -> None: ...
def optional(x: Optional[Mut[Tensor]]) -> None: ...
def items(x: List[Mut[Tensor]]) -> None: ...
def maybe_items(x: list[Optional[Mut[Tensor]]]) -> None: ...
def variadic(*x: Mut[Tensor]) -> None: ...
def pair(x: tuple[Mut[Tensor], Tensor]) -> None: ...
def nested(x: list[list[Mut[Tensor]]]) -> None: ...
def either(x: Union[float, Mut[Tensor]]) -> None: ...


@pytest.mark.parametrize("fn", [some, most])
def test_keys_that_may_be_absent_are_known_of_a_class_with_strings_for_annotations(fn: Any) -> None:
    name = fn.__name__
    assert infer_schema(fn) == f"(Tensor {name}_a, Tensor? {name}_b=None) -> ()"


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (optional, "Tensor(a0!)? x"),
        (items, "Tensor(a0!)[] x"),
        (maybe_items, "Tensor(a0!)?[] x"),
        (variadic, "Tensor(a0!)[] x"),
        (pair, "Tensor(a0!) x_0, Tensor x_1"),
        (nested, "Tensor(a0!)[] x, SymInt[] x_lengths"),
        (either, "Tensor(a0!)? x, float? x_number"),
    ],
)
def test_mutates_is_found_inside_of_other_types(fn: Any, expected: str) -> None:
    assert infer_schema(fn) == f"({expected}) -> ()"
