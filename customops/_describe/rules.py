"""A line for each rule of an op, the kernels of others included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from customops import _torch
from customops._dispatch.callbacks import Fn
from customops._dispatch.devices import ANY_DEVICE
from customops._dispatch.preference import here, names_for
from customops._places import location_of, name_of, where
from customops._rules.autocast import AutocastRule
from customops._rules.choice import DEFAULT, REFERENCE, hidden_in, in_order
from customops._rules.compilers import DecompositionRule, InductorLoweringRule
from customops._rules.flops import FlopsRule
from customops._rules.modes import EffectRule, RawRule, TorchDispatchRule
from customops._rules.out import Allocates, Copies, is_stub
from customops._rules.sharding import ShardingRule
from customops._rules.vmap import _Strategy
from customops._torch.schema import Tag

#: How something came to be there: registered by the user, defined with the op, derived by customops from what else is
#: there, or put into the dispatcher by others.
Origin = Literal["registered", "with the op", "derived", "others", "missing"]

#: Does a feature of torch work with the op?
State = Literal["yes", "slow", "no", "unknown", "not applicable"]


@dataclass(frozen=True)
class Rule:
    """One kernel or rule of an op, or one that is missing.

    Attributes:
        kind: "kernel", "out", "fake", "backward", "jvp", "vmap", "autocast", "torch_dispatch", "decomposition",
            "lowering", "impl", "effect", "samples", "sharding", "reference", "flops".
        target: what it applies to: a device type, a class, a compiler or a dispatch key; "" if to everything.
        name: the name of the function, or the value.
        where: ``file:line`` of the function; "" if unknown.
        registered: ``file:line`` of the call that registered it; "" if there is none or it is unknown.
        origin: "registered" by the user, defined "with the op", "derived" by customops, registered by "others", or
            "missing".
        note: further information.
    """

    kind: str
    target: str = ""
    name: str = ""
    where: str = ""
    registered: str = ""
    origin: Origin = "registered"
    note: str = ""


@dataclass(frozen=True)
class Support:
    """Whether a feature of torch works with the op; if not, what is missing and which call adds it.

    Attributes:
        feature: "torch.compile", "torch.export", "training", "forward mode", "vmap".
        state: "yes", "slow", "no", "unknown" or "not applicable".
        why: the reason, in a few words.
        fix: the call that adds the feature, or "".
    """

    feature: str
    state: State
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Step:
    """What one dispatch key does with a call.

    Attributes:
        key: the dispatch key; "call" for a step before the dispatcher.
        action: "handles", "redispatches", "falls through" or "raises".
        what: the code at this key, and what it does.
        where: ``file:line`` of that code; "" if unknown.
    """

    key: str
    action: Literal["handles", "redispatches", "falls through", "raises"]
    what: str
    where: str = ""


#: The name of the vmap rule of an op that has none.
ONE_BY_ONE = "one call for each element"
#: Where an op has a kernel for many devices, besides that of `register_kernel`.
_FOR_MANY = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def rules_of(op: Any) -> list[Rule]:
    """All that is known of an op, a `CustomOpDef`: kernels first."""
    return [rule for read in _READERS for rule in read(op)]


def of_function(kind: str, fn: Fn, registered: str, *, target: str = "", origin: Origin = "registered") -> Rule:
    """The line for a function of the user."""
    where = location_of(fn)
    if origin == "registered" and not registered:
        origin = "with the op"
    return Rule(kind, target, name_of(fn), "" if where == "<built-in>" else where, registered, origin)


def _derived(kind: str, target: str = "") -> Rule:
    """Return the line for a rule that the reference gives."""
    return Rule(kind, target, "by the reference", origin="derived")


def _reference(op: Any) -> Iterator[Rule]:
    rules = op._rules
    if rules.reference is not None:
        yield of_function("reference", rules.reference.plain, rules.references.source(None))
    flops = rules._others.get(FlopsRule)
    if flops is not None and flops.values:
        yield of_function("flops", flops.values[None], flops.source(None))
    elif rules.reference is not None and "flops" in rules.reference.gives:
        yield _derived("flops")


def _own_kernels(op: Any) -> Iterator[Rule]:
    rule = op._rules.kernel
    preferred = names_for(op._qualname, here())
    tuned: dict[tuple[str | None, str], set[str]] = {}
    for device in rule.kernels:
        stored = rule.stored(device)
        for name, file in stored.choices.values() if stored is not None else ():
            tuned.setdefault((device, name), set()).add(file)
    ordered = [(device, each) for device in rule.kernels for each in in_order(rule._own(device), ())]
    for device, each in ordered:
        found_there = rule.alternatives(device)
        hidden = each in hidden_in(found_there)
        first = next((other.name for other in found_there if other.when is None), "") if hidden else ""
        fn, target = each.fn, device or ("other devices" if len(rule.kernels) > 1 else "any device")
        if each.name == REFERENCE:
            continue
        if rule.is_derived((device, each.name)):
            yield _derived("kernel", target)
            continue
        if isinstance(fn, Allocates):
            yield Rule("kernel", target, "allocates, and calls the out variant", origin="derived")
        elif isinstance(fn, Copies):
            yield Rule("kernel", target, "copies what the functional op returns", origin="derived")
        else:
            found = of_function("kernel", fn, rule.source((device, each.name)), target=target)
            notes = {
                f"named {each.name}": each.name != DEFAULT,
                f"priority {each.priority}": each.priority,
                f"when {where(each.when)}" if each.when is not None else "": each.when is not None,
                "preferred": each.name in preferred,
                f"runs only if preferred or tuned, since {first} is asked first": hidden,
                f"tuned ({', '.join(sorted(tuned.get((device, each.name), ())))})": (device, each.name) in tuned,
                "switched off": rule._disabled(device),
                "has no body": is_stub(fn) and not rule._disabled(device),
            }
            yield replace(found, note=", ".join(note for note, holds in notes.items() if holds))


def _kernels(op: Any) -> Iterator[Rule]:
    yield from _own_kernels(op)
    # Those that were not registered through customops; the newest one of each key.
    for key, places in _torch.dispatcher.registered_at(op._qualname).items():
        ours = len(op._definition._kernels.get(key, ())) + (key == "Meta" and op._rules.fake.fn is not None)
        device = _torch.dispatcher.device_of_key(key)
        if len(places) > ours and (device is not None or key in _FOR_MANY):
            yield Rule("kernel", device or key, where=places[0], origin="others")
    if op._rules.out_variant is not None:
        yield from (replace(rule, kind="out") for rule in _own_kernels(op._rules.out_variant))
    raw = op._rules._others.get(RawRule)
    for each, (keys, fn) in raw.values.items() if raw else ():
        for key in keys:
            yield of_function("impl", fn, raw.source(each), target=key)


def _fake(op: Any) -> Iterator[Rule]:
    rule, qualname = op._rules.fake, op._qualname
    registered = rule.values.get(None)
    if rule.is_derived(None):
        yield _derived("fake")
    elif registered is not None:
        yield of_function("fake", registered, rule.source(None))
    elif rule.fn is not None:
        yield of_function("fake", rule.fn, "", origin="derived")
    elif rule.trivial():
        returned = "what it writes to" if op._definition.schema.returns else "nothing"
        yield Rule("fake", name=f"returns {returned}", origin="derived")
    elif rule.default is not None:
        yield Rule("fake", name="that of the functional op", origin="derived")
    elif _torch.dispatcher.has_kernel(qualname, "CompositeImplicitAutograd"):
        yield Rule("fake", name="traced into the ops it is made of", origin="derived")
    elif not op._definition.has_own_rules and (place := _fake_of_others(qualname)) is not None:
        yield Rule("fake", where=place, origin="others")
    else:
        yield Rule("fake", origin="missing", note=rule.lost)


def _fake_of_others(qualname: str) -> str | None:
    """Where a fake, or a kernel for meta tensors, was registered outside customops."""
    known = _torch.library.made_by_torch(qualname)
    if known is not None:  # torch has a fake on record for all of these: one that raises
        return location_of(known.fake) if known.fake is not None else None
    record = _torch.library.fake_record(qualname)
    if record is not None:
        return str(record.source)
    table = _torch.dispatcher.registered_at(qualname)
    places = table.get("Meta") or table.get(ANY_DEVICE) or table.get(_FOR_MANY[2])
    return places[0] if places else None


def _gradients(op: Any) -> Iterator[Rule]:
    rule, known = op._rules.autograd, _torch.library.made_by_torch(op._qualname)
    if known is None:
        place = autograd_of_others(op._definition)
    else:  # torch puts a kernel at Autograd for all of these
        place = location_of(known.backward) if known.backward is not None else None
    for kind in ("backward", "jvp"):
        formula = rule.formulas.get(kind)
        if rule.is_derived(kind):
            yield _derived(kind)
        elif formula is not None:
            yield of_function(kind, formula.fn, rule.source(kind))
        elif place:
            yield Rule(kind, where=place, origin="others")
        else:
            yield Rule(kind, origin="missing")


def autograd_of_others(operator: Any) -> str | None:
    """Where a kernel at Autograd, or one made of ops that have theirs, was registered outside customops."""
    table = _torch.dispatcher.registered_at(operator.qualname)
    if "CompositeImplicitAutograd" in table:
        return table["CompositeImplicitAutograd"][0]
    for key, places in table.items():
        if key.startswith("Autograd") and len(places) > len(operator._kernels.get(key, ())):
            return places[0]
    return None


def _vmap(op: Any) -> Iterator[Rule]:
    rule = op._rules.vmap
    fn = rule.registered
    if rule.is_derived(None):
        yield _derived("vmap")
    elif isinstance(fn, _Strategy):
        yield Rule("vmap", name=fn.name, registered=rule.source(None))
    elif fn is not None:
        yield of_function("vmap", fn, rule.source(None))
    elif rule.without_rule is not None:
        yield Rule("vmap", name="that of the functional op, and a copy", origin="derived")
    elif op._definition.has_own_rules:
        yield Rule("vmap", name=ONE_BY_ONE, origin="derived")
    elif places := _torch.dispatcher.registered_at(op._qualname).get("FuncTorchBatched"):
        yield Rule("vmap", where=places[0], origin="others")
    else:
        yield Rule("vmap", origin="missing")


#: Class of a rule -> its kind; what it applies to, None for its key; and of its values the function, if they have one.
_SPECIAL: dict[type, tuple[str, str | None, Callable[[Any], Fn] | None]] = {
    AutocastRule: ("autocast", None, None),
    TorchDispatchRule: ("torch_dispatch", None, lambda fn: fn),
    DecompositionRule: ("decomposition", None, lambda pair: pair[0].fn),
    InductorLoweringRule: ("lowering", "inductor", lambda code: code.fn),
    EffectRule: ("effect", "", None),
    ShardingRule: ("sharding", "DTensor", lambda rule: rule.fn),
}


def _special(op: Any) -> Iterator[Rule]:
    """The rules that most ops do not have, and the samples."""
    for cls, (kind, target, fn_of) in _SPECIAL.items():
        rule = op._rules._others.get(cls)
        for key, value in rule.values.items() if rule is not None else ():
            of, source = getattr(key, "__name__", key) if target is None else target, rule.source(key)
            if rule.is_derived(key):
                yield _derived(kind, of)
            elif fn_of is None:
                yield Rule(kind, of, str(value).rpartition(".")[2], registered=source)
            else:
                applies = value[1] if cls is DecompositionRule else None
                note = f"where {name_of(applies.fn)} is true" if applies else ""
                yield replace(of_function(kind, fn_of(value), source, target=of), note=note)
    sharding = _torch.distributed.sharding_of(op._opoverload)
    if sharding is not None:  # that of DTensor, which most programs do not use
        yield of_function("sharding", sharding, "", target="DTensor", origin="others")
    if op._samples is None:
        yield Rule("samples", origin="missing")
    else:
        yield of_function("samples", op._samples.fn, location_of(op._samples.fn))


#: In the order of a description. A new kind of rule gets a function here.
_READERS: tuple[Callable[[Any], Iterator[Rule]], ...] = (_reference, _kernels, _fake, _gradients, _vmap, _special)


def supports_of(op: Any, rules: Sequence[Rule]) -> Iterator[Support]:
    """A line for each feature of torch, of an op and its lines of `rules_of`."""
    first, operator = {rule.kind: rule for rule in reversed(rules)}, op._definition
    fake, vmap = first["fake"], first["vmap"]
    is_composite = _torch.dispatcher.has_kernel(op._qualname, "CompositeImplicitAutograd")
    # Ops of aten may return a view, or a mutated argument without these tags.
    may_alias = operator.name.namespace == "aten" or is_composite or {Tag.inplace, Tag.out} & {*operator.tags}
    is_alias = not may_alias and any(ret.alias is not None for ret in operator.schema.returns)
    for feature in ("torch.compile", "torch.export"):
        if fake.origin == "missing":
            yield Support(feature, "no", "there is no fake impl", "op.register_fake(fn)")
        elif feature == "torch.compile" and is_alias:
            fix = "return a copy" if operator.schema.is_view else "define it with customops.Tag.inplace or Tag.out"
            yield Support(feature, "no", "torch does not functionalize a custom op that returns an alias", fix)
        else:
            yield Support(feature, "yes")
    yield _differentiation(operator, "training", first["backward"], "register_autograd", is_composite)
    yield _differentiation(operator, "forward mode", first["jvp"], "register_jvp", is_composite)
    if not any(argument.holds_tensors for argument in operator.schema.arguments):
        yield Support("vmap", "not applicable", "no argument is a tensor")
    elif vmap.origin == "missing" and not is_composite:
        yield Support("vmap", "slow", "torch's fallback, one call for each element")
    elif vmap.name == ONE_BY_ONE:
        yield Support("vmap", "slow", ONE_BY_ONE, "op.register_vmap(fn)")
    else:
        yield Support("vmap", "yes")


def _differentiation(operator: Any, feature: str, rule: Rule, method: str, is_composite: bool) -> Support:
    schema = operator.schema
    reasons = {
        "out variants have no gradient": Tag.out in operator.tags,
        "declared with differentiable=False": not operator.differentiable.op,
        "no argument is a tensor": not any(argument.holds_tensors for argument in schema.arguments),
        "no result is a tensor": not (schema.mutated or any(ret.holds_tensors for ret in schema.returns)),
        "it returns views in a way that autograd has no rule for": not schema.is_differentiable,
        "it returns a view": rule.kind == "jvp" and schema.is_view,
    }
    for reason, holds in reasons.items():
        if holds:
            return Support(feature, "not applicable", reason)
    if rule.origin == "others" and rule.kind == "jvp" and not is_composite:
        return Support(feature, "unknown", "as the autograd kernel of others has it")
    if rule.origin == "missing":
        return Support(feature, "no", f"there is no {rule.kind}", f"op.{method}(fn)")
    return Support(feature, "yes")
