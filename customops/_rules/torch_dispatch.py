"""Rules for a TorchDispatchMode or a tensor subclass: what runs instead of its own ``__torch_dispatch__``."""

from __future__ import annotations

from typing import Any

from customops._call import Fn, bind
from customops._definition import Definition, Undo, put_back


class TorchDispatchRule:
    """class -> rule. torch refuses a second rule for a class, so one function is entered and reads the table."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.rules: dict[type, Fn] = {}
        self._installed: set[type] = set()

    def install(self, definition: Definition) -> None:
        self.definition, self._installed = definition, set()
        for cls in self.rules:
            self._refresh(cls, apart=False)

    def register(self, cls: type, fn: Fn) -> Undo:
        bind(fn, str(self.definition.name), "torch_dispatch rule", "mode_or_cls", "func", "types", "args", "kwargs")
        before = self.rules.get(cls)
        self.rules[cls] = fn
        undo = self._refresh(cls, apart=True)
        return lambda: self._restore(before, cls, undo)

    def _refresh(self, cls: type, *, apart: bool) -> Undo | None:
        if cls in self._installed:
            return None
        self._installed.add(cls)

        def rule(*args: Any, **kwargs: Any) -> Any:
            return self.rules[cls](*args, **kwargs)

        return self.definition.impl_torch_dispatch(cls, rule, apart=apart)

    def _restore(self, before: Fn | None, cls: type, undo: Undo | None) -> None:
        put_back(self.rules, cls, before)
        if undo is not None:
            undo()
            self._installed.discard(cls)
