"""Ops that write, under functionalization (AOTAutograd, torch.compile, export).

Functionalization turns a write into a value: a higher-order op takes the place of the op and returns what it would have
written, and each written argument is replaced by that. torch does so for every op that writes, but in two cases:

- An in-place or out op returns what it was given to write to. Functionalized, its result would be a tensor of its own,
  and nothing would say that it is the memory of the argument: a compiler hands that memory out again while the result
  is still in use. So a variant of the op that only writes, and returns nothing, takes its place, and the result is the
  argument.
- Some calls go through torch's first form of it: see `_torch.tensors.functionalize`.

Ops that also return lists or numbers are let through: torch's form can do that, but refuses them.

An op that is traceable is not kept whole at all: its function runs in its place, and compilers see what that calls. So
it is under AOTAutograd, the front of inductor. An export keeps the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from customops import _torch
from customops._codegen.kernel import function_at
from customops._dispatch.callbacks import Fn, bind, filler
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Slots, Undo, lock, nothing
from customops._dispatch.results import mutated_results
from customops._schema.model import Schema
from customops._torch.tensors import tensors_in
from customops.errors import CallbackError, UnsupportedError, brief


def bind_functionalization(operator: OperatorHandle, kernel: Fn | None) -> None:
    """Nothing to register: the schema says what the op writes, and `kernel`, which came with it, what it does."""
    if not operator.has_own_rules:
        return
    writes, variant = operator.schema.mutated and not operator.schema.is_view, operator.mutation_only
    overload = operator.overload
    if writes and variant is not None:

        def write(*args: Any, **kwargs: Any) -> None:  # the variant of an in-place or out op that returns nothing
            overload(*args, **kwargs)

        variant.impl(_torch.dynamo.outside_dynamo(write), "CompositeExplicitAutograd")
        variant.impl_fake(write, __file__)  # the fake of the op has its say
    elif writes and any(ret.type != "Tensor" for ret in operator.schema.returns):
        _torch.tensors.allow_any_returns(overload)
    traced = kernel if operator.spec.traceable else None
    if writes or traced is not None:
        rule = _rule(operator, bool(writes), traced)
        operator.impl_torch_dispatch(_torch.tensors.FunctionalTensorMode, rule)


def _rule(operator: OperatorHandle, writes: bool, kernel: Fn | None) -> Fn:
    """What FunctionalTensorMode does with a call of an op that writes, or is traceable: then it has a `kernel`."""
    schema, fill = operator.schema, filler(operator.schema)
    overload = operator.overload if operator.mutation_only is None else operator.mutation_only.overload
    mutated = mutated_results(schema, operator.tags)
    written = _written(schema)

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
                if not all(map(_torch.tensors.is_of_torch, types)):
                    return NotImplemented  # a subclass has the first say
                args, kwargs = fill(args, kwargs) if fill is not None else (args, kwargs)
                with mode:
                    return kernel(*args, **kwargs)
        if not writes:
            return mode.__torch_dispatch__(func, types, args, kwargs)
        result = _torch.tensors.functionalize(mode, overload, types, args, kwargs, written(args, kwargs))
        return result if mutated is None else mutated(args, kwargs)

    return rule


def _written(schema: Schema) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]]:
    """``f(args, kwargs)``: the tensors that a call writes to."""
    positions = [i for i, argument in enumerate(schema.positional) if argument.is_mutated]
    names = [argument.name for argument in schema.keyword_only if argument.is_mutated]
    return lambda args, kwargs: tensors_in([*(args[i] for i in positions if i < len(args)), *map(kwargs.get, names)])


# Version counters of what an op writes to, and true views for view ops (the ADInplaceOrView key) ----------------------

__tracebackhide__ = True  # pytest leaves the frames out


def bind_ad_inplace_or_view(operator: OperatorHandle) -> None:
    """Nothing to register: the schema says which arguments are written and which returns are views."""
    schema = operator.schema
    if not operator.has_own_rules:
        return
    if schema.is_view and schema.mutated:
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
        function = function_at("ADInplaceOrView", operator, lambda: (_general(operator), None))
        operator.impl(function, "ADInplaceOrView", with_keyset=True)


def _general(operator: OperatorHandle) -> Callable[..., Any]:
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


# Ops that write, under selective checkpointing, and under a checkpoint that is compiled -------------------------------
# A policy of selective checkpointing may say that what an op returns is saved. When the forward is repeated, the op is
# then not run, and what it should have written is not there: the rest reads memory that nobody filled. So an op that
# writes is run each time. Where a checkpoint is compiled, the graph has the new values as tensors of their own: these
# are saved, because by then the memory that the op read holds what it has written.


def bind_checkpointing(operator: OperatorHandle) -> None:
    """Nothing to register: the schema says what the op writes."""
    if operator.schema.mutated and operator.has_own_rules:
        for mode in _torch.tensors.checkpoint_modes:
            operator.impl_torch_dispatch(mode, _run)


def _run(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    with _torch.tensors.saved_for_backward(mode):
        return func(*args, **(kwargs or {}))


# Rules for a TorchDispatchMode or a tensor subclass: what runs instead of its own ``__torch_dispatch__`` --------------


class TorchDispatchRule:
    """class -> rule. torch refuses a second rule for a class, so one function is registered, which reads the table."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._slots: Slots[type, Fn] = Slots(self._install_for, lambda: self.operator.recompile())

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        self._slots.reset()

    @property
    def rules(self) -> dict[type, Fn]:
        return self._slots.values

    def register(self, cls: type, fn: Fn) -> Registration:
        if not isinstance(cls, type):
            raise CallbackError(
                "a torch_dispatch rule is for a class: a TorchDispatchMode or a tensor subclass",
                op=self.operator.qualname,
                got=brief(cls),
                fix="register_torch_dispatch(MyMode, fn)",
            )
        bind(fn, self.operator.qualname, "torch_dispatch rule", "mode_or_cls", "func", "types", "args", "kwargs")
        return self._slots.set(cls, fn)

    def _install_for(self, cls: type, own_library: bool) -> Undo:
        slots, overload, op = self._slots, self.operator.overload, self.operator.qualname

        def rule(*args: Any, **kwargs: Any) -> Any:
            _torch.dynamo.traced(overload, op)  # the rule need not call the op, which would do it
            return slots.values[cls](*args, **kwargs)

        return self.operator.impl_torch_dispatch(cls, rule, own_library=own_library)


# The side effect of an op, by which compilers keep its calls and their order ------------------------------------------


class EffectRule:
    """The effect that was registered last. torch keeps it by the op's name, so that it is told anew when it changes."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._slots: Slots[None, Any] = Slots(lambda key, own_library: self._forget, self._tell_torch)
        self._undo: Undo = nothing

    def bind(self, operator: OperatorHandle) -> None:
        self.operator, self._undo = operator, nothing
        self._slots.reset()

    @property
    def effects(self) -> dict[None, Any]:
        return self._slots.values

    def register(self, effect: Any) -> Registration:
        return self._slots.set(None, effect)

    def _forget(self) -> None:
        undo, self._undo = self._undo, nothing
        undo()

    def _tell_torch(self) -> None:
        self._forget()
        if None in self._slots.values:
            self._undo = self.operator.impl_effect(self._slots.values[None])
