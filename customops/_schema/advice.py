"""What to write instead of a type hint, or a default value, that is not supported."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import numbers
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Optional, Tuple, TypeVar

import torch
import typing_extensions
from torch import Tensor

from customops._schema.annotations import Keys, annotated, code, literal, simplify, strip, union_members, union_of
from customops._schema.model import REQUIRED
from customops._schema.structure import (
    Codec,
    DictForm,
    Either,
    EnumCodec,
    Group,
    Leaf,
    LiteralCodec,
    Nested,
    Node,
    SequenceCodec,
    TupleForm,
)
from customops._schema.types import default_problem, hint_of, item_type, schema_type

_CHOICES = (Literal["name", "other"], "the names of those that there are")
_BYTES = (Tensor, "of torch.uint8: torch.frombuffer makes one of a bytearray")
_ANY = (Tensor, "or another type: one has to be said")
_ITEMS = (list[Tensor], "or of what its items are")
_SLICE = (tuple[int, int, int], "its start, stop and step")

#: Types with a close relative, and what is to be said of it.
_RELATIVES: dict[Any, tuple[Any, str]] = {
    Any: _ANY,
    object: _ANY,
    bytes: _BYTES,
    bytearray: _BYTES,
    memoryview: _BYTES,
    torch.SymInt: (int, "which it is in a trace, too"),
    torch.SymFloat: (float, "which it is in a trace, too"),
    torch.SymBool: (bool, "which it is in a trace, too"),
    slice: _SLICE,
    range: _SLICE,
    list: _ITEMS,
    set: _ITEMS,
    frozenset: _ITEMS,
    collections.deque: _ITEMS,
    tuple: (tuple[int, int], "or of what its items are"),
    type: _CHOICES,
    types.FunctionType: _CHOICES,
    collections.abc.Callable: _CHOICES,
}
#: The same for returns.
_RELATIVES_OF_RETURNS: dict[Any, tuple[Any, str]] = {
    **_RELATIVES,
    tuple: (tuple[Tensor, Tensor], "or of what its items are"),
    complex: (torch.types.Number, ""),
    type: (str, "its name"),
    collections.abc.Callable: (str, "its name"),
    torch.dtype: (str, "its name, str(dtype)"),
    torch.device: (str, "its name, str(device)"),
    torch.layout: (str, "its name, str(layout)"),
    torch.memory_format: (str, "its name, str(memory_format)"),
    torch.Generator: (Tensor, "its state, get_state()"),
}
#: The narrow ones first: an int is a real number, too.
_NUMBERS = ((numbers.Integral, int), (numbers.Real, float), (numbers.Complex, complex))
_ONE_OF_ITS_NAME = (enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Rewrite(NamedTuple):
    """A type that works, or parameters by the ends of their names, or another text; and words that go with it."""

    hint: Any = None
    note: str = ""
    parameters: dict[str, Any] = {}  # noqa: RUF012 (none is written to)
    text: str = ""


def advice(hint: Any, path: str, accepts: Callable[[Any], bool], *, returns: bool) -> str:
    """What to write instead of a hint that is not one that works: code, and the words that it needs."""
    try:
        found = _Advisor(accepts, returns).rewrite(hint)
    except RecursionError:  # of a class that holds itself
        found = None
    if found is None:
        return "write a schema by hand with schema= if the dispatcher has such a type"
    return ", ".join(filter(None, (_text(found, hint, path, returns), found.note)))


def _text(found: Rewrite, hint: Any, path: str, returns: bool) -> str:
    if found.text:
        return found.text
    key = re.search(r"\['(.+)'\]$", path)
    name = key[1] if key else re.sub(r"\W+", "_", path).strip("_") if path.endswith("]") else path
    if found.parameters:
        return ", ".join(f"{name}{end}: {code(each)}{' = None' * (type(None) in union_members(each))}"
                         for end, each in found.parameters.items())  # fmt: skip
    if path.endswith("]") and not key:
        return f"{code(found.hint)} in the place of {code(hint)}"
    return f"-> {code(found.hint)}" if returns and not path else f"{name}: {code(found.hint)}"


@dataclasses.dataclass(frozen=True)
class _Advisor:
    accepts: Callable[[Any], bool]
    returns: bool

    def rewrite(self, hint: Any) -> Rewrite | None:
        """A hint that works, near to one that does not."""
        found = self._near(hint)
        if found is None or found.parameters or found.text or (found.hint is None and self.returns):
            return found
        if self.accepts(found.hint):
            return found
        again = self.rewrite(found.hint)  # of a set of sets, a list of sets
        return again and again._replace(note=again.note or found.note)

    def _near(self, hint: Any) -> Rewrite | None:
        hint, _ = strip(hint)
        if self.accepts(hint):  # without the words around it
            return Rewrite(hint)
        origin, items = typing.get_origin(hint), typing.get_args(hint)
        if isinstance(hint, TypeVar):
            return Rewrite(text=f'{hint.__name__} = TypeVar("{hint.__name__}", bound=Tensor)')
        if hint in (None, type(None), Literal[None], tuple[()], Tuple[()]):
            return Rewrite(None if self.returns else str, text="" if self.returns else "leave it out")
        if isinstance(hint, (list, tuple)) or not (origin or isinstance(hint, type) or hint is Any):  # it is no type
            if isinstance(hint, list) and len(hint) == 1:
                return Rewrite(_list(hint[0]))
            if isinstance(hint, tuple) and hint:
                return Rewrite(_tuple_of(hint))
            return Rewrite(type(hint) if self.accepts(type(hint)) else Tensor)
        members = union_members(hint)
        if len(members) > 1:
            return self._union(members)
        if origin is Literal:
            kinds = set(map(type, items))
            if self.returns:
                return Rewrite(int if kinds <= {int, bool} else str)
            if kinds == {bytes}:
                return Rewrite(Literal.__getitem__(tuple(value.decode("latin-1") for value in items)))
            if len(kinds) == 1 and issubclass(type(items[0]), enum.Enum):
                return Rewrite(type(items[0]))
            return Rewrite(float if float in kinds else str)
        if origin is tuple and items:
            if len(items) == 2 and items[1] is Ellipsis:
                return self._list(items[0])
            parts = [self.rewrite(item) for item in items]
            hints = [part.hint for part in parts if part is not None and part.hint is not None]
            return Rewrite(_tuple_of(hints)) if len(hints) == len(items) else None
        return self._class(hint if origin is None else origin, hint, items)

    def _union(self, members: tuple[Any, ...]) -> Rewrite | None:
        some = [member for member in members if member is not type(None)]
        if len(some) < len(members):
            return self._optional(union_of(some))
        good = [member for member in some if self.accepts(member)]
        if len(good) <= 1:
            return Rewrite(good[0]) if good else self.rewrite(some[0])
        bare = list(map(simplify, good))
        for hint in reversed(good):  # what holds several, instead of it or one item
            items, origin = typing.get_args(hint), typing.get_origin(hint)
            if origin in (list, tuple, collections.abc.Sequence) and any(simplify(item) in bare for item in items):
                if origin is not tuple or Ellipsis in items:
                    return Rewrite(hint, "of one item, where there is one")
                if self.returns:
                    return Rewrite(_tuple_of([items[0], *(Optional[item] for item in items[1:])]))
                return Rewrite(hint, "of the same one, where there is one")
        special = [each for each in good if isinstance(each, type) and issubclass(each, _ONE_OF_ITS_NAME)]
        if len(special) == 1 and set(good) == {special[0], str}:
            return Rewrite(special[0], "alone")
        if self.returns:
            return Rewrite(Tensor) if Tensor in good else Rewrite(_tuple_of(good))
        return Rewrite(None, "of which one is given", {f"_{_word(each)}": Optional[each] for each in good})

    def _optional(self, inner: Any) -> Rewrite | None:
        if not self.returns:
            found = self.rewrite(inner)
            if found is None or found.text or found.parameters:
                return found
            return found._replace(hint=Optional[found.hint])
        if not self.accepts(inner):
            return self.rewrite(inner)
        items = typing.get_args(inner)
        if typing.get_origin(inner) is list or Ellipsis in items:
            return Rewrite(inner, "empty in the place of None")
        if typing.get_origin(inner) is tuple and set(items) == {Tensor}:
            return Rewrite(_tuple_of(Optional[item] for item in items))
        if _fields(inner) is not None:
            return Rewrite(inner, "whose tensors are Tensor | None")
        return Rewrite(tuple[bool, inner], "whether there is one, and the value")

    def _list(self, item: Any) -> Rewrite | None:
        """For items that are no items of a list."""
        item, _ = strip(item)
        inner, items = typing.get_origin(item), typing.get_args(item)
        if (near := self._list_of(item)) is not None:
            return near
        if inner in (list, collections.abc.Sequence) and (flat := self._list_of(items[0])) is not None:
            note = "all items, and how many are in each list"
            both = {"": flat.hint, "_counts": list[int]}
            return Rewrite(_tuple_of(both.values()), note) if self.returns else Rewrite(None, note, both)
        if _is_mapping(inner or item):
            return self._mapping((str, _list(items[1] if len(items) == 2 else Tensor)))
        columns = {key: self._list_of(each) for key, each in (_fields(item) or {}).items()}
        if columns and None not in columns.values():
            named = {f"_{key}": column.hint for key, column in columns.items() if column is not None}
            note = "a list for each field"
            return Rewrite(_tuple_of(named.values()), note) if self.returns else Rewrite(None, note, named)
        if self.accepts(item):
            return Rewrite(tuple[item, item], "of as many as there are")
        found = self.rewrite(item)
        if found is None or found.hint is None:
            return found
        return Rewrite(_list(found.hint), found.note)

    def _list_of(self, item: Any) -> Rewrite | None:
        """The list of such items, or the nearest to one."""
        if self.accepts(_list(item)):
            return Rewrite(_list(item))
        if self.returns and item in (float, str, bool):
            return {float: Rewrite(Tensor, "of torch.float64"), str: Rewrite(str, 'joined, for example by "\\n"'),
                    bool: Rewrite(list[int])}[item]  # fmt: skip
        everything = union_members(item)
        members = [member for member in everything if member is not type(None)]
        if len(members) == 1 < len(everything):
            if self.returns and self.accepts(tuple[item, item]):
                return Rewrite(tuple[item, item], "of as many as there are")
            known = self.accepts(_list(members[0]))
            return Rewrite(_list(members[0]), "with a value that stands for None") if known else None
        good = [member for member in members if len(members) > 1 and self.accepts(_list(member))]
        return Rewrite(_list(str if str in good else good[0])) if good else None

    def _mapping(self, items: tuple[Any, ...]) -> Rewrite | None:
        value = items[1] if len(items) == 2 else Tensor
        found = Rewrite(value) if self.accepts(value) else self.rewrite(value)
        if found is None or found.hint is None:
            return found
        hint = annotated(types.GenericAlias(dict, (str, found.hint)), [Keys("a", "b")])
        note = "with the keys that it has"
        return Rewrite(hint, note if items else f"{note}; or a @dataclass(frozen=True) with a field for each key")

    def _class(self, cls: Any, hint: Any, items: tuple[Any, ...]) -> Rewrite | None:
        known = (_RELATIVES_OF_RETURNS if self.returns else _RELATIVES).get(cls)
        if known is not None and (not items or known == _CHOICES):
            return Rewrite(*known)
        if not isinstance(cls, type):
            return None
        if _is_mapping(cls) and not typing_extensions.is_typeddict(cls):
            return self._mapping(items)
        fields = _fields(cls)
        if fields is not None:
            given = dict(zip(getattr(cls, "__parameters__", ()), items, strict=False))
            if given:
                typed = ", ".join(f"{key}: {code(given.get(each, each))}" for key, each in fields.items())
                name = cls.__name__ + "".join(f"Of{_word(item).capitalize()}" for item in items)
                return Rewrite(text=f"@dataclass(frozen=True) class {name}: {typed}")
            for key, each in fields.items():  # the first that does not work
                if not self.accepts(each) and (found := self.rewrite(each)) is not None:
                    return Rewrite(text=f"in {cls.__name__}, {_text(found, each, key, False)}", note=found.note)
            return None
        if issubclass(cls, collections.abc.Iterable) and len(items) > 0:
            return self._list(items[0])
        if issubclass(cls, enum.Enum):
            is_number = issubclass(cls, (int, enum.Flag))
            return Rewrite(int, "its value") if is_number else Rewrite(str, "its name")
        if issubclass(cls, torch.nn.Module):
            return Rewrite(list[Tensor], "its parameters")
        if issubclass(cls, pathlib.PurePath):
            return Rewrite(str)
        if cls.__module__.split(".")[0] == "numpy":
            if cls.__name__ == "dtype" or cls.__name__.startswith("bool"):
                return Rewrite(torch.dtype if cls.__name__ == "dtype" else bool)
            number = next((ours for abstract, ours in _NUMBERS if issubclass(cls, abstract)), None)
            return Rewrite(number) if number is not None else Rewrite(Tensor, "which torch.from_numpy makes")
        if (base := next((each for each in cls.__mro__[1:-1] if self.accepts(each)), None)) is not None:
            return Rewrite(base)
        if cls.__module__.split(".")[0] in ("torch", "builtins"):
            return None
        return Rewrite(text=f"@dataclass(frozen=True) above {cls.__name__}, with fields of types that work")


def _list(item: Any) -> Any:
    return types.GenericAlias(list, item)


def _tuple_of(items: Iterable[Any]) -> Any:
    return types.GenericAlias(tuple, tuple(items))


def _is_mapping(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, collections.abc.Mapping)


def _fields(hint: Any) -> dict[str, Any] | None:
    """The types of the fields of a class, or of a tuple."""
    if typing.get_origin(hint) is tuple and Ellipsis not in typing.get_args(hint):
        return {str(i): item for i, item in enumerate(typing.get_args(hint))}
    if not isinstance(hint, type):
        return None
    is_one = dataclasses.is_dataclass(hint) or hasattr(hint, "_fields") or typing_extensions.is_typeddict(hint)
    return typing_extensions.get_type_hints(hint) if is_one else None


def _word(hint: Any) -> str:
    """A word for a type, to be part of a name."""
    origin = typing.get_origin(hint)
    return "choice" if origin is Literal else str(getattr(origin or hint, "__name__", "other")).lower()


# The types of nodes, as one writes them in a signature: for messages --------------------------------------------------


def type_of(node: Node) -> str:
    """The type of a node, without the None that it may be."""
    if isinstance(node, Either):
        return f"{type_of(node.number)} | Tensor"
    if isinstance(node, Nested):
        return "list[list[Tensor]]"
    if isinstance(node, Group):
        if isinstance(node.form, DictForm):
            return node.form.written
        if not isinstance(node.form, TupleForm) or node.form.is_named:
            return node.form.name
        items = [type_of(each) + " | None" * may_be_none(each) for each in node.fields.values()]
        return f"tuple[{', '.join(items)}]"
    codec, type_ = node.codec, node.type.removesuffix("?")
    if isinstance(codec, LiteralCodec):
        return code(Literal.__getitem__(codec.values))
    if isinstance(codec, EnumCodec):
        return codec.cls.__name__
    if not isinstance(codec, SequenceCodec):
        return code(hint_of(type_))
    if codec.container.__module__ != "builtins":
        return code(codec.container)
    item = type_of(Leaf(node.name, node.path, item_type(type_) or type_, codec.item))
    items = [item] * (codec.length or 1) + ["..."] * (codec.container is tuple and not codec.length)
    return f"{codec.container.__name__}[{', '.join(items)}]"


def may_be_none(node: Node) -> bool:
    if isinstance(node, Group):
        return node.given is not None
    return node.leaves[0].is_optional if isinstance(node, (Leaf, Nested)) else node.may_be_none


def part_with(node: Node, name: str) -> Node | None:
    """The smallest part of a node that a value can be given for, and that the argument `name` of the schema is of."""
    if all(leaf.name != name for leaf in node.leaves):
        return None
    fields = node.fields.values() if isinstance(node, Group) else ()
    return next((found for each in fields if (found := part_with(each, name)) is not None), node)


# Default values that do not fit the node of their parameter, and what to write instead --------------------------------


class _Evaluation:
    """The source of codecs, evaluated for single values."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.objects: dict[str, Any] = {"Tensor": Tensor}

    def ref(self, name: str, value: Any) -> str:
        name = f"{name}_{len(self.objects)}"
        self.objects[name] = value
        return f"${name}"

    def __call__(self, code: str, value: Any) -> Any:
        return eval(code.replace("$", ""), self.objects | {"value_": value})


