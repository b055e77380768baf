"""Inductor: keys of caches, lowerings, direct calls, out variants, writes in place, patterns, and code for an op."""

from __future__ import annotations

import contextlib
import functools
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
from torch.utils._pytree import tree_leaves, tree_map

from customops._torch import hooks
from customops._torch.dispatcher import TorchDispatchMode, call_plainly_in_trace, device_key
from customops._torch.fakes import known_to_differ, without_fresh_symbols
from customops._torch.functionalization import allowed
from customops._torch.library import followed, overload_of, torch_op_of
from customops._torch.memory import is_lazy, memory_id, overlap
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
    """Give inductor a rule for offsets into a storage that are symbols, in graphs with an op of ours.

    Without the rule, inductor takes the offset of every view for 0 (pytorch/pytorch#198068), and the writes of an op to
    several slices of a tensor all land in the first slice. Like inductor's rule for sizes, the rule takes the value
    that tracing found.
    """
    target = torch.ops.aten.sym_storage_offset.default

    def storage_offset(*args: Any, **kwargs: Any) -> Any:
        graph = lowering.V.graph
        if _has_our_op(graph):
            return _expression(graph.current_node.meta["val"])
        del lowering.lowerings[target]
        try:
            return graph.call_function(target, args, kwargs)  # as torch does without the rule
        finally:
            lowering.lowerings[target] = storage_offset

    if target not in lowering.lowerings:
        lowering.lowerings[target] = storage_offset


#: Whether a graph has a call of one of our ops.
_with_our_op: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _has_our_op(graph: Any) -> bool:
    while hasattr(graph, "parent"):  # the graph of a subgraph
        graph = graph.parent
    if graph not in _with_our_op:
        modules = [each for each in graph.orig_gm.modules() if isinstance(each, torch.fx.GraphModule)]
        targets = {node.target for each in modules for node in each.graph.nodes if node.op == "call_function"}
        _with_our_op[graph] = not targets.isdisjoint(_called.values())
    return _with_our_op[graph]


def _expression(number: int | torch.SymInt) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else int(number)


def keep_calls_apart(overload: OpOverload) -> None:
    """Two calls of a random op on equal arguments are two: before torch 2.15 only the ops of this list are spared."""
    random_ops = importlib.import_module("torch._functorch.compile_utils").rand_ops
    if overload.overloadpacket not in random_ops:
        random_ops.append(overload.overloadpacket)


# Tables of inductor and of export: what an op is decomposed to, and what it is lowered to -----------------------------

#: Without: decompositions and lowerings are not followed
#: ``"inductor"`` or ``"export"`` -> op -> the function to take the op apart, which may return NotImplemented;
#: ``"lowering"`` -> op -> a function of fake tensors, in plain torch code, that inductor lowers in its place: `_lower`.
_tables: dict[str, dict[OpOverload, Callable[..., Any]]] = {"inductor": {}, "export": {}, "lowering": {}}
#: The ops that a node of our own calls, by name.
_called: dict[str, OpOverload] = {}


def enter(overload: OpOverload, table: str, fn: Callable[..., Any]) -> Callable[[], None]:
    """Let compilers take `fn` in the place of an op, by one of the tables above. Return the undo."""
    _tables[table][overload] = fn
    _tell_inductor(overload)

    def forget() -> None:
        if _tables[table].get(overload) is fn:
            del _tables[table][overload]
        _tell_inductor(overload)

    return forget


def call(overload: OpOverload) -> None:
    """Let a node of our own call an op."""
    _called[overload._name] = overload
    _tell_inductor(overload)


def trace(qualname: str) -> None:
    """Let nodes of our own call an op of ours that is being traced, and its variant for functionalization."""
    if qualname not in _called and hasattr(torch_op_of(qualname), "_definition"):
        overload = overload_of(*qualname.partition(".")[::2])
        call(overload)
        if overload in _variants:
            call(_variants[overload])


def forget(overload: OpOverload) -> None:
    """Drop an op that was removed."""
    if _called.get(overload._name) is overload:
        del _called[overload._name]
        _tell_inductor(overload)


def load_decompositions() -> None:
    """Load inductor's table of decompositions if an op has a decomposition: AOTAutograd copies it before it traces."""
    if _tables["inductor"]:
        importlib.import_module("torch._inductor.decomposition")


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
    """Enter our ops in inductor's table of lowerings, except for ops that others have entered there."""
    for overload in ops or {*_called.values(), *_tables["lowering"], *_tables["inductor"]}:
        is_replaced = overload in _tables["lowering"] or overload in _tables["inductor"]
        if hasattr(module.lowerings.get(overload), "_customops") or is_replaced:
            # What is known of a call that was not lowered: inputs in memory, and with the strides that they had.
            module.lowerings.pop(overload, None)
            module.fallbacks.discard(overload)
            module.needs_realized_inputs.discard(overload)
            module._maybe_layout_constraints.pop(overload, None)
        if is_replaced or (_called.get(overload._name) is overload and overload not in module.lowerings):
            module.lowerings[overload] = _lowering_of(module, overload)
            if not is_replaced:
                module.needs_realized_inputs.add(overload)


