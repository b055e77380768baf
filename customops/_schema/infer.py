"""Schema inference: the type hints of a function as a schema."""

from __future__ import annotations

import builtins
import collections.abc
import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ForwardRef, NamedTuple, NoReturn, Optional, Union

import torch
import typing_extensions

from customops import _torch
from customops._schema.annotations import annotated, show, union_members
from customops._schema.default_advice import lowered, misfit, plain_fix
from customops._schema.hints import HintReader
from customops._schema.model import REQUIRED, Alias, Argument, Return, Schema
from customops._schema.structure import Group, Leaf, Node, Parameter, Signature, TupleForm, Values
from customops._schema.tags import Tags, check_tags, normalize_tags
from customops._schema.types import default_problem, default_text, dispatched, param_type, return_type
from customops._torch.schema import Tag
from customops.errors import SchemaError, brief, innermost, name_of, where

# From parameters to the arguments of a schema: order, default values, and what is written -----------------------------


@dataclass
class ArgumentBuilder:
    """Makes the arguments of an op.

    A field with a default is a keyword-only argument: one that is added later moves no other. Old exported programs
    go on to work: torch replays positional arguments in order, and would give it the value of the next.
    """

    fail: Callable[..., NoReturn]
    op: str
    #: The paths in ``mutates_args``; None for "unknown".
    mutated: Collection[str] | None
    positional: list[Argument] = field(default_factory=list)
    keyword_only: list[Argument] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)

    def build(self, parameters: Iterable[Parameter]) -> tuple[Argument, ...]:
        for parameter in parameters:
            # A list of the rest has no default, so it cannot stand behind arguments that have one.
            is_rest = parameter.stars == "*" and any(each.has_default for each in self.positional)
            into = self.keyword_only if is_rest or parameter.by_keyword else self.positional
            self._add(parameter.node, None, into, in_optional=False, is_field=False)
        return (*self.positional, *self.keyword_only)

    def _add(
        self, node: Node, values: Values | None, into: list[Argument], *, in_optional: bool, is_field: bool
    ) -> None:
        if node.default is not REQUIRED:
            into = self.keyword_only if is_field else into
            values = self._default_values(node) if values is None else values
        if not isinstance(node, Group):
            for leaf in node.leaves:
                self._add_leaf(leaf, REQUIRED if values is None else values[leaf.name], into, in_optional)
            return
        is_absent = False
        if node.given is not None:
            self._add_leaf(node.given, REQUIRED if values is None else values[node.given.name], into, False)
            in_optional, is_absent = True, values is not None and not values[node.given.name]
        for each in node.fields.values():
            of_field = is_absent and each.default is not REQUIRED
            self._add(each, None if of_field else values, into, in_optional=in_optional, is_field=True)

    def _default_values(self, node: Node) -> Values:
        if isinstance(node, Leaf) and node.is_plain:
            return {node.name: node.default}
        wrong = misfit(node, node.default, self.op)
        if wrong is not None:
            problem = "None is not allowed" if wrong.value is None else f"it is not {wrong.expected}"
            self._bad_default(wrong.path, wrong.value, problem, wrong.expected, wrong.fix)
        values = node.take_apart(node.default)
        for leaf in node.leaves:
            if not leaf.is_plain and values[leaf.name] is not None:
                values[leaf.name] = lowered(leaf.codec, values[leaf.name], self.op)
        return values

    def _bad_default(self, path: str, given: Any, problem: str, expected: str, fix: str) -> NoReturn:
        self.fail(
            f"parameter {path} has an unsupported default: {problem}",
            expected=expected.replace("SymInt", "int"),
            got=brief(given),
            fix=fix,
        )

    def _add_leaf(self, leaf: Leaf, default: Any, into: list[Argument], in_optional: bool) -> None:
        if leaf.name in self.paths:
            paths = (self.paths[leaf.name], leaf.path)
            self.fail(f"parameters {paths[0]} and {paths[1]} both are {leaf.name} in the schema",
                      fix=f"another name for {min(paths, key=lambda path: not path.isidentifier())}")  # fmt: skip
        type_, kwarg_only = leaf.optional().type if in_optional else leaf.type, into is self.keyword_only
        alias = self._alias(leaf)
        self.paths[leaf.name] = leaf.path
        if default is REQUIRED:
            into.append(Argument(type_, alias, leaf.name, kwarg_only=kwarg_only, path=leaf.path))
            return
        default, in_text = self._default(type_, default, leaf.path, in_optional)
        type_ = type_ if in_text else f"{type_.removesuffix('?')}?"
        into.append(Argument(type_, alias, leaf.name, default, kwarg_only, not in_text, leaf.path))

    def _alias(self, leaf: Leaf) -> Alias | None:
        is_written = leaf.is_mutated
        if self.mutated is None or self.mutated:
            is_named = self.mutated is None or any(is_part(leaf.path, path) for path in self.mutated)
            is_written = is_written or (is_named and leaf.holds_tensors)
        return Alias(frozenset({f"a{len(self.paths)}"}), write=True) if is_written else None

    def _default(self, type_: str, given: Any, path: str, in_optional: bool) -> tuple[Any, bool]:
        """A default as the dispatcher has it, and whether schema text can hold it: else the argument is optional there.

        Raises:
            SchemaError: the type has no such default.
        """
        problem = default_problem(type_, given)
        if problem is not None:
            self._bad_default(path, given, problem, type_, plain_fix(type_, path, given))
        default = dispatched(type_, given)
        in_text = default_text(type_, default) is not None
        if not in_text and type_.endswith("?") and not in_optional:
            # None means None here, so it cannot stand for the default.
            self.fail(
                f"parameter {path} has an unsupported default: schema text cannot hold it, and None has its own "
                "meaning here",
                expected=type_,
                got=brief(given),
                fix=f"drop Optional[...] from {path}, or default to None and fill the value in the kernel",
            )
        return default, in_text


