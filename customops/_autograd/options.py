"""A gradient formula and its options, as registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from customops._schema.differentiability import Names, tensor_names
from customops._schema.model import Schema
from customops.errors import RegistrationError

__tracebackhide__ = True  # pytest leaves the frames out


class Formula(NamedTuple):
    """How to differentiate an op in one mode: its backward, or its jvp. Options are as `register_autograd` has them."""

    fn: Callable[..., Any]
    setup_context: Callable[..., Any] | None
    nondiff_args: frozenset[str] = frozenset()
    grads_of: tuple[str, ...] = ()
    originals: frozenset[str] = frozenset()
    materialize_grads: bool = True
    once_differentiable: bool = False


def mutated_values(grads_of: Names | None, formula: Formula, schema: Schema, op: str) -> tuple[str, ...]:
    """The written arguments whose new values are outputs to be differentiated, in the order of the schema.

    An op that returns nothing has its results in what it writes; one that returns something is taken by default to
    write only what nobody differentiates, as a counter or a cache.
    """
    mutated = [argument.name for argument in schema.mutated]
    if grads_of is None:
        return () if schema.returns else tuple(name for name in mutated if name not in formula.nondiff_args)
    chosen = mutated_names(grads_of, "grads_of", schema, op)
    returned = [ret.alias for ret in schema.returns if ret.alias is not None]
    for argument in schema.mutated:
        if argument.name not in chosen:
            continue
        problem = None
        if argument.alias in returned:
            problem = "it is returned, so backward gets a gradient for it already"
        elif argument.name in formula.nondiff_args:
            problem = "it is one of nondiff_args"
        if problem is not None:
            raise RegistrationError(f"grads_of= names an argument, but {problem}", op=op, argument=argument.name)
    return tuple(name for name in mutated if name in chosen)


def mutated_names(given: Names, what: str, schema: Schema, op: str) -> frozenset[str]:
    """As `tensor_names`, of arguments that the op writes to."""
    names = tensor_names(given, what, schema, op)
    for name in names.difference(argument.name for argument in schema.mutated):
        raise RegistrationError(f"{what}= names an argument, but the op does not write to it", op=op, argument=name)
    return names


class GradientOptions(TypedDict, total=False):
    """What `CustomOpDef.register_jvp` takes beside the callbacks."""

    nondiff_args: Names
    grads_of: Names | None
    originals: Names
    materialize_grads: bool


class BackwardOptions(GradientOptions, total=False):
    """What `CustomOpDef.register_autograd` takes beside the callbacks."""

    once_differentiable: bool


class ResultOptions(TypedDict, total=False):
    """What `CustomOpDef.register_autograd_from` takes for a function that returns what the op does."""

    nondiff_args: Names
    recompute: bool


class FromOptions(ResultOptions, total=False):
    """All that `CustomOpDef.register_autograd_from` takes."""

    grads_of: Names | None