def enter_in_export(module: Any) -> None:
    table = module.CustomDecompTable
    table.__init__ = followed(table.__init__, lambda made: made.decomp_table.update(_tables["export"]))


def _lowering_of(module: Any, overload: OpOverload) -> Callable[..., Any]:
    """Return inductor's rule for an op: lower the code that was registered for the op, else call its kernel."""

    def lowering(*args: Any, **kwargs: Any) -> Any:
        graph, fn = module.V.graph, _tables["lowering"].get(overload)
        lowered = NotImplemented if fn is None else _lower(fn, graph, args, kwargs)
        if lowered is not NotImplemented:
            return lowered
        if stated(overload, with_default=False) is not None:  # the tags of the op have prepared the arguments
            return call(*args, **kwargs)
        module.lowerings[overload] = call
        module._maybe_layout_constraints[overload] = module.tag_to_layout_constraint(stated(overload))
        try:
            return graph.call_function(overload, args, kwargs)  # which prepares the arguments, and comes to `call`
        finally:
            module.lowerings[overload] = lowering
            del module._maybe_layout_constraints[overload]

    def call(*args: Any, **kwargs: Any) -> Any:
        return _call(sys.modules["torch._inductor.ir"], overload, args, kwargs)

    stated: Any = torch._library.utils.get_layout_constraint_tag
    lowering._customops = True  # type: ignore[attr-defined]
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


@functools.cache
def _node(ir: Any) -> Any:
    """Return the class of our nodes."""

    class Call(ir.FallbackKernel):  # type: ignore[misc]
        """A call of an op of ours."""

        #: The tensors that the op writes to, if the graph allocates them for the call.
        allocated: Sequence[Any] = ()

        def __init__(self, layout: Any, kernel: OpOverload, *args: Any, **kwargs: Any) -> None:
            with _accepted(kernel):
                super().__init__(layout, kernel, *args, **kwargs)

        def get_inputs_that_alias_output(self) -> Sequence[str]:
            found: Sequence[str] = super().get_inputs_that_alias_output()
            return () if self.op_overload in allowed else found

        def codegen(self, wrapper: Any) -> None:
            _name_directly(self, wrapper, ir)
            super().codegen(wrapper)

    return Call


@contextlib.contextmanager
def _accepted(overload: OpOverload) -> Iterator[None]:
    """Let inductor accept an op that writes, and returns lists or numbers, like ops with a functionalization rule."""
    kernels, key = overload.py_kernels, torch._C.DispatchKey.Functionalize
    if overload not in allowed or key in kernels:
        yield
        return
    kernels[key] = overload
    try:
        yield
    finally:
        kernels.pop(key, None)


