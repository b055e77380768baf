"""A formula and its options, as registered; and the inputs and outputs of an autograd node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch

from customops._codegen.function import as_tuple
from customops._schema.model import Argument, Differentiable, Names, Schema
from customops._torch.schema import Tag

__tracebackhide__ = True  # pytest leaves the frames out

# A gradient formula and its options, as registered --------------------------------------------------------------------


class Formula(NamedTuple):
    """How to differentiate an op in one mode: its backward, or its jvp. Options are as `register_autograd` has them."""

    fn: Callable[..., Any]
    setup_context: Callable[..., Any] | None
    nondiff_args: frozenset[str] = frozenset()
    grads_of: tuple[str, ...] = ()
    originals: frozenset[str] = frozenset()
    materialize_grads: bool = True
    once_differentiable: bool = False


class GradientOptions(TypedDict, total=False):
    """What `CustomOpDef.register_jvp` takes beside the callbacks."""

    nondiff_args: Names
    grads_of: Names | None
    originals: Names
    materialize_grads: bool


class BackwardOptions(GradientOptions, total=False):
    """What `CustomOpDef.register_autograd` takes beside the callbacks."""

    once_differentiable: bool


# The inputs and outputs of an autograd node, and how lists in them are flattened --------------------------------------


class NodeInput(NamedTuple):
    """An input of a node, and the expressions that generated functions have for it."""

    argument: Argument
    variable: str  # in `forward`, it holds the items of a list of tensors as a tuple
    length: str  # the variable with the length of a list
    may_be_left_out: bool  # by a call
    may_be_none: bool  # a list that is None is one flat input
    place: str  # among the flat inputs: an index, or for a list a slice
    needs: str  # in `forward`: is a gradient wanted? For a list, the flags of its items
    given: str  # what the op or a callback is given: lists are new ones, as the dispatcher makes them
    grad: str  # in `backward`: its gradient
    like: str  # in `backward`: what that is to be like


class Layout:
    """What a graph node takes and returns: in the user's terms, and flat, as autograd and generated functions have it.

    A node `is_plain` if it takes and returns what the op does: arguments are positional, none is mutated, and there are
    no lists of tensors. Arguments that a call leaves out are left out there, too. Other nodes get all their inputs in
    each call, None for those left out, and ``$passed`` says how many positional ones the op got.
    """

    def __init__(
        self, schema: Schema, tags: tuple[torch.Tag, ...], said: Differentiable, formulas: Sequence[Formula]
    ) -> None:
        self.schema, self.formulas, self.in_place = schema, formulas, Tag.inplace in tags
        #: The positional arguments, then the tensors that are keyword-only. `positional` says how many are the former.
        self.operands, self.positional = schema.operands, len(schema.positional)
        names = [argument.name for argument in self.operands]
        nondiff, copied, grads_of = said.nondiff_args, frozenset[str](), tuple[str, ...]()
        for formula in formulas:
            nondiff, copied = nondiff | formula.nondiff_args, copied | formula.originals
            grads_of = grads_of or formula.grads_of
        #: For each input: has it a gradient?
        self.differentiable = tuple([said.op and a.holds_tensors and a.name not in nondiff for a in self.operands])
        #: The inputs (by index) that are written, those of which setup_context gets a copy from before the write, and
        #: those whose new values are outputs of the node: the first formula that names some counts for both modes.
        self.mutated = tuple([i for i, argument in enumerate(self.operands) if argument.is_mutated])
        self.originals = tuple([i for i, name in enumerate(names) if name in copied])
        self.new_values = tuple(map(names.index, grads_of))

        types = [ret.type for ret in schema.returns]
        #: Is a return a list of something else than tensors?
        self.returns_plain_lists = True in [ret.type.endswith("]") and not ret.is_tensor_list for ret in schema.returns]
        self.returns_tuple = len(types) > 1 or "".join(types).startswith("(")
        if len(types) == 1 and self.returns_tuple:
            types = types[0][1:-1].split(", ")
        self.returns = len(types)
        flags = said.returns if len(said.returns) == len(types) else (said.op,) * len(types)  # one return, a tuple
        #: For each return, then for each of `new_values`: may it have a gradient? (Its dtype has a say, too.) And is it
        #: a list of tensors?
        self.outputs = flags + (True,) * len(grads_of)
        lists = [type_.startswith("Tensor") and type_.endswith("]") for type_ in types]
        self.list_outputs = (*lists, *[self.operands[i].is_tensor_list for i in self.new_values])

        lists_in = [i for i, argument in enumerate(self.operands) if argument.is_tensor_list]
        self.has_lists = bool(lists_in)
        returns_plainly = bool(types) and True not in self.list_outputs
        self.is_plain = returns_plainly and not (lists_in or schema.keyword_only or schema.mutated)
        self.always, has_rest = schema.call.always, schema.call.always < self.positional
        self.is_padded = has_rest and not self.is_plain
        #: Are arguments that a call leaves out left out of the node, too?
        self.cuts_rest = has_rest and self.is_plain
        self.has_named = len(schema.arguments) > len(self.operands)
        #: Does the node say more about its outputs than autograd passes on? See `inplace.Outcome`.
        self.has_outcome = bool(schema.mutated) or (self.returns_tuple and True in self.list_outputs)
        #: The inputs, in the order in which the node has them. In a plain node, those after them may be left out.
        self.order = [i for i in range(len(self.operands)) if i not in lists_in] + lists_in
        if self.is_plain:
            del self.order[self.always :]
        elif len(self.new_values) == 1:
            # What is written comes first, and may be a view: autograd takes the first gradient of a node that wrote to
            # a view for that of the view.
            self.order.remove(self.new_values[0])
            self.order.insert(0, self.new_values[0])
        #: The lists of which the node is told the length: the last input has what is left.
        self.measured: list[NodeInput] = []
        by_index: dict[int, NodeInput] = {}
        start, count = "", 0  # of the flat inputs: where the list before ends, and how many came after it
        for i in self.indices(len(self.operands)):
            argument = self.operands[i]
            name, variable, place = argument.name, argument.variable, f"{start} + {count}" if start and count else start
            may_be_left_out = argument.has_default and (argument.kwarg_only or i >= self.always)
            may_be_none = may_be_left_out or argument.type.endswith("?")
            place = place or str(count)
            is_measured = argument.is_tensor_list and (i != self.order[-1] or may_be_none)
            if is_measured:
                place += f":$end_{name}"
                start, count = f"$end_{name}", 0
            elif argument.is_tensor_list:
                place += ":"
            else:
                count += 1
            needs = f"$needs[{place}]" if lists_in else f"$needs_{name}"
            needs = needs if self.differentiable[i] else "False"
            given = f"$list({variable})" if "[" in argument.type else variable
            if given != variable and may_be_none:
                given = f"(None if {variable} is None else {given})"
            expressions = place, needs, given, f"$grad_{name}", f"$like_{name}"
            each = NodeInput(argument, variable, f"$length_{name}", may_be_left_out, may_be_none, *expressions)
            by_index[i] = each
            self.measured += [each] * is_measured
        self.inputs = tuple([by_index[i] for i in range(len(self.operands))])
        self.in_order = list(by_index.values())[: len(self.order)]
        #: What the node gets before the inputs of the op.
        self.head = ["$kernel", *["$outcome"] * self.has_outcome, *["$named"] * self.has_named]
        self.head += [*["$passed"] * self.is_padded, *[each.length for each in self.measured]]
        variables = [*[each.variable for each in self.in_order], *["*$rest"] * self.cuts_rest]
        self.flat_parameters = ["*$flat"] if lists_in else variables
        #: All inputs of the node, as a tuple. After a mutation the variables may have other values.
        self.flat = "$flat" if lists_in or schema.mutated else as_tuple(variables)

    def indices(self, count: int) -> list[int]:
        """Which inputs the node has, if it has this many."""
        return [*self.order, *range(len(self.order), count)]

    def name_of_output(self, i: int) -> str:
        if i >= self.returns:
            return self.operands[self.new_values[i - self.returns]].shown
        return f"return {i}" if len(self.outputs) > 1 else "the return"


#: How many flat values each value became, None for a value on its own.
Lengths = Sequence["int | None"]


def flatten(values: Sequence[Any], are_lists: Sequence[bool]) -> tuple[tuple[Any, ...], Lengths]:
    """Flatten lists of tensors."""
    flat: list[Any] = []
    lengths: list[int | None] = []
    for value, is_list in zip(values, are_lists, strict=True):
        flattens = is_list and value is not None
        flat += value if flattens else [value]
        lengths.append(len(value) if flattens else None)
    return tuple(flat), lengths


def unflatten(flat: Sequence[Any], lengths: Lengths) -> tuple[Any, ...]:
    """Undo `flatten`."""
    values: list[Any] = []
    i = 0
    for length in lengths:
        values.append(flat[i] if length is None else list(flat[i : i + length]))
        i += 1 if length is None else length
    return tuple(values)
