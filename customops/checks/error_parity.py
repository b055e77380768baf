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
from typing import Any

import torch

from customops import _torch
from customops.checks._fills import can_surround, surrounded
from customops.checks._inputs import quiet
from customops.checks._outcome import NotExercised, in_short, user_line
from customops.checks._runs import call
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, resized
from customops.errors import CheckError, CustomOpsError

#: What is wrong in calls that a fake impl can tell as well as a kernel.
_SIZES_DIFFER, _OUT_OF_RANGE = "sizes of two tensors differ", "a dimension is out of range"


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
    with torch.no_grad():
        for what, name, value in _wrong_values(trial):
            tried += 1
            _judge(trial.with_arguments(**{name: value}), what, name, late=late)
    if not tried:
        raise NotExercised("there is no tensor or dimension to make a wrong call of")


def _wrong_values(trial: Trial) -> Iterator[tuple[str, str, Any]]:
    """What is wrong, with which argument, and its value."""
    tensors = {name: value for name, value in trial.arguments.items() if isinstance(value, torch.Tensor)}
    # One size that another tensor has, too, made larger by one.
    for name, tensor in tensors.items():
        of_others = {size for other, value in tensors.items() if other != name for size in value.shape}
        for dim, size in enumerate(tensor.shape):
            if size > 1 and size in of_others:
                shape = (*tensor.shape[:dim], size + 1, *tensor.shape[dim + 1 :])
                yield _SIZES_DIFFER, name, resized(tensor, shape)
    most = max(tensor.dim() for tensor in trial.tensors)
    for name, value in trial.arguments.items():
        is_dim = isinstance(value, int) and not isinstance(value, bool) and ("dim" in name or "axis" in name)
        if is_dim and -most <= value < most:
            yield from ((_OUT_OF_RANGE, name, wrong) for wrong in (most, -most - 1))
    for name, tensor in tensors.items():
        if tensor.dim():
            yield "other dimensions", name, tensor[0].clone()
        yield "other dimensions", name, torch.stack([tensor, tensor])
    for name, tensor in tensors.items():
        if not tensor.is_complex():
            yield "another dtype", name, tensor.to(torch.int64 if tensor.is_floating_point() else torch.float32)


def _judge(trial: Trial, what: str, argument: str, *, late: bool) -> None:
    if late and what not in (_SIZES_DIFFER, _OUT_OF_RANGE):
        return
    # A kernel that does not look at sizes reads, and writes, past the end: let it be memory that nobody uses.
    copy = surrounded(trial, 0)[0] if can_surround(trial) else trial.copy()
    error: Exception | None = None
    try:
        call(copy)
    except Exception as raised:
        error = raised
    if late and error is not None and _fake_error(trial) is None:
        raise CheckError(
            f"the fake impl accepts a call that the kernel refuses: {what}",
            op=trial.name,
            argument=argument,
            expected=f"{in_short(error, 200)} (the kernel)",
            got="a result (its fake impl), so that torch.compile takes it, and the error comes when it runs",
            fix="check sizes in the fake impl as the kernel does, with torch._check(x.shape == y.shape, ...)",
        )
    if late:
        return
    if isinstance(error, NameError) and user_line(error):
        problem = "the kernel uses a name that is not defined there"
        raise failed_call(trial.name, problem, error, fix=f"at {user_line(error)}") from error
    fake_error = _fake_error(trial) if error is None else None
    if fake_error is not None and not isinstance(fake_error, NotExercised):
        problem = fake_error.problem if isinstance(fake_error, CustomOpsError) else in_short(fake_error, 200)
        raise CheckError(
            "the fake impl refuses a call that the kernel accepts",
            op=trial.name,
            argument=argument,
            expected="a result, as in eager mode",
            got=f"{problem} (its fake impl, {what})",
            fix="torch.compile fails where eager mode works: make the kernel refuse it, too, or the fake impl accept "
            "it",
        )


def _fake_error(trial: Trial) -> Exception | None:
    """What the fake impl raises, if anything; NotExercised if it is no refusal."""
    mode = _torch.tensors.fake_mode()
    try:
        fake = trial.faked(mode)
    except _torch.tensors.NoFakeTensor:
        return NotExercised("torch cannot make a fake of an input")
    try:
        with mode, quiet():
            fake.op(*fake.args, **fake.kwargs)
    except Exception as error:
        is_absent = isinstance(error, _torch.tensors.NoFakeImpl) or "no fake impl" in str(error)
        return NotExercised("no fake impl") if is_absent or _torch.tensors.needs_data(error) else error
    return None
