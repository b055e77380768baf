"""`constants_of`: the numbers, strings and dtypes that the code of an op mentions.

A kernel decides by them: `if n > 1024`, `if mode == "mean"`, `if x.dtype is torch.float16`. So they are sizes, values
and dtypes to try, which no guess would hit.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from customops._places import innermost, is_users
from customops.checks._trial import Trial

#: So many functions are read of an op, and so many numbers and words are used.
_MOST_FUNCTIONS, _MOST = 40, 12


@dataclass
class Constants:
    """What the code mentions, each once, in the order of the code."""

    ints: dict[int, None] = field(default_factory=dict)
    floats: dict[float, None] = field(default_factory=dict)
    strings: dict[str, None] = field(default_factory=dict)
    dtypes: dict[torch.dtype, None] = field(default_factory=dict)

    def add(self, value: Any) -> None:
        if isinstance(value, (tuple, frozenset, list, set)):
            for each in value:
                self.add(each)
        elif type(value) is int and len(self.ints) < _MOST:
            self.ints[value] = None
        elif type(value) is float and value == value and len(self.floats) < _MOST:
            self.floats[value] = None
        elif type(value) is str and 0 < len(value) <= 32 and " " not in value and len(self.strings) < _MOST:
            self.strings[value] = None
        elif isinstance(value, torch.dtype):
            self.dtypes[value] = None

    @property
    def sizes(self) -> list[int]:
        """Sizes at which code may do something else, and those right after."""
        named = [n for n in self.ints if 3 <= n <= 70_000]
        return list(dict.fromkeys(size for n in named for size in (n + 1, n)))


def constants_of(trial: Trial) -> Constants:
    """What the kernels, the fake impl, the rules and the user's functions that they call mention."""
    custom = trial.custom_op
    functions: list[Any] = trial.kernels
    if custom is not None:
        rules = custom._rules
        formulas = [formula for formula in rules.autograd.formulas.values() if formula is not None]
        functions += [rules.fake.fn, *rules.vmap.values.values()]
        functions += [fn for formula in formulas for fn in (formula.fn, formula.setup_context)]
    found = Constants()
    for function in functions_of(functions):
        found.add([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        for value in _values(function):
            found.add(value)
    return found


def functions_of(functions: Iterable[Any]) -> Iterator[types.FunctionType]:
    """These functions, and the user's functions that they refer to."""
    waiting, seen = [each for each in functions if each is not None], set[int]()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function = innermost(waiting.pop(0))
        function = getattr(function, "fn", None) or getattr(function, "py_func", None) or function  # Triton's, numba's
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function.__code__) in seen:
            continue
        if not is_users(function.__code__.co_filename):
            continue
        seen.add(id(function.__code__))
        yield function
        waiting += [value for value in _values(function) if callable(value) and not isinstance(value, type)]


def _values(function: Callable[..., Any]) -> Iterator[Any]:
    """The constants of a function and of those within it, and what it refers to outside."""
    codes: list[types.CodeType] = [function.__code__]
    known = {**function.__globals__, **_cells_of(function)}
    while codes:
        code = codes.pop(0)
        for const in code.co_consts[1 if code.co_consts[:1] == (getattr(function, "__doc__", None),) else 0 :]:
            if isinstance(const, types.CodeType):
                codes.append(const)
            else:
                yield const
        for name in (*code.co_names, *code.co_freevars):
            dtype = getattr(torch, name, None)
            yield dtype if isinstance(dtype, torch.dtype) else known.get(name)


def _cells_of(function: Any) -> dict[str, Any]:
    """The variables of functions around it."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    return found
