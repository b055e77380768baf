"""`check`: derive inputs, run the checks on them, and report each fault once.

A run may be made in processes of its own: a kernel that ends the process is a fault, and the run goes on without that
step.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import signal
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

import torch

from customops import _torch
from customops._describe.render import plural
from customops._dispatch.current_kernel import observe
from customops._op.op import CustomOpDef
from customops._places import is_deliberate, is_users, where
from customops._schema.defaults import completer
from customops.checking.report import KERNELS, Failure, Report, Result
from customops.checks import CHECKS, UsageError, lowered
from customops.checks._inputs import alone, as_ordinary, is_ordinary
from customops.checks._limits import Limits, TookTooLong
from customops.checks._outcome import (
    NotExercised,
    in_short,
    is_accident,
    is_alias,
    is_mistake,
    processor_time,
    raised_at,
    torch_refuses,
)
from customops.checks._runs import attempt, fake_error
from customops.checks._table import RETIRED, Check, checks_at
from customops.checks._trial import EFFORTS, FAILS, Case, Effort, Trial, of_reference, resolve
from customops.checks.inputs import derive, probe, shrink, variation_of
from customops.checks.kernels import REFUSED, Reached
from customops.checks.state import Settings
from customops.errors import CheckError, brief, did_you_mean
from customops.testing.isolation import IsolationError, in_fork

__tracebackhide__ = True  # pytest leaves the frames out

_ENOUGH = 3  #: inputs that show faults in one check, after which the others are not tried
_SHRINKING = 0.3  #: seconds for making the input of a fault smaller; times ten in a thorough run
INPUTS = "inputs"
_SHRINK = "shrink"
#: The checks whose faults are mostly those of the fake impl.
_OF_FAKES = ("test_faketensor", "test_symbolic_sizes")
#: The checks whose faults are those of the kernel that ran, where they do not say more.
_OF_KERNELS = ("test_schema", "test_writes", "test_declared_writes", "test_unchecked", "test_modes")
#: What else can be done about inputs that the author did not mean to allow, by what was changed.
_REFUSE = {
    "dtype": "refuse the dtype in kernel and fake impl, with torch._check(...); "
    "fixed='dtype' of register_samples keeps others from being tried",
    "size": "refuse these sizes in kernel and fake impl, with torch._check(...); "
    "constraints= of register_samples keeps them from being tried",
}
_REFUSE["broadcast"] = _REFUSE["size"]
#: How far a run is, of how much, and what it does next.
Step = tuple[int, int, str]
#: Results, failures, and what was left out.
Outcome = tuple[tuple[Result, ...], tuple[Failure, ...], tuple[str, ...]]
#: How many inputs of the first sample are accepted at most, and of each further one, which mostly show the same.
_INPUTS: dict[Effort, tuple[int, ...]] = {"quick": (12, 12), "normal": (60, 20), "thorough": (sys.maxsize, sys.maxsize)}
#: Seconds of processor time after which a check, or the search for inputs, is ended: of slow operators, that is. It
#: is reported.
_SLOW: dict[Effort, float] = {"quick": 2.0, "normal": 10.0, "thorough": 600.0}
#: The same after which nothing more is tried, but for what has begun. That is reported, too.
_LATE: dict[Effort, float] = {"quick": 10.0, "normal": 60.0, "thorough": 3600.0}
_PATIENCE = 2.0  #: seconds before the line of progress is shown
_PAUSE = 0.1  #: seconds between two lines about the same check
_TIMEOUT = 600.0  #: seconds for a whole run
_CRASHES = 8  #: after so many nothing is derived any more
#: What errors about shapes say.
_SHAPES = re.compile(r"shape|size|broadcast|dimension|out of bounds|out of range")
#: Inputs with the shapes and dtypes of the sample. What one part takes of these, others have to take; tensors of others
#: are left to the checks of results: many a kernel takes by accident what it is not meant for.
_OF_VALUES = ("number", "choice", "optional", "value", "padding", "index")
#: What these expect need not hold for the reference function either: it was learnt from some calls, or is what most
#: operators promise of rounding and of points where they are not smooth. By the check, how such problems begin.
_NOT_OF_ALL = {
    **dict.fromkeys(("test_batches", "test_permutations", "test_symmetries", "test_precision", "test_stability"), ""),
    "test_backward": "of the gradients: ",
    "test_gradients": "the gradients at a kink, or a tie",
    "test_second_order": "the second derivative is wrong",
}
#: What differs in the messages of one cause: numbers, dtypes.
_VARYING = re.compile(r"\d+|torch\.\w+")


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


def can_fork() -> bool:
    """Return True if this process can be forked: the platform has `os.fork`, and CUDA is not in use."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()


