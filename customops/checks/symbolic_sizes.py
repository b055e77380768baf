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
from collections.abc import Iterator
from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import quiet, tensors_in
from customops.checks._outcome import NotExercised, in_short
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, attempt_run, other_sizes
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
        originals, outputs, fake = _run_fake(run, trial)
        seen = 0
        for other in (trial, *other_sizes(trial)):
            seen += _compare(run, trial, other, originals, outputs, fake)
            if seen > _ENOUGH:
                break
        _judge_constants(run, trial, originals)


def _run_fake(run: Any, trial: Trial) -> tuple[list[torch.Tensor], list[Any], Trial]:
    originals: list[torch.Tensor] = []

    def to_fake(_: str, tensor: torch.Tensor) -> torch.Tensor:
        originals.append(tensor)
        return run.fake(tensor)  # type: ignore[no-any-return]

    try:
        fake = trial.map_tensors(to_fake)
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
            fix="torch.compile and torch.export pass symbols (SymInt) for sizes: use arithmetic and torch functions "
            "on them, nothing that insists on an int, such as numpy or isinstance(n, int)",
        ) from error
    return originals, outputs, fake


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


def _sizes(run: Any, originals: list[torch.Tensor], trial: Trial, other: Trial) -> dict[Any, int]:
    """The values of the symbols in another call."""
    pairs = zip(tensors_in(_in_order(trial)), tensors_in(_in_order(other)), strict=True)
    same = {id(one): two for one, two in pairs}
    return run.values([same[id(tensor)] for tensor in originals])  # type: ignore[no-any-return]


def _in_order(trial: Trial) -> list[Any]:
    return [trial.args, trial.kwargs]


def _compare(
    run: Any, trial: Trial, other: Trial, originals: list[torch.Tensor], outputs: list[Any], fake: Trial
) -> bool:
    """Compare with one call of the operator; False if it says nothing."""
    values = _sizes(run, originals, trial, other)
    if not run.holds_for(values):
        return False
    real = attempt_run(other)
    if real is None:
        return False
    # What was promised of strides and offsets is for inputs that lie in memory in the same way.
    lies_alike = other is trial or (_offsets(trial) == _offsets(other) and all(map(_is_dense, trial.tensors)))
    for where, ours, promised in _pairs([real.outputs, real.written], [outputs, fake.mutated]):
        found = _differ(run, values, ours, promised, lies_alike)
        if found is not None:
            what, got, expected = found
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in other.tensors)
            raise CheckError(
                f"the fake impl, run on sizes that are symbols, promises another {what} than the operator returns",
                op=trial.name,
                expected=f"{where}: {expected} (the operator, on sizes {sizes})",
                got=f"{got} (its fake impl)",
                fix="compute it from the sizes of the inputs, with the arithmetic the kernel uses; a number is right "
                "for one size only, and so is a branch on symbols or on is_compiling()",
            )
    return True


def _pairs(real: list[Any], fake: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    real_leaves, fake_leaves = (_torch.tensors.tree_leaves(tree) for tree in (real, fake))
    if len(real_leaves) == len(fake_leaves):  # else the number of tensors depends on a size
        for i, (one, other) in enumerate(zip(real_leaves, fake_leaves, strict=True)):
            yield f"result {i}", one, other


def _offsets(trial: Trial) -> list[int]:
    return [int(tensor.storage_offset()) for tensor in tensors_in(_in_order(trial))]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Is it contiguous, in some order of its dimensions?"""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True)
    return tensor.permute(order).is_contiguous()


def _differ(run: Any, values: dict[Any, int], real: Any, fake: Any, lies_alike: bool) -> tuple[str, str, str] | None:
    if not isinstance(real, torch.Tensor):
        promised = run.evaluate(fake, values) if isinstance(fake, torch.SymInt) else None
        return None if promised is None or promised == real else ("number", str(promised), str(real))
    if not isinstance(fake, torch.Tensor) or real.layout is not torch.strided:
        return None
    if real.dtype != fake.dtype:
        return "dtype", str(fake.dtype), str(real.dtype)
    shape = [run.evaluate(size, values) for size in fake.shape]
    if not _agree(shape, list(real.shape)):
        return "shape", _text(shape), str(tuple(real.shape))
    if not lies_alike:
        return None
    strides = [run.evaluate(step, values) for step in fake.stride()]
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


def _judge_constants(run: Any, trial: Trial, originals: list[torch.Tensor]) -> None:
    places = [(number, file, line) for number, file, line, text in run.made_constant() if _INT.search(text)]
    places = [place for place in places if is_users(place[1])]
    if trial.is_builtin or not places:
        return
    first = attempt_run(trial)
    for other in other_sizes(trial):
        values = _sizes(run, originals, trial, other)
        real = None if run.holds_for(values) else attempt_run(other)
        if first is None or real is None or len(tensors_in(real.outputs)) != len(tensors_in(first.outputs)):
            continue
        number, file, line = places[0]
        raise CheckError(
            "the fake impl makes a number of a size, so that each size is compiled anew, and none can be exported as "
            "dynamic",
            op=trial.name,
            got=f"int() of a size, {number} here",
            where=f"{file}:{line}",
            fix="leave the size as it is, a torch.SymInt: it can be computed with, and passed on as a size",
        )
