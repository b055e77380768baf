"""The side effect of an op, by which compilers keep its calls and their order."""

from __future__ import annotations

from typing import Any

from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Slots, Undo, nothing


class EffectRule:
    """The effect that was registered last. torch keeps it by the op's name, so that it is told anew when it changes."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._slots: Slots[None, Any] = Slots(self._install, self._tell_torch)
        self._undo: Undo = nothing

    def bind(self, operator: OperatorHandle) -> None:
        self.operator, self._undo = operator, nothing
        self._slots.reset()

    @property
    def effects(self) -> dict[None, Any]:
        return self._slots.values

    def register(self, effect: Any) -> Registration:
        return self._slots.set(None, effect)

    def _install(self, _: None, own_library: bool) -> Undo:
        return self._forget

    def _forget(self) -> None:
        undo, self._undo = self._undo, nothing
        undo()

    def _tell_torch(self) -> None:
        self._forget()
        if None in self._slots.values:
            self._undo = self.operator.impl_effect(self._slots.values[None])
