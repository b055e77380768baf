"""Writes in place: where inductor decides for one, what the op reads beside must have memory of its own.

In a functional graph a copy of an old value is the old value, so inductor drops the copy. Then it looks whether what an
op writes is used later, and lets the op write in place if not; it does not look whether the op itself reads it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from customops._compat.late import when_imported
from customops._compat.memory import overlap, storage_id
from customops._compat.registries import torch_op_of


def _change_pass(reinplace: Any) -> None:
    original = reinplace.reinplace_inplaceable_ops_core

    def core(graph: torch.fx.Graph) -> None:
        _separate(graph)
        original(graph)

    reinplace.reinplace_inplaceable_ops_core = core


when_imported("torch._inductor.fx_passes.reinplace", _change_pass)


def _separate(graph: torch.fx.Graph) -> None:
    """Copy what an op of ours reads, where that may be memory that it writes."""
    functional = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in functional and _is_ours(node.args[0]):
            written, tensors = [*_written(node)], set(_arguments(node, written=True))
            for read in dict.fromkeys(_arguments(node, written=False)):
                if read not in tensors and any(_may_overlap(read.meta["val"], each) for each in written):
                    _copy(graph, node, read)


def _is_ours(overload: Any) -> bool:
    if not isinstance(overload, torch._ops.OpOverload):
        return False
    return hasattr(torch_op_of(overload._name.replace("__writes", "")), "_definition")


def _arguments(node: torch.fx.Node, *, written: bool) -> Iterator[torch.fx.Node]:
    """The tensors among the arguments of a call, by what the schema says of them."""
    overload: Any = node.args[0]
    for argument in overload._schema.arguments:
        if (argument.alias_info is not None and argument.alias_info.is_write) is written:
            values = node.kwargs.get(argument.name)
            for each in values if isinstance(values, (list, tuple)) else (values,):
                if isinstance(each, torch.fx.Node) and isinstance(each.meta.get("val"), torch.Tensor):
                    yield each


def _written(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """What a call writes: tensors, or views that are described by their base."""
    if node.target is torch.ops.higher_order.auto_functionalized:
        yield from (each.meta["val"] for each in _arguments(node, written=True))
        return
    functionalize = torch._higher_order_ops.auto_functionalize
    overload: Any = node.args[0]
    names, types = functionalize.get_mutable_args(overload)
    values: Any = torch.fx.map_arg(dict(node.kwargs), lambda each: each.meta["val"])
    kwargs = dict(values)
    bases = list(kwargs.pop("_all_bases"))
    views = functionalize.read_view_information_from_args(names, types, kwargs, bases)
    for view in views.values():
        for each in view if isinstance(view, list) else (view,):
            if each is not None:
                yield each.regenerate_view(bases)


def _copy(graph: torch.fx.Graph, node: torch.fx.Node, read: torch.fx.Node) -> None:
    value = read.meta["val"]
    with graph.inserting_before(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (read,))
    with value.fake_mode:
        copy.meta["val"] = value.clone()
    node.kwargs = {
        name: given if name == "_all_bases" else _replaced(given, read, copy) for name, given in node.kwargs.items()
    }


def _replaced(given: Any, old: torch.fx.Node, new: torch.fx.Node) -> Any:
    if isinstance(given, (list, tuple)):
        return type(given)(_replaced(each, old, new) for each in given)
    return new if given is old else given


def _may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """May two tensors of a graph have an element in common?"""
    if storage_id(one) != storage_id(other):
        return False
    numbers = [n for x in (one, other) for n in (x.storage_offset(), *x.shape, *x.stride())]
    if not all(type(number) is int for number in numbers):
        return True  # symbols
    first, first_of_other = (int(x.storage_offset()) * x.element_size() for x in (one, other))
    return overlap(one, other, first, first_of_other)