def is_part(path: str, whole: str) -> bool:
    return path == whole or path.startswith((f"{whole}.", f"{whole}["))


# ----------------------------------------------------------------------------------------------------------------------
# What an op writes: ``mutates_args``, the marks in the signature, and the returns that are what was written

#: Raises for the function whose signature is read.
Fail = Callable[..., NoReturn]


def mutates_args_names(mutates_args: str | Iterable[str], op: str, place: str | None = None) -> str | tuple[str, ...]:
    """Check `mutates_args`, and return it as "unknown" or as a tuple: it may be an iterator, to be read once.

    Raises:
        SchemaError: it is neither the word nor names.
    """
    if isinstance(mutates_args, str) and mutates_args == "unknown":
        return mutates_args
    problem = "mutates_args must be an iterable of names or the string 'unknown'"
    if isinstance(mutates_args, str):
        fix = f"mutates_args={tuple(re.findall('[^, ]+', mutates_args))}"
        raise SchemaError(f"{problem}, not {mutates_args!r}", op=op, where=place, fix=fix)
    names = tuple(mutates_args) if isinstance(mutates_args, collections.abc.Iterable) else (mutates_args,)
    if not all(isinstance(name, str) for name in names):
        fix = "mutates_args=() for a function that writes to none of its arguments"
        raise SchemaError(problem, op=op, got=brief(mutates_args), where=place, fix=fix)
    return names


def mutated_paths(
    given: str | tuple[str, ...] | None, parameters: tuple[Parameter, ...], fail: Fail
) -> frozenset[str] | None:
    """The names that `mutates_args_names` found, each one of a parameter, or the path of a part of one.

    None stands for "unknown". Nothing was given where annotations alone are to tell.
    """
    if given == "unknown":
        return None
    if given is not None:
        _refuse_other_marks(given, parameters, fail)
    if not given:
        return frozenset()
    names, tensors = frozenset(given), [leaf for each in parameters for leaf in each.node.leaves if leaf.holds_tensors]
    known = {each.name for each in parameters}
    missing = {name for name in names - known if not any(is_part(leaf.path, name) for leaf in tensors)}
    if missing:
        listed, paths = ", ".join(sorted(map(repr, missing))), [leaf.path for leaf in tensors]
        near = difflib.get_close_matches(min(missing), paths, n=1, cutoff=0.3) or paths
        fail(
            f"{{{listed}}} in mutates_args were not found among the parameters",
            got=f"({', '.join(each.name for each in parameters)})",
            fix=f"mutates_args=({near[0]!r},)" if near else "mutates_args=()",
        )
    for name in names:
        if not any(is_part(leaf.path, name) for leaf in tensors):
            fail(
                f"parameter {name} is in mutates_args, but only Tensors or collections of Tensors can be mutated",
                fix=f"leave {name} out of mutates_args",
            )
    return names


def _refuse_other_marks(given: Iterable[str], parameters: tuple[Parameter, ...], fail: Fail) -> None:
    """Raise where annotations say that something is written, and ``mutates_args`` something else."""
    tensors = [leaf for each in parameters for leaf in each.node.leaves if leaf.holds_tensors]
    if True not in [leaf.is_mutated for leaf in tensors]:
        return
    for leaf in tensors:
        if leaf.is_mutated != any(is_part(leaf.path, path) for path in given):
            fail(
                f"mutates_args and the annotations disagree on whether {leaf.path} is written",
                expected=f"{leaf.path} in both, or in none",
                fix="leave mutates_args out",
            )


