"""The shapes of an op, said in a line: calls are validated by it, and fake impl, vmap rule and FLOPs follow from it."""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from customops import _torch
from customops._codegen.function import Source, emit_parameters
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Undo, nothing
from customops._dispatch.results import given
from customops._dispatch.rule import Rule
from customops._rules.vmap import Operands, _Strategy
from customops._schema.model import Argument
from customops._schema.shapes import Dim, Entry, Line, solved
from customops.errors import ArgumentError, DefinitionError, KernelError, brief, where

__tracebackhide__ = True  # pytest leaves the frames out

#: Of each return: the name of a tensor, or a dtype.
DTypes = str | torch.dtype | Sequence[str | torch.dtype]


class Sizes(NamedTuple):
    """What the names of a line are in a call."""

    names: dict[str, Any]
    #: The names that stand for several dimensions.
    stars: dict[str, tuple[Any, ...]]

    def value(self, code: str, /, **others: Any) -> Any:
        """The value of code as `Dim.code` has it."""
        names = self.products | self.names
        return eval(code.replace("$d_", "").replace("$", "_"), {"__builtins__": {}, **others}, names)

    @property
    def products(self) -> dict[str, Any]:
        """Of each name that stands for several dimensions, their product."""
        return {name: functools.reduce(operator.mul, star, 1) for name, star in self.stars.items()}


