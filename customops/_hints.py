"""A function's signature and type hints -> `Schema`; the one table of supported types."""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ForwardRef, List, NamedTuple, NoReturn, Optional, Sequence, Union

import torch
from torch import Tensor

from customops import _compat
from customops._schema import (
    Alias,
    Argument,
    Return,
    Schema,
    Tags,
    check_tags,
    default_text,
    normalize_tags,
)
from customops.errors import SchemaError, brief, innermost, name_of, where


class _Row(NamedTuple):
    """A Python type, its schema type, and which of its derived forms the dispatcher takes."""

    python: Any
    schema: str
    list_of: bool = False  # T[]
    list_of_optional: bool = False  # T?[]
    optional_list: bool = False  # T[]?, and T?[]? where there is T?[]


def _rows() -> Iterable[_Row]:
    yield _Row(Tensor, "Tensor", list_of=True, list_of_optional=True, optional_list=True)
    yield _Row(int, "SymInt", list_of=True, optional_list=True)
    yield _Row(float, "float", list_of=True, optional_list=True)
    yield _Row(bool, "bool", list_of=True, optional_list=True)
    yield _Row(str, "str")
    yield _Row(torch.types.Number, "Scalar", list_of=True)
    yield _Row(torch.dtype, "ScalarType")
    yield _Row(torch.device, "Device")
    if (group_name := _compat.group_name_type()) is not None:
        yield _Row(group_name, "str")


def _lists_of(python: Any) -> tuple[Any, ...]:
    return (Sequence[python], List[python], collections.abc.Sequence[python], list[python])


def _param_types() -> dict[Any, str]:
    table: dict[Any, str] = {}
    for row in _rows():
        table[row.python] = row.schema
        table[Optional[row.python]] = f"{row.schema}?"
        lists = {seq: f"{row.schema}[]" for seq in _lists_of(row.python) if row.list_of}
        lists |= {seq: f"{row.schema}?[]" for seq in _lists_of(Optional[row.python]) if row.list_of_optional}
        table |= lists
        table |= {Optional[seq]: f"{text}?" for seq, text in lists.items() if row.optional_list}
    return table


#: Python type of a parameter -> schema type.
SUPPORTED_PARAM_TYPES: dict[Any, str] = _param_types()

#: Python type of a return -> schema type; a tuple of these is several returns.
SUPPORTED_RETURN_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    List[Tensor]: "Tensor[]",
    list[Tensor]: "Tensor[]",
    int: "SymInt",
    float: "float",
    bool: "bool",
    torch.types.Number: "Scalar",
}

#: Positional-or-keyword and keyword-only parameters have a place in a schema; these have not.
_NO_PLACE = {
    inspect.Parameter.VAR_POSITIONAL: "varargs (*{})",
    inspect.Parameter.VAR_KEYWORD: "varkwargs (**{})",
    inspect.Parameter.POSITIONAL_ONLY: "positional-only parameters ({})",
}


def tuple_to_list(tuple_type: Any) -> Any:
    """The list type nearest to a tuple type: ``Tuple[int, int]`` -> ``list[int]``, bare ``Tuple`` -> ``list``."""
    items = typing.get_args(tuple_type)
    if not items:
        return list
    if len(items) == 2 and items[1] is Ellipsis:
        items = items[:1]
    return types.GenericAlias(list, Union[items])


def infer_schema(
    fn: Callable[..., Any],
    /,
    *,
    mutates_args: str | Iterable[str],
    op_name: str | None = None,
    tags: Tags = (),
) -> str:
    """Schema text of a typed function.

    Args:
        fn: every parameter and the return must be annotated with a type of `SUPPORTED_PARAM_TYPES` or
            `SUPPORTED_RETURN_TYPES`.
        mutates_args: names of the arguments that `fn` writes to, or "unknown" for all tensors.
        op_name: put before the schema if given.
        tags: `torch.Tag.inplace` and `torch.Tag.out` add the alias annotations of the returns.

    Raises:
        SchemaError: a ValueError that names the function, the parameter and what to write instead.

    Example:
        >>> def scale(x: torch.Tensor, by: float = 2.0) -> torch.Tensor: ...
        >>> infer_schema(scale, mutates_args=())
        '(Tensor x, float by=2.0) -> Tensor'
    """
    return (op_name or "") + str(schema_of(fn, mutates_args, normalize_tags(tags)))


