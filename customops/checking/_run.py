"""A run of the checks over the inputs that are derived from samples."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from customops._describe.render import plural
from customops._dispatch.current_kernel import observe
from customops._places import is_deliberate
from customops.checking._faults import (
    OF_VALUES,
    VARYING,
    complete,
    exceeds,
    exits,
    fault_of_call,
    identity_of,
    is_of_reference,
)
from customops.checking.report import KERNELS, Failure, Result
from customops.checks._limits import Limits, TookTooLong
from customops.checks._outcome import NotExercised, in_short, processor_time, torch_refuses
from customops.checks._table import Check
from customops.checks._trial import FAILS, Case, Effort, Trial
from customops.checks.inputs import derive, probe, shrink, variation_of
from customops.checks.kernels import REFUSED, Reached
from customops.checks.repeat import Settings
from customops.errors import CheckError

__tracebackhide__ = True  # pytest leaves the frames out

_ENOUGH = 3  #: inputs that show faults in one check, after which the others are not tried
_SHRINKING = 0.3  #: seconds for making the input of a fault smaller; times ten in a thorough run
INPUTS = "inputs"
_SHRINK = "shrink"
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
            if check != INPUTS:  # the fixes of the latter say it
                complete(error, check, case, self.custom_op)
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
                if fault := fault_of_call(each.case, each.kernel_error, sample, self.limits, self.custom_op):
                    self._fault(INPUTS, fault, each.case, seconds)
                else:
                    self._add(INPUTS, "rejected", [each.case], seconds, in_short(each.kernel_error, 200))
            if probed.is_late:
                self.left_out.append(f"inputs left out ({_SLOW[self.effort]:g} s)")
            yield from probed.accepted

    def _announced(self, cases: Iterator[Case]) -> Iterator[Case]:
        """The cases, but for those that end the process, and others like them; each is announced before it is tried."""
        crashed: set[tuple[str, str]] = set()
        for case in cases:
            family = (case.kind, VARYING.sub("", case.label))
            error = self.avoided.get((INPUTS, self.probed))
            if error is not None:
                self._fault(INPUTS, error, case)
                crashed.add(family)
            elif family not in crashed and (case.kind == "sample" or not self.samples_only):
                self.announce(INPUTS, self.probed)
                yield case
            self.probed += 1

    def _attempt(self, name: str, case: Case) -> None:
        start, settings = time.perf_counter(), Settings.now()
        status, reason, fault = "passed", None, None
        try:
            sees = observe(self.reached) if name == "test_kernels" else nullcontext()  # it asks each in turn
            with self.limits.applied(times=10), sees:
                self.chosen[name](case.trial)
        except TookTooLong as late:
            problem = f"the check did not end within {10 * self.limits.seconds:g} seconds"
            fault = exceeds(problem, late, self.op, self.source)
        except NotExercised as nothing:
            status, reason = "not exercised", str(nothing)
        except CheckError as error:
            if error.problem == FAILS and case.kind != "sample":  # when gradients are recorded, say
                status, reason = "rejected", error.got
            elif error.problem == REFUSED and not (case.kind in OF_VALUES or is_deliberate(error.__cause__ or error)):
                status, reason = "not exercised", f"the reference function does not take it: {error.got}"
            elif is_of_reference(name, self.chosen[name], case.trial, error, self.limits):
                status, reason = "not exercised", "what is expected here does not hold for the reference either"
            elif torch_refuses(error):
                status = "not exercised"
                reason = "torch traces no operators, but its own, whose results are declared as views"
            else:
                fault = error
        except SystemExit:
            fault = exits(self.op, self.source)
        except Exception as error:
            status, reason = "not exercised", f"the check could not be made on this input: {in_short(error, 200)}"
        finally:
            settings.restore()  # an operator may leave them changed
        seconds = time.perf_counter() - start
        if fault is not None:
            self._fault(name, fault, case, seconds)
        else:
            self._add(name, status, [case], seconds, reason)

    def _fault(self, name: str, error: CheckError, case: Case, seconds: float = 0.0) -> None:
        self._add(name, "failed", [case], seconds, error.problem)
        key = (name, VARYING.sub("", error.problem))
        self.faults.setdefault(key, _Fault(error, [])).cases.append(case)

    def _add(
        self, check: str, status: Any, cases: Sequence[Case], seconds: float = 0.0, reason: str | None = None
    ) -> None:
        self.results += [Result(check, status, label_of(case), seconds, reason) for case in cases]

    def _shrink(self, name: str, fault: _Fault) -> None:
        latest, wanted = [fault.error], identity_of(fault.error)

        def fails(trial: Trial) -> bool:
            try:
                self.chosen[name](trial)
            except CheckError as error:
                if identity_of(error) == wanted:
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


def label_of(case: Case) -> str:
    """``sample 1``, or ``sample 1, x: transposed``."""
    return f"sample {case.sample + 1}" + (f", {case.label}" if case.label else "")
