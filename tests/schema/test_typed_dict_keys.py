"""Which keys of a TypedDict may be absent, where annotations are strings."""

from __future__ import annotations

import typing
from typing import Annotated

import typing_extensions
from torch import Tensor
from typing_extensions import NotRequired, ReadOnly, Required

from customops._schema.infer import infer_schema


class Base(typing.TypedDict):
    a: Tensor
    b: NotRequired[Tensor]
    c: Annotated[NotRequired[Tensor], "why"]
    d: ReadOnly[NotRequired[Tensor]]


class Derived(Base, total=False):
    e: Tensor
    f: Required[Tensor]


class Extended(typing_extensions.TypedDict):
    a: Tensor
    b: NotRequired[Tensor]


def of_derived(x: Derived) -> None: ...


def of_extended(x: Extended) -> None: ...


def test_keys_of_a_typed_dict_of_typing() -> None:
    schema = infer_schema(of_derived, mutates_args=())
    optional = [letter for letter in "abcdef" if f"Tensor? x_{letter}" in schema]
    assert optional == ["b", "c", "d", "e"]


def test_keys_of_a_typed_dict_of_typing_extensions() -> None:
    schema = infer_schema(of_extended, mutates_args=())
    assert "Tensor x_a" in schema
    assert "Tensor? x_b" in schema
