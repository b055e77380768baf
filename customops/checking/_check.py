"""`check`: derive inputs from samples, run the checks on them, and report each fault once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from customops import _torch
from customops._op.op import CustomOpDef
from customops._schema.defaults import completer
from customops.checking._isolation import can_fork as can_fork
from customops.checking._isolation import is_isolated, isolated
from customops.checking._run import INPUTS as INPUTS
from customops.checking._run import Run
from customops.checking.report import Report
from customops.checks import CHECKS, UsageError, lowered
from customops.checks._inputs import alone
from customops.checks._limits import Limits
from customops.checks._outcome import in_short
from customops.checks._table import RETIRED, checks_at
from customops.checks._trial import EFFORTS, Effort, Trial, resolve
from customops.errors import did_you_mean

__tracebackhide__ = True  # pytest leaves the frames out

_PATIENCE = 2.0  #: seconds before the line of progress is shown
_PAUSE = 0.1  #: seconds between two lines about the same check


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
    timeout: float = Limits.seconds,
    memory: int = Limits.memory,
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
            The report lists what was left out. ``report.complete`` is False if that is because the op is slow: limits
            count processor time.
        reference: a plain PyTorch function of the same arguments; kernels and gradients are compared with it. None:
            that of ``op.register_reference``.
        isolate: run the checks in a separate process, so that a kernel that kills the process, or raises
            KeyboardInterrupt, is reported as a fault.
            By default this is done for C++ kernels that are not torch's own, unless CUDA is in use.
        timeout: seconds after which a call that has not returned is a fault. In a process of its own this holds for
            kernels in C++, too; else for those that come back to Python, in the main thread.
        memory: bytes that a call may take beyond what the process has; a call that needs more is a fault, too.
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
    skipped, not_chosen = _known("skip", skip), []
    trials = trials_of(op, samples, reference)
    if only is not None:
        chosen = {name: CHECKS[name] for name in _known("only", only) if name not in skipped}
        not_chosen.append(f"all checks but {', '.join(chosen)} (only=)")
    else:
        rows = {name: row for name, row in CHECKS.items() if name not in skipped}
        chosen = {name: rows[name] for name in checks_at(effort, trials[0]) if name in rows}
        for least in EFFORTS:
            names = [name for name in rows if name not in chosen and rows[name].effort_for(trials[0]) == least]
            if names:
                not_chosen.append(f'{", ".join(names)} (effort="{least}" runs them)')
    if skipped:
        not_chosen.append(f"{', '.join(skipped)} (skip=)")
    if effort != "thorough":
        not_chosen.append('some of the inputs that can be derived (effort="thorough" tries all)')
    run = Run(op if isinstance(op, CustomOpDef) else trials[0].custom_op, trials, chosen, effort)
    run.limits = Limits(timeout, memory)
    report = _report_of(run, is_isolated(isolate, trials[0]), progress)
    return replace(report, left_out=(*report.left_out, *not_chosen))


def trials_of(op: Any, samples: Iterable[Any] | None, reference: Callable[..., Any] | None) -> list[Trial]:
    """The calls that samples stand for; UsageError where there are none, or one does not fit the operator."""
    overload = resolve(op)
    if samples is None:
        samples = op.samples() if isinstance(op, CustomOpDef) else ()
    elif isinstance(samples, tuple):
        samples = [samples]
    reference = reference or _own_reference(overload)
    trials = [_trial(overload, op, sample, reference) for sample in samples]
    if not trials:
        problem = "there are no samples to derive inputs from"
        fix = "check(op, [(x, y)]), or attach some with @op.register_samples"
        raise UsageError(problem, op=str(overload.name()), argument="samples", fix=fix)
    return [replace(trial, samples=trials) for trial in trials]


def _own_reference(overload: _torch.library.OpOverload) -> Callable[..., Any] | None:
    """The reference of an operator, as a function that writes what the operator writes. A kernel is none of itself."""
    custom_op = Trial(overload, ()).custom_op
    found = None if custom_op is None else custom_op._rules.reference
    if found is None or found.plain is custom_op._init_fn:
        return None
    complete = completer(custom_op.schema)

    def reference(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = complete(args, kwargs)
        return found.kernel(*args, **kwargs)

    shown: Callable[..., Any] = found.shown(reference)
    return shown


def _trial(overload: _torch.library.OpOverload, op: Any, sample: Any, reference: Callable[..., Any] | None) -> Trial:
    if not isinstance(sample, (tuple, list)):
        got = type(sample).__name__
        fix = "for an operator of one argument write check(op, [(x,)])"
        raise UsageError("a sample is a tuple of arguments, or (args, kwargs)", argument="samples", got=got, fix=fix)
    if len(sample) == 2 and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], Mapping):
        trial = Trial(overload, *lowered(op, tuple(sample[0]), dict(sample[1])), reference=reference)
    else:
        trial = Trial(overload, *lowered(op, tuple(sample), {}), reference=reference)
    arguments = {argument.name: argument for argument in trial.schema.arguments}
    names = [argument.name for argument in trial.schema.positional]
    problems = {
        "too many": [f"{len(trial.args)} positional arguments, of {len(names)}"] * (len(trial.args) > len(names)),
        "unknown": [name for name in trial.kwargs if name not in arguments],
        "given twice": [name for name in names[: len(trial.args)] if name in trial.kwargs],
        "missing": [n for n, each in arguments.items() if not each.has_default and n not in trial.arguments],
    }
    for kind, found in problems.items():
        if found:
            problem, got = "a sample does not fit the operator", f"{kind}: {', '.join(found)}"
            fix = "a sample is a tuple of arguments, or (args, kwargs): check(op, [(x, y), ((x,), {'dim': 1})])"
            raise UsageError(problem, op=trial.name, argument="samples", expected=str(trial.schema), got=got, fix=fix)
    if reference is not None:
        try:
            copy = trial.copy()
            reference(*copy.args, **copy.kwargs)
        except Exception as error:
            problem, got = "the reference function fails on a sample", in_short(error, 300)
            expected = "a function with the parameters of the operator, of plain torch code"
            raise UsageError(problem, op=trial.name, argument="reference", expected=expected, got=got) from error
    return trial


def _known(argument: str, names: str | Sequence[str]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    if argument == "skip":
        names = tuple(name for name in names if name not in RETIRED)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        got = ", ".join(map(repr, unknown))
        by = RETIRED.get(unknown[0])
        fix = did_you_mean(unknown[0], CHECKS) if by is None else f"{unknown[0]} was removed; use {by}"
        raise UsageError("there is no such check", argument=argument, expected=", ".join(CHECKS), got=got, fix=fix)
    return names


def _report_of(run: Run, in_forks: bool, shown: bool | None) -> Report:
    """Make a run, with ``mylib::op [#####-----] 12/30 test_vmap`` on stderr, by default of terminals only."""
    is_shown = sys.stderr.isatty() if shown is None else shown
    last, before, width = 0.0, "", 0
    _torch.fakes.fake_mode()  # loads, in seconds, what each fork would load for itself, and what no limit is to count
    with alone():
        start = time.perf_counter()
        try:
            for done, total, what in isolated(run) if in_forks else run.steps():
                now = time.perf_counter()
                is_due = now - last >= _PAUSE or what != before
                if is_shown and is_due and now - start >= (0.0 if shown else _PATIENCE):
                    last, before, filled = now, what, 20 * done // max(total, 1)
                    line = f"{run.op} [{'#' * filled}{'-' * (20 - filled)}] {done}/{total} {what}"
                    sys.stderr.write("\r" + line.ljust(width))
                    sys.stderr.flush()
                    width = len(line)
        finally:
            if width:
                sys.stderr.write("\r" + " " * width + "\r")
                sys.stderr.flush()
    results, failures, left_out = run.outcome()
    return Report(run.op, run.effort, results, failures, left_out, time.perf_counter() - start, run.source, left_out)


class SampleChecks:
    """One sample, ``(args, kwargs)``, and the checks on what is derived from it, each when it is asked for.

    The inputs that the operator accepts are looked for once. Each check says the same whichever others were run before,
    so that tests may run in any order and in several processes.
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
        report = _report_of(run, self._is_isolated, False)
        # None from a process of its own, where they stay. What ends it all runs know, by `avoided`.
        self._run.cases, self._run.samples_only = run.cases, run.samples_only
        results = tuple(result for result in report.results if result.check == check)
        failures = tuple(failure for failure in report.failures if failure.check == check)
        self._reports[check] = replace(report, results=results, failures=failures)
        return self._reports[check]

    @staticmethod
    def names(op: CustomOpDef[Any, Any], effort: Effort) -> list[str]:
        """The checks that `check` runs at an effort."""
        overload = resolve(op)
        return checks_at(effort, Trial(overload, (), reference=_own_reference(overload)))

    def explained_by(self, check: str, among: Collection[str]) -> str | None:
        """One of these checks that fails, too, and whose failure may be the cause of this one's."""
        return next((name for name in CHECKS[check].after if name in among and self.report(name).failures), None)
