"""Schema inference: the type hints of a function as a schema."""

from __future__ import annotations

import builtins
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ForwardRef, NamedTuple, NoReturn, Optional, Union

import torch
import typing_extensions

from customops import _compat
from customops._schema.annotations import annotated, union_members
from customops._schema.arguments import ArgumentBuilder
from customops._schema.forms import TupleForm
from customops._schema.hints import HintReader
from customops._schema.model import REQUIRED, Return, Schema
from customops._schema.nodes import Group, Leaf, Node, Parameter, Signature
from customops._schema.spelling import show
from customops._schema.tags import Tags, check_tags, normalize_tags
from customops._schema.types import param_type, return_type
from customops._schema.writes import alias_returns, implied_tags, mutated_paths, mutates_args_names
from customops.errors import SchemaError, brief, innermost, name_of, where

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_ONLY)


def infer_schema(
    fn: Callable[..., Any],
    /,
    *,
    mutates_args: str | Iterable[str] | None = None,
    op_name: str | None = None,
    tags: Tags = (),
) -> str:
    """Infer the schema of a function from its type hints.

    Args:
        fn: the function. Every parameter and the return must be annotated.
        mutates_args: names of the arguments that `fn` mutates, or "unknown" if it may mutate every tensor. None: those
            annotated with `Mutates`.
        op_name: a name to put before the schema.
        tags: `torch.Tag.inplace` and `torch.Tag.out` add the alias annotations of the returns.

    Returns:
        The schema as text.

    Raises:
        SchemaError: the annotations make no schema. It is a ValueError that names the function and the parameter, and
            says what to write instead.

    Example:
        >>> def scale(x: torch.Tensor, by: float = 2.0) -> torch.Tensor: ...
        >>> infer_schema(scale, mutates_args=())
        '(Tensor x, float by=2.0) -> Tensor'
    """
    return (op_name or "") + str(read(fn, mutates_args, normalize_tags(tags)).schema)


class Inferred(NamedTuple):
    """What the signature of a function says."""

    schema: Schema
    #: Those that were given, and what the annotations ask for.
    tags: tuple[torch.Tag, ...]
    #: None where the function takes and returns just what the schema says.
    signature: Signature | None


def read(
    fn: Callable[..., Any],
    mutates_args: str | Iterable[str] | None,
    tags: tuple[torch.Tag, ...] = (),
    op: str | None = None,
) -> Inferred:
    """What the signature of a function says, for `op`. `mutates_args` is None if the annotations alone are to tell."""
    reader = _Reader.of(fn, op or name_of(fn))
    parameters = tuple(reader.parameter(*each) for each in enumerate(reader.signature.parameters.values()))
    given = None if mutates_args is None else mutates_args_names(mutates_args, reader.op, where(fn))
    mutated = mutated_paths(given, parameters, reader.fail)
    arguments = ArgumentBuilder(reader.fail, reader.op, mutated).build(parameters)
    result, returns = reader.result()
    tags = implied_tags(tags, result, arguments, reader.fail)
    schema = Schema(arguments, alias_returns(arguments, returns, tags))
    check_tags(schema, tags, op=reader.op, where=where(fn))
    signature = Signature(parameters, result, returns_plainly=_is_plain(result))
    return Inferred(schema, tags, None if signature.is_plain else signature)


def _is_plain(result: Node | None) -> bool:
    """Is a function's result what an op returns: one plain value, or a tuple of these?"""
    if isinstance(result, Group) and isinstance(result.form, TupleForm) and not result.form.is_named:
        return all(node.is_plain for node in result.fields.values())
    return result is None or result.is_plain


