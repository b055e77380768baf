"""What an op has, and what it lacks, for compilers, training, forward mode and vmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from customops import _compat
from customops._compat.tags import Tag
from customops._describe.data import Rule, State, Support


def supports_of(op: Any, rules: Sequence[Rule]) -> list[Support]:
    """A line for each feature of torch, of an op and its lines of `rules_of`."""
    first = {rule.kind: rule for rule in reversed(rules)}
    return [
        *(_tracing(op, feature, first["fake"]) for feature in ("torch.compile", "torch.export")),
        _differentiation(op, "training", first["backward"], "register_autograd"),
        _differentiation(op, "forward mode", first["jvp"], "register_jvp"),
        _batching(op, first["vmap"]),
    ]


def _tracing(op: Any, feature: str, fake: Rule) -> Support:
    if fake.origin == "missing":
        return Support(feature, "no", "there is no fake impl", "op.register_fake(fn)")
    if feature == "torch.compile" and _returns_alias(op):
        fix = "return a copy" if op._definition.schema.is_view else "define it with customops.Tag.inplace or Tag.out"
        return Support(feature, "no", "torch does not functionalize a custom op that returns an alias", fix)
    return Support(feature, "yes", "")


def _returns_alias(op: Any) -> bool:
    """Does it return a view, or a mutated argument without Tag.inplace or Tag.out? Ops of aten may."""
    operator = op._definition
    if operator.name.namespace == "aten" or _is_composite(op) or {Tag.inplace, Tag.out} & {*operator.tags}:
        return False
    return any(ret.alias is not None for ret in operator.schema.returns)


def _differentiation(op: Any, feature: str, rule: Rule, method: str) -> Support:
    reason = _why_not_differentiable(op, rule.kind)
    if reason is not None:
        return Support(feature, "not applicable", reason)
    if rule.origin == "others" and rule.kind == "jvp" and not _is_composite(op):
        return Support(feature, "unknown", "as the autograd kernel of others has it")
    if rule.origin != "missing":
        return Support(feature, "yes", "")
    return Support(feature, "no", f"there is no {rule.kind}", f"op.{method}(fn)")


def _why_not_differentiable(op: Any, kind: str) -> str | None:
    operator = op._definition
    schema = operator.schema
    if Tag.out in operator.tags:
        return "out variants have no gradient"
    if not operator.differentiable.op:
        return "declared with differentiable=False"
    if not any(argument.holds_tensors for argument in schema.arguments):
        return "no argument is a tensor"
    if not (schema.mutated or any(ret.holds_tensors for ret in schema.returns)):
        return "no result is a tensor"
    if not schema.is_differentiable:
        return "it returns views in a way that autograd has no rule for"
    if kind == "jvp" and schema.is_view:
        return "it returns a view"
    return None


def _batching(op: Any, rule: Rule) -> Support:
    feature = "vmap"
    if not any(argument.holds_tensors for argument in op._definition.schema.arguments):
        return Support(feature, "not applicable", "no argument is a tensor")
    if rule.origin == "missing":
        state: State = "yes" if _is_composite(op) else "slow"
        return Support(feature, state, "" if state == "yes" else "torch's fallback, one call for each element")
    if rule.origin == "derived" and rule.name.startswith("one call"):
        return Support(feature, "slow", "one call for each element", "op.register_vmap(fn)")
    return Support(feature, "yes", "")


def _is_composite(op: Any) -> bool:
    return _compat.dispatch.has_kernel(op._qualname, "CompositeImplicitAutograd")
