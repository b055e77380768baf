"""`check`: derive inputs, run the checks on them, and report each fault once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from customops import _torch
from customops._op.op import CustomOpDef
from customops.checking._isolated import can_isolate, isolated
from customops.checking._run import INPUTS, Run
from customops.checking.report import Report
from customops.checks import CHECKS, UsageError, lowered
from customops.checks._check import EFFORTS, Check, Effort
from customops.checks._inputs import alone
from customops.checks._outcome import in_short
from customops.checks._trial import Trial, resolve

_PATIENCE = 2.0  #: seconds before the line is shown
_PAUSE = 0.1  #: seconds between two lines about the same check


class Progress:
    """Shows ``mylib::op [#####-----] 12/30 test_vmap`` on stderr while it is entered.

    Args:
        name: of the operator.
        shown: None shows it on terminals only, after two seconds.
    """

    def __init__(self, name: str, shown: bool | None) -> None:
        self._name = name
        self._patience = 0.0 if shown else _PATIENCE
        self._enabled = sys.stderr.isatty() if shown is None else shown
        self._start = time.monotonic()
        self._last, self._what = 0.0, ""
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def step(self, done: int, total: int, what: str) -> None:
        """Show how far it is, and what comes next."""
        now = time.monotonic()
        is_due = now - self._last >= _PAUSE or what != self._what
        if self._enabled and is_due and now - self._start >= self._patience:
            self._last, self._what = now, what
            filled = 20 * done // max(total, 1)
            self._write(f"{self._name} [{'#' * filled}{'-' * (20 - filled)}] {done}/{total} {what}")

    def _write(self, line: str) -> None:
        if self._width or line:
            sys.stderr.write("\r" + line.ljust(self._width) + ("" if line else "\r"))
            sys.stderr.flush()
            self._width = len(line)


def check(
    op: Any,
    samples: Iterable[Any] | None = None,
    *,
    only: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    effort: Effort = "normal",
    reference: Callable[..., Any] | None = None,
    isolate: bool | None = None,
    progress: bool | None = None,
) -> Report:
    """Run the checks on an operator with inputs derived from samples, and report each fault once.

    The derived inputs vary the sizes, strides, dtypes, values, optional arguments, lists and choices of the samples.
    Inputs that both the kernel and the fake impl reject count as invalid. See `customops.checks.CHECKS` for what is
    compared. Checks change settings of the program and put them back, so they run in one thread at a time.

    Args:
        op: an OpOverload, an OpOverloadPacket with one overload, or a `CustomOpDef`.
        samples: a list of samples, each a tuple of arguments or ``(args, kwargs)``; or the tuple of a single sample. By
            default those of ``op.register_samples``.
        only, skip: names of checks to run, or not to run.
        effort: "quick" takes about 0.5 s for a small op on the CPU, "normal" about 2 s; "thorough" tries everything.
            The report lists what was left out.
        reference: a plain PyTorch function of the same arguments; kernels and gradients are compared with it.
        isolate: run the checks in a separate process, so that a kernel that kills the process, or raises
            KeyboardInterrupt, is reported as a fault.
            By default this is done for C++ kernels that are not torch's own, unless CUDA is in use.
        progress: show a progress bar on stderr; by default on terminals, after two seconds.

    Returns:
        A `Report`: ``report.failures``, ``report.raise_on_failure()``, ``print(report)``.

    Raises:
        UsageError: there are no samples, a sample does not match the schema, a name is unknown, or `op` is not an
            operator.

    Example:
        >>> report = customops.check(softmax, [(torch.randn(3, 4), -1)])
        >>> print(report)
        >>> report.raise_on_failure()
    """
    if effort not in EFFORTS:
        raise UsageError("no such effort", argument="effort", expected=", ".join(EFFORTS), got=repr(effort))
    chosen = _chosen(only, skip, effort, has_reference=reference is not None)
    trials = trials_of(op, samples, reference)
    run = Run(op if isinstance(op, CustomOpDef) else trials[0].custom_op, trials, chosen, effort)
    steps = isolated(run) if is_isolated(isolate, trials[0]) else run.steps()
    with alone(), Progress(run.op, progress) as bar:
        start = time.perf_counter()
        for step in steps:
            bar.step(step.done, step.total, step.what)
    results, failures, left_out = run.outcome()
    left_out = (*left_out, *_left_out(chosen, effort, only, skip))
    seconds = time.perf_counter() - start
    return Report(run.op, effort, results, failures, left_out, seconds, run.source)


def is_isolated(isolate: bool | None, trial: Trial) -> bool:
    """Is the operator to be run in a process of its own? Where nothing is said, if its kernel may end the process."""
    if isolate is not None:
        return isolate
    is_foreign = not trial.is_builtin and not _torch.dispatcher.runs_python(trial.name)
    return is_foreign and can_isolate()


def trials_of(op: Any, samples: Iterable[Any] | None, reference: Callable[..., Any] | None) -> list[Trial]:
    """The calls that samples stand for.

    Raises:
        UsageError: there are none, or one does not fit the operator.
    """
    overload = resolve(op)
    if samples is None:
        samples = op.samples() if isinstance(op, CustomOpDef) else ()
    elif isinstance(samples, tuple):
        samples = [samples]
    calls = [_call(sample) for sample in samples]
    if not calls:
        raise UsageError(
            "there are no samples to derive inputs from",
            op=str(overload.name()),
            argument="samples",
            fix="check(op, [(x, y)]), or attach some with @op.register_samples",
        )
    trials = [Trial(overload, *lowered(op, args, kwargs), reference=reference) for args, kwargs in calls]
    for trial in trials:
        _require_fit(trial)
        if trial.reference is not None:
            try:
                copy = trial.copy()
                trial.reference(*copy.args, **copy.kwargs)
            except Exception as error:
                raise UsageError(
                    "the reference function fails on a sample",
                    op=trial.name,
                    argument="reference",
                    expected="a function with the parameters of the operator, of plain torch code",
                    got=in_short(error, 300),
                ) from error
    return trials


def _require_fit(trial: Trial) -> None:
    """Raise UsageError unless a sample has the arguments of the operator."""
    names = [argument.name for argument in trial.schema.positional]
    required = [argument.name for argument in trial.schema.arguments if not argument.has_default]
    known = {argument.name for argument in trial.schema.arguments}
    problems = {
        "too many": [f"{len(trial.args)} positional arguments, of {len(names)}"] * (len(trial.args) > len(names)),
        "unknown": [name for name in trial.kwargs if name not in known],
        "given twice": [name for name in names[: len(trial.args)] if name in trial.kwargs],
        "missing": [name for name in required if name not in trial.arguments],
    }
    for problem, found in problems.items():
        if found:
            raise UsageError(
                "a sample does not fit the operator",
                op=trial.name,
                argument="samples",
                expected=str(trial.schema),
                got=f"{problem}: {', '.join(found)}",
                fix="a sample is a tuple of arguments, or (args, kwargs): check(op, [(x, y), ((x,), {'dim': 1})])",
            )


def _call(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(sample, (tuple, list)):
        raise UsageError(
            "a sample is a tuple of arguments, or (args, kwargs)",
            argument="samples",
            got=type(sample).__name__,
            fix="for an operator of one argument write check(op, [(x,)])",
        )
    if len(sample) == 2 and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], Mapping):
        return tuple(sample[0]), dict(sample[1])
    return tuple(sample), {}


def _chosen(
    only: str | Sequence[str] | None, skip: str | Sequence[str], effort: Effort, *, has_reference: bool
) -> dict[str, Check]:
    skipped = _known("skip", skip)
    if only is not None:
        return {name: CHECKS[name] for name in _known("only", only) if name not in skipped}
    allowed = EFFORTS[: EFFORTS.index(effort) + 1]
    return {
        name: row
        for name, row in CHECKS.items()
        if (row.effort in allowed or (has_reference and row.takes_reference)) and name not in skipped
    }


def _known(argument: str, names: str | Sequence[str]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise UsageError(
            "there is no such check", argument=argument, expected=", ".join(CHECKS), got=", ".join(map(repr, unknown))
        )
    return names


def _left_out(
    chosen: Mapping[str, Check], effort: Effort, only: str | Sequence[str] | None, skip: str | Sequence[str]
) -> Iterable[str]:
    skipped = (skip,) if isinstance(skip, str) else tuple(skip)
    if only is not None:
        yield f"all checks but {', '.join(chosen)} (only=)"
    elif missing := [name for name in CHECKS if name not in chosen and name not in skipped]:
        for least in EFFORTS:
            if names := [name for name in missing if CHECKS[name].effort == least]:
                yield f'{", ".join(names)} (effort="{least}" runs them)'
    if skipped:
        yield f"{', '.join(skipped)} (skip=)"
    if effort != "thorough":
        yield 'some of the inputs that can be derived (effort="thorough" tries all)'


class SampleChecks:
    """One sample of an operator, and the checks on what is derived from it, each when it is asked for.

    What they have in common is done once: looking for the inputs that the operator accepts. Each check says the same
    whichever others were run before, so that tests may run in any order and in several processes.

    Args:
        op: the operator.
        sample: ``(args, kwargs)``.
        number: the number of the sample, for reports.
        effort: as of `customops.check`.

    Raises:
        UsageError: the sample does not fit the operator.
    """

    def __init__(self, op: CustomOpDef[Any, Any], sample: Any, number: int, effort: Effort) -> None:
        trials = trials_of(op, [sample], None)
        self._run = Run(op, trials, {}, effort, first=number)
        self._is_isolated = is_isolated(None, trials[0])
        self._reports: dict[str, Report] = {}

    def report(self, check: str) -> Report:
        """What a check finds; for "inputs", what is wrong with the operator as it is called on the inputs."""
        if check in self._reports:
            return self._reports[check]
        if check != INPUTS and not self._is_isolated:
            self.report(INPUTS)  # which finds the inputs for the others
        chosen = {} if check == INPUTS else {check: CHECKS[check]}
        run = replace(self._run, chosen=chosen, results=[], faults={}, given=None, left_out=[], probed=0)
        start = time.perf_counter()
        with alone():
            for _ in isolated(run) if self._is_isolated else run.steps():
                pass
        # None from a process of its own, where they stay. What ends it all runs know, by `avoided`.
        self._run.cases, self._run.samples_only = run.cases, run.samples_only
        results, failures, left_out = run.outcome()
        found = tuple(result for result in results if result.check == check)
        faults = tuple(failure for failure in failures if failure.check == check)
        report = Report(run.op, run.effort, found, faults, left_out, time.perf_counter() - start, run.source)
        self._reports[check] = report
        return report

    def explained_by(self, check: str, among: Collection[str]) -> str | None:
        """One of these checks that fails, too, and whose failure may be the cause of this one's."""
        return next((name for name in CHECKS[check].after if name in among and self.report(name).failures), None)
