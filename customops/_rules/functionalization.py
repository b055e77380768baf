"""Ops that write, under functionalization (AOTAutograd, torch.compile, export).

Functionalization turns a write into a value: a higher-order op takes the place of the op and returns what it would have
written, and each written argument is replaced by that. torch does so for every op that writes, but in two cases:

- An in-place or out op returns what it was given to write to. Functionalized, its result would be a tensor of its own,
  and nothing would say that it is the memory of the argument: a compiler hands that memory out again while the result
  is still in use. So a variant that only writes, and returns nothing, takes its place; the result is the argument.
- Some calls go through torch's first form of it: see `_torch.functionalization.functionalize`.

Ops that also return lists or numbers are let through: torch's form can do that, but refuses them.

An op that is traceable is not kept whole at all: its function runs in its place, and compilers see what that calls. So
it is under AOTAutograd, the front of inductor. An export keeps the op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from customops import _torch
from customops._codegen.kernel import function_at
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import lock
from customops._dispatch.results import given, mutated_results
from customops._schema.defaults import filler
from customops._schema.model import Schema
from customops._torch.schema import Tag
from customops._torch.trees import tensors_in
from customops.errors import UnsupportedError

__tracebackhide__ = True  # pytest leaves the frames out


def bind(operator: OperatorHandle, kernel: Fn | None) -> None:
    """Install in an op of ours what its writes need. Functionalization runs `kernel`, of the op, if it is traceable."""
    schema, overload, traced = operator.schema, operator.overload, kernel if operator.spec.traceable else None
    writes, variant = bool(schema.mutated) and not schema.is_view, operator.mutation_only
    if writes and variant is not None:
        names = {other: name for name, other in operator.spec.reserved_names.items()}

        def write(*args: Any, **kwargs: Any) -> Any:
            result = overload(*args, **{names.get(name, name): value for name, value in kwargs.items()})
            return result if variant.schema.returns else None

        variant.impl(_torch.dynamo.outside_dynamo(write), "CompositeExplicitAutograd")
        variant.impl_fake(write, __file__)  # the fake of the op has its say
    functionalized = operator if variant is None else variant
    returns_more = writes and any(ret.type != "Tensor" for ret in functionalized.schema.returns)
    if returns_more:
        _torch.functionalization.allow_any_returns(functionalized.overload)
    if writes:
        _torch.library.enter_named_rule(operator.qualname, _PROXY, _record)
    if writes or traced is not None:
        operator.impl_torch_dispatch(
            _torch.functionalization.FunctionalTensorMode, _rule(operator, writes, traced, returns_more)
        )
    if schema.mutated:
        for mode in _torch.functionalization.checkpoint_modes:
            operator.impl_torch_dispatch(mode, _run_again)
    # The ADInplaceOrView key: version counters of what an op writes to, and true views for view ops.
    if schema.mutated and schema.is_view:
        # Torch's view kernel takes no op that writes as well. In inference mode, where it has no part, such an op runs.
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise UnsupportedError(
                "an op cannot both return a view and write to an argument",
                op=operator.qualname,
                got=str(schema),
                fix="split it into two ops, or call it under torch.inference_mode()",
            )

        operator.impl(_torch.dynamo.outside_dynamo(refuse), "ADInplaceOrView")
    elif schema.is_view:
        operator.impl_view_fallback()
    elif schema.mutated:
        # Counts the write, and calls the kernel of the device where it is what comes next, as at Autograd.
        function = function_at("ADInplaceOrView", operator, lambda: (_count_write(operator), None))
        operator.impl(function, "ADInplaceOrView", with_keyset=True)
    if writes and not {Tag.inplace, Tag.out} & {*operator.tags}:
        for key in ("Conjugate", "Negative"):
            operator.impl(_on_plain(operator), key, with_keyset=True)


def _rule(operator: OperatorHandle, writes: bool, kernel: Fn | None, returns_more: bool) -> Fn:
    """What FunctionalTensorMode does with a call of an op that writes, or is traceable: then it has a `kernel`."""
    schema, fill = operator.schema, filler(operator.schema)
    overload = operator.overload if operator.mutation_only is None else operator.mutation_only.overload
    mutated = mutated_results(schema, operator.tags)
    written, names = _written(schema), operator.spec.reserved_names

    def runs_kernel(tensors: list[Any]) -> bool:
        """Is what a call of the op would run its own function, and one that can be traced now?"""
        if not tensors or _torch.dynamo.interprets() or _torch.dynamo.keeps_ops():
            return False
        with lock:
            current = operator.kernel_on(_torch.dispatcher.device_key(tensors[0].device.type))
        return current is not None and current.registered is kernel

    def rule(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kernel is not None:
            _torch.dynamo.traced(operator.overload, operator.qualname)
            if runs_kernel(tensors_in((*args, *kwargs.values()))):
                if not all(map(_torch.functionalization.is_of_torch, types)):
                    return NotImplemented  # a subclass has the first say
                args, kwargs = fill(args, kwargs) if fill is not None else (args, kwargs)
                with mode:
                    return kernel(*args, **kwargs)
        if not writes:
            return mode.__torch_dispatch__(func, types, args, kwargs)
        _torch.patches.apply("writes")
        if returns_more:
            _torch.patches.apply("writes and returns")
        named = {names.get(name, name): value for name, value in kwargs.items()}
        result = _torch.functionalization.functionalize(mode, overload, types, args, named, written(args, kwargs))
        return result if mutated is None else mutated(args, kwargs)

    return rule


#: The mode of `make_fx`.
_PROXY = "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode"


def _record(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Record a call of an op that writes."""
    _torch.patches.apply("writes")
    return mode.__torch_dispatch__(func, types, args, kwargs or {})


