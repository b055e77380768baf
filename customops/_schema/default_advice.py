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
    DataclassForm,
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
    if isinstance(node, Leaf):
        return _of_leaf(node)
    if isinstance(node, Either):
        return f"{_of_leaf(node.number)} | Tensor"
    if isinstance(node, Nested):
        return "list[list[Tensor]]"
    return _of_group(node)


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


def _of_leaf(leaf: Leaf) -> str:
    codec, type_ = leaf.codec, leaf.type.removesuffix("?")
    if isinstance(codec, LiteralCodec):
        return code(Literal.__getitem__(codec.values))
    if isinstance(codec, EnumCodec):
        return codec.cls.__name__
    if isinstance(codec, SequenceCodec) and codec.container.__module__ == "builtins":
        item = _of_leaf(Leaf(leaf.name, leaf.path, item_type(type_) or type_, codec.item))
        items = ", ".join([item] * codec.length) if codec.length else item
        return f"{codec.container.__name__}[{items}{', ...' * (codec.container is tuple and not codec.length)}]"
    if isinstance(codec, SequenceCodec):
        return code(codec.container)
    return code(hint_of(type_))


def _of_group(group: Group) -> str:
    form = group.form
    if isinstance(form, DictForm):
        return form.written
    if isinstance(form, TupleForm) and not form.is_named:
        return f"tuple[{', '.join(type_of(each) + ' | None' * may_be_none(each) for each in group.fields.values())}]"
    return form.name


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
        test = node.codec.test("value_", evaluate)
        if not test or evaluate(test, value):
            return None
        return Misfit(node.path, value, node.codec.expected, f"{node.path}: {_of_codec(node, value)}")
    if isinstance(node, Nested):
        is_one = isinstance(value, list) and all(isinstance(items, list) for items in value)
        return None if is_one else Misfit(node.path, value, "a list of lists of tensors", _or_none(node))
    if not isinstance(node, Group):
        return None
    if not evaluate(node.form.test("value_", evaluate), value):
        return Misfit(node.path, value, node.form.name, f"{node.path}: {_of_form(node, value)}")
    parts = ((each, node.form.get(value, key)) for key, each in node.fields.items())
    return next((found for each, part in parts if (found := misfit(each, part, op))), None)


def _or_none(node: Node) -> str:
    return f"{node.path}: {type_of(node)} | None = None"


def _of_codec(leaf: Leaf, value: Any) -> str:
    """A type and a default for a leaf that a codec lowers."""
    codec = leaf.codec
    if isinstance(codec, SequenceCodec) and isinstance(value, (list, tuple)) and codec.length not in (None, len(value)):
        return f"{code(GenericAlias(tuple, tuple(map(type, value))))} = {literal(value)}"
    return f"{type_of(leaf)} = {_value_of(codec, value)}"


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


def _of_form(group: Group, value: Any) -> str:
    form = group.form
    if isinstance(form, DataclassForm) or (isinstance(form, TupleForm) and form.is_named):
        required = ", ".join(f"{key}=..." for key, node in group.fields.items() if node.default is REQUIRED)
        return f"{form.cls.__name__} = {form.cls.__name__}({required})"
    if isinstance(form, DictForm):
        items = ", ".join(f"{literal(key)}: ..." for key in form.keys if key not in form.absent)
        return f"{form.written} = {{{items}}}"
    if isinstance(value, (list, tuple)):
        return f"{code(GenericAlias(tuple, tuple(map(type, value))))} = {literal(value)}"
    return f"{code(type(value))} = {literal(value)}"


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