def lowered(codec: Codec, value: Any, op: str) -> Any:
    """A value that its codec allows, as the dispatcher gets it."""
    evaluate = _Evaluation(op)
    return evaluate(codec.lower("value_", evaluate), value)


def misfit(node: Node, value: Any, op: str) -> tuple[str, Any, str, str] | None:
    """The first part of a default that is not what its (not plain) type allows: its path, value, expectation, fix."""
    evaluate = _Evaluation(op)
    if value is None:
        return None if may_be_none(node) else (node.path, None, "no None", _or_none(node))
    if isinstance(node, Leaf):
        codec, test = node.codec, node.codec.test("value_", evaluate)
        if not test or evaluate(test, value):
            return None
        fix = f"{type_of(node)} = {_value_of(codec, value)}"
        if isinstance(value, (list, tuple)) and getattr(codec, "length", None) not in (None, len(value)):
            fix = _as_it_is(value)
        return (node.path, value, codec.expected, f"{node.path}: {fix}")
    if isinstance(node, Nested):
        is_one = isinstance(value, list) and all(isinstance(items, list) for items in value)
        return None if is_one else (node.path, value, "a list of lists of tensors", _or_none(node))
    if isinstance(node, Either):
        return None
    form = node.form
    if evaluate(form.test("value_", evaluate), value):
        parts = ((each, form.get(value, key)) for key, each in node.fields.items())
        return next((found for each, part in parts if (found := misfit(each, part, op))), None)
    if isinstance(form, DictForm):
        items = ", ".join(f"{literal(key)}: ..." for key in form.keys if key not in form.absent)
        fix = f"{form.written} = {{{items}}}"
    elif isinstance(form, TupleForm) and not form.is_named:
        fix = _as_it_is(value)
    else:
        required = ", ".join(f"{key}=..." for key, each in node.fields.items() if each.default is REQUIRED)
        fix = f"{form.name} = {form.name}({required})"
    return (node.path, value, form.name, f"{node.path}: {fix}")


