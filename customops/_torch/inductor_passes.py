"""Writes in place: where inductor decides for one, what the op reads beside must have memory of its own.

In a functional graph a copy of an old value is the old value, so inductor drops the copy. Then it looks whether what an
op writes is used later, and lets the op write in place if not; it does not look whether the op itself reads it, too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from customops._torch.late import when_imported
from customops._torch.library import torch_op_of
from customops._torch.tensors import TorchDispatchMode, overlap, storage_id, tree_flatten, tree_unflatten
from customops._torch.thread_state import call_plainly_in_trace


#: Without: in compiled graphs, an op may read what it has already written
def _change_pass(reinplace: Any) -> None:
    original = reinplace.reinplace_inplaceable_ops_core

    def core(graph: torch.fx.Graph) -> None:
        _separate(graph)
        original(graph)

    reinplace.reinplace_inplaceable_ops_core = core


when_imported("torch._inductor.fx_passes.reinplace", _change_pass)


def _separate(graph: torch.fx.Graph) -> None:
    """Copy what an op of ours reads, where that may be memory that it writes."""
    functional = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in functional and _is_ours(node.args[0]):
            written, tensors = [*_written(node)], set(_arguments(node, written=True))
            for read in dict.fromkeys(_arguments(node, written=False)):
                if read not in tensors and any(_may_overlap(read.meta["val"], each) for each in written):
                    _copy(graph, node, read)


def _is_ours(overload: Any) -> bool:
    if not isinstance(overload, torch._ops.OpOverload):
        return False
    return hasattr(torch_op_of(overload._name.replace("__writes", "")), "_definition")


def _arguments(node: torch.fx.Node, *, written: bool) -> Iterator[torch.fx.Node]:
    """The tensors among the arguments of a call, by what the schema says of them."""
    overload: Any = node.args[0]
    for argument in overload._schema.arguments:
        if (argument.alias_info is not None and argument.alias_info.is_write) is written:
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
        name: given if name == "_all_bases" else _replaced(given, read, copy) for name, given in node.kwargs.items()
    }


def _replaced(given: Any, old: torch.fx.Node, new: torch.fx.Node) -> Any:
    if isinstance(given, (list, tuple)):
        return type(given)(_replaced(each, old, new) for each in given)
    return new if given is old else given


def _may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """May two tensors of a graph have an element in common?"""
    if storage_id(one) != storage_id(other):
        return False
    numbers = [n for x in (one, other) for n in (x.storage_offset(), *x.shape, *x.stride())]
    if not all(type(number) is int for number in numbers):
        return True  # symbols
    first, first_of_other = (int(x.storage_offset()) * x.element_size() for x in (one, other))
    return overlap(one, other, first, first_of_other)


# Patterns of inductor: plain code in a graph that is replaced by a call of an op --------------------------------------


#: Without: plain code is not replaced by ops in compiled graphs
class Pattern(NamedTuple):
    """Code to look for, and what takes its place; both are functions of tensors and floats."""

    op: str
    search: Callable[..., Any]
    replace: Callable[..., Any]
    #: Arguments that the code is traced with. Tensors stand for those of their dtype and number of dimensions.
    examples: Callable[[], Iterable[tuple[Any, ...]]]
    floats: dict[str, float]  #: arguments that are numbers in the code, with a value that nothing else has
    has_gradient: Callable[[], bool]


_patterns: list[Pattern] = []


def add_pattern(pattern: Pattern) -> Callable[[], None]:
    """Let inductor look for a pattern in graphs; the result ends that."""
    _patterns.append(pattern)
    _forget_traced()
    return lambda: _remove(pattern)


def ops_of_patterns() -> set[str]:
    """The names of the ops that may come into any graph."""
    return {pattern.op for pattern in _patterns}


def _remove(pattern: Pattern) -> None:
    _patterns[:] = [each for each in _patterns if each is not pattern]
    _forget_traced()


class _Pass:
    """The pass of inductor that replaces the patterns. They are traced when the first graph comes."""

    def __init__(self) -> None:
        self.traced: Any = None

    def apply(self, graph: Any) -> int:
        if not _patterns:
            return 0
        traced = self.traced  # another thread may forget it meanwhile
        if traced is None:
            matcher = importlib.import_module("torch._inductor.pattern_matcher")
            with torch.utils._python_dispatch._disable_current_modes(), torch.random.fork_rng(devices=()):
                examples = [(pattern, list(pattern.examples())) for pattern in _patterns]
            # torch 2.11 passes the device of the graph
            traced = matcher.init_once_fakemode(lambda *_: self._trace_all(matcher, examples))()
        count: int = traced.apply(graph)
        return count

    def _trace_all(self, matcher: Any, examples: list[tuple[Pattern, list[tuple[Any, ...]]]]) -> Any:
        traced = matcher.PatternMatcherPass()
        for pattern, each in examples:
            for example in each:
                try:
                    _trace(matcher, traced, pattern, example, each)
                except Exception as error:  # other programs, that may not even have the op, are to be compiled
                    warnings.warn(
                        f"{pattern.op}: a pattern of register_replacement cannot be traced, and is left out: {error!r}",
                        stacklevel=2,
                    )
        self.traced = traced
        return traced


_pass = _Pass()


def _forget_traced() -> None:
    _pass.traced = None


def _add_pass(joint: Any) -> None:
    joint.pass_patterns.insert(0, _pass)  # before torch's own, which may take parts of the code


when_imported("torch._inductor.fx_passes.joint_graph", _add_pass)


def _trace(
    matcher: Any, traced: Any, pattern: Pattern, example: tuple[Any, ...], examples: list[tuple[Any, ...]]
) -> None:
    """Add a pattern as it is in graphs with gradients and in those without. For several samples it may be the same."""
    for trace in (matcher.joint_fwd_bwd, matcher.fwd_only) if pattern.has_gradient() else (matcher.fwd_only,):
        matcher.register_replacement(
            pattern.search,
            pattern.replace,
            [_stand_in(each, trace is not matcher.fwd_only) for each in example],
            trace,
            traced,
            extra_check=functools.partial(_fits, pattern, examples),
            scalar_workaround=pattern.floats,
            skip_duplicates=True,
        )


def _fits(pattern: Pattern, examples: list[tuple[Any, ...]], match: Any) -> bool:
    """Is the code that was found one for tensors like those of a sample, and would the op return the same kind?

    torch looks at the operations alone: they may be of other dtypes, broadcast, or have a number where a tensor was.
    """
    names = inspect.signature(pattern.search).parameters
    # torch 2.11 matches numbers as constants, which are not in kwargs; any number gives the same shapes
    given = [_value_of(match.kwargs.get(name, pattern.floats.get(name))) for name in names]
    if not any(all(map(_is_same_value, given, example)) and _sizes_are_like(given, example) for example in examples):
        return False
    results = [each for each in tree_leaves(pattern.replace(*given)) if isinstance(each, torch.Tensor)]
    found = [_value_of(node) for node in match.output_nodes()]
    return len(results) <= len(found) and all(map(_looks_same, results, found))


def _value_of(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, torch.fx.Node) else value


def _is_same_value(value: Any, example: Any) -> bool:
    if not isinstance(example, torch.Tensor):
        return type(value) is float
    return isinstance(value, torch.Tensor) and (value.dtype, value.dim(), value.device) == (
        example.dtype,
        example.dim(),
        example.device,
    )


def _sizes_are_like(values: list[Any], examples: tuple[Any, ...]) -> bool:
    """Are those sizes equal that are equal in the sample?"""
    known: dict[int, Any] = {}
    pairs = ((v, e) for v, e in zip(values, examples, strict=True) if isinstance(e, torch.Tensor))
    sizes = (
        (size, wanted) for value, example in pairs for size, wanted in zip(value.shape, example.shape, strict=True)
    )
    return all(_is_true(known.setdefault(wanted, size) == size) for size, wanted in sizes)


def _looks_same(one: torch.Tensor, other: Any) -> bool:
    if not isinstance(other, torch.Tensor) or (one.dtype, one.dim()) != (other.dtype, other.dim()):
        return False
    lengths = zip((*one.shape, *one.stride()), (*other.shape, *other.stride()), strict=True)
    return all(_is_true(a == b) for a, b in lengths)


def _is_true(condition: Any) -> bool:
    """Is it known, without a guard on sizes that are symbols?"""
    symbols = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return bool(symbols.statically_known_true(condition))


def _stand_in(value: Any, requires_grad: bool) -> Any:
    """A tensor of the same kind without data, made under the fake mode that is active."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(
        value.size(),
        value.stride(),
        dtype=value.dtype,
        device=value.device,
        requires_grad=requires_grad and value.is_floating_point(),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Plain torch code that is traced in the place of an operator: what it must not do, and what it has to return

