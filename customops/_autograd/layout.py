"""The inputs and outputs of an autograd node, and how lists in them are flattened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from customops._autograd.options import Formula
from customops._compat.tags import Tag
from customops._schema.differentiability import Differentiable
from customops._schema.model import Argument, Schema


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
            returns_plain_lists=any(ret.type.endswith("]") and not ret.is_tensor_list for ret in schema.returns),
            new_values=tuple(names.index(name) for name in grads_of),
            mutated=tuple(i for i, argument in enumerate(inputs) if argument.is_mutated),
            originals=tuple(i for i, name in enumerate(names) if name in originals),
            in_place=Tag.inplace in tags,
            first=names.index(grads_of[0]) if len(grads_of) == 1 else None,
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
    return tuple(type_.startswith("Tensor") and type_.endswith("]") for type_ in types)


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