def schema_of(
    fn: Callable[..., Any],
    mutates_args: str | Iterable[str],
    tags: tuple[torch.Tag, ...] = (),
    op: str | None = None,
) -> Schema:
    """The `Schema` of a typed function, for `op`; see `infer_schema`."""
    reader = _Reader.of(fn, op or name_of(fn))
    parameters = reader.signature.parameters
    mutated = _mutated_names(mutates_args, parameters, reader)
    arguments = tuple(reader.argument(index, parameter, mutated) for index, parameter in enumerate(parameters.values()))
    returns = _alias_returns(arguments, reader.returns(), tags)
    schema = Schema(arguments, returns)
    check_tags(schema, tags, op=reader.op, where=where(fn))
    return schema


def written_names(mutates_args: str | Iterable[str], op: str, place: str | None = None) -> str | tuple[str, ...]:
    """`mutates_args`, checked, as "unknown" or as a tuple: it may be an iterator that can be read once.

    Raises:
        SchemaError: it is neither the word nor names.
    """
    if isinstance(mutates_args, str) and mutates_args == "unknown":
        return mutates_args
    problem = "mutates_args must be an iterable of names or the string 'unknown'"
    if isinstance(mutates_args, str):
        fix = f"mutates_args=({mutates_args!r},)"
        raise SchemaError(f"{problem}, not {mutates_args!r}", op=op, where=place, fix=fix)
    names = tuple(mutates_args) if isinstance(mutates_args, collections.abc.Iterable) else (mutates_args,)
    if not all(isinstance(name, str) for name in names):
        fix = "mutates_args=() for a function that writes to none of its arguments"
        raise SchemaError(problem, op=op, got=brief(mutates_args), where=place, fix=fix)
    return names


def _mutated_names(
    mutates_args: str | Iterable[str], parameters: Iterable[str], reader: _Reader
) -> frozenset[str] | None:
    """The names in `mutates_args`; None stands for "unknown"."""
    written = written_names(mutates_args, reader.op, where(reader.fn))
    if written == "unknown":
        return None
    names = frozenset(written)
    if missing := names - frozenset(parameters):
        listed = ", ".join(sorted(map(repr, missing)))
        reader.fail(
            f"{{{listed}}} in mutates_args were not found among the parameters", got=f"({', '.join(parameters)})"
        )
    return names


def _alias_returns(
    arguments: tuple[Argument, ...], returns: tuple[Return, ...], tags: tuple[torch.Tag, ...]
) -> tuple[Return, ...]:
    """Let the returns of an in-place or out op alias what it writes to; `check_tags` judges the result."""
    targets: list[Argument] = []
    if torch.Tag.inplace in tags:
        targets = [a for a in arguments if not a.kwarg_only][:1]
    elif torch.Tag.out in tags:
        targets = [a for a in arguments if a.is_written]
    if len(targets) != len(returns):
        return returns
    return tuple(Return(r.type, target.alias) for r, target in zip(returns, targets, strict=True))


