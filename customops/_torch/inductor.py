"""Inductor: keys of caches, lowerings, direct calls, out variants, writes in place, patterns, and code for an op."""

from __future__ import annotations

import importlib
import re
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from customops._torch import hooks
from customops._torch.dispatcher import TorchDispatchMode, call_plainly_in_trace, device_key
from customops._torch.fakes import known_to_differ, without_fresh_symbols
from customops._torch.library import followed, torch_op_of
from customops._torch.memory import is_lazy, may_overlap, memory_id
from customops._torch.trees import tree_flatten, tree_unflatten

#: Without: compile caches return what an earlier definition of an op was compiled to


def add_fingerprints(codecache: Any) -> None:
    """Put fingerprints in the keys of the caches of AOTAutograd and inductor: torch's hold the names of ops alone.

    Both pickle the attributes of this class. The keys of graphs without our ops stay as they are.
    """

    def add(details: Any, gm: Any, *_args: Any, **_kwargs: Any) -> None:
        names: set[str] = set()
        for module in gm.modules() if gm is not None else ():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                for value in (node.target, *node.args, *node.kwargs.values()):  # those given to a higher-order op, too
                    if isinstance(value, OpOverload):
                        names.add(value._name)
                    elif isinstance(value, OpOverloadPacket):  # in a graph of Dynamo, where the op was called so
                        name = value._qualified_op_name
                        names.update((name, *(f"{name}.{overload}" for overload in value.overloads())))
        fingerprint = hooks.fingerprint(names) if gm is not None else None
        if fingerprint is not None:
            details.customops_fingerprint = fingerprint

    details = codecache.FxGraphHashDetails
    details.__init__ = followed(details.__init__, add)


def add_storage_offset(lowering: Any) -> None:
    """Give inductor a rule for offsets into a storage that are symbols.

    Without one it takes the offset of every view for 0, and the writes of an op to several slices of a tensor all land
    in the first. As its rule for sizes, this one takes what tracing found.
    """

    def storage_offset(_: Any) -> Any:
        return _expression(torch._inductor.virtualized.V.graph.current_node.meta["val"])

    target = torch.ops.aten.sym_storage_offset
    if target.default not in lowering.lowerings:
        lowering.register_lowering(target, type_promotion_kind=None)(storage_offset)


def _expression(number: int | torch.SymInt) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else int(number)


def keep_calls_apart(overload: OpOverload) -> None:
    """Two calls of a random op on equal arguments are two: before torch 2.15 only the ops of this list are spared."""
    random_ops = importlib.import_module("torch._functorch.compile_utils").rand_ops
    if overload.overloadpacket not in random_ops:
        random_ops.append(overload.overloadpacket)


# Tables of inductor and of export: what an op is decomposed to, and what it is lowered to -----------------------------

#: Without: decompositions and lowerings are not followed
#: ``"inductor"`` or ``"export"`` -> op -> what it is taken apart into, or NotImplemented where it is to stay;
#: ``"lowering"`` -> op -> a function of fake tensors, in plain torch code, that inductor lowers in its place: `_lower`.
_tables: dict[str, dict[OpOverload, Callable[..., Any]]] = {"inductor": {}, "export": {}, "lowering": {}}


def enter(overload: OpOverload, table: str, fn: Callable[..., Any]) -> Callable[[], None]:
    """Let compilers take `fn` in the place of an op, by one of the tables above; the result takes it out again."""
    _tables[table][overload] = fn
    _tell_inductor(overload)

    def forget() -> None:
        if _tables[table].get(overload) is fn:
            del _tables[table][overload]
        _tell_inductor(overload)

    return forget


def _tell_inductor(overload: OpOverload) -> None:
    """Let the tables of inductor, if it is loaded, say of an op what the tables here say."""
    if (module := sys.modules.get("torch._inductor.decomposition")) is not None:
        enter_decompositions(module, {overload})
    if (module := sys.modules.get("torch._inductor.lowering")) is not None:
        enter_lowerings(module, {overload})


def _decomposition_tables(module: Any) -> Iterator[dict[Any, Any]]:
    yield module.decompositions
    if module.fast_random_decomps.cache_info().currsize:  # a copy of it, made on first use
        yield module.fast_random_decomps()


