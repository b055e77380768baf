"""Out variants in inductor.

torch calls the overload of an op with `Tag.out` in its place, and allocates what that writes to. What it writes for
that (2.13, 2.15) is right for few ops. Of an op with one result it passes all tensors first, then all numbers, whatever
their order; the tensors of a list one by one; those given by keyword a second time. Of one with several, it allocates
none that the program does not use, and fails where sizes are symbols. So the nodes for ops of ours are made here.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from customops._compat.late import when_imported
from customops._compat.libraries import OpOverload
from customops._compat.registries import torch_op_of

#: Ops of others that have an out variant of ours.
_planned: weakref.WeakSet[OpOverload] = weakref.WeakSet()


def plan_with(functional: OpOverload) -> None:
    """An op has an out variant of ours."""
    _planned.add(functional)


def _is_ours(overload: Any) -> bool:
    return isinstance(overload, OpOverload) and (
        overload in _planned or hasattr(torch_op_of(overload._name), "_definition")
    )


def _correct(ir: Any) -> None:
    """Let inductor call the out variants of our ops, as it does those of ops with several results."""
    if not hasattr(ir, "ExternKernelMultiOut"):  # before 2.12 inductor calls none
        return
    search: Any = importlib.import_module("torch._library._out_variant")
    find = search.to_out_variant
    search.to_out_variant = functools.partial(_find_others, find)
    multiple = ir.ExternKernelMultiOut
    multiple.try_create = classmethod(_Create(ir, find, multiple.try_create.__func__))
    multiple.codegen = functools.partialmethod(_codegen, multiple.codegen)


def _find_others(find: Callable[[Any], Any], op: Any) -> Any:
    """`to_out_variant`, which while inductor lowers a graph finds none for our ops."""
    is_lowering = hasattr(torch._inductor.virtualized.V.graph, "graph_inputs")
    return None if is_lowering and _is_ours(op) else find(op)


class _Create:
    """`ExternKernelMultiOut.try_create`: the node for a call of an out variant, or None where there is none to call."""

    def __init__(self, ir: Any, find: Callable[[Any], Any], original: Callable[..., Any]) -> None:
        self.ir, self.find, self.original = ir, find, original

    def __call__(self, cls: Any, kernel: Any, example_output: Any, device: Any, *args: Any, **options: Any) -> Any:
        if not _is_ours(kernel):
            return self.original(cls, kernel, example_output, device, *args, **options)
        schema = kernel._schema
        if any(argument.is_write for argument in schema.arguments) or schema.name.endswith("_"):
            return None
        variant = self.find(kernel)
        if variant is None or options.get("unbacked_bindings"):  # sizes that the call itself finds out
            return None
        options = {key: value for key, value in options.items() if key != "has_unaligned_input"}
        names = [argument.name for argument in variant._schema.arguments if argument.is_write]
        call = cls(
            self.ir.MultiOutputLayout(device=device), kernel, *args, out_op=variant, out_arg_names=names, **options
        )
        is_one = isinstance(example_output, torch.Tensor)
        results = [example_output] if is_one else list(example_output)
        made = [
            self.ir.AllocatingMultiOutput(layout=cls.tensor_to_layout(x), input=call, indices=[(tuple, i)])
            for i, x in enumerate(results)
        ]
        call.out_variant_output_nodes = call.outputs = made
        return made[0] if is_one else tuple(made)


def _codegen(node: Any, original: Callable[..., Any], wrapper: Any) -> None:
    """Write the call of an out variant. torch leaves out what the program does not use, but passes it to the call."""
    removed = torch._inductor.virtualized.V.graph.removed_buffers
    unused = [out for out in node.out_variant_output_nodes if out.get_name() in removed]
    for out in unused:
        removed.discard(out.get_name())
    original(node, wrapper)
    for out in unused:
        wrapper.codegen_free(out)


when_imported("torch._inductor.ir", _correct)