def is_isolated(isolate: bool | None, trial: Trial) -> bool:
    """Is the operator to be run in a process of its own? Where nothing is said, if its kernel may end the process."""
    if isolate is not None:
        return isolate
    is_foreign = not trial.is_builtin and not _torch.dispatcher.runs_python(trial.name)
    return is_foreign and can_fork()


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


def _is_fake_fine(trial: Trial) -> bool:
    return isinstance(fake_error(trial), NoneType | NotExercised)


@dataclass
class _Fault:
    error: CheckError
    cases: list[Case]  #: the inputs that showed it


@dataclass
class Run:
    """A run of the checks `chosen` over what is derived from `samples`."""

    custom_op: Any  #: the `CustomOpDef`, if the operator is one of customops
    samples: Sequence[Trial]
    chosen: Mapping[str, Check]
    effort: Effort
    #: Is told of each check and case, by number, before it is tried.
    announce: Callable[[str, int], object] = lambda check, case: None
    #: Checks and cases, by number, that are not tried since they end the process, with what to say of them.
    avoided: dict[tuple[str, int], CheckError] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    faults: dict[tuple[str, str], _Fault] = field(default_factory=dict)
    given: Outcome | None = None  #: the outcome of a run in another process
    left_out: list[str] = field(default_factory=list)
    probed: int = 0
    samples_only: bool = False  #: derive nothing: too much of that ends the process
    cases: list[Case] | None = None  #: the accepted inputs, once they are known; a run that is given them does not look
    first: int = 0  #: the number of the first sample
    limits: Limits = field(default_factory=Limits)
    reached: Reached = field(init=False)

    def __post_init__(self) -> None:
        self.reached = Reached(self.samples[0])

    @property
    def op(self) -> str:
        return self.samples[0].name

    @property
    def source(self) -> str | None:
        return None if self.custom_op is None else str(self.custom_op.source)

    def steps(self) -> Iterator[Step]:
        """Run everything; yields what comes next, before doing it."""
        # Odd inputs make kernels warn, of means of nothing and the like. That is no finding.
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield 0, 1, INPUTS
            with observe(self.reached):
                cases = self.cases = [*self._accepted()] if self.cases is None else self.cases
            self.reached.devices |= {tensor.device.type for case in cases for tensor in case.trial.tensors}
            rows = self.chosen.items() if cases else ()
            work = [(name, list(row.inputs(cases, self.effort))) for name, row in rows]
            total, done = sum(len(inputs) for _, inputs in work), 0
            start, late = processor_time(), []
            for name, inputs in work:
                if processor_time() - start > _LATE[self.effort]:
                    late.append(name)
                    continue
                cause = next((check for check, _ in self.faults if check in self.chosen[name].after), None)
                if cause is not None:
                    self._add(name, "not exercised", inputs[:1], reason=f"{cause} failed, which may be the cause")
                else:
                    yield from self._try_all(name, inputs, done, total)
                    done += len(inputs)
            if late:
                limit = f"{_LATE[self.effort]:g} s"
                self.left_out.append(f"{plural(len(late), 'check')} left out ({limit}): {', '.join(late)}")
            for kernel, place in self.reached.others() if cases else ():
                reason = f"no input reached the {kernel}, {place}"
                self.results.append(Result(KERNELS, "not exercised", kernel, reason=reason))
            for number, ((name, _), fault) in enumerate(self.faults.items()):
                if name != INPUTS and (_SHRINK, number) not in self.avoided:
                    yield total, total, "making the inputs of faults smaller"
                    self.announce(_SHRINK, number)
                    self._shrink(name, fault)

    def _try_all(self, name: str, inputs: Sequence[Case], done: int, total: int) -> Iterator[Step]:
        for (check, number), crash in self.avoided.items() if inputs else ():
            if check == name:  # it is not tried on others, which would start everything again
                self._fault(name, crash, inputs[min(number, len(inputs) - 1)])
                return
        start = processor_time()
        for number, case in enumerate(inputs):
            yield done + number, total, name
            self.announce(name, number)
            self._attempt(name, case)
            if sum(len(fault.cases) for (check, _), fault in self.faults.items() if check == name) >= _ENOUGH:
                return
            rest = len(inputs) - number - 1
            if processor_time() - start > _SLOW[self.effort] and rest:
                self.left_out.append(f"{name} left out on {plural(rest, 'input')} ({_SLOW[self.effort]:g} s)")
                return

    def outcome(self) -> Outcome:
        """What was found, and what was left out; of a run in another process, what that sent."""
        if self.given is not None:
            return self.given
        failures = []
        for (check, _), fault in self.faults.items():
            case, error = fault.cases[0], fault.error
            if case.kind in _REFUSE and check != INPUTS:  # the fixes of the latter say it
                error.fix = f"{error.fix or 'correct the op for this input'}; or {_REFUSE[case.kind]}"
            if check in _OF_FAKES and error.where is None and self.custom_op is not None:
                fake = self.custom_op._rules.fake.fn
                error.where = None if fake is None else where(fake)
            elif check in _OF_KERNELS and error.where is None and len(case.trial.kernels) > 1:
                error.where = case.trial.place
            args, kwargs, count = case.trial.args, case.trial.kwargs, len(fault.cases)
            failures.append(Failure(self.op, check, error, label_of(case), args, kwargs, count, self.source))
        return tuple(self.results), tuple(failures), tuple(self.left_out)

    def _accepted(self) -> Iterator[Case]:
        variation = variation_of(self.custom_op)
        for number, sample in enumerate(self.samples, self.first):
            outcomes: dict[str, bool] = {}
            derived = derive(sample, variation, self.effort, number, outcomes)
            settings = Settings.now()
            probed = probe(
                self._announced(derived),
                at_most=_INPUTS[self.effort][number > 0],
                seconds=_SLOW[self.effort],
                outcomes=outcomes,
                limits=self.limits,
            )
            settings.restore()
            seconds = probed.seconds / max(len(probed.accepted) + len(probed.rejected), 1)
            for each in probed.rejected:
                if fault := self._fault_of(each.case, each.kernel_error):
                    self._fault(INPUTS, fault, each.case, seconds)
                else:
                    self._add(INPUTS, "rejected", [each.case], seconds, in_short(each.kernel_error, 200))
            if probed.is_late:
                self.left_out.append(f"inputs left out ({_SLOW[self.effort]:g} s)")
            yield from probed.accepted

    def _fault_of(self, case: Case, error: BaseException) -> CheckError | None:
        """What is wrong where a call raised `error`; None if the operator refused its inputs."""
        accident, expected, fix, trial = is_accident(error), None, None, case.trial
        of_types = (AttributeError, TypeError)
        if exceeded := self.limits.is_exceeded_by(error):
            return self._limit(exceeded, error)
        if case.kind == "sample":
            if isinstance(error, CheckError):
                return error
            problem = "the operator itself fails on its sample"
        elif isinstance(error, SystemExit):
            return self._exit()
        elif is_mistake(error):
            problem, of = "the code of the kernel is wrong: a name is not there", getattr(error, "obj", None)
            fix = "correct the name"
            if not isinstance(of, (NoneType, ModuleType, torch.Tensor)):
                fix = f"this {type(of).__name__} is taken for something else: NumPy makes numbers of arrays without "
                fix += "dimensions, np.asarray(...) arrays; or refuse such inputs, by torch._check(...)"
        elif is_alias(error):
            problem = "for some inputs the operator returns an input itself, a view of one, or the same memory twice"
            expected = "new tensors, as the schema says, or none for these inputs"
            fix = "return a clone() there; or check the inputs first, and refuse these with an error that says so"
        elif accident and case.kind == "layout" and self._takes_contiguous(trial):
            problem = "the kernel fails on a tensor that is laid out otherwise, by an error that does not say so"
            fix = "call x.contiguous() first, or .reshape() in the place of .view(); or refuse such tensors in kernel "
            fix += "and fake impl, with torch._check(x.is_contiguous(), ...)"
        elif accident and case.kind == "value" and self._is_about_values(case, error) and _is_fake_fine(trial):
            problem = "the kernel fails for some values of an input, by an error about shapes that does not say so"
            fix = "elements may be equal, and a selection by them of another size than usual; or refuse such values, "
            fix += "with torch._check(...)"
        elif accident and case.kind == "optional" and isinstance(error, of_types) and "NoneType" in str(error):
            problem = "the kernel fails where an optional argument is None"
            fix = "test `is not None`; or say by the type that it is not optional"
        elif accident and self._has_to_take(case, error) and trial.reference and attempt(trial, op=trial.reference):
            problem = "the kernel fails by an error that does not say so, on inputs that the reference takes"
            fix = "have the kernel take them; or refuse them in kernel, fake impl and reference, by torch._check(...)"
        else:
            return None
        fields = {"got": in_short(error), "expected": expected, "where": raised_at(error), "fix": fix}
        return CheckError(problem, op=self.op, **fields)

    @staticmethod
    def _has_to_take(case: Case, error: BaseException) -> bool:
        """Are inputs those of the sample but for values, or without elements and divided by a size, or indexed?"""
        is_empty = any(not tensor.numel() for tensor in case.trial.tensors)
        return case.kind in _OF_VALUES[:3] or (is_empty and isinstance(error, (ArithmeticError, LookupError)))

    def _is_about_values(self, case: Case, error: BaseException) -> bool:
        """Does a kernel fail since shapes do not fit, for other finite numbers of floating point?"""
        given = {id(tensor) for tensor in self.samples[case.sample - self.first].tensors}
        changed = [tensor for tensor in case.trial.tensors if id(tensor) not in given]
        are_numbers = all(tensor.is_floating_point() and bool(tensor.isfinite().all()) for tensor in changed)
        return self.custom_op is not None and are_numbers and bool(_SHAPES.search(str(error)))

    def _takes_contiguous(self, trial: Trial) -> bool:
        """Does an op of ours, none that makes views, take the same tensors in their ordinary layout?"""
        if self.custom_op is None or trial.schema.is_view:
            return False
        return attempt(trial.map_tensors(lambda _, x: x if is_ordinary(x) else as_ordinary(x))) is not None

    def _announced(self, cases: Iterator[Case]) -> Iterator[Case]:
        """The cases, but for those that end the process, and others like them; each is announced before it is tried."""
        crashed: set[tuple[str, str]] = set()
        for case in cases:
            family = (case.kind, _VARYING.sub("", case.label))
            error = self.avoided.get((INPUTS, self.probed))
            if error is not None:
                self._fault(INPUTS, error, case)
                crashed.add(family)
            elif family not in crashed and (case.kind == "sample" or not self.samples_only):
                self.announce(INPUTS, self.probed)
                yield case
            self.probed += 1

    def _exit(self) -> CheckError:
        fix = "raise another error: SystemExit passes by `except Exception`"
        return CheckError("the operator exits the program, with sys.exit()", op=self.op, where=self.source, fix=fix)

    def _limit(self, exceeded: str, error: BaseException) -> CheckError:
        fix = "refuse such inputs, by torch._check(...); check(timeout=, memory=) allow more"
        return CheckError(exceeded, op=self.op, where=raised_at(error) or self.source, fix=fix)

    def _attempt(self, name: str, case: Case) -> None:
        start, settings = time.perf_counter(), Settings.now()
        status, reason, fault = "passed", None, None
        try:
            sees = observe(self.reached) if name == "test_kernels" else nullcontext()  # it asks each in turn
            with self.limits.applied(times=10), sees:
                self.chosen[name](case.trial)
        except TookTooLong as late:
            fault = self._limit(f"the check did not end within {10 * self.limits.seconds:g} seconds", late)
        except NotExercised as nothing:
            status, reason = "not exercised", str(nothing)
        except CheckError as error:
            if error.problem == FAILS and case.kind != "sample":  # when gradients are recorded, say
                status, reason = "rejected", error.got
            elif error.problem == REFUSED and not (case.kind in _OF_VALUES or is_deliberate(error.__cause__ or error)):
                status, reason = "not exercised", f"the reference function does not take it: {error.got}"
            elif self._is_of_reference(name, case.trial, error):
                status, reason = "not exercised", "what is expected here does not hold for the reference either"
            elif torch_refuses(error):
                status = "not exercised"
                reason = "torch traces no operators, but its own, whose results are declared as views"
            else:
                fault = error
        except SystemExit:
            fault = self._exit()
        except Exception as error:
            status, reason = "not exercised", f"the check could not be made on this input: {in_short(error, 200)}"
        finally:
            settings.restore()  # an operator may leave them changed
        seconds = time.perf_counter() - start
        if fault is not None:
            self._fault(name, fault, case, seconds)
        else:
            self._add(name, status, [case], seconds, reason)

    def _is_of_reference(self, name: str, trial: Trial, error: CheckError) -> bool:
        """Does the same check find the same of the reference function? Then it is what the operator is to compute."""
        start = _NOT_OF_ALL.get(name)
        if trial.reference is None or start is None or not error.problem.startswith(start):
            return False
        try:
            with of_reference(trial) as reference, self.limits.applied(times=10):
                self.chosen[name](reference)
        except CheckError as other:
            return other.problem == error.problem
        except (Exception, TookTooLong):  # nothing is known of the reference then
            return False
        return False

    def _fault(self, name: str, error: CheckError, case: Case, seconds: float = 0.0) -> None:
        self._add(name, "failed", [case], seconds, error.problem)
        key = (name, _VARYING.sub("", error.problem))
        self.faults.setdefault(key, _Fault(error, [])).cases.append(case)

    def _add(
        self, check: str, status: Any, cases: Sequence[Case], seconds: float = 0.0, reason: str | None = None
    ) -> None:
        self.results += [Result(check, status, label_of(case), seconds, reason) for case in cases]

    def _shrink(self, name: str, fault: _Fault) -> None:
        latest, wanted = [fault.error], _told_by(fault.error)

        def fails(trial: Trial) -> bool:
            try:
                self.chosen[name](trial)
            except CheckError as error:
                if _told_by(error) == wanted:
                    latest.append(error)
                    return True
            except (Exception, SystemExit, TookTooLong):  # another failure: this input shows something else
                return False
            return False

        seconds = _SHRINKING * (10 if self.effort == "thorough" else 1)
        shrunk = shrink(fault.cases[0], fails, seconds, variation_of(self.custom_op))
        if shrunk is not fault.cases[0]:
            fails(shrunk.trial)
            fault.error, fault.cases[0] = latest[-1], shrunk