def enter_decompositions(module: Any, ops: set[OpOverload] | None = None) -> None:
    for overload in ops or {*_tables["lowering"], *_tables["inductor"]}:
        for table in _decomposition_tables(module):
            table.pop(overload, None)
            if overload in _tables["inductor"]:
                table[overload] = _tables["inductor"][overload]


def enter_lowerings(module: Any, ops: set[OpOverload] | None = None) -> None:
    for overload in ops or {*_tables["lowering"], *_tables["inductor"]}:
        # What is known of a call that was not lowered: inputs in memory, and with the strides that they had.
        module.lowerings.pop(overload, None)
        module.fallbacks.discard(overload)
        module.needs_realized_inputs.discard(overload)
        module._maybe_layout_constraints.pop(overload, None)
        if overload in _tables["lowering"] or overload in _tables["inductor"]:
            module.lowerings[overload] = _lowering_of(module, overload)


def enter_in_export(module: Any) -> None:
    table = module.CustomDecompTable
    table.__init__ = followed(table.__init__, lambda made: made.decomp_table.update(_tables["export"]))


def _lowering_of(module: Any, overload: OpOverload) -> Callable[..., Any]:
    """The rule of inductor for an op: the code that was registered for it, else a call of its kernel."""

    def lowering(*args: Any, **kwargs: Any) -> Any:
        graph, fn = module.V.graph, _tables["lowering"].get(overload)
        lowered = NotImplemented if fn is None else _lower(fn, graph, args, kwargs)
        if lowered is not NotImplemented:
            return lowered
        # Where inductor finds no rule for the op, it calls the kernel, with inputs as the op's tags want them.
        tables = list(_decomposition_tables(sys.modules["torch._inductor.decomposition"]))
        removed = [table.pop(overload, None) for table in tables]
        del module.lowerings[overload]
        try:
            return graph.call_function(overload, args, kwargs)
        finally:
            module.lowerings[overload] = lowering
            for table, entry in zip(tables, removed, strict=True):
                if entry is not None:
                    table[overload] = entry

    return lowering


def _lower(fn: Callable[..., Any], graph: Any, args: Any, kwargs: Any) -> Any:
    """Trace plain torch code on the fake tensors of a node, and lower what it does in the place of the node."""
    node = graph.current_node
    given, named = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    on_tensors, tensors, declined = on_tensors_alone(fn, given, named)
    table = importlib.import_module("torch._inductor.decomposition").select_decomp_table()
    with graph.fake_mode:
        traced = make_fx(on_tensors, table)(*tensors)
    if declined[-1]:
        return NotImplemented
    traced.graph.eliminate_dead_code()  # checks of autograd's, such as is_same_size, which inductor cannot lower
    # inductor may have filled in defaults, which the node does not have
    values = (*given, *args[len(given) :]), {name: named.get(name, value) for name, value in kwargs.items()}
    boxes = zip(tree_leaves((args, kwargs)), tree_leaves(values), strict=True)
    inline = importlib.import_module("torch._inductor.codegen.subgraph").inline_subgraph_to_ir_nodes
    return inline(traced, [box for box, value in boxes if isinstance(value, torch.Tensor)], node.name)


# What inductor writes for a call of an op of ours in the Python code of a graph ---------------------------------------

#: Without: calls in compiled graphs go through the dispatcher
#: Stands for a tensor in the arguments of a call.
TENSOR = object()


def call_directly(ir: Any) -> None:
    original = ir.FallbackKernel.codegen

    def codegen(self: Any, wrapper: Any) -> None:
        _name_directly(self, wrapper, ir)
        original(self, wrapper)

    ir.FallbackKernel.codegen = codegen


