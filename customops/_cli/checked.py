"""Ops checked one after the other, or in several processes."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pickle
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal

import torch

from customops import CustomOpsError, checking
from customops._describe.screen import shorter_place
from customops._targets import Op, ops_of, trace
from customops.checking._isolated import can_isolate
from customops.checking.report import Report

#: "passed", "failed", "not exercised" (no check had something to try), "no samples", or "broken": there is no report.
Status = Literal["passed", "failed", "not exercised", "no samples", "broken"]


@dataclass(frozen=True)
class Options:
    """What to check of each op."""

    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()
    effort: str = "normal"
    isolate: bool | None = None


@dataclass(frozen=True)
class Checked:
    """What was found of one op. `problem` is why there is no report."""

    op: str
    name: str
    source: str
    report: Report | None = None
    problem: str = ""
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        if self.report is None:
            return "broken" if self.problem else "no samples"
        return "failed" if self.report.failures else "passed" if self.report.passed else "not exercised"

    @property
    def is_fault(self) -> bool:
        return self.status in ("failed", "broken")


def check_one(op: Op, options: Options) -> Checked:
    """Check an op over its samples."""
    place, start = (op._qualname, op.__name__, shorter_place(op.source)), time.perf_counter()
    if op._samples is None:
        return Checked(*place)
    isolate = can_isolate() if options.isolate is None else options.isolate
    torch.manual_seed(0)  # the same inputs in every run
    try:
        samples = list(op.samples())
    except (Exception, SystemExit) as error:
        message = str(error) if isinstance(error, CustomOpsError) else trace(error)
        return Checked(*place, problem=f"the samples function raised\n{message}")
    if not samples:
        return Checked(*place)
    choice: dict[str, Any] = {"only": options.only, "skip": options.skip, "effort": options.effort}
    try:
        report = checking.check(op, samples, isolate=isolate, progress=None, **choice)
    except (Exception, SystemExit) as error:
        message = str(error) if isinstance(error, CustomOpsError) else trace(error)
        return Checked(*place, problem=f"it could not be checked\n{message}", seconds=time.perf_counter() - start)
    return Checked(*place, report, seconds=time.perf_counter() - start)


def check_all(ops: Sequence[Op], targets: Sequence[str], options: Options, jobs: int) -> Iterator[Checked]:
    """Check ops, in their order; with several jobs, each process imports the targets for itself."""
    if jobs <= 1 or len(ops) == 1:
        yield from (check_one(op, options) for op in ops)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(ops)), context, _load, (tuple(targets),)) as pool:
        futures = [(op, pool.submit(_check_by_name, op._qualname, options)) for op in ops]
        try:
            for op, future in futures:
                yield _result(op, future)
        finally:
            pool.shutdown(cancel_futures=True)


def _result(op: Op, future: concurrent.futures.Future[bytes]) -> Checked:
    try:
        done: Checked = pickle.loads(future.result())
    except BrokenProcessPool:
        problem = "the process that checked it, or another op of this run, ended; run it with --jobs 1"
        return Checked(op._qualname, op.__name__, shorter_place(op.source), problem=problem)
    return done


#: The ops of the targets, in a process of a pool.
_loaded: dict[str, Op] = {}


def _load(targets: tuple[str, ...]) -> None:
    _loaded.update({op._qualname: op for op in ops_of(targets)})


def _check_by_name(qualname: str, options: Options) -> bytes:
    return pickle.dumps(check_one(_loaded[qualname], options))  # as bytes: torch would share the memory of tensors
