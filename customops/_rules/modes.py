"""Rules for dispatch modes and tensor subclasses, effects, and kernels at dispatch keys that the user names."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from customops import _torch
from customops._dispatch import callbacks
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo, nothing
from customops._dispatch.rule import Rule
from customops.errors import CallbackError, brief

__tracebackhide__ = True  # pytest leaves the frames out


class TorchDispatchRule(Rule[type, Fn]):
    """The rules for classes. torch takes one rule for each class, so it gets a function that reads the table."""

    def register(self, cls: type, fn: Fn) -> Registration:
        if not isinstance(cls, type):
            raise CallbackError(
                "a torch_dispatch rule must be registered for a class",
                op=self.operator.qualname,
                expected="a subclass of TorchDispatchMode or of Tensor",
                got=brief(cls),
                fix="register_torch_dispatch(MyMode, fn)",
            )
        op = self.operator.qualname
        callbacks.bind(fn, op, "torch_dispatch rule", "mode_or_cls", "func", "types", "args", "kwargs")
        return self.set(cls, fn)

    def _install(self, cls: type, own_library: bool) -> Undo:
        rules, overload, op = self.values, self.operator.overload, self.operator.qualname

        def rule(*args: Any, **kwargs: Any) -> Any:
            _torch.dynamo.traced(overload, op)  # the rule need not call the op, which would do it
            return rules[cls](*args, **kwargs)

        return self.operator.impl_torch_dispatch(cls, rule, own_library=own_library)


class EffectRule(Rule[None, Any]):
    """The side effect of an op, for which compilers keep its calls and their order. torch keeps it by the op's name."""

    _undo: Undo

    def bind(self, operator: OperatorHandle) -> None:
        self._undo = nothing
        super().bind(operator)

    def register(self, effect: Any) -> Registration:
        return self.set(None, effect)

    def _install(self, _: None, own_library: bool) -> Undo:
        return self._forget

    def _forget(self) -> None:
        undo, self._undo = self._undo, nothing
        undo()

    def _changed(self) -> None:
        self._forget()
        if None in self.values:
            self._undo = self.operator.impl_effect(self.values[None])


class RawRule(Rule[object, tuple[tuple[str, ...], Fn]]):
    """The kernels of one op that are called without a trampoline: a key of its own -> dispatch keys, and the kernel."""

    def traced(self) -> Any:
        return [*self.values.values()]

    def register(self, keys: tuple[str, ...], fn: Fn) -> Registration:
        """Register `fn` at all of these dispatch keys, or at none."""
        return self.set(object(), (keys, fn))

    def _install(self, key: object, own_library: bool) -> Undo:
        operator, (dispatch_keys, fn) = self.operator, self.values[key]

        def traced(*args: Any, **kwargs: Any) -> Any:
            _torch.dynamo.traced(operator.overload, operator.qualname)
            return fn(*args, **kwargs)

        with ExitStack() as undos:  # if torch refuses a key, it is taken from the others again
            for each in dispatch_keys:
                # Compilers trace such a kernel in the place of the op.
                kernel = traced if each == "CompositeImplicitAutograd" else fn
                undos.callback(operator.impl(kernel, each, own_library=True, raw=True))
            return undos.pop_all().close
