"""Fixes for type hints and default values that are not supported: what to write instead."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import pathlib
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Optional

import torch
import typing_extensions
from torch import Tensor

from customops._schema.annotations import Keys, annotated, code, literal, strip, union_members, union_of
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

_NAME = (str, "its name")
#: Unsupported classes, and the type and the note of the fix. A row holds for subclasses, too. The classes of NumPy have
#: their names, because NumPy is not imported here.
_INSTEAD: dict[Any, tuple[Any, str]] = {
    **dict.fromkeys((Any, object), (Tensor, "or another supported type")),
    **dict.fromkeys((bytes, bytearray), (Tensor, "of torch.uint8: torch.frombuffer makes one of a bytearray")),
    **dict.fromkeys((type, collections.abc.Callable), (Literal["name", "other"], "the names of the supported ones")),
    slice: (tuple[int, int, int], "its start, stop and step"),
    torch.SymInt: (int, "which also holds symbolic sizes"),
    pathlib.PurePath: (str, ""),
    enum.Enum: _NAME,
    "numpy.ndarray": (Tensor, "which torch.from_numpy makes"),
    "numpy.integer": (int, ""),
    "numpy.floating": (float, ""),
}
#: Further rows for returns.
_INSTEAD_IN_RETURNS: dict[Any, tuple[Any, str]] = {
    **dict.fromkeys((type, collections.abc.Callable, torch.dtype, torch.device), _NAME),
    complex: (torch.types.Number, ""),
}
_SUPPORTED = (
    "use Tensor, int, float, bool, complex, str, torch.dtype, torch.device or an Enum; a list, tuple, Optional or "
    "Literal of these; a frozen dataclass, NamedTuple or TypedDict of these; or schema=, by hand",
    "use Tensor, Tensor | None, int, float, bool, str or torch.types.Number; list[Tensor] or list[int]; a tuple, "
    "dataclass, NamedTuple or TypedDict of these; or schema=, by hand",
)
#: A type and a note; the text of a fix; or None.
_Fix = tuple[Any, str] | str | None


def advice(hint: Any, path: str, accepts: Callable[[Any], bool], *, returns: bool) -> str:
    """Return the fix for a hint that is not supported. `accepts` returns True for a hint that is."""
    advisor = _Advisor(path, accepts, returns)
    try:
        return advisor.text(advisor.near(hint)) or _SUPPORTED[returns]
    except RecursionError:  # a class that holds itself
        return _SUPPORTED[returns]


@dataclasses.dataclass(frozen=True)
class _Advisor:
    """The rules for unions, tuples, classes, dicts and lists."""

    name: str  #: the parameter, or a part of it; empty for the whole return
    accepts: Callable[[Any], bool]
    returns: bool

    def text(self, fix: _Fix) -> str:
        if not isinstance(fix, tuple):
            return fix or ""
        type_ = f"{self.name}: {code(fix[0])}" if self.name else f"-> {code(fix[0])}"
        return f"{type_}, {fix[1]}" if fix[1] else type_

    def near(self, hint: Any) -> _Fix:
        """Return the supported type that is nearest to a hint."""
        hint, _ = strip(hint)
        members, origin, items = union_members(hint), typing.get_origin(hint) or hint, typing.get_args(hint)
        if self.accepts(hint):
            return hint, ""
        if len(members) > 1:
            found = self._union(members)
        elif origin is Literal and items:
            found = type(items[0]), ""
        elif origin is tuple and items and items[-1] is not Ellipsis:
            parts = tuple(self._item(item) for item in items)
            found = None if None in parts else (types.GenericAlias(tuple, parts), "")
        else:
            found = self._class(origin, items) if isinstance(origin, type) else None
        return self.near(found[0]) if isinstance(found, tuple) and not self.accepts(found[0]) else found

    def _item(self, hint: Any) -> Any:
        found = self.near(hint)
        return found[0] if isinstance(found, tuple) else None

    def _union(self, members: tuple[Any, ...]) -> _Fix:
        some = [member for member in members if member is not type(None)]
        good = [member for member in some if self.accepts(member)]
        if len(some) < len(members):
            found = self.near(union_of(some))
            if not isinstance(found, tuple):
                return found
            if not self.returns:
                return Optional[found[0]], found[1]
            return (found[0], "empty in the place of None") if getattr(found[0], "__origin__", None) is list else None
        if len(good) < 2:
            return (good[0], "") if good else self.near(some[0])
        for each in good:
            if {*typing.get_args(each)} & {*good} and not (self.returns and typing.get_origin(each) is tuple):
                return each, "also for a single item"
        if self.returns:
            return (Tensor, "") if {*good} <= {Tensor, int, float, bool, complex} else None
        names = ("choice" if typing.get_origin(each) is Literal else str(each.__name__).lower() for each in good)
        parts = (f"{self.name}_{name}: {code(each)} | None = None" for name, each in zip(names, good, strict=True))
        return ", ".join(parts) + ", of which one is given"

    def _class(self, cls: type, items: tuple[Any, ...]) -> _Fix:
        known = _INSTEAD | (_INSTEAD_IN_RETURNS if self.returns else {})
        for base in cls.__mro__[:-1] or cls.__mro__:
            if found := known.get(base) or known.get(f"{base.__module__}.{base.__name__}"):
                return found
            if self.accepts(base):
                return base, ""
        if dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or typing_extensions.is_typeddict(cls):
            return None  # its fields have fixes of their own
        if issubclass(cls, collections.abc.Mapping):
            item = self._item(items[1] if len(items) == 2 else Tensor)
            hint = annotated(types.GenericAlias(dict, (str, item)), [Keys("a", "b")])
            return None if item is None else (hint, "with the keys that it has")
        if cls is tuple and not items:
            return (tuple[Tensor, Tensor] if self.returns else tuple[int, int]), "or of the types of its items"
        if issubclass(cls, collections.abc.Iterable):
            return self._list(items[0]) if items else (list[Tensor], "or of the type of its items")
        is_of_users = cls.__module__.partition(".")[0] not in ("torch", "builtins", "numpy")
        return f"@dataclass(frozen=True) above {cls.__name__}, with fields of supported types" if is_of_users else None

    def _list(self, item: Any) -> _Fix:
        if self.accepts(whole := types.GenericAlias(list, item)):
            return whole, ""
        if self.returns and item is float:
            return Tensor, "of torch.float64"
        new = self._item(item)
        if typing.get_origin(new) in (list, collections.abc.Sequence) and not self.returns:
            note = "all items, and how many are in each list"
            return f"{self.name}: {code(new)}, {self.name}_counts: list[int], {note}"
        return None if new is None or new == item else (types.GenericAlias(list, new), "")


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
