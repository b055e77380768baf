"""vmap: how the op runs on batched tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from customops import _compat
from customops._call import Fn, bind, filler
from customops._definition import Definition, Undo


class VmapRule:
    """The batching rule of one op; without one, torch calls the op once for each element and says so."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.fn: Fn | None = None
        self._installed = False

    def install(self, definition: Definition) -> None:
        """The rule goes in with the op only if there is one: torch's fallback runs where nothing is installed."""
        self.definition, self._installed = definition, False
        if self.fn is not None:
            self._refresh(apart=False)

    def register(self, fn: Fn) -> Undo:
        schema = self.definition.schema
        positional = [argument.name for argument in schema.positional]
        keyword = {argument.name: argument.name for argument in schema.keyword_only}
        bind(fn, str(self.definition.name), "vmap rule", "info", "in_dims", *positional, **keyword)
        before, self.fn = self.fn, fn
        undo = self._refresh(apart=True)
        return lambda: self._restore(before, undo)

    def _refresh(self, *, apart: bool) -> Undo | None:
        if self._installed:
            return None
        self._installed = True
        return self.definition.impl(_trampoline(self), "FuncTorchBatched", apart=apart)

    def _restore(self, before: Fn | None, undo: Undo | None) -> None:
        self.fn = before
        if undo is not None:
            undo()
            self._installed = False


def _trampoline(rule: VmapRule) -> Callable[..., Any]:
    """The function at the key of batched tensors."""
    overload, fill = rule.definition.overload, filler(rule.definition.schema)

    def vmap(*args: Any, **kwargs: Any) -> Any:
        if fill is not None:
            args, kwargs = fill(args, kwargs)
        return _compat.call_vmap_rule(rule.fn, overload, args, kwargs)

    return _compat.outside_dynamo(vmap)
