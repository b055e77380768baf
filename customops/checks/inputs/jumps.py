"""`jumps_of`: the conditional jumps of a function that the inputs of an operator may decide.

An input whose way ends in an exception is not accepted, so none is searched for. No input changes a flag of the module,
or makes None of what is never None.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from customops.checks.inputs.constants import cells_of

_RETURNS = ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE")
_RAISES = ("RAISE_VARARGS", "RERAISE")
_MATCHES = ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH")  #: of `except ValueError:`


def jumps_of(
    function: Callable[..., Any], has_none: bool, has_types: bool
) -> Iterator[tuple[types.CodeType, dict[int, int]]]:
    """By the code of a function and those within it: how many ways, one or two, each jump can go, by its offset.

    Args:
        has_none: an argument of the operator may be None.
        has_types: an argument may have one of several types.
    """
    codes: list[types.CodeType] = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    bytecodes = {code: [*dis.get_instructions(code)] for code in codes}
    is_set = {each.argval for found in bytecodes.values() for each in found if each.opname.startswith("STORE_")}
    flags = {
        (load, name): bool(value)
        for load, names in (("LOAD_GLOBAL", function.__globals__), ("LOAD_DEREF", cells_of(function)))
        for name, value in names.items()
        if name not in is_set and isinstance(value, bool | int | float | str | None)
    }
    for code, instructions in bytecodes.items():
        yield code, dict(_Code(code, instructions, flags).jumps(has_none, has_types))


class _Code:
    """The ways through one code object."""

    def __init__(
        self, code: types.CodeType, instructions: Sequence[dis.Instruction], flags: Mapping[tuple[str, str], bool]
    ) -> None:
        self.instructions, self.flags = instructions, flags
        self.at = {each.offset: i for i, each in enumerate(self.instructions)}
        entries = getattr(dis.Bytecode(code), "exception_entries", None)
        if entries is None:  # Python 3.10
            tries = [each for each in self.instructions if each.opname == "SETUP_FINALLY"]
            self.handlers = [(range(each.offset, each.argval), self.at[each.argval]) for each in tries]
        else:
            self.handlers = [(range(each.start, each.end), self.at[each.target]) for each in entries]
        self.ways = [self._ways(i) for i in range(len(self.instructions))]
        starts = [0, *(self.at[each.argval] for each in self.instructions if each.opname.startswith("SETUP_"))]
        self.reached = _closure([*starts, *(target for _, target in self.handlers)], self.ways)
        back: list[list[int]] = [[] for _ in self.ways]
        for i, ways in enumerate(self.ways):
            for way in ways:
                back[way].append(i)
        self.returning = _closure([i for i, e in enumerate(self.instructions) if e.opname in _RETURNS], back)

    def jumps(self, has_none: bool, has_types: bool) -> Iterator[tuple[int, int]]:
        """The offset of each conditional jump that inputs may decide, and the number of ways that can return."""
        for i, each in enumerate(self.instructions):
            if not _is_conditional(each.opname) or i not in self.reached or len(self.ways[i]) < 2:
                continue
            if (not has_none and self._is_about_none(i)) or (not has_types and self._is_about_a_type(i)):
                continue
            count = sum(way in self.returning for way in self.ways[i])
            is_match = each.opname in _MATCHES or self.instructions[i - 1].opname in _MATCHES
            if count == 2 or (count == 1 and is_match):
                yield each.offset, count

    def _ways(self, i: int) -> list[int]:
        """What may come after an instruction."""
        each = self.instructions[i]
        if each.opname in _RETURNS[:2]:
            return []
        if each.opname in _RAISES:
            caught = [to for within, to in self.handlers if each.offset in within]
            # Almost no `with` keeps an exception to itself.
            return [to for to in caught if self.instructions[to + 1].opname != "WITH_EXCEPT_START"]
        after = [i + 1] if i + 1 < len(self.instructions) else []
        if each.opcode not in (*dis.hasjrel, *dis.hasjabs) or each.opname.startswith("SETUP_"):
            return after
        target = self.at[each.argval]
        if _is_conditional(each.opname):
            flag = self._flag(i)
            return [*after, target] if flag is None else [target] if flag is ("TRUE" in each.opname) else after
        return [*after, target] if each.opname in ("FOR_ITER", "SEND") else [target]

    def _flag(self, i: int) -> bool | None:
        """Of a jump that looks at a constant of the module, or of a function around: is it true?"""
        is_negated, before = False, i - 1
        while self.instructions[before].opname in ("TO_BOOL", "UNARY_NOT"):
            is_negated ^= self.instructions[before].opname == "UNARY_NOT"
            before -= 1
        loaded = self.instructions[before]
        is_plain = not any(each.is_jump_target for each in self.instructions[before + 1 : i + 1])
        is_of_truth = "TRUE" in self.instructions[i].opname or "FALSE" in self.instructions[i].opname
        flag = self.flags.get((loaded.opname, loaded.argval)) if is_plain and is_of_truth else None
        return None if flag is None else flag is not is_negated

    def _is_about_none(self, i: int) -> bool:
        is_op, const = self.instructions[i - 1], self.instructions[i - 2]
        return "NONE" in self.instructions[i].opname or (is_op.opname == "IS_OP" and const.argval is None)

    def _is_about_a_type(self, i: int) -> bool:
        for each in reversed(self.instructions[max(i - 12, 0) : i]):
            if each.opname == "LOAD_GLOBAL" and each.argval == "isinstance":
                return True
            if each.opname.startswith(("STORE_", "RETURN_", "POP_TOP")) or _is_conditional(each.opname):
                return False
        return False


def _closure(starts: Sequence[int], ways: Sequence[Sequence[int]]) -> set[int]:
    found, waiting = set[int](), list(starts)
    while waiting:
        if (i := waiting.pop()) not in found:
            found.add(i)
            waiting += ways[i]
    return found


def _is_conditional(opname: str) -> bool:
    return "JUMP" in opname and "_IF_" in opname
