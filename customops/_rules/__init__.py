"""The rules of an op, of each kind one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from customops._autograd.rule import AutogradRule
from customops._dispatch.operator import OperatorHandle
from customops._rules import compilers, functionalization
from customops._rules.autocast import AutocastRule
from customops._rules.compilers import DecompositionRule, InductorLoweringRule, ReplacementRule
from customops._rules.fake import FakeRule
from customops._rules.functionalization import EffectRule, TorchDispatchRule
from customops._rules.kernel import KernelRule, RawRule
from customops._rules.out import OutRule
from customops._rules.sharding import ShardingRule
from customops._rules.vmap import VmapRule

R = TypeVar("R")

#: The rules by which compilers put other code in the place of the op.
_FOR_COMPILERS = (DecompositionRule, InductorLoweringRule, ReplacementRule)

#: The rules that are made on first use and that compilers see: all of them but `out`.
_TRACED = (RawRule, AutocastRule, EffectRule, TorchDispatchRule, ShardingRule, *_FOR_COMPILERS)


class _OnFirstUse(Generic[R]):
    """A rule that most ops do not have: it is made when it is first asked for."""

    def __init__(self, kind: type[R]) -> None:
        self.kind = kind

    def __get__(self, rules: Rules, owner: type) -> R:
        if self.kind not in rules._others:
            rules._others[self.kind] = self.kind()
            rules._others[self.kind].bind(rules.operator)
        rule: R = rules._others[self.kind]
        return rule


class Rules:
    """The rules of an op. They hold what is registered; `bind` puts it into the dispatcher, for an op or another."""

    operator: OperatorHandle
    raw = _OnFirstUse(RawRule)
    autocast = _OnFirstUse(AutocastRule)
    effect = _OnFirstUse(EffectRule)
    torch_dispatch = _OnFirstUse(TorchDispatchRule)
    decomposition = _OnFirstUse(DecompositionRule)
    inductor_lowering = _OnFirstUse(InductorLoweringRule)
    replacement = _OnFirstUse(ReplacementRule)
    sharding = _OnFirstUse(ShardingRule)
    out = _OnFirstUse(OutRule)

    def __init__(self, fake: FakeRule | None = None, autograd: AutogradRule | None = None) -> None:
        self.kernel = KernelRule()
        self.fake = fake or FakeRule()
        self.autograd = autograd or AutogradRule()
        self.vmap = VmapRule()
        #: Those of the other kinds that were made.
        self._others: dict[type, Any] = {}

    @property
    def has_out(self) -> bool:
        """Was a kernel of an out variant ever registered?"""
        return OutRule in self._others

    @property
    def out_variant(self) -> Any:
        """The `CustomOpDef` of the out variant that is there, or None."""
        return self.out.variant if self.has_out and self.out.is_there else None

    def bind(self, operator: OperatorHandle, guard_changed: Callable[[], None]) -> None:
        """Let the rules be those of `operator`, which is new, was adopted, or takes the place of one that was removed.

        Args:
            operator: gets what comes with an op of ours, and all that was registered so far.
            guard_changed: called when `AutogradRule.call_guard` returns something else.
        """
        self.operator, self.autograd.guard_changed = operator, guard_changed
        for rule in (self.kernel, self.fake, self.autograd, self.vmap, *self._others.values()):
            rule.bind(operator)
        if operator.has_own_rules:
            functionalization.bind(operator, self.kernel.default)
        compilers.bind_direct_calls(operator)

    def traced(self) -> tuple[Any, ...]:
        """What compilers trace through, or decide by. Kernels they call, but those at keys above the devices."""
        others = [(kind.__name__, self._others[kind].traced()) for kind in _TRACED if kind in self._others]
        return (
            self.fake.fn,
            self.autograd.formulas,
            self.vmap.values,
            self.kernel.traced(),
            [(name, traced) for name, traced in others if traced],
        )

    def equivalents(self) -> list[Callable[..., Any]]:
        """Functions that compilers take in the place of the op: each must compute the same, or be NotImplemented."""
        return [fn for kind in _FOR_COMPILERS if kind in self._others for fn in self._others[kind].equivalents()]