#: May tensors in a graph be conjugate or negative views? These are views of complex ones, or come from outside.
_lazy: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _name_directly(node: Any, wrapper: Any, ir: Any, outs: Sequence[Any] = ()) -> None:
    """Let a node call a function of ours, if it may; `outs`: what it writes, where inductor allocates that."""
    graph, overload = ir.V.graph, node.op_overload
    if not isinstance(overload, OpOverload) or graph.cpp_wrapper or graph.aot_mode or graph.fx_wrapper:
        return
    for each in node.inputs:
        if not isinstance(each, ir.IRNode) or isinstance(each, ir.NonTensorObj) or not each.has_tensor_output():
            return
    types = {each.get_device().type for each in (*node.inputs, *outs)}
    if graph not in _lazy:
        values = (node.meta.get("val") for node in graph.graph.nodes)
        tensors = [each for value in values for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
        _lazy[graph] = any(each.is_complex() or is_lazy(each) for each in tensors)
    if len(types) != 1 or _lazy[graph]:
        return
    device = device_key(types.pop())
    args, kwargs = node.unflatten_args([TENSOR] * len(node.inputs), node.constant_args)
    if not hooks.may_be_direct(overload._name, device, tuple(args), {**node.kwargs, **kwargs}):
        return
    kernel = _kernel_for(graph, node, overload)
    # Of two ops, perhaps: the number tells them apart.
    options = ", allocated=True" * bool(outs) + (f", kernel={kernel!r}" if kernel is not None else "")
    readable = re.sub(r"[^0-9A-Za-z_]", "_", f"{overload._name}_{kernel}" if kernel else overload._name)
    number = zlib.crc32(f"{overload._name}{kernel or ''}".encode())
    name = f"customops_{readable}_{number:08x}_{device}{'_allocated' * bool(outs)}"
    while hasattr(wrapper, "parent_wrapper"):  # the code of a subgraph has no head
        wrapper = wrapper.parent_wrapper
    wrapper.add_import_once(f"import {hooks.direct_call.__module__}")
    function = f"{hooks.direct_call.__module__}.{hooks.direct_call.__name__}"
    wrapper.add_import_once(f"{name} = {function}({overload._name!r}, {device!r}{options})")
    node.set_python_kernel_name(name)


def _kernel_for(graph: Any, node: Any, overload: OpOverload) -> str | None:
    """Which of several kernels a node is to call: it is chosen for the fakes of the calls that the node may be of."""
    calls = [each for each in node.origins if each.target is overload]
    given = (torch.fx.map_arg((each.args, each.kwargs), lambda value: value.meta["val"]) for each in calls)
    with graph.fake_mode:
        names = {hooks.kernel_for(overload._name, *each) for each in given}
    return names.pop() if len(names) == 1 else None


# Out variants in inductor ---------------------------------------------------------------------------------------------
# torch calls the overload of an op with `Tag.out` in its place, and allocates what that writes to. What it writes for
# that (2.13, 2.15) is right for few ops. Of an op with one result it passes all tensors first, then all numbers,
# whatever their order; the tensors of a list one by one; those given by keyword a second time. Of one with several, it
# allocates none that the program does not use, and fails where sizes are symbols. So this module makes our nodes.

#: Without: inductor does not call out variants, or calls them with other arguments
#: Ops of others that have an out variant of ours.
_planned: weakref.WeakSet[OpOverload] = weakref.WeakSet()


#: An op has an out variant of ours.
plan_with: Callable[[OpOverload], None] = _planned.add


def _is_ours(op: Any) -> bool:
    return isinstance(op, OpOverload) and (op in _planned or hasattr(torch_op_of(op._name), "_definition"))


def correct_out_variants(ir: Any) -> None:
    """Let inductor call the out variants of our ops, as it does those of ops with several results."""
    search: Any = importlib.import_module("torch._library._out_variant")
    find, multiple = search.to_out_variant, ir.ExternKernelMultiOut
    create, codegen = multiple.try_create.__func__, multiple.codegen

    def find_of_others(op: Any) -> Any:
        """None for our ops, while inductor lowers a graph."""
        is_lowering = hasattr(torch._inductor.virtualized.V.graph, "graph_inputs")
        return None if is_lowering and _is_ours(op) else find(op)

    def try_create(cls: Any, kernel: Any, example_output: Any, device: Any, *args: Any, **options: Any) -> Any:
        """The node for a call of the out variant, or None where there is none to call."""
        if not _is_ours(kernel):
            return create(cls, kernel, example_output, device, *args, **options)
        schema = kernel._schema
        if any(argument.is_write for argument in schema.arguments) or schema.name.endswith("_"):
            return None
        variant = find(kernel)
        if variant is None or options.get("unbacked_bindings"):  # sizes that the call itself finds out
            return None
        options.pop("has_unaligned_input", None)
        names = [argument.name for argument in variant._schema.arguments if argument.is_write]
        call = cls(ir.MultiOutputLayout(device=device), kernel, *args, out_op=variant, out_arg_names=names, **options)
        is_one = isinstance(example_output, torch.Tensor)
        made = [
            ir.AllocatingMultiOutput(layout=cls.tensor_to_layout(x), input=call, indices=[(tuple, i)])
            for i, x in enumerate([example_output] if is_one else example_output)
        ]
        call.out_variant_output_nodes = call.outputs = made
        return made[0] if is_one else tuple(made)

    def write(node: Any, wrapper: Any) -> None:
        """torch leaves out what the program does not use, but passes it to the call."""
        removed = torch._inductor.virtualized.V.graph.removed_buffers
        unused = [out for out in node.out_variant_output_nodes if out.get_name() in removed]
        removed.difference_update(out.get_name() for out in unused)
        _name_directly(node, wrapper, ir, node.out_variant_output_nodes)
        codegen(node, wrapper)
        for out in unused:
            wrapper.codegen_free(out)

    search.to_out_variant, multiple.try_create, multiple.codegen = find_of_others, classmethod(try_create), write


# Writes in place ------------------------------------------------------------------------------------------------------
# Where inductor decides for one, what the op reads beside must have memory of its own. In a functional graph a copy of
# an old value is the old value, so inductor drops the copy. Then it looks whether what an op writes is used later, and
# lets the op write in place if not; it does not look whether the op itself reads it, too.


#: Without: in compiled graphs, an op may read what it has already written
def separate_reads(reinplace: Any) -> None:
    """Copy what an op of ours reads, where that may be memory that it writes."""
    original = reinplace.reinplace_inplaceable_ops_core
    functional = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)

    def core(graph: torch.fx.Graph) -> None:
        for node in list(graph.nodes):
            op: Any = node.args[0] if node.op == "call_function" and node.target in functional else None
            if isinstance(op, OpOverload) and hasattr(torch_op_of(op._name.replace("__writes", "")), "_definition"):
                written, tensors = [*_written(node)], set(_arguments(node, written=True))
                for read in dict.fromkeys(_arguments(node, written=False)):
                    if read not in tensors and any(may_overlap(read.meta["val"], each) for each in written):
                        _copy(graph, node, read)
        original(graph)

    reinplace.reinplace_inplaceable_ops_core = core


