"""`Branches`: which ways the code of an op went; `candidates`: inputs for which it may go others.

A kernel has a branch for large rows, one for float16, one for a list of none. An input that no guess makes is found by
trying many, each once, with the kernel and the fake impl alone: two changes at once, and changes of what reached
something new. Conditional jumps are followed, not lines, as `a if n > 8 else b` is one line.
"""

from __future__ import annotations

import collections
import dis
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from customops.checks._trial import Case, Trial
from customops.checks.inputs import shapes, values
from customops.checks.inputs.constants import constants_of, functions_of
from customops.checks.inputs.parts import NORMAL, QUICK, Parts, Variation, in_turn

_TOOL = 4  #: a number of `sys.monitoring` that no tool of Python's own has


class Branches:
    """The conditional jumps of the code of an op, and where they went."""

    def __init__(self, trial: Trial) -> None:
        fake = [] if trial.custom_op is None else [trial.custom_op._rules.fake.fn]
        self.jumps: dict[types.CodeType, set[int]] = {}
        for function in functions_of([*trial.kernels, *fake]):
            codes = [function.__code__]
            for code in codes:
                codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
                is_jump = {each.offset for each in dis.get_instructions(code) if _is_conditional(each.opname)}
                if is_jump:
                    self.jumps[code] = is_jump
        self.seen: set[tuple[types.CodeType, int, int]] = set()

    @property
    def is_complete(self) -> bool:
        """Went all of them both ways?"""
        return len(self.seen) >= 2 * sum(map(len, self.jumps.values()))

    @contextmanager
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
            try:
                for kind in kinds:
                    monitoring.register_callback(_TOOL, kind, self._went)
                for code in self.jumps:
                    monitoring.set_local_events(_TOOL, code, sum(kinds))
                yield
            finally:
                for code in self.jumps:
                    monitoring.set_local_events(_TOOL, code, 0)
                monitoring.free_tool_id(_TOOL)

    def _went(self, code: types.CodeType, jump: int, to: int) -> None:
        if jump in self.jumps[code]:
            self.seen.add((code, jump, to))

    def _trace(self, frame: Any, event: str, _argument: Any) -> Any:
        """For Python before 3.12, which has no `sys.monitoring`."""
        if event != "call" or frame.f_code not in self.jumps:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before = -1

        def follow(frame: Any, event: str, _argument: Any) -> Any:
            nonlocal before
            if event == "opcode":
                if before in self.jumps[frame.f_code]:
                    self.seen.add((frame.f_code, before, frame.f_lasti))
                before = frame.f_lasti
            return follow

        return follow


def _is_conditional(opname: str) -> bool:
    return "JUMP" in opname and "_IF_" in opname


def candidates(accepted: Sequence[Case], variation: Variation, found: Sequence[Case]) -> Iterator[Case]:
    """Inputs with two changes, those of what was `found` first: it grows while they are tried."""
    steps = [case for case in accepted if case.kind in ("number", "choice", "optional", "list", "dtype", "value")]
    waiting = collections.deque(_changed(case, variation) for case in steps)
    changed = 0
    while waiting or changed < len(found):
        waiting.extendleft(_changed(case, variation) for case in found[changed:])
        changed = len(found)
        cases = waiting.popleft()
        if (case := next(cases, None)) is not None:
            waiting.append(cases)
            yield case


def _changed(case: Case, variation: Variation) -> Iterator[Case]:
    """What can be made of an input by another change."""
    parts = Parts(case.trial, variation)
    named = constants_of(case.trial)
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
