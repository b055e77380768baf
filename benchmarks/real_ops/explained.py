"""What `customops.check` says of ops that others wrote, and why that is no false alarm.

Each row was looked at by a person. A fault has a program that shows it without customops; it is run with what
`programs.py` defines. Where there is none, `why` says what allows the op to do as it does.
"""

from __future__ import annotations

from dataclasses import dataclass

FAKE = "test_faketensor"
PROMISES = "the fake impl promises what the operator does not return"
REFUSES = ""  #: the name of the op comes first in such a problem
LOOP = "vmap gives another result than a loop"
CRASH = "the operator ends the process"


@dataclass(frozen=True)
class Explained:
    """A finding that is understood.

    Attributes:
        ops: names of ops, without the overload: ``aten::add`` stands for all its overloads.
        check: the check that reports it.
        problem: how the problem begins.
        why: what is at fault, or what allows it.
        shown_by: a program that raises an error once the fault is mended.
        crashes: the program ends its process.
    """

    ops: tuple[str, ...]
    check: str
    problem: str
    why: str
    shown_by: str = ""
    crashes: bool = False

    def matches(self, op: str, check: str, problem: str) -> bool:
        known = op in self.ops or op.partition(".")[0] in self.ops
        begin = f"{op.replace('::', '.')}" if self.problem == REFUSES else self.problem
        return known and check == self.check and problem.startswith(begin)


def row(ops: str, check: str, problem: str, why: str, shown_by: str = "", crashes: bool = False) -> Explained:
    return Explained(tuple(ops.split()), check, problem, why, shown_by, crashes)
