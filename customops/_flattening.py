"""autograd.Function takes and returns flat tensors only: lists of tensors, and what is passed by name, are laid out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from customops._call import Fn
from customops._formula import Layout

#: How many flat values each value became, None for a value on its own. None instead: there are no lists at all.
Lengths = list["int | None"] | None


class Call:
    """How one differentiated call reaches the op, and how the node's flat inputs map to the user's arguments."""

    __slots__ = ("fn", "keywords", "lengths", "names", "new_values", "output_lengths", "passed", "written")

    def __init__(self, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: tuple[str, ...]) -> None:
        self.fn = fn
        self.passed = len(args)
        #: The keyword-only arguments that are inputs of the node, and the others.
        self.names = [name for name in tensors if name in kwargs] if tensors else []
        self.keywords = {key: value for key, value in kwargs.items() if key not in tensors} if tensors else kwargs
        self.lengths: Lengths = None
        self.output_lengths: Lengths = None
        #: Tensors that were written, and the outputs of the node that are their new values: see `_history.carry_on`.
        self.written: list[Tensor] = []
        self.new_values: list[int] = []

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> tuple[Any, ...]:
        """The node's inputs."""
        passed = self.indices(layout)
        values = [args[i] if i < self.passed else kwargs[layout.inputs[i].name] for i in passed]
        flat, self.lengths = flatten(tuple(values), tuple(layout.inputs[i].is_tensor_list for i in passed))
        return flat

    def indices(self, layout: Layout) -> list[int]:
        """Which inputs were passed, in the order in which the node has them."""
        passed = list(range(self.passed))
        if self.names:
            rest = range(layout.positional, len(layout.inputs))
            passed += [i for i in rest if layout.inputs[i].name in self.names]
        if layout.first in passed:
            passed.remove(layout.first)
            passed.insert(0, layout.first)
        return passed

    def arguments(self, inputs: dict[int, Any], layout: Layout) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the op is called with; `inputs` are by index, lists as lists."""
        args = tuple(inputs[i] for i in range(self.passed))
        named = {layout.inputs[i].name: value for i, value in inputs.items() if i >= layout.positional}
        return args, {**self.keywords, **named} if named else self.keywords

    def needs_input_grad(self, flags: dict[int, Any], layout: Layout) -> tuple[Any, ...]:
        """The flags of the inputs that were passed, as a backward sees them.

        That is an entry for each positional argument that was passed; if there are tensors that are keyword-only, for
        each positional argument and each of them, so that each has its place.
        """
        entries = self.passed if layout.positional == len(layout.inputs) else len(layout.inputs)
        return tuple(flags.get(i, False) for i in range(entries))


def flatten(values: tuple[Any, ...], are_lists: tuple[bool, ...]) -> tuple[tuple[Any, ...], Lengths]:
    """Lay lists of tensors out flat."""
    if True not in are_lists:
        return values, None
    flat: list[Any] = []
    lengths: list[int | None] = []
    for value, is_list in zip(values, are_lists, strict=False):  # arguments left at their default are not there
        if is_list and value is not None:
            flat += value
            lengths.append(len(value))
        else:
            flat.append(value)
            lengths.append(None)
    return tuple(flat), lengths


def regroup(flat: tuple[Any, ...], lengths: Lengths) -> tuple[Any, ...]:
    """Undo `flatten`."""
    if lengths is None:
        return flat
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