def _told_by(error: CheckError) -> tuple[str, str]:
    """What the reports of one fault have in common: the problem and what was raised, but for numbers and dtypes."""
    cause = error.__cause__
    raised = "" if cause is None else f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    return _VARYING.sub("", error.problem), _VARYING.sub("", raised)


def label_of(case: Case) -> str:
    """``sample 1``, or ``sample 1, x: transposed``."""
    return f"sample {case.sample + 1}" + (f", {case.label}" if case.label else "")


# In processes of their own


def isolated(run: Run) -> Iterator[Step]:
    """Make `run` in forks of this process; a step that ended one is a fault, and left out in the next."""
    if not hasattr(os, "fork"):
        raise UsageError("isolate=True needs os.fork, which this platform lacks", argument="isolate")
    if torch.cuda.is_initialized():
        problem = "isolate=True forks the process, which CUDA does not survive once it is in use"
        fix = "call check(..., isolate=True) before anything uses CUDA, or with tensors on the CPU"
        raise UsageError(problem, argument="isolate", fix=fix)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "step"
        while True:
            yield 0, 1, "in a process of its own"
            done = in_fork(lambda: _child(run, place), max(_TIMEOUT, 10 * run.limits.seconds))
            error = done.error
            if isinstance(error, IsolationError) and error.returncode is None and place.exists():
                error = run._limit(f"the operator does not return within {run.limits.seconds:g} seconds", error)
            elif isinstance(error, IsolationError) and error.returncode is not None:
                got, line = error.args[0].splitlines()[0], _line_of_crash(error.stderr)
                fix = "check the arguments before using them, and raise an error: torch._check(...)"
                error = CheckError("the operator ends the process", op=run.op, got=got, where=line, fix=fix)
            if not isinstance(error, CheckError) or not place.exists():  # or it ended before anything was tried
                run.given = done.get()
                return
            # The next fork leaves out what ended this one, and in the end all that is derived.
            run.avoided[pickle.loads(place.read_bytes())] = error
            if len(run.avoided) == _CRASHES:
                run.samples_only = True
                run.left_out.append(f"derived inputs left out: {_CRASHES} of them ended the process")
            elif len(run.avoided) > 2 * _CRASHES:
                raise UsageError("the operator ends the process on its samples", op=run.op, got=error.got)


