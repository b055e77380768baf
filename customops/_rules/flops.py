"""The number of floating-point operations of a call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from customops import _torch
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.registrations import Registration, Undo, nothing
from customops._dispatch.rule import Rule
from customops._places import where
from customops._rules.reference import Reference
from customops.errors import KernelError, brief

log = logging.getLogger("customops")


#: The mode of `torch.utils.flop_counter.FlopCounterMode`.
COUNTER = "torch.utils.flop_counter._FlopCounterMode"


def count(
    flops: Callable[[tuple[Any, ...], dict[str, Any]], int | None],
    mode: Any,
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: Any = None,
) -> Any:
    """Call an op under `COUNTER`, and add ``flops(args, kwargs)``, unless the counter has a formula for the op.

    torch counts a custom operator without a formula as 0, and does not mention it (pytorch/pytorch#131041).
    """

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return flops(args, kwargs) or 0

    formulas, packet = mode.counter.flop_registry, func.overloadpacket
    if packet in formulas:
        return mode.__torch_dispatch__(func, types, args, kwargs)
    formulas[packet] = formula
    try:
        return mode.__torch_dispatch__(func, types, args, kwargs)
    finally:
        del formulas[packet]


class FlopsRule(Rule[None, Fn]):
    """The formula for the floating-point operations of a call. Without one, the reference is counted."""

    _warned = False

    def register(self, fn: Fn) -> Registration:
        ours = self.operator.library is not None
        return self.set(None, bind_kernel(fn, self.operator.schema, self.operator.qualname, "formula", warn=ours))

    def _install(self, _: None, own_library: bool) -> Undo:
        return nothing

    def _changed(self) -> None:
        """Compiled code does not depend on it."""

    def count(self, reference: Reference | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the number of floating-point operations of a call, or None, logged once, if it is unknown."""
        op, formula = self.operator.qualname, self.values.get(None)
        if formula is not None:
            found = formula(*args, **kwargs)
            if not isinstance(found, (int, torch.SymInt)) or found < 0:
                raise KernelError(
                    "the formula of register_flops did not return a number of operations",
                    op=op,
                    expected="an int, 0 or more",
                    got=brief(found),
                    where=where(formula),
                )
            return found  # type: ignore[return-value]
        why = "there is neither a formula nor a reference"
        if reference is not None and "flops" in reference.gives:
            try:
                return reference.flops(args, kwargs)
            except Exception as error:
                if not _torch.fakes.needs_data(error):
                    raise
                why = f"the reference needs data: {str(error).splitlines()[0]}"
        if self.operator.has_own_rules and not self._warned:
            self._warned = True
            text = "%s: its floating-point operations are not known, and are not counted: %s; op.register_flops(fn)"
            log.warning(text, op, why)
        return None
