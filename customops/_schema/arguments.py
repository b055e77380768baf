"""From parameters to the arguments of a schema: order, default values, and what is written."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from customops._schema.default_advice import lowered, misfit, plain_fix
from customops._schema.defaults import default_problem, default_text, dispatched
from customops._schema.model import REQUIRED, Alias, Argument
from customops._schema.nodes import Group, Leaf, Node, Parameter, Values
from customops.errors import brief


@dataclass
class ArgumentBuilder:
    """Makes the arguments of an op.

    A field with a default is a keyword-only argument: one that is added later moves no other, and calls and exported
    programs of before go on to work.
    """

    fail: Callable[..., NoReturn]
    op: str
    #: The paths in ``mutates_args``; None for "unknown".
    mutated: Collection[str] | None
    #: Do annotations and ``mutates_args`` both say what is written?
    said_twice: bool = False
    positional: list[Argument] = field(default_factory=list)
    keyword_only: list[Argument] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)

    def build(self, parameters: Iterable[Parameter]) -> tuple[Argument, ...]:
        for parameter in parameters:
            kind = parameter.kind
            by_keyword = kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
            if kind is inspect.Parameter.VAR_POSITIONAL:
                by_keyword = any(argument.has_default for argument in self.positional)
            self._add(parameter.node, None, by_keyword, in_optional=False, is_field=False)
        return (*self.positional, *self.keyword_only)

    def _add(self, node: Node, values: Values | None, by_keyword: bool, *, in_optional: bool, is_field: bool) -> None:
        if node.default is not REQUIRED:
            by_keyword = by_keyword or is_field
            values = self._default_values(node) if values is None else values
        if not isinstance(node, Group):
            for leaf in node.leaves:
                self._add_leaf(leaf, REQUIRED if values is None else values[leaf.name], by_keyword, in_optional)
            return
        is_absent = False
        if node.given is not None:
            self._add_leaf(node.given, REQUIRED if values is None else values[node.given.name], by_keyword, False)
            in_optional, is_absent = True, values is not None and not values[node.given.name]
        for each in node.fields.values():
            of_field = is_absent and each.default is not REQUIRED
            self._add(each, None if of_field else values, by_keyword, in_optional=in_optional, is_field=True)

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
            f"parameter {path} has an unsupported default: {problem}", expected=expected, got=brief(given), fix=fix
        )

    def _add_leaf(self, leaf: Leaf, default: Any, by_keyword: bool, in_optional: bool) -> None:
        if leaf.name in self.paths:
            paths = (self.paths[leaf.name], leaf.path)
            self.fail(f"parameters {paths[0]} and {paths[1]} both are {leaf.name} in the schema",
                      fix=f"another name for {min(paths, key=lambda path: not path.isidentifier())}")  # fmt: skip
        leaf = leaf.optional() if in_optional else leaf
        argument = Argument(leaf.type, self._alias(leaf), leaf.name, kwarg_only=by_keyword)
        self.paths[leaf.name] = leaf.path
        if default is not REQUIRED:
            argument = self.with_default(dataclasses.replace(argument, default=default), leaf.path, in_optional)
        (self.keyword_only if by_keyword else self.positional).append(argument)

    def _alias(self, leaf: Leaf) -> Alias | None:
        if self.mutated is None:
            is_written = leaf.holds_tensors
        else:
            named = any(is_part(leaf.path, path) for path in self.mutated)
            is_written = leaf.is_mutated or (named and leaf.holds_tensors)
            if self.said_twice and leaf.is_mutated != named:
                self.fail("mutates_args and the annotations disagree on what is written", expected=f"{leaf.path} in "
                          "both, or in none", fix="leave mutates_args out: the annotations say it")  # fmt: skip
        return Alias(frozenset({f"a{len(self.paths)}"}), write=True) if is_written else None

    def with_default(self, argument: Argument, path: str, in_optional: bool) -> Argument:
        """The argument with its default as the dispatcher has it; optional where schema text cannot hold the default.

        Raises:
            SchemaError: the type has no such default.
        """
        given = argument.default
        problem = default_problem(argument.type, given)
        if problem is not None:
            self._bad_default(path, given, problem, argument.type, plain_fix(argument.type, path, given))
        argument = dataclasses.replace(argument, default=dispatched(argument.type, given))
        if default_text(argument.type, argument.default) is not None:
            return argument
        if argument.type.endswith("?") and not in_optional:
            # None means None here, so it cannot stand for the default.
            self.fail(
                f"parameter {path} has an unsupported default: schema text cannot hold it, and None has its own "
                "meaning here",
                expected=argument.type,
                got=brief(given),
                fix=f"drop Optional[...] from {path}, or default to None and fill the value in the kernel",
            )
        type_ = argument.type.removesuffix("?")
        return dataclasses.replace(argument, type=f"{type_}?", default_is_none_in_text=True)


def is_part(path: str, whole: str) -> bool:
    return path == whole or path.startswith((f"{whole}.", f"{whole}["))
