"""The rules of an op: one object for each kind of rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from customops import _torch
from customops._autograd.recompute import RecomputedFormula
from customops._autograd.rule import AutogradRule
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, RegistrationGroup, all_or_none
from customops._rules import compilers, functionalization
from customops._rules.autocast import AutocastRule
from customops._rules.compilers import COMPILERS, DecompositionRule, InductorLoweringRule
from customops._rules.fake import FakeRule
from customops._rules.flops import FlopsRule
from customops._rules.kernel import KernelRule
from customops._rules.modes import EffectRule, RawRule, TorchDispatchRule
from customops._rules.out import OutRule
from customops._rules.reference import Reference, ReferenceOptions, ReferenceRule
from customops._rules.sharding import ShardingRule
from customops._rules.vmap import VmapRule
from customops._schema.model import names_in
from customops._torch.schema import Tag

R = TypeVar("R")

#: The rules by which compilers put other code in the place of the op.
_FOR_COMPILERS = (DecompositionRule, InductorLoweringRule)

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
    sharding = _OnFirstUse(ShardingRule)
    out = _OnFirstUse(OutRule)
    flops = _OnFirstUse(FlopsRule)
    references = _OnFirstUse(ReferenceRule)

    def __init__(self, fake: FakeRule | None = None, autograd: AutogradRule | None = None) -> None:
        self.kernel = KernelRule()
        self.fake = fake or FakeRule()
        self.autograd = autograd or AutogradRule()
        self.vmap = VmapRule()
        #: The other kinds of rules that were made.
        self._others: dict[type, Any] = {}
        #: The rules that the current reference gives.
        self._derived: list[Registration] = []

    @property
    def has_out(self) -> bool:
        """Was a kernel of an out variant ever registered?"""
        return OutRule in self._others

    @property
    def out_variant(self) -> Any:
        """The `CustomOpDef` of the out variant that is there, or None."""
        return self.out.variant if self.has_out and self.out.is_there else None

    @property
    def reference(self) -> Reference | None:
        """The plain function of the op, if it has one."""
        return self.references.values.get(None) if ReferenceRule in self._others else None

    def register_reference(self, fn: Fn, options: ReferenceOptions) -> Registration:
        """Register the plain function. The rules that it gives replace the rules of an earlier function."""
        self.references.follow = self._follow
        return self.references.set(None, Reference(fn, self.operator, options))

    def _follow(self) -> None:
        """Remove the rules of the previous reference, and derive the rules of the current one."""
        RegistrationGroup(self._derived).unregister()
        self._derived = []
        if self.reference is not None:
            self._derived = all_or_none(self._given_by(self.reference)).members

    def _given_by(self, reference: Reference) -> Iterator[Registration]:
        """Register the rules that a reference gives, unless others registered such a rule for an adopted op."""
        operator, schema, gives = self.operator, self.operator.schema, reference.gives
        theirs = {} if operator.has_own_rules else _torch.dispatcher.registered_at(operator.qualname)
        known = _torch.library.made_by_torch(operator.qualname)  # torch puts kernels at the keys of these ops by itself
        is_composite = "CompositeImplicitAutograd" in theirs
        has_fake = known.fake is not None if known is not None else "Meta" in theirs
        has_autograd = any(key.startswith("Autograd") for key in theirs)
        has_autograd = known.backward is not None if known is not None else has_autograd
        needs_fake = not (self.fake.trivial() or is_composite or has_fake or operator.spec.traceable)
        has_tensors = any(argument.holds_tensors for argument in schema.arguments)
        yield self.kernel.follow(reference)
        if "fake" in gives and needs_fake:
            yield self.fake.set(None, reference.shown(reference.fake), is_derived=True)
        if "gradients" in gives and not (has_autograd or is_composite):
            yield from self._gradients(reference)
        has_vmap = is_composite or "FuncTorchBatched" in theirs
        if "vmap" in gives and has_tensors and not has_vmap and (reference.is_stated or not schema.is_view):
            yield self.vmap.derive(reference)  # raises for a view
        compilers = tuple(compiler for compiler in COMPILERS if compiler in gives)
        if compilers:
            yield self.decomposition.register(reference.fn, compilers, is_derived=True)
        if "kernel" in gives:
            yield self.kernel.derive(reference)

    def _gradients(self, reference: Reference) -> Iterator[Registration]:
        """Register the derivatives of a reference; without them, raise if `gives` was stated."""
        operator, schema, options = self.operator, self.operator.schema, reference.options
        types = {argument.type for argument in schema.arguments if argument.holds_tensors}
        can_be_differentiated = (
            Tag.out not in operator.tags
            and operator.differentiable.op
            and schema.is_differentiable
            and not types <= {"Tensor[]?"}  # the dispatcher does not look into optional lists
        )
        if not can_be_differentiated and not reference.is_stated:
            return
        nondiff_args = names_in(options.get("nondiff_args", ()), "nondiff_args", operator.qualname)
        grads_of = options.get("grads_of")
        if grads_of is None:
            grads_of = () if schema.returns else [name for name in reference.written if name not in nondiff_args]
        grads_of = names_in(grads_of, "grads_of", operator.qualname)
        function = reference.to_differentiate(grads_of)
        formula = RecomputedFormula(function, operator, recompute=options.get("recompute", True))
        yield self.autograd.register_from(formula, {"nondiff_args": nondiff_args, "grads_of": grads_of})

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
