"""Schema inference: the type hints of a function as a schema."""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ForwardRef, NoReturn, Optional, Union

import torch

from customops._schema.advice import advice, show
from customops._schema.defaults import default_problem, default_text, dispatched
from customops._schema.model import Alias, Argument, Return, Schema
from customops._schema.tags import Tags, check_tags, normalize_tags
from customops._schema.types import SUPPORTED_PARAM_TYPES, SUPPORTED_RETURN_TYPES, param_type, return_type
from customops.errors import SchemaError, brief, innermost, name_of, where

#: Positional-or-keyword and keyword-only parameters have a place in a schema; these have not.
_NO_PLACE = {
    inspect.Parameter.VAR_POSITIONAL: "varargs (*{})",
    inspect.Parameter.VAR_KEYWORD: "varkwargs (**{})",
    inspect.Parameter.POSITIONAL_ONLY: "positional-only parameters ({})",
}


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


def mutates_args_names(mutates_args: str | Iterable[str], op: str, place: str | None = None) -> str | tuple[str, ...]:
    """Check `mutates_args`, and return it as "unknown" or as a tuple: it may be an iterator, to be read once.

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
    """The names in `mutates_args`, each one a parameter; None stands for "unknown"."""
    given = mutates_args_names(mutates_args, reader.op, where(reader.fn))
    if given == "unknown":
        return None
    names = frozenset(given)
    if missing := names - frozenset(parameters):
        listed = ", ".join(sorted(map(repr, missing)))
        reader.fail(
            f"{{{listed}}} in mutates_args were not found among the parameters", got=f"({', '.join(parameters)})"
        )
    return names


def _alias_returns(
    arguments: tuple[Argument, ...], returns: tuple[Return, ...], tags: tuple[torch.Tag, ...]
) -> tuple[Return, ...]:
    """The returns with the aliases that an in-place or out op has; `check_tags` judges the result."""
    targets: list[Argument] = []
    if torch.Tag.inplace in tags:
        targets = [a for a in arguments if not a.kwarg_only][:1]
    elif torch.Tag.out in tags:
        targets = [a for a in arguments if a.is_mutated]
    if len(targets) != len(returns):
        return returns
    return tuple(Return(r.type, target.alias) for r, target in zip(returns, targets, strict=True))


@dataclass(frozen=True)
class _Reader:
    """Reads the annotations of one function; every error names the function and its line."""

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
        type_ = param_type(annotation)
        if type_ is None:
            self.unsupported(f"parameter {name}", annotation, SUPPORTED_PARAM_TYPES)
        if parameter.default is None:  # `k: int = None` is meant as Optional[int]
            type_ = param_type(Optional[annotation]) or type_
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
        """The argument with its default as the dispatcher has it; optional where schema text cannot hold the default.

        Raises:
            SchemaError: the type has no such default.
        """
        given = argument.default
        problem = default_problem(argument.type, given)
        if problem is not None:
            self.fail(
                f"parameter {argument.name} has an unsupported default: {problem}",
                expected=argument.type,
                got=brief(given),
            )
        argument = dataclasses.replace(argument, default=dispatched(argument.type, given))
        if default_text(argument.type, argument.default) is not None:
            return argument
        if argument.type.endswith("?"):
            # None means None here, so it cannot stand for the default.
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
        return return_type(annotation) or self.unsupported("the return", whole, SUPPORTED_RETURN_TYPES)

    def unsupported(self, what: str, annotation: Any, table: dict[Any, str]) -> NoReturn:
        self.fail(
            f"{what} has unsupported type {show(annotation)}. {advice(annotation, table)}".rstrip(),
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
            return annotation  # unsupported; `advice` looks inside
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