#: Without: decompositions and lowerings are not looked at, and inductor refuses them
_C: Any = torch._C

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
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    declined = False

    def on_tensors(*given: torch.Tensor) -> Any:
        nonlocal declined
        for i, tensor in zip(places, given, strict=True):
            leaves[i] = tensor
        inner_args, inner_kwargs = tree_unflatten(leaves, spec)
        result = fn(*inner_args, **inner_kwargs)
        declined = result is NotImplemented
        return () if declined else result

    with _Watch(tensors, fault, random):
        result = call_plainly_in_trace(torch.func.functionalize(on_tensors), *tensors)
    if declined:
        return NotImplemented
    _compare(result, _expected(overload, args, kwargs), fault)
    return _without_aliases(result, tensors)


class _Watch(TorchDispatchMode):
    """Raises for what a function does that code in the place of an operator may not do."""

    def __init__(self, tensors: list[torch.Tensor], fault: Fault, random: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = {_memory(tensor) for tensor in tensors}
        self.fault, self.random = fault, random

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            self._look(func, args, kwargs)
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default  # of forward mode; inductor reads its memory, which it has none
        return func(*args, **kwargs)

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        if func._schema.is_mutable and any(
            _memory(tensor) in self.given for tensor in _written_arguments(func, args, kwargs)
        ):
            raise self.fault("writes to an argument", "new tensors, and no writes to what it is given", str(func))
        if not self.random and torch.Tag.nondeterministic_seeded in func.tags:
            raise self.fault("draws random numbers", "code that does not; a decomposition may", str(func))
        if func is torch.ops.aten.lift_fresh.default:
            return  # torch.tensor(...)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dim():
                got = f"a tensor with data, of shape {tuple(tensor.shape)}, in {func}"
                raise self.fault("uses a tensor that is not an argument", "tensors that the op is given", got)


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    named = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    positions = {argument.name: i for i, argument in enumerate(func._schema.arguments)}
    values = [kwargs.get(a.name, args[positions[a.name]] if positions[a.name] < len(args) else None) for a in named]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    """Which memory a tensor lies in: the same number for its views."""
    return storage_id(tensor) if tensor.layout is torch.strided and not tensor.is_nested else id(tensor)


def _without_aliases(result: Any, tensors: list[torch.Tensor]) -> Any:
    taken = {_memory(tensor) for tensor in tensors}
    leaves, spec = tree_flatten(result)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[i] = leaf.clone() if _memory(leaf) in taken else leaf
            taken.add(_memory(leaves[i]))
    return tree_unflatten(leaves, spec)


# What the fake impl says ---------------------------------------------------------------------------------------


def _expected(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    proxies: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch._subclasses.FakeTensor)]
    env = leaves[0].fake_mode.shape_env if leaves else None
    with proxies.disable_proxy_modes_tracing():
        if env is None:
            return overload(*args, **kwargs)
        with env.ignore_fresh_unbacked_symbols():
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
    return same and not any(map(_differ, got.shape, want.shape))


def _differ(size: Any, other: Any) -> bool:
    """Are two sizes known to differ? Sizes that depend on data are not known."""
    sizes = [each.node.hint if isinstance(each, torch.SymInt) else each for each in (size, other)]
    return None not in sizes and sizes[0] != sizes[1]


def _count(result: Any) -> str:
    if isinstance(result, (list, tuple)):
        return f"a {type(result).__name__} of {len(result)}"
    return f"1 result ({_describe(result)})"


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
