"""test_writes: what an operator writes and reads, byte by byte; and what its schema says of writes.

test_schema says what is written without being declared. Here each tensor lies in a larger storage, amid bytes that are
one thing in one run and another in the next: the bytes have to stay, and the results must not depend on them. What the
schema declares is held against what happens: the return of the written tensor itself, an alias, sizes that stay, and a
version counter that autograd goes by.

test_declared_writes: what the schema declares as written is written, in one of several calls with other values, as it
may depend on the data. Samples are what it is judged on: of what is derived of them, much leaves nothing to write.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from customops import _torch
from customops._torch.schema import Tag
from customops.checks import _memory
from customops.checks._fills import Surrounded, can_surround
from customops.checks._inputs import quiet, seeded, tensors_in
from customops.checks._outcome import NotExercised, SchemaCheckError
from customops.checks._runs import copied, difference
from customops.checks._trial import Trial
from customops.checks._variants import are_plain, is_about_storages, like, reordered_values
from customops.errors import CheckError


def check(trial: Trial) -> None:
    trial.require_data()
    if not are_plain(trial) or not any(tensor.numel() for tensor in trial.tensors):
        raise NotExercised("no input is a plain strided tensor with elements")
    if is_about_storages(trial):
        raise NotExercised("the operator works on storages, not on the elements of tensors")
    with torch.no_grad(), quiet():
        if can_surround(trial):
            _judge_surroundings(trial.detached())
        if not trial.is_builtin:  # torch's own schemas are its own matter
            for copy, before, outputs in _writing_calls(trial.detached()):
                _judge_written(copy, before)
                _judge_returned(copy, outputs)
            _judge_aliases(trial.detached())


def check_declared(trial: Trial) -> None:
    trial.require_data()
    if not any(tensor.numel() for tensor in tensors_in(trial.mutated)):
        raise NotExercised("no argument with elements is declared as written")
    if not are_plain(trial) or trial.is_builtin:
        raise NotExercised("an input is not a plain strided tensor, or the operator is one of torch's own")
    with torch.no_grad(), quiet():
        calls = [before for _, before, _ in _writing_calls(trial.detached())]
    idle = [(name, i) for name, states in calls[0].items() for i in range(len(states))] if len(calls) > 3 else []
    for name, i in idle:
        if not any(before[name][i].is_written for before in calls):
            label = calls[0][name][i].label
            raise _error(
                trial,
                f"argument {label} is declared as written, and no call was seen to write it",
                argument=label,
                got=f"it was as before after {len(calls)} calls with other values",
                fix="write the result to it, not to a copy such as x.contiguous() or x.to(...); or do not declare it",
            )


def _call(trial: Trial) -> list[Any]:
    """Call the operator on the very tensors of the trial."""
    with seeded((trial.args, trial.kwargs)):
        return trial.by_return(trial.op(*trial.args, **trial.kwargs))


def _judge_surroundings(trial: Trial) -> None:
    runs = []  # all are kept, so that memory an operator does not initialise is not what was around another run's input
    for byte in (0xFF, 0x3C, 0xFF, 0x3C):  # NaN, or -1; and a number
        surrounded = Surrounded(trial, byte)
        try:
            outputs = _call(surrounded.trial)
        except Exception:
            return  # it does not take a tensor that does not start its storage
        written = surrounded.written_outside()
        if written is not None:
            name, _ = written
            raise _error(
                trial,
                f"the operator writes memory outside of argument {name}",
                argument=name,
                got="bytes around the tensor, or between its elements, changed",
                fix="go by the sizes and strides of the tensor; or write to a contiguous copy, and copy it back",
            )
        runs.append((surrounded, copied(outputs), copied(list(surrounded.trial.mutated.values()))))
    results = [[outputs, written] for _, outputs, written in runs]
    same = not _differ(results[0], results[2]) and not _differ(results[1], results[3])
    found = _differ(results[1], results[0])
    if same and found:
        raise _error(
            trial,
            "the result depends on memory outside of the tensors that were passed",
            got=f"with other bytes there: {found}",
            expected="the same result",
            fix="go by the sizes, the strides and the storage offset of each tensor, or call contiguous() on it first; "
            "do not read past its end",
        )


def _differ(one: Any, other: Any) -> str | None:
    return difference(one, other, exact=True)


def _writing_calls(trial: Trial) -> Iterator[tuple[Trial, dict[str, list[_State]], list[Any]]]:
    """Calls until each tensor that is declared as written was: what was written before, and what was returned."""
    idle = {state.label for states in _states(trial).values() for state in states}
    for call in itertools.islice(_likely_to_write(trial), 20):
        if not idle:
            return
        copy = call.copy()
        before = _states(copy)
        try:
            outputs = _call(copy)
        except Exception:
            continue  # it does not take this value
        idle -= {state.label for states in before.values() for state in states if state.look_again()}
        yield copy, before, outputs


def _states(trial: Trial) -> dict[str, list[_State]]:
    """The tensors with elements that the schema says are written, by argument."""
    return {
        name: [
            _State(tensor, name if tensor is value else f"{name}[{i}]")
            for i, tensor in enumerate(tensors_in(value))
            if tensor.numel()
        ]
        for name, value in trial.mutated.items()
    }


def _likely_to_write(trial: Trial) -> Iterator[Trial]:
    """Calls with other values, one of which should change what an operator writes."""
    yield trial
    yield reordered_values(trial)
    generator = torch.Generator().manual_seed(1)
    fills: list[Any] = [lambda t: 3 * torch.randn(t.shape, generator=generator)] * 6
    fills += [torch.zeros_like, torch.ones_like]
    fills += [lambda t: torch.full(t.shape, float("inf")), lambda t: torch.full(t.shape, -1e4)]
    for fill in fills:
        yield trial.map_tensors(
            lambda _, t, fill=fill: like(fill(t), t) if t.is_floating_point() else t  # type: ignore[misc]
        )
    random = trial.map_tensors(
        lambda _, t: like(torch.randn(t.shape, generator=generator), t) if t.is_floating_point() else t
    )
    numbers: list[Any] = [argument.name for argument in trial.schema.arguments]
    for name in numbers:
        value = trial.arguments.get(name)
        if isinstance(value, bool):
            yield random.with_arguments(**{name: not value})
        elif isinstance(value, float):
            yield random.with_arguments(**{name: 0.5})


class _State:
    """A tensor that may be written, and what it was."""

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self.tensor, self.label = tensor, label
        self.bits = _memory.bits(tensor).clone()
        self.shape, self.strides, self.storage = tensor.shape, tensor.stride(), _torch.tensors.storage_id(tensor)
        self.version = _torch.autograd.version_of(tensor)
        self.is_written = False

    def is_moved(self) -> bool:
        """Has it other sizes or strides, or another storage?"""
        now = self.tensor.shape, self.tensor.stride(), _torch.tensors.storage_id(self.tensor)
        return now != (self.shape, self.strides, self.storage)

    def look_again(self) -> bool:
        """Was it written since? `is_written` says so from now on."""
        self.is_written = self.is_moved() or not torch.equal(_memory.bits(self.tensor), self.bits)
        return self.is_written

    def is_unnoticed(self) -> bool:
        """May autograd have saved it, and not know that it was written?"""
        return self.tensor.is_floating_point() and _torch.autograd.version_of(self.tensor) == self.version


def _judge_written(trial: Trial, before: dict[str, list[_State]]) -> None:
    if not any(tag in trial.op.tags for tag in (Tag.inplace_view, Tag.out)):
        for name, states in before.items():
            _judge_argument(trial, name, states)


def _judge_argument(trial: Trial, name: str, states: list[_State]) -> None:
    if any(state.is_moved() and state.bits.numel() for state in states):
        raise _error(
            trial,
            f"the operator changes the sizes, strides or storage of argument {name}",
            argument=name,
            expected="a written argument keeps them: compiled code goes by those it had before",
            fix="write its elements, with copy_(); not set_(), resize_(), t_() or `x.data = ...`",
        )
    if any(state.is_written for state in states) and all(state.is_unnoticed() for state in states):
        raise _error(
            trial,
            f"autograd does not notice that argument {name} is written",
            argument=name,
            got="its version counter stays as it was: a backward that saved it uses the new values without an error",
            fix="call torch.autograd.graph.increment_version(x) where it is written by pointer, numpy or `.data`; "
            "custom_op does so for the arguments of mutates_args",
        )


def _judge_returned(call: Trial, outputs: list[Any]) -> None:
    """Is a written argument that the schema returns the one that was passed?"""
    for argument in call.schema.mutated:
        sets = argument.alias.sets if argument.alias is not None else frozenset()
        for i, (declared, output) in enumerate(zip(call.schema.returns, outputs, strict=False)):
            passed = call.arguments.get(argument.name)
            is_declared = declared.alias is not None and declared.alias.write and bool(declared.alias.sets & sets)
            if is_declared and isinstance(output, torch.Tensor) and output is not passed:
                raise _error(
                    call,
                    f"the schema returns argument {argument.name}, and the operator returns another tensor",
                    argument=argument.name,
                    got=f"output {i} " + _relation(output, passed),
                    fix=f"return {argument.name} itself, after writing it",
                )


def _relation(output: torch.Tensor, passed: Any) -> str:
    shares = isinstance(passed, torch.Tensor) and _memory.share_memory(output, passed)
    return "is a view of it" if shares else "is a copy"


def _judge_aliases(trial: Trial) -> None:
    """Is a view that the schema declares a view, if only for contiguous inputs?"""
    contiguous = trial.map_tensors(lambda _, tensor: tensor.contiguous())
    calls = []
    for call in (trial, contiguous):
        copy = call.copy()
        try:
            calls.append((copy, _call(copy)))
        except Exception:
            continue  # of the contiguous one: it wants another layout
    for i, declared in enumerate(trial.schema.returns):
        if declared.alias is None or declared.alias.write or not declared.alias.sets:
            continue
        pairs = [(copy, output) for copy, outputs in calls for output in tensors_in(outputs[i]) if output.numel()]
        sources = [a.name for a in trial.schema.arguments if a.alias and a.alias.sets & declared.alias.sets]
        if pairs and not any(_is_view(copy, sources, output) for copy, output in pairs):
            raise _error(
                trial,
                "the schema declares a view of an argument, and the operator returns a copy",
                argument=sources[0] if sources else None,
                got=f"output {i} shares no memory with it",
                fix="return a view; or leave the alias out of the schema: Tensor, not Tensor(a)",
            )


def _is_view(call: Trial, sources: list[str], output: torch.Tensor) -> bool:
    inputs = [tensor for name in sources for tensor in tensors_in(call.arguments.get(name))]
    return any(_memory.share_storage(output, tensor) or output.dtype != tensor.dtype for tensor in inputs)


def _error(trial: Trial, problem: str, **fields: str | None) -> CheckError:
    return SchemaCheckError(problem, op=trial.name, **fields)
