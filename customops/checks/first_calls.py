"""test_first_calls: a call has the result that it has in a process in which the operator was not called before.

What a kernel keeps between calls, a table by size, a limit of the first call, a compiled function by dtype, gives
later calls wrong results if its key lacks what they depend on. So forks are made before inputs are derived and tried.
One calls the sample. One for each number, flag or string calls the inputs that differ in it alone. One calls others,
after a call that differs from the sample in all that they change, so that what is kept is not what this process keeps.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import itertools
import os
import select
import signal
import struct
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from customops.checks._inputs import tensors_in
from customops.checks._outcome import NotExercised, require
from customops.checks._runs import Results, attempt, compare, steady_results
from customops.checks._trial import Case, Trial
from customops.checks._variants import other_arguments, other_numbers, other_sizes, other_values

_TIMEOUT = 5.0  #: seconds for a call; a lock that another thread held in the parent stays held in a fork
_SECONDS = 1.0  #: of processor time for all calls
_COMPILES = (
    0.2  #: seconds of it; where more are spent, a kernel may compile in each fork, so one calls all that is left
)
#: How many inputs of a kind are called, of the first sample, and of each further one.
_MOST = {"sample": 1, "number": 6, "named": 6, "choice": 4, "dtype": 5, "size": 5, "optional": 3, "value": 4, "list": 3}
_MOST_OF_FURTHER = {"sample": 1, "number": 2, "named": 2, "choice": 2, "optional": 2}
_SAMPLE, _OTHERS = "the sample", "the others"  #: names of forks; the rest have the name of an argument
_MOST_ARGUMENTS = 6  #: that have a fork of their own
_LENGTH = struct.Struct("<q")


def check(trial: Trial) -> None:
    trial.require_data()
    first = _before_others(trial) if trial.first is None else dict(trial.first)
    require(first is not None, "there is no process in which the operator was not called before")
    steady_results(trial.detached())
    now = attempt(trial.detached())
    if now is None or first is None:
        raise NotExercised("the operator does not take these inputs")
    compare(
        trial,
        now,
        first,
        "results depend on earlier calls",
        "something is kept between calls, and its key lacks what the result depends on: a cache by shape, by id() or "
        "data_ptr(), a value of the first call; add all that it is made of to the key, or compute it in each call",
        how="other than in a process with few calls before: ",
        ties=True,
    )


def _before_others(trial: Trial) -> Results | None:
    """The results of a call that comes before others, which then are made; None if this process cannot be forked."""
    if not can_fork():
        return None
    with contextlib.closing(Forks(trial)) as forks:
        (case,) = forks.with_results([Case(trial)])
    for other in itertools.chain(other_numbers(trial), other_arguments(trial, "quick"), other_sizes(trial)):
        attempt(other.detached())
    return None if case.trial.first is None else dict(case.trial.first)


def can_fork() -> bool:
    """Can this process be forked, with what it has in use?"""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()


class Forks:
    """Copies of this process as it is now, each of which calls some of the inputs derived from samples."""

    def __init__(self, sample: Trial) -> None:
        given = {argument.name: argument.default for argument in sample.schema.arguments} | sample.arguments
        names = [name for name, value in given.items() if isinstance(value, (int, float, str))]
        self._forks = {name: _Fork(sample.op) for name in (_SAMPLE, *names[:_MOST_ARGUMENTS], _OTHERS)}

    def with_results(self, cases: Sequence[Case]) -> list[Case]:
        """The cases, with the results of first calls for some of them."""
        found, left = [*cases], _SECONDS
        plan = _plan(cases, self._forks)
        unlike = _unlike(cases, plan)
        for name, fork in self._forks.items():
            if name not in (_SAMPLE, _OTHERS) and left < _SECONDS - _COMPILES:
                plan[_OTHERS] += plan[name]
                continue
            before = unlike if name == _OTHERS and plan[name] else []
            results, left = fork.results([*before, *(cases[number].trial for number in plan[name])], left)
            for number, each in zip(plan[name], results[len(before) :], strict=False):
                found[number] = replace(cases[number], trial=replace(cases[number].trial, first=each))
        return found

    def close(self) -> None:
        for fork in self._forks.values():
            fork.close()


class _Fork:
    def __init__(self, op: Any) -> None:
        (ask_read, self._ask), (self._answer, answer_write) = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python and of libraries, about threads
            self._process = os.fork()
        if self._process == 0:
            try:
                os.close(self._ask)
                os.close(self._answer)
                _serve(op, ask_read, answer_write)
            finally:
                os._exit(0)
        os.close(ask_read)
        os.close(answer_write)

    def results(self, trials: Sequence[Trial], left: float) -> tuple[list[Results | None], float]:
        """The results of calls, None for one that fails; fewer where a call ends the process, or no time is `left`."""
        found: list[Results | None] = []
        if not trials or left <= 0:
            return found, left
        try:
            requests = _saved([(trial.args, trial.kwargs) for trial in trials])
        except Exception:  # a generator, say
            return found, left
        with contextlib.suppress(BrokenPipeError):
            _write(self._ask, requests)
            while len(found) < len(trials) and left > 0:
                ready = select.select([self._answer], [], [], 2 * _TIMEOUT)[0]
                if not ready or not (answer := _read(self._answer)):  # it ended, or waits for something
                    return found, 0.0
                results, seconds = _loaded(answer)
                found.append(results)
                left -= seconds
        return found, left

    def close(self) -> None:
        os.close(self._ask)
        os.close(self._answer)
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def _serve(op: Any, ask: int, answer: int) -> None:
    """In the fork: wait for calls, and answer with their results."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # the threads of the parent are not there
    gc.disable()  # it would write to all memory, of which the fork then had a copy
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    if message := _read(ask):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for args, kwargs in _loaded(message):
            signal.setitimer(signal.ITIMER_REAL, _TIMEOUT)
            start = time.process_time()
            results = attempt(Trial(op, args, kwargs).detached())
            _write(answer, _saved((results, time.process_time() - start)))


