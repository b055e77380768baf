"""The reference: a plain PyTorch function that computes what the op does, and the rules that follow from it.

The function takes the arguments of the op; that of an op with ``Tag.out`` takes none of those that are written. It
writes nothing: it returns what the op returns, then the new value of each argument that the op writes and does not
return. What follows from it counts only where no rule of the kind was registered by hand.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Undo, nothing
from customops._dispatch.results import given, mutated_results
from customops._dispatch.rule import Rule
from customops._places import where
from customops._schema.model import Names, Schema
from customops._torch.schema import Tag
from customops._torch.trees import tensors_in
from customops.errors import KernelError, RegistrationError, check_choice, describe

__tracebackhide__ = True  # pytest leaves the frames out

#: Stands for a tensor.
_TENSOR = object()

#: The rules that a reference can give: "kernel" for devices without one, "inductor" and "export" for decompositions.
Given = Literal["fake", "gradients", "vmap", "flops", "kernel", "inductor", "export"]


class ReferenceOptions(TypedDict, total=False):
    """The options of `CustomOpDef.register_reference`."""

    gives: Given | Iterable[Given]
    recompute: bool
    nondiff_args: Names
    grads_of: Names | None


class Reference:
    """The plain function of an op, in the forms in which rules need it.

    Raises:
        CallbackError: `fn` cannot be called with the op's arguments.
        RegistrationError: `gives` has an invalid value.
    """

    def __init__(self, fn: Fn, operator: OperatorHandle, options: ReferenceOptions) -> None:
        self.op, self.schema, schema = operator.qualname, operator.schema, operator.schema
        #: Did the user state the rules? If so, a rule that is not possible raises.
        self.options, self.is_stated = options, "gives" in options
        self.gives = self._names(options.get("gives", ("fake", "gradients", "vmap", "flops")))
        self.written = [argument.name for argument in schema.mutated]
        #: The arguments that the function does not take.
        self.left_out = {*self.written} if Tag.out in operator.tags else set()
        taken = Schema(tuple([a for a in schema.arguments if a.name not in self.left_out]), schema.returns)
        self.plain = fn
        self.fn = bind_kernel(fn, taken, self.op, "reference", warn=operator.library is not None)
        aliases = {argument.alias: argument.name for argument in schema.mutated}
        #: For each return, the written argument that it is, or None.
        self.returned = [aliases.get(ret.alias) if ret.alias is not None else None for ret in schema.returns]
        #: The written arguments whose new values come after the returns.
        self.extra = [name for name in self.written if name not in self.returned]
        self.returns_list = any(ret.type.endswith("]") or ret.type.startswith("(") for ret in schema.returns)
        self.mutated_results = mutated_results(schema, operator.tags)

    def _names(self, gives: Any) -> frozenset[str]:
        names = tuple(gives) if isinstance(gives, Iterable) and not isinstance(gives, str) else (gives,)
        for name in names:
            check_choice("gives", name, Given, self.op, RegistrationError)
        return frozenset(names)

    def shown(self, form: Fn) -> Fn:
        """One of the forms below, which errors show as the function of the user."""

        def shown(*args: Any, **kwargs: Any) -> Any:
            return form(*args, **kwargs)

        return functools.update_wrapper(shown, self.plain, updated=())

    def values(self, /, *args: Any, **kwargs: Any) -> list[Any]:
        """What the function computes: a value for each return, then the new values of `extra`."""
        if self.left_out:
            kwargs = {name: value for name, value in kwargs.items() if name not in self.left_out}
        try:
            result, count = self.fn(*args, **kwargs), len(self.returned) + len(self.extra)
        except RecursionError as error:
            problem, place = "the reference calls the op itself, without end", where(self.plain)
            fix = "write it with torch's operations, or call other ops"
            raise KernelError(problem, op=self.op, where=place, fix=fix) from error
        is_value = count == 1 and self.returns_list and not (isinstance(result, tuple) and len(result) == 1)
        found = list(result) if isinstance(result, tuple) and not is_value else [result]
        if len(found) != count or (None in found[len(self.returned) :] and result is None):
            then = f", then the new value of {', '.join(self.extra)}" if self.extra else ""
            raise KernelError(
                "the reference does not return what the op does",
                op=self.op,
                expected=f"{len(self.returned)} results{then}",
                got=describe(result),
                where=where(self.plain),
                fix="a reference writes nothing: return new values" if self.written else "return the results",
            )
        return found

    def new_values(self, values: list[Any]) -> Iterator[tuple[str, Any]]:
        """The written arguments, by name, and their new values."""
        names = [*self.returned, *self.extra]
        return ((name, value) for name, value in zip(names, values, strict=True) if name is not None)

    def returns(self, values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the op returns, of its results and its arguments."""
        if self.mutated_results is not None:
            return self.mutated_results(args, kwargs)
        results = values[: len(self.returned)]
        return tuple(results) if len(results) > 1 else results[0] if results else None

    def kernel(self, /, *args: Any, **kwargs: Any) -> Any:
        """Do what the op does: make new results, and write."""
        values = _own(self.values(*args, **kwargs), args, kwargs)
        arguments = {argument.name: value for argument, value in given(self.schema, args, kwargs)}
        for name, value in self.new_values(values):
            _write(arguments[name], value)
        return self.returns(values, args, kwargs)

    def to_differentiate(self, grads_of: Sequence[str]) -> Fn:
        """The function as `RecomputedFormula` takes it: it returns what the op does, then the values of `grads_of`."""

        def function(*args: Any, **kwargs: Any) -> Any:
            values = self.values(*args, **kwargs)
            new = dict(self.new_values(values))
            return *values[: len(self.returned)], *(new[name] for name in grads_of)

        return self.shown(function)

    def fake(self, /, *args: Any, **kwargs: Any) -> Any:
        """The fake impl: the function, run on tensors without data."""
        if self.schema.is_view:
            return self.returns(self.values(*args, **kwargs), args, kwargs)
        values = _torch.dispatcher.call_plainly_in_trace(self.values, *args, **kwargs)
        return self.returns(_own(values, args, kwargs), args, kwargs)

    def batched(
        self, info: Any, in_dims: Sequence[Any], operands: tuple[Any, ...], others: dict[str, Any], call: Fn
    ) -> Any:
        """The results for a batch, which is in front, by torch's own batching of the function. The writes are done.

        Args:
            info, in_dims: as vmap rules get them.
            operands: what may be batched.
            others: the other arguments, by name.
            call: calls a function with these.
        """
        structure: list[Any] = []

        def function(*args: Any) -> tuple[Tensor, ...]:
            leaves, spec = _torch.trees.tree_flatten(call(self.values, *args, **others))
            structure[:] = [_TENSOR if isinstance(x, Tensor) else x for x in leaves], spec
            return tuple([x for x in leaves if isinstance(x, Tensor)])

        results = _torch.autograd.vmap_anew(function, tuple(in_dims), info.randomness, operands)
        expanded = [x.layout is torch.strided and 0 in x.stride() for x in results]  # what was not batched
        found = iter([x.clone() if each else x for x, each in zip(results, expanded, strict=True)])
        leaves, spec = structure
        values = _torch.trees.tree_unflatten([next(found) if x is _TENSOR else x for x in leaves], spec)
        values = _own(values, operands, others)
        names = [argument.name for argument in self.schema.operands]
        targets = dict(zip(names, map(_batch_first, operands, in_dims), strict=True))
        for name, value in self.new_values(values):
            _write(targets[name], value)
        return None if self.mutated_results is not None else self.returns(values, operands, others)

    def flops(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The floating-point operations of a call, as `torch.utils.flop_counter` counts those of the function."""
        counter = importlib.import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
        with _torch.fakes.stand_ins(args, kwargs) as (args, kwargs), counter:
            self.values(*args, **kwargs)
        return int(counter.get_total_flops())


class ReferenceRule(Rule[None, Reference]):
    """The reference of an op. The rules that it gives are values of the other rules."""

    #: Called after each change.
    follow: Callable[[], None]

    def _install(self, _: None, own_library: bool) -> Undo:
        return nothing

    def bind(self, operator: OperatorHandle) -> None:
        """Leave the rules that the reference gives to the other rules, which put themselves into the op."""
        self.operator = operator

    def _changed(self) -> None:
        self.follow()


def _own(values: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The values, each in memory of its own: a plain function may return an argument, or a view of one."""
    seen = {*map(_torch.memory.memory_or_id, tensors_in((*args, *kwargs.values())))}

    def own(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [own(item) for item in value]
        if isinstance(value, Tensor):
            value = value.clone() if _torch.memory.memory_or_id(value) in seen else value
            seen.add(_torch.memory.memory_or_id(value))
        return value

    return [own(value) for value in values]


def _write(target: Any, value: Any) -> None:
    """Give a tensor, or those of a list, new values; there may be none."""
    if isinstance(target, Tensor):
        target.copy_(value)
    else:
        for one, other in zip(target or (), value or (), strict=True):
            _write(one, other)


def _batch_first(value: Any, dim: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_batch_first(*pair) for pair in zip(value, dim, strict=True)]
    return value.movedim(dim, 0) if isinstance(value, Tensor) and dim is not None else value
