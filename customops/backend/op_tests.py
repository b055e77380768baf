"""torch's own tests of ops (OpInfo) on a device: each op in a fork, compared with the CPU."""

from __future__ import annotations

import copy
import fnmatch
import functools
import itertools
import random
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops.backend import _compat, fallbacks
from customops.backend._backend import Backend
from customops.testing.isolation import in_fork

#: Ops whose results are whatever the memory held.
UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


@dataclass
class Score:
    """The ops that passed and failed for one dtype, in one direction."""

    dtype: torch.dtype
    backward: bool
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  #: not for the CPU either
    failed: dict[str, str] = field(default_factory=dict)  #: name -> the error, in a line
    #: what ran where in all of them, but for those that crashed or ran out of time
    journal: fallbacks.Journal = field(default_factory=fallbacks.Journal)

    @property
    def total(self) -> int:
        return len(self.passed) + len(self.failed) + len(self.skipped)


def run(
    backend: Backend,
    dtypes: Iterable[torch.dtype],
    *,
    backward: bool = True,
    patterns: Iterable[str] | None = None,
    samples: int | None = None,
    timeout: float = 60.0,
) -> Iterator[Score]:
    """Score each dtype, forward and, if it has gradients, both: the ops that match, on at most `samples` inputs."""
    ops = _compat.op_infos()
    if patterns is not None:
        chosen = list(patterns)
        ops = [op for op in ops if any(fnmatch.fnmatchcase(_name(op), pattern) for pattern in chosen)]
    for dtype, both in itertools.product(dtypes, (False, True) if backward else (False,)):
        if both and not (dtype.is_floating_point or dtype.is_complex):
            continue
        score = Score(dtype, both)
        for op in ops:
            if dtype not in (op.supported_backward_dtypes("cpu") if both else op.supported_dtypes("cpu")):
                continue
            # Each op has a fork: a crash, or a thread that autograd leaves behind, does not affect the next op.
            outcome = in_fork(functools.partial(_check, backend, op, dtype, both, samples), timeout)
            failure = (fallbacks.Journal(), False, _line(outcome.error)) if outcome.error is not None else None
            journal, compared, error = failure or outcome.value
            score.journal.add(journal)
            if error is not None:
                score.failed[_name(op)] = error
            else:
                (score.passed if compared else score.skipped).append(_name(op))
        yield score


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _check(
    backend: Backend, op: Any, dtype: torch.dtype, backward: bool, limit: int | None
) -> tuple[fallbacks.Journal, bool, str | None]:
    """Compare the results of an op for all inputs with the CPU's.

    Return the journal, whether the CPU can run any of the inputs, and the error that ended it.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    record, compared = fallbacks.start(), False
    try:
        for there, here in itertools.islice(_samples(backend, op, dtype, backward), limit):
            try:
                expected = _outcome(op, here, backward)
            except Exception:
                continue  # not an input for the CPU either
            compared = True
            got = _outcome(op, there, backward)
            device = backend.name if _asks_for(there, backend.name) else None
            _compare(got, expected, device, values=_name(op) not in UNINITIALISED)
    except Exception as error:
        return record, compared, _line(error)
    return record, compared, None


def _asks_for(sample: Any, name: str) -> bool:
    """Return whether the results belong on the device. `arange(2)` names no device, so its result does not."""
    leaves = _leaves(sample)
    named = {str(leaf).partition(":")[0] for leaf in leaves if isinstance(leaf, (str, torch.device))}
    used = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    return "cpu" not in named and name in named | used


def _samples(backend: Backend, op: Any, dtype: torch.dtype, backward: bool) -> Iterator[tuple[Any, Any]]:
    """Yield the same inputs on the device and on the CPU."""

    def made_on(device: str) -> Iterator[Any]:
        torch.manual_seed(0)
        random.seed(0)
        return iter(op.sample_inputs(device, dtype, requires_grad=backward))

    # Each is made where it is used, because some inputs are on the CPU by right, and some are views of more.
    # If the two differ, by design or because two generators were drawn from in turns, the input is copied.
    for there, here in itertools.zip_longest(made_on(backend.name), list(made_on("cpu"))):
        if there is not None:
            yield there, here if here is not None and _equal(there, here) else _moved(there, backend.name)


def _equal(there: Any, here: Any) -> bool:
    def equal(ours: Any, theirs: Any) -> bool:
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            return ours.shape == theirs.shape and torch.equal(ours.detach().cpu(), theirs.detach())
        return not isinstance(ours, (int, float, complex)) or bool(ours == theirs)

    ours, theirs = _leaves(there), _leaves(here)
    return len(ours) == len(theirs) and all(map(equal, ours, theirs))


def _moved(sample: Any, name: str) -> Any:
    def on_cpu(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().cpu().requires_grad_(value.requires_grad)
        is_device = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == name
        return torch.device("cpu") if is_device else value

    moved = copy.copy(sample)
    moved.input, moved.args, moved.kwargs = _torch.trees.tree_map(on_cpu, (sample.input, sample.args, sample.kwargs))
    return moved


def _leaves(sample: Any) -> list[Any]:
    return _torch.trees.tree_leaves((sample.input, sample.args, sample.kwargs))


def _outcome(op: Any, sample: Any, backward: bool) -> tuple[Any, list[Tensor | None]]:
    """Return the results of an op, and the gradients of its inputs."""
    torch.manual_seed(1)
    result = op(sample.input, *sample.args, **sample.kwargs)
    if not backward:
        return result, []
    if sample.output_process_fn_grad is not None:
        result = sample.output_process_fn_grad(result)
    outputs, wanted = (
        [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        for leaves in (_torch.trees.tree_leaves(result), _leaves(sample))
    )
    if not outputs or not wanted:
        return result, []
    torch.manual_seed(2)
    weights = [torch.randn(y.shape, dtype=y.dtype).to(y.device) for y in outputs]
    return result, list(torch.autograd.grad(outputs, wanted, weights, allow_unused=True))


def _compare(got: Any, expected: Any, device: str | None, *, values: bool) -> None:
    ours, theirs = _torch.trees.tree_leaves(got), _torch.trees.tree_leaves(expected)
    if len(ours) != len(theirs):
        raise AssertionError(f"{len(ours)} results instead of {len(theirs)}")
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            if device is not None and a.device.type != device and b.numel():
                raise AssertionError(f"a result is on {a.device}")
            if values:
                torch.testing.assert_close(a.cpu(), b, equal_nan=True)
            elif (a.shape, a.dtype) != (b.shape, b.dtype):
                raise AssertionError(f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}")
        elif isinstance(b, (int, float, complex)):
            torch.testing.assert_close(a, b, equal_nan=True)
        elif a != b:
            raise AssertionError(f"{a!r} instead of {b!r}")


def scores_as_text(scores: Iterable[Score]) -> Iterator[str]:
    """Yield a line for each score, and a line for each op that failed."""
    for score in scores:
        direction = "forward and backward" if score.backward else "forward"
        name = str(score.dtype).removeprefix("torch.")
        skipped = f", {len(score.skipped)} not for the CPU either" if score.skipped else ""
        yield f"{name:<10} {direction:<21} {len(score.passed):>4} of {score.total} ops pass{skipped}"
        yield from (f"    {op}: {error}" for op, error in sorted(score.failed.items()))
