"""Nodes: what a parameter or a return is made of, down to the single arguments and returns of the schema.

A `Leaf` is one of these. A `Group` has fields, as a dataclass or a tuple has. `Either` is ``float | Tensor``, and
`Nested` a list of lists of tensors. Each part has a `path` in Python, ``config.block``, and a `name` in the schema.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, Flag
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from customops._schema.model import REQUIRED
from customops._schema.types import dtype_from
from customops.errors import ArgumentError, brief

# ----------------------------------------------------------------------------------------------------------------------
# Where Python source of forms and codecs finds the objects that it names


class Objects(Protocol):
    #: The op, for messages.
    op: str

    def ref(self, name: str, value: Any) -> str:
        """A name for an object, starting with `name`."""


# Forms: how the fields of a group of values are held, in a dataclass, a tuple or a dict -------------------------------
#
# `name` is what the value is to be, for messages, and `path` what stands behind the path of the group in that of a
# field. `test`, `item` and `build` are source: a condition that holds for the values that are allowed, an expression
# for a field of one, and one for a value of expressions for its fields. `holds`, `get` and `assemble` do the same with
# objects that may be no values of the class: of gradients, or of numbers of dimensions.


@dataclass(frozen=True)
class DataclassForm:
    cls: type

    @property
    def name(self) -> str:
        return self.cls.__name__

    def path(self, key: str) -> str:
        return f".{key}"

    def test(self, value: str, objects: Objects) -> str:
        return f"$type({value}) is {objects.ref(self.name, self.cls)}"

    def item(self, value: str, key: str) -> str:
        return f"{value}.{key}"

    def build(self, objects: Objects, fields: Mapping[str, str]) -> str:
        make = objects.ref(f"New_{self.name}", functools.partial(_with_fields, self.cls))
        return f"{make}({', '.join(f'{key}={code}' for key, code in fields.items())})"

    def holds(self, value: Any) -> bool:
        return isinstance(value, self.cls)

    def get(self, value: Any, key: str) -> Any:
        return getattr(value, key)

    def assemble(self, fields: Mapping[str, Any]) -> Any:
        return _with_fields(self.cls, **fields)


def _with_fields(cls: Any, /, **fields: Any) -> Any:
    """An object with these values in its fields.

    The constructor is not called: what it does was done when the object was made that is put together again here.
    """
    made = object.__new__(cls)
    for key, value in fields.items():
        object.__setattr__(made, key, value)
    return made


@dataclass(frozen=True)
class TupleForm:
    """A tuple, or a NamedTuple."""

    cls: type
    keys: tuple[str, ...]

    @property
    def is_named(self) -> bool:
        return self.cls is not tuple

    @property
    def name(self) -> str:
        return self.cls.__name__ if self.is_named else f"a tuple of {len(self.keys)}"

    def path(self, key: str) -> str:
        return f".{key}" if self.is_named else f"[{key}]"

    def test(self, value: str, objects: Objects) -> str:
        if self.is_named:  # also a plain tuple, but none whose fields have other names
            test = f"($type({value}) is $tuple or $isinstance({value}, {objects.ref(self.name, self.cls)}))"
        else:
            test = f"$isinstance({value}, ($tuple, $list))"
        return f"{test} and $len({value}) == {len(self.keys)}"

    def item(self, value: str, key: str) -> str:
        return f"{value}[{self.keys.index(key)}]"

    def build(self, objects: Objects, fields: Mapping[str, str]) -> str:
        items = f"({''.join(f'{code}, ' for code in fields.values())})"
        return f"$tuple.__new__({objects.ref(self.name, self.cls)}, {items})" if self.is_named else items

    def holds(self, value: Any) -> bool:
        return isinstance(value, (tuple, list)) and len(value) == len(self.keys)

    def get(self, value: Any, key: str) -> Any:
        return value[self.keys.index(key)]

    def assemble(self, fields: Mapping[str, Any]) -> Any:
        return tuple.__new__(self.cls, fields.values())


@dataclass(frozen=True)
class DictForm:
    """A dict of fixed keys, some of which may be absent."""

    keys: tuple[str, ...]
    absent: frozenset[str] = frozenset()
    #: The type, as one writes it.
    written: str = field(default="dict", compare=False)

    @property
    def name(self) -> str:
        required = ", ".join(repr(key) for key in self.keys if key not in self.absent)
        maybe = ", ".join(repr(key) for key in self.keys if key in self.absent)
        text = f"a dict with the keys {required}" if required else "a dict"
        return f"{text}, and maybe {maybe}" if maybe else text

    def path(self, key: str) -> str:
        return f"[{key!r}]"

    def test(self, value: str, objects: Objects) -> str:
        keys = f"{{{', '.join(map(repr, self.keys))}}}" if self.keys else "$set()"  # in this order in each process
        test = f"$isinstance({value}, $dict) and {value}.keys() "
        if not self.absent:
            return f"{test}== {keys}"
        # None in the place of a value that is not there would be taken for one that is not there.
        none = "".join(f" and {value}.get({key!r}, 0) is not None" for key in self.keys if key in self.absent)
        given = "".join(f" and {key!r} in {value}" for key in self.keys if key not in self.absent)
        return f"{test}<= {keys}{given}{none}"

    def item(self, value: str, key: str) -> str:
        return f"{value}.get({key!r})" if key in self.absent else f"{value}[{key!r}]"

    def build(self, objects: Objects, fields: Mapping[str, str]) -> str:
        present = [f"{key!r}: {code}" for key, code in fields.items() if key not in self.absent]
        maybe = [f"**({{}} if ($value := {fields[key]}) is None else {{{key!r}: $value}})" for key in self.keys
                 if key in self.absent]  # fmt: skip
        return f"{{{', '.join([*present, *maybe])}}}"

    def holds(self, value: Any) -> bool:
        return isinstance(value, dict) and value.keys() <= set(self.keys)

    def get(self, value: Any, key: str) -> Any:
        return value.get(key)

    def assemble(self, fields: Mapping[str, Any]) -> Any:
        return dict(fields)


Form = DataclassForm | TupleForm | DictForm


# ----------------------------------------------------------------------------------------------------------------------
# Codecs: how a value of a type that the dispatcher does not have travels as a value of a type that it has
# A codec is Python source: expressions that generated functions hold (`_codegen.lowering`), and that `lowered`
# evaluates for a default value. ``lower`` is the way to the dispatcher, ``restore`` the way back.


@dataclass(frozen=True)
class Codec:
    """A value that travels as it is."""

    #: The values that are allowed, for messages.
    expected = ""

    @property
    def choices(self) -> Mapping[Any, Any]:
        """Lowered value -> the value it stands for, where there are just these; else nothing."""
        return {}

    def test(self, value: str, objects: Objects) -> str:
        """A condition that holds for the values that are allowed; "" if the dispatcher is to judge."""
        return ""

    def lower(self, value: str, objects: Objects) -> str:
        return value

    def restore(self, value: str, path: str, objects: Objects) -> str:
        return value


AS_IT_IS = Codec()


@dataclass(frozen=True)
class Template(Codec):
    """A codec whose source is the same for all ops: ``{value}`` stands for the value, ``{ref}`` for an object."""

    expected: str = ""
    condition: str = ""
    lowered: str = "{value}"
    restored: str = "{value}"
    ref: tuple[str, Any] = ("", None)

    def _fill(self, text: str, value: str, objects: Objects) -> str:
        if "{ref}" in text:
            text = text.replace("{ref}", objects.ref(*self.ref))
        return text.replace("{value}", value)

    def test(self, value: str, objects: Objects) -> str:
        return self._fill(self.condition, value, objects)

    def lower(self, value: str, objects: Objects) -> str:
        return self._fill(self.lowered, value, objects)

    def restore(self, value: str, path: str, objects: Objects) -> str:
        return self._fill(self.restored, value, objects)


#: A dtype in a list: the dispatcher hands it over as a number where there may be no list.
DTYPE = Template(restored="{ref}({value})", ref=("Dtype", dtype_from))

DEVICE = Template(
    "a torch.device, or the name of one",
    condition="$isinstance({value}, ({ref}, $str, $int))",
    lowered="{ref}({value})",
    ref=("Device", torch.device),
)

#: A returned tensor that may be None travels as a list with one item or none.
MAYBE_TENSOR = Template(
    "a Tensor or None",
    condition="({value} is None or $isinstance({value}, $Tensor))",
    lowered="([] if {value} is None else [{value}])",
    restored="({value}[0] if {value} else None)",
)

#: A returned string travels as the numbers of its characters: compilers know no op that returns a string.
TEXT = Template(
    "a str",
    condition="$isinstance({value}, $str)",
    lowered="[$ord($char) for $char in {value}]",
    restored="''.join([$chr($char) for $char in {value}])",
)


class Choices(dict[Any, Any]):
    """Lowered value -> the value it stands for. For others, which calls through ``torch.ops`` may have, it raises."""

    def __init__(self, values: Mapping[Any, Any], path: str, op: str) -> None:
        super().__init__(values)
        self.path, self.op = path, op

    def __missing__(self, value: Any) -> Any:
        problem = "not one of the values that are allowed"
        raise ArgumentError(problem, op=self.op, argument=self.path, expected=one_of(self), got=repr(value))


def one_of(values: Iterable[Any], show: Callable[[Any], str] = repr) -> str:
    """The values for a message, which shows 16 of them."""
    texts = [show(value) for value in values]
    more = f" and {len(texts) - 16} more" if len(texts) > 16 else ""
    return f"one of {', '.join(texts[:16])}{more}"


@dataclass(frozen=True)
class LiteralCodec(Codec):
    """Travels as a str, an int or a bool; where the values are of several types, as the text of the value."""

    values: tuple[Any, ...]

    @property
    def expected(self) -> str:  # type: ignore[override]
        return one_of(self.values)

    @property
    def types(self) -> tuple[type, ...]:
        return tuple(dict.fromkeys(map(type, self.values)))

    @property
    def schema_type(self) -> str:
        return self.types[0].__name__ if len(self.types) == 1 else "str"

    @property
    def choices(self) -> Mapping[Any, Any]:
        return {each if len(self.types) == 1 else repr(each): each for each in self.values}

    def test(self, value: str, objects: Objects) -> str:
        parts = []
        for type_ in self.types:
            choices = objects.ref("Choices", frozenset(each for each in self.values if type(each) is type_))
            parts.append(f"$type({value}) is ${type_.__name__} and {value} in {choices}")
        return " or ".join(parts)

    def lower(self, value: str, objects: Objects) -> str:
        if len(self.types) == 1:
            return value
        *cases, last = self.values
        tests = [
            f"{repr(case)!r} if $type({value}) is ${type(case).__name__} and {value} == {case!r} else" for case in cases
        ]
        return f"({' '.join(tests)} {repr(last)!r})"

    def restore(self, value: str, path: str, objects: Objects) -> str:
        return f"{objects.ref('Choices', Choices(self.choices, path, objects.op))}[{value}]"


@dataclass(frozen=True)
class EnumCodec(Codec):
    """Travels as the name of the member; of a class whose members are strings or numbers, as that."""

    cls: type[Enum]

    @property
    def expected(self) -> str:  # type: ignore[override]
        return one_of(self.cls, lambda member: f"{self.cls.__name__}.{member.name}")

    @property
    def schema_type(self) -> str:
        return "int" if self._has_own_values and not issubclass(self.cls, str) else "str"

    @property
    def _has_own_values(self) -> bool:
        kind = str if issubclass(self.cls, str) else int
        are_such = all(type(each._value_) is kind for each in self.cls)  # `__new__` may make them of something else
        return are_such and issubclass(self.cls, (int, str, Flag))

    @property
    def choices(self) -> Mapping[Any, Any]:
        if not self._has_own_values:
            return dict(self.cls.__members__)  # with aliases: programs of before may hold a name that was replaced
        if issubclass(self.cls, Flag):  # also combinations of the members
            return {}
        return {each._value_: each for each in self.cls}

    def test(self, value: str, objects: Objects) -> str:
        return f"$type({value}) is {objects.ref(self.cls.__name__, self.cls)}"

    def lower(self, value: str, objects: Objects) -> str:
        return f"{value}._value_" if self._has_own_values else f"{value}._name_"

    def restore(self, value: str, path: str, objects: Objects) -> str:
        if not self.choices:
            return f"{objects.ref(self.cls.__name__, self.cls)}({value})"
        return f"{objects.ref(self.cls.__name__, Choices(self.choices, path, objects.op))}[{value}]"


@dataclass(frozen=True)
class SequenceCodec(Codec):
    """Travels as a list: a tuple, a ``torch.Size``, or a list of which each item has a codec."""

    container: type
    length: int | None = None
    item: Codec = AS_IT_IS

    @property
    def expected(self) -> str:  # type: ignore[override]
        items = f" of {self.item.expected}" if self.item.expected else ""
        return f"a {self.container.__name__}{items}" if self.length is None else f"a tuple of {self.length}"

    def test(self, value: str, objects: Objects) -> str:
        item = self.item.test("$item", objects)
        parts = [f"$isinstance({value}, ($list, $tuple))"]
        parts += [f"$len({value}) == {self.length}"] if self.length is not None else []
        parts += [f"$all([{item} for $item in {value}])"] if item else []
        return " and ".join(parts)

    def lower(self, value: str, objects: Objects) -> str:
        item = self.item.lower("$item", objects)
        return value if item == "$item" else f"[{item} for $item in {value}]"

    def restore(self, value: str, path: str, objects: Objects) -> str:
        item = self.item.restore("$item", path, objects)
        items = value if item == "$item" else f"[{item} for $item in {value}]"
        if self.length is not None:
            return f"{objects.ref('Items', functools.partial(_items, self.length, path, objects.op))}({items})"
        if self.container is list:
            return items
        container = "$tuple" if self.container is tuple else objects.ref(self.container.__name__, self.container)
        return f"{container}({items})"


def _items(length: int, path: str, op: str, items: list[Any]) -> tuple[Any, ...]:
    """A tuple of a length. The dispatcher does not look at lengths."""
    if len(items) != length:
        expected = f"{length} items"
        raise ArgumentError("the length is wrong", op=op, argument=path, expected=expected, got=brief(items))
    return tuple(items)


# ----------------------------------------------------------------------------------------------------------------------
# Nodes: what a parameter or a return is made of, down to the single arguments and returns of the schema

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
        parts: Values = {} if self.given is None else {self.given.name: value is not None}
        if value is None:
            return dict.fromkeys([leaf.name for leaf in self.leaves]) | parts
        for key, node in self.fields.items():
            parts |= node.take_apart(self.form.get(value, key))
        return parts


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

BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
_PLAIN_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
        return self.kind in _PLAIN_KINDS and self.node.is_plain

    @property
    def by_keyword(self) -> bool:
        """Is it passed by its name alone?"""
        return self.kind in BY_KEYWORD

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
