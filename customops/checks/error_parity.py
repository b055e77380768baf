"""test_errors and test_late_errors: kernel and fake impl refuse the same calls.

Calls that are wrong are made of one that is right: sizes that agreed between two tensors made to differ, another number
of dimensions, numbers of dimensions that are out of range, other dtypes.

- The kernel takes a call and its fake impl raises: compiled code refuses what runs in eager mode.
- The kernel fails by accident, with a name that is not defined: code that nobody has run.
- test_late_errors, a thorough check: the kernel refuses sizes of two tensors that do not agree, or a dimension that is
  out of range, and its fake impl returns a result. Compiled code then fails late, inside a kernel. For dtypes and
  values a kernel may be stricter, and many right ops leave sizes to their kernel, too: so this is not asked by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from customops import _torch
from customops.checks._fills import Surrounded, can_surround
from customops.checks._inputs import quiet, seeded
from customops.checks._outcome import NotExercised, in_short, user_line
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, resized
from customops.errors import CheckError, CustomOpsError

_UNDEFINED = (NameError, UnboundLocalError)

#: What is wrong in calls that a fake impl can tell as well as a kernel.
_SURELY_WRONG = ("sizes of two tensors differ", "a dimension is out of range")


def check(trial: Trial, *, late: bool = False) -> None:
    trial.require_data()
    if trial.is_builtin or not _torch.dispatcher.runs_python(trial.name):
        raise NotExercised("the kernel is not Python: a wrong call might end the process")
    if late and trial.schema.mutated:
        raise NotExercised("the operator writes: its fake impl may be that which its schema implies")
    if not are_plain(trial) or not trial.tensors:
        raise NotExercised("no input is a plain strided tensor")
    trial = trial.detached()
    tried = 0
    with torch.no_grad(), quiet():
        for call in _wrong_calls(trial):
            tried += 1
            (_judge_late if late else _judge)(call)
    if not tried:
        raise NotExercised("there is no tensor or dimension to make a wrong call of")


@dataclass(frozen=True)
class _WrongCall:
    trial: Trial
    what: Literal["sizes of two tensors differ", "a dimension is out of range", "other dimensions", "another dtype"]
    argument: str


def _wrong_calls(trial: Trial) -> Iterator[_WrongCall]:
    yield from _other_sizes(trial)
    yield from _dims_out_of_range(trial)
    for name, tensor in _single_tensors(trial):
        if tensor.dim():
            changed = trial.with_arguments(**{name: tensor[0].clone()})
            yield _WrongCall(changed, "other dimensions", name)
        yield _WrongCall(trial.with_arguments(**{name: torch.stack([tensor, tensor])}), "other dimensions", name)
    for name, tensor in _single_tensors(trial):
        if not tensor.is_complex():
            other = torch.int64 if tensor.is_floating_point() else torch.float32
            yield _WrongCall(trial.with_arguments(**{name: tensor.to(other)}), "another dtype", name)


def _single_tensors(trial: Trial) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in trial.arguments.items() if isinstance(value, torch.Tensor)]


def _other_sizes(trial: Trial) -> Iterator[_WrongCall]:
    """One size that another tensor has, too, made larger by one."""
    tensors = _single_tensors(trial)
    for name, tensor in tensors:
        of_others = {size for other, value in tensors if other != name for size in value.shape}
        for dim, size in enumerate(tensor.shape):
            if size > 1 and size in of_others:
                shape = (*tensor.shape[:dim], size + 1, *tensor.shape[dim + 1 :])
                changed = trial.with_arguments(**{name: resized(tensor, shape)})
                yield _WrongCall(changed, "sizes of two tensors differ", name)


def _dims_out_of_range(trial: Trial) -> Iterator[_WrongCall]:
    ranks = {tensor.dim() for tensor in trial.tensors}
    for name, value in trial.arguments.items():
        is_dim = isinstance(value, int) and not isinstance(value, bool)
        if is_dim and ("dim" in name or "axis" in name) and -max(ranks) <= value < max(ranks):
            for wrong in (max(ranks), -max(ranks) - 1):
                yield _WrongCall(trial.with_arguments(**{name: wrong}), "a dimension is out of range", name)


def _judge(call: _WrongCall) -> None:
    error = _kernel_error(call.trial)
    if isinstance(error, _UNDEFINED) and user_line(error):
        raise failed_call(
            call.trial.name, "the kernel uses a name that is not defined there", error, fix=f"at {user_line(error)}"
        ) from error
    fake_error = _fake_error(call.trial) if error is None else None
    if fake_error is not None and not isinstance(fake_error, NotExercised):
        raise _refused(call, fake_error)


def _judge_late(call: _WrongCall) -> None:
    error = _kernel_error(call.trial) if call.what in _SURELY_WRONG else None
    if error is not None and _fake_error(call.trial) is None:
        raise CheckError(
            f"the fake impl accepts a call that the kernel refuses: {call.what}",
            op=call.trial.name,
            argument=call.argument,
            expected=f"{in_short(error, 200)} (the kernel)",
            got="a result (its fake impl), so that torch.compile takes it, and the error comes when it runs",
            fix="check sizes in the fake impl as the kernel does, with torch._check(x.shape == y.shape, ...)",
        )


def _kernel_error(trial: Trial) -> Exception | None:
    """What the kernel raises, if anything."""
    # A kernel that does not look at sizes reads, and writes, past the end: let it be memory that nobody uses.
    copy = Surrounded(trial, 0).trial if can_surround(trial) else trial.copy()
    try:
        with seeded((copy.args, copy.kwargs)):
            copy.op(*copy.args, **copy.kwargs)
    except Exception as error:
        return error
    return None


def _fake_error(trial: Trial) -> Exception | None:
    """What the fake impl raises, if anything; NotExercised if it is no refusal."""
    mode = _torch.tensors.fake_mode()
    try:
        fake = trial.faked(mode)
    except _torch.tensors.NoFakeTensor:
        return NotExercised("torch cannot make a fake of an input")
    try:
        with mode:
            fake.op(*fake.args, **fake.kwargs)
    except Exception as error:
        is_absent = isinstance(error, _torch.tensors.NoFakeImpl) or "no fake impl" in str(error)
        return NotExercised("no fake impl") if is_absent or _torch.tensors.needs_data(error) else error
    return None


def _refused(call: _WrongCall, error: Exception) -> CheckError:
    problem = error.problem if isinstance(error, CustomOpsError) else in_short(error, 200)
    return CheckError(
        "the fake impl refuses a call that the kernel accepts",
        op=call.trial.name,
        argument=call.argument,
        expected="a result, as in eager mode",
        got=f"{problem} (its fake impl, {call.what})",
        fix="torch.compile fails where eager mode works: make the kernel refuse it, too, or the fake impl accept it",
    )
