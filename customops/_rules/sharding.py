"""Sharding: what a call with DTensors does. Each process runs the kernel on its part of the tensors.

A rule lists combinations of placements of the results and of the tensors, on a mesh of one dimension. A call uses the
combination that needs the least communication, along each dimension of the mesh. The decision is kept for calls with
the same tensors and the same other arguments.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from customops import _torch
from customops._codegen.lowering import Lowering
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo
from customops._dispatch.rule import Rule
from customops._places import where
from customops._schema.defaults import filler
from customops._schema.infer import is_part
from customops.errors import ArgumentError, KernelError, UnsupportedError, brief, did_you_mean

__tracebackhide__ = True  # pytest leaves the frames out

#: How many decisions are kept for an op.
_MOST_DECISIONS = 1024


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
        given = schema.by_name(args, kwargs)
        found = filter(_torch.distributed.is_dtensor, _torch.trees.tree_leaves(given))
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
            problem, op = "a call has DTensors of two meshes", self.operator.qualname
            fix = f"distribute_tensor({name}.full_tensor(), mesh, placements), with the mesh of the other tensors"
            raise ArgumentError(problem, op=op, argument=name, expected=str(self.mesh), got=str(spec.mesh), fix=fix)
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


class FunctionRule:
    """The function of `register_sharding`."""

    def __init__(self, fn: Fn, operator: OperatorHandle, lowering: Lowering | None) -> None:
        self.fn, self.operator, self.lowering = fn, operator, lowering
        parameters = operator.schema if lowering is None else lowering.parameters
        self.bound = bind_kernel(fn, parameters, operator.qualname, "sharding rule")

    def strategies(self, call: ShardedCall, whole: list[Any]) -> list[Strategy]:
        """Return the combinations that the function lists for a call whose results are like `whole`."""
        args, kwargs = call.arguments_of(call.values)
        if self.lowering is not None:
            args, kwargs = self.lowering.restored_call(*args, **kwargs)
        found = self.bound(*args, **kwargs)
        if not isinstance(found, (list, tuple)) or not found:
            raise self._fault("did not return a list of shardings", _FORM, found)
        return [self._read(call, whole, each) for each in found]

    def _read(self, call: ShardedCall, whole: list[Any], sharding: Any) -> Strategy:
        if not isinstance(sharding, (list, tuple)) or len(sharding) != 2:
            raise self._fault("returned something other than pairs", _FORM, sharding)
        results, tensors = sharding
        if _torch.distributed.is_placement(results):
            results = [results] * len(whole)
        if not isinstance(results, (list, tuple)) or len(results) != len(whole):
            expected = f"a list of {len(whole)}, one for each return"
            raise self._fault("returned the wrong number of output placements", expected, results)
        named = isinstance(tensors, dict)
        placed = list(self._by_name(call, tensors)) if named else [x for x in _flat(tensors) if x is not None]
        if len(placed) != len(call.specs):
            expected = f"{len(call.specs)}, one for each tensor of the call: {', '.join(call.names)}"
            raise self._fault("returned the wrong number of input placements", expected, tensors)
        of_inputs = zip(placed, (spec.ndim for spec in call.specs), call.names, strict=True)
        of_results = zip(results, whole, (f"return {i}" for i in range(len(whole))), strict=True)
        return Strategy(
            tuple(self._of_result(*each) for each in of_results), tuple(self._of(*each) for each in of_inputs)
        )

    def _by_name(self, call: ShardedCall, by_name: dict[str, Any]) -> Iterator[Any]:
        """A placement for each tensor; those that are not named are replicated."""
        known = list(dict.fromkeys(name for a in self.operator.schema.tensors for name in (a.shown, a.name)))
        for key in by_name:
            if not any(key == name or is_part(name, key) for name in (*known, *call.names)):
                problem = f"names {key!r}, which is no tensor of the op"
                raise self._fault(problem, ", ".join(known), by_name, did_you_mean(key, known))
        lists = {key: iter(value) for key, value in by_name.items() if isinstance(value, (list, tuple))}
        for argument, name in zip(call.arguments, call.names, strict=True):
            found = [key for key in by_name if is_part(name, key) or key in (name, argument.name)]
            if not found:
                yield _torch.distributed.public().Replicate()
            else:
                yield next(lists[found[0]], None) if found[0] in lists else by_name[found[0]]

    def _of_result(self, given: Any, value: Any, name: str) -> Any:
        """What is said of a return: of a list of tensors a placement for each, which may be one for all."""
        if isinstance(value, (list, tuple)):
            each = given if isinstance(given, (list, tuple)) else [given] * len(value)
            if len(each) != len(value):
                raise self._fault(f"returned the wrong number of placements for {name}", str(len(value)), given)
            return [self._of_result(*pair, name) for pair in zip(each, value, strict=True)]
        return self._of(given, value.dim(), name) if isinstance(value, Tensor) else None

    def _of(self, placement: Any, dims: int, name: str) -> Any:
        """A placement of a tensor of so many dimensions, which then are counted from the first one."""
        if not _torch.distributed.is_placement(placement):
            raise self._fault(f"returned no placement for {name}", "Shard, Replicate or Partial", placement)
        dim = _torch.distributed.shard_dim(placement)
        if dim is not None and not -dims <= dim < dims:
            problem = f"returned a Shard of a dimension that is not there, for {name}"
            raise self._fault(problem, f"-{dims} to {dims - 1}", placement)
        return placement if dim is None or dim >= 0 else _torch.distributed.public().Shard(dim + dims)

    def _fault(self, problem: str, expected: str, got: Any, fix: str | None = None) -> KernelError:
        op, place = self.operator.qualname, where(self.fn)
        return KernelError(
            f"the sharding rule {problem}", op=op, expected=expected, got=brief(got), where=place, fix=fix
        )


#: What a rule returns.
_FORM = "[([output placements], [input placements]), ...], e.g. [([Shard(0)], [Shard(0), None])]"


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


# Calls ----------------------------------------------------------------------------------------------------------------


class _Decision(NamedTuple):
    """What is done for calls of one kind."""

    mesh: Any
    #: For each tensor of a call its spec, and the one to redistribute it to, or None.
    targets: tuple[tuple[Any, Any], ...]
    #: For each return its spec, or a list; None for what is no tensor; or the name of the argument that is returned.
    results: tuple[Any, ...]


class ShardingRule(Rule[None, FunctionRule]):
    """The sharding rule of one op."""

    def __init__(self) -> None:
        super().__init__()
        self._decisions: dict[Any, _Decision] = {}

    def register(self, fn: Fn, lowering: Lowering | None) -> Registration:
        return self.set(None, FunctionRule(fn, self.operator, lowering))

    def _install(self, _: None, own_library: bool) -> Undo:
        self._decisions.clear()
        rule = _torch.dynamo.outside_dynamo(_rule(self))
        undo = _torch.library.enter_named_rule(self.operator.qualname, _torch.distributed.DTENSOR, rule)
        self.operator.on_removal.append(undo)
        return undo

    def _changed(self) -> None:
        self._decisions = {}
        super()._changed()

    def traced(self) -> Any:
        return [rule.fn for rule in self.values.values()]

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
        whole, mutated = self.whole_results(call), self.operator.schema.mutated
        placements, of_results = self._choose(call, whole)
        targets = [
            (spec, None if tuple(spec.placements) == placed else _torch.distributed.spec_like(spec, placed))
            for spec, placed in zip(call.specs, placements, strict=True)
        ]
        results = [
            next(a.name for a in mutated if a.may_alias(ret)) if ret.is_mutated else _spec(call.mesh, value, placed)
            for ret, value, placed in zip(self.operator.schema.returns, whole, of_results, strict=True)
        ]
        return _Decision(call.mesh, tuple(targets), tuple(results))

    def whole_results(self, call: ShardedCall) -> list[Any]:
        """What the op returns for the whole tensors, without data: a value for each return."""
        try:
            found = _torch.distributed.call_on_fakes(self.operator.overload, *call.with_tensors(call.specs))
        except Exception as error:
            if not _torch.fakes.needs_data(error):
                raise
            raise UnsupportedError(
                "a call with DTensors of an op whose results have sizes that depend on data",
                op=self.operator.qualname,
                fix="call it on x.full_tensor(), or on the parts with local_map",
            ) from error
        return _by_return(self.operator, found)

    def _choose(self, call: ShardedCall, whole: list[Any]) -> tuple[list[Any], list[Any]]:
        """The placements of the tensors and of the results, over all dimensions of the mesh, that cost least."""
        dims, strategies = call.mesh.ndim, self.values[None].strategies(call, whole)

        @functools.cache
        def cost(i: int, placed: tuple[Any, ...]) -> Any:
            return _torch.distributed.cost(call.specs[i], _torch.distributed.spec_like(call.specs[i], placed))

        choices: list[tuple[Any, ...]] = []
        for combination in itertools.product(strategies, repeat=dims):
            tensors = [_along_all(each) for each in zip(*(strategy.tensors for strategy in combination), strict=True)]
            results = [_along_all(each) for each in zip(*(strategy.results for strategy in combination), strict=True)]
            if all(self._may_be(call, *each) for each in enumerate(tensors)) and all(map(_is_one_sum, results)):
                moved = sum(tuple(spec.placements) != each for spec, each in zip(call.specs, tensors, strict=True))
                total = sum(cost(*each) for each in enumerate(tensors))
                choices.append((total, moved, len(choices), tensors, results))
        if choices:
            *_, tensors, results = min(choices, key=lambda choice: choice[:3])
            return tensors, results
        whole_everywhere = (_torch.distributed.public().Replicate(),) * dims
        for spec, argument, name in zip(call.specs, call.arguments, call.names, strict=True):
            if argument.is_mutated and tuple(spec.placements) != whole_everywhere:
                raise UnsupportedError(
                    "the op writes to a DTensor that is placed as its sharding rule does not allow",
                    op=self.operator.qualname,
                    argument=name,
                    expected="placements of the rule, with the other arguments in reach of them",
                    got=str(tuple(spec.placements)),
                    fix=f"call it with {name}.redistribute(placements=...)",
                )
        return [whole_everywhere] * len(call.specs), [
            [whole_everywhere] * len(value) if isinstance(value, (list, tuple)) else whole_everywhere for value in whole
        ]

    def _may_be(self, call: ShardedCall, i: int, placed: tuple[Any, ...]) -> bool:
        """Can a tensor be placed so: it stays if it is written to, partial sums are there, and shards not empty?"""
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

        schema = self.operator.schema
        if kwargs:  # in the order of the schema
            kwargs = {a.name: kwargs[a.name] for a in schema.keyword_only if a.name in kwargs}
        parts, named = [part(each) for each in args], {key: part(each) for key, each in kwargs.items()}
        if _torch.distributed.takes_part(decision.mesh):
            values = _by_return(self.operator, overload(*parts, **named))
        else:
            values = [_nothing(spec) for spec in decision.results]
        given = schema.by_name(args, kwargs) if schema.mutated else kwargs
        results = [_wrapped(value, spec, given) for value, spec in zip(values, decision.results, strict=True)]
        result = tuple(results) if len(results) > 1 else next(iter(results), None)
        return _torch.distributed.aliasing(overload, args, kwargs, result) if schema.is_view else result


def _rule(sharding: ShardingRule) -> Any:
    def rule(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return sharding.call(args, kwargs or {})

    return rule


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


def _by_return(operator: OperatorHandle, found: Any) -> list[Any]:
    returns = len(operator.schema.returns)
    return list(found) if returns > 1 else [found] * returns


def _along_all(along: tuple[Any, ...]) -> Any:
    """The placements over all dimensions of a mesh, of those along each; of a list of tensors those of each."""
    if isinstance(along[0], list):
        return [_along_all(each) for each in zip(*along, strict=True)]
    return along


def _is_one_sum(placed: Any) -> bool:
    """Are partial results reduced in one way along all dimensions of a mesh? The order of two ways would matter."""
    if isinstance(placed, list):
        return all(map(_is_one_sum, placed))
    ways = {each.reduce_op for each in placed if each is not None and each.is_partial()}
    return len(ways) < 2 or ways == {"sum", "avg"}


def _spec(mesh: Any, value: Any, placed: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_spec(mesh, *pair) for pair in zip(value, placed, strict=True)]
    return _torch.distributed.spec_for(mesh, placed, value) if isinstance(value, Tensor) else None


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
