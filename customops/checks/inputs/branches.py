"""`Branches`: which ways the code of an op went; `candidates`: inputs for which it may go others.

A kernel has a branch for large rows, one for float16, one for a list of none. An input that no guess makes is found by
trying many, each once, with the kernel and the fake impl alone: two changes at once, and changes of what reached
something new. Conditional jumps are followed, not lines, as `a if n > 8 else b` is one line.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from customops.checks._trial import Case, Trial
from customops.checks.inputs import shapes, values
from customops.checks.inputs.constants import Constants, constants_of, functions_of
from customops.checks.inputs.jumps import jumps_of
from customops.checks.inputs.parts import NORMAL, QUICK, Parts, Variation, in_turn

_TOOL = 4  #: a number of `sys.monitoring` that no tool of Python's own has


class Branches:
    """The conditional jumps of the code of an op, and where they went."""

    def __init__(self, trial: Trial) -> None:
        self._fake: Any = None if trial.custom_op is None else trial.custom_op._rules.fake.fn
        types_ = [argument.type for argument in trial.schema.arguments]
        self._has_none = any("?" in each for each in types_)
        #: Has an argument values of several types? The schema shows those of a number alone.
        self._has_types = any("Scalar" in e for e in types_) or getattr(trial.custom_op, "_lowering", None) is not None
        #: The ways that were seen, by code and place; a jump that went all that there are is left out.
        self.jumps: dict[types.CodeType, dict[int, set[int]]] = {}
        self._ways: dict[types.CodeType, dict[int, int]] = {}  #: how many there are
        self.count = 0  #: of ways that were seen
        self._add(trial.kernels)
        of_kernels = set(self.jumps)
        self._add([self._fake] if self._fake is not None else [])
        self._of_fake = self.jumps.keys() - of_kernels  #: alone
        self._seen_by_fake: set[str] = set()

    def _add(self, functions: Sequence[Any]) -> None:
        for function in functions_of(functions):
            for code, ways in jumps_of(function, self._has_none, self._has_types):
                if ways:
                    self.jumps[code], self._ways[code] = {jump: set() for jump in ways}, ways

    @property
    def is_complete(self) -> bool:
        """Was each way seen?"""
        return not self.jumps

    def run_fake(self, trial: Trial) -> None:
        """Call the fake impl if there are jumps in it alone, on tensors without data, which are cheaper than fakes.

        It goes the same way for inputs that differ in their data alone.
        """
        if self._of_fake.isdisjoint(self.jumps) or trial.without_data in self._seen_by_fake:
            return
        self._seen_by_fake.add(trial.without_data)
        with contextlib.suppress(Exception):  # it may refuse them, or need a fake
            bare = trial.map_tensors(
                lambda _, x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            )
            self._fake(*bare.args, **bare.kwargs)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """What the block runs is added to what was seen."""
        monitoring: Any = getattr(sys, "monitoring", None)
        if not self.jumps or (monitoring is not None and monitoring.get_tool(_TOOL) is not None):
            yield
        elif monitoring is None:
            before = sys.gettrace()
            sys.settrace(self._trace)
            try:
                yield
            finally:
                sys.settrace(before)
        else:
            events = monitoring.events
            kinds = [events.BRANCH_LEFT, events.BRANCH_RIGHT] if hasattr(events, "BRANCH_LEFT") else [events.BRANCH]
            monitoring.use_tool_id(_TOOL, "customops.check")
            codes = list(self.jumps)
            try:
                for kind in kinds:
                    monitoring.register_callback(_TOOL, kind, self._went)
                for code in codes:
                    monitoring.set_local_events(_TOOL, code, sum(kinds))
                yield
            finally:
                for code in codes:
                    monitoring.set_local_events(_TOOL, code, 0)
                monitoring.free_tool_id(_TOOL)

    def _went(self, code: types.CodeType, jump: int, to: int) -> None:
        jumps = self.jumps.get(code, {})
        ways = jumps.get(jump)
        if ways is None or to in ways:
            return
        ways.add(to)
        self.count += 1
        if len(ways) == self._ways[code][jump]:
            del jumps[jump]
        if not jumps:
            del self.jumps[code]

    def _trace(self, frame: Any, event: str, _argument: Any) -> Any:
        """For Python before 3.12, which has no `sys.monitoring`."""
        if event != "call" or frame.f_code not in self.jumps:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before = -1

        def follow(frame: Any, event: str, _argument: Any) -> Any:
            nonlocal before
            if event == "opcode":
                self._went(frame.f_code, before, frame.f_lasti)
                before = frame.f_lasti
            return follow

        return follow


def candidates(accepted: Sequence[Case], variation: Variation, found: Sequence[Case]) -> Iterator[Case]:
    """Inputs with two changes, those of what was `found` first: it grows while they are tried."""
    steps = [case for case in accepted if case.kind in ("number", "choice", "optional", "list", "dtype", "value")]
    named = constants_of(accepted[0].trial)
    waiting = collections.deque(_changed(case, variation, named) for case in steps)
    changed = 0
    while waiting or changed < len(found):
        waiting.extendleft(_changed(case, variation, named) for case in found[changed:])
        changed = len(found)
        cases = waiting.popleft()
        if (case := next(cases, None)) is not None:
            waiting.append(cases)
            yield case


def _changed(case: Case, variation: Variation, named: Constants) -> Iterator[Case]:
    """What can be made of an input by another change."""
    parts = Parts(case.trial, variation)
    found = in_turn(
        [
            shapes.named_sizes(parts, named.sizes),
            values.numbers(parts, NORMAL),
            values.numbers(parts, QUICK),
            values.named_numbers(parts, named),
            shapes.sizes(parts, QUICK),
            shapes.sizes(parts, NORMAL),
            values.optionals(parts, QUICK),
            values.dtypes(parts, QUICK),
            values.named_values(parts, named),
            values.values(parts, NORMAL),
        ]
    )
    for other in found:
        yield replace(other, label=f"{case.label}; {other.label}" if case.label else other.label, sample=case.sample)
