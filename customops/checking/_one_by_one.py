"""The checks of one sample, one by one: for tests that are one check each."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from customops._op import CustomOpDef
from customops.checking._check import is_isolated, trials_of
from customops.checking._isolated import isolated
from customops.checking._run import INPUTS, Run
from customops.checking.report import Report
from customops.checks import CHECKS
from customops.checks._check import Effort
from customops.checks._inputs import alone


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
        if check not in self._reports:
            self._reports[check] = self._made(check)
        return self._reports[check]

    def explained_by(self, check: str, among: Collection[str]) -> str | None:
        """One of these checks that fails, too, and whose failure may be the cause of this one's."""
        return next((name for name in CHECKS[check].after if name in among and self.report(name).failures), None)

    def _made(self, check: str) -> Report:
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
        return Report(
            run.op,
            run.effort,
            tuple(result for result in results if result.check == check),
            tuple(failure for failure in failures if failure.check == check),
            left_out,
            time.perf_counter() - start,
            run.source,
        )
