"""The keys of compile caches, lowerings that inductor lacks, and random ops in compiled graphs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from customops._torch.dispatcher import device_key
from customops._torch.inductor_passes import ops_of_patterns
from customops._torch.late import followed, when_imported
from customops._torch.library import torch_op_of

#: Without: compile caches return what an earlier definition of an op was compiled to
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


# Tables of inductor and of export: what an op is decomposed to, and what it is lowered to -----------------------------

#: Without: decompositions and lowerings are not followed
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


# What inductor writes for a call of an op of ours in the Python code of a graph ---------------------------------------

#: Without: calls in compiled graphs go through the dispatcher
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


# Out variants in inductor ---------------------------------------------------------------------------------------------
# torch calls the overload of an op with `Tag.out` in its place, and allocates what that writes to. What it writes for
# that (2.13, 2.15) is right for few ops. Of an op with one result it passes all tensors first, then all numbers,
# whatever their order; the tensors of a list one by one; those given by keyword a second time. Of one with several, it
# allocates none that the program does not use, and fails where sizes are symbols. So the nodes for ops of ours are made
# here.

#: Without (since 2.12): inductor does not call out variants, or calls them with other arguments
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