def _call(ir: Any, overload: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the results of a node that calls an op."""
    args, kwargs = _read_before_written(ir, overload, args, kwargs)
    node, out = _node(ir), _out_variant(overload)
    if out is None:
        made = node.create(overload, *args, **kwargs)
    elif ir.V.graph.cpp_wrapper or ir.V.graph.current_node.meta.get("unbacked_bindings"):
        made = _call_itself(ir, overload, args, kwargs)
    else:
        return _call_out(ir, overload, out, args, kwargs)
    return tree_map(lambda each: each.wrap_for_lowering() if isinstance(each, ir.IRNode) else each, made)


#: May tensors in a graph be conjugate or negative views? These are views of complex ones, or come from outside.
_lazy: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _name_directly(node: Any, wrapper: Any, ir: Any) -> None:
    """Let a node call a function of ours, if it may."""
    graph, overload, is_allocated = ir.V.graph, node.op_overload, bool(node.allocated)
    if not isinstance(overload, OpOverload) or graph.cpp_wrapper or graph.aot_mode or graph.fx_wrapper:
        return
    for each in node.inputs:
        if not isinstance(each, ir.IRNode) or isinstance(each, ir.NonTensorObj) or not each.has_tensor_output():
            return
    types = {each.get_device().type for each in node.inputs}
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
    options = ", allocated=True" * is_allocated + (f", kernel={kernel!r}" if kernel is not None else "")
    readable = re.sub(r"[^0-9A-Za-z_]", "_", f"{overload._name}_{kernel}" if kernel else overload._name)
    number = zlib.crc32(f"{overload._name}{kernel or ''}".encode())
    name = f"customops_{readable}_{number:08x}_{device}{'_allocated' * is_allocated}"
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
# torch calls the overload of an op with `Tag.out` in its place, and allocates what that overload writes to. The code
# for that (2.13, 2.15) is right for few ops. For an op with one result it passes all tensors first, then all numbers,
# in the wrong order; the tensors of a list one by one; those given by keyword a second time. For an op with several
# results, it does not allocate results that the program does not use, and fails where sizes are symbols. So the nodes
# made here allocate the results, and call the variant of the overload that returns nothing.

#: Without: inductor does not call out variants, or calls them with other arguments
#: The variant for functionalization of an overload that has one: of an out op, the variant returns nothing.
_variants: dict[OpOverload, OpOverload] = {}


def enter_variant(overload: OpOverload, variant: OpOverload) -> Callable[[], None]:
    """Enter the variant of an overload. Return the undo."""
    _variants[overload] = variant

    def forget() -> None:
        _variants.pop(overload, None)

    return forget


def _out_variant(overload: OpOverload) -> OpOverload | None:
    """Return the overload with `Tag.out` of an op, if it is an op of ours."""
    module: Any = importlib.import_module("torch._library._out_variant")
    found = module.to_out_variant(overload) if module._is_functional(overload._schema) else None
    return found if found in _variants else None


def _processed(ir: Any, overload: OpOverload, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the results of a call as fakes, its tensors, the other arguments, how to join both, and new symbols."""
    with ir.V.graph.fake_mode:
        found = _node(ir).process_kernel(overload, *args, **kwargs)
    return found if isinstance(found, tuple) else tuple(vars(found).values())  # the latter since torch 2.15


def _call_out(ir: Any, overload: OpOverload, out: OpOverload, args: Any, kwargs: Any) -> Any:
    """Allocate the results of a call, and let a node fill them."""
    expected, *_ = _processed(ir, overload, args, kwargs)
    empty = sys.modules["torch._inductor.lowering"].lowerings[torch.ops.aten.empty_strided.default]
    results = [
        empty([*map(_expression, x.shape)], [*map(_expression, x.stride())], dtype=x.dtype, device=x.device)
        for x in ([expected] if isinstance(expected, torch.Tensor) else expected)
    ]
    variant, arguments = _variants[out], out._schema.arguments
    written = [argument.name for argument in arguments if argument.is_write]
    kwargs = {**kwargs, **dict(zip(written, results, strict=True))}
    # The variant has the same arguments, some of them by other names.
    names = {one.name: other.name for one, other in zip(arguments, variant._schema.arguments, strict=True)}
    _node(ir).create(variant, *args, **{names[name]: value for name, value in kwargs.items()})
    ir.V.graph.operations[-1].allocated = results
    return results[0] if isinstance(expected, torch.Tensor) else tuple(results)


def _call_itself(ir: Any, overload: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the results of a node that calls the op although the op has an out variant."""
    expected, tensors, others, join, symbols = _processed(ir, overload, args, kwargs)
    device = _node(ir).find_device(tensors, expected)
    call = _node(ir)(
        ir.MultiOutputLayout(device=device), overload, tensors, others, join, kwargs=kwargs, unbacked_bindings=symbols
    )
    is_one = isinstance(expected, torch.Tensor)
    results = [
        ir.MultiOutput(call.tensor_to_layout(x), call, [] if is_one else [(tuple, i)])
        for i, x in enumerate([expected] if is_one else expected)
    ]
    call.outputs = results
    return results[0] if is_one else tuple(results)


# Writes in place ------------------------------------------------------------------------------------------------------
# In a functional graph a copy of an old value is the old value, so inductor drops the copy. Then inductor lets an op
# write in place if no later node uses the old value. It does not consider that the op itself may read the old value
# (pytorch/pytorch#198031). So the arguments that an op reads get memory of their own.


#: Without: in compiled graphs, an op may read what it has already written
def _read_before_written(ir: Any, overload: OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call, with copies of tensors that share memory with a tensor that the op writes to."""
    if not overload._schema.is_mutable:
        return args, kwargs
    arguments = overload._schema.arguments
    values = {**dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}
    written = [
        x for each in arguments if each.is_write for x in tree_leaves(values.get(each.name)) if isinstance(x, ir.IRNode)
    ]
    for x in written:
        x.realize()

    def apart(x: Any) -> Any:
        if not isinstance(x, ir.TensorBox):
            return x
        x.realize()
        if not any(_may_overlap(x, each) for each in written):
            return x
        return ir.ExternKernel.require_exact_strides(ir.ExternKernel.copy_input(x), x.get_stride())

    read = {each.name for each in arguments if not each.is_write}
    named = zip((each.name for each in arguments), args, strict=False)
    args = tuple(tree_map(apart, value) if name in read else value for name, value in named)
    return args, {name: tree_map(apart, value) if name in read else value for name, value in kwargs.items()}


def _may_overlap(one: Any, other: Any) -> bool:
    """Return whether two tensors of inductor may have an element in common."""
    layouts = one.get_layout(), other.get_layout()
    numbers = [[[*each.size], [*each.stride], [each.offset]] for each in layouts]
    if one.get_name() != other.get_name():
        return False
    if not all(getattr(n, "is_number", True) for each in numbers for values in each for n in values):
        return True
    tensors, firsts = [], []
    for layout, values in zip(layouts, numbers, strict=True):
        size, stride, (offset,) = ([int(n) for n in of] for of in values)
        tensors.append(torch.empty_strided(size, stride, dtype=layout.dtype, device="meta"))
        firsts.append(offset * tensors[-1].element_size())
    return overlap(tensors[0], tensors[1], firsts[0], firsts[1])


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
