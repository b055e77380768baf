"""vmap: how the op runs on batched tensors.

A rule is ``rule(info, in_dims, *args, **kwargs) -> (result, out_dims)``. `STRATEGIES` are rules for ops whose authors
need not write one, under the names (and with the meaning) that ``jax.pure_callback`` gives them. The first of them is
what an op of ours does without a rule.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.callbacks import Fn, WithoutDefaults, bind_kernel
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.random_states import RandomStates
from customops._dispatch.registrations import Registration, Undo
from customops._dispatch.rule import Rule
from customops._places import user_stacklevel, where
from customops._rules.reference import Reference
from customops._schema.defaults import filler
from customops._schema.model import Schema
from customops._torch.schema import Tag
from customops._torch.trees import tensors_in
from customops._versions import cached_property
from customops.errors import DefinitionError, KernelError, UnsupportedError, brief, describe

__tracebackhide__ = True  # pytest leaves the frames out


class VmapRule(Rule[None, Fn]):
    """The batching rule of one op. Without one, an op of ours is called once for each element.

    torch's fallback, which ops of others keep, does not support ops that take lists, write, or return other values.
    """

    _with_op: tuple[None, ...] = (None,)
    _default: Fn | None = None
    #: What is called with batched tensors as long as no rule is registered, if it is another than the default rule.
    without_rule: Fn | None = None

    @cached_property
    def operands(self) -> Operands:
        return Operands(self.operator.schema)

    def derive(self, reference: Reference) -> Registration:
        """Batch the reference where no rule is registered by hand."""
        return self.set(None, _Strategy(BY_REFERENCE, self.operator, reference), is_derived=True)

    def register(self, rule: Fn | str) -> Registration:
        fn = _Strategy(rule, self.operator) if isinstance(rule, str) else rule
        schema, ours = self.operator.schema, self.operator.library is not None
        bound = bind_kernel(fn, schema, self.operator.qualname, "vmap rule", "info", "in_dims", warn=ours)
        return self.set(None, _Shorter(bound, schema) if isinstance(bound, WithoutDefaults) else bound)

    @property
    def registered(self) -> Fn | None:
        return self.values.get(None)

    @property
    def current(self) -> Fn:
        """The rule that counts now."""
        if self.registered is not None:
            return self.registered
        if self._default is None:
            warnings.warn(
                f"There is a performance drop: {self.operator.qualname} has no vmap rule, so it is called once for "
                'each element of the batch. Register one, or op.register_vmap("sequential") if that is what you want',
                UserWarning,
                stacklevel=user_stacklevel(),
            )
            self._default = _Strategy("sequential", self.operator)
        return self._default

    def _install(self, _: None, own_library: bool) -> Undo:
        operator, self._default = self.operator, None
        vmap = _trampoline(self, operator)
        undo = operator.impl(vmap, "FuncTorchBatched", own_library=own_library)
        if not operator.has_own_rules:  # it has what is registered, and nothing more
            return undo
        is_random = torch.Tag.nondeterministic_seeded in operator.tags
        if is_random or "Tensor[]?" in map(attrgetter("type"), operator.schema.arguments):
            operator.impl(_vmap_mode(self, vmap, is_random), "FuncTorchVmapMode", with_keyset=True)
        if operator.schema.mutated and Tag.inplace not in operator.tags:

            def refuse(*args: Any, **kwargs: Any) -> Any:
                """In the older vmap, of `autograd.grad`. It knows no rules, and its fallback no writes."""
                raise UnsupportedError(
                    "an op that writes, in autograd.grad(..., is_grads_batched=True) or another use of torch's older "
                    "vmap",
                    op=operator.qualname,
                    fix="torch.vmap(lambda grad: torch.autograd.grad(ys, xs, grad, retain_graph=True))(grads)",
                )

            operator.impl(_torch.dynamo.outside_dynamo(refuse), "Batched")
        return undo


def _trampoline(rule: VmapRule, operator: OperatorHandle) -> Fn:
    """The function at the key of batched tensors."""
    overload, op = operator.overload, operator.qualname

    def call_rule(others: dict[str, Any], info: Any, in_dims: tuple[Any, ...], /, *operands: Any) -> Any:
        """Call the rule that counts now. It returns a result, and for each tensor in it the dimension of the batch."""
        fn, problem = rule.current, None
        found = rule.operands.call(functools.partial(fn, info, in_dims), *operands, **others)
        if isinstance(fn, _Strategy):
            return found
        if not isinstance(found, tuple) or len(found) != 2:
            problem, got = "the vmap rule did not return two values", describe(found)
        else:
            result, dims = found
            pairs = [(result, dims)] if isinstance(result, Tensor) else []
            if isinstance(result, (list, tuple)) and isinstance(dims, (list, tuple)) and len(result) == len(dims):
                pairs = list(zip(result, dims, strict=True))
            for value, dim in pairs:
                if isinstance(value, Tensor) and isinstance(dim, int) and not -value.dim() <= dim < value.dim():
                    problem = f"the vmap rule returned an out_dim of {dim}"
                    got = f"a result of {value.dim()} dimensions"
        if problem is not None:
            raise KernelError(
                problem,
                op=op,
                expected="(result, out_dims), where out_dims says which dimension of the result is the batch",
                got=got,
                where=where(fn.rule.fn if isinstance(fn, _Shorter) else fn),
                fix="return result, 0 if the batch is the first dimension of the result",
            )
        return found

    def vmap(*args: Any, **kwargs: Any) -> Any:
        _torch.dynamo.traced(overload, op)  # a rule need not call the op, which would do it
        operands = rule.operands
        if operands.fill is not None:
            args, kwargs = operands.fill(args, kwargs)
        if rule.registered is None and rule.without_rule is not None:
            return rule.without_rule(*args, **kwargs)
        if _torch.dispatcher.autocast_is_on():  # inputs are cast, and the rule runs without it, as a kernel does
            key = _torch.dispatcher.casting_key(op, tensors_in((*args, *kwargs.values())))
            if key is not None:
                return overload.redispatch(key, *args, **kwargs)  # and comes back
            return _torch.dispatcher.call_without_autocast(vmap, *args, **kwargs)
        values, others = operands.join(args, kwargs)
        call = functools.partial(operands.call, overload, **others)
        return _torch.autograd.call_vmap_rule(functools.partial(call_rule, others), call, values)

    return _torch.dynamo.outside_dynamo(vmap)


def _vmap_mode(rule: VmapRule, vmap: Fn, is_random: bool) -> Fn:
    """The function that sees all calls inside vmap, also those in which nothing is batched.

    It goes on to the rule, if batched tensors are where the dispatcher does not look: in optional lists. The rule does
    not see random calls in which nothing is batched: torch takes them for calls that give every element the same.
    """
    operator, rest = rule.operator, _torch.autograd.below_vmap_mode()
    overload, op, batched = operator.overload, operator.qualname, _torch.dispatcher.DispatchKey.FuncTorchBatched

    def go_on(keyset: Any, is_batched: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_batched and not keyset.has(batched):
            return vmap(*args, **kwargs)
        return overload.redispatch(keyset & rest, *args, **kwargs)

    def vmap_mode(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not is_random:
            is_hidden = not keyset.has(batched) and _torch.autograd.Batch((args, kwargs)).is_batched
            return go_on(keyset, is_hidden, args, kwargs)
        batch = _torch.autograd.Batch((args, kwargs))
        # A rule of the user gets info.randomness, and decides.
        if batch.randomness == "error" and isinstance(rule.registered, (_Strategy, NoneType)):
            raise UnsupportedError(
                'a random op was called inside torch.vmap(..., randomness="error")',
                op=op,
                fix='torch.vmap(f, randomness="different") or "same"',
            )
        with _torch.autograd.without_vmap_mode():  # what the rule does with the op is not looked at again
            if batch.is_batched or batch.randomness != "different":
                return go_on(keyset, batch.is_batched, args, kwargs)
            if operator.schema.mutated:
                raise _unbatched_write(op, operator.schema.mutated[0].name)
            results = [go_on(keyset, False, args, kwargs) for _ in range(batch.size)]
            return batch.wrap(_stack(results, op))

    return _torch.dynamo.outside_dynamo(vmap_mode)


class Operands:
    """What may be batched: the positional arguments, then the tensors that are keyword-only."""

    def __init__(self, schema: Schema) -> None:
        self.arguments, self.fill = schema.operands, filler(schema)
        self.positional = len(schema.positional)
        self.names = tuple(argument.name for argument in schema.keyword_only_tensors)

    def join(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        others = {name: value for name, value in kwargs.items() if name not in self.names}
        return (*args, *(kwargs[name] for name in self.names)), others

    def call(self, fn: Callable[..., Any], /, *operands: Any, **others: Any) -> Any:
        named = dict(zip(self.names, operands[self.positional :], strict=True))
        return fn(*operands[: self.positional], **named, **others)


class _Shorter:
    """A rule that has no parameter for some arguments with a default; `in_dims` has no entry for them, either."""

    def __init__(self, rule: WithoutDefaults, schema: Schema) -> None:
        self.rule = rule
        self.tensors = [argument.name for argument in schema.keyword_only_tensors]

    def __call__(self, info: Any, in_dims: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
        short, named = self.rule.shorten(args, kwargs)
        of_tensors = zip(self.tensors, in_dims[len(args) :], strict=True)
        dims = (*in_dims[: len(short)], *(dim for name, dim in of_tensors if name in named))
        return self.rule.fn(info, dims, *short, **named)


# Strategies -----------------------------------------------------------------------------------------------------

STRATEGIES = ("sequential", "expand_dims", "broadcast_all")
#: That of an op with a reference, whose operations torch batches.
BY_REFERENCE = "reference"


class _Strategy:
    """A rule that calls the op: once for each element of the batch, and stacks what it returns; or once for all.

    For the latter, batches are in front. A tensor without one gets a dimension of size 1 there ("expand_dims"), or is
    expanded to the size of the batch ("broadcast_all"). With "reference" it does not call the op, but its reference.
    """

    def __init__(self, name: str, operator: OperatorHandle, reference: Reference | None = None) -> None:
        names = STRATEGIES if reference is None else (*STRATEGIES, BY_REFERENCE)
        if name not in names:
            raise DefinitionError(
                "there is no such vmap strategy",
                op=operator.qualname,
                expected=", ".join(map(repr, names)) + (", or a function" if reference is None else ""),
                got=brief(name),
            )
        if operator.schema.is_view:
            raise UnsupportedError(
                "a vmap strategy for an op that returns a view: its result would be a copy",
                op=operator.qualname,
                fix="register_vmap(fn)",
            )
        self.name, self.operator = name, operator
        self.reference = reference if name == BY_REFERENCE else None
        self.operands = Operands(operator.schema)
        self.is_random = torch.Tag.nondeterministic_seeded in operator.tags
        returns_written = Tag.inplace in operator.tags or Tag.out in operator.tags
        mutated = [i for i, argument in enumerate(operator.schema.operands) if argument.is_mutated]
        #: The operands that the op returns.
        self.returned = mutated if returns_written else []

    def __call__(self, info: Any, in_dims: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        operands, others = self.operands.join(args, kwargs)
        op, size, is_sequential = self.operator.qualname, info.batch_size, self.name == "sequential"
        # Each element of the batch would write its own value to one and the same tensor.
        for argument, value, dims in zip(self.operands.arguments, operands, in_dims, strict=True):
            pairs = zip(value, dims, strict=True) if isinstance(dims, list) else [(value, dims)]
            if argument.is_mutated and any(x is not None and dim is None for x, dim in pairs):
                raise _unbatched_write(op, argument.name)
        states: RandomStates | None = None
        if self.is_random and info.randomness == "same" and self.reference is None:
            problem = None
            if not is_sequential:
                problem = "by a strategy that calls it once for all elements"
            elif _torch.dispatcher.mode_count():
                problem = "while it is traced, or under another dispatch mode"
            if problem is not None:
                raise UnsupportedError(
                    f'a random op in torch.vmap(..., randomness="same") {problem}',
                    op=op,
                    fix='register_vmap(fn) that handles info.randomness, or randomness="different"',
                )
            states = RandomStates((*operands, *others.values()))

        def call(place: Callable[[Tensor, int | None], Tensor]) -> Any:
            """Call the op with what is made of each tensor and the dimension of its batch."""
            placed = [_map(place, *pair) for pair in zip(operands, in_dims, strict=True)]
            return self.operands.call(self.operator.live.overload, *placed, **others)

        def batch_first(x: Tensor, dim: int | None) -> Tensor:
            if dim is not None:
                return x.movedim(dim, 0)
            return x.unsqueeze(0) if self.name == "expand_dims" else x.expand(size, *x.shape)

        if self.reference is not None:
            result = self.reference.batched(info, in_dims, operands, others, self.operands.call)
        elif is_sequential:
            results = []
            for i in range(size):

                def element(x: Tensor, dim: int | None, i: int = i) -> Tensor:
                    return x if dim is None else x.select(dim, i)

                # With randomness="same" each call draws the same numbers; the last one moves the generators on.
                with states.again() if states is not None and i < size - 1 else contextlib.nullcontext():
                    results.append(call(element))
            result = _stack(results, op)
        else:
            result = call(batch_first)
        if not self.returned:
            return result, 0
        values, dims = [operands[i] for i in self.returned], [in_dims[i] for i in self.returned]
        return (values[0], dims[0]) if len(values) == 1 else (tuple(values), tuple(dims))


def _unbatched_write(op: str, argument: str) -> UnsupportedError:
    return UnsupportedError(
        "vmap over an op that writes to a tensor which is not batched itself",
        op=op,
        argument=argument,
        fix="batch that tensor too, e.g. expand it and clone",
    )


def _map(fn: Callable[[Tensor, int | None], Any], value: Any, dims: Any) -> Any:
    """Apply `fn` to a tensor, or to the tensors of a list; other values stay."""
    if isinstance(value, (list, tuple)) and isinstance(dims, (list, tuple)):
        return [_map(fn, item, dim) for item, dim in zip(value, dims, strict=True)]
    return fn(value, dims) if isinstance(value, Tensor) else value


def _stack(results: list[Any], name: str) -> Any:
    """Results of the elements -> the result of the batch, of the same structure."""
    if not results:
        raise UnsupportedError(
            'vmap strategy "sequential" over an empty batch: the shape of the result is unknown',
            op=name,
            fix='register_vmap("expand_dims"), or a function',
        )
    first, cause = results[0], None
    if isinstance(first, Tensor):
        kind = "shapes"
        try:
            return torch.stack(results)
        except (RuntimeError, TypeError) as error:
            cause = error
    elif isinstance(first, (list, tuple)):
        kind = "lists"
        if all(len(result) == len(first) for result in results):
            return type(first)(_stack(list(items), name) for items in zip(*results, strict=True))
    else:
        kind = "numbers"
        if all(result == first for result in results):
            return first
    got = [tuple(x.shape) if isinstance(x, Tensor) else len(x) if isinstance(x, list) else x for x in results]
    raise UnsupportedError(
        f"an op under vmap returned {kind} that differ between the elements of the batch",
        op=name,
        got=", ".join(map(repr, got[:6])) + (", ..." if len(got) > 6 else ""),
        fix="return a tensor instead" if kind == "numbers" else "return the same for each, e.g. padded",
    ) from cause
