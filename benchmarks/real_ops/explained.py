"""What `customops.check` says of ops that others wrote, and why that is no false alarm.

Each row was looked at by a person: it has a program that shows the fault without customops, or names what the op
declares that allows what it does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explained:
    """A finding that is understood.

    Attributes:
        ops: names of ops, without the overload: ``aten::add`` stands for all its overloads.
        check: the check that reports it.
        problem: how the problem begins.
        why: whose fault it is, or which declaration allows it.
        shown_by: a program that fails an assertion once the fault is mended; for a declared exception there is none.
    """

    ops: tuple[str, ...]
    check: str
    problem: str
    why: str
    shown_by: str = ""

    def matches(self, op: str, check: str, problem: str) -> bool:
        known = op in self.ops or op.partition(".")[0] in self.ops
        return known and check == self.check and problem.startswith(self.problem)


EXPLAINED: list[Explained] = []


def explanation(op: str, check: str, problem: str) -> Explained | None:
    return next((row for row in EXPLAINED if row.matches(op, check, problem)), None)
