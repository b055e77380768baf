"""The inputs and outputs of an autograd node, and how lists in them are flattened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch

from customops._codegen.function import as_tuple
from customops._schema.model import Argument, Differentiable, Names, Schema, tensor_names
from customops._torch.schema import Tag
from customops.errors import RegistrationError

# A gradient formula and its options, as registered --------------------------------------------------------------------

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


# The inputs and outputs of an autograd node, and how lists in them are flattened --------------------------------------


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
    #: Is a return a list of something else than tensors?
    returns_plain_lists: bool
    #: The inputs (by index) whose new values are outputs of the node.
    new_values: tuple[int, ...]
    #: The inputs that are written.
    mutated: tuple[int, ...]
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
        nondiff, originals, grads_of = said.nondiff_args, frozenset[str](), tuple[str, ...]()
        for formula in formulas:
            nondiff, originals = nondiff | formula.nondiff_args, originals | formula.originals
            grads_of = grads_of or formula.grads_of
        names = [argument.name for argument in inputs]
        new_values = tuple([names.index(name) for name in grads_of])
        lists = list_outputs(schema)
        flags = said.returns if len(said.returns) == len(lists) else (said.op,) * len(lists)  # one return, a tuple
        return cls(
            inputs=inputs,
            positional=len(schema.positional),
            differentiable=tuple([said.op and a.holds_tensors and a.name not in nondiff for a in inputs]),
            outputs=flags + (True,) * len(grads_of),
            list_outputs=lists + tuple([inputs[i].is_tensor_list for i in new_values]),
            returns_plain_lists=True in [ret.type.endswith("]") and not ret.is_tensor_list for ret in schema.returns],
            new_values=new_values,
            mutated=tuple([i for i, argument in enumerate(inputs) if argument.is_mutated]),
            originals=tuple([i for i, name in enumerate(names) if name in originals]),
            in_place=Tag.inplace in tags,
            first=new_values[0] if len(new_values) == 1 else None,
        )

    def name_of_output(self, i: int) -> str:
        returns = len(self.outputs) - len(self.new_values)
        if i >= returns:
            return self.inputs[self.new_values[i - returns]].shown
        return f"return {i}" if len(self.outputs) > 1 else "the return"


def list_outputs(schema: Schema) -> tuple[bool, ...]:
    """Which of the returns are lists of tensors?"""
    types = [ret.type for ret in schema.returns]
    if len(types) == 1 and types[0].startswith("("):
        types = types[0][1:-1].split(", ")
    return tuple([type_.startswith("Tensor") and type_.endswith("]") for type_ in types])


#: How many flat values each value became, None for a value on its own.
Lengths = Sequence["int | None"]


def flatten(values: Sequence[Any], are_lists: Sequence[bool]) -> tuple[tuple[Any, ...], Lengths]:
    """Flatten lists of tensors."""
    flat: list[Any] = []
    lengths: list[int | None] = []
    for value, is_list in zip(values, are_lists, strict=True):
        if is_list and value is not None:
            flat += value
            lengths.append(len(value))
        else:
            flat.append(value)
            lengths.append(None)
    return tuple(flat), lengths


def unflatten(flat: Sequence[Any], lengths: Lengths) -> tuple[Any, ...]:
    """Undo `flatten`."""
    values: list[Any] = []
    i = 0
    for length in lengths:
        if length is None:
            values.append(flat[i])
            i += 1
        else:
            values.append(list(flat[i : i + length]))
            i += length
    return tuple(values)


# How an op's arguments become those of its node, which autograd looks at one by one: lists are flattened --------------


class NodeInput(NamedTuple):
    """An input of a node, and the expressions that generated functions have for it."""

    argument: Argument
    #: A list of tensors has its items there as a tuple, in `forward`.
    variable: str
    #: May a call leave it out?
    may_be_left_out: bool
    #: May a list be None? It is one flat argument then.
    may_be_none: bool
    #: Where it is among the flat ones: an index, or for a list a slice.
    place: str
    #: Its entry in `needs_input_grad`.
    needs: str
    #: What the op or a callback is given: lists are new ones, as the dispatcher makes them.
    given: str
    #: In `backward`: its gradient, and what that is to be like.
    grad: str
    like: str

    @property
    def length(self) -> str:
        """The variable with the length of a list."""
        return f"$length_{self.argument.name}"


class NodeArguments:
    """The arguments of the functions that are generated for a node.

    A node `is_plain` if it takes and returns what the op does: arguments are positional, none is mutated, and there are
    no lists of tensors. Arguments that a call leaves out are left out there, too. Other nodes get all their inputs in
    each call, None for those left out, and ``$passed`` says how many positional ones the op got.
    """

    def __init__(self, schema: Schema, layout: Layout) -> None:
        self.schema, self.layout = schema, layout
        self.always, has_rest = schema.call.always, schema.call.always < layout.positional
        lists = [i for i, argument in enumerate(layout.inputs) if argument.is_tensor_list]
        self.has_lists = bool(lists)
        returns_plainly = bool(schema.returns) and True not in layout.list_outputs
        self.is_plain = returns_plainly and not (lists or schema.keyword_only or schema.mutated)
        self.returns_tuple = len(schema.returns) > 1 or [ret.type[:1] for ret in schema.returns] == ["("]
        self.is_padded = has_rest and not self.is_plain
        #: Are arguments that a call leaves out left out of the node, too?
        self.cuts_rest = has_rest and self.is_plain
        self.has_named = len(schema.arguments) > len(layout.inputs)
        #: Does the node say more about its outputs than autograd passes on? See `inplace.Outcome`.
        self.has_outcome = bool(schema.mutated) or (self.returns_tuple and True in layout.list_outputs)
        #: The inputs, in the order in which the node has them. In a plain node, those after them may be left out.
        self.order = [i for i in range(len(layout.inputs)) if i not in lists] + lists
        if self.is_plain:
            del self.order[self.always :]
        elif layout.first is not None:
            self.order.remove(layout.first)
            self.order.insert(0, layout.first)
        #: The lists of which the node is told the length: the last input has what is left.
        self.measured: list[NodeInput] = []
        by_index: dict[int, NodeInput] = {}
        start, count = "", 0  # of the flat inputs: where the list before ends, and how many came after it
        for i in [*self.order, *range(len(self.order), len(layout.inputs))]:
            argument = layout.inputs[i]
            name, variable, place = argument.name, argument.variable, f"{start} + {count}" if start and count else start
            may_be_left_out = argument.has_default and (argument.kwarg_only or i >= self.always)
            may_be_none = may_be_left_out or argument.type.endswith("?")
            place, needs = place or str(count), f"$needs_{name}"
            is_measured = argument.is_tensor_list and (i != self.order[-1] or may_be_none)
            if is_measured:
                place += f":$end_{name}"
                start, count = f"$end_{name}", 0
            elif argument.is_tensor_list:
                place += ":"
            else:
                count += 1
                needs = f"$needs[{place}]" if self.is_plain or layout.differentiable[i] else "False"
            given = f"$list({variable})" if "[" in argument.type else variable
            if given != variable and may_be_none:
                given = f"(None if {variable} is None else {given})"
            each = by_index[i] = NodeInput(
                argument, variable, may_be_left_out, may_be_none, place, needs, given, f"$grad_{name}", f"$like_{name}"
            )
            self.measured += [each] * is_measured
        self.inputs = tuple([by_index[i] for i in range(len(layout.inputs))])
        self.in_order = [self.inputs[i] for i in self.order]
        #: What the node gets before the inputs of the op.
        flags = {"$outcome": self.has_outcome, "$named": self.has_named, "$passed": self.is_padded}
        self.head = ["$kernel", *[name for name, is_there in flags.items() if is_there]]
        self.head += [each.length for each in self.measured]
        variables = [*[each.variable for each in self.in_order], *["*$rest"] * self.cuts_rest]
        self.flat_parameters = ["*$flat"] if lists else variables
        #: All inputs of the node, as a tuple. After a mutation the variables may have other values.
        self.flat = "$flat" if lists or schema.mutated else as_tuple(variables)

    def indices(self, count: int) -> list[int]:
        """Which inputs the node has, if it has this many."""
        return [*self.order, *range(len(self.order), count)]