def _plan(cases: Sequence[Case], forks: Iterable[str]) -> dict[str, list[int]]:
    """Which of the cases, by number, each fork calls."""
    plan: dict[str, list[int]] = {name: [] for name in forks}
    counts = collections.Counter[tuple[int, str]]()
    for number, case in enumerate(cases):
        kind = "named" if case.is_named else case.kind
        counts[case.sample, kind] += 1
        if counts[case.sample, kind] <= (_MOST_OF_FURTHER if case.sample else _MOST).get(kind, 0):
            changed = _changed(case.trial, cases[0].trial)
            is_one = len(changed) == 1 and changed[0] in plan and case.sample == cases[0].sample
            is_sample = number == 0 and kind == "sample"
            plan[_SAMPLE if is_sample else changed[0] if is_one else _OTHERS].append(number)
    return plan


def _unlike(cases: Sequence[Case], plan: dict[str, list[int]]) -> list[Trial]:
    """A call with all changes of the sample that the operator takes together, if there are others to come after it.

    The last input of a kind is left out of the plan if its change is in it: what is kept of such a call is its own.
    """
    if not any(numbers for name, numbers in plan.items() if name != _SAMPLE):
        return []
    given = trial = cases[0].trial
    kinds = collections.defaultdict[Any, list[int]](list)
    for number in itertools.chain(*plan.values()):
        if cases[number].sample == cases[0].sample:
            key = cases[number].kind, *_changed(cases[number].trial, given)
            kinds[key].append(number)
    for numbers in kinds.values():
        changed = _with_change(trial, cases[numbers[-1]].trial, given)
        if attempt(changed.detached()) is not None:
            trial = changed
            if len(numbers) > 1 and numbers[-1] in plan[_OTHERS]:
                plan[_OTHERS].remove(numbers[-1])
    return [other_values(trial.detached()) or trial]


def _changed(trial: Trial, given: Trial) -> list[str]:
    """The arguments without tensors that differ from those of the sample: a kernel may keep those of a first call."""
    return [n for n, v in trial.arguments.items() if not tensors_in(v) and repr(v) != repr(given.arguments.get(n))]


def _with_change(trial: Trial, other: Trial, given: Trial) -> Trial:
    """The call with the arguments, and the dtypes, in which another one differs from the sample."""
    differs, dtypes = {*_changed(other, given)}, dict[str, torch.dtype]()
    for name, value in other.arguments.items():
        before = given.arguments.get(name)
        if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
            if value.dtype != before.dtype:
                dtypes[name] = value.dtype
            elif value.shape != before.shape:
                differs.add(name)
        elif tensors_in(value) and value is not before:
            differs.add(name)
    changed = trial.with_arguments(**{name: other.arguments[name] for name in differs})
    return changed.map_tensors(lambda name, x: x.to(dtypes[name]) if name in dtypes else x)


def _saved(value: Any) -> bytes:
    """As `torch.save` does it, which has all dtypes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _write(pipe: int, data: bytes) -> None:
    data = _LENGTH.pack(len(data)) + data
    while data:
        data = data[os.write(pipe, data) :]


def _read(pipe: int) -> bytes:
    """What was written at one time; empty at the end."""

    def exactly(count: int) -> bytes:
        parts = b""
        while len(parts) < count and (part := os.read(pipe, count - len(parts))):
            parts += part
        return parts

    length = exactly(_LENGTH.size)
    return exactly(_LENGTH.unpack(length)[0]) if len(length) == _LENGTH.size else b""
