"""Sharding rules that are derived from a plain function, which computes what the op does.

The function is called twice without data: with the parts that one process has of the tensors, and with DTensors of such
parts. If both make the very same calls of torch's ops on the same parts, then nothing is communicated, and the function
of the parts returns the parts of what the function of the whole tensors returns. So does the kernel, which computes the
same. The placements of the results are those of the DTensors. A number that the function takes from a size, as in a
mean, makes the calls differ where the dimension is split.

That is tried for placements of the inputs along one dimension of a mesh. What holds along each of several dimensions is
tried again for all together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.operator import OperatorHandle
from customops._rules.reference import Reference
from customops._rules.sharding import ShardedCall, Strategy, key_of
from customops.errors import KernelError, UnsupportedError, where

__tracebackhide__ = True  # pytest leaves the frames out

#: How many placements of the inputs are tried, and how many are considered.
_MOST_TRIED, _MOST_CONSIDERED = 128, 4096
#: For how many kinds of calls is kept what was found.
_MOST_KNOWN = 1024
#: Constants of up to so many elements are compared by value.
_SMALL = 64

#: Of these, DTensor takes a dimension that is counted from the right for one that may be split, in torch 2.13.
_SCANS = (torch.ops.aten.cumsum.default, torch.ops.aten.cumprod.default, torch.ops.aten.logcumsumexp.default)

Placements = Sequence[tuple[Any, ...]]  #: for each tensor, one along each dimension of a mesh


class DerivedRule:
    """The sharding rule of an op as of its reference."""

    is_tried = True

    def __init__(self, operator: OperatorHandle, reference: Reference) -> None:
        self.operator, self.reference = operator, reference
        self._known: dict[Any, Any] = {}

    @property
    def place(self) -> str:
        return where(self.reference.plain)

    def traced(self) -> Any:
        return self.reference.plain

    def strategies(self, call: ShardedCall, whole: list[Any], size: int) -> list[Strategy]:
        """The placements that need no communication along a dimension of `size` processes; all replicated first."""
        if torch.Tag.nondeterministic_seeded in self.operator.tags:
            raise UnsupportedError(
                "a call with a DTensor of a random op: each process would draw numbers of its own",
                op=self.operator.qualname,
                fix="op.register_sharding(rule), if that is what it should do",
            )
        inputs = _Inputs(call)
        sums = tuple(tuple({p for p in spec.placements if _torch.distributed.is_sum(p)}) for spec in call.specs)
        key = (inputs.key, size, sums)
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = list(self._search(inputs, whole, size, sums))
        found: list[Strategy] = self._known[key]
        return found

    def tried(self, call: ShardedCall, placements: Placements, shape: tuple[int, ...]) -> list[Any] | None:
        """The placements of the results on a mesh of several dimensions; None if communication is needed."""
        inputs = _Inputs(call)
        key = (inputs.key, shape, tuple(placements))
        if key not in self._known:
            try:
                self._known[key] = self._outcome(inputs, placements, shape)
            except _Refused:
                self._known[key] = None
        found: list[Any] | None = self._known[key]
        return found

    def _search(
        self, inputs: _Inputs, whole: list[Any], size: int, sums: Sequence[Sequence[Any]]
    ) -> Iterator[Strategy]:
        distributed = _torch.distributed.public()
        same = distributed.Replicate()
        options = [
            [*(distributed.Shard(dim) for dim, length in enumerate(shape) if length >= size), *partial]
            for shape, partial in zip(inputs.shapes, sums, strict=True)
        ]
        replicated = [[same] * len(value) if isinstance(value, (list, tuple)) else same for value in whole]
        yield Strategy(tuple(replicated), (same,) * len(options))
        refused: list[dict[int, Any]] = []  # what some tensors must not be placed as, whatever the others are
        tried = 0
        for placed in itertools.islice(_candidates(options, same, inputs.shapes), _MOST_CONSIDERED):
            if any(all(placed[i] == each for i, each in wrong.items()) for wrong in refused):
                continue
            tried += 1
            if tried > _MOST_TRIED:
                return
            try:
                outcome = self._outcome(inputs, [(each,) for each in placed], (size,))
            except _Refused as reason:
                refused.append({i: placed[i] for i in reason.inputs or range(len(placed))})
            else:
                yield Strategy(tuple(map(_first, outcome)), tuple(placed))

    def _outcome(self, inputs: _Inputs, placements: Placements, shape: tuple[int, ...]) -> list[Any]:
        """The placements of each return. Raises `_Refused` where communication is needed."""
        if any(0 in each for each in inputs.shapes):
            raise _Refused()  # DTensor's rule for reshape does not end for a tensor without elements
        found, last = self._seen_from(0, inputs, placements, shape), math.prod(shape) - 1
        lengths = [_local_shapes(inputs.shapes, placements, shape, rank) for rank in (0, last)]
        if lengths[0] != lengths[1]:
            if self._seen_from(last, inputs, placements, shape) != found:
                raise _Refused()
            # The mean of means is the mean only of parts of one size.
            if any(_torch.distributed.is_sum(each) and each.reduce_op == "avg" for each in _leaves(found)):
                raise _Refused()
        return found

    def _seen_from(self, rank: int, inputs: _Inputs, placements: Placements, shape: tuple[int, ...]) -> list[Any]:
        shapes = _local_shapes(inputs.shapes, placements, shape, rank)
        with _torch.distributed.simulating():
            mesh = _torch.distributed.simulated_mesh(inputs.device, shape, rank)
            parts = inputs.tensors(shapes)
            expected = _Calls(parts)
            results = self._run(expected, inputs, parts)
            parts = inputs.tensors(shapes)
            calls = _Calls(parts, mesh, expected.calls)
            of_mesh = zip(parts, inputs.tensors(inputs.shapes), placements, strict=True)
            distributed = self._run(calls, inputs, [_torch.distributed.placed(mesh, *each) for each in of_mesh])
            if len(calls.calls) != len(expected.calls):
                raise _Refused()
            found = [
                _placements(calls.name_of(one), expected.name_of(other), one, len(shape))
                for one, other in zip(distributed, results, strict=True)
            ]
        schema = self.operator.schema
        of_arguments: dict[str, Any] = {argument.name: None for argument in schema.mutated}
        by_tensor = iter(placements)
        for name, value in inputs.call.values.items():
            mine = [next(by_tensor) for _ in _specs(value)]
            if name in of_arguments:
                of_arguments[name] = mine if isinstance(value, tuple) else mine[0] if mine else None
        extra = {argument.name: argument for argument in schema.mutated}
        pairs = list(zip(found[len(schema.returns) :], [extra[name] for name in self.reference.extra], strict=True))
        for ret, each in zip(schema.returns, found, strict=False):
            pairs += [(each, argument) for argument in schema.mutated if ret.is_mutated and argument.may_alias(ret)]
        if any(each != of_arguments[argument.name] for each, argument in pairs):
            raise _Refused()  # the new value is not where the argument is
        return found[: len(schema.returns)]

    def _run(self, calls: _Calls, inputs: _Inputs, tensors: list[Any]) -> list[Any]:
        """A value for each return, and for each argument that is written."""
        args, kwargs = inputs.call.with_tensors(tensors)
        args, kwargs = _torch.tensors.tree_map(_as_number, (args, kwargs))
        try:
            with calls:
                return self.reference.values(*args, **kwargs)
        except (_Refused, KernelError):
            raise
        except Exception as error:  # of a function that does not take such parts, or does not run without data
            raise _Refused() from error


class _Inputs:
    """The inputs of a call: what the placements that are right depend on."""

    def __init__(self, call: ShardedCall) -> None:
        self.call, self.device = call, call.mesh.device_type
        self.shapes = [tuple(map(int, spec.shape)) for spec in call.specs]
        self.dtypes = [spec.tensor_meta.dtype for spec in call.specs]
        others = {name: None if _specs(value) else _as_number(value) for name, value in call.values.items()}
        counts = tuple(len(list(_specs(value))) for value in call.values.values())
        self.key = (tuple(self.shapes), tuple(self.dtypes), counts, key_of(list(others.values())))

    def tensors(self, shapes: Iterable[tuple[int, ...]]) -> list[Tensor]:
        return [torch.empty(x, dtype=dtype, device="meta") for x, dtype in zip(shapes, self.dtypes, strict=True)]


def _specs(value: Any) -> list[Any]:
    """The specs that stand for the tensors of an argument."""
    return [each for each in (value if isinstance(value, tuple) else [value]) if _torch.distributed.is_spec(each)]


def _as_number(value: Any) -> Any:
    """A symbolic number as what it is: the compiled code is for that number only."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_number, value))
    return (
        int(value) if isinstance(value, torch.SymInt) else float(value) if isinstance(value, torch.SymFloat) else value
    )