def _arguments(node: torch.fx.Node, *, written: bool) -> Iterator[torch.fx.Node]:
    """The tensors among the arguments of a call, by what the schema says of them."""
    overload: Any = node.args[0]
    for argument in overload._schema.arguments:
        if argument.is_write is written:
            values = node.kwargs.get(argument.name)
            for each in values if isinstance(values, (list, tuple)) else (values,):
                if isinstance(each, torch.fx.Node) and isinstance(each.meta.get("val"), torch.Tensor):
                    yield each


def _written(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """What a call writes: tensors, or views that are described by their base."""
    if node.target is torch.ops.higher_order.auto_functionalized:
        yield from (each.meta["val"] for each in _arguments(node, written=True))
        return
    functionalize = torch._higher_order_ops.auto_functionalize
    overload: Any = node.args[0]
    names, types = functionalize.get_mutable_args(overload)
    values: Any = torch.fx.map_arg(dict(node.kwargs), lambda each: each.meta["val"])
    kwargs = dict(values)
    bases = list(kwargs.pop("_all_bases"))
    views = functionalize.read_view_information_from_args(names, types, kwargs, bases)
    for view in views.values():
        for each in view if isinstance(view, list) else (view,):
            if each is not None:
                yield each.regenerate_view(bases)


def _copy(graph: torch.fx.Graph, node: torch.fx.Node, read: torch.fx.Node) -> None:
    value = read.meta["val"]
    with graph.inserting_before(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (read,))
    with value.fake_mode:
        copy.meta["val"] = value.clone()
    node.kwargs = {
        name: given if name == "_all_bases" else torch.fx.map_arg(given, lambda each: copy if each is read else each)
        for name, given in node.kwargs.items()
    }


# ----------------------------------------------------------------------------------------------------------------------
# Plain torch code that is traced in the place of an operator: what it must not do, and what it has to return

#: Without: decompositions and lowerings are not looked at, and inductor refuses them
#: Makes the error for a problem, of what was expected and got.
Fault = Callable[[str, str, str], Exception]


def substitute(
    overload: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fault: Fault, random: bool
) -> Any:
    """``fn(*args, **kwargs)`` on fake tensors that are being traced, made a functional operator.

    What `fn` writes to tensors of its own becomes functional. Results that share memory with an argument or with each
    other become copies. Raises the `fault` if `fn` writes to an argument, uses tensors with data, draws random numbers
    where they may not be (`random`), or returns other sizes, dtypes or devices than the operator's fake impl.
    """
    on_tensors, tensors, declined = on_tensors_alone(fn, args, kwargs)
    with _Watch(tensors, fault, random):
        result = call_plainly_in_trace(torch.func.functionalize(on_tensors), *tensors)
    if declined[-1]:
        return NotImplemented
    _compare(result, _expected(overload, args, kwargs), fault)
    taken = {memory_id(tensor) for tensor in tensors}
    leaves, spec = tree_flatten(result)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[i] = leaf.clone() if memory_id(leaf) in taken else leaf
            taken.add(memory_id(leaves[i]))
    return tree_unflatten(leaves, spec)


def on_tensors_alone(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor], list[bool]]:
    """`fn` as a function of the tensors among its arguments, these, and whether a call of it gave NotImplemented."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    declined: list[bool] = []

    def on_tensors(*given: torch.Tensor) -> Any:
        for i, tensor in zip(places, given, strict=True):
            leaves[i] = tensor
        inner_args, inner_kwargs = tree_unflatten(leaves, spec)
        result = fn(*inner_args, **inner_kwargs)
        declined.append(result is NotImplemented)
        return () if declined[-1] else result

    return on_tensors, tensors, declined


class _Watch(TorchDispatchMode):
    """Raises for what a function does that code in the place of an operator may not do."""

    def __init__(self, tensors: list[torch.Tensor], fault: Fault, random: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = {memory_id(tensor) for tensor in tensors}
        self.fault, self.random = fault, random

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments if isinstance(func, OpOverload) and func._schema.is_mutable else ()
        values = {**dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}
        written = tree_leaves([values.get(each.name) for each in arguments if each.is_write])
        if any(isinstance(each, torch.Tensor) and memory_id(each) in self.given for each in written):
            raise self.fault("writes to an argument", "new tensors, and no writes to what it is given", str(func))
        if not self.random and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise self.fault("draws random numbers", "code that does not; a decomposition may", str(func))
        is_new = func is torch.ops.aten.lift_fresh.default  # torch.tensor(...)
        for tensor in tree_leaves((args, kwargs)) if isinstance(func, OpOverload) and not is_new else ():
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dim():
                got = f"a tensor with data, of shape {tuple(tensor.shape)}, in {func}"
                raise self.fault("uses a tensor that is not an argument", "tensors that the op is given", got)
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default  # of forward mode; inductor reads its memory, which it has none
        return func(*args, **kwargs)


def _expected(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    proxies: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")
    with proxies.disable_proxy_modes_tracing(), without_fresh_symbols((args, kwargs)):
        return overload(*args, **kwargs)


def _compare(result: Any, expected: Any, fault: Fault) -> None:
    got_leaves, got_spec = tree_flatten(list(result) if isinstance(result, (list, tuple)) else result)
    leaves, spec = tree_flatten(list(expected) if isinstance(expected, (list, tuple)) else expected)
    if got_spec != spec:
        raise fault("returns another number of results", _count(expected), _count(result))
    for i, (got, want) in enumerate(zip(got_leaves, leaves, strict=True)):
        if not _is_like(got, want):
            where = f"result {i}: " if len(leaves) > 1 else ""
            raise fault("returns something else than the fake impl", where + _describe(want), where + _describe(got))


def _is_like(got: Any, want: Any) -> bool:
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) is isinstance(want, torch.Tensor)
    same = (got.dtype, got.device, got.dim()) == (want.dtype, want.device, want.dim())
    return same and not any(map(known_to_differ, got.shape, want.shape))


def _count(result: Any) -> str:
    if isinstance(result, (list, tuple)):
        return f"a {type(result).__name__} of {len(result)}"
    return f"1 result ({_describe(result)})"


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
