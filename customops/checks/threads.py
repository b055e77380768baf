"""test_threads: two threads that call an operator at the same time get what each gets alone.

Each thread calls the operator again and again with inputs of its own, of which the result is known. The interpreter
switches between them as often as it can, and each waits a moment at the lines of Python code outside of torch. That an
operator passes is no proof.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import types
from typing import Any

import torch

from customops.checks._inputs import quiet
from customops.checks._outcome import NotExercised, in_short, require
from customops.checks._runs import Results, attempt, first_difference, results_in, steady_results
from customops.checks._trial import Trial
from customops.checks._variants import other_values
from customops.errors import is_users

_CALLS, _MOST_CALLS = 12, 30
_BUDGET = 0.015  #: seconds of calls in each thread, where more than the fewest calls fit in
_MOST_PAUSES = 120
_PAUSE = 2e-5  #: seconds, at a line of Python
_PATIENCE = 10.0  #: seconds, at the least, until calls that do not return are taken for stuck


def check(trial: Trial) -> None:
    trial = trial.detached()
    start = time.perf_counter()
    results = steady_results(trial)
    seconds = time.perf_counter() - start  # of two calls, with copies
    calls = min(max(_CALLS, int(2 * _BUDGET / seconds)), _MOST_CALLS)
    patience = max(_PATIENCE, 10 * calls * seconds)
    other = other_values(trial)
    if other is None:
        raise NotExercised("no other values were accepted, with which a second thread could call the operator")
    _compare(patience, _Worker(trial, results, calls), _Worker(other, steady_results(other), calls))
    wide = other.in_float64()
    wide_results = attempt(wide)
    if wide_results is not None and any(tensor.is_floating_point() for tensor in wide.tensors):
        _compare(patience, _Worker(trial, results, calls), _Worker(wide, wide_results, calls))


def _compare(patience: float, *workers: _Worker) -> None:
    barrier = threading.Barrier(len(workers))
    threads = [threading.Thread(target=worker.run, args=(barrier,), daemon=True) for worker in workers]
    dtype, interval = torch.get_default_dtype(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with quiet():
            for thread in threads:
                thread.start()
            for worker, thread in zip(workers, threads, strict=True):
                thread.join(patience)
                worker.is_stuck = thread.is_alive()
    finally:
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


class _Worker:
    """Calls an operator again and again, and compares."""

    def __init__(self, trial: Trial, expected: Results, calls: int) -> None:
        self.trial, self.expected = trial, expected
        self.calls = [trial.copy() for _ in range(calls)]
        self.pauses = _MOST_PAUSES
        self.found: tuple[str, str] | None = None
        self.error: Exception | None = None
        self.is_stuck = False
        self.is_interpreted = False  # by Triton's interpreter, which other threads do not wait for

    def run(self, barrier: threading.Barrier) -> None:
        barrier.wait(_PATIENCE)
        sys.settrace(self._trace)  # of this thread
        try:
            results = [results_in(call, call.op(*call.args, **call.kwargs)) for call in self.calls]
        except Exception as error:  # of the operator; `_compare` raises it
            self.error = error
            return
        finally:
            sys.settrace(None)
        for each in results:
            self.found = self.found or first_difference(each, self.expected, rtol=self.trial.rtol)

    def _trace(self, frame: types.FrameType, event: str, _arg: Any) -> Any:
        """Let the other thread go on at each line of the user's code."""
        if event == "call" and _is_in(frame, "triton.runtime.interpreter") and frame.f_code.co_name == "run":
            callers = [caller for caller, _ in traceback.walk_stack(frame)]
            self.is_interpreted |= not any(_is_in(caller, "customops._op.triton") for caller in callers)
        if not is_users(frame.f_code.co_filename) or self.pauses <= 0:
            return None
        if event == "line":
            self.pauses -= 1
            time.sleep(_PAUSE)
        return self._trace


def _is_in(frame: types.FrameType, module: str) -> bool:
    return frame.f_globals.get("__name__") == module
