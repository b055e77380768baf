"""The function at the Autograd key: a fast path to the kernel, or the autograd node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tag

from customops import _torch
from customops._codegen.function import (
    Shape,
    Source,
    any_of,
    as_tuple,
    compile_on_first_call,
    fill,
    may_be_none,
    variable_name,
)
from customops._codegen.kernel import emit_defaults, emit_kernel_call, emit_parameters, emit_passing
from customops._dispatch.callbacks import Fn
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.results import CheckPolicy, tensors_in
from customops._schema.model import Argument, Schema

AUTOGRAD = """\
def autograd($keyset, /, {arguments}):
    $current = $fast_path.get($keyset.raw_repr())
    if $current is not None and $forward_ad._current_level < 0:
        $records = $is_grad_enabled()
        if not {requires_grad}:
            {defaults}
            {kernel_call}
        {node_call}
    {leave_out}
    return $general($keyset, $current, {args}, {kwargs})
"""

NODE_CALL = """\
$apply = $node.apply
if $apply is not None:
    {leave_out}
    try:
        return $apply($current.direct, {arguments})
    except $errors as $error:
        $node.explain($error)
        raise
"""

#: What the templates of this module refer to.
_OBJECTS: dict[str, Any] = {
    "errors": (TypeError, RuntimeError),
    "forward_ad": _torch.autograd.forward_ad,
    "is_grad_enabled": torch.is_grad_enabled,
}

#: Makes what the function calls: ``general(keyset, current, args, kwargs)``, and the holder of a node or None.
Make = Callable[[], tuple[Fn, Any]]


def autograd(
    schema: Schema,
    tags: tuple[torch.Tag, ...],
    op: str,
    when: CheckPolicy,
    differentiable_args: tuple[Argument, ...],
    fast_path: dict[int, CurrentKernel | None],
    make: Make,
) -> Callable[..., Any]:
    """The function at the Autograd key: do what the device's kernel does, where that is all there is to do.

    The key set that a kernel at Autograd receives holds whatever else is to come: modes, functorch, subclasses, views
    that are conjugate, ... `fast_path` has the current kernel for the key sets that hold nothing but a device, so where
    it has one and nothing is to be differentiated, what the dispatcher would do is to call that kernel. Where something
    is, ``node.apply(kernel, *args)`` does it, if the op has a node that takes its arguments as they are. All else is
    done by `general`.
    """
    return compile_on_first_call(
        "autograd", functools.partial(_generate, schema, tags, op, differentiable_args, fast_path, make, when=when)
    )


def _generate(
    schema: Schema,
    tags: tuple[torch.Tag, ...],
    op: str,
    differentiable_args: tuple[Argument, ...],
    fast_path: dict[int, CurrentKernel | None],
    make: Make,
    *,
    when: CheckPolicy,
) -> Any:
    general, node = make()
    names = tuple(argument.name for argument in differentiable_args)
    source = _source(Shape.of(schema, tags, when), names, has_node=node is not None)
    return source.build(op, fast_path=fast_path, general=general, node=node)


@functools.lru_cache(maxsize=512)
def _source(shape: Shape, differentiable_args: tuple[str, ...], *, has_node: bool) -> Source:
    schema = shape.schema
    source = Source("autograd", schema, shape.tags, shape.when)
    source.objects |= _OBJECTS
    parameters = emit_parameters(source)
    leave_out, positional, named = emit_passing(source)
    passed = [*positional, *named]
    source.template = fill(
        AUTOGRAD,
        arguments=parameters,
        requires_grad=_emit_requires_grad(source, [a for a in schema.arguments if a.name in differentiable_args]),
        defaults=emit_defaults(source),
        kernel_call=emit_kernel_call(source, bump=bool(schema.mutated), direct=True, records="$records"),
        node_call=fill(NODE_CALL, leave_out=leave_out, arguments=passed) if has_node else "",
        leave_out=leave_out,
        args=as_tuple(positional),
        kwargs=as_dict(named),
    )
    return source


def as_dict(named: list[str]) -> str:
    """A dict of what is passed by keyword."""
    return f"$dict({', '.join(named)})" if named else "{}"


def _emit_requires_grad(source: Source, differentiable_args: list[Argument]) -> str:
    """An expression for: is anything to be differentiated?"""
    schema = source.schema
    if not differentiable_args:
        return "False"
    if len(differentiable_args) <= 3 and all(argument.is_tensor for argument in differentiable_args):
        each = any_of(_emit_one_requires_grad(a, may_be_none(a, schema)) for a in differentiable_args)
        return f"($records and {each})"
    source.objects["any_requires_grad"] = any_requires_grad(schema)
    return f"($records and $any_requires_grad({', '.join(map(variable_name, differentiable_args))}))"


def _emit_one_requires_grad(argument: Argument, may_be_none: bool) -> str:
    name = variable_name(argument)
    return f"({name} is not None and {name}.requires_grad)" if may_be_none else f"{name}.requires_grad"


def any_requires_grad(schema: Schema) -> Callable[..., bool]:
    """``f(*args, **kwargs)``: does a tensor, or one in a list, require grad?"""
    has_gaps = any(argument.type.startswith("Tensor?[") for argument in schema.arguments)
    return _look_for_grad if has_gaps else _torch.autograd.any_requires_grad


def _look_for_grad(*args: Any, **kwargs: Any) -> bool:
    """torch's own function passes lists over that hold a None."""
    return any(tensor.requires_grad for tensor in tensors_in((*args, *kwargs.values())))


# ----------------------------------------------------------------------------------------------------------------------
# The function at the ADInplaceOrView key of an op that writes: a fast path to the kernel, or redispatch
# A call gets there first where autograd is left out: in inference mode, with tensors from outside of it.

AD_INPLACE_OR_VIEW = """\
def ad_inplace_or_view($keyset, /, {arguments}):
    $current = $fast_path.get($keyset.raw_repr())
    if $current is not None and $forward_ad._current_level < 0:
        {defaults}
        {kernel_call}
    {leave_out}
    return $general($keyset, {args}, {kwargs})
"""


def ad_inplace_or_view(
    schema: Schema,
    tags: tuple[Tag, ...],
    op: str,
    when: CheckPolicy,
    fast_path: dict[int, CurrentKernel | None],
    general: Fn,
) -> Callable[..., Any]:
    """The function at the ADInplaceOrView key: see `autograd` for `fast_path`; all else is done by `general`."""
    generate = functools.partial(_generate_for_writes, schema, tags, op, fast_path, general, when=when)
    return compile_on_first_call("ad_inplace_or_view", generate)


def _generate_for_writes(
    schema: Schema,
    tags: tuple[Tag, ...],
    op: str,
    fast_path: dict[int, CurrentKernel | None],
    general: Fn,
    *,
    when: CheckPolicy,
) -> Any:
    return _source_for_writes(Shape.of(schema, tags, when)).build(op, fast_path=fast_path, general=general)


@functools.lru_cache(maxsize=512)
def _source_for_writes(shape: Shape) -> Source:
    source = Source("ad_inplace_or_view", shape.schema, shape.tags, shape.when)
    source.objects["forward_ad"] = _torch.autograd.forward_ad
    leave_out, positional, named = emit_passing(source)
    source.template = fill(
        AD_INPLACE_OR_VIEW,
        arguments=emit_parameters(source),
        defaults=emit_defaults(source),
        kernel_call=emit_kernel_call(source, bump=True, direct=True),
        leave_out=leave_out,
        args=as_tuple(positional),
        kwargs=as_dict(named),
    )
    return source
