"""`Watcher`: sees calls of op objects and runs of kernels, and makes one `Call` of what belongs together."""

from __future__ import annotations

import fnmatch
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from customops import _compat
from customops._dispatch.callbacks import Fn
from customops._dispatch.current_kernel import CurrentKernel
from customops._op import CustomOpDef
from customops._timing import synchronize
from customops.errors import ArgumentError, brief, is_users, location_of, name_of
from customops.logging._calls import Call, outline_arguments

__tracebackhide__ = True  # pytest leaves the frames out

#: A pattern of names (``"mylib::*"``), an op, or several of these; None for all.
Ops = str | CustomOpDef[Any, Any] | Iterable[str | CustomOpDef[Any, Any]] | None

#: Arguments of a call, as a watcher hands them on.
Given = tuple[tuple[Any, ...], dict[str, Any]]


class Watcher:
    """Makes a `Call` for each call of some ops, in all threads.

    A call of an op's object sees all that happens in it. One through ``torch.ops``, a compiled graph or a transform is
    seen when its kernel runs: then the call is what the kernel got.

    Args:
        done: called with each call when it is over, and its lowered arguments.
        ops: which ones.
        begun: called before, if given. What it returns is handed to `done` in the place of the arguments.
        synchronize: wait for the accelerator before and after.
    """

    def __init__(
        self,
        done: Callable[[Call, Any], object],
        ops: Ops = None,
        *,
        begun: Callable[[Call, Given], Any] | None = None,
        synchronize: bool = False,
    ) -> None:
        self.done, self.begun, self.synchronize = done, begun, synchronize
        self.patterns = patterns_of(ops)
        self._state = threading.local()

    def _is_chosen(self, op: str) -> bool:
        return self.patterns is None or any(fnmatch.fnmatchcase(op, pattern) for pattern in self.patterns)

    @property
    def _open(self) -> list[Call]:
        """The calls that are going on in this thread, outermost first."""
        try:
            calls: list[Call] = self._state.calls
        except AttributeError:
            calls = self._state.calls = []
        return calls

    # As an `Observer` -------------------------------------------------------------------------------------------

    def around_call(self, op: Any, fn: Fn) -> Fn:
        qualname = op._qualname
        if not self._is_chosen(qualname):
            return fn
        names = [argument.name for argument in op.schema.positional]

        def watched(*args: Any, **kwargs: Any) -> Any:
            call = self._new(qualname, names, args, kwargs)
            given = self.begun(call, (args, kwargs)) if self.begun is not None else (args, kwargs)
            return self._run(call, given, fn, args, kwargs)

        return _compat.dynamo.outside_dynamo(watched)

    def around_kernel(self, current: CurrentKernel, fn: Fn) -> Fn:
        op = current.op
        if not self._is_chosen(op):
            return fn
        names = [each.name for each in current.schema.positional] if current.schema is not None else []
        kernel, where = name_of(current.registered), location_of(current.registered)
        device_type = current.device_type or ""

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls = self._open
            if calls and calls[-1].op == op:
                call = calls[-1]
                call.kernel, call.where, call.device_type = kernel, where, device_type
                return self._run_kernel(call, fn, args, kwargs)
            call = self._new(op, names, args, kwargs)
            if call.through == "object":
                call.through = "dispatcher"
            call.kernel, call.where, call.device_type = kernel, where, device_type
            given = self.begun(call, (args, kwargs)) if self.begun is not None else (args, kwargs)
            return self._run(call, given, self._run_kernel, (call, fn, args, kwargs), {})

        watched.__wrapped__ = fn  # type: ignore[attr-defined]
        return watched

    # Calls ------------------------------------------------------------------------------------------------------

    def _new(self, op: str, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        caller, in_graph = _caller()
        call = Call(op, outline_arguments(names, args, kwargs), caller, "graph" if in_graph else "object")
        call.thread = threading.current_thread().name
        return call

    def _run(self, call: Call, given: Any, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls = self._open
        calls.append(call)
        start = self._now()
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            call.error = brief(error, 200)
            raise
        finally:
            call.seconds = self._now() - start
            calls.pop()
            self.done(call, given)

    def _run_kernel(self, call: Call, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call.runs += 1
        start = self._now()
        try:
            return fn(*args, **kwargs)
        finally:
            call.kernel_seconds += self._now() - start

    def _now(self) -> float:
        if self.synchronize:
            synchronize()
        return time.perf_counter()


def patterns_of(ops: Ops) -> list[str] | None:
    """The names, or patterns of names, that a user gave; None for all.

    Raises:
        ArgumentError: something is neither.
    """
    if ops is None:
        return None
    given = [ops] if isinstance(ops, (str, CustomOpDef)) or not isinstance(ops, Iterable) else list(ops)
    patterns = [op._qualname if isinstance(op, CustomOpDef) else op for op in given]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentError(
                "ops are given as names, patterns or op objects",
                argument="ops",
                expected='"mylib::scale", "mylib::*", an op, or several of these',
                got=brief(pattern),
            )
    return patterns


def _caller() -> tuple[str, bool]:
    """``file:line`` of the user's code that is running, and whether the code of a compiled graph is between."""
    frame: FrameType | None = sys._getframe(2)
    in_graph = False
    while frame is not None:
        file = frame.f_code.co_filename
        if str(frame.f_globals.get("__name__", "")).startswith("torch._inductor.") and is_users(file):
            in_graph = True  # code that inductor has written
        elif is_users(file) and not file.startswith(("<frozen ", "<eval_with_key>")):
            return f"{file}:{frame.f_lineno}", in_graph
        frame = frame.f_back
    return "", in_graph