def _child(run: Run, place: Path) -> Any:
    faulthandler.disable()  # a library may have put a handler in its place
    faulthandler.enable(2)  # says on stderr which line a crash was in
    torch.set_num_threads(1)  # the threads of the parent are not there
    signal.signal(signal.SIGINT, lambda *_: None)  # a Ctrl-C is for the parent, which ends this process

    def announce(check: str, case: int) -> None:
        place.write_bytes(pickle.dumps((check, case)))
        # Unlike what `Limits` do, this ends C++ code, too: it ends the process.
        signal.setitimer(signal.ITIMER_REAL, run.limits.seconds * (1 if check == INPUTS else 10))

    run.announce = announce
    try:
        for _ in run.steps():
            pass
    except Exception:
        raise
    except BaseException as error:  # the operator's
        problem = f"the operator raises {type(error).__name__}, which ends the program"
        fix = f"raise another error: {type(error).__name__} passes by `except Exception`"
        raise CheckError(problem, op=run.op, got=brief(error), where=raised_at(error), fix=fix) from None
    return run.outcome()


def _line_of_crash(stderr: str) -> str | None:
    """``name (file:line)`` of the innermost frame of the user's code in what `faulthandler` prints, if there is one."""
    traceback = stderr.rpartition("Fatal Python error")[2]
    for file, line, name in re.findall(r'^  File "(.+)", line (\d+) in (\S+)$', traceback, re.MULTILINE):
        is_standard = file.startswith(sysconfig.get_path("stdlib") + os.sep) and "site-packages" not in file
        if is_users(file) and not is_standard:
            return f"{name} ({file}:{line})"
    return None


# One check at a time


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
