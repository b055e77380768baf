"""What an author says about the gradients of an op: what has one, the formulas, and what these take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from customops._schema import Argument, Schema
from customops.errors import DefinitionError, RegistrationError, brief

#: One argument, or several.
Names = str | Iterable[str]


class Differentiable(NamedTuple):
    """What of an op is differentiable, whatever its formula."""

    #: A flag for each return; none at all: every one is.
    returns: tuple[bool, ...] = ()
    #: Tensors that have no gradient.
    nondiff_args: frozenset[str] = frozenset()
    #: Is anything?
    op: bool = True

    @classmethod
    def of(cls, given: bool | Sequence[bool], nondiff_args: Names, schema: Schema, op: str) -> Differentiable:
        """``differentiable=`` and ``nondiff_args=`` of an op.

        Raises:
            DefinitionError: there is not one flag for each return, or an argument that has no gradient anyway.
        """
        if given is True and not nondiff_args:
            return ALL
        flags: Any = (given,) * len(schema.returns) if isinstance(given, bool) else given
        if not isinstance(flags, (tuple, list)) or [type(flag) for flag in flags] != [bool] * len(schema.returns):
            raise DefinitionError(
                "differentiable= is True, False, or one of them for each return",
                op=op,
                expected=f"{len(schema.returns)} flags, for {schema}",
                got=brief(given),
            )
        nondiff = tensor_names(nondiff_args, "nondiff_args", schema, op)
        return cls(tuple(flags), nondiff, given is True or True in flags)

    def watched(self, schema: Schema) -> tuple[Argument, ...]:
        """The arguments that, if they require grad, make a call one to be differentiated. A write always matters."""
        tensors = (argument for argument in schema.arguments if argument.holds_tensors)
        return tuple(a for a in tensors if a.is_written or (self.op and a.name not in self.nondiff_args))


#: Of an op that says nothing of it.
ALL = Differentiable()


def names_in(given: Names, what: str, op: str) -> tuple[str, ...]:
    """The names that an option holds, read once: it may be an iterator.

    Raises:
        DefinitionError: it holds something else.
    """
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(name, str) for name in names):
        raise DefinitionError(
            f"{what}= holds names of arguments", op=op, got=brief(given), fix=f'e.g. {what}="x" or {what}=("x", "y")'
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
                f"{what}= names an argument that is no tensor of the op",
                op=op,
                expected=f"some of {', '.join(tensors)}",
                got=brief(name),
            )
    return names


class Formula(NamedTuple):
    """How to differentiate an op in one mode: its backward, or its jvp. Options are as `register_autograd` has them."""

    fn: Callable[..., Any]
    setup_context: Callable[..., Any] | None
    nondiff_args: frozenset[str] = frozenset()
    grads_of: tuple[str, ...] = ()
    originals: frozenset[str] = frozenset()
    materialize_grads: bool = True
    once_differentiable: bool = False


def written_values(grads_of: Names | None, formula: Formula, schema: Schema, op: str) -> tuple[str, ...]:
    """The written arguments whose new values are outputs to be differentiated, in the order of the schema.

    An op that returns nothing has its results in what it writes; one that returns something is taken by default to
    write only what nobody differentiates, as a counter or a cache.
    """
    written = [argument.name for argument in schema.mutated]
    if grads_of is None:
        return () if schema.returns else tuple(name for name in written if name not in formula.nondiff_args)
    chosen = written_names(grads_of, "grads_of", schema, op)
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
    return tuple(name for name in written if name in chosen)


def written_names(given: Names, what: str, schema: Schema, op: str) -> frozenset[str]:
    """As `tensor_names`, of arguments that the op writes to."""
    names = tensor_names(given, what, schema, op)
    for name in names.difference(argument.name for argument in schema.mutated):
        raise RegistrationError(f"{what}= names an argument, but the op does not write to it", op=op, argument=name)
    return names


@dataclass(frozen=True)
class Layout:
    """What a graph node takes and returns, in the user's terms: an item for each argument or return, lists as lists."""

    #: The positional arguments, then the tensors that are keyword-only. `positional` says how many are the former.
    inputs: tuple[Argument, ...]
    positional: int
    #: For each input: has it a gradient?
    differentiable: tuple[bool, ...]
    #: For each return, then for each of `new_values`: may it have a gradient? (Its dtype has a say, too.)
    outputs: tuple[bool, ...]
    list_outputs: tuple[bool, ...]
    #: The inputs (by index) whose new values are outputs of the node.
    new_values: tuple[int, ...]
    #: The inputs that are written.
    written: tuple[int, ...]
    #: The inputs of which setup_context gets a copy from before the write.
    originals: tuple[int, ...]
    in_place: bool
    #: The input that comes first in the node, if not the first one: one that is written, and may be a view. Autograd
    #: takes the first gradient of a node that wrote to a view for that of the view.
    first: int | None

    @classmethod
    def of(
        cls, schema: Schema, tags: tuple[torch.Tag, ...], said: Differentiable, formulas: Sequence[Formula]
    ) -> Layout:
        """The layout of a node for these formulas; the first one that names new values counts for both modes."""
        inputs = schema.operands
        nondiff = said.nondiff_args.union(*(formula.nondiff_args for formula in formulas))
        names = [argument.name for argument in inputs]
        grads_of: tuple[str, ...] = next((formula.grads_of for formula in formulas if formula.grads_of), ())
        originals = frozenset[str]().union(*(formula.originals for formula in formulas))
        lists = list_outputs(schema)
        flags = said.returns if len(said.returns) == len(lists) else (said.op,) * len(lists)  # one return, a tuple
        return cls(
            inputs=inputs,
            positional=len(schema.positional),
            differentiable=tuple(said.op and a.holds_tensors and a.name not in nondiff for a in inputs),
            outputs=flags + (True,) * len(grads_of),
            list_outputs=lists + tuple(inputs[names.index(name)].is_tensor_list for name in grads_of),
            new_values=tuple(names.index(name) for name in grads_of),
            written=tuple(i for i, argument in enumerate(inputs) if argument.is_written),
            originals=tuple(i for i, name in enumerate(names) if name in originals),
            in_place=torch.Tag.inplace in tags,
            first=names.index(grads_of[0]) if len(grads_of) == 1 else None,
        )

    def name_of_output(self, i: int) -> str:
        returns = len(self.outputs) - len(self.new_values)
        if i >= returns:
            return self.inputs[self.new_values[i - returns]].name
        return f"return {i}" if len(self.outputs) > 1 else "the return"


def list_outputs(schema: Schema) -> tuple[bool, ...]:
    """Which of the returns are lists of tensors?"""
    types = [ret.type for ret in schema.returns]
    if len(types) == 1 and types[0].startswith("("):
        types = types[0][1:-1].split(", ")
    return tuple(type_.startswith("Tensor") and type_.endswith("]") for type_ in types)


def is_differentiable(value: Any) -> bool:
    """A tensor of a dtype that has gradients."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
