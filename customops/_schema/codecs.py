"""Codecs: how a value of a type that the dispatcher does not have travels as a value of a type that it has.

A codec is Python source: expressions that generated functions hold (`customops._lowering.writer`), and that `lowered`
evaluates for a default value. ``lower`` is the way to the dispatcher, ``restore`` the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, Flag
from typing import Any, Protocol

import torch

from customops._schema.literals import dtype_from
from customops.errors import ArgumentError, brief


class Objects(Protocol):
    """Where the source of a codec finds the objects that it names."""

    #: The op, for messages.
    op: str

    def ref(self, name: str, value: Any) -> str:
        """A name for an object, starting with `name`."""


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


class Choices(dict[Any, Any]):
    """Lowered value -> the value it stands for. For others, which calls through ``torch.ops`` may have, it raises."""

    def __init__(self, values: Mapping[Any, Any], path: str, op: str) -> None:
        super().__init__(values)
        self.path, self.op = path, op

    def __missing__(self, value: Any) -> Any:
        raise ArgumentError(
            "not one of the values that are allowed",
            op=self.op,
            argument=self.path,
            expected=one_of(self),
            got=repr(value),
        )


#: How many choices a message shows.
_SHOWN = 16


def one_of(values: Iterable[Any], show: Callable[[Any], str] = repr) -> str:
    texts = [show(value) for value in values]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return f"one of {', '.join(texts[:_SHOWN])}{more}"


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
        if self._has_own_values and issubclass(self.cls, Flag):  # also combinations of the members
            return {}
        if self._has_own_values:
            return {each._value_: each for each in self.cls}
        return dict(self.cls.__members__)  # with aliases: programs of before may hold a name that was replaced

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
            return f"{objects.ref('Items', Items(self.length, path, objects.op))}({items})"
        if self.container is list:
            return items
        container = "$tuple" if self.container is tuple else objects.ref(self.container.__name__, self.container)
        return f"{container}({items})"


@dataclass(frozen=True)
class Items:
    """Makes a tuple of a length. The dispatcher does not look at lengths."""

    length: int
    path: str
    op: str

    def __call__(self, items: list[Any]) -> tuple[Any, ...]:
        if len(items) != self.length:
            raise ArgumentError(
                "the length is wrong", op=self.op, argument=self.path, expected=f"{self.length} items", got=brief(items)
            )
        return tuple(items)


@dataclass(frozen=True)
class DtypeCodec(Codec):
    """A dtype in a list: the dispatcher hands it over as a number where there may be no list."""

    def restore(self, value: str, path: str, objects: Objects) -> str:
        return f"{objects.ref('Dtype', dtype_from)}({value})"


@dataclass(frozen=True)
class DeviceCodec(Codec):
    """A device, or its name."""

    expected = "a torch.device, or the name of one"

    def test(self, value: str, objects: Objects) -> str:
        return f"$isinstance({value}, ({objects.ref('Device', torch.device)}, $str, $int))"

    def lower(self, value: str, objects: Objects) -> str:
        return f"{objects.ref('Device', torch.device)}({value})"


@dataclass(frozen=True)
class MaybeTensor(Codec):
    """A returned tensor that may be None travels as a list with one item or none."""

    expected = "a Tensor or None"

    def test(self, value: str, objects: Objects) -> str:
        return f"({value} is None or $isinstance({value}, $Tensor))"

    def lower(self, value: str, objects: Objects) -> str:
        return f"([] if {value} is None else [{value}])"

    def restore(self, value: str, path: str, objects: Objects) -> str:
        return f"({value}[0] if {value} else None)"


@dataclass(frozen=True)
class Text(Codec):
    """A returned string travels as the numbers of its characters: compilers know no op that returns a string."""

    expected = "a str"

    def test(self, value: str, objects: Objects) -> str:
        return f"$isinstance({value}, $str)"

    def lower(self, value: str, objects: Objects) -> str:
        return f"[$ord($char) for $char in {value}]"

    def restore(self, value: str, path: str, objects: Objects) -> str:
        return f"''.join([$chr($char) for $char in {value}])"
