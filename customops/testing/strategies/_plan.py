"""`Plan`: what a call of an op is made of, read once from the op."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from customops import _compat
from customops._dispatch import fingerprint
from customops._dispatch.lookup import find_op
from customops._op import CustomOpDef
from customops._schema.arguments import is_part
from customops._schema.model import REQUIRED, Argument
from customops._schema.nodes import Either, Group, Leaf, Nested, Node, Parameter
from customops._schema.parse import from_dispatcher
from customops.errors import ArgumentError, UnsupportedError
from customops.testing.strategies._values import Strategy, values_of

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Plan:
    """The parameters of an op, the user's strategies for some, and ours for the others."""

    def __init__(self, op: Any, given: Mapping[str, Strategy], device: str | torch.device) -> None:
        overload = find_op(op)
        lowering = getattr(op, "_lowering", None)
        schema = from_dispatcher(_compat.schemas.schema_of(overload)) if lowering is None else lowering.schema
        if isinstance(op, CustomOpDef):
            schema = op.schema
        self.op = _compat.libraries.name_of_overload(overload)
        self.parameters: tuple[Parameter, ...] = (
            tuple(map(_parameter, schema.arguments)) if lowering is None else lowering.signature.parameters
        )
        self.given = self.by_path(given)
        if self.op.startswith("aten::"):  # it takes CUDA
            self.given |= {each.name: st.just(False) for each in self.parameters if each.name == "pin_memory"}
        self.check_strategies()
        self.written = {argument.name for argument in schema.mutated}
        is_out = any(each.is_mutated and each.kwarg_only for each in schema.arguments) and any(
            each.is_mutated for each in schema.returns
        )
        #: May its tensors require gradients? torch refuses it of out ops.
        self.is_differentiable = not is_out
        #: The tensor that has the whole shape where others are broadcast to it.
        self.whole = next((argument.name for argument in schema.arguments if argument.holds_tensors), None)
        #: Is there a tensor in each call? Else lists of tensors are not empty.
        self.has_tensor = any(_is_sure(each.node) for each in self.parameters if each.default is REQUIRED)
        #: By the name of the leaf; none for a type that we know no value of.
        self.values = {leaf.name: values_of(leaf, device) for leaf in self._leaves() if not leaf.holds_tensors}
        for each in self.parameters:
            self._check_drawable(each.node)

    def __repr__(self) -> str:  # messages of hypothesis hold it
        return self.op

    def _leaves(self) -> Iterator[Leaf]:
        return (leaf for each in self.parameters for leaf in each.node.leaves)

    def is_given(self, path: str) -> bool:
        """Is there a strategy of the user's for it, or for a part of it? Then it is not left out."""
        return any(is_part(each, path) for each in self.given)

    def may_be_left_out(self, node: Node) -> bool:
        return node.default is not REQUIRED and not self.is_given(node.path)

    def is_drawable(self, node: Node) -> bool:
        """Do we know values of it, other than None?"""
        if node.path in self.given or not isinstance(node, Leaf):
            return True
        return node.holds_tensors or self.values[node.name] is not None

    # What the user gave -----------------------------------------------------------------------------------------

    def by_path(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values by path. The name alone stands for one of the ``**options``."""
        rest = [each.node for each in self.parameters if each.kind is inspect.Parameter.VAR_KEYWORD]
        paths = {key: node.path for group in rest if isinstance(group, Group) for key, node in group.fields.items()}
        by_path = {paths.get(name, name): value for name, value in values.items()}
        self.check_paths(by_path)
        return by_path

    def strategy(self, option: Any, of_one: Callable[[Any], Strategy]) -> Strategy:
        """A strategy for a value for all tensors, or for values for some of them, by path."""
        if not isinstance(option, Mapping):
            return of_one(option)
        return st.fixed_dictionaries({path: of_one(each) for path, each in self.by_path(option).items()})

    def check_paths(self, paths: Iterable[str]) -> None:
        """Raise unless each is a parameter or a part of one."""
        known = [path for each in self.parameters for path in _paths(each.node)]
        for path in paths:
            if path not in known:
                raise ArgumentError(
                    "no such parameter", op=self.op, argument=path, expected=f"some of {', '.join(known) or 'none'}"
                )

    def check_strategies(self) -> None:
        for path, strategy in self.given.items():
            if not isinstance(strategy, st.SearchStrategy):
                raise ArgumentError(
                    "this is not a strategy",
                    op=self.op,
                    argument=path,
                    got=type(strategy).__name__,
                    fix="hypothesis.strategies.just(...) for a single value",
                )

    def _check_drawable(self, node: Node) -> None:
        if node.path in self.given or node.default is not REQUIRED:
            return
        if isinstance(node, Group):
            for each in node.fields.values():
                self._check_drawable(each)
        elif isinstance(node, Leaf) and not node.is_optional and not self.is_drawable(node):
            raise UnsupportedError(
                f"there is no strategy for {node.type}",
                op=self.op,
                argument=node.path,
                fix=f"arguments(op, {{{node.path!r}: a strategy}})",
            )


def lowered_from(op: Any) -> CustomOpDef[Any, Any] | None:
    """The op with rich types of which `op` is the lowered form, or None."""
    overload = find_op(op)
    if isinstance(op, CustomOpDef):
        return None
    ours = (each for each in fingerprint.ops if isinstance(each, CustomOpDef) and each._lowering is not None)
    return next((each for each in ours if each._opoverload is overload), None)


def _parameter(argument: Argument) -> Parameter:
    """An argument of a schema as a parameter."""
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    # None then stands for the default and is no value of its own.
    type_ = argument.type.removesuffix("?") if argument.default_is_none_in_text else argument.type
    leaf = Leaf(argument.name, argument.name, type_, default=argument.default)
    return Parameter(argument.name, kind, leaf, argument.default)


def _paths(node: Node) -> Iterator[str]:
    """The paths of a parameter and its parts."""
    if node.path:
        yield node.path
    if isinstance(node, Group):
        for each in node.fields.values():
            yield from _paths(each)


def _is_sure(node: Node) -> bool:
    """Does each value hold a tensor?"""
    if isinstance(node, Either | Nested):
        return False
    if isinstance(node, Leaf):
        return node.type == "Tensor"
    return node.given is None and any(_is_sure(each) for each in node.fields.values() if each.default is REQUIRED)