class Shapes:
    """The line of an op, or the function that gives one for a call, and what is said besides."""

    def __init__(
        self,
        said: str | Fn,
        handle: OperatorHandle,
        parallel: str = "",
        reduces: str = "",
        flops: str | None = None,
        dtype: DTypes | None = None,
    ) -> None:
        self.said, self.operator, self.schema, self.op = said, handle, handle.schema, handle.qualname
        self.parallel, self.reduces, self.flops_formula = parallel.split(), reduces.split(), flops
        self._lines: dict[str, Line] = {}
        self.line: Line | None = None
        if isinstance(said, str):
            self.line = self._line(said)
            for option, names in (("parallel", self.parallel), ("reduces", self.reduces)):
                for name in names:
                    self._check_split(self.line, option, name)
            if flops is not None:
                self._check_formula(flops, {*self.line.names, *self.line.stars})
        elif callable(said):
            self._function = bind_kernel(said, self.schema, self.op, "function of shapes", warn=True)
        else:
            raise self._error(
                "shapes= must be a line, or a function that returns one", '"n k, k m -> n m"', brief(said)
            )
        returns = [ret for ret in self.schema.returns if ret.holds_tensors]
        dtypes: list[Any] = list(dtype) if isinstance(dtype, (tuple, list)) else [dtype] * len(returns)
        names = [argument.name for argument in self.schema.arguments if argument.holds_tensors]
        if len(dtypes) != len(returns) or any(
            not (d is None or isinstance(d, torch.dtype) or d in names) for d in dtypes
        ):
            raise self._error(
                "dtype= is the name of a tensor or a dtype, for each return", ", ".join(names), brief(dtype)
            )
        self.dtypes = dtypes

    def _error(self, problem: str, expected: str, got: str) -> DefinitionError:
        return DefinitionError(problem, op=self.op, expected=expected, got=got)

    def _check_split(self, line: Line, option: str, name: str) -> None:
        """Raise unless a dimension may be split: it is a whole one wherever it stands, and of each tensor at most one.

        A part of an expression, or of what an integer argument says, would be of another size than the line says.
        """
        known = {f"*{star}" if star != "..." else star for star in line.stars} | {*line.names}
        inputs, outputs = [[*entries] for entries in (line.inputs.values(), line.outputs)]
        problem, among = "names no dimension of the line", ", ".join(sorted(known))
        if name in known:
            stands = {id(entry): [*_texts(entry)].count(name) for entry in (*inputs, *outputs)}
            in_outputs = [stands[id(entry)] for entry in outputs]
            dims = [dim for entry in (*inputs, *outputs) for dim in entry.dims]
            whole = () if name.startswith("*") else ("name",)  # ``batch`` is the product of ``*batch``
            parts = [part for dim in dims if dim.kind not in whole for part in dim.names]
            among = "a whole dimension of each tensor that has it, and of no integer argument"
            if not any(stands[id(entry)] for entry in inputs) or max(stands.values()) > 1:
                problem = "names a dimension that no argument has, or one tensor twice"
            elif name in line.integers or name.removeprefix("*") in parts:
                problem = "names a dimension that is also part of an expression, or an integer argument"
            elif option == "parallel" and not all(in_outputs):
                problem, among = "names a dimension that is not in every result", "a dimension of all results"
            elif option == "reduces" and any(in_outputs):
                problem, among = "names a dimension of a result", "a dimension that the results do not have"
            else:
                return
        raise self._error(f"{option}= {problem}", among, name)

    def _check_formula(self, formula: str, known: set[str]) -> None:
        """Raise unless a formula is made of names of the line, numbers and operators."""
        nodes: list[Any] = [None]  # of a text that is no expression
        with contextlib.suppress(SyntaxError):
            nodes = list(ast.walk(ast.parse(formula.strip(), mode="eval").body))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        kinds = (ast.Name, ast.Constant, ast.BinOp, ast.operator, ast.Load)
        if not names <= known or not all(isinstance(node, kinds) for node in nodes):
            unknown = ", ".join(sorted(names - known))
            raise self._error(
                f"flops= names what the line does not: {unknown}" if unknown else "flops= is no formula",
                f"{', '.join(sorted(known))}, numbers and operators",
                formula,
            )

    def _line(self, text: str) -> Line:
        if text not in self._lines:
            self._lines[text] = Line(text, self.schema, self.op)
        return self._lines[text]

    def line_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Line:
        """The line for a call."""
        if self.line is not None:
            return self.line
        text = self._function(*args, **kwargs)
        if not isinstance(text, str):
            raise KernelError(
                "the function of shapes returned no line",
                op=self.op,
                expected='such as "n k, k m -> n m"',
                got=brief(text),
                where=where(self._function),
            )
        return self._line(text)

    # What the names are in a call -----------------------------------------------------------------------------------

    def sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Line, Sizes]:
        """The line for a call with all its arguments, and the sizes; they may be symbols.

        Raises:
            ArgumentError: the tensors do not fit the line.
        """
        line, values = self.line_of(args, kwargs), {a.name: x for a, x in given(self.schema, args, kwargs)}
        sizes = Sizes({name: values[name] for name in line.integers}, {})
        places: dict[str, str] = {name: f"the argument {name}" for name in line.integers}
        for argument, entry in line.inputs.items():
            for label, x in _labelled(self.schema, argument, values[argument.name]):
                fewest = len(entry.dims)
                if x.dim() < fewest or (x.dim() > fewest and not entry.star):
                    self._refuse(f"{label} has {x.dim()} dimensions, and the line says {entry.text or 'none'}")
                if entry.star:
                    star = tuple(x.shape[len(entry.before) : x.dim() - len(entry.after)])
                    before = sizes.stars.setdefault(entry.star, star)
                    where_ = places.setdefault(f"*{entry.star}", label)
                    if len(before) != len(star) or any(map(_torch.tensors.sizes_differ, before, star)):
                        name = entry.star if entry.star == "..." else f"*{entry.star}"
                        self._refuse(f"{name} is {_shown(before)} in {where_} and {_shown(star)} in {label}")
        for kind, argument, dim, i, name in line.steps:
            for label, x in _labelled(self.schema, argument, values[argument.name]):
                size = x.shape[i]
                if kind == "each":
                    sizes.names.setdefault(name, []).append(size)
                elif name and name not in sizes.names:
                    code = "$size" if kind == "bind" else solved(dim.text, name)
                    sizes.names[name] = self._value(code or "", dim.text, sizes, label, size)
                    places[name] = label
                    if kind == "solve" and type(sizes.names[name]) is int and sizes.names[name] < 0:
                        self._refuse(f"{dim.text} is {size} in {label}, which makes {name} {sizes.names[name]}")
                else:
                    self._compare(dim, size, sizes, label, places)
        for i, entry in enumerate(line.outputs):
            for dim in (dim for dim, _ in entry.places() if dim.kind == "expression"):
                size = self._value(dim.code, dim.text, sizes, f"result {i}")
                if type(size) is int and size < 0:
                    self._refuse(f"{dim.text} of result {i} is {size}")
        return line, sizes

    def _value(self, code: str, text: str, sizes: Sizes, label: str, size: Any = None) -> Any:
        """The value of an expression, in which divisions are exact."""

        def exact(a: Any, b: Any) -> Any:
            if (type(b) is int and b == 0) or _torch.tensors.sizes_differ(a % b, 0):
                self._refuse(f"{text} of {label}: {b} does not divide {a}")
            return a // b

        return sizes.value(code, _exact=exact, _size=size)

    def _shape(self, entry: Entry, sizes: Sizes, label: str, dynamic: Callable[[], Any]) -> tuple[Any, ...]:
        """The shape of a result; `dynamic` makes a size that depends on data."""

        def size(dim: Dim) -> Any:
            if dim.kind == "data":
                return dynamic()
            return (
                sum(sizes.names[dim.names[0]]) if dim.kind == "each" else self._value(dim.code, dim.text, sizes, label)
            )

        star = sizes.stars[entry.star] if entry.star else ()
        return (*map(size, entry.before), *star, *map(size, entry.after))

    def _compare(self, dim: Dim, size: Any, sizes: Sizes, label: str, places: dict[str, str]) -> None:
        wanted = self._value(dim.code, dim.text, sizes, label)
        if not _torch.tensors.sizes_differ(wanted, size):
            return
        if dim.kind == "name":
            self._refuse(f"{dim.text} is {wanted} in {places[dim.text]} and {size} in {label}")
        self._refuse(
            f"{dim.text} is {wanted}, and {label} has {size}" if dim.names else f"{label} has {size} for {dim.text}"
        )

    def _refuse(self, problem: str) -> None:
        raise ArgumentError(problem, op=self.op)

    # What follows ---------------------------------------------------------------------------------------------------

    def validated(self, fn: Fn) -> Fn:
        """A kernel that is called if the tensors fit the line."""
        source = None if self.line is None else _source(self.line)
        if source is None:

            def check(*args: Any, **kwargs: Any) -> Any:
                self.sizes(args, kwargs)
                return fn(*args, **kwargs)

            return functools.update_wrapper(check, fn, updated=())
        return functools.update_wrapper(source.build(self.op, fn=fn, explain=self.explain), fn, updated=())

    def explain(self, *args: Any, **kwargs: Any) -> Exception:
        """The error for a call that the generated function refused."""
        self.sizes(args, kwargs)
        return ArgumentError("the tensors do not fit the line of shapes", op=self.op, expected=str(self.said))

    def fake(self, /, *args: Any, **kwargs: Any) -> Any:
        """The fake impl."""
        line, sizes = self.sizes(args, kwargs)
        values = {a.name: x for a, x in given(self.schema, args, kwargs)}
        tensors = [x for a in line.arguments for _, x in _labelled(self.schema, a, values[a.name])]
        options: dict[str, Any] = {"device": values.get("device")} if self.schema.device_argument else {}
        if tensors:
            options["device"] = tensors[0].device
        entries, dtypes = iter(line.outputs), iter(self.dtypes)
        results: list[Any] = []
        for ret in self.schema.returns:
            if not ret.holds_tensors:
                results.append(None)
                continue
            dtype, shape = next(dtypes), self._shape(next(entries), sizes, f"return {len(results)}", _dynamic_size)
            if isinstance(dtype, str):
                named = values[dtype]
                dtype = (named[0] if isinstance(named, (list, tuple)) else named).dtype
            elif dtype is None:
                dtype = tensors[0].dtype if tensors else None
            results.append(torch.empty(shape, dtype=dtype, **options))
        return tuple(results) if len(results) > 1 else results[0] if results else None

    def expected(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Any]]:
        """The shapes of the results of a call; None for a size that depends on data."""
        line, sizes = self.sizes(args, kwargs)
        return [[*self._shape(entry, sizes, "the result", lambda: None)] for entry in line.outputs]

    @property
    def is_batched(self) -> bool:
        """Does the line take any dimensions in front, which are said to be independent, and return them?"""
        if self.line is None or not self.line.outputs or self.schema.mutated:
            return False
        star = self.line.outputs[0].star
        has_it = [entry for entry in self.line.entries if entry.star == star]
        return (
            (star if star == "..." else f"*{star}") in self.parallel
            and all(entry.star == star for entry in self.line.outputs)
            and not any(entry.before for entry in has_it)
            and not any(dim.kind == "data" for entry in self.line.outputs for dim in entry.dims)
            and torch.Tag.nondeterministic_seeded not in self.operator.tags  # elements draw their own numbers
        )

    def vmap(self, info: Any, in_dims: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The batching rule: one call, with the batch among the dimensions that the line has in front."""
        assert self.line is not None
        operands = Operands(self.schema)
        values, others = operands.join(args, kwargs)
        star = self.line.outputs[0].star
        for argument, dims in zip(operands.arguments, in_dims, strict=True):
            is_batched = any(dim is not None for dim in (dims if isinstance(dims, list) else [dims]))
            if is_batched and self.line.inputs[argument].star != star:  # the line has no place for it
                return _Strategy("sequential", self.operator)(info, in_dims, *args, **kwargs)

        def place(argument: Argument, x: Any, dim: Any) -> Any:
            if isinstance(x, (list, tuple)) and argument.holds_tensors:
                return [place(argument, *pair) for pair in zip(x, dim, strict=True)]
            if not isinstance(x, Tensor):
                return x
            assert self.line is not None
            entry = self.line.inputs[argument]
            if entry.star != star:
                return x
            return x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)

        placed = [place(*each) for each in zip(operands.arguments, values, in_dims, strict=True)]
        return operands.call(self.operator.live.overload, *placed, **others), 0

    def flops(self, /, *args: Any, **kwargs: Any) -> Any:
        """The floating-point operations of a call, by the formula of the line."""
        assert self.flops_formula is not None
        _, sizes = self.sizes(args, kwargs)
        return sizes.value(self.flops_formula.strip())

    def shardings(self, tensors: Sequence[tuple[Argument, int]]) -> list[tuple[list[Any], list[Any]]]:
        """``(of each return, of each tensor)``: along which dimension each may be split; None: it is not.

        A return of "sum" is a part of a sum. `tensors` are those of a call: the argument that each is, or is part of,
        and its number of dimensions.
        """
        assert self.line is not None
        found = []
        entries = [(self.line.inputs[argument], dims) for argument, dims in tensors]
        lengths = {entry.star: dims - len(entry.dims) for entry, dims in entries if entry.star}
        for name in (*self.parallel, *self.reduces):
            star = name.removeprefix("*") if name.startswith(("*", "...")) else None
            for k in (None,) if star is None else range(lengths.get(star, 0)):
                inputs = [_place_of(entry, name, k, dims) for entry, dims in entries]
                outputs: list[Any] = ["sum"] * len(self.line.outputs)
                if name in self.parallel:
                    outputs = [_place_of(e, name, k, len(e.dims) + lengths.get(e.star, 0)) for e in self.line.outputs]
                found.append((outputs, inputs))
        return found


def _texts(entry: Entry) -> Iterator[str]:
    """The items of an entry, one for each dimension or star."""
    yield from (dim.text for dim in entry.dims)
    if entry.star:
        yield entry.star if entry.star == "..." else f"*{entry.star}"


def _place_of(entry: Entry, name: str, k: int | None, dims: int) -> int | None:
    """Where a dimension stands in an entry: the `k`-th of those that a star stands for."""
    if k is not None:
        return len(entry.before) + k if entry.star and entry.star == name.removeprefix("*") else None
    found = [i % dims for dim, i in entry.places() if dim.text == name]
    return found[0] if found else None


def _labelled(schema: Any, argument: Argument, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of an argument, and what to call them."""
    number = schema.arguments.index(argument) + 1
    if isinstance(value, (list, tuple)):
        return [(f"{argument.shown}[{i}] (argument {number})", x) for i, x in enumerate(value) if isinstance(x, Tensor)]
    return [(f"{argument.shown} (argument {number})", value)] if isinstance(value, Tensor) else []


def _shown(sizes: tuple[Any, ...]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"


def _dynamic_size() -> Any:
    return torch.library.get_ctx().new_dynamic_size()


class ShapesRule(Rule[None, Shapes]):
    """The line of an op. What follows from it are the values of other rules."""

    #: Called when the line is another one, or none.
    line_changed: Callable[[], None] = staticmethod(lambda: None)

    def _install(self, _: None, own_library: bool) -> Undo:
        return nothing

    def _changed(self) -> None:
        self.line_changed()


# The function that validates a call -----------------------------------------------------------------------------------

_VALIDATED = """\
def validated({parameters}):
    try:
        {unpack}
    except $ValueError:
        raise $explain({passed}) from None
    {optional}
    {check}
    return $fn({passed})
"""


def _source(line: Line) -> Source | None:
    """``(arguments) -> fn(arguments)`` where the tensors fit; what is wrong is found by `Shapes.explain`.

    None for a line that has more to it: lists, and names that only optional tensors have. A division that is not exact
    gives NaN, which no size is equal to.
    """
    schema = line.schema
    if {argument.type for argument in line.arguments} - {"Tensor", "Tensor?"}:
        return None
    solving = {(argument, i): name for kind, argument, _, i, name in line.steps if kind == "solve"}
    variables_of: dict[tuple[Argument, int], str] = {}
    source, bound = Source("validated", schema), {*line.integers}
    variables = {argument.name: argument.variable for argument in schema.arguments}
    passed = [*(variables[a.name] for a in schema.positional), *(f"{a.name}={a.variable}" for a in schema.keyword_only)]
    unpack, optional, tests = [f"$d_{name} = {variables[name]}" for name in line.integers], list[str](), list[str]()
    refuse = f"raise $explain({', '.join(passed)}) from None"
    for argument, entry in sorted(line.inputs.items(), key=lambda pair: pair[0].type):
        is_sure, targets, checks = argument.type == "Tensor", list[str](), list[str]()
        for dim, i in entry.places():
            variables_of[argument, i] = f"$s{len(targets)}_{argument.variable}"
            if (argument, i) in solving and not is_sure:
                return None
            targets.append(f"$s{len(targets)}_{argument.variable}")
            if dim.kind == "name" and dim.text not in bound:
                if not is_sure:
                    return None
                bound.add(dim.text)
                targets[-1] = f"$d_{dim.text}"
            elif dim.kind != "any" and (argument, i) not in solving:
                checks.append(f"{targets[-1]} != {dim.code}")
        if entry.star:
            name = f"*{entry.star}"
            variable = f"$x{len(bound)}_{argument.variable}" if name in bound else f"$star_{entry.star.strip('.')}"
            if name in bound:
                checks.append(f"{variable} != $star_{entry.star.strip('.')}")
            elif not is_sure:
                return None
            bound.add(name)
            targets.insert(len(entry.before), f"*{variable}")
        statement = f"[{', '.join(targets)}] = {argument.variable}.shape"
        if is_sure:
            unpack.append(statement)
            tests += checks
        else:
            optional += [f"if {argument.variable} is not None:", "    try:", f"        {statement}"]
            optional += ["    except $ValueError:", f"        {refuse}"]
            optional += [f"    if {' or '.join(checks)}:", f"        {refuse}"] if checks else []
    for kind, argument, dim, i, name in line.steps:
        if kind == "solve":
            code = (solved(dim.text, name) or "").replace("$size", variables_of[argument, i])
            unpack.append(f"$d_{name} = {code}")
            tests.append(f"not $d_{name} >= 0")
            bound.add(name)
    for dim in (dim for entry in line.outputs for dim, _ in entry.places() if dim.kind == "expression"):
        if not bound.issuperset(dim.names):  # the product of a star
            return None
        tests += [f"not {dim.code} >= 0"] if "//" in dim.text or "-" in dim.text else []
    parameters = emit_parameters(schema.positional, schema.keyword_only, {})
    check = [f"if {' or '.join(tests)}:", f"    {refuse}"] if tests else []
    source.fill(
        _VALIDATED, parameters=parameters, unpack=unpack or "pass", passed=passed, optional=optional, check=check
    )
    source.objects["exact"] = lambda a, b: a // b if b and a % b == 0 else math.nan
    return source
