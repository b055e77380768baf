"""Differentiability: which arguments and returns of an op can have gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from customops._schema.model import Argument, Schema
from customops.errors import DefinitionError, brief

#: One argument, or several.
Names = str | Iterable[str]


class Differentiable(NamedTuple):
    """Which parts of an op are differentiable, whatever its formula."""

    #: A flag for each return; empty if every one is differentiable.
    returns: tuple[bool, ...] = ()
    #: The tensor arguments that have no gradient.
    nondiff_args: frozenset[str] = frozenset()
    #: Is any return differentiable?
    op: bool = True

    @classmethod
    def of(cls, given: bool | Sequence[bool], nondiff_args: Names, schema: Schema, op: str) -> Differentiable:
        """The record of what ``differentiable=`` and ``nondiff_args=`` of an op say.

        Raises:
            DefinitionError: there is not one flag for each return, or an argument that has no gradient anyway.
        """
        if given is True and not nondiff_args:
            return ALL
        flags: Any = (given,) * len(schema.returns) if isinstance(given, bool) else given
        if not isinstance(flags, (tuple, list)) or [type(flag) for flag in flags] != [bool] * len(schema.returns):
            raise DefinitionError(
                "differentiable= must be True, False, or one flag for each return",
                op=op,
                expected=f"{len(schema.returns)} flags, for {schema}",
                got=brief(given),
            )
        nondiff = tensor_names(nondiff_args, "nondiff_args", schema, op)
        return cls(tuple(flags), nondiff, given is True or True in flags)

    def differentiable_args(self, schema: Schema) -> tuple[Argument, ...]:
        """The arguments that make a call one to be differentiated, if they require grad. A mutated one always does."""
        tensors = (argument for argument in schema.arguments if argument.holds_tensors)
        return tuple(a for a in tensors if a.is_mutated or (self.op and a.name not in self.nondiff_args))


#: Of an op that says nothing of it: everything is differentiable.
ALL = Differentiable()


def names_in(given: Names, what: str, op: str) -> tuple[str, ...]:
    """The names that an option holds, as a tuple: it may be an iterator, to be read once.

    Raises:
        DefinitionError: it holds something else.
    """
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(name, str) for name in names):
        raise DefinitionError(
            f"{what}= must be the name of an argument, or a tuple of names",
            op=op,
            got=brief(given),
            fix=f'e.g. {what}="x" or {what}=("x", "y")',
        )
    return names


def tensor_names(given: Names, what: str, schema: Schema, op: str) -> frozenset[str]:
    """The names of tensor arguments that an option holds.

    Raises:
        DefinitionError: an argument of that name is not there, or holds no tensors.
    """
    names = frozenset(names_in(given, what, op))
    tensors = [argument.name for argument in schema.arguments if argument.holds_tensors]
    for name in names:
        if name not in tensors:
            raise DefinitionError(
                f"{what}= names something that is not a tensor argument of the op",
                op=op,
                expected=f"some of {', '.join(tensors)}",
                got=brief(name),
            )
    return names


def is_differentiable(value: Any) -> bool:
    """Is it a tensor of a dtype that has gradients?"""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