def _candidates(options: list[list[Any]], whole: Any, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[Any, ...]]:
    """Placements of all tensors; first those with all split in one dimension, counted from either end."""
    seen = {(whole,) * len(options)}
    most = max(map(len, shapes), default=0)
    for dim, from_right in itertools.product(range(most), (False, True)):
        dims = [dim - (most - len(shape)) * from_right for shape in shapes]
        yield from _unless(
            seen,
            tuple(
                next((p for p in of if _torch.distributed.shard_dim(p) == d), whole)
                for of, d in zip(options, dims, strict=True)
            ),
        )
    for count in range(1, len(options) + 1):
        for chosen in itertools.combinations(range(len(options)), count):
            for placed in itertools.product(*(of if i in chosen else [whole] for i, of in enumerate(options))):
                yield from _unless(seen, placed)


def _unless(seen: set[Any], placed: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if placed not in seen:
        seen.add(placed)
        yield placed


def _local_shapes(
    shapes: Sequence[tuple[int, ...]], placements: Placements, mesh: tuple[int, ...], rank: int
) -> list[tuple[int, ...]]:
    """The shapes of what one process has of each tensor."""
    coordinates = [rank // math.prod(mesh[i + 1 :]) % size for i, size in enumerate(mesh)]
    found = []
    for shape, placed in zip(shapes, placements, strict=True):
        local = list(shape)
        for placement, size, i in zip(placed, mesh, coordinates, strict=True):
            dim = _torch.distributed.shard_dim(placement)
            if dim is not None:
                chunk = -(-local[dim] // size)
                local[dim] = max(0, min(chunk, local[dim] - i * chunk))
        found.append(tuple(local))
    return found


# What a function does -------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """Communication is needed, or it is not known. `inputs`: those whose placements are the reason; all if empty."""

    def __init__(self, inputs: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.inputs = inputs


class _Calls(_torch.tensors.TorchDispatchMode):
    """Writes down the calls of torch's ops on the parts of one process; raises `_Refused` for another than expected.

    A tensor is written as a number, by the order in which the tensors came to be. Where a size is given, the shape of
    the result says as much: DTensor puts the local size in the place of the global one.
    """

    def __init__(self, inputs: Sequence[Tensor], mesh: Any = None, expected: list[Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mesh, self.expected = mesh, expected
        self.calls: list[Any] = []
        self._in_dtensor = False  # is DTensor at work on a call?
        self._tensors: list[Tensor] = []  # they are kept, and so are their ids
        self._numbers: dict[int, int] = {}
        self._constants: list[Tensor] = []
        self._origins: list[frozenset[int]] = []  # the inputs of which each was made
        for i, tensor in enumerate(inputs):
            self._number(tensor, frozenset([i]))

    def _number(self, tensor: Tensor, origins: frozenset[int]) -> None:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
            self._origins.append(origins)

    def name_of(self, value: Any) -> Any:
        """What stands for a value in what is written."""
        if isinstance(value, (list, tuple)):
            return [self.name_of(each) for each in value]
        if not isinstance(value, Tensor):
            return value
        tensor = _torch.distributed.local_of(value)
        if id(tensor) in self._numbers:
            return "tensor", self._numbers[id(tensor)]
        if tensor.is_meta or tensor.numel() > _SMALL:
            self._constants.append(tensor)  # while it is there, no other has its id
            return "constant", id(tensor)
        return "constant", tensor.dtype, tuple(tensor.shape), repr(tensor.tolist())

    def _known(self, values: Any) -> list[int]:
        """The numbers of the tensors in some values."""
        tensors = (each for each in _torch.tensors.tree_leaves(values) if isinstance(each, Tensor))
        numbers = (self._numbers.get(id(_torch.distributed.local_of(each))) for each in tensors)
        return [number for number in numbers if number is not None]

    def _origin(self, values: Any) -> frozenset[int]:
        return frozenset[int]().union(*(self._origins[number] for number in self._known(values)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SCANS and args[1] < 0:
            args = (args[0], args[1] + args[0].dim(), *args[2:])
        if any(issubclass(each, _torch.distributed.public().DTensor) for each in types):
            return self._of_dtensor(func, args, kwargs) if not self._in_dtensor else NotImplemented
        origin = self._origin((args, kwargs))
        if self._in_dtensor and not self._known((args, kwargs)):  # it asks a fake for a shape
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Refused(origin)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            raise _Refused(origin) from error
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        given.pop("size", None)
        named = {name: self.name_of(value) for name, value in given.items()}
        results = [each for each in _torch.tensors.tree_leaves(result) if isinstance(each, Tensor)]
        self.calls.append((func, named, [(tuple(each.shape), each.dtype) for each in results]))
        if self.expected is not None and self.calls[-1:] != self.expected[len(self.calls) - 1 : len(self.calls)]:
            raise _Refused(origin)
        for each in results:
            self._number(each, origin)
        return result

    def _of_dtensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with DTensors: what DTensor calls on the parts comes here again."""
        whole = [_torch.distributed.public().Replicate()] * self.mesh.ndim

        def as_dtensor(value: Any) -> Any:
            """Constants, and what the function made of nothing, are the same in each process."""
            is_plain = isinstance(value, Tensor) and not _torch.distributed.is_dtensor(value)
            return _torch.distributed.placed(self.mesh, value, value, whole) if is_plain else value

        origin = self._origin((args, kwargs))
        args, kwargs = _torch.tensors.tree_map(as_dtensor, (args, kwargs))
        self._in_dtensor = True
        try:
            with self:
                return func(*args, **kwargs)
        except Exception as error:
            raise _Refused(origin) from error
        finally:
            self._in_dtensor = False


def _placements(name: Any, expected: Any, value: Any, dims: int) -> Any:
    """The placements of a result, or of each in a list, if it is the expected one."""
    if name != expected:
        raise _Refused()
    if isinstance(value, (list, tuple)):
        return [_placements(each, each, x, dims) for each, x in zip(name, value, strict=True)]
    if not isinstance(value, Tensor):
        return None
    if _torch.distributed.is_dtensor(value):
        return tuple(_torch.distributed.spec_of(value).placements)
    return (_torch.distributed.public().Replicate(),) * dims


def _first(placed: Any) -> Any:
    """Of placements along one dimension, these."""
    return list(map(_first, placed)) if isinstance(placed, list) else placed and placed[0]


def _leaves(found: list[Any]) -> Iterator[Any]:
    for placed in found:
        for each in placed if isinstance(placed, list) else [placed]:
            yield from each or ()
