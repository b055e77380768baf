"""test_symbolic_sizes: one run of the fake impl on sizes that are symbols is right for every size.

``torch.compile`` and ``torch.export`` run a fake impl once, on symbols, and use what it promised for other sizes. So it
runs here on inputs each size of which is a symbol of its own, and its promises are worked out for the sizes of the
sample, and for others that the operator accepts, and compared with what the operator returns there. As in an export,
`torch.compiler.is_compiling` says yes meanwhile. Sizes for which
compiled code would be traced again (they fail a guard) are left out: the fake impl may branch on a size.

A size that ``int()`` made a number is a fault of its own: all sizes are compiled anew, and an export with dynamic
sizes is refused. It is reported where the operator was seen to accept another size, and the call of ``int`` is in the
user's code.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import quiet, tensors_in
from customops.checks._outcome import NotExercised, in_short
from customops.checks._runs import call
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, other_sizes
from customops.errors import CheckError, is_users

_INT = re.compile(r"\bint\(")
_ENOUGH = 3  #: other sizes, of those that the operator accepts


def check(trial: Trial) -> None:
    trial.require_data()
    if not are_plain(trial):
        raise NotExercised("an input is not a plain strided tensor")
    if not any(size > 1 for tensor in trial.tensors for size in tensor.shape):
        raise NotExercised("no input has a size of two or more: one of 0 or 1 is never a symbol")
    trial = trial.detached()
    run = _torch.tensors.SymbolicRun()
    with torch.no_grad(), quiet():
        try:
            fake = trial.map_tensors(lambda _, tensor: run.fake(tensor))
        except _torch.tensors.NoFakeTensor as error:
            raise NotExercised(f"torch cannot make a fake of an input: {in_short(error)}") from error
        try:
            with run.mode, _torch.tensors.as_if_compiling():
                outputs = fake.by_return(fake.op(*fake.args, **fake.kwargs))
        except Exception as error:
            if _torch.tensors.needs_data(error) or trial.is_builtin or not _runs_on_numbers(trial):
                raise NotExercised(f"its fake impl refuses: {in_short(error, 200)}") from error
            raise failed_call(
                trial.name,
                "the fake impl fails on sizes that are symbols, and not on numbers",
                error,
                fix="torch.compile and torch.export pass symbols (SymInt) for sizes: use arithmetic and torch "
                "functions on them, nothing that insists on an int, such as numpy or isinstance(n, int)",
            ) from error
        promised = _torch.tensors.tree_leaves([outputs, fake.mutated])
        seen = 0
        for other in (trial, *other_sizes(trial)):
            seen += _compare(run, trial, other, promised)
            if seen > _ENOUGH:
                break
        _judge_constants(run, trial)


def _runs_on_numbers(trial: Trial) -> bool:
    """Does the fake impl run where sizes are numbers? Where not, it is test_faketensor that says so."""
    mode = _torch.tensors.fake_mode()
    try:
        fake = trial.faked(mode)
        with mode:
            fake.op(*fake.args, **fake.kwargs)
    except Exception:  # it is only asked whether
        return False
    return True


def _leaves_of_a_call(trial: Trial) -> list[Any] | None:
    """What a call of the operator returned and wrote, as it is; None if it does not take the inputs."""
    copy = trial.copy()
    try:
        return _torch.tensors.tree_leaves([copy.by_return(call(copy)), copy.mutated])
    except Exception:  # a derived input need not be accepted
        return None


def _compare(run: Any, trial: Trial, other: Trial, promised: list[Any]) -> bool:
    """Compare with one call of the operator; False if it says nothing."""
    values = run.values(other.distinct)
    leaves = _leaves_of_a_call(other) if run.holds_for(values) else None
    if leaves is None:
        return False
    # What was promised of strides and offsets is for inputs that lie in memory in the same way.
    offsets, other_offsets = ([int(tensor.storage_offset()) for tensor in each.tensors] for each in (trial, other))
    lies_alike = other is trial or (offsets == other_offsets and all(map(_is_dense, trial.tensors)))
    # Else the number of tensors depends on a size.
    pairs = zip(leaves, promised, strict=True) if len(leaves) == len(promised) else ()
    for i, (real, fake) in enumerate(pairs):
        found = _differ(run, values, real, fake, lies_alike)
        if found is not None:
            what, got, expected = found
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in other.tensors)
            raise CheckError(
                f"the fake impl, run on sizes that are symbols, promises another {what} than the operator returns",
                op=trial.name,
                expected=f"result {i}: {expected} (the operator, on sizes {sizes})",
                got=f"{got} (its fake impl)",
                fix="compute it from the sizes of the inputs, with the arithmetic the kernel uses; a number is right "
                "for one size only, and so is a branch on symbols or on is_compiling()",
            )
    return True


def _is_dense(tensor: torch.Tensor) -> bool:
    """Is it contiguous, in some order of its dimensions?"""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True)
    return tensor.permute(order).is_contiguous()


def _differ(run: Any, values: dict[Any, int], real: Any, fake: Any, lies_alike: bool) -> tuple[str, str, str] | None:
    """What differs, what was promised of it, and what it is."""
    if not isinstance(real, torch.Tensor):
        promised = run.evaluate(fake, values) if isinstance(fake, torch.SymInt) else None
        return None if promised is None or promised == real else ("number", str(promised), str(real))
    if not isinstance(fake, torch.Tensor) or real.layout is not torch.strided:
        return None
    if real.dtype != fake.dtype:
        return "dtype", str(fake.dtype), str(real.dtype)
    shape, strides = ([run.evaluate(size, values) for size in sizes] for sizes in (fake.shape, fake.stride()))
    if not _agree(shape, list(real.shape)):
        return "shape", _text(shape), str(tuple(real.shape))
    if not lies_alike:
        return None
    used = [dim for dim, size in enumerate(real.shape) if size > 1 and real.numel()]
    if not _agree([strides[dim] for dim in used], [real.stride(dim) for dim in used]):
        return "stride", _text(strides), str(real.stride())
    offset = run.evaluate(fake.storage_offset(), values)
    if not _agree([offset], [int(real.storage_offset())]):
        return "storage offset", str(offset), str(real.storage_offset())
    return None


def _agree(promised: list[Any], real: list[int]) -> bool:
    return len(promised) == len(real) and all(p is None or p == r for p, r in zip(promised, real, strict=True))


def _text(sizes: list[Any]) -> str:
    return "(" + ", ".join("?" if size is None else str(size) for size in sizes) + ")"


def _judge_constants(run: Any, trial: Trial) -> None:
    places = [
        (number, f"{file}:{line}")
        for number, file, line, text in run.made_constant()
        if _INT.search(text) and is_users(file)
    ]
    first = _leaves_of_a_call(trial) if places and not trial.is_builtin else None
    for other in other_sizes(trial) if first is not None else ():
        real = None if run.holds_for(run.values(other.distinct)) else _leaves_of_a_call(other)
        if first is None or real is None or len(tensors_in(real)) != len(tensors_in(first)):
            continue
        number, place = places[0]
        raise CheckError(
            "the fake impl makes a number of a size, so that each size is compiled anew, and none can be exported as "
            "dynamic",
            op=trial.name,
            got=f"int() of a size, {number} here",
            where=place,
            fix="leave the size as it is, a torch.SymInt: it can be computed with, and passed on as a size",
        )
