"""Decompositions: plain torch code that compilers put in the place of a call of the op.

inductor takes the op apart below autograd, so its formula still counts; then the code is fused with what is around it.
Export does so when a program is decomposed (``program.run_decompositions()``). For all others the op stays whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from customops import _compat
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Group, Registration, Slots, Undo
from customops._rules.compilers import Equivalent, check_functional
from customops.errors import RegistrationError, brief

#: Who takes an op apart; or a predicate of the arguments, where it is true: inductor and export.
When = Literal["inductor", "export"] | Callable[..., bool]

_COMPILERS = ("inductor", "export")


class DecompositionRule:
    """compiler -> the decomposition for it, and the predicate that says where it is one, or None for everywhere."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._slots: Slots[str, tuple[Equivalent, Equivalent | None]] = Slots(self._install_for, self._recompile)

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        self._slots.reset()

    def traced(self) -> Any:
        return {
            compiler: (fn.fn, None if applies is None else applies.fn)
            for compiler, (fn, applies) in self._slots.values.items()
        }

    def equivalents(self) -> list[Fn]:
        """What must compute the same as the op. Each returns NotImplemented where it does not apply."""
        return [functools.partial(self._decompose, compiler) for compiler in self._slots.values]

    def register(self, fn: Fn, when: Any) -> Registration:
        check_functional(self.operator, "a decomposition")
        if not callable(when) and when not in _COMPILERS:
            raise RegistrationError(
                "when= has an invalid value",
                op=self.operator.qualname,
                expected='"inductor", "export" or a predicate of the arguments',
                got=brief(when),
            )
        decomposition = Equivalent(self.operator, fn, "decomposition")
        if not callable(when):
            return self._slots.set(when, (decomposition, None))
        applies = Equivalent(self.operator, when, "predicate")
        return Group([self._slots.set(compiler, (decomposition, applies)) for compiler in _COMPILERS])

    def _install_for(self, compiler: str, own_library: bool) -> Undo:
        undo = _compat.inductor_rules.decompose(
            self.operator.overload, compiler, functools.partial(self._trace, compiler)
        )
        self.operator.on_removal.append(undo)
        return undo

    def _trace(self, compiler: str, /, *args: Any, **kwargs: Any) -> Any:
        fn = self._applicable(compiler, args, kwargs)
        return NotImplemented if fn is None else fn.substitute(args, kwargs)

    def _decompose(self, compiler: str, /, *args: Any, **kwargs: Any) -> Any:
        fn = self._applicable(compiler, args, kwargs)
        return NotImplemented if fn is None else fn(*args, **kwargs)

    def _applicable(self, compiler: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Equivalent | None:
        fn, applies = self._slots.values[compiler]
        return fn if applies is None or applies(*args, **kwargs) else None

    def _recompile(self) -> None:
        self.operator.recompile()
