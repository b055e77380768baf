"""What inductor writes for a call of an op of ours in the Python code of a graph."""

from __future__ import annotations

import re
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from customops._compat.dispatch import device_key
from customops._compat.late import when_imported

#: Whether a call may be direct: of an op by this name, on a device by its dispatch key, with these arguments, in which
#: `TENSOR` stands for each tensor.
MayBeDirect = Callable[[str, str, tuple[Any, ...], dict[str, Any]], bool]

#: Stands for a tensor in the arguments of a call.
TENSOR = object()

_may_be_direct: MayBeDirect = lambda *call: False  # noqa: E731

#: The module, and the function there, that compiled code gets its functions from: ``get(qualname, device)``.
_source = ("", "")


def write_direct_calls(may_be_direct: MayBeDirect, get: Callable[[str, str], Callable[..., Any]]) -> None:
    """Let graphs call what ``get(qualname, device)`` returns, in the place of the dispatcher, where that may be."""
    global _may_be_direct, _source
    _may_be_direct, _source = may_be_direct, (get.__module__, get.__name__)


def _change_calls(ir: Any) -> None:
    original = ir.FallbackKernel.codegen

    def codegen(self: Any, wrapper: Any) -> None:
        name = _direct_name(self, wrapper, ir)
        if name is not None:
            self.set_python_kernel_name(name)
        original(self, wrapper)

    ir.FallbackKernel.codegen = codegen


when_imported("torch._inductor.ir", _change_calls)


def _direct_name(node: Any, wrapper: Any, ir: Any) -> str | None:
    """The name of the function to be called, which is written to the head of the code; None for torch's own."""
    graph, overload = ir.V.graph, node.op_overload
    if not isinstance(overload, OpOverload) or graph.cpp_wrapper or graph.aot_mode or graph.fx_wrapper:
        return None
    device = _only_device(node, ir)
    if device is None or _has_lazy_views(graph):
        return None
    args, kwargs = node.unflatten_args([TENSOR] * len(node.inputs), node.constant_args)
    if not _may_be_direct(overload._name, device, tuple(args), {**node.kwargs, **kwargs}):
        return None
    # Of two ops, perhaps: the number tells them apart.
    readable = re.sub(r"[^0-9A-Za-z_]", "_", overload._name)
    name = f"customops_{readable}_{zlib.crc32(overload._name.encode()):08x}_{device}"
    while hasattr(wrapper, "parent_wrapper"):  # the code of a subgraph has no head
        wrapper = wrapper.parent_wrapper
    module, function = _source
    wrapper.add_import_once(f"import {module}")
    wrapper.add_import_once(f"{name} = {module}.{function}({overload._name!r}, {device!r})")
    return name


def _only_device(node: Any, ir: Any) -> str | None:
    """The dispatch key of the one device that all tensors of a call are of, or None."""
    found = set()
    for each in node.inputs:
        if not isinstance(each, ir.IRNode) or isinstance(each, ir.NonTensorObj) or not each.has_tensor_output():
            return None
        found.add(each.get_device().type)
    return device_key(found.pop()) if len(found) == 1 else None


#: Of graphs that were looked at: may tensors in them be conjugate or negative views?
_lazy: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _has_lazy_views(graph: Any) -> bool:
    """May tensors in a graph be conjugate or negative views? These are views of complex ones, or come from outside."""
    if graph not in _lazy:
        values = (node.meta.get("val") for node in graph.graph.nodes)
        tensors = [each for value in values for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
        _lazy[graph] = any(each.is_complex() or each.is_neg() or each._is_zerotensor() for each in tensors)
    return _lazy[graph]
