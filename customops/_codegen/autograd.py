"""The functions at the keys above a device: a fast path to the kernel, or the autograd node, or redispatch.

The key set that a function gets holds whatever else is to come: modes, functorch, subclasses, views that are
conjugate, ... `FastPath.by_keyset` has the current kernel for the key sets that hold nothing but a device, so where it
has one and nothing is to be differentiated, what the dispatcher would do is to call that kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from customops import _torch
from customops._codegen.function import Source, compile_on_first_call, fill, joined
from customops._codegen.kernel import Emitter, Shape, emit_kernel_call
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.results import CheckPolicy, tensors_in
from customops._schema.model import Schema

FAST_PATH = """\
def {name}($keyset, /, {parameters}):
    $current = $fast_path.get($keyset.raw_repr())
    if $current is not None and $forward_ad._current_level < 0:
        {fast_path}
    {leave_out}
    return $general({given}, {args}, {kwargs})
"""

CALL_KERNEL = """\
{defaults}
{kernel_call}
"""

CALL_OR_DIFFERENTIATE = """\
$records = $is_grad_enabled()
if not {requires_grad}:
    {defaults}
    {kernel_call}
{node_call}
"""

NODE_CALL = """\
$apply = $node.apply
if $apply is not None:
    {leave_out}
    try:
        return $apply($current.direct, {passed})
    except $errors as $error:
        $node.explain($error)
        raise
"""

#: Makes what a function calls, ``general(keyset, current, args, kwargs)`` or at ADInplaceOrView ``general(keyset, args,
#: kwargs)``; and the holder of an autograd node or None.
Make = Callable[[], tuple[Fn, Any]]


def function_at(key: Literal["Autograd", "ADInplaceOrView"], operator: OperatorHandle, make: Make) -> Fn:
    """The function at a key above the device's: do what its kernel does, where that is all there is to do.

    Where something is to be differentiated, ``node.apply(kernel, *args)`` does it, if the op has a node that takes its
    arguments as they are. All else is done by `general`. A call gets to ADInplaceOrView first, at ops that write, where
    autograd is left out: in inference mode, with tensors from outside of it.
    """
    is_autograd = key == "Autograd"

    def generate(*, when: CheckPolicy = operator.options.check) -> Any:
        general, node = make()
        differentiable = operator.differentiable.differentiable_args(operator.schema) if is_autograd else ()
        names = tuple([argument.name for argument in differentiable]) if is_autograd else None
        source = _source(Shape.of(operator.schema, operator.tags, when), names, has_node=node is not None)
        fast_path = operator.fast_path.by_keyset
        return source.build(operator.qualname, fast_path=fast_path, general=general, node=node)

    return compile_on_first_call("autograd" if is_autograd else "ad_inplace_or_view", generate)


@functools.lru_cache(maxsize=512)
def _source(shape: Shape, differentiable_args: tuple[str, ...] | None, *, has_node: bool) -> Source:
    """The source of either function; `differentiable_args` is None for the one at ADInplaceOrView."""
    is_autograd, schema = differentiable_args is not None, shape.schema
    source = Emitter("autograd" if is_autograd else "ad_inplace_or_view", shape)
    records = "$records" if is_autograd else "$is_grad_enabled()"
    holes: dict[str, Any] = {
        "defaults": source.holes["defaults"],
        "kernel_call": emit_kernel_call(source, bump=bool(schema.mutated), direct=True, records=records),
    }
    if differentiable_args is not None:
        wanted = [argument for argument in schema.arguments if argument.name in differentiable_args]
        names = [argument.variable for argument in wanted]
        requires_grad = "False"  # an expression for: is anything to be differentiated?
        if 0 < len(wanted) <= 3 and all([argument.is_tensor for argument in wanted]):
            may_be_none = [argument.name in schema.call.may_be_none for argument in wanted]
            tests = [f"({name} is not None and {name}.requires_grad)" if none else f"{name}.requires_grad"
                     for name, none in zip(names, may_be_none, strict=True)]  # fmt: skip
            requires_grad = f"($records and {joined('or', tests)})"
        elif wanted:
            source.objects["any_requires_grad"] = any_requires_grad(schema)
            requires_grad = f"($records and $any_requires_grad({', '.join(names)}))"
        holes["requires_grad"] = requires_grad
        holes["node_call"] = fill(NODE_CALL, **source.holes) if has_node else ""
    source.fill(
        FAST_PATH,
        name=source.name,
        fast_path=fill(CALL_OR_DIFFERENTIATE if is_autograd else CALL_KERNEL, **holes),
        given="$keyset, $current" if is_autograd else "$keyset",
    )
    return source


def any_requires_grad(schema: Schema) -> Callable[..., bool]:
    """``f(*args, **kwargs)``: does a tensor, or one in a list, require grad?"""
    has_gaps = True in [argument.type.startswith("Tensor?[") for argument in schema.tensors]
    return _look_for_grad if has_gaps else _torch.autograd.any_requires_grad


def _look_for_grad(*args: Any, **kwargs: Any) -> bool:
    """torch's own function passes lists over that hold a None."""
    return any(tensor.requires_grad for tensor in tensors_in((*args, *kwargs.values())))
