"""The function at the Autograd key: a fast path to the kernel, or the autograd node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from customops import _compat
from customops._codegen.function import (
    Source,
    always_passed,
    as_tuple,
    compile_on_first_call,
    may_be_none,
    variable_name,
)
from customops._codegen.kernel import emit_kernel_call
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import CurrentKernel
from customops._dispatch.results import CheckPolicy, tensors_in
from customops._schema.model import Argument, Schema

#: Makes what an autograd trampoline calls: ``general(keyset, cell, args, kwargs)``, and the holder of a node or None.
Make = Callable[[], tuple[Fn, Any]]


def autograd(
    schema: Schema,
    tags: tuple[torch.Tag, ...],
    op: str,
    when: CheckPolicy,
    watched: tuple[Argument, ...],
    direct: dict[int, CurrentKernel | None],
    make: Make,
) -> Callable[..., Any]:
    """The function at the Autograd key: do what the device's kernel does, where that is all there is to do.

    The key set that a kernel at Autograd receives holds whatever else is to come: modes, functorch, subclasses, views
    that are conjugate, ... `direct` has the cell of the kernel for the key sets that hold nothing but a device, so
    where it has one and nothing is to be differentiated, what the dispatcher would do is to call that kernel. Where
    something is, ``node.apply(kernel, *args)`` does it, if the op has a node that takes its arguments as they are. All
    else is done by `general`.
    """
    return compile_on_first_call(
        "autograd", functools.partial(_autograd, schema, tags, op, when, watched, direct, make)
    )


def _autograd(
    schema: Schema,
    tags: tuple[torch.Tag, ...],
    op: str,
    when: CheckPolicy,
    watched: tuple[Argument, ...],
    direct: dict[int, CurrentKernel | None],
    make: Make,
) -> Source:
    general, node = make()
    source = Source("autograd", schema)
    always = [variable_name(argument) for argument in schema.positional[: always_passed(schema)]]
    rest = ["*$rest"] if len(always) < len(schema.positional) else []
    named = ["**$named"] if schema.keyword_only else []
    passed = ", ".join([*always, *rest, *named])
    source.parameters = ["$keyset", "/", *always, *rest, *named]
    source.line("$cell = $direct.get($keyset.raw_repr())", direct=direct)
    source.line("if $cell is not None and $forward_ad._current_level < 0:", forward_ad=_compat.autograd.forward_ad)
    source.line(f"    if not ({_requires_grad(source, schema, watched)}):")
    source.indent = "        "
    if rest or named:  # the kernel's trampoline knows the defaults
        source.line(f"return $cell.direct({passed})")
    else:
        emit_kernel_call(source, schema, tags, op, when, bump=bool(schema.mutated), direct=True)
    source.indent = ""
    if node is not None:
        source.line("    $apply = $node.apply", node=node)
        source.line("    if $apply is not None:")
        source.line("        try:")
        source.line(f"            return $apply($cell.direct, {passed})")
        source.line("        except $errors as $error:", errors=(TypeError, RuntimeError))
        source.line("            $node.explain($error)")
        source.line("            raise")
    source.line(
        f"return $general($keyset, $cell, {as_tuple([*always, *rest])}, {'$named' if named else '{}'})", general=general
    )
    return source


def _requires_grad(source: Source, schema: Schema, watched: tuple[Argument, ...]) -> str:
    """An expression for: is anything to be differentiated?"""
    source.objects["is_grad_enabled"] = torch.is_grad_enabled
    tensors = [argument for argument in schema.positional[: always_passed(schema)] if argument in watched]
    others = [argument for argument in watched if argument not in tensors]
    if not others and len(tensors) <= 3 and all(argument.is_tensor for argument in tensors):
        each = [
            f"({variable_name(a)} is not None and {variable_name(a)}.requires_grad)"
            if may_be_none(a, schema)
            else f"{variable_name(a)}.requires_grad"
            for a in tensors
        ]
        return f"({' or '.join(each)}) and $is_grad_enabled()" if each else "False"
    items = [variable_name(a) for a in tensors]
    items += ["*$rest"] if any(not a.kwarg_only for a in others) else []
    items += ["**$named"] if any(a.kwarg_only for a in others) else []
    source.objects["any_requires_grad"] = any_requires_grad(schema)
    return f"$any_requires_grad({', '.join(items)}) and $is_grad_enabled()"


def any_requires_grad(schema: Schema) -> Callable[..., bool]:
    """``f(*args, **kwargs)``: does a tensor, or one in a list, require grad?"""
    has_gaps = any(argument.type.startswith("Tensor?[") for argument in schema.arguments)
    return _look_for_grad if has_gaps else _compat.autograd.any_requires_grad


def _look_for_grad(*args: Any, **kwargs: Any) -> bool:
    """torch's own function passes lists over that hold a None."""
    return any(tensor.requires_grad for tensor in tensors_in((*args, *kwargs.values())))
