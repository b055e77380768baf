"""test_schema, test_layouts and test_writes: what an operator reads and writes of memory, against what it declares."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from customops import _torch
from customops._torch.schema import Tag
from customops.checks import _memory
from customops.checks._inputs import as_ordinary, is_ordinary, seeded, tensors_in
from customops.checks._outcome import NotExercised, SchemaCheckError, require
from customops.checks._runs import attempt, call, compare, difference, results_in, steady_results
from customops.checks._trial import FAILS, JudgingMode, Trial, failed_call, resolve
from customops.checks._variants import (
    are_plain,
    can_surround,
    is_about_storages,
    like,
    other_sizes,
    reordered_values,
    surrounded,
)
from customops.errors import CheckError

# ----------------------------------------------------------------------------------------------------------------------
# test_schema: an operator writes and aliases what its schema says, and nothing else.
#
# The operator runs under a dispatch mode that sees each operator below autograd, where its kernel is called with the
# very tensors it may write. Judged are the operator under test and those outside aten that it calls on the way there
# (from an autograd kernel, or as part of a composite): a composite operator is as right as its parts, and aten's
# schemas are torch's own matter. A declared write that does not happen is no failure, since it may depend on the data.

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
    check_schema(Trial(resolve(op), tuple(args), kwargs or {}))


def check_schema(trial: Trial) -> None:
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
    """Call an operator, and return what it returned if the schema is true of the call."""
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
            raise _schema_error(
                trial,
                f"Argument {shared[0]} is not defined to alias output but was aliasing",
                argument=shared[0],
                got=f"output {i} is {same[0]} itself" if same else f"output {i} shares memory with {shared[0]}",
                fix="return a clone; or, for a view op, declare it: (Tensor(a) x) -> Tensor(a)",
            )
        if same and not any(name in trial.mutated for name in same):
            raise _schema_error(
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
            raise _schema_error(
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
            raise _schema_error(
                trial,
                f"Outputs {name} and {other} alias unexpectedly",
                got="they share memory",
                fix="return a clone of one of them",
            )
    return outputs


def _schema_error(trial: Trial, problem: str, **fields: str) -> CheckError:
    return _error(trial, problem, expected=str(_torch.schema.schema_of(trial.op)), **fields)


def _snapshot(tensor: torch.Tensor) -> Callable[[], str | None]:
    """Return a function that describes what has happened to a tensor since; it returns None if nothing has."""

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


# ----------------------------------------------------------------------------------------------------------------------
# test_layouts: results do not depend on where elements lie.
#
# An input that is transposed, sliced, aligned otherwise, or a conjugate or negative view has the values of a contiguous
# tensor: both have to give the same results.

#: Operators that read strides, or memory beyond a view, on purpose.
_ABOUT_STRIDES = ("aten::as_strided", "aten::_reshape_alias", "aten::set_", "aten::resize", "prims::as_strided")


def check_layouts(trial: Trial) -> None:
    require(not trial.name.startswith(_ABOUT_STRIDES), "the result depends on strides by definition")
    if any(_memory.share_storage(one, other) for one, other in itertools.combinations(trial.distinct, 2)):
        raise NotExercised("tensors of the call share memory")
    trial = trial.detached()
    strided = [(name, tensor) for name, _, tensor in trial.named_tensors if tensor.layout is torch.strided]
    arguments = dict.fromkeys(name for name, tensor in strided if not is_ordinary(tensor))
    require(arguments, "every tensor is contiguous")
    expected = steady_results(trial.map_tensors(lambda _, x: as_ordinary(x) if _memory.is_dense(x) else x))
    actual = attempt(trial)
    if actual is None:
        raise NotExercised("the operator does not take tensors of this layout")
    compare(
        trial,
        actual,
        expected,
        "results depend on the layout of an input: other values than for the same values in contiguous tensors",
        "the kernel takes memory for contiguous: call x.contiguous() first (for an argument that is written, copy "
        "the result back), and make results by x.new_empty(x.shape), since torch.empty_like(x) has the strides of "
        "x; or use x.stride() and x.storage_offset(); see resolve_conj() and resolve_neg() for lazy views",
        argument=", ".join(arguments),
        expected="the values of the call on contiguous tensors",
        ties=True,
        rounding=True,
    )


# ----------------------------------------------------------------------------------------------------------------------
# test_writes: what an operator writes and reads, byte by byte, and what its schema says of writes and aliases.
#
# test_schema says what is written without being declared. Here each tensor lies in a larger storage, amid bytes that
# are one thing in one run and another in the next: the bytes have to stay, and the results must not depend on them.
#
# What the schema declares is held against what happens: the return of the written tensor itself, an alias, sizes that
# stay, and a version counter that autograd goes by. On samples, what is declared as written has to be written in one of
# several calls with other values, as it may depend on the data. (Much of what is derived leaves nothing to write.)


def check_writes(trial: Trial) -> None:
    trial.require_data()
    if not are_plain(trial) or not any(tensor.numel() for tensor in trial.tensors):
        raise NotExercised("no input is a plain strided tensor with elements")
    require(not is_about_storages(trial), "the operator works on storages, not on the elements of tensors")
    is_sample, trial = trial.is_sample, trial.detached()
    with torch.no_grad():
        is_surrounded = can_surround(trial) and _judge_surroundings(trial)
        if trial.is_builtin:  # torch's own schemas are its own matter
            return
        calls = []
        for copy, before, outputs in _writing_calls(trial):
            _judge_written(copy, before, outputs)
            calls.append(before)
        _judge_aliases(trial)
        # An input without elements may leave nothing to write.
        if is_sample and len(calls) > 3 and all(tensor.numel() for tensor in trial.tensors):
            _judge_unwritten(trial, calls)
    declares = any(argument.alias is not None for argument in trial.schema.arguments)
    require(is_surrounded or declares, "inputs that share memory or are expanded cannot be moved into larger storages")


def _judge_unwritten(trial: Trial, calls: list[list[_State]]) -> None:
    """Raise CheckError for a tensor that is declared as written, and that no call wrote."""
    for same in zip(*calls, strict=True):
        label = same[0].label
        if any(state.is_written for state in same) or _is_written_at_other_sizes(trial, label):
            continue
        if not any(map(functools.partial(_is_written_by, label), trial.samples)):
            raise _error(
                trial,
                f"argument {label} is declared as written, and no call was seen to write it",
                argument=label,
                got=f"it was as before after {len(calls)} calls with other values",
                fix="write the result to it, not to a copy such as x.contiguous() or x.to(...); or do not declare it",
            )


def _is_written_by(label: str, sample: Trial) -> bool:
    """Return whether another sample writes the argument. Not each call has to write what is declared as written."""
    name = label.partition("[")[0]
    with torch.no_grad():
        calls = [before for _, before, _ in _writing_calls(sample.detached())]
    return any(each.is_written for states in calls for each in states if each.label.partition("[")[0] == name)


def _is_written_at_other_sizes(trial: Trial, label: str) -> bool:
    """Return whether a call of other sizes writes the argument. Of two elements, both may be at the border."""
    if min(size for _, each, x in trial.named_tensors if each == label for size in (3, *x.shape)) > 2:
        return False
    with torch.no_grad():
        for other in other_sizes(trial.detached()):
            calls = [before for _, before, _ in _writing_calls(other)]
            if any(each.is_written for states in calls for each in states if each.label == label):
                return True
    return False


def _judge_surroundings(trial: Trial) -> bool:
    """Raise CheckError for an access outside of the tensors. Return whether the operator takes tensors amid others."""
    kept = []  # so that memory an operator does not initialise is not what was around the input of another run
    results = []
    for byte in (0xFF, 0x3C, 0xFF, 0x3C):  # NaN, or -1; and a number
        inside, written_outside = surrounded(trial, byte)
        try:
            outputs = call(inside)
        except Exception:
            return False  # it does not take a tensor that does not start its storage
        name = written_outside()
        if name is not None:
            raise _error(
                trial,
                f"the operator writes memory outside of argument {name}",
                argument=name,
                got="bytes around the tensor, or between its elements, changed",
                fix="go by the sizes and strides of the tensor; or write to a contiguous copy, and copy it back",
            )
        kept.append(inside)
        results.append([*results_in(inside, outputs).values()])
    found = difference(results[1], results[0], exact=True)
    if found and not any(difference(results[i], results[i + 2], exact=True) for i in (0, 1)):
        raise _error(
            trial,
            "the result depends on memory outside of the tensors that were passed",
            got=f"with other bytes there: {found}",
            expected="the same result",
            fix="go by the sizes, the strides and the storage offset of each tensor, or call contiguous() on it first; "
            "do not read past its end",
        )
    return True


def _writing_calls(trial: Trial) -> Iterator[tuple[Trial, list[_State], list[Any]]]:
    """Call until each tensor that is declared as written was; yield the calls, the tensors before, and the results."""
    idle = {state.label for state in _states(trial)}
    for changed in itertools.islice(_likely_to_write(trial), 20):
        if not idle:
            return
        copy = changed.copy()
        before = _states(copy)
        try:
            outputs = copy.by_return(call(copy))
        except Exception:
            continue  # it does not take this value
        for state in before:
            state.compare()
        idle -= {state.label for state in before if state.is_written}
        yield copy, before, outputs


def _likely_to_write(trial: Trial) -> Iterator[Trial]:
    """Make calls with other values, one of which should change what an operator writes."""
    generator = torch.Generator().manual_seed(1)

    def filled(fill: Callable[[torch.Tensor], torch.Tensor]) -> Trial:
        return trial.map_floats(lambda tensor: like(fill(tensor), tensor))

    def random(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    yield trial
    yield reordered_values(trial)
    for _ in range(6):
        yield filled(lambda tensor: 3 * random(tensor))
    for number in (0.0, 1.0, float("inf"), -1e4):
        yield filled(functools.partial(torch.full_like, fill_value=number))
    with_other_values = filled(random)
    for argument in trial.schema.arguments:
        value = trial.arguments.get(argument.name)
        if isinstance(value, bool | float):
            other: Any = not value if isinstance(value, bool) else 0.5
            yield with_other_values.with_arguments(**{argument.name: other})


class _State:
    """A tensor of an argument that may be written, and what it was."""

    def __init__(self, argument: str, label: str, tensor: torch.Tensor) -> None:
        self.argument, self.label, self.tensor = argument, label, tensor
        self.bits = _memory.bits(tensor).clone()
        self.place, self.version = self._place(), _torch.autograd.version_of(tensor)

    def _place(self) -> tuple[Any, ...]:
        return self.tensor.shape, self.tensor.stride(), _torch.memory.storage_id(self.tensor)

    def compare(self) -> None:
        """Compare the tensor after a call with what it was."""
        is_same_version = _torch.autograd.version_of(self.tensor) == self.version
        self.is_moved = self._place() != self.place  # to other sizes or strides, or another storage
        self.is_written = self.is_moved or not torch.equal(_memory.bits(self.tensor), self.bits)
        # Autograd may have saved it, and does not know that it was written.
        self.is_unnoticed = self.tensor.is_floating_point() and is_same_version


def _states(trial: Trial) -> list[_State]:
    """Return the states of the tensors with elements that the schema declares as written."""
    return [_State(*each) for each in trial.named_tensors if each[0] in trial.mutated and each[2].numel()]


def _judge_written(trial: Trial, before: list[_State], outputs: list[Any]) -> None:
    may_be_moved = any(tag in trial.op.tags for tag in (Tag.inplace_view, Tag.out))
    for name, group in itertools.groupby([] if may_be_moved else before, lambda state: state.argument):
        states = list(group)
        if any(state.is_moved for state in states):
            raise _error(
                trial,
                f"the operator changes the sizes, strides or storage of argument {name}",
                argument=name,
                expected="a written argument keeps them: compiled code goes by those it had before",
                fix="write its elements, with copy_(); not set_(), resize_(), t_() or `x.data = ...`",
            )
        if any(state.is_written for state in states) and all(state.is_unnoticed for state in states):
            raise _error(
                trial,
                f"autograd does not notice that argument {name} is written",
                argument=name,
                got="its version counter stays as it was: a backward that saved it uses the new values without an "
                "error",
                fix="call torch.autograd.graph.increment_version(x) where it is written by pointer, numpy or `.data`; "
                "custom_op does so for the arguments of mutates_args",
            )
    # A written argument that the schema returns is the one that was passed.
    returned = list(zip(trial.schema.returns, outputs, strict=False))
    for argument, (i, (declared, output)) in itertools.product(trial.schema.mutated, enumerate(returned)):
        passed = trial.arguments.get(argument.name)
        is_declared = declared.alias is not None and declared.alias.write and argument.may_alias(declared)
        if is_declared and isinstance(output, torch.Tensor) and output is not passed:
            is_view = isinstance(passed, torch.Tensor) and _memory.share_memory(output, passed)
            raise _error(
                trial,
                f"the schema returns argument {argument.name}, and the operator returns another tensor",
                argument=argument.name,
                got=f"output {i} is a {'view of it' if is_view else 'copy'}",
                fix=f"return {argument.name} itself, after writing it",
            )


def _judge_aliases(trial: Trial) -> None:
    """Raise CheckError if a view that the schema declares is a copy, also for contiguous inputs."""
    calls = []
    for copy in (trial.copy(), trial.map_tensors(lambda _, tensor: tensor.contiguous()).copy()):
        try:
            calls.append((copy, copy.by_return(call(copy))))
        except Exception:
            continue  # of the contiguous one: it wants another layout
    for i, declared in enumerate(trial.schema.returns):
        if declared.alias is None or declared.alias.write or not declared.alias.sets:
            continue
        sources = [argument.name for argument in trial.schema.arguments if argument.may_alias(declared)]
        pairs = [
            (output, [tensor for name in sources for tensor in tensors_in(copy.arguments.get(name))])
            for copy, outputs in calls
            for output in tensors_in(outputs[i])
            if output.numel()
        ]
        is_view = any(
            _memory.share_storage(output, tensor) or output.dtype != tensor.dtype
            for output, inputs in pairs
            for tensor in inputs
        )
        if pairs and not is_view:
            raise _error(
                trial,
                "the schema declares a view of an argument, and the operator returns a copy",
                argument=sources[0] if sources else None,
                got=f"output {i} shares no memory with it",
                fix="return a view; or leave the alias out of the schema: Tensor, not Tensor(a)",
            )


def _error(trial: Trial, problem: str, **fields: str | None) -> CheckError:
    return SchemaCheckError(problem, op=trial.name, **fields)
