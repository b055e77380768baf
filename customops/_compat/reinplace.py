"""Writes in place: where inductor decides for one, what the op reads beside must have memory of its own.

In a functional graph a copy of an old value is the old value, so inductor drops the copy. Then it looks whether what an
op writes is used later, and lets the op write in place if not; it does not look whether the op itself reads it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from customops._compat.late import when_imported
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


# Memory ---------------------------------------------------------------------------------------------------------


class _Extent(NamedTuple):
    """Where the elements of a tensor lie: the first one, and size and stride of each dimension, wide ones first."""

    first: int
    dims: tuple[tuple[int, int], ...]

    @property
    def last(self) -> int:
        return self.first + sum((size - 1) * stride for size, stride in self.dims)


def _may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """May two tensors of a graph have an element in common?"""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    extents = [_extent(one), _extent(other)]
    if None in extents or one.dtype != other.dtype:
        return True
    return not _are_disjoint(*extents)


def _extent(tensor: torch.Tensor) -> Any:
    numbers = (tensor.storage_offset(), *tensor.shape, *tensor.stride())
    if not all(type(number) is int for number in numbers) or 0 in tensor.shape:
        return None  # symbols
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return _Extent(numbers[0], tuple(sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: -dim[1])))


def _are_disjoint(one: Any, other: Any) -> bool:
    """Are these certainly apart? Else within rows of one width, as the parts of a fused projection are."""
    if one.last < other.first or other.last < one.first:
        return True
    if not one.dims or not other.dims or one.dims[0][1] != other.dims[0][1] or one.dims[0][1] == 0:
        return False
    width = one.dims[0][1]
    inner = [_Extent(each.first % width, each.dims[1:]) for each in (one, other)]
    return all(each.last < width for each in inner) and _are_disjoint(*inner)
