"""test_schema: an operator writes and aliases what its schema says, and nothing else.

The operator runs under a dispatch mode that sees each operator below autograd, where its kernel is called with the
very tensors it may write. Judged are the operator under test and those outside aten that it calls on the way there
(from an autograd kernel, or as part of a composite): a composite operator is as right as its parts, and aten's
schemas are torch's own matter. A declared write that does not happen is no failure, since it may depend on the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
    call = _Call(trial)
    outputs = call.run()
    call.judge(outputs)
    return outputs


class _Call:
    """One call of an operator, and its inputs as they were before."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.inputs = {name: tensors_in(value) for name, value in trial.arguments.items()}
        self.before = {
            name: [_Snapshot(tensor) for tensor in tensors]
            for name, tensors in self.inputs.items()
            if name not in trial.mutated
        }

    def run(self) -> Any:
        trial = self.trial
        if trial.schema.is_view:
            return trial.op(*trial.args, **trial.kwargs)  # torch does not let a view be made twice over
        with _torch.autograd.count_versions():
            return trial.op(*trial.args, **trial.kwargs)

    def judge(self, outputs: Any) -> None:
        returned = [tensors_in(value) for value in self.trial.by_return(outputs)]
        for i, tensors in enumerate(returned):
            for output in tensors:
                self._judge_aliased_inputs(i, output)
        self._judge_writes()
        self._judge_aliased_outputs(returned)

    def _judge_writes(self) -> None:
        for name, snapshots in self.before.items():
            for snapshot in snapshots:
                change = snapshot.change()
                if change and not self._is_part_of_written(snapshot.tensor):
                    raise self._error(
                        f"Argument {name} is not defined as mutable but was mutated",
                        argument=name,
                        got=change,
                        fix=f"declare it with mutates_args={{{name!r}}}, in a schema Tensor(a!) {name}; "
                        "or have the kernel write to a clone",
                    )

    def _is_part_of_written(self, tensor: torch.Tensor) -> bool:
        """Was the tensor also passed, whole or in part, as an argument that may be written?"""
        return any(_memory.overlap(tensor, other) for other in tensors_in(self.trial.mutated))

    def _judge_aliased_inputs(self, i: int, output: torch.Tensor) -> None:
        shared = [name for name, inputs in self.inputs.items() if any(_memory.share_memory(output, x) for x in inputs)]
        same = [name for name, inputs in self.inputs.items() if any(output is x for x in inputs)]
        # An alias that is declared explains the others: inputs may share memory among themselves.
        if shared and not any(self._may_alias(name, i) for name in shared):
            raise self._error(
                f"Argument {shared[0]} is not defined to alias output but was aliasing",
                argument=shared[0],
                got=f"output {i} is {same[0]} itself" if same else f"output {i} shares memory with {shared[0]}",
                fix="return a clone; or, for a view op, declare it: (Tensor(a) x) -> Tensor(a)",
            )
        if same and not any(name in self.trial.mutated for name in same):
            raise self._error(
                f"Argument {same[0]} is returned as it is, which only written arguments may be",
                argument=same[0],
                got=f"output {i} is {same[0]} itself",
                fix=f"return a new view, e.g. {same[0]}.view_as({same[0]})",
            )

    def _judge_aliased_outputs(self, returned: list[list[torch.Tensor]]) -> None:
        for (i, name, one), (j, other, two) in itertools.combinations(_named_outputs(returned), 2):
            # Items of one list may be slices of one buffer: torch does not mind either.
            alias = _memory.overlap if i == j else _memory.share_memory
            if alias(one, two) and not self._outputs_may_alias(i, j):
                raise self._error(
                    f"Outputs {name} and {other} alias unexpectedly",
                    got="they share memory",
                    fix="return a clone of one of them",
                )

    def _may_alias(self, name: str, i: int) -> bool:
        argument = next(a for a in self.trial.schema.arguments if a.name == name)
        return bool(_alias_sets(argument) & _alias_sets(self.trial.schema.returns[i]))

    def _outputs_may_alias(self, i: int, j: int) -> bool:
        returns = self.trial.schema.returns
        return bool(_alias_sets(returns[i]) & _alias_sets(returns[j]))

    def _error(self, problem: str, **fields: str) -> CheckError:
        return SchemaCheckError(
            problem, op=self.trial.name, expected=str(_torch.schema.schema_of(self.trial.op)), **fields
        )


class _Snapshot:
    """A tensor, and what it was."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = _shape(tensor)
        self.bits = [_memory.bits(part).clone() for part in _memory.parts(tensor)]
        self.version = _torch.autograd.version_of(tensor)

    def change(self) -> str | None:
        """What has happened to the tensor since, or None."""
        shape = _shape(self.tensor)
        if shape != self.shape:
            return f"(size, stride, offset) was {self.shape}, is {shape}"
        for before, part in zip(self.bits, _memory.parts(self.tensor), strict=True):
            after = _memory.bits(part)
            if before.shape != after.shape:
                return "it has another number of nonzero elements"
            if not torch.equal(before, after):
                differs = before != after
                changed = (differs if differs.dim() == part.dim() else differs.any(-1)).nonzero().tolist()
                return f"{len(changed)} of {part.numel()} elements changed, the first at index {tuple(changed[0])}"
        if _torch.autograd.version_of(self.tensor) != self.version:
            return "it was written, though with the values it already had"
        return None


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.is_nested:
        return ()
    if tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _alias_sets(typed: Any) -> frozenset[str]:
    return frozenset() if typed.alias is None else typed.alias.sets


def _named_outputs(returned: list[list[torch.Tensor]]) -> Iterator[tuple[int, str, torch.Tensor]]:
    for i, tensors in enumerate(returned):
        for k, tensor in enumerate(tensors):
            yield i, f"{i}[{k}]" if len(tensors) > 1 else str(i), tensor
