"""Sharding: what a call with DTensors does. Each process runs the kernel on its part of the tensors.

A rule says which placements of the results come of which placements of the tensors, on a mesh of one dimension. Of
these, the call takes the ones that cost least communication, along each dimension of the mesh. What was decided is kept
for calls of the same tensors and the same other arguments, all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from customops import _torch
from customops._codegen.lowering import Lowering
from customops._dispatch.callbacks import Fn, bind_kernel, filler
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo
from customops._dispatch.rule import Rule
from customops._schema.infer import is_part
from customops.errors import ArgumentError, KernelError, UnsupportedError, brief, did_you_mean, where

__tracebackhide__ = True  # pytest leaves the frames out

#: How many decisions are kept for an op.
_MOST_DECISIONS = 1024
#: How many placements on a mesh of several dimensions are tried until one is right.
_MOST_TRIED = 32


class Strategy(NamedTuple):
    """Placements that fit together, along one dimension of a mesh."""

    #: One for each return: a placement, a list of them for a list of tensors, or None for what is no tensor.
    results: tuple[Any, ...]
    #: One for each tensor of the call.
    tensors: tuple[Any, ...]


class ShardedCall:
    """A call with DTensors: what they are, in the order of the schema.

    Raises:
        ArgumentError: a tensor is not distributed, or over another mesh.
    """

    def __init__(self, operator: OperatorHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.operator, schema = operator, operator.schema
        fill = filler(schema)
        args, kwargs = fill(args, kwargs) if fill is not None else (args, kwargs)
        given = dict(zip((argument.name for argument in schema.positional), args, strict=False)) | kwargs
        found = filter(_torch.distributed.is_dtensor, _torch.tensors.tree_leaves(given))
        self.mesh = next(_torch.distributed.spec_of(each).mesh for each in found)
        #: For each tensor: it, its spec, the argument that it is or is part of, and what to call it.
        self.given: list[Tensor] = []
        self.specs: list[Any] = []
        self.arguments: list[Any] = []
        self.names: list[str] = []
        #: All arguments by name, with specs in the place of tensors.
        self.values: dict[str, Any] = {}
        for argument in schema.arguments:
            value = given.get(argument.name)
            if isinstance(value, (list, tuple)) and argument.holds_tensors:
                items = [self._add(argument, f"{argument.shown}[{i}]", each) for i, each in enumerate(value)]
                self.values[argument.name] = tuple(items)
            else:
                self.values[argument.name] = self._add(argument, argument.shown, value)

    def _add(self, argument: Any, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if _torch.distributed.is_dtensor(value):
            spec = _torch.distributed.spec_of(value)
        elif value.numel() == 1 or _torch.distributed.replicates_implicitly():
            replicated = [_torch.distributed.public().Replicate()] * self.mesh.ndim
            spec = _torch.distributed.spec_for(self.mesh, replicated, value)
        else:
            raise ArgumentError(
                "a call has DTensors and a tensor that is none",
                op=self.operator.qualname,
                argument=name,
                expected="a DTensor, or a tensor of one element",
                got=f"a tensor of shape {tuple(value.shape)}",
                fix=f"distribute_tensor({name}, mesh, placements)",
            )
        if spec.mesh != self.mesh:
            raise ArgumentError(
                "a call has DTensors of two meshes",
                op=self.operator.qualname,
                argument=name,
                expected=str(self.mesh),
                got=str(spec.mesh),
                fix="distribute all tensors over one mesh",
            )
        self.given.append(value)
        self.specs.append(spec)
        self.arguments.append(argument)
        self.names.append(name)
        return spec

    def arguments_of(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, of all arguments by name."""
        schema = self.operator.schema
        named = {argument.name: values[argument.name] for argument in schema.keyword_only}
        return tuple(values[argument.name] for argument in schema.positional), named

    def with_tensors(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these in the place of the tensors."""
        rest, values = iter(tensors), {}
        for argument in self.operator.schema.arguments:
            value = self.values[argument.name]
            if isinstance(value, tuple) and argument.holds_tensors:
                values[argument.name] = [each if each is None else next(rest) for each in value]
            else:
                values[argument.name] = next(rest) if argument.holds_tensors and value is not None else value
        return self.arguments_of(values)


# Rules ----------------------------------------------------------------------------------------------------------------


class StatedRule:
    """The function of `register_sharding`."""

    #: Is what it says of each dimension of a mesh to be tried out for all together?
    is_tried = False

    def __init__(self, fn: Fn, operator: OperatorHandle, lowering: Lowering | None) -> None:
        self.fn, self.operator, self.lowering = fn, operator, lowering
        parameters = operator.schema if lowering is None else lowering.parameters
        self.bound = bind_kernel(fn, parameters, operator.qualname, "sharding rule")

    def strategies(self, call: ShardedCall, size: int) -> list[Strategy]:
        """What the function returns for a call."""
        args, kwargs = call.arguments_of(call.values)
        if self.lowering is not None:
            args, kwargs = self.lowering.restored_call(*args, **kwargs)
        found = self.bound(*args, **kwargs)
        if not isinstance(found, (list, tuple)) or not found:
            raise self._fault("did not return a list of shardings", _FORM, brief(found))
        return [self._read(call, each) for each in found]

    def _read(self, call: ShardedCall, sharding: Any) -> Strategy:
        if not isinstance(sharding, (list, tuple)) or len(sharding) != 2:
            raise self._fault("returned something other than pairs", _FORM, brief(sharding))
        results, tensors = sharding
        returns = self.operator.schema.returns
        if _torch.distributed.is_placement(results):
            results = [results if each.holds_tensors else None for each in returns]
        if not isinstance(results, (list, tuple)) or len(results) != len(returns):
            raise self._fault(
                "returned the wrong number of output placements",
                f"a list of {len(returns)}, one for each return",
                brief(results),
            )
        if isinstance(tensors, dict):
            tensors = list(self._by_name(call, tensors))
        else:
            tensors = [each for each in _flat(tensors) if each is not None]
        if len(tensors) != len(call.specs):
            names = ", ".join(call.names)
            problem = "returned the wrong number of input placements"
            raise self._fault(problem, f"{len(call.specs)}, one for each tensor of the call: {names}", brief(tensors))
        for each in (*_flat(results), *tensors):
            if each is not None and not _torch.distributed.is_placement(each):
                raise self._fault(
                    "returned something other than placements", "Shard, Replicate or Partial", brief(each)
                )
        placed = [
            self.checked(placement, spec.ndim, name)
            for placement, spec, name in zip(tensors, call.specs, call.names, strict=True)
        ]
        return Strategy(tuple(results), tuple(placed))

    def _by_name(self, call: ShardedCall, by_name: dict[str, Any]) -> Iterator[Any]:
        """A placement for each tensor; those that are not named are replicated."""
        lists: dict[str, Iterator[Any]] = {}
        for argument, name in zip(call.arguments, call.names, strict=True):
            key = next((key for key in by_name if is_part(name, key) or key in (name, argument.name)), None)
            value = by_name[key] if key is not None else _torch.distributed.public().Replicate()
            if key is not None and isinstance(value, (list, tuple)):
                value = next(lists.setdefault(key, iter(value)), None)
                if value is None:
                    raise self._fault(f"returned too few placements for {key}", "one for each tensor", brief(by_name))
            yield value
        known = list({each: None for a in self.operator.schema.tensors for each in (a.shown, a.name)})
        for key in by_name:
            if not any(key == name or is_part(name, key) for name in (*known, *call.names)):
                fix = did_you_mean(key, known)
                raise self._fault(f"names {key!r}, which is no tensor of the op", ", ".join(known), key, fix)

    def check_results(self, whole: list[Any], results: list[Any]) -> None:
        for i, (value, placed) in enumerate(zip(whole, results, strict=True)):
            pairs = [(value, placed)] if isinstance(value, Tensor) else []
            if isinstance(value, (list, tuple)):
                if not isinstance(placed, list) or len(placed) != len(value):
                    raise self._fault(f"returned placements that do not fit return {i}", f"{len(value)}", brief(placed))
                pairs = list(zip(value, placed, strict=True))
            for tensor, each in pairs:
                if None in each:
                    raise self._fault(f"returned no placement for return {i}", "Shard, Replicate or Partial", "None")
                for placement in each:
                    self.checked(placement, tensor.dim(), f"return {i}")

    def checked(self, placement: Any, dims: int, name: str) -> Any:
        """A placement without negative dimensions, of a tensor of so many."""
        dim = _torch.distributed.shard_dim(placement)
        if dim is None:
            return placement
        if not -dims <= dim < dims:
            got = f"Shard({dim}) for {name}, of {dims} dimensions"
            raise self._fault("returned a Shard of a dimension that is not there", f"-{dims} to {dims - 1}", got)
        return placement if dim >= 0 else _torch.distributed.public().Shard(dim + dims)

    def _fault(self, problem: str, expected: str, got: str, fix: str | None = None) -> KernelError:
        op, place = self.operator.qualname, where(self.fn)
        return KernelError(f"the sharding rule {problem}", op=op, expected=expected, got=got, where=place, fix=fix)

    def traced(self) -> Any:
        return self.fn


#: What a rule returns.
_FORM = "[([output placements], [input placements]), ...], e.g. [([Shard(0)], [Shard(0), None])]"


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


# Calls ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decision:
    """What is done for calls of one kind.

    Attributes:
        mesh: of all tensors.
        targets: for each tensor of a call its spec, and the one to redistribute it to, or None.
        results: for each return the spec of the result, a list of them, None for what is no tensor, or the name of
            the argument that is returned.
    """

    mesh: Any
    targets: tuple[tuple[Any, Any], ...]
    results: tuple[Any, ...]


class ShardingRule(Rule[None, Any]):
    """The sharding rule of one op: a `StatedRule`, or one that is derived from a plain function."""

    def __init__(self) -> None:
        super().__init__()
        self._decisions: dict[Any, _Decision] = {}

    def register(self, fn: Fn, lowering: Lowering | None) -> Registration:
        return self.set(None, StatedRule(fn, self.operator, lowering))

    def _install(self, _: None, own_library: bool) -> Undo:
        self._decisions.clear()
        undo = _torch.distributed.enter(self.operator.overload, _torch.dynamo.outside_dynamo(_handler(self)))
        self.operator.on_removal.append(undo)
        return undo

    def _changed(self) -> None:
        self._decisions = {}
        super()._changed()

    def traced(self) -> Any:
        return [rule.traced() for rule in self.values.values()]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op with DTensors."""
        decisions, decision = self._decisions, None
        try:
            key = key_of((*args, *itertools.chain.from_iterable(kwargs.items())))
            decision = decisions.get(key)
        except TypeError:  # sizes are symbols
            key = None
        if decision is None:
            decision = self._decide(ShardedCall(self.operator, args, kwargs))
            if key is not None:
                if len(decisions) >= _MOST_DECISIONS:
                    decisions.clear()
                decisions[key] = decision
        return self._run(decision, args, kwargs)

    # What to do -------------------------------------------------------------------------------------------------

    def _decide(self, call: ShardedCall) -> _Decision:
        whole = self._whole_results(call)
        placements, of_results = self._choose(call, whole)
        targets = []
        for spec, placed in zip(call.specs, placements, strict=True):
            is_there = tuple(spec.placements) == placed
            targets.append((spec, None if is_there else _torch.distributed.spec_like(spec, placed)))
        results: list[Any] = []
        for ret, value, placed in zip(self.operator.schema.returns, whole, of_results, strict=True):
            if ret.is_mutated:
                results.append(next(a.name for a in self.operator.schema.mutated if a.may_alias(ret)))
            elif isinstance(value, (list, tuple)):
                results.append([self._spec(call, *pair) for pair in zip(value, placed, strict=True)])
            else:
                results.append(self._spec(call, value, placed))
        return _Decision(call.mesh, tuple(targets), tuple(results))

    def _spec(self, call: ShardedCall, value: Any, placed: Any) -> Any:
        return _torch.distributed.spec_for(call.mesh, placed, value) if isinstance(value, Tensor) else None

    def _whole_results(self, call: ShardedCall) -> list[Any]:
        """What the op returns for the whole tensors, without data: a value for each return."""
        args, kwargs = call.with_tensors(call.specs)
        try:
            found = _torch.distributed.call_on_fakes(self.operator.overload, args, kwargs)
        except Exception as error:
            if not _torch.tensors.needs_data(error):
                raise
            raise UnsupportedError(
                "a call with DTensors of an op whose results have sizes that depend on data",
                op=self.operator.qualname,
                fix="call it on x.full_tensor(), or on the parts with local_map",
            ) from error
        returns = self.operator.schema.returns
        return list(found) if len(returns) > 1 else [found] * len(returns)

    def _choose(self, call: ShardedCall, whole: list[Any]) -> tuple[list[Any], list[Any]]:
        """The placements of the tensors and of the results, over all dimensions of the mesh, that cost least."""
        rule, shape = self.values[None], tuple(call.mesh.shape)
        by_size = {size: rule.strategies(call, size) for size in dict.fromkeys(shape)}
        costs: dict[Any, Any] = {}

        def cost(i: int, placed: tuple[Any, ...]) -> Any:
            if (i, placed) not in costs:
                target = _torch.distributed.spec_like(call.specs[i], placed)
                costs[i, placed] = _torch.distributed.cost(call.specs[i], target)
            return costs[i, placed]

        choices: list[tuple[Any, ...]] = []
        for combination in itertools.product(*(by_size[size] for size in shape)):
            tensors = list(zip(*(each.tensors for each in combination), strict=True))
            if not all(self._may_be(call, i, placed) for i, placed in enumerate(tensors)):
                continue
            results = [_joined(value, [each.results[i] for each in combination]) for i, value in enumerate(whole)]
            if not rule.is_tried:
                rule.check_results(whole, results)
            if not all(_is_one_sum(placed) for placed in _leaves(results)):
                continue
            total = sum(cost(i, placed) for i, placed in enumerate(tensors))
            moved = sum(tuple(spec.placements) != each for spec, each in zip(call.specs, tensors, strict=True))
            choices.append((total, moved, len(choices), tensors, results))
        choices.sort(key=lambda choice: choice[:3])
        for _, _, _, tensors, results in choices if not rule.is_tried or len(shape) == 1 else choices[:_MOST_TRIED]:
            if rule.is_tried and len(shape) > 1:
                found = rule.tried(call, tensors, shape)
                if found is None:
                    continue
                results = [_joined(value, [each], already=True) for value, each in zip(whole, found, strict=True)]
            return tensors, results
        replicated = (_torch.distributed.public().Replicate(),) * len(shape)
        tensors = [replicated] * len(call.specs)
        for spec, argument, name in zip(call.specs, call.arguments, call.names, strict=True):
            if argument.is_mutated and tuple(spec.placements) != replicated:
                raise UnsupportedError(
                    "the op writes to a DTensor that is placed as its sharding rule does not allow",
                    op=self.operator.qualname,
                    argument=name,
                    expected="one of " + ", ".join(sorted({str(each[3][call.names.index(name)]) for each in choices}))
                    if choices
                    else "a replicated DTensor",
                    got=str(tuple(spec.placements)),
                    fix=f"{name} = {name}.redistribute(placements=...) before the call",
                )
        return tensors, [_joined(value, [replicated], already=True) for value in whole]

    def _may_be(self, call: ShardedCall, i: int, placed: tuple[Any, ...]) -> bool:
        """Can a tensor be placed so: it is where it is written to, partial sums are there, and shards not empty?"""
        spec, shards = call.specs[i], dict[int, int]()
        now = tuple(spec.placements)
        if (call.arguments[i].is_mutated and placed != now) or not _is_one_sum(placed):
            return False
        for size, target, current in zip(call.mesh.shape, placed, now, strict=True):
            dim = _torch.distributed.shard_dim(target)
            if dim is not None:
                shards[dim] = shards.get(dim, 1) * size
            if target.is_partial() and target != current:
                return False
        return all(spec.shape[dim] >= count for dim, count in shards.items())

    # And doing it -----------------------------------------------------------------------------------------------

    def _run(self, decision: _Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        overload, targets = self.operator.overload, iter(decision.targets)

        def part(value: Any) -> Any:
            """The part of this process."""
            if isinstance(value, Tensor):
                spec, target = next(targets)
                local = _torch.distributed.local_of(value)
                return local if target is None else _torch.distributed.redistributed(overload, local, spec, target)
            if isinstance(value, (list, tuple)):
                return [part(each) for each in value]
            return value

        if kwargs:  # in the order of the schema
            kwargs = {a.name: kwargs[a.name] for a in self.operator.schema.arguments if a.name in kwargs}
        parts, named = tuple([part(each) for each in args]), {key: part(each) for key, each in kwargs.items()}
        returns = self.operator.schema.returns
        if _torch.distributed.takes_part(decision.mesh):
            found = overload(*parts, **named)
            values = list(found) if len(returns) > 1 else [found] * len(returns)
        else:
            values = [_nothing(spec) for spec in decision.results]
        given = dict(zip(map(attrgetter("name"), self.operator.schema.positional), args, strict=False)) | kwargs
        results = [_wrapped(value, spec, given) for value, spec in zip(values, decision.results, strict=True)]
        result = tuple(results) if len(returns) > 1 else results[0] if returns else None
        if self.operator.schema.is_view:
            return _torch.distributed.aliasing(overload, args, kwargs, result)
        return result


def _handler(rule: ShardingRule) -> Any:
    def handler(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return rule.call(args, kwargs)

    return handler


def key_of(value: Any) -> Any:
    """Equal for calls that are decided equally: ``==`` does not tell 1 from 1.0 and True, and NaN from nothing."""
    if isinstance(value, (list, tuple)):
        return tuple([key_of(each) for each in value])
    if isinstance(value, Tensor):
        if _torch.distributed.is_dtensor(value):
            spec = _torch.distributed.spec_of(value)
            return spec, id(spec.mesh)
        return tuple(value.shape), value.stride(), value.dtype, _torch.distributed.replicates_implicitly()
    return (type(value), repr(value)) if isinstance(value, (float, complex)) else (type(value), value)


def _joined(value: Any, along: Sequence[Any], already: bool = False) -> Any:
    """The placements of a result over all dimensions of a mesh, of those along each.

    Of one placement for a list of tensors it makes one for each. `already`: it is a tuple of those along each.
    """
    if isinstance(value, (list, tuple)):
        each = [x if isinstance(x, list) else [x] * len(value) for x in along]
        if any(len(x) != len(value) for x in each):
            return None
        items = [tuple(x) for x in zip(*each, strict=True)]
        return [_joined(item, x, already) for item, x in zip(value, items, strict=True)]
    placed = tuple(along[0]) if already else tuple(along)
    if not isinstance(value, Tensor):
        return placed
    return tuple([_torch.distributed.normalized(each, value.dim()) for each in placed])


def _leaves(results: list[Any]) -> Iterator[tuple[Any, ...]]:
    for placed in results:
        yield from placed if isinstance(placed, list) else [placed]


def _is_one_sum(placed: tuple[Any, ...]) -> bool:
    """Are partial results reduced in one way along all dimensions of a mesh? The order of two ways would matter."""
    ways = {each.reduce_op for each in placed if each is not None and each.is_partial()}
    return len(ways) < 2 or ways == {"sum", "avg"}


def _wrapped(value: Any, spec: Any, given: dict[str, Any]) -> Any:
    if isinstance(spec, str):
        return given[spec]
    if isinstance(spec, list):
        return [_wrapped(*pair, given) for pair in zip(value, spec, strict=True)]
    return value if spec is None else _torch.distributed.as_dtensor(value, spec)


def _nothing(spec: Any) -> Any:
    """What a process has that is not of the mesh."""
    if isinstance(spec, list):
        return [_nothing(each) for each in spec]
    if spec is None or isinstance(spec, str):
        return None
    return torch.empty((0,) * bool(spec.shape), dtype=spec.tensor_meta.dtype)


def missing(qualname: str) -> Exception | None:
    """The error for a call with DTensors of an op of ours that has no sharding rule."""
    if not hasattr(_torch.library.torch_op_of(qualname), "_definition"):
        return None
    return UnsupportedError(
        "a call with a DTensor: the op has no sharding rule",
        op=qualname,
        expected="a rule that says which placements of the results come of which placements of the arguments",
        fix="op.register_sharding(rule), or op.register_reference(plain) with a function of plain PyTorch",
    )
