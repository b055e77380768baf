"""The keys of compile caches, lowerings that inductor lacks, and random ops in compiled graphs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from customops._compat.late import followed, when_imported
from customops._compat.replacement import ops_of_patterns

#: What compiled code depends on of the ops of these names, or None where none of them is ours.
FingerprintOf = Callable[[set[str]], str | None]

_fingerprint_of: FingerprintOf = lambda names: None  # noqa: E731


def fingerprint_with(function: FingerprintOf) -> None:
    """Let the keys of the compile caches hold what `function` says of a graph's ops."""
    global _fingerprint_of
    _fingerprint_of = function


def _add_fingerprints(codecache: Any) -> None:
    """Put fingerprints in the keys of the caches of AOTAutograd and inductor: torch's hold the names of ops alone.

    Both pickle the attributes of this class. The keys of graphs without our ops stay as they are, unless code in them
    may be replaced by one.
    """
    details = codecache.FxGraphHashDetails
    details.__init__ = followed(details.__init__, _add_fingerprint)


def _add_fingerprint(details: Any, gm: Any, *_args: Any, **_kwargs: Any) -> None:
    fingerprint = _fingerprint_of({*_names_in(gm), *ops_of_patterns()}) if gm is not None else None
    if fingerprint is not None:
        details.customops_fingerprint = fingerprint


when_imported("torch._inductor.codecache", _add_fingerprints)


def _names_in(graph_module: Any) -> Iterator[str]:
    """The names of the ops in a graph and its subgraphs, those that a higher-order op is given too."""
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for value in (node.target, *node.args, *node.kwargs.values()):
                    yield from _names_of(value)


def _names_of(value: Any) -> Iterable[str]:
    if isinstance(value, OpOverload):
        return (value._name,)
    if isinstance(value, OpOverloadPacket):  # in a graph of Dynamo, where the op was called so
        name = value._qualified_op_name
        return (name, *(f"{name}.{overload}" for overload in value.overloads()))
    return ()


def _add_lowering(lowering: Any) -> None:
    """Give inductor a rule for offsets into a storage that are symbols.

    Without one it takes the offset of every view for 0, and the writes of an op to several slices of a tensor all land
    in the first. As its rule for sizes, this one takes what tracing found.
    """
    target = torch.ops.aten.sym_storage_offset
    if target.default not in lowering.lowerings:
        lowering.register_lowering(target, type_promotion_kind=None)(_storage_offset)


def _storage_offset(_: Any) -> Any:
    return _expression(torch._inductor.virtualized.V.graph.current_node.meta["val"])


def _expression(number: int | torch.SymInt) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else int(number)


when_imported("torch._inductor.lowering", _add_lowering)


def _correct_as_strided(lowering: Any) -> None:
    """Before torch 2.13, inductor adds the offset of ``as_strided`` to the start of an input, not of its storage.

    If the input has an offset itself, an op that writes to a row of it would write elsewhere.
    """
    original = getattr(lowering, "as_strided", None)
    if original is None or "storage_offset_relative_to_input_storage" in inspect.signature(original).parameters:
        return

    def as_strided(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        result = original(x, size, stride, storage_offset)
        if storage_offset is not None:
            result.data.layout.offset -= _offset_of_input(result.get_name())
        return result

    lowering.register_lowering(torch.ops.aten.as_strided.default, type_promotion_kind=None)(as_strided)


def _offset_of_input(name: str) -> Any:
    """The offset of an input of the graph that is compiled; 0 for other buffers."""
    graph: Any = torch._inductor.virtualized.V.graph.module.graph
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder") if node.target == name]
    return _expression(values[0].storage_offset()) if values else 0


when_imported("torch._inductor.lowering", _correct_as_strided)


def keep_calls_apart(overload: OpOverload) -> None:
    """Two calls of a random op on equal arguments are two: before torch 2.15 only the ops of this list are spared."""
    random_ops = importlib.import_module("torch._functorch.compile_utils").rand_ops
    if overload.overloadpacket not in random_ops:
        random_ops.append(overload.overloadpacket)
