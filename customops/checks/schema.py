"""test_schema: an operator writes and aliases what its schema says, and nothing else.

The operator runs under a dispatch mode that sees each operator below autograd, where its kernel is called with the
very tensors it may write. Judged are the operator under test and those outside aten that it calls on the way there
(from an autograd kernel, or as part of a composite): a composite operator is as right as its parts, and aten's
schemas are torch's own matter. A declared write that does not happen is no failure, since it may depend on the data.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch

from customops import _torch
from customops.checks import _memory
from customops.checks._inputs import seeded, tensors_in
from customops.checks._outcome import NotExercised, SchemaCheckError
from customops.checks._trial import FAILS, JudgingMode, Trial, failed_call, resolve
from customops.errors import CheckError

#: Operators whose schema leaves out an alias or a write on purpose.
_UNTRUE_SCHEMAS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::cudnn_batch_norm",
        "aten::lift",
        "aten::lift_fresh",
        "aten::miopen_batch_norm",
        "aten::native_batch_norm",
        "aten::unsafe_split.Tensor",
        "aten::unsafe_split_with_sizes",
    }
)


def schema_check(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Raise SchemaCheckError if `op` mutates or aliases a tensor in a way that its schema does not declare."""
    check(Trial(resolve(op), tuple(args), kwargs or {}))


def check(trial: Trial) -> None:
    trial.require_data()
    copy = trial.copy()
    mode = JudgingMode(trial.op, _judge, _UNTRUE_SCHEMAS)
    try:
        with seeded((copy.args, copy.kwargs)), mode:
            copy.op(*copy.args, **copy.kwargs)
    except SchemaCheckError:
        raise
    except Exception as error:
        raise failed_call(trial.name, FAILS, error, kind=SchemaCheckError) from error
    if not mode.judged:
        raise NotExercised(
            "there is no kernel to judge: the operator is made of aten operators, or is one of those aten operators "
            "whose schema is not meant to be true"
        )


def _judge(trial: Trial) -> Any:
    """Call an operator; returns what it returned, if the schema is true of the call."""
    inputs = {name: tensors_in(value) for name, value in trial.arguments.items()}
    unwritten = [(name, tensor) for name in inputs if name not in trial.mutated for tensor in inputs[name]]
    before = [(name, tensor, _snapshot(tensor)) for name, tensor in unwritten]
    # torch does not let a view be made twice over.
    with contextlib.nullcontext() if trial.schema.is_view else _torch.autograd.count_versions():
        outputs = trial.op(*trial.args, **trial.kwargs)

    returned = [tensors_in(value) for value in trial.by_return(outputs)]
    for i, output in [(i, tensor) for i, tensors in enumerate(returned) for tensor in tensors]:
        shared = [name for name in inputs if any(_memory.share_memory(output, x) for x in inputs[name])]
        same = [name for name in inputs if any(output is x for x in inputs[name])]
        # An alias that is declared explains the others: inputs may share memory among themselves.
        declared = [a.name for a in trial.schema.arguments if a.may_alias(trial.schema.returns[i])]
        if shared and not set(shared).intersection(declared):
            raise _error(
                trial,
                f"Argument {shared[0]} is not defined to alias output but was aliasing",
                argument=shared[0],
                got=f"output {i} is {same[0]} itself" if same else f"output {i} shares memory with {shared[0]}",
                fix="return a clone; or, for a view op, declare it: (Tensor(a) x) -> Tensor(a)",
            )
        if same and not any(name in trial.mutated for name in same):
            raise _error(
                trial,
                f"Argument {same[0]} is returned as it is, which only written arguments may be",
                argument=same[0],
                got=f"output {i} is {same[0]} itself",
                fix=f"return a new view, e.g. {same[0]}.view_as({same[0]})",
            )

    for name, tensor, change_of in before:
        change = change_of()
        # It may have been passed, whole or in part, as an argument that may be written, too.
        if change and not any(_memory.overlap(tensor, other) for other in tensors_in(trial.mutated)):
            raise _error(
                trial,
                f"Argument {name} is not defined as mutable but was mutated",
                argument=name,
                got=change,
                fix=f"declare it with mutates_args={{{name!r}}}, in a schema Tensor(a!) {name}; "
                "or have the kernel write to a clone",
            )

    named = [
        (i, f"{i}[{k}]" if len(tensors) > 1 else str(i), tensor)
        for i, tensors in enumerate(returned)
        for k, tensor in enumerate(tensors)
    ]
    for (i, name, one), (j, other, two) in itertools.combinations(named, 2):
        # Items of one list may be slices of one buffer: torch does not mind either.
        alias = _memory.overlap if i == j else _memory.share_memory
        if alias(one, two) and not trial.schema.returns[i].may_alias(trial.schema.returns[j]):
            raise _error(
                trial,
                f"Outputs {name} and {other} alias unexpectedly",
                got="they share memory",
                fix="return a clone of one of them",
            )
    return outputs


def _error(trial: Trial, problem: str, **fields: str) -> CheckError:
    return SchemaCheckError(problem, op=trial.name, expected=str(_torch.schema.schema_of(trial.op)), **fields)


def _snapshot(tensor: torch.Tensor) -> Callable[[], str | None]:
    """A function that says what has happened to a tensor since, or None."""

    def shape_now() -> tuple[Any, ...]:
        if tensor.is_nested:
            return ()
        if tensor.layout is not torch.strided:
            return (tuple(tensor.shape),)
        return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    shape, version = shape_now(), _torch.autograd.version_of(tensor)
    bits = [_memory.bits(part).clone() for part in _memory.parts(tensor)]

    def change() -> str | None:
        if shape_now() != shape:
            return f"(size, stride, offset) was {shape}, is {shape_now()}"
        for old, part in zip(bits, _memory.parts(tensor), strict=True):
            new = _memory.bits(part)
            if old.shape != new.shape:
                return "it has another number of nonzero elements"
            if not torch.equal(old, new):
                differs = old != new
                changed = (differs if differs.dim() == part.dim() else differs.any(-1)).nonzero().tolist()
                return f"{len(changed)} of {part.numel()} elements changed, the first at index {tuple(changed[0])}"
        if _torch.autograd.version_of(tensor) != version:
            return "it was written, though with the values it already had"
        return None

    return change
