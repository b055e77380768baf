"""Tables of inductor and of export: what an op is decomposed to, and what it is lowered to."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from customops._compat.late import followed, when_imported

#: ``"inductor"`` or ``"export"`` -> op -> what it is taken apart into, or NotImplemented where it is to stay.
_decompositions: dict[str, dict[OpOverload, Callable[..., Any]]] = {"inductor": {}, "export": {}}

#: op -> a function of fake tensors, in plain torch code, that inductor lowers in its place; see `_lower`.
_lowerings: dict[OpOverload, Callable[..., Any]] = {}


def decompose(overload: OpOverload, where: str, fn: Callable[..., Any]) -> Callable[[], None]:
    """Enter a decomposition in the tables of ``"inductor"``, or in those that export makes; the result takes it out."""
    _decompositions[where][overload] = fn
    _tell_inductor(overload)
    return lambda: _forget(_decompositions[where], overload, fn)


def lower(overload: OpOverload, fn: Callable[..., Any]) -> Callable[[], None]:
    """Let inductor lower what `fn` returns for fake tensors in the place of a call; the result takes it back."""
    _lowerings[overload] = fn
    _tell_inductor(overload)
    return lambda: _forget(_lowerings, overload, fn)


def _forget(table: dict[OpOverload, Any], overload: OpOverload, fn: Callable[..., Any]) -> None:
    if table.get(overload) is fn:
        del table[overload]
    _tell_inductor(overload)


# Inductor -------------------------------------------------------------------------------------------------------


def _tell_inductor(overload: OpOverload) -> None:
    """Let the tables of inductor, if it is loaded, say of an op what the tables here say."""
    if (module := sys.modules.get("torch._inductor.decomposition")) is not None:
        _enter_decomposition(module, overload)
    if (module := sys.modules.get("torch._inductor.lowering")) is not None:
        _enter_lowering(module, overload)


def _decomposition_tables(module: Any) -> Iterator[dict[Any, Any]]:
    yield module.decompositions
    if module.fast_random_decomps.cache_info().currsize:  # a copy of it, made on first use
        yield module.fast_random_decomps()


def _enter_decomposition(module: Any, overload: OpOverload) -> None:
    fn = _decompositions["inductor"].get(overload)
    for table in _decomposition_tables(module):
        if fn is not None:
            table[overload] = fn
        else:
            table.pop(overload, None)


def _enter_lowering(module: Any, overload: OpOverload) -> None:
    # What is known of a call that was not lowered: inputs in memory, and with the strides that they had.
    module.lowerings.pop(overload, None)
    module.fallbacks.discard(overload)
    module.needs_realized_inputs.discard(overload)
    module._maybe_layout_constraints.pop(overload, None)
    if overload in _lowerings or overload in _decompositions["inductor"]:
        module.lowerings[overload] = _Lowering(module, overload)


def _enter_all(enter: Callable[[Any, OpOverload], None], module: Any) -> None:
    for overload in {*_lowerings, *_decompositions["inductor"]}:
        enter(module, overload)


when_imported("torch._inductor.decomposition", lambda module: _enter_all(_enter_decomposition, module))
when_imported("torch._inductor.lowering", lambda module: _enter_all(_enter_lowering, module))


class _Lowering:
    """The rule of inductor for an op: the code that was registered for it, else a call of its kernel."""

    def __init__(self, module: Any, overload: OpOverload) -> None:
        self.module, self.overload = module, overload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fn = _lowerings.get(self.overload)
        graph = self.module.V.graph
        lowered = NotImplemented if fn is None else _lower(fn, graph, args, kwargs)
        if lowered is not NotImplemented:
            return lowered
        with self._without():
            return graph.call_function(self.overload, args, kwargs)

    @contextlib.contextmanager
    def _without(self) -> Iterator[None]:
        """Let inductor find no rule for the op: then it calls the kernel, with inputs as the op's tags want them."""
        tables = list(_decomposition_tables(sys.modules["torch._inductor.decomposition"]))
        fns = [table.pop(self.overload, None) for table in tables]
        del self.module.lowerings[self.overload]
        try:
            yield
        finally:
            self.module.lowerings[self.overload] = self
            for table, fn in zip(tables, fns, strict=True):
                if fn is not None:
                    table[self.overload] = fn


def _lower(fn: Callable[..., Any], graph: Any, args: Any, kwargs: Any) -> Any:
    """Trace plain torch code on the fake tensors of a node, and lower what it does in the place of the node."""
    node = graph.current_node
    values = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    flat, spec = torch.utils._pytree.tree_flatten(values)
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    kept: list[Any] = []

    def on_tensors(*tensors: torch.Tensor) -> Any:
        leaves = list(flat)
        for i, tensor in zip(places, tensors, strict=True):
            leaves[i] = tensor
        given, named = torch.utils._pytree.tree_unflatten(leaves, spec)
        result = fn(*given, **named)
        kept.append(result is NotImplemented)
        return () if result is NotImplemented else result

    table = importlib.import_module("torch._inductor.decomposition").select_decomp_table()
    with graph.fake_mode:
        traced = make_fx(on_tensors, table)(*[flat[i] for i in places])
    if kept[-1]:
        return NotImplemented
    traced.graph.eliminate_dead_code()  # checks of autograd's, such as is_same_size, which inductor cannot lower
    boxes, _ = torch.utils._pytree.tree_flatten((args, kwargs))
    inline = importlib.import_module("torch._inductor.codegen.subgraph").inline_subgraph_to_ir_nodes
    return inline(traced, [boxes[i] for i in places], node.name)


# Export ---------------------------------------------------------------------------------------------------------


def _change_table(module: Any) -> None:
    """Let the tables of decompositions that export makes hold ours."""
    module.CustomDecompTable.__init__ = followed(module.CustomDecompTable.__init__, _add_decompositions)


def _add_decompositions(table: Any) -> None:
    table.decomp_table.update(_decompositions["export"])


when_imported("torch.export.decomp_utils", _change_table)
