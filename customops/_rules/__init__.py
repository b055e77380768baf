"""The rules of an op, of each kind one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from customops._autograd.rule import AutogradRule
from customops._dispatch.operator import OperatorHandle
from customops._rules import functionalization, graph_calls
from customops._rules.autocast import AutocastRule
from customops._rules.compilers import DecompositionRule, InductorLoweringRule, ReplacementRule
from customops._rules.fake import FakeRule
from customops._rules.functionalization import EffectRule, TorchDispatchRule
from customops._rules.kernel import KernelRule, RawRule
from customops._rules.out import OutRule
from customops._rules.vmap import VmapRule

R = TypeVar("R")


#: The rules by which compilers put other code in the place of the op.
_FOR_COMPILERS = (DecompositionRule, InductorLoweringRule, ReplacementRule)


class Rules:
    """The rules of an op. They hold what is registered; `bind` puts it into the dispatcher, for an op or another."""

    operator: OperatorHandle

    def __init__(self, fake: FakeRule | None = None, autograd: AutogradRule | None = None) -> None:
        self.kernel = KernelRule()
        self.fake = fake or FakeRule()
        self.autograd = autograd or AutogradRule()
        self.vmap = VmapRule()
        #: Rules of the other kinds, which most ops do not have. They are made on first use.
        self._others: dict[type, Any] = {}

    @property
    def raw(self) -> RawRule:
        return self._other(RawRule)

    @property
    def autocast(self) -> AutocastRule:
        return self._other(AutocastRule)

    @property
    def effect(self) -> EffectRule:
        return self._other(EffectRule)

    @property
    def decomposition(self) -> DecompositionRule:
        return self._other(DecompositionRule)

    @property
    def inductor_lowering(self) -> InductorLoweringRule:
        return self._other(InductorLoweringRule)

    @property
    def replacement(self) -> ReplacementRule:
        return self._other(ReplacementRule)

    @property
    def out(self) -> OutRule:
        return self._other(OutRule)

    @property
    def has_out(self) -> bool:
        """Was a kernel of an out variant ever registered?"""
        return OutRule in self._others

    @property
    def out_variant(self) -> Any:
        """The `CustomOpDef` of the out variant that is there, or None."""
        return self.out.variant if self.has_out and self.out.is_there else None

    @property
    def torch_dispatch(self) -> TorchDispatchRule:
        return self._other(TorchDispatchRule)

    def _other(self, kind: type[R]) -> R:
        if kind not in self._others:
            self._others[kind] = kind()
            self._others[kind].bind(self.operator)
        rule: R = self._others[kind]
        return rule

    def bind(self, operator: OperatorHandle, guard_changed: Callable[[], None]) -> None:
        """Let the rules be those of `operator`, which is new, was adopted, or takes the place of one that was removed.

        Args:
            operator: gets what comes with an op of ours, and all that was registered so far.
            guard_changed: called when `AutogradRule.call_guard` returns something else.
        """
        self.operator = operator
        self.kernel.bind(operator)
        self.fake.bind(operator)
        self.autograd.bind(operator, guard_changed)
        self.vmap.bind(operator)
        for rule in self._others.values():
            rule.bind(operator)
        functionalization.bind_functionalization(operator, self.kernel.default)
        functionalization.bind_ad_inplace_or_view(operator)
        functionalization.bind_checkpointing(operator)
        graph_calls.bind(operator)

    def traced(self) -> tuple[Any, ...]:
        """What compilers trace through, or decide by. Kernels they call, but those at keys above the devices."""
        raw, autocast, effect, torch_dispatch = map(
            self._others.get, (RawRule, AutocastRule, EffectRule, TorchDispatchRule)
        )
        return (
            self.fake.fn,
            raw.traced() if raw else [],
            self.autograd.formulas,
            autocast.dtypes if autocast else {},
            effect.effects if effect else {},
            self.vmap.rules,
            torch_dispatch.rules if torch_dispatch else {},
            [self._others[kind].traced() for kind in _FOR_COMPILERS if kind in self._others],
            self.kernel.traced(),
        )

    def equivalents(self) -> list[Callable[..., Any]]:
        """Functions that compilers take in the place of the op: each must compute the same, or be NotImplemented."""
        return [fn for kind in _FOR_COMPILERS if kind in self._others for fn in self._others[kind].equivalents()]
