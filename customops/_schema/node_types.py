"""The types of nodes, as one writes them in a signature: for messages."""

from __future__ import annotations

from typing import Literal

from customops._schema.codecs import EnumCodec, LiteralCodec, SequenceCodec
from customops._schema.forms import DictForm, TupleForm
from customops._schema.nodes import Either, Group, Leaf, Nested, Node
from customops._schema.spelling import code
from customops._schema.types import hint_of, item_type


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