@dataclass(frozen=True)
class _Reader:
    """Reads one function's annotations; every complaint names that function and its line."""

    fn: Callable[..., Any]
    op: str
    signature: inspect.Signature
    globals: dict[str, Any]

    @classmethod
    def of(cls, fn: Callable[..., Any], op: str) -> _Reader:
        if not callable(fn) or isinstance(fn, type):
            raise SchemaError("expected a function", got=brief(fn), fix="decorate a typed Python function")
        try:
            signature = inspect.signature(fn)
        except (ValueError, TypeError) as error:
            raise SchemaError(
                "the signature cannot be read (it is not a Python function)",
                op=op,
                fix="wrap it in a typed Python function, or pass schema=",
            ) from error
        inner = innermost(fn)
        if not hasattr(inner, "__globals__"):
            inner = getattr(type(inner).__call__, "__wrapped__", type(inner).__call__)
        return cls(fn, op, signature, getattr(inner, "__globals__", {}))

    def fail(self, problem: str, **fields: str | None) -> NoReturn:
        raise SchemaError(problem, op=self.op, where=where(self.fn), **fields)

    def argument(self, index: int, parameter: inspect.Parameter, mutated: frozenset[str] | None) -> Argument:
        name = parameter.name
        if parameter.kind in _NO_PLACE:
            what = _NO_PLACE[parameter.kind].format(name)
            self.fail(f"{what} are not supported", fix="write every argument as a named, typed parameter")
        if not name.isascii():
            self.fail(f"parameter {name}: names in a schema are ASCII", fix="rename it")
        if parameter.annotation is inspect.Parameter.empty:
            if index == 0 and name in ("self", "cls"):
                self.fail(
                    f"a method cannot be an op: its first parameter is {name}",
                    fix="take a function that the method calls, with what it needs of the object as arguments",
                )
            self.fail(f"parameter {name} must have a type annotation", fix=f"e.g. {name}: torch.Tensor")
        annotation = self.resolve(parameter.annotation)
        type_ = _lookup(SUPPORTED_PARAM_TYPES, annotation) or _compat.opaque_type_name(annotation)
        if type_ is None:
            self.unsupported(f"parameter {name}", annotation, SUPPORTED_PARAM_TYPES)
        if parameter.default is None:  # `k: int = None` is meant as Optional[int]
            type_ = _lookup(SUPPORTED_PARAM_TYPES, Optional[annotation]) or type_
        alias = self.alias(index, name, type_, mutated)
        default = parameter.default
        if default is inspect.Parameter.empty:
            return Argument(type_, alias, name, kwarg_only=parameter.kind is parameter.KEYWORD_ONLY)
        return self.with_default(Argument(type_, alias, name, default, parameter.kind is parameter.KEYWORD_ONLY))

    def alias(self, index: int, name: str, type_: str, mutated: frozenset[str] | None) -> Alias | None:
        is_tensor = type_.startswith("Tensor")
        if mutated is None:
            return Alias(frozenset({f"a{index}"}), write=True) if is_tensor else None
        if name not in mutated:
            return None
        if not is_tensor:
            self.fail(f"parameter {name} is in mutates_args, but only Tensors or collections of Tensors can be mutated")
        return Alias(frozenset({f"a{index}"}), write=True)

    def with_default(self, argument: Argument) -> Argument:
        """Check a default against its type, and find how to write it in schema text."""
        given = argument.default
        problem = _default_problem(argument.type, given)
        if problem is not None:
            self.fail(
                f"parameter {argument.name} has an unsupported default: {problem}",
                expected=argument.type,
                got=brief(given),
            )
        argument = dataclasses.replace(argument, default=_dispatched(argument.type, given))
        if default_text(argument.type, argument.default) is not None:
            return argument
        if argument.type.endswith("?"):
            # None must go on meaning None here, so the text has no word left for the default.
            self.fail(
                f"parameter {argument.name} has an unsupported default: schema text cannot hold it, and None has its "
                "own meaning here",
                expected=argument.type,
                got=brief(given),
                fix=f"drop Optional[...] from {argument.name}, or default to None and fill the value in the kernel",
            )
        return dataclasses.replace(argument, type=argument.type + "?", default_is_none_in_text=True)

    def returns(self) -> tuple[Return, ...]:
        if self.signature.return_annotation is inspect.Signature.empty:
            self.fail(
                "No return type annotation was provided. Please add one.",
                fix="e.g. -> torch.Tensor, or -> None for an op that only mutates",
            )
        annotation = self.resolve(self.signature.return_annotation)
        if annotation is None or annotation is type(None):
            return ()
        if typing.get_origin(annotation) is not tuple or not typing.get_args(annotation):
            return (Return(self.return_type(annotation, annotation)),)
        types_ = [self.return_type(item, annotation) for item in typing.get_args(annotation)]
        return (Return(f"({types_[0]})"),) if len(types_) == 1 else tuple(map(Return, types_))

    def return_type(self, annotation: Any, whole: Any) -> str:
        found = _lookup(SUPPORTED_RETURN_TYPES, annotation) or _compat.opaque_type_name(annotation, as_return=True)
        return found or self.unsupported("the return", whole, SUPPORTED_RETURN_TYPES)

    def unsupported(self, what: str, annotation: Any, table: dict[Any, str]) -> NoReturn:
        self.fail(
            f"{what} has unsupported type {_show(annotation)}. {_advice(annotation, table)}".rstrip(),
            fix="write a schema by hand with schema= if the dispatcher has such a type",
        )

    def resolve(self, annotation: Any) -> Any:
        """Evaluate strings, also inside generics, in the function's own globals."""
        if isinstance(annotation, ForwardRef):
            annotation = annotation.__forward_arg__
        if isinstance(annotation, str):
            return self.resolve(self.evaluate(annotation))
        origin, items = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is None or origin is typing.Literal:
            return annotation
        if origin is typing.Annotated:
            return annotation  # unsupported; `_advice` looks inside
        resolved = tuple(self.resolve(item) for item in items)
        if all(new is old for new, old in zip(resolved, items, strict=True)):
            return annotation
        return Union[resolved] if origin in (Union, types.UnionType) else types.GenericAlias(origin, resolved)

    def evaluate(self, text: str) -> Any:
        try:
            return eval(text, {**self.globals, "__builtins__": self.globals.get("__builtins__", builtins)})
        except Exception as error:
            self.fail(
                f"Unsupported type annotation {text}. It is not a type. ({type(error).__name__}: {error})",
                fix="a quoted annotation (or any, after `from __future__ import annotations`) is evaluated in the "
                "function's module: import or define the name there, not inside a function",
            )


