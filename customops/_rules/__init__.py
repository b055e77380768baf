"""The rules of an op, of each kind one."""

from __future__ import annotations

from typing import Any

from customops._autograd.rule import AutogradRule
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import Definition
from customops._rules import ad_inplace_or_view, checkpointing, functionalization
from customops._rules.autocast import AutocastRule
from customops._rules.fake import FakeRule
from customops._rules.kernel import KernelRule
from customops._rules.raw import RawRule
from customops._rules.torch_dispatch import TorchDispatchRule
from customops._rules.vmap import VmapRule


class Rules:
    """The rules of an op."""

    def __init__(self, definition: Definition, default: Fn | None, name: str) -> None:
        self.kernel = KernelRule(definition, default)
        self.raw = RawRule(definition)
        self.fake = FakeRule(definition, name)
        self.autograd = AutogradRule(definition)
        self.autocast = AutocastRule(definition)
        self.vmap = VmapRule(definition)
        self.torch_dispatch = TorchDispatchRule(definition)

    def install(self, definition: Definition, devices: tuple[str | None, ...]) -> None:
        """Everything an op of ours has in the dispatcher."""
        self.kernel.install(definition, devices)
        self.raw.install(definition)
        self.fake.install(definition)
        self.autograd.install(definition)
        ad_inplace_or_view.install(definition)
        self.autocast.install(definition)
        self.vmap.install(definition)
        self.torch_dispatch.install(definition)
        functionalization.install(definition)
        checkpointing.install(definition)

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
