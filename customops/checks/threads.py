"""test_threads: two threads that call an operator at the same time get what each gets alone.

Each thread calls the operator again and again with inputs of its own, of which the result is known. In the first calls
one thread runs at a time, and hands over at lines of the user's Python code and after C functions that these call. A
seed decides where, so it is the same on each machine. Further calls begin together and run at the same time, with as
many switches between threads as the interpreter makes. That an operator passes is no proof.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from typing import Any

import torch

from customops._places import is_users
from customops.checks._inputs import quiet
from customops.checks._outcome import NotExercised, in_short, require
from customops.checks._runs import Results, attempt, first_difference, results_in, steady_results
from customops.checks._trial import Trial
from customops.checks._variants import other_values

_IN_TURN = 6  #: calls in each thread, of which one runs at a time
_CALLS, _MOST_CALLS = 10, 30  #: further ones, at the same time
_BUDGET = 0.015  #: seconds of calls in each thread, where more than the fewest calls fit in
#: A thread hands over at each of the first steps, so many, and at step n with the probability `_HANDOVERS` / n: so
#: the ends of long calls are tried, too. After `_MOST_STEPS` it goes on to its end, and then the other one.
_HANDOVERS, _MOST_STEPS = 30, 4_000
_WAIT = 0.02  #: seconds, beyond those of its calls, after which the other thread is taken to wait for a lock
_PATIENCE = 10.0  #: seconds, at the least, until calls that do not return are taken for stuck


def check(trial: Trial) -> None:
    trial = trial.detached()
    start = time.perf_counter()
    results = steady_results(trial)
    seconds = time.perf_counter() - start  # of two calls, with copies
    calls = min(max(_CALLS, int(_BUDGET / seconds)), _MOST_CALLS)
    other = other_values(trial)
    if other is None:
        raise NotExercised("no other values were accepted, with which a second thread could call the operator")
    _compare(calls, seconds, (trial, results), (other, steady_results(other)))
    wide = other.in_float64()
    wide_results = attempt(wide)
    if wide_results is not None and any(tensor.is_floating_point() for tensor in wide.tensors):
        _compare(0, seconds, (trial, results), (wide, wide_results))


def _compare(calls: int, seconds: float, *expected: tuple[Trial, Results]) -> None:
    patience = max(_PATIENCE, 10 * (_IN_TURN + calls) * seconds)
    turns, barrier = _Turns(_WAIT + _IN_TURN * seconds, patience), threading.Barrier(len(expected), timeout=patience)
    workers = [_Worker(number, *each, calls, turns) for number, each in enumerate(expected)]
    threads = [threading.Thread(target=worker.run, args=(barrier,), daemon=True) for worker in workers]
    dtype, interval, collects = torch.get_default_dtype(), sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(1e-6)
    gc.disable()  # a finalizer in the user's code would add steps
    try:
        with quiet():
            for thread in threads:
                thread.start()
            for worker, thread in zip(workers, threads, strict=True):
                thread.join(patience)
                worker.is_stuck = thread.is_alive()
    finally:
        if collects:
            gc.enable()
        sys.setswitchinterval(interval)
        torch.set_default_dtype(dtype)  # two calls that set it back, one after the other, may leave it changed
    require(
        not any(worker.is_interpreted for worker in workers),
        "Triton's interpreter runs one kernel at a time; where wrap_triton(kernel)[grid](...) launches it, calls wait",
    )
    for worker in workers:
        if worker.is_stuck:
            raise worker.trial.fault(
                "two calls at the same time, in two threads, do not end",
                got="each waits for the other, though calls one after the other return soon",
                fix="take locks in one order, and hold none that another thread needs to go on",
            )
        if worker.error is not None:
            raise worker.trial.fault(
                "the operator fails in a thread other than the main one, or beside another call",
                got=in_short(worker.error),
                fix="use nothing that belongs to one thread, or is set in one thread only",
            ) from worker.error
        if worker.found:
            raise worker.trial.fault(
                "two calls at the same time, in two threads, have other results than one after the other",
                got=": ".join(worker.found),
                fix="keep nothing between the steps of a call in globals or attributes: use local variables, "
                "threading.local() or a lock",
            )


class _Turns:
    """Lets one of two threads run at a time. At steps of its code it may hand over to the other, as a seed decides."""

    def __init__(self, wait: float, patience: float) -> None:
        self._wait, self._patience = wait, patience
        self._random = random.Random(0)
        self._moved = threading.Condition()
        self._whose = self._steps = 0
        self._is_away = [False, False]  #: Does a thread wait for a lock, or make no more steps?

    def begin(self, number: int) -> None:
        """Wait for the first turn. The wait does not count as a step, because either thread may arrive first."""
        with self._moved:
            self._moved.wait_for(lambda: self._whose == number, self._patience)

    def step(self, number: int) -> None:
        """Go on, or hand over and wait until the other thread does."""
        hands_over = False
        if self._whose == number:
            self._steps += 1
            hands_over = self._random.random() < _HANDOVERS / self._steps
            if not hands_over and not self._is_away[number]:
                return
        with self._moved:
            self._is_away[number] = False
            if hands_over:
                self._give(1 - number)
            if not self._moved.wait_for(lambda: self._whose == number, self._wait):  # it waits for a lock
                self._is_away[1 - number] = True
                self._whose = number

    @property
    def are_over(self) -> bool:
        return self._steps > _MOST_STEPS

    def end(self, number: int) -> None:
        with self._moved:
            self._is_away[number] = True
            self._give(1 - number)

    def _give(self, number: int) -> None:
        if not self._is_away[number]:
            self._whose = number
            self._moved.notify()


class _Worker:
    """Calls an operator again and again, and compares."""

    def __init__(self, number: int, trial: Trial, expected: Results, calls: int, turns: _Turns) -> None:
        self.number, self.trial, self.expected, self.turns = number, trial, expected, turns
        self.calls = [trial.copy() for _ in range(_IN_TURN + calls)]
        self.found: tuple[str, str] | None = None
        self.error: Exception | None = None
        self.is_stuck = False
        self.is_interpreted = False  # by Triton's interpreter, which other threads do not wait for

    def run(self, barrier: threading.Barrier) -> None:
        results: list[Results] = []
        try:
            barrier.wait()
            with self._in_turn():
                results += [self._results(call) for call in self.calls[:_IN_TURN]]
            for call in self.calls[_IN_TURN:]:
                barrier.wait()  # else the first may have ended before the other begins
                results.append(self._results(call))
        except threading.BrokenBarrierError:  # the other failed, or is stuck
            pass
        except Exception as error:  # of the operator; `_compare` raises it
            self.error = error
            barrier.abort()
        for each in results:
            self.found = self.found or first_difference(each, self.expected, rtol=self.trial.rtol)

    @staticmethod
    def _results(call: Trial) -> Results:
        return results_in(call, call.op(*call.args, **call.kwargs))

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Within the block this thread makes steps: at lines of the user's code, and after what these call of C."""
        self.turns.begin(self.number)
        sys.settrace(self._trace)  # of this thread
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            sys.settrace(None)
            self.turns.end(self.number)

    def _trace(self, frame: types.FrameType, event: str, _arg: Any) -> Any:
        if event == "call" and _is_in(frame, "triton.runtime.interpreter") and frame.f_code.co_name == "run":
            callers = [caller for caller, _ in traceback.walk_stack(frame)]
            self.is_interpreted |= not any(_is_in(caller, "customops._op.triton") for caller in callers)
        if self.turns.are_over or not is_users(frame.f_code.co_filename):
            return None
        if event == "line":
            self.turns.step(self.number)
        return self._trace

    def _profile(self, frame: types.FrameType, event: str, _arg: Any) -> None:
        if event == "c_return" and not self.turns.are_over and is_users(frame.f_code.co_filename):
            self.turns.step(self.number)


def _is_in(frame: types.FrameType, module: str) -> bool:
    return frame.f_globals.get("__name__") == module
