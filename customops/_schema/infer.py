"""Schema inference: the type hints of a function as a schema."""

from __future__ import annotations

import builtins
import collections.abc
import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ForwardRef, NamedTuple, NoReturn, Optional

import torch
import typing_extensions

from customops._places import innermost, name_of, where
from customops._schema.advice import lowered, misfit, plain_fix
from customops._schema.annotations import annotated, show, union_members, with_items
from customops._schema.hints import HintReader
from customops._schema.model import REQUIRED, Alias, Argument, Return, Schema
from customops._schema.structure import BY_KEYWORD, Group, Leaf, Node, Parameter, Signature, TupleForm, Values
from customops._schema.tags import Tags, check_tags, normalize_tags
from customops._schema.types import converted, default_problem, row_of, schema_type
from customops._torch.schema import Tag
from customops.errors import SchemaError, brief

# ----------------------------------------------------------------------------------------------------------------------
# What an op writes: ``mutates_args``, the marks in the signature, and the returns that are what was written


def is_part(path: str, whole: str) -> bool:
    return path == whole or path.startswith((f"{whole}.", f"{whole}["))


def mutates_args_names(mutates_args: str | Iterable[str], op: str, place: str | None = None) -> str | tuple[str, ...]:
    """Check `mutates_args`, and return it as "unknown" or as a tuple: it may be an iterator, to be read once."""
    if isinstance(mutates_args, str) and mutates_args == "unknown":
        return mutates_args
    problem = "mutates_args must be an iterable of names or the string 'unknown'"
    if isinstance(mutates_args, str):
        fix = f"mutates_args={tuple(re.findall('[^, ]+', mutates_args))}"
        raise SchemaError(f"{problem}, not {mutates_args!r}", op=op, where=place, fix=fix)
    names: tuple[Any, ...] = (
        tuple(mutates_args) if isinstance(mutates_args, collections.abc.Iterable) else (mutates_args,)
    )
    for name in names:
        if not isinstance(name, str):
            fix = "mutates_args=() for a function that writes to none of its arguments"
            raise SchemaError(problem, op=op, got=brief(mutates_args), where=place, fix=fix)
    return names


def implied_tags(
    tags: tuple[torch.Tag, ...],
    same_as: list[str | None],
    arguments: tuple[Argument, ...],
    fail: Callable[..., NoReturn],
) -> tuple[torch.Tag, ...]:
    """The tags with the one that `SameAs` in the annotation of the return stands for."""
    if not any(same_as):
        return tags
    written = [argument for argument in arguments if argument.is_mutated]
    may_be_returned = all(argument.kwarg_only for argument in written) or written == [arguments[0]]
    if same_as != [argument.name for argument in written]:
        expected = [f'SameAs("{argument.name}")' for argument in written]
        if not written:
            known = {argument.name for argument in arguments if argument.type == "Tensor"}
            name = next((each for each in same_as if each in known), min(known, default="x"))
            fix = f'{name}: Mut[Tensor], and -> Annotated[Tensor, SameAs("{name}")]'
        elif None in same_as:
            fix = "return only what is new: an op cannot also return what it writes"
        else:
            types_ = ", ".join(f"Annotated[Tensor, {each}]" for each in expected)
            fix = f"-> {types_ if len(written) == 1 else f'tuple[{types_}]'}" if may_be_returned else "-> None"
        fail(
            "SameAs is for an op that returns all that it writes, and nothing else",
            expected=", ".join(expected) or "something that is written",
            got=", ".join("another return" if name is None else f'SameAs("{name}")' for name in same_as),
            fix=fix,
        )
    if not may_be_returned:
        fail(
            "SameAs is for an op that writes to its first argument alone, or to keyword-only ones",
            got=", ".join(argument.name for argument in written),
            fix="-> None" if len(written) > 1 else f"-> None, or make {written[0].name} the first parameter",
        )
    tag = Tag.out if written[0].kwarg_only else Tag.inplace
    return tags if tag in tags else (*tags, tag)


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
        mutates_args: names of the arguments that `fn` mutates, or "unknown": every tensor. None: those with `Mut`.
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
    """What the signature of a function says, for `op`; `mutates_args` None: the annotations alone are to tell."""
    reader, parameters = _Reader(fn, op or name_of(fn), mutates_args), list[Parameter]()
    for index, each in enumerate(reader.signature.parameters.values()):
        parameters.append(reader.parameter(index, each))
    arguments = reader.arguments(parameters)
    if isinstance(mutates_args, tuple) and (mutates_args or reader.has_marks):
        reader.check_mutated(parameters)
    result, returns, is_plain = reader.result()
    if result is not None and not (isinstance(result, Leaf) and result.same_as is None):
        tags = implied_tags(tags, [leaf.same_as for leaf in result.leaves], arguments, reader.fail)
    if Tag.inplace in tags or Tag.out in tags:
        targets = [a for a in arguments if a.is_mutated]
        if Tag.inplace in tags:
            targets = [a for a in arguments if not a.kwarg_only][:1]
        if len(targets) == len(returns):
            returns = tuple(Return(r.type, target.alias) for r, target in zip(returns, targets, strict=True))
    schema = Schema(arguments, returns)
    if Tag.inplace in tags or Tag.out in tags:
        check_tags(schema, tags, op=reader.op, where=where(fn))
    if is_plain and all([parameter.is_plain for parameter in parameters]):
        return Inferred(schema, tags, None)
    return Inferred(schema, tags, Signature(tuple(parameters), result, returns_plainly=is_plain))


