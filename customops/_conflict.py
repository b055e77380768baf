"""An op is defined by a name that another has: it is replaced or reused, or the error says where it was defined."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from customops import _compat, _spec
from customops._describe.screen import shorter_place
from customops._dispatch import first_use
from customops._dispatch.name import Name
from customops._dispatch.registrations import Undo
from customops._dispatch.spec import OpSpec
from customops._lifetime import Owner, in_scope
from customops._op import CustomOpDef
from customops._schema.model import Schema
from customops.errors import DefinitionError, UnregisteredError, name_of, where

log = logging.getLogger("customops")

AGAIN = "define it again, or use the new object"


def place(qualname: str, owner: Owner) -> str:
    """``file:line`` where an op was defined. What torch knows is a line of ours, for ops of `Registry.define`."""
    known = _compat.registries.torch_op_of(qualname) or owner.find(qualname)
    return known.source if isinstance(known, CustomOpDef) else _compat.schemas.defined_at(qualname)


def conflict(qualname: str, owner: Owner, reason: str, fix: str, at: str | None, **fields: str) -> DefinitionError:
    """The error for an op that exists; `at` is where the other one is defined."""
    problem = f"an op of this name exists, defined at {place(qualname, owner)}: {reason}"
    return DefinitionError(problem, op=qualname, where=at, fix=fix, **fields)


def check_same(
    old: CustomOpDef[Any, Any], schema: Schema, tags: tuple[torch.Tag, ...], owner: Owner, fix: str, at: str | None
) -> None:
    """Raise unless an op has this schema and these tags."""
    known = old._definition.tags
    if old.schema.exact_key != schema.exact_key or set(known) != set(tags):
        raise conflict(
            old._qualname,
            owner,
            "on_conflict='reuse' needs the same schema and tags",
            fix,
            at,
            expected=f"{old.schema} {sorted(map(str, known)) or ''}",
            got=f"{schema} {sorted(map(str, tags)) or ''}",
        )


def replaced(qualname: str, place: str, fn: Any = None) -> UnregisteredError:
    """What calls of an op raise once the one of this place, and this function, has its name."""
    by = "" if fn is None else f" ({name_of(fn)})"
    return UnregisteredError(f"the op was replaced by the definition at {place}{by}", op=qualname, fix=AGAIN)


def destroyed(qualname: str) -> UnregisteredError:
    """What calls of an op raise whose library others destroyed."""
    problem = "the library of the op was destroyed (torch.library.custom_op redefining its name does that)"
    return UnregisteredError(problem, op=qualname)


def replace(spec: OpSpec, owner: Owner) -> CustomOpDef[Any, Any]:
    """Define an op in the place of another; the other comes back if that fails."""
    old = _compat.registries.torch_op_of(spec.qualname)
    if not isinstance(old, CustomOpDef):
        return _replace_torchs(spec, owner)
    _spec.check_spec(spec)
    dropped = (
        _dropped(old) if old.source != spec.source and not in_scope(owner) else ""
    )  # else the same code runs again
    undo = put_aside(old, spec.qualname, spec.place, spec.fn)
    try:
        op = _spec.define_op(spec, owner)
    except BaseException:
        undo()
        raise
    op._rules.fake.follow(old._rules.fake, spec.source)
    if dropped:
        log.warning("%s: defined again at %s, which drops what was registered: %s", spec.qualname, spec.source, dropped)
    owner.enter(op, functools.partial(end, op, old))
    return op


def _dropped(old: CustomOpDef[Any, Any]) -> str:
    """What was registered on an op, and where."""
    rules = [rule for rule in old.describe().rules if rule.origin == "registered"]
    return ", ".join(f"{rule.kind} ({shorter_place(rule.registered or rule.where)})" for rule in rules)


def put_aside(old: CustomOpDef[Any, Any], qualname: str, place: str, fn: Any = None) -> Undo:
    """Remove an op, for one that is defined at a place; what is returned brings it back."""
    owner = old._owner
    owner.drop(old, replaced(qualname, place, fn))
    return functools.partial(owner.restore, old)


def _replace_torchs(spec: OpSpec, owner: Owner) -> CustomOpDef[Any, Any]:
    """Define an op in the place of one made by torch.library.custom_op, whose rule for a same name is this, too."""
    library = _compat.registries.torch_library_of(spec.qualname)
    if library is None:
        reason = "it was not made by custom_op, so it cannot be replaced"
        raise conflict(spec.qualname, owner, reason, "choose another name", function_of(spec))
    _spec.check_spec(spec)
    overload = _compat.libraries.find_overload(spec.name.packet, spec.name.overload)
    _compat.libraries.destroy_library(library)
    if overload is not None:
        _compat.libraries.retire_overload(overload, replaced(spec.qualname, spec.place, spec.fn))
    op: CustomOpDef[Any, Any] = owner.add(spec)
    return op


def end(op: CustomOpDef[Any, Any], old: CustomOpDef[Any, Any] | None = None) -> None:
    """Remove an op for good: its scope or library has ended. `old`, which it replaced, comes back.

    If another op has taken the name in the meantime, `old` waits until that one ends, in its own scope.
    """
    op._instead = (old,)
    op._owner.drop(op)
    while old is not None and old._instead:
        (old,) = old._instead
    if old is not None and not first_use.exists(Name.parse(old._qualname)):
        old._owner.restore(old)


def reuse(spec: OpSpec, owner: Owner) -> CustomOpDef[Any, Any]:
    """The existing op, if it is the same one."""
    old = _compat.registries.torch_op_of(spec.qualname)
    if not isinstance(old, CustomOpDef):
        reason = "it was not made by custom_op, so it cannot be reused"
        raise conflict(spec.qualname, owner, reason, "choose another name", function_of(spec))
    fix = 'on_conflict="replace", or another name'
    check_same(old, spec.schema, spec.tags, owner, fix, function_of(spec))
    if old._definition.spec.signature != spec.signature:
        raise conflict(spec.qualname, owner, "on_conflict='reuse' needs the same types", fix, function_of(spec))
    return old


def function_of(spec: OpSpec) -> str | None:
    return where(spec.fn) if spec.fn is not None else None
