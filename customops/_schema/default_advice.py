"""Default values that do not fit the node of their parameter, and what to write instead."""

from __future__ import annotations

import enum
from types import GenericAlias
from typing import Any, Literal, NamedTuple

from torch import Tensor

from customops._schema.annotations import code, literal
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
from customops._schema.types import default_problem, hint_of, item_type, param_type

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


class Misfit(NamedTuple):
    """A default, or a part of one, that is not what its type allows."""

    path: str
    value: Any
    expected: str
    fix: str


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


def misfit(node: Node, value: Any, op: str) -> Misfit | None:
    """The first part of a default that is not what its type allows. Plain types are for `default_problem` to judge."""
    evaluate = _Evaluation(op)
    if value is None:
        return None if may_be_none(node) else Misfit(node.path, None, "no None", _or_none(node))
    if isinstance(node, Leaf):
        codec, test = node.codec, node.codec.test("value_", evaluate)
        if not test or evaluate(test, value):
            return None
        fix = f"{type_of(node)} = {_value_of(codec, value)}"
        if isinstance(value, (list, tuple)) and getattr(codec, "length", None) not in (None, len(value)):
            fix = _as_it_is(value)
        return Misfit(node.path, value, codec.expected, f"{node.path}: {fix}")
    if isinstance(node, Nested):
        is_one = isinstance(value, list) and all(isinstance(items, list) for items in value)
        return None if is_one else Misfit(node.path, value, "a list of lists of tensors", _or_none(node))
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
    return Misfit(node.path, value, form.name, f"{node.path}: {fix}")


def _or_none(node: Node) -> str:
    return f"{node.path}: {type_of(node)} | None = None"


def _as_it_is(value: Any) -> str:
    """The type of a default, and the default."""
    is_sequence = isinstance(value, (list, tuple))
    return f"{code(GenericAlias(tuple, tuple(map(type, value))) if is_sequence else type(value))} = {literal(value)}"


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
    own = param_type(type(value))
    if own not in (None, base) and default_problem(str(own), value) is None:
        return f"{path}: {code(type(value))} = {literal(value)}"
    return f"{path}: {code(hint_of(base))} | None = None, and the value in the kernel"
