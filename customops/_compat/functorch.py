"""torch.func: its levels, wrapped tensors and vmap."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._functorch.autograd_function as _functorch_function
import torch._functorch.pyfunctorch as _functorch
from torch.fx.experimental import const_fold

from customops._compat.autograd import any_tangent
from customops._compat.dispatch import DispatchKey, exclude_keys, key_set
from customops._compat.tracing import tree_flatten, tree_leaves, tree_unflatten

_C: Any = torch._C

_const_fold: Any = const_fold

__tracebackhide__ = True  # pytest leaves the frames out


def is_captured(tensor: torch.Tensor) -> bool:
    """Does a tensor come from outside of the innermost transform that differentiates? A write to it would be lost."""
    kinds = _C._functorch.TransformType
    levels = [i.level() for i in _C._functorch.get_interpreter_stack() or () if i.key() in (kinds.Grad, kinds.Jvp)]
    of_tensor = set()
    while _C._functorch.is_functorch_wrapped_tensor(tensor):
        of_tensor.add(_C._functorch.maybe_get_level(tensor))
        tensor = _C._functorch.get_unwrapped(tensor)
    return bool(levels) and max(levels) not in of_tensor


def is_batching() -> bool:
    """Is a vmap running?"""
    levels = _C._functorch.get_interpreter_stack() or ()
    return any(level.key() == _C._functorch.TransformType.Vmap for level in levels)


def is_tracked_further_out(tensor: torch.Tensor) -> bool:
    """Does a transform around the present one differentiate with respect to a tensor?"""
    while _C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _C._functorch.get_unwrapped(tensor)
        if tensor.requires_grad or any_tangent((tensor,)):
            return True
    return False


def call_vmap_rule(rule: Any, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unwrap batched tensors, call ``rule(info, in_dims, *args, **kwargs)``, wrap what it returns."""
    interpreter: Any = _functorch.retrieve_current_functorch_interpreter()
    return _functorch_function.custom_function_call_vmap_helper(interpreter, rule, overload, *args, **kwargs)


@functools.cache
def below_vmap_mode() -> Any:
    """``keyset & below_vmap_mode()``: below the key that sees each call inside vmap."""
    return _C._dispatch_keyset_full_after(DispatchKey.FuncTorchVmapMode)


without_vmap_mode: Any = functools.partial(exclude_keys, key_set("FuncTorchVmapMode"))


class Batch:
    """The innermost level of vmap. Is anything in `values` batched there?"""

    def __init__(self, values: Any) -> None:
        interpreter: Any = _functorch.retrieve_current_functorch_interpreter()
        self.size, self.randomness, self.level = interpreter.batch_size(), interpreter.randomness(), interpreter.level()
        get_level = _C._functorch.maybe_get_level
        self.is_batched = any(isinstance(x, torch.Tensor) and get_level(x) == self.level for x in tree_leaves(values))

    def wrap(self, result: Any) -> Any:
        """A result with the batch in front -> one of an element, as seen inside vmap."""
        leaves, structure = tree_flatten(result)
        leaves = [_C._functorch._add_batch_dim(x, 0, self.level) if isinstance(x, torch.Tensor) else x for x in leaves]
        return tree_unflatten(leaves, structure)


def _fold_nothing_beside_writes(split: Any) -> Any:
    """`torch.func.linearize` computes in advance what depends on no tangent: a buffer, before an op writes to it.

    Not in a graph with an op that writes and is not torch's own; its own return what they write, but for a few.
    """

    @functools.wraps(split)
    def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(module, torch.fx.GraphModule) and any(map(_writes, module.graph.nodes))):
            return split(module, *args, **kwargs)
        module.graph.set_codegen(torch.fx.graph.CodeGen())  # what is folded takes and returns leaves, too
        module.recompile()
        return module

    return wrapper


def _writes(node: Any) -> bool:
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable and op.namespace not in ("aten", "prims")


_const_fold.split_const_subgraphs = _fold_nothing_beside_writes(_const_fold.split_const_subgraphs)
