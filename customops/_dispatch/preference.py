"""Which kernels are preferred, by their names: in a scope of a thread, by the environment, and by a deployment's file.

A preference is a table: ops, as ``mylib::norm`` or ``mylib::*`` -> names of kernels, the first one first.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch.compiler import is_dynamo_compiling

from customops import _torch
from customops._dispatch.registrations import lock
from customops._places import user_source
from customops._torch.library import OpOverload, OpOverloadPacket
from customops.errors import RegistrationError, brief

__tracebackhide__ = True  # pytest leaves the frames out

log = logging.getLogger("customops")

#: The table of one preference: pairs of a pattern and names.
Table = tuple[tuple[str, tuple[str, ...]], ...]
#: Tables, the one that counts most first. Equal ones are one object, so that comparing them takes no time.
Tables = tuple[Table, ...]

#: Those of the scopes that are open here.
_open: ContextVar[Tables] = ContextVar("customops.preferences", default=())
#: Reads them: generated code calls it.
here = _open.get

#: All patterns that a scope ever had: an op that one fits looks for preferences in each call from then on.
_patterns: set[str] = set()
#: The tables that scopes had.
_entered: set[Table] = set()
#: What is told of a new pattern, and of choices that were stored: ``preferences_changed()``, ``choices_changed(ops)``.
listeners: weakref.WeakSet[Any] = weakref.WeakSet()


@_torch.dynamo.outside_dynamo
def prefer(preferences: Mapping[Any, str | Sequence[str]], /) -> AbstractContextManager[None]:
    """Prefer some kernels of ops, by their names, while the context lasts, in this thread (and asyncio task).

    A kernel that is preferred comes before the others; its ``when=`` still counts. What is preferred and cannot be used
    is logged once. An inner context counts more than an outer one, and both more than the environment
    (``CUSTOMOPS_PREFER="mylib::*=triton,reference; mylib::norm=v2"``) and the file that ``CUSTOMOPS_PREFER_FILE``
    names, which has such a rule on each line.

    Args:
        preferences: an op, its name, or a pattern of names -> the name of a kernel, or names, the first one first. Of
            the patterns that fit an op the longest one counts, and the name of an op more than a pattern.
            ``"default"`` is the kernel that was registered without a name, ``"reference"`` the op's reference.

    Raises:
        RegistrationError: it is not such a table.

    Example:
        >>> with customops.prefer({"mylib::*": ["triton", "reference"]}):
        ...     mylib.norm(x)
    """
    table = _table(preferences.items() if isinstance(preferences, Mapping) else None, brief(preferences))
    if is_dynamo_compiling():
        problem = "a preference cannot be entered in compiled code, whose kernels are chosen when it is traced"
        fix = "call the compiled function inside prefer(): it is compiled for each preference"
        _torch.dynamo.stop_tracing(RegistrationError, problem, table[0][0], fix)
    if table not in _entered:
        choose_from_now_on(pattern for pattern, _ in table)
        _entered.add(table)  # not before: another thread that enters it goes on when all ops know of it
    return _scope(table)


def choose_from_now_on(patterns: Iterable[str]) -> None:
    """Have the ops that a pattern fits look for preferences in each call, also where there is nothing to choose yet."""
    with lock:
        new = {*patterns} - _patterns
        if new:
            _patterns.update(new)
            for listener in list(listeners):
                listener.preferences_changed()


@contextmanager
@_torch.dynamo.outside_dynamo
def _scope(table: Table) -> Iterator[None]:
    token = _open.set(_inside(table, here()))
    try:
        yield
    finally:
        _open.reset(token)


def listen(listener: Any) -> None:
    listeners.add(listener)


#: The scopes that were open, so that equal ones are one object. (Dynamo, which may trace this, warns of lru_cache.)
_scopes: dict[Tables, Tables] = {}


def _inside(table: Table, outer: Tables) -> Tables:
    if len(_scopes) >= 1024:
        _scopes.clear()
    return _scopes.setdefault((table, *outer), (table, *outer))


def _table(items: Iterable[tuple[Any, Any]] | None, got: str, place: str | None = None) -> Table:
    table: list[tuple[str, tuple[str, ...]]] = []
    for pattern, given in items if items is not None else [(None, None)]:
        names: Any = (given,) if isinstance(given, str) else given
        if isinstance(pattern, (OpOverload, OpOverloadPacket)):
            pattern = str(pattern).removesuffix(".default").replace(".", "::", 1)
        pattern = getattr(pattern, "_qualname", pattern)  # of an op that need not be defined yet
        is_list = isinstance(names, (list, tuple)) and names and all(map(is_name, names))
        if not (isinstance(pattern, str) and "::" in pattern and is_list):
            raise RegistrationError(
                "a preference is a table of ops and names of kernels",
                expected='{"mylib::*": ["triton", "reference"]}' if place is None else "mylib::* = triton, reference",
                got=got if items is None or place else f"{brief(pattern)}: {brief(names)}",
                where=place or user_source(),
            )
        table.append((pattern, tuple(names)))
    return tuple(sorted(table, key=lambda item: ("*" in item[0], -len(item[0]))))


def is_name(name: Any) -> bool:
    """Is this what a kernel can be called?"""
    return isinstance(name, str) and bool(name) and not set(name) & set("*,;=#[] ")


def concerns(op: str) -> bool:
    """May anything be preferred for an op?"""
    return any(_fits(pattern, op) for pattern in _patterns) or bool(names_for(op, ()))


def names_for(op: str, scopes: Tables) -> tuple[str, ...]:
    """The names of the kernels that are preferred for an op, the one that counts most first."""
    tables = (*scopes, *_of_process())
    found = (next((names for pattern, names in table if _fits(pattern, op)), ()) for table in tables)
    return tuple(dict.fromkeys(name for names in found for name in names))


def preferred_by_name(op: str, scopes: Tables) -> tuple[str, ...]:
    """The names of the kernels that are preferred for an op by its own name, not by a pattern."""
    return tuple(
        name for table in (*scopes, *_of_process()) for pattern, names in table if pattern == op for name in names
    )


def _fits(pattern: str, op: str) -> bool:
    """Does a pattern fit an op? One without an overload fits all overloads: an out variant is one."""
    return fnmatchcase(op, pattern) or ("." not in pattern and fnmatchcase(op.partition(".")[0], pattern))


def _of_process() -> Tables:
    """What the environment says, and the file that it names."""
    text, file = os.environ.get("CUSTOMOPS_PREFER"), os.environ.get("CUSTOMOPS_PREFER_FILE")
    tables = [_parsed(text, "CUSTOMOPS_PREFER")] if text else []
    return (*tables, _read(file)) if file else tuple(tables)


@functools.lru_cache(maxsize=8)
def _read(file: str) -> Table:
    try:
        return _parsed(Path(file).read_text("utf-8"), file)
    except OSError as error:
        raise RegistrationError(
            "the file of CUSTOMOPS_PREFER_FILE cannot be read", got=str(error), fix="correct the path, or unset it"
        ) from error


@functools.lru_cache(maxsize=8)
def _parsed(text: str, place: str) -> Table:
    """The rules of a text: ``mylib::* = triton, reference``, each on its line or after a semicolon; ``#`` comments."""
    table: list[tuple[Any, Any]] = []
    for i, line in enumerate(text.splitlines(), 1):
        for rule in filter(None, map(str.strip, line.partition("#")[0].split(";"))):
            pattern, _, names = rule.partition("=")
            rules = _table([(pattern.strip(), [each.strip() for each in names.split(",")])], rule, f"{place}:{i}")
            table += rules
    return tuple(sorted(table, key=lambda item: ("*" in item[0], -len(item[0]))))