def _lookup(table: dict[Any, str], annotation: Any) -> str | None:
    try:
        return table.get(annotation)
    except TypeError:  # an unhashable annotation is no key of the table
        return None


def _default_problem(type_: str, default: Any) -> str | None:
    """Why `default` is no value of schema type `type_`, or None."""
    if default is None:
        return None if type_.endswith("?") else f"None is not a {type_}: make the type Optional[...]"
    base = type_.removesuffix("?")
    if base.endswith("[]"):
        if not isinstance(default, (list, tuple)):
            return f"expected a list, got {type(default).__name__}"
        return next((p for p in (_default_problem(base[:-2], item) for item in default) if p), None)
    allowed = _DEFAULT_TYPES.get(base)
    if allowed is None or not isinstance(default, allowed):
        return f"a {type(default).__name__} cannot be the default of a {base}"
    if isinstance(default, int):
        return _number_problem(base, default)
    return _text_problem(base, default) if isinstance(default, str) else None


def _number_problem(base: str, default: int) -> str | None:
    if base == "float":
        return "the number is too large for a float" if abs(default) > sys.float_info.max else None
    return None if -(2**63) <= default < 2**63 else "the dispatcher's integers have 64 bits"


def _text_problem(base: str, default: str) -> str | None:
    try:
        if base == "Device":
            torch.device(default)
        default.encode()
    except RuntimeError:
        return "torch knows no such device"
    except UnicodeEncodeError:
        return "the string holds surrogates, which UTF-8 cannot encode"
    return None


def _dispatched(type_: str, default: Any) -> Any:
    """`default` as the dispatcher hands it over where a later argument is given: ``3`` for a float is ``3.0``.

    A device given as a string stays one: that is what torch.library passes.
    """
    base = type_.removesuffix("?")
    if isinstance(default, (list, tuple)):
        return tuple(_dispatched(base[:-2], item) for item in default)
    if base == "Scalar" and not isinstance(default, bool):
        base = "float" if isinstance(default, float) else "SymInt"
    convert = _PLAIN.get(base)
    return default if default is None or convert is None else convert(default)


