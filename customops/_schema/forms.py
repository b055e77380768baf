"""Forms: how the fields of a group of values are held, in a dataclass, a tuple or a dict."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast


class Form:
    """How the fields of a group are held: what a class of them is called, and how it is made and read."""

    @property
    def name(self) -> str:
        """What the value is to be, for messages."""
        raise NotImplementedError

    def path(self, key: str) -> str:
        """What stands behind the path of the group, in that of a field."""
        return f".{key}"

    def test(self, value: str, cls: str) -> str:
        """A condition that holds for the values that are allowed; `cls` names the class, if there is one."""
        raise NotImplementedError

    def holds(self, value: Any) -> bool:
        """Has a value, or an object of gradients or dimensions, these fields?"""
        raise NotImplementedError

    def build(self, cls: str, fields: Mapping[str, str]) -> str:
        """An expression for a value, of expressions for its fields."""
        raise NotImplementedError

    def assemble(self, fields: Mapping[str, Any]) -> Any:
        """An object with these fields that may be no values of the class: gradients, or numbers of dimensions."""
        raise NotImplementedError

    def item(self, value: str, key: str) -> str:
        """An expression for a field."""
        return f"{value}.{key}"

    def get(self, value: Any, key: str) -> Any:
        return getattr(value, key)


@dataclass(frozen=True)
class DataclassForm(Form):
    cls: type

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def keys(self) -> tuple[str, ...]:
        """All its fields, also those that ``__init__`` does not take."""
        return tuple(each.name for each in dataclasses.fields(cast(Any, self.cls)))

    def test(self, value: str, cls: str) -> str:
        return f"$type({value}) is {cls}"

    def holds(self, value: Any) -> bool:
        return isinstance(value, self.cls)

    def maker(self) -> Callable[..., Any]:
        """``make(**fields)``: an object with these values in its fields.

        The constructor is not called: what it does was done when the object was made that is put together again here.
        """
        return functools.partial(_with_fields, self.cls)

    def build(self, cls: str, fields: Mapping[str, str]) -> str:
        return f"{cls}({', '.join(f'{key}={code}' for key, code in fields.items())})"

    def assemble(self, fields: Mapping[str, Any]) -> Any:
        return self.maker()(**fields)


def _with_fields(cls: Any, /, **fields: Any) -> Any:
    made = object.__new__(cls)  # not by way of its __dict__, which Dynamo of torch 2.11 cannot trace
    for key, value in fields.items():
        object.__setattr__(made, key, value)
    return made


@dataclass(frozen=True)
class TupleForm(Form):
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

    def test(self, value: str, cls: str) -> str:
        if self.is_named:  # also a plain tuple, but none whose fields have other names
            test = f"($type({value}) is $tuple or $isinstance({value}, {cls}))"
        else:
            test = f"$isinstance({value}, ($tuple, $list))"
        return f"{test} and $len({value}) == {len(self.keys)}"

    def holds(self, value: Any) -> bool:
        return isinstance(value, (tuple, list)) and len(value) == len(self.keys)

    def item(self, value: str, key: str) -> str:
        return f"{value}[{self.keys.index(key)}]"

    def get(self, value: Any, key: str) -> Any:
        return value[self.keys.index(key)]

    def build(self, cls: str, fields: Mapping[str, str]) -> str:
        items = "".join(f"{code}, " for code in fields.values())
        return f"$tuple.__new__({cls}, ({items}))" if self.is_named else f"({items})"

    def assemble(self, fields: Mapping[str, Any]) -> Any:
        return tuple.__new__(self.cls, fields.values())


def _set(keys: Sequence[str]) -> str:
    """A set as Python source, the same in each process: the `repr` of a set is not."""
    return f"{{{', '.join(map(repr, keys))}}}" if keys else "$set()"


@dataclass(frozen=True)
class DictForm(Form):
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

    def test(self, value: str, cls: str) -> str:
        required = [key for key in self.keys if key not in self.absent]
        test = f"$isinstance({value}, $dict) and {value}.keys() "
        if not self.absent:
            return f"{test}== {_set(self.keys)}"
        # None in the place of a value that is not there would be taken for one that is not there.
        none = "".join(f" and {value}.get({key!r}, 0) is not None" for key in self.keys if key in self.absent)
        given = "".join(f" and {key!r} in {value}" for key in required)
        return f"{test}<= {_set(self.keys)}{given}{none}"

    def holds(self, value: Any) -> bool:
        return isinstance(value, dict) and value.keys() <= set(self.keys)

    def item(self, value: str, key: str) -> str:
        return f"{value}.get({key!r})" if key in self.absent else f"{value}[{key!r}]"

    def get(self, value: Any, key: str) -> Any:
        return value.get(key)

    def build(self, cls: str, fields: Mapping[str, str]) -> str:
        present = [f"{key!r}: {code}" for key, code in fields.items() if key not in self.absent]
        maybe = [f"**({{}} if ($value := {fields[key]}) is None else {{{key!r}: $value}})" for key in self.keys
                 if key in self.absent]  # fmt: skip
        return f"{{{', '.join([*present, *maybe])}}}"

    def assemble(self, fields: Mapping[str, Any]) -> Any:
        return dict(fields)
