"""The rules of an op, of each kind one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from customops._autograd.rule import AutogradRule
from customops._dispatch.operator import OperatorHandle
from customops._rules import ad_inplace_or_view, checkpointing, functionalization
from customops._rules.autocast import AutocastRule
from customops._rules.fake import FakeRule
from customops._rules.kernel import KernelRule
from customops._rules.raw import RawRule
from customops._rules.torch_dispatch import TorchDispatchRule
from customops._rules.vmap import VmapRule


class Rules:
    """The rules of an op. They hold what is registered; `bind` puts it into the dispatcher, for an op or another."""

    def __init__(self, fake: FakeRule | None = None, autograd: AutogradRule | None = None) -> None:
        self.kernel = KernelRule()
        self.raw = RawRule()
        self.fake = fake or FakeRule()
        self.autograd = autograd or AutogradRule()
        self.autocast = AutocastRule()
        self.vmap = VmapRule()
        self.torch_dispatch = TorchDispatchRule()

    def bind(self, operator: OperatorHandle, guard_changed: Callable[[], None]) -> None:
        """Let the rules be those of `operator`, which is new, was adopted, or takes the place of one that was removed.

        Args:
            operator: gets what comes with an op of ours, and all that was registered so far.
            guard_changed: called when `AutogradRule.call_guard` returns something else.
        """
        self.kernel.bind(operator)
        self.raw.bind(operator)
        self.fake.bind(operator)
        self.autograd.bind(operator, guard_changed)
        ad_inplace_or_view.bind(operator)
        self.autocast.bind(operator)
        self.vmap.bind(operator)
        self.torch_dispatch.bind(operator)
        functionalization.bind(operator)
        checkpointing.bind(operator)

    def traced(self) -> tuple[Any, ...]:
        """What compilers trace through, or decide by. Kernels they call, but those at keys above the devices."""
        return (
            self.fake.fn,
            self.raw.traced(),
            self.autograd.formulas,
            self.autocast.dtypes,
            self.vmap.rules,
            self.torch_dispatch.rules,
        )