#: What makes the plain value of a subclass (a member of an IntEnum, a numpy float64).
_PLAIN: dict[str, Callable[[Any], Any]] = {"SymInt": int, "float": float, "str": "".join}


_DEFAULT_TYPES: dict[str, tuple[type, ...]] = {
    "SymInt": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "Scalar": (int, float, bool),
    "ScalarType": (torch.dtype,),
    "Device": (torch.device, str),
}


# Advice ---------------------------------------------------------------------------------------------------------

#: Types with a close relative in the table.
_RELATIVES: dict[Any, str] = {
    torch.nn.Parameter: "torch.Tensor",
    torch.Size: "Sequence[int]",
    complex: "torch.types.Number",
    bytes: "str",
    object: "torch.Tensor",
    torch.Generator: "torch.Tensor (the generator's state)",
}


def _advice(annotation: Any, table: dict[Any, str]) -> str:
    """A sentence with the nearest type that works, or an empty one."""
    if annotation is tuple or typing.get_origin(annotation) is tuple:
        nearest = tuple_to_list(annotation)
        text = "Tuples are not supported here; use a list. " if table is SUPPORTED_PARAM_TYPES else ""
        return f"{text}For example, {_show(nearest)}." if _lookup(table, nearest) else text.rstrip()
    relative = _nearest(annotation, table)
    return f"The nearest type that works is {relative}." if relative else ""


def _nearest(annotation: Any, table: dict[Any, str]) -> str | None:
    origin, items = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated or origin is typing.Final:
        return _show(items[0]) if _lookup(table, items[0]) else _nearest(items[0], table)
    if origin is typing.Literal:
        return _show(type(items[0])) if _lookup(table, type(items[0])) else None
    if isinstance(annotation, type):
        return _nearest_class(annotation, table)
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return _instead_of_dict(items[1] if len(items) == 2 else None, table)
    candidates: list[Any] = []
    if origin in (Union, types.UnionType):
        plain = [item for item in items if item is not type(None)]
        candidates = [types.GenericAlias(list, Optional[item]) for inner in plain for item in typing.get_args(inner)]
        candidates += [torch.types.Number] if set(plain) <= {int, float, bool, complex} else []
        candidates += plain[:1]
    elif isinstance(origin, type) and issubclass(origin, collections.abc.Iterable) and items:
        item = next((i for i in typing.get_args(items[0]) if i is not type(None)), items[0])
        candidates = [types.GenericAlias(list, item)]
    return next((_show(candidate) for candidate in candidates if _lookup(table, candidate)), None)


def _instead_of_dict(value: Any, table: dict[Any, str]) -> str:
    values = types.GenericAlias(list, value) if value is not None else None
    text = f"{_show(values)}, of its values" if _lookup(table, values) else "one parameter for each of its values"
    return f"{text}; let a function around the op deal with the dict"


def _nearest_class(annotation: type, table: dict[Any, str]) -> str | None:
    if dataclasses.is_dataclass(annotation):
        return f"one parameter for each of its fields ({', '.join(x.name for x in dataclasses.fields(annotation))})"
    if issubclass(annotation, tuple) and hasattr(annotation, "_fields"):
        return f"one parameter for each of its fields ({', '.join(annotation._fields)})"
    if issubclass(annotation, collections.abc.Mapping):
        return _instead_of_dict(None, table)
    if annotation in _RELATIVES:
        return _RELATIVES[annotation]
    if annotation.__module__.split(".")[0] == "numpy":
        return "torch.Tensor"
    if annotation is list or annotation is set:
        return "list[torch.Tensor]"
    return next((_show(base) for base in annotation.__mro__[1:-1] if _lookup(table, base)), None)


def _show(annotation: Any) -> str:
    """``int`` rather than ``<class 'int'>``; everything else as Python prints it."""
    if isinstance(annotation, type) and not typing.get_origin(annotation):
        module = annotation.__module__
        return annotation.__qualname__ if module == "builtins" else f"{module}.{annotation.__qualname__}"
    return str(annotation)
