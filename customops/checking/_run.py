"""One run of `customops.check`: the inputs, the checks on them, the faults they find."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from customops.checking.report import Failure, Result
from customops.checks._check import Check, Effort
from customops.checks._outcome import NotExercised, in_short, is_alias, torch_refuses
from customops.checks._trial import FAILS, Case, Trial
from customops.checks.inputs import Probed, derive, probe, shrink, variation_of
from customops.checks.state import Settings
from customops.errors import CheckError, users_frames, where

_ENOUGH = 3  #: inputs that show faults in one check, after which the others are not tried
_SHRINKING = 0.3  #: seconds for making the input of a fault smaller; times ten in a thorough run
INPUTS = "inputs"
_SHRINK = "shrink"
#: The checks whose faults are mostly those of the fake impl.
_OF_FAKES = ("test_faketensor", "test_symbolic_sizes")
#: What else can be done about inputs that the author did not mean to allow, by what was changed.
_REFUSE = {
    "dtype": "refuse the dtype in kernel and fake impl, with torch._check(...); "
    "fixed='dtype' of register_samples keeps others from being tried",
    "size": "refuse these sizes in kernel and fake impl, with torch._check(...); "
    "constraints= of register_samples keeps them from being tried",
}
_REFUSE["broadcast"] = _REFUSE["size"]

#: Results, failures, and what was left out.
Outcome = tuple[tuple[Result, ...], tuple[Failure, ...], tuple[str, ...]]

#: How many inputs of a sample are accepted at most.
_INPUTS: dict[Effort, int | None] = {"quick": 12, "normal": 60, "thorough": None}

#: Seconds after which a check, or the search for inputs, is ended: of slow operators, that is. It is reported.
_SLOW: dict[Effort, float] = {"quick": 2.0, "normal": 10.0, "thorough": 600.0}

#: Seconds after which nothing more is tried, but for what has begun. That is reported, too.
_LATE: dict[Effort, float] = {"quick": 10.0, "normal": 60.0, "thorough": 3600.0}


#: What differs in the messages of one cause: numbers, dtypes.
_VARYING = re.compile(r"\d+|torch\.\w+")


@dataclass(frozen=True)
class Step:
    """How far a run is, and what it does next."""

    done: int
    total: int
    what: str


@dataclass
class _Fault:
    """A fault, and the inputs that showed it."""

    error: CheckError
    cases: list[Case]


@dataclass
class Run:
    """A run of the checks `chosen` over what is derived from `samples`.

    Attributes:
        custom_op: the `CustomOpDef`, if the operator is one of customops.
        announce: is told of each check and case, by number, before it is tried.
        avoided: checks and cases, by number, that are not tried since they end the process, with what to say of them.
        samples_only: derive nothing: too much of that ends the process.
        cases: the inputs that the operator accepts, once they are known; a run that is given them does not look.
        first: the number of the first sample.
    """

    custom_op: Any
    samples: Sequence[Trial]
    chosen: Mapping[str, Check]
    effort: Effort
    announce: Callable[[str, int], object] = lambda check, case: None
    avoided: dict[tuple[str, int], CheckError] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    faults: dict[tuple[str, str], _Fault] = field(default_factory=dict)
    given: Outcome | None = None
    left_out: list[str] = field(default_factory=list)
    probed: int = 0
    samples_only: bool = False
    cases: list[Case] | None = None
    first: int = 0

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
            yield from self._steps()

    def _steps(self) -> Iterator[Step]:
        yield Step(0, 1, INPUTS)
        cases = self.cases = list(self._accepted()) if self.cases is None else self.cases
        work = [(name, list(row.inputs(cases, self.effort))) for name, row in self.chosen.items()] if cases else []
        total, done = sum(len(inputs) for _, inputs in work), 0
        start = time.perf_counter()
        for name, inputs in work:
            if time.perf_counter() - start > _LATE[self.effort]:
                self.left_out.append(f"{name}, after {_LATE[self.effort]:g} s for the others")
                continue
            found = next((check for check, _ in self.faults if check in self.chosen[name].after), None)
            if found is not None:
                self._add(name, "not exercised", inputs[:1], reason=f"{found} failed, which may be the cause")
                inputs = []
            yield from self._try_all(name, inputs, done, total)
            done += len(inputs)
        yield from self._shrink_all(total)

    def _try_all(self, name: str, inputs: Sequence[Case], done: int, total: int) -> Iterator[Step]:
        for (check, number), crash in self.avoided.items() if inputs else ():
            if check == name:  # it is not tried on others, which would start everything again
                self._fault(name, crash, inputs[min(number, len(inputs) - 1)], 0.0)
                return
        start = time.perf_counter()
        for number, case in enumerate(inputs):
            yield Step(done + number, total, name)
            self.announce(name, number)
            if self._attempt(name, case) >= _ENOUGH:
                return
            if time.perf_counter() - start > _SLOW[self.effort] and number + 1 < len(inputs):
                self.left_out.append(f"{name} on {len(inputs) - number - 1} inputs, after {_SLOW[self.effort]:g} s")
                return

    def outcome(self) -> Outcome:
        """What was found, and what was left out; of a run in another process, what that sent."""
        if self.given is not None:
            return self.given
        failures = [self._failure(check, fault) for (check, _), fault in self.faults.items()]
        return tuple(self.results), tuple(failures), tuple(self.left_out)

    # Inputs -------------------------------------------------------------------------------------------------

    def _accepted(self) -> Iterator[Case]:
        variation = variation_of(self.custom_op)
        for number, sample in enumerate(self.samples, self.first):
            derived = derive(sample, variation, self.effort, number)
            settings = Settings.now()
            probed = probe(self._announced(derived), at_most=_INPUTS[self.effort], seconds=_SLOW[self.effort])
            settings.restore()
            self._add_rejected(probed)
            if probed.is_late:
                self.left_out.append(f"inputs, after {probed.seconds:.0f} s")
            yield from probed.accepted

    def _announced(self, cases: Iterator[Case]) -> Iterator[Case]:
        """The cases, but for those that end the process, and others like them; each is announced before it is tried."""
        crashed: set[tuple[str, str]] = set()
        for case in cases:
            family = (case.kind, _VARYING.sub("", case.label))
            error = self.avoided.get((INPUTS, self.probed))
            if error is not None:
                self._fault(INPUTS, error, case, 0.0)
                crashed.add(family)
            elif family not in crashed and (case.kind == "sample" or not self.samples_only):
                self.announce(INPUTS, self.probed)
                yield case
            self.probed += 1

    def _add_rejected(self, probed: Probed) -> None:
        tried = len(probed.accepted) + len(probed.rejected)
        seconds = probed.seconds / max(tried, 1)
        for rejection in probed.rejected:
            if rejection.case.kind == "sample":
                error = rejection.kernel_error
                if not isinstance(error, CheckError):
                    problem = "the operator itself fails on its sample"
                    error = CheckError(problem, op=self.op, got=in_short(error), where=raised_at(error))
                self._fault(INPUTS, error, rejection.case, seconds)
            elif isinstance(rejection.kernel_error, SystemExit):
                self._fault(INPUTS, self._exit(), rejection.case, seconds)
            elif is_alias(rejection.kernel_error):
                error = CheckError(
                    "for some inputs the operator returns an input itself, a view of one, or the same memory twice",
                    op=self.op,
                    got=in_short(rejection.kernel_error),
                    expected="new tensors, as the schema says, or none for these inputs",
                    fix="return a clone() there; or check the inputs first, "
                    "and refuse these with an error that says so",
                )
                self._fault(INPUTS, error, rejection.case, seconds)
            else:
                self._add(INPUTS, "rejected", [rejection.case], seconds, in_short(rejection.kernel_error, 200))

    def _exit(self) -> CheckError:
        return CheckError(
            "the operator exits the program, with sys.exit()",
            op=self.op,
            where=self.source,
            fix="raise another error: SystemExit passes by `except Exception`",
        )

    # Checks -------------------------------------------------------------------------------------------------

    def _attempt(self, name: str, case: Case) -> int:
        """Run a check on an input; returns on how many inputs the check has failed."""
        start, settings = time.perf_counter(), Settings.now()
        try:
            self.chosen[name](case.trial)
        except NotExercised as nothing:
            self._add(name, "not exercised", [case], time.perf_counter() - start, str(nothing))
        except CheckError as error:
            if error.problem == FAILS and case.kind != "sample":  # when gradients are recorded, say
                self._add(name, "rejected", [case], time.perf_counter() - start, error.got)
            elif torch_refuses(error):
                reason = "torch traces no operators, but its own, whose results are declared as views"
                self._add(name, "not exercised", [case], time.perf_counter() - start, reason)
            else:
                self._fault(name, error, case, time.perf_counter() - start)
        except SystemExit:
            self._fault(name, self._exit(), case, time.perf_counter() - start)
        except Exception as error:
            reason = f"the check could not be made on this input: {in_short(error, 200)}"
            self._add(name, "not exercised", [case], time.perf_counter() - start, reason)
        else:
            self._add(name, "passed", [case], time.perf_counter() - start)
        finally:
            settings.restore()  # an operator may leave them changed
        return sum(len(fault.cases) for (check, _), fault in self.faults.items() if check == name)

    def _fault(self, name: str, error: CheckError, case: Case, seconds: float) -> None:
        self._add(name, "failed", [case], seconds, error.problem)
        key = (name, _VARYING.sub("", error.problem))
        self.faults.setdefault(key, _Fault(error, [])).cases.append(case)

    def _add(
        self, check: str, status: Any, cases: Sequence[Case], seconds: float = 0.0, reason: str | None = None
    ) -> None:
        self.results += [Result(check, status, label_of(case), seconds, reason) for case in cases]

    # Shrinking ----------------------------------------------------------------------------------------------

    def _shrink_all(self, total: int) -> Iterator[Step]:
        for number, ((name, _), fault) in enumerate(self.faults.items()):
            if name != INPUTS and (_SHRINK, number) not in self.avoided:
                yield Step(total, total, "making the inputs of faults smaller")
                self.announce(_SHRINK, number)
                self._shrink(name, fault)

    def _shrink(self, name: str, fault: _Fault) -> None:
        latest, wanted = [fault.error], _told_by(fault.error)

        def fails(trial: Trial) -> bool:
            try:
                self.chosen[name](trial)
            except CheckError as error:
                if _told_by(error) == wanted:
                    latest.append(error)
                    return True
            except (Exception, SystemExit):  # another failure: this input shows something else
                return False
            return False

        seconds = _SHRINKING * (10 if self.effort == "thorough" else 1)
        shrunk = shrink(fault.cases[0], fails, seconds, variation_of(self.custom_op))
        if shrunk is not fault.cases[0]:
            fails(shrunk.trial)
            fault.error, fault.cases[0] = latest[-1], shrunk

    def _failure(self, name: str, fault: _Fault) -> Failure:
        case = fault.cases[0]
        if case.kind in _REFUSE:
            fault.error.fix = f"{fault.error.fix or 'correct the op for this input'}; or {_REFUSE[case.kind]}"
        if name in _OF_FAKES and fault.error.where is None and self.custom_op is not None:
            fake = self.custom_op._rules.fake.fn
            fault.error.where = None if fake is None else where(fake)
        args, kwargs = case.trial.args, case.trial.kwargs
        return Failure(self.op, name, fault.error, label_of(case), args, kwargs, len(fault.cases), self.source)


def _told_by(error: CheckError) -> tuple[str, str]:
    """What the reports of one fault have in common: the problem and what was raised, but for numbers and dtypes."""
    cause = error.__cause__
    raised = "" if cause is None else f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    return _VARYING.sub("", error.problem), _VARYING.sub("", raised)


def raised_at(error: BaseException) -> str | None:
    """``name (file:line)`` of the innermost line of the user's code that was left by an error."""
    for frame in reversed(users_frames(error)):
        code = frame.tb_frame.f_code
        return f"{code.co_name} ({code.co_filename}:{frame.tb_lineno})"
    return None


def label_of(case: Case) -> str:
    """``sample 1``, or ``sample 1, x: transposed``."""
    return f"sample {case.sample + 1}" + (f", {case.label}" if case.label else "")
