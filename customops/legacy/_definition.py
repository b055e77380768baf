"""An op defined from a schema alone: no kernel, no fake and no gradient until they are registered."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from customops import _compat
from customops._dispatch.callbacks import Fn
from customops._dispatch.name import Name, own_name
from customops._dispatch.registrations import lock
from customops._dispatch.results import check_policy
from customops._dispatch.spec import OpSpec
from customops._op import CustomOpDef
from customops._registry import default
from customops._rules import Rules
from customops._rules.fake import FakeRule
from customops._schema.infer import read
from customops._schema.model import Schema
from customops._schema.nodes import Signature
from customops._schema.parse import parse
from customops._schema.spelling import show
from customops._schema.tags import with_pt2_compliant
from customops.errors import (
    DefinitionError,
    RegistrationError,
    SchemaError,
    UnsupportedError,
    brief,
    location_of,
    user_source,
    where,
)
from customops.legacy._autograd import GatedAutograd, Pair


class InvalidSchemaError(SchemaError, AssertionError):
    """Text that is no schema: an AssertionError too, as the parser of the old API raised."""


class LateFake(FakeRule):
    """A fake that is put into the dispatcher when there is one.

    Until then FakeTensorMode sees a missing kernel as it does for ops of torch, and says so in its own way.
    """

    _with_op = ()


class MissingKernel:
    """Stands where a kernel is missing. Which one, the arguments say."""

    def __init__(self, name: Name) -> None:
        self.op = str(name)
        self.__name__ = name.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = _compat.tracing.tree_leaves((args, kwargs))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if not devices:
            raise UnsupportedError(
                "there were no Tensor inputs to tell which kernel to run",
                op=self.op,
                fix="for an op that makes tensors from nothing, register with CustomOp.impl_factory",
            )
        device = next((device for device in sorted(devices) if device != "cpu"), "cpu")
        if device == "meta":
            raise UnsupportedError(
                "there is no fake impl or Meta kernel registered to run on meta tensors",
                op=self.op,
                fix=f"@impl_abstract({self.op!r})",
            )
        raise UnsupportedError(
            f"there is no {device} impl registered", op=self.op, fix=f"@impl({self.op!r}, device_types={device!r})"
        )


def parse_name(qualname: str) -> Name:
    """``ns::name`` of an op to be found. Overloads are refused."""
    name = Name.parse(qualname)
    if name.overload:
        raise DefinitionError(
            "the legacy API does not handle an overload in the name", got=brief(qualname), fix=repr(name.packet)
        )
    return name


def name_to_define(qualname: str, fn: Fn | None = None) -> Name:
    """The same for an op to be defined, from a function of that name if there is one."""
    name = parse_name(qualname)
    own_name(qualname)
    if fn is not None and not inspect.isfunction(fn):
        raise DefinitionError("custom_op decorates a Python function", op=qualname, got=brief(fn))
    if fn is not None and fn.__name__ != name.name:
        raise DefinitionError(
            f"the decorated function is expected to have name {name.name!r}",
            op=qualname,
            got=repr(fn.__name__),
            where=where(fn),
            fix="change the name of the function, or that of the op",
        )
    return name


def define(name: Name, fn: Fn | None, text: str | None, tags: tuple[torch.Tag, ...]) -> CustomOpDef[Any, Any]:
    """Define `name` in the default registry, from schema text or the hints of `fn`; with no kernel."""
    op = str(name)
    if text is not None:
        schema = _parse(name, text)
    else:
        assert fn is not None
        schema, _, signature = read(fn, (), op=op)
        if signature is not None:
            raise _unsupported(signature, fn, op)
    _refuse(schema, op)
    if text is not None and fn is not None:
        check_signature(fn, schema, op)
    check, tags = check_policy(None, op), with_pt2_compliant(tags)
    spec = OpSpec(name, schema, tags, text, MissingKernel(name), check=check, source=user_source())
    with lock:
        if _compat.libraries.find_overload(name.packet) is not None:
            raise RegistrationError(
                "an op cannot be defined multiple times",
                op=op,
                got=f"one defined at {_compat.schemas.defined_at(op)}",
                where=where(fn) if fn is not None else None,
                fix="choose another name, or remove that op first: customops.legacy._destroy",
            )
        return default.add(spec, Rules(LateFake(), GatedAutograd(Pair(op, schema))))


def _parse(name: Name, text: str) -> Schema:
    named = f"{name.name}{text}"
    if text.lstrip().startswith("("):
        try:
            return parse(named)
        except SchemaError as error:
            reason: SchemaError | None = error
    else:
        reason = None
    raise InvalidSchemaError(
        f"Invalid function schema: {named}", op=str(name), expected='e.g. "(Tensor x) -> Tensor"'
    ) from reason


def _unsupported(signature: Signature, fn: Fn, op: str) -> SchemaError:
    """The error for what a schema alone cannot hold: the older API has no function to hand it to."""
    parameter = next((each for each in signature.parameters if not each.is_plain), None)
    hints = inspect.signature(fn)
    if parameter is None:
        what, hint = "the return", hints.return_annotation
    else:
        what, hint = f"parameter {parameter.name}", hints.parameters[parameter.name].annotation
    problem = f"{what} has unsupported type {hint if isinstance(hint, str) else show(hint)}"
    if parameter is not None and (parameter.node.is_plain or parameter.stars):
        problem = f"{what}: positional-only parameters, varargs and varkwargs are not supported"
    return SchemaError(problem, op=op, where=where(fn), fix="customops.custom_op, which takes it")


def _refuse(schema: Schema, op: str) -> None:
    if not schema.is_functional:
        raise DefinitionError(
            "the legacy API only supports functional ops: they write to no argument, and return new tensors",
            op=op,
            got=str(schema),
            fix="customops.custom_op",
        )
    if any(argument.name == "self" for argument in schema.arguments):
        raise DefinitionError("no argument may be named 'self'", op=op, got=str(schema), fix="rename it")


def check_signature(fn: Fn, schema: Schema, op: str) -> None:
    """Raise unless the parameters of `fn` are those of a schema given by hand, without annotations or defaults."""
    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())
    fields = {"op": op, "expected": str(schema), "got": f"{signature}", "where": location_of(fn)}
    if not {p.kind for p in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
        raise DefinitionError("positional-only parameters, *args and **kwargs are not supported", **fields)
    hints = [signature.return_annotation, *(p.annotation for p in parameters)]
    if any(hint is not inspect.Parameter.empty for hint in hints):
        raise DefinitionError("a function with a schema given by hand must have no annotations", **fields)
    if any(p.default is not inspect.Parameter.empty for p in parameters) or any(
        a.has_default for a in schema.arguments
    ):
        raise DefinitionError("neither the function nor the schema may have default arguments", **fields)
    wanted = [(a.name, a.kwarg_only) for a in (*schema.positional, *schema.keyword_only)]
    if wanted != [(p.name, p.kind is inspect.Parameter.KEYWORD_ONLY) for p in parameters]:
        raise DefinitionError("the function is expected to have a signature to match the schema", **fields)
