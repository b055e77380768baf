"""The schema and the signature of an out variant: those of a functional op, and the tensors to write to."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace

import torch

from customops._compat.tags import Tag
from customops._schema.forms import TupleForm
from customops._schema.model import Alias, Argument, Return, Schema
from customops._schema.nodes import Group, Leaf, Node, Parameter, Signature
from customops._schema.tags import Tags, normalize_tags
from customops.errors import RegistrationError


def check_has_outs(schema: Schema, tags: tuple[torch.Tag, ...], op: str) -> None:
    """Raise RegistrationError unless an op has nothing but new tensors as results, of sizes known before the call."""
    problem = fix = None
    if not schema.is_functional:
        problem, fix = "it is not functional", "an op that writes, or returns a view, allocates no results to plan"
    elif any(ret.type != "Tensor" for ret in schema.returns):
        problem, fix = "it returns something else than tensors, one or a fixed number of them", "return each by itself"
    elif torch.Tag.dynamic_output_shape in tags:
        problem, fix = "the sizes of its results depend on data", "return tensors of the largest size, and the sizes"
    elif taken := [argument.name for argument in schema.arguments if argument.name in ("out", *out_names(schema))]:
        problem, fix = f"it has an argument {taken[0]}", f"rename {taken[0]}"
    if problem is not None:
        raise RegistrationError(f"the op cannot have an out variant: {problem}", op=op, got=str(schema), fix=fix)


def out_names(schema: Schema) -> tuple[str, ...]:
    """The names of the arguments that an out variant writes to: ``out``, or ``out0``, ``out1`` and so on."""
    count = len(schema.returns)
    return ("out",) if count == 1 else tuple(f"out{i}" for i in range(count))


def out_schema(schema: Schema) -> Schema:
    """``(Tensor x) -> Tensor``: ``(Tensor x, *, Tensor(a0!) out) -> Tensor(a0!)``."""
    aliases = [Alias(frozenset({f"a{i}"}), write=True) for i in range(len(schema.returns))]
    outs = (Argument("Tensor", a, name, kwarg_only=True) for name, a in zip(out_names(schema), aliases, strict=True))
    return Schema((*schema.arguments, *outs), tuple(Return("Tensor", alias) for alias in aliases))


def out_tags(tags: Tags) -> tuple[torch.Tag, ...]:
    return normalize_tags([*normalize_tags(tags), Tag.out])


def out_signature(signature: Signature | None, schema: Schema) -> Signature | None:
    """The signature of the out variant of an op that has this one; None if it is just what the schema says.

    It has one parameter ``out``, of the form of the result: a tuple where the op returns a tuple.
    """
    if signature is None:
        if len(schema.returns) == 1:
            return None
        fields: dict[str, Node] = {str(i): Leaf(f"result_{i}", f"[{i}]", "Tensor") for i in range(len(schema.returns))}
        result: Node = Group("result", "", TupleForm(tuple, tuple(fields)), fields)
        signature = Signature(tuple(map(_parameter, schema.arguments)), result, returns_plainly=True)
    assert signature.result is not None
    out = Parameter("out", inspect.Parameter.KEYWORD_ONLY, _outs(signature.result, iter(out_names(schema))))
    before = [each for each in signature.parameters if each.stars != "**"]
    after = [each for each in signature.parameters if each.stars == "**"]
    return replace(signature, parameters=(*before, out, *after))


def _parameter(argument: Argument) -> Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    leaf = Leaf(argument.name, argument.name, argument.type, default=argument.default)
    return Parameter(argument.name, kind, leaf, argument.default)


def _outs(node: Node, names: Iterator[str]) -> Node:
    """What the result of an op is made of, as an argument."""
    if isinstance(node, Group):
        fields = {key: _outs(each, names) for key, each in node.fields.items()}
        return replace(node, name="out", path=f"out{node.path}", fields=fields)
    assert isinstance(node, Leaf)
    return replace(node, name=next(names), path=f"out{node.path}", is_mutated=True)
