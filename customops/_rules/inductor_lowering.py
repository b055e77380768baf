"""Lowerings: plain torch code that inductor generates code for in the place of a call of the op.

Unlike a decomposition it counts last, when inductor makes a graph into code: up to then the op is one node, which
autograd, partitioners, checkpointing policies and patterns see whole.
"""

from __future__ import annotations

from typing import Any

from customops import _compat
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Slots, Undo
from customops._rules.compilers import Equivalent, check_functional


class InductorLoweringRule:
    """The lowering that was registered last."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._slots: Slots[None, Equivalent] = Slots(self._install, self._recompile)

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        self._slots.reset()

    def traced(self) -> Any:
        return [lowering.fn for lowering in self._slots.values.values()]

    def equivalents(self) -> list[Fn]:
        """What must compute the same as the op. Each returns NotImplemented where it does not apply."""
        return [self._lower] if self._slots.values else []

    def register(self, fn: Fn) -> Registration:
        check_functional(self.operator, "a lowering")
        return self._slots.set(None, Equivalent(self.operator, fn, "lowering"))

    def _install(self, _: None, own_library: bool) -> Undo:
        undo = _compat.inductor_rules.lower(self.operator.overload, self._trace)
        self.operator.on_removal.append(undo)
        return undo

    def _trace(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._slots.values[None].substitute(args, kwargs, random=False)

    def _lower(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._slots.values[None](*args, **kwargs)

    def _recompile(self) -> None:
        self.operator.recompile()
