"""Rules for a TorchDispatchMode or a tensor subclass: what runs instead of its own ``__torch_dispatch__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from customops import _compat
from customops._dispatch.callbacks import Fn, bind
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Slots, Undo
from customops.errors import CallbackError, brief


class TorchDispatchRule:
    """class -> rule. torch refuses a second rule for a class, so one function is registered, which reads the table."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._slots: Slots[type, Fn] = Slots(self._install_for, self._recompile)

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        self._slots.reset()

    @property
    def rules(self) -> dict[type, Fn]:
        return self._slots.values

    def register(self, cls: type, fn: Fn) -> Registration:
        if not isinstance(cls, type):
            raise CallbackError(
                "a torch_dispatch rule is for a class: a TorchDispatchMode or a tensor subclass",
                op=self.operator.qualname,
                got=brief(cls),
                fix="register_torch_dispatch(MyMode, fn)",
            )
        bind(fn, self.operator.qualname, "torch_dispatch rule", "mode_or_cls", "func", "types", "args", "kwargs")
        return self._slots.set(cls, fn)

    def _recompile(self) -> None:
        self.operator.recompile()

    def _install_for(self, cls: type, own_library: bool) -> Undo:
        return self.operator.impl_torch_dispatch(
            cls, _trampoline(self._slots, cls, self.operator), own_library=own_library
        )


def _trampoline(slots: Slots[type, Fn], cls: type, operator: OperatorHandle) -> Callable[..., Any]:
    """The function in torch's registry of rules."""

    overload, op = operator.overload, operator.qualname

    def rule(*args: Any, **kwargs: Any) -> Any:
        _compat.dynamo.traced(overload, op)  # the rule need not call the op, which would do it
        return slots.values[cls](*args, **kwargs)

    return rule