def _written(schema: Schema) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]]:
    """``f(args, kwargs)``: the tensors that a call writes to."""
    positions = [i for i, argument in enumerate(schema.positional) if argument.is_mutated]
    names = [argument.name for argument in schema.keyword_only if argument.is_mutated]
    return lambda args, kwargs: tensors_in([*(args[i] for i in positions if i < len(args)), *map(kwargs.get, names)])


def _count_write(operator: OperatorHandle) -> Callable[..., Any]:
    """Go on below this key, then count the write, as torch does: modes below look at the version from before."""
    overload, after = operator.overload, _torch.dispatcher.after_adinplaceorview
    known, written = operator.fast_path.by_keyset, _written(operator.schema)

    def general(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if keyset.raw_repr() not in known:
            operator.find_fast_path(keyset)  # for the next call
        try:
            return overload.redispatch(keyset & after, *args, **kwargs)
        finally:
            increment_version(written(args, kwargs))

    return _torch.dynamo.outside_dynamo(general)


def _on_plain(operator: OperatorHandle) -> Callable[..., Any]:
    """Run the op on copies of tensors that are conjugated, or negated, when they are read; then write these.

    torch's own kernel for such tensors assumes that an op returns what it writes, which only in-place and out ops do.
    """
    overload, schema = operator.overload, operator.schema

    def rule(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [(each, x) for each, value in given(schema, args, kwargs) for x in tensors_in((value,))]
        lazy = {id(x): x for _, x in tensors if x.is_conj() or x.is_neg()}
        for (argument, x), (other, y) in itertools.product(tensors, repeat=2):
            if argument.is_mutated and id(x) in lazy and x is not y and _torch.memory.may_overlap(x, y):
                raise UnsupportedError(
                    "the op writes to a conjugate or negative view, and another tensor of the call has the same memory",
                    op=operator.qualname,
                    argument=argument.name,
                    got=f"memory that {other.name} has, too",
                    fix="pass x.resolve_conj().resolve_neg(), and copy what was written to where it belongs",
                )
        with _torch.dispatcher.below_autograd():
            plain = {key: x.clone() for key, x in lazy.items()}  # modes see it, as they do in torch
        others = _torch.trees.tree_map(lambda value: plain.get(id(value), value), (args, kwargs))
        result = overload.redispatch(keyset & _torch.dispatcher.after_lazy, *others[0], **others[1])
        with _torch.dispatcher.below_adinplaceorview():  # the write was counted there
            for key in {id(x) for argument, x in tensors if argument.is_mutated} & lazy.keys():
                lazy[key].copy_(plain[key])
        back = {id(copy): lazy[key] for key, copy in plain.items()}
        return _torch.trees.tree_map(lambda value: back.get(id(value), value), result)

    return _torch.dynamo.outside_dynamo(rule)


def _run_again(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Run an op that writes under selective checkpointing, and under a checkpoint that is compiled.

    A policy may say that what the op returns is saved. It would then not be run when the forward is repeated, and the
    rest would read memory that nobody filled. Where a checkpoint is compiled, the graph has the new values as tensors
    of their own: these are saved, because by then the memory that the op read holds what it has written.
    """
    with _torch.functionalization.saved_for_backward(mode):
        return func(*args, **(kwargs or {}))