@dataclass(frozen=True)
class _Reader:
    """Reads the annotations of one function; every error names the function and its line."""

    fn: Callable[..., Any]
    op: str
    signature: inspect.Signature
    globals: dict[str, Any]
    #: The parameter whose annotation is read.
    argument: str | None = None

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

    def parameter(self, index: int, parameter: inspect.Parameter) -> Parameter:
        name, kind, default = parameter.name, parameter.kind, parameter.default
        if not name.isascii():
            self.fail(f"parameter {name}: names in a schema are ASCII", fix="rename it")
        if parameter.annotation is inspect.Parameter.empty:
            if index == 0 and name in ("self", "cls"):
                self.fail(
                    f"a method cannot be an op: its first parameter is {name}",
                    fix="take a function that the method calls, with what it needs of the object as arguments",
                )
            what, hint = f"parameter {name}", f"{name}: torch.Tensor"
            if kind is inspect.Parameter.VAR_POSITIONAL:
                what, hint = f"varargs (*{name})", f"*{hint}"
            elif kind is inspect.Parameter.VAR_KEYWORD:
                what, hint = f"varkwargs (**{name})", f"**{name}: Unpack[Options], of a class Options(TypedDict)"
            if name_of(self.fn) == "<lambda>":
                hint = 'def instead of lambda, with annotations; or schema="(Tensor x) -> Tensor"'
            self.fail(f"{what} must have a type annotation", fix=f"e.g. {hint}")
        return replace(self, argument=name)._annotated(name, kind, parameter.annotation, default)

    def _annotated(self, name: str, kind: Any, annotation: Any, default: Any) -> Parameter:
        annotation = self.resolve(annotation)
        if default is inspect.Parameter.empty:
            default = REQUIRED
        type_ = param_type(annotation) if kind in _NAMED else None
        if default is None:  # `k: int = None` is meant as Optional[int]
            type_ = param_type(Optional[annotation]) or type_
        if type_ is not None and not (type_ == "ScalarType[]" and _compat.schemas.dtypes_in_lists_are_numbers()):
            return Parameter(name, kind, Leaf(name, name, type_, default=default), default)
        return Parameter(name, kind, self._rich(name, kind, annotation, default), default)

    def _rich(self, name: str, kind: Any, annotation: Any, default: Any) -> Node:
        """The node of a parameter whose type is none of the dispatcher's."""
        hints = HintReader(self.fail, self.resolve)
        if kind is inspect.Parameter.VAR_POSITIONAL:
            return hints.node(types.GenericAlias(tuple, (annotation, Ellipsis)), name, name, written=annotation)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            origin, items = typing.get_origin(annotation), typing.get_args(annotation)
            is_unpacked = getattr(origin, "__name__", str(origin)).rpartition(".")[2] == "Unpack"
            if not (is_unpacked and typing_extensions.is_typeddict(items[0])):
                self.fail(
                    f"varkwargs (**{name}) are not supported",
                    got=show(annotation),
                    fix=f"**{name}: Unpack[Options], of a class Options(TypedDict), or a named parameter for each",
                )
            return hints.node(items[0], "", name)
        if default is None and type(None) not in union_members(annotation):
            annotation = Optional[annotation]
        return hints.node(annotation, name, name, default)

    def result(self) -> tuple[Node | None, tuple[Return, ...]]:
        """What the function returns, and what the op returns for that."""
        if self.signature.return_annotation is inspect.Signature.empty:
            self.fail(
                "No return type annotation was provided. Please add one.",
                fix="e.g. -> torch.Tensor, or -> None for an op that only mutates",
            )
        annotation = self.resolve(self.signature.return_annotation)
        if annotation is None or annotation is type(None):
            return None, ()
        type_ = return_type(annotation)
        if type_ is not None:
            return Leaf("result", "", type_), (Return(type_),)
        node = self._plain_tuple(annotation) or HintReader(self.fail, self.resolve, returns=True).node(
            annotation, "result", ""
        )
        if _is_plain(node) and isinstance(node, Group) and len(node.leaves) == 1:
            return node, (Return(f"({node.leaves[0].type})"),)
        return node, tuple(Return(leaf.type) for leaf in node.leaves)

    def _plain_tuple(self, annotation: Any) -> Group | None:
        """The node of a tuple of which each item is one return."""
        items = typing.get_args(annotation) if typing.get_origin(annotation) is tuple else ()
        types_ = [return_type(item) for item in items]
        if not types_ or None in types_:
            return None
        fields: dict[str, Node] = {
            str(i): Leaf(f"result_{i}", f"[{i}]", type_) for i, type_ in enumerate(types_) if type_ is not None
        }
        return Group("result", "", TupleForm(tuple, tuple(fields)), fields)

    def resolve(self, annotation: Any) -> Any:
        """Evaluate strings, also inside generics, in the function's own globals."""
        if isinstance(annotation, ForwardRef):
            annotation = annotation.__forward_arg__
        if isinstance(annotation, str):
            return self.resolve(self.evaluate(annotation))
        if isinstance(annotation, type) and not hasattr(annotation, "__origin__"):  # list[int] is a type on Python 3.10
            return annotation
        origin, items = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is None or origin is typing.Literal:
            return annotation
        if origin is typing.Annotated:
            inner = self.resolve(annotation.__origin__)
            return annotation if inner is annotation.__origin__ else annotated(inner, annotation.__metadata__)
        resolved = tuple(self.resolve(item) for item in items)
        if all(new is old for new, old in zip(resolved, items, strict=True)):
            return annotation
        return Union[resolved] if origin in (Union, types.UnionType) else types.GenericAlias(origin, resolved)

    def evaluate(self, text: str) -> Any:
        if text in self.globals:
            return self.globals[text]
        scope = self.globals.get("__builtins__", builtins)
        built_in = scope if isinstance(scope, dict) else vars(scope)
        if text in built_in:
            return built_in[text]
        try:
            return eval(text, {**self.globals, "__builtins__": scope})
        except Exception as error:
            self.fail(
                f"Unsupported type annotation {text}. It is not a type. ({type(error).__name__}: {error})",
                argument=self.argument,
                fix="a quoted annotation (or any, after `from __future__ import annotations`) is evaluated in the "
                "function's module: import or define the name there, not inside a function",
            )