class _Reader:
    """Reads the annotations of one function; every error names the function and its line."""

    def __init__(self, fn: Callable[..., Any], op: str, mutates_args: str | tuple[str, ...] | None) -> None:
        if not callable(fn) or isinstance(fn, type):
            raise SchemaError("expected a function", got=brief(fn), fix="decorate a typed Python function")
        self.fn, self.op = fn, op
        self.hints = HintReader(self.fail, self.resolve)  # of types that are none of the dispatcher's
        #: The parameter whose annotation is read.
        self.argument: str | None = None
        #: The paths in ``mutates_args``; None for "unknown".
        self.mutated = None if isinstance(mutates_args, str) else mutates_args or ()
        self.positional: list[Argument] = []
        self.keyword_only: list[Argument] = []
        #: The path of each argument, by its name.
        self.paths: dict[str, str] = {}
        #: The leaves that hold tensors; and do annotations say of one that the op writes to it?
        self.tensors: list[Leaf] = []
        self.has_marks = False
        try:
            self.signature = inspect.signature(fn)
        except (ValueError, TypeError) as error:
            raise SchemaError(
                "the signature cannot be read (it is not a Python function)",
                op=op,
                fix="wrap it in a typed Python function, or pass schema=",
            ) from error
        inner = innermost(fn)
        if not hasattr(inner, "__globals__"):
            inner = getattr(type(inner).__call__, "__wrapped__", type(inner).__call__)
        self.globals: dict[str, Any] = getattr(inner, "__globals__", {})

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
        self.argument = name
        annotation = self.resolve(parameter.annotation)
        default = REQUIRED if default is inspect.Parameter.empty else default
        type_ = schema_type(annotation) if kind in _NAMED else None
        if default is None:  # `k: int = None` is meant as Optional[int]
            type_ = schema_type(Optional[annotation]) or type_
        if type_ is not None:
            node: Node = Leaf(name, name, type_, default=default)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            node = self.hints.node(types.GenericAlias(tuple, (annotation, Ellipsis)), name, name, written=annotation)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            origin, items = typing.get_origin(annotation), typing.get_args(annotation)
            is_unpacked = getattr(origin, "__name__", str(origin)).rpartition(".")[2] == "Unpack"
            if not (is_unpacked and typing_extensions.is_typeddict(items[0])):
                self.fail(
                    f"varkwargs (**{name}) are not supported",
                    got=show(annotation),
                    fix=f"**{name}: Unpack[Options], of a class Options(TypedDict), or a named parameter for each",
                )
            node = self.hints.node(items[0], "", name)
        else:
            if default is None and type(None) not in union_members(annotation):
                annotation = Optional[annotation]
            node = self.hints.node(annotation, name, name, default)
        return Parameter(name, kind, node, default)

    def result(self) -> tuple[Node | None, tuple[Return, ...], bool]:
        """What the function returns, what the op returns for that, and whether these are the same."""
        self.argument = None
        if self.signature.return_annotation is inspect.Signature.empty:
            self.fail(
                "No return type annotation was provided. Please add one.",
                fix="e.g. -> torch.Tensor, or -> None for an op that only mutates",
            )
        annotation = self.resolve(self.signature.return_annotation)
        if annotation is None or annotation is type(None):
            return None, (), True
        type_ = schema_type(annotation, returns=True)
        if type_ is not None:
            return Leaf("result", "", type_), (Return(type_),), True
        items = typing.get_args(annotation) if typing.get_origin(annotation) is tuple else ()
        types_ = [schema_type(item, returns=True) for item in items]
        if types_ and None not in types_:  # each item is one return
            fields: dict[str, Node] = {str(i): Leaf(f"result_{i}", f"[{i}]", str(t)) for i, t in enumerate(types_)}
            node: Node = Group("result", "", TupleForm(tuple, tuple(fields)), fields)
        else:
            node = HintReader(self.fail, self.resolve, returns=True).node(annotation, "result", "")
        is_plain = node.is_plain
        if isinstance(node, Group) and isinstance(node.form, TupleForm) and not node.form.is_named:
            is_plain = all(each.is_plain for each in node.fields.values())
            if is_plain and len(node.leaves) == 1:
                return node, (Return(f"({node.leaves[0].type})"),), True
        return node, tuple(Return(leaf.type) for leaf in node.leaves), is_plain

    def resolve(self, annotation: Any) -> Any:
        """Evaluate strings, also inside generics, in the function's own globals."""
        seen: set[str] = set()
        while isinstance(annotation, (str, ForwardRef)):
            text = annotation if isinstance(annotation, str) else annotation.__forward_arg__
            scope = self.globals.get("__builtins__", builtins)
            built_in = scope if isinstance(scope, dict) else vars(scope)
            known = self.globals if text in self.globals else built_in
            try:
                if text in seen:
                    raise NameError(f"{text} stands for itself")
                seen.add(text)
                annotation = known[text] if text in known else eval(text, {**self.globals, "__builtins__": scope})
            except Exception as error:
                self.fail(
                    f"Unsupported type annotation {text}. It is not a type. ({type(error).__name__}: {error})",
                    argument=self.argument,
                    fix="a quoted annotation (or any, after `from __future__ import annotations`) is evaluated in the "
                    "function's module: import or define the name there, not inside a function",
                )
        if isinstance(annotation, type):
            return annotation
        origin, items = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is None or origin is typing.Literal:
            return annotation
        if origin is typing.Annotated:
            inner = self.resolve(annotation.__origin__)
            return annotation if inner is annotation.__origin__ else annotated(inner, annotation.__metadata__)
        return with_items(annotation, items, tuple(self.resolve(item) for item in items))

    # From parameters to the arguments of a schema: order, default values, and what is written -----------------------

    def arguments(self, parameters: Iterable[Parameter]) -> tuple[Argument, ...]:
        """The arguments of the op.

        A field with a default is a keyword-only argument: one that is added later moves no other. Old exported programs
        go on to work: torch replays positional arguments in order, and would give it the value of the next.
        """
        for parameter in parameters:
            by_keyword = parameter.kind in BY_KEYWORD
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                # A list of the rest has no default, so it cannot stand behind arguments that have one.
                by_keyword = any(each.has_default for each in self.positional)
            self._add(parameter.node, None, self.keyword_only if by_keyword else self.positional)
        return (*self.positional, *self.keyword_only)

    def _add(
        self,
        node: Node,
        values: Values | None,
        into: list[Argument],
        *,
        in_optional: bool = False,
        is_field: bool = False,
    ) -> None:
        """Add the arguments of a node. `values` has the defaults of its leaves, if the whole has a default."""
        if node.default is not REQUIRED:
            into = self.keyword_only if is_field else into
            if values is None and isinstance(node, Leaf) and node.is_plain:
                values = {node.name: node.default}
            elif values is None:
                if (wrong := misfit(node, node.default, self.op)) is not None:
                    path, value, expected, fix = wrong
                    problem = "None is not allowed" if value is None else f"it is not {expected}"
                    self._bad_default(path, value, problem, expected, fix)
                values = node.take_apart(node.default)
                for leaf in node.leaves:
                    if not leaf.is_plain and values[leaf.name] is not None:
                        values[leaf.name] = lowered(leaf.codec, values[leaf.name], self.op)
        if not isinstance(node, Group):
            for leaf in (node,) if isinstance(node, Leaf) else node.leaves:
                self._add_leaf(leaf, REQUIRED if values is None else values[leaf.name], into, in_optional)
            return
        is_absent = False
        if node.given is not None:
            self._add_leaf(node.given, REQUIRED if values is None else values[node.given.name], into, False)
            in_optional, is_absent = True, values is not None and not values[node.given.name]
        for each in node.fields.values():
            of_field = is_absent and each.default is not REQUIRED
            self._add(each, None if of_field else values, into, in_optional=in_optional, is_field=True)

    def _bad_default(self, path: str, given: Any, problem: str, expected: str, fix: str) -> NoReturn:
        problem = f"parameter {path} has an unsupported default: {problem}"
        self.fail(problem, expected=expected.replace("SymInt", "int"), got=brief(given), fix=fix)

    def _add_leaf(self, leaf: Leaf, default: Any, into: list[Argument], in_optional: bool) -> None:
        name, path, type_ = leaf.name, leaf.path, leaf.optional().type if in_optional else leaf.type
        if name in self.paths:
            paths = (self.paths[name], path)
            self.fail(f"parameters {paths[0]} and {paths[1]} both are {name} in the schema",
                      fix=f"another name for {min(paths, key=lambda path: not path.isidentifier())}")  # fmt: skip
        is_written = leaf.is_mutated
        self.has_marks = self.has_marks or is_written
        if leaf.holds_tensors:
            self.tensors.append(leaf)
            is_written = is_written or self.mutated is None
            for each in self.mutated or ():
                is_written = is_written or is_part(path, each)
        alias = Alias(frozenset({f"a{len(self.paths)}"}), write=True) if is_written else None
        self.paths[name] = path
        given = default
        if default is not REQUIRED:
            if (problem := default_problem(type_, default)) is not None:
                self._bad_default(path, default, problem, type_, plain_fix(type_, path, default))
            default = converted(row_of(type_).canonical_default, default)
        argument = Argument(type_, alias, name, default, into is self.keyword_only, path=path)
        if argument.has_default and argument.written_default is None:  # None stands for it in the text
            if type_.endswith("?") and not in_optional:
                self.fail(
                    f"parameter {path} has an unsupported default: schema text cannot hold it, and None has its own "
                    "meaning here",
                    expected=type_,
                    got=brief(given),
                    fix=f"drop Optional[...] from {path}, or default to None and fill the value in the kernel",
                )
            type_ = f"{type_.removesuffix('?')}?"
            argument = replace(argument, type=type_, default_is_none_in_text=True)
        into.append(argument)

    def check_mutated(self, parameters: list[Parameter]) -> None:
        """Raise unless each name in ``mutates_args`` is of a parameter, or a path in one, and annotations agree."""
        given, tensors = self.mutated or (), self.tensors
        for leaf in tensors if self.has_marks else ():
            if leaf.is_mutated != any(is_part(leaf.path, path) for path in given):
                self.fail(
                    f"mutates_args and the annotations disagree on whether {leaf.path} is written",
                    expected=f"{leaf.path} in both, or in none",
                    fix="leave mutates_args out",
                )
        known = [each.name for each in parameters]
        wrong = {name for name in given if not any(is_part(leaf.path, name) for leaf in tensors)}
        if missing := wrong.difference(known):
            listed, paths = ", ".join(sorted(map(repr, missing))), [leaf.path for leaf in tensors]
            near = difflib.get_close_matches(min(missing), paths, n=1, cutoff=0.3) or paths
            self.fail(
                f"{{{listed}}} in mutates_args were not found among the parameters",
                got=f"({', '.join(known)})",
                fix=f"mutates_args=({near[0]!r},)" if near else "mutates_args=()",
            )
        for name in wrong:
            self.fail(
                f"parameter {name} is in mutates_args, but only Tensors or collections of Tensors can be mutated",
                fix=f"leave {name} out of mutates_args",
            )