def _or_none(node: Node) -> str:
    return f"{node.path}: {type_of(node)} | None = None"


def _as_it_is(value: Any) -> str:
    """The type of a default, and the default."""
    is_sequence = isinstance(value, (list, tuple))
    return (
        f"{code(types.GenericAlias(tuple, tuple(map(type, value))) if is_sequence else type(value))} = {literal(value)}"
    )


def _value_of(codec: Codec, value: Any) -> str:
    """A default that the codec allows, near to one that it does not."""
    if isinstance(codec, LiteralCodec):
        return literal(codec.values[0])
    if isinstance(codec, EnumCodec):
        same = (each for each in codec.cls if value in (each.name, each.value))
        return literal(next(same, next(iter(codec.cls))))
    if isinstance(codec, SequenceCodec):
        items = list(value) if isinstance(value, (list, tuple)) else [value] * (codec.length or 1)
        made = ", ".join(_value_of(codec.item, item) for item in items)
        return f"[{made}]" if codec.container is list else f"({made}{',' * (len(items) == 1)})"
    return literal(value)


# Plain types ----------------------------------------------------------------------------------------------------


def plain_fix(type_: str, path: str, value: Any) -> str:
    """What to write instead of a default that a type of the dispatcher does not have."""
    if hasattr(value, "item") and not isinstance(value, Tensor):  # of numpy
        value = value.item()
    base = type_.removesuffix("?")
    if isinstance(value, enum.Enum):
        return f"{path}: {code(type(value))} = {literal(value)}"
    if value is not None and default_problem(type_, value) is None:
        return f"{path}: {code(hint_of(type_))} = {literal(value)}"
    if (item := item_type(base)) and not isinstance(value, list) and default_problem(item, value) is None:
        return f"{path}: {code(hint_of(type_))} = [{literal(value)}]"
    own = schema_type(type(value))
    if own not in (None, base) and default_problem(str(own), value) is None:
        return f"{path}: {code(type(value))} = {literal(value)}"
    return f"{path}: {code(hint_of(base))} | None = None, and the value in the kernel"
