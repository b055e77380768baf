"""A call in the code of inductor: it runs the kernel without the dispatcher, where that cannot be told apart.

What the tensors are was known when the graph was compiled, and guards see to it that it stays so: dense, of one device,
and not conjugate. What is left to find out is what is active in the thread when the graph runs, and whether a tensor is
a negative view, or zeros without memory: there are no guards on the gradients that a compiled backward is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from customops import _torch
from customops._codegen.autograd import any_requires_grad
from customops._codegen.bypass import NOTHING_ACTIVE
from customops._codegen.function import Source
from customops._codegen.kernel import Emitter, Shape, emit_kernel_call
from customops._dispatch.operator import OperatorHandle

GRAPH_CALL = """\
def graph_call({parameters}):
    $current = $operator.fast_path.in_graphs.get($device)
    if $current is None:
        $current = $operator.find_fast_path_in_graphs($device)
    if (
        $current is not None
        and not $mode_count()
        and $transform() is None
        {nothing_active}
        and not $is_excluded($conjugate)
        {counts_versions}
        {are_plain}
        {nothing_to_differentiate}
    ):
        {defaults}
        {kernel_call}
    return $dispatched({arguments})
"""


def _is_lazy(tensor: torch.Tensor | None) -> bool:
    """Is a tensor, if there is one, a negative view, or zeros without memory?"""
    return tensor is not None and (tensor.is_neg() or tensor._is_zerotensor())


def graph_call(operator: OperatorHandle, device: str, dispatched: Callable[..., Any]) -> Callable[..., Any]:
    """The function for calls of an op on tensors of a device, given by its dispatch key.

    Args:
        operator: the handle of the op; `in_graphs` of its fast path has the kernel.
        dispatched: does the same by the dispatcher, at any time.
    """
    source = _source(Shape.of(operator.schema, operator.tags, operator.options.check))
    function = source.build(operator.qualname, operator=operator, device=device, dispatched=dispatched)
    return _torch.dynamo.outside_dynamo(function)


@functools.lru_cache(maxsize=512)
def _source(shape: Shape) -> Source:
    schema = shape.schema
    source = Emitter("graph_call", shape)
    source.objects |= {"any_requires_grad": any_requires_grad(schema), "is_lazy": _is_lazy}
    are_plain = []  # the conditions under which there are no subclasses of tensors
    for argument in schema.tensors:
        name = argument.variable
        if argument.is_list:
            test = f"$types_in_lists.issuperset($map($type, {name})) and not $any($map($is_lazy, {name}))"
            are_plain.append(f"and ({name} is None or {test})" if argument.is_optional else f"and {test}")
        else:
            test = f"$type({name}) in $tensor_types and not ({name}.is_neg() or {name}._is_zerotensor())"
            may_be_none = argument.name in schema.call.may_be_none
            are_plain.append(f"and ({test} or {name} is None)" if may_be_none else f"and {test}")
    records = f"$is_grad_enabled() and $any_requires_grad({', '.join(schema.call.tensors)})"
    source.fill(
        GRAPH_CALL,
        nothing_active=NOTHING_ACTIVE,
        counts_versions="and not $is_excluded($ad_inplace_or_view)" if schema.mutated else "",
        are_plain=are_plain,
        nothing_to_differentiate=f"and not ({records})",
        kernel_call=emit_kernel_call(source, bump=bool(schema.mutated), direct=True, last=True),
    )
    return source
