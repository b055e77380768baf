"""From parameters to the arguments of a schema: order, default values, and what is written."""

from __future__ import annotations

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
