"""Nodes: what a parameter or a return is made of, down to the single arguments and returns of the schema.

A `Leaf` is one of these. A `Group` has fields, as a dataclass or a tuple has. `Either` is ``float | Tensor``, and
`Nested` a list of lists of tensors. Each part has two names: its `path` in Python, ``config.block``, and its `name`
in the schema, ``config_block``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from customops._schema.codecs import AS_IT_IS, Codec
from customops._schema.forms import Form
from customops._schema.model import REQUIRED

#: Values of leaves, by their names.
Values = dict[str, Any]


@dataclass  # not frozen: they are made for each parameter of each op, and that would take four times as long
class Leaf:
    """One argument, or one return, of the schema."""

    name: str
    path: str
    type: str
    codec: Codec = AS_IT_IS
    #: The default of the parameter or field, as the user wrote it.
    default: Any = REQUIRED
    #: Do annotations say that the op writes to it?
    is_mutated: bool = False
    #: Is it the lengths of the lists in a list of lists?
    counts_tensors: bool = False
    #: The argument that a return is, by `SameAs`.
    same_as: str | None = None

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return (self,)

    @property
    def is_optional(self) -> bool:
        return self.type.endswith("?")

    @property
    def is_plain(self) -> bool:
        """Does it travel as it is?"""
        return self.codec is AS_IT_IS

    @property
    def holds_tensors(self) -> bool:
        return self.type.startswith("Tensor")

    def optional(self) -> Leaf:
        return self if self.is_optional else replace(self, type=f"{self.type}?")

    def assemble(self, values: Mapping[str, Any]) -> Any:
        return values[self.name]

    def take_apart(self, value: Any) -> Values:
        return {self.name: value}


@dataclass(frozen=True)
class Group:
    """Several values in one object."""

    name: str
    path: str
    form: Form
    fields: Mapping[str, Node]
    default: Any = REQUIRED
    #: Says in the schema whether there is an object, of a group that may be None.
    given: Leaf | None = None

    is_plain: ClassVar[bool] = False

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        leaves = tuple(leaf for node in self.fields.values() for leaf in node.leaves)
        return leaves if self.given is None else (self.given, *(leaf.optional() for leaf in leaves))

    @property
    def holds_tensors(self) -> bool:
        return any(leaf.holds_tensors for leaf in self.leaves)

    def optional(self) -> Group:
        given = Leaf(f"{self.name}_given", f"{self.path} is not None", "bool")
        return replace(self, given=given)

    def assemble(self, values: Mapping[str, Any]) -> Any:
        """The object that holds, in the place of each leaf, the value of that name."""
        return self.form.assemble({key: node.assemble(values) for key, node in self.fields.items()})

    def take_apart(self, value: Any) -> Values:
        """The values of the leaves, as they stand in `value`; each is None where that is None."""
        if value is None:
            return dict.fromkeys([leaf.name for leaf in self.leaves]) | (self._given(False))
        parts = self._given(True)
        for key, node in self.fields.items():
            parts |= node.take_apart(self.form.get(value, key))
        return parts

    def _given(self, is_given: bool) -> Values:
        return {} if self.given is None else {self.given.name: is_given}


@dataclass(frozen=True)
class Either:
    """A tensor or a number: two arguments, of which the number counts where there is no tensor."""

    name: str
    path: str
    tensor: Leaf
    number: Leaf
    may_be_none: bool
    default: Any = REQUIRED

    is_plain: ClassVar[bool] = False
    holds_tensors: ClassVar[bool] = True

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.tensor, self.number

    def optional(self) -> Either:
        return replace(self, may_be_none=True)

    def assemble(self, values: Mapping[str, Any]) -> Any:
        return values[self.tensor.name]

    def take_apart(self, value: Any) -> Values:
        is_tensor = isinstance(value, Tensor)
        return {self.tensor.name: value if is_tensor else None, self.number.name: None if is_tensor else value}


@dataclass(frozen=True)
class Nested:
    """A list of lists of tensors: all of them in one list, and how many each has."""

    name: str
    path: str
    tensors: Leaf
    lengths: Leaf
    default: Any = REQUIRED

    is_plain: ClassVar[bool] = False
    holds_tensors: ClassVar[bool] = True

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.tensors, self.lengths

    def optional(self) -> Nested:
        return replace(self, tensors=self.tensors.optional(), lengths=self.lengths.optional())

    def assemble(self, values: Mapping[str, Any]) -> Any:
        flat = values[self.tensors.name]
        return None if flat is None else list(split(flat, values[self.lengths.name]))

    def take_apart(self, value: Any) -> Values:
        if value is None:
            return {self.tensors.name: None, self.lengths.name: None}
        return {self.tensors.name: [x for items in value for x in items], self.lengths.name: list(map(len, value))}


def split(items: Iterable[Any], lengths: Iterable[int]) -> Iterator[list[Any]]:
    """Lists of these lengths, of the items one after the other."""
    rest = list(items)
    for length in lengths:
        yield rest[:length]
        del rest[:length]


Node = Leaf | Group | Either | Nested


_BY_NAME, _BY_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


@dataclass  # as a Leaf
class Parameter:
    """A parameter of the function that an op is defined from."""

    name: str
    kind: Any  # of `inspect.Parameter`
    node: Node
    default: Any = REQUIRED

    @property
    def is_plain(self) -> bool:
        """Is it one argument of the schema, of the same name, order and values?"""
        return self.node.is_plain and (self.kind is _BY_NAME or self.kind is _BY_KEYWORD)

    @property
    def by_keyword(self) -> bool:
        """Is it passed by its name alone?"""
        return self.kind is _BY_KEYWORD or self.kind is inspect.Parameter.VAR_KEYWORD

    @property
    def stars(self) -> str:
        """What stands before its name."""
        return {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(self.kind, "")


@dataclass(frozen=True)
class Signature:
    """The parameters and the return of a function, where they are not simply those of the schema."""

    parameters: tuple[Parameter, ...]
    #: None for a function that returns nothing.
    result: Node | None
    #: Is the result just what the op returns?
    returns_plainly: bool

    @property
    def is_plain(self) -> bool:
        return self.returns_plainly and all(parameter.is_plain for parameter in self.parameters)