def implied_tags(
    tags: tuple[torch.Tag, ...], result: Node | None, arguments: tuple[Argument, ...], fail: Fail
) -> tuple[torch.Tag, ...]:
    """The tags with the one that `SameAs` in the annotation of the return stands for."""
    same_as = [leaf.same_as for leaf in (result.leaves if result is not None else ())]
    if not any(same_as):
        return tags
    written = [argument for argument in arguments if argument.is_mutated]
    if same_as != [argument.name for argument in written]:
        fail(
            "SameAs is for an op that returns all that it writes, and nothing else",
            expected=", ".join(f'SameAs("{argument.name}")' for argument in written) or "something that is written",
            got=", ".join("another return" if name is None else f'SameAs("{name}")' for name in same_as),
            fix=_instead_of_same_as(same_as, arguments, written),
        )
    if not _may_be_returned(written, arguments):
        fail(
            "SameAs is for an op that writes to its first argument alone, or to keyword-only ones",
            got=", ".join(argument.name for argument in written),
            fix="-> None" if len(written) > 1 else f"-> None, or make {written[0].name} the first parameter",
        )
    tag = Tag.out if written[0].kwarg_only else Tag.inplace
    return tags if tag in tags else (*tags, tag)


def _instead_of_same_as(same_as: list[str | None], arguments: tuple[Argument, ...], written: list[Argument]) -> str:
    known = {argument.name for argument in arguments if argument.type == "Tensor"}
    name = next((each for each in same_as if each in known), min(known, default="x"))
    if not written:
        return f'{name}: Mut[Tensor], and -> Annotated[Tensor, SameAs("{name}")]'
    if None in same_as:
        return "return only what is new: an op cannot also return what it writes"
    if not _may_be_returned(written, arguments):
        return "-> None"
    types_ = [f'Annotated[Tensor, SameAs("{argument.name}")]' for argument in written]
    return f"-> {types_[0]}" if len(types_) == 1 else f"-> tuple[{', '.join(types_)}]"


def _may_be_returned(written: list[Argument], arguments: tuple[Argument, ...]) -> bool:
    """Are these the first argument alone, or keyword-only ones?"""
    return all(argument.kwarg_only for argument in written) or written == [arguments[0]]


def alias_returns(
    arguments: tuple[Argument, ...], returns: tuple[Return, ...], tags: tuple[torch.Tag, ...]
) -> tuple[Return, ...]:
    """The returns with the aliases that an in-place or out op has; `check_tags` judges the result."""
    targets: list[Argument] = []
    if Tag.inplace in tags:
        targets = [a for a in arguments if not a.kwarg_only][:1]
    elif Tag.out in tags:
        targets = [a for a in arguments if a.is_mutated]
    if len(targets) != len(returns):
        return returns
    return tuple(Return(r.type, target.alias) for r, target in zip(returns, targets, strict=True))


# Schema inference: the type hints of a function as a schema -----------------------------------------------------------

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
    names = None if mutates_args is None else mutates_args_names(mutates_args, name_of(fn), where(fn))
    return (op_name or "") + str(read(fn, names, normalize_tags(tags)).schema)


class Inferred(NamedTuple):
    """What the signature of a function says."""

    schema: Schema
    #: Those that were given, and what the annotations ask for.
    tags: tuple[torch.Tag, ...]
    #: None where the function takes and returns just what the schema says.
    signature: Signature | None


def read(
    fn: Callable[..., Any],
    mutates_args: str | tuple[str, ...] | None,
    tags: tuple[torch.Tag, ...] = (),
    op: str | None = None,
) -> Inferred:
    """What the signature of a function says, for `op`.

    `mutates_args` is as `mutates_args_names` returns it; None if the annotations alone are to tell.
    """
    reader = _Reader.of(fn, op or name_of(fn))
    parameters = tuple([reader.parameter(*each) for each in enumerate(reader.signature.parameters.values())])
    mutated = mutated_paths(mutates_args, parameters, reader.fail)
    arguments = ArgumentBuilder(reader.fail, reader.op, mutated).build(parameters)
    result, returns = reader.result()
    tags = implied_tags(tags, result, arguments, reader.fail)
    schema = Schema(arguments, alias_returns(arguments, returns, tags))
    if Tag.inplace in tags or Tag.out in tags:
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
        if type_ is not None and not (type_ == "ScalarType[]" and _torch.schema.dtypes_in_lists_are_numbers()):
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
