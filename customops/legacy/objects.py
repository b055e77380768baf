"""The older object layer: a decorator that returns a `CustomOp`, on which kernels and rules are registered."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.library import Library
from torch.library import get_ctx as get_ctx

from customops import _torch
from customops._dispatch.callbacks import Fn, bind
from customops._dispatch.names import RESERVED_NAMESPACES, Name, own_name
from customops._dispatch.registrations import Registration, lock
from customops._dispatch.results import check_policy
from customops._dispatch.spec import OpSpec, Options
from customops._op.op import CustomOpDef
from customops._op.registry import default
from customops._rules import Rules
from customops._rules.fake import FakeRule
from customops._schema.annotations import show
from customops._schema.infer import infer_schema as infer_schema
from customops._schema.infer import read
from customops._schema.model import Schema
from customops._schema.parse import parse
from customops._schema.structure import Signature
from customops._schema.tags import with_pt2_compliant
from customops.errors import (
    DefinitionError,
    RegistrationError,
    SchemaError,
    UnregisteredError,
    UnsupportedError,
    brief,
    location_of,
    user_source,
    where,
)
from customops.legacy import _autograd
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
        leaves = _torch.tensors.tree_leaves((args, kwargs))
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


def define_op(name: Name, fn: Fn | None, text: str | None, tags: tuple[torch.Tag, ...]) -> CustomOpDef[Any, Any]:
    """Define `name` in the default registry, from schema text or the hints of `fn`; with no kernel."""
    op = str(name)
    if text is not None:
        schema = _parse(name, text)
    else:
        assert fn is not None
        schema, _, signature = read(fn, (), op=op)
        if signature is not None:
            raise _unsupported(signature, fn, op)
    if not schema.is_functional:
        raise DefinitionError(
            "the legacy API only supports functional ops: they write to no argument, and return new tensors",
            op=op,
            got=str(schema),
            fix="customops.custom_op",
        )
    if any(argument.name == "self" for argument in schema.arguments):
        raise DefinitionError("no argument may be named 'self'", op=op, got=str(schema), fix="rename it")
    if text is not None and fn is not None:
        check_signature(fn, schema, op)
    options, tags = Options(check_policy(None, op)), with_pt2_compliant(tags)
    spec = OpSpec(name, schema, tags, text, MissingKernel(name), options=options, source=user_source())
    with lock:
        if _torch.library.find_overload(name.packet) is not None:
            raise RegistrationError(
                "an op cannot be defined multiple times",
                op=op,
                got=f"one defined at {_torch.schema.defined_at(op)}",
                where=where(fn) if fn is not None else None,
                fix="choose another name, or remove that op first: customops.legacy._destroy",
            )
        return default.add(spec, Rules(LateFake(), GatedAutograd(Pair(op, schema))))


def _parse(name: Name, text: str) -> Schema:
    named, reason = f"{name.name}{text}", None
    if text.lstrip().startswith("("):
        try:
            return parse(named)
        except SchemaError as error:
            reason = error
    raise InvalidSchemaError(
        f"Invalid function schema: {named}", op=str(name), expected='e.g. "(Tensor x) -> Tensor"'
    ) from reason


def _unsupported(signature: Signature, fn: Fn, op: str) -> SchemaError:
    """The error for what a schema alone cannot hold: the older API has no function to hand it to."""
    parameter = next((each for each in signature.parameters if not each.is_plain), None)
    hints = inspect.signature(fn)
    hint = hints.return_annotation if parameter is None else hints.parameters[parameter.name].annotation
    what = "the return" if parameter is None else f"parameter {parameter.name}"
    problem = f"{what} has unsupported type {hint if isinstance(hint, str) else show(hint)}"
    if parameter is not None and (parameter.node.is_plain or parameter.stars):
        problem = f"{what}: positional-only parameters, varargs and varkwargs are not supported"
    return SchemaError(problem, op=op, where=where(fn), fix="customops.custom_op, which takes it")


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


__all__ = [
    "RESERVED_NS",
    "SUPPORTED_DEVICE_TYPE_TO_KEY",
    "CustomOp",
    "custom_op",
    "get_abstract_impl",
    "get_ctx",
    "get_op",
    "global_registry",
    "infer_schema",
]

F = TypeVar("F", bound=Callable[..., Any])

#: The namespaces in which only torch may define ops.
RESERVED_NS = RESERVED_NAMESPACES

#: The device types that the legacy API registers kernels for, and their dispatch keys.
SUPPORTED_DEVICE_TYPE_TO_KEY = {"cpu": "CPU", "cuda": "CUDA"}

#: The `CustomOp` of each op that the legacy API defined or registered something on, by qualified name.
global_registry: dict[str, CustomOp] = {}


class CustomOp:
    """An op of the legacy API: a `CustomOpDef` with the older method names. `custom_op` makes it."""

    __name__: str
    _op: CustomOpDef[Any, Any]
    _pair: _autograd.Pair
    _library: Library | None  # of what was registered here on an op that is not ours
    _is_gated: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RegistrationError("the CustomOp constructor is private", fix="customops.legacy.objects.custom_op")

    @classmethod
    def _of(cls, op: CustomOpDef[Any, Any], pair: _autograd.Pair, library: Library | None) -> CustomOp:
        made = cls.__new__(cls)
        made._op, made._pair, made._library, made._is_gated = op, pair, library, library is None
        made.__name__ = op.__name__
        global_registry[made._qualname] = made
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._op(*args, **kwargs)

    def __repr__(self) -> str:
        return f'<CustomOp(op="{self._qualname}")>'

    @property
    def _qualname(self) -> str:
        return self._op._qualname

    @property
    def _is_current(self) -> bool:
        """Is the op still there, and still the one of its name?"""
        if self._op._definition.removed is not None:
            return False
        return self._library is None or self._op._opoverload is _torch.library.find_overload(self._qualname)

    def impl(self, device_types: str | Iterable[str]) -> Callable[[F], F]:
        """Decorator that registers the kernel for "cpu", "cuda", or both."""
        devices = tuple(dict.fromkeys([device_types] if isinstance(device_types, str) else device_types))
        for device in devices:
            if device not in SUPPORTED_DEVICE_TYPE_TO_KEY:
                raise DefinitionError(
                    f"we only support device_type {' and '.join(SUPPORTED_DEVICE_TYPE_TO_KEY)} here",
                    op=self._qualname,
                    got=brief(device),
                    fix="customops.register_kernel takes every device type",
                )

        def decorate(fn: F) -> F:
            with lock:
                for device in devices:
                    self._refuse_kernel(device)
                self._op.register_kernel(devices, fn, lib=self._library)
            return fn

        return decorate

    def _refuse_kernel(self, device: str) -> None:
        """Raise if the op has a kernel for the device."""
        known = self._op._rules.kernel.kernels.get(device)
        if known is not None:
            raise RegistrationError(
                f"the op already has a {device} impl registered from Python", op=self._qualname, where=where(known)
            )
        keys = [SUPPORTED_DEVICE_TYPE_TO_KEY[device], "CompositeImplicitAutograd"]
        if self._library is not None:  # on an op of ours, what is there says that kernels are missing
            keys.append("CompositeExplicitAutograd")
        for key in keys:
            if _torch.dispatcher.has_kernel(self._qualname, key):
                raise RegistrationError(
                    f"the op already has an implementation for {device}, registered at {key}", op=self._qualname
                )

    def impl_factory(self) -> Callable[[F], F]:
        """Decorator that registers the kernel of an op that takes no tensors."""
        return self._op.register_kernel(None, lib=self._library)

    def impl_abstract(self) -> Callable[[F], F]:
        """Decorator that registers the fake impl. It raises if the op already has one."""
        return self._op.register_fake(lib=self._library, allow_override=False)

    def _replace_abstract(self, fn: Fn) -> Fn:
        return self._op.register_fake(fn, lib=self._library)

    def impl_save_for_backward(self) -> Callable[[F], F]:
        """Decorator that registers ``fn(inputs, output)``, which returns what backward needs."""

        def decorate(fn: F) -> F:
            with lock:
                self._refuse_formula("save_for_backward", self._pair.save)
                bind(fn, self._qualname, "save_for_backward function", "inputs", "output")
                self._register_formula("save", fn)
            return fn

        return decorate

    def impl_backward(self, output_differentiability: list[bool] | None = None) -> Callable[[F], F]:
        """Decorator that registers ``fn(ctx, saved, *grads)``, which returns a dict of gradients by name of the input.

        `output_differentiability` has a bool for each output; an output with False never requires grad.
        """
        _autograd.check_differentiability(output_differentiability, self._qualname, self._op.schema)

        def decorate(fn: F) -> F:
            grads = (f"grad{i}" for i in range(len(self._op.schema.returns)))
            with lock:
                self._refuse_formula("backward", self._pair.backward)
                bind(fn, self._qualname, "backward", "ctx", "saved", *grads)
                self._pair.differentiable = output_differentiability
                self._register_formula("backward", fn)
            return fn

        return decorate

    def _refuse_formula(self, kind: str, known: Fn | None) -> None:
        _autograd.check_can_differentiate(self._qualname, self._op.schema)
        if known is not None:
            raise RegistrationError(
                f"the op already has a {kind} impl registered from Python", op=self._qualname, where=where(known)
            )
        if not self._is_gated:
            _autograd.check_no_autograd(self._qualname)

    def _register_formula(self, half: str, fn: Fn) -> None:
        """Set one of the two functions of the pair, and register the pair if it is whole."""
        pair = self._pair
        setattr(pair, half, fn)
        try:
            if pair.save is not None and pair.backward is not None:
                self._op.register_autograd(pair.run_backward, setup_context=pair.setup_context, lib=self._library)
            elif not self._is_gated:
                self._op._register(self._library, _autograd.install_gate, self._op._definition, pair)
                self._is_gated = True
        except BaseException:
            setattr(pair, half, None)
            raise
        self._op._owner.record(Registration(functools.partial(setattr, pair, half, None)))

    def _destroy(self) -> None:
        """Remove the op and its entry; from an op defined outside customops, what was registered here."""
        with lock:
            if global_registry.get(self._qualname) is self:
                del global_registry[self._qualname]
            if self._library is not None:
                _torch.library.destroy_library(self._library)
            elif self._op._definition.removed is None:
                self._op.unregister()


def custom_op(qualname: str, manual_schema: str | None = None) -> Callable[[Fn], CustomOp]:
    """Decorator that defines an op by the type hints of a function, or by a schema.

    With `manual_schema`, the function has no annotations, and its parameters must match the schema. The function is a
    prototype: it is never called. Kernels are registered on the `CustomOp` that replaces it.
    """

    def decorate(fn: Fn) -> CustomOp:
        op = define(qualname, fn, manual_schema)
        op.__name__, op.__module__, op.__doc__ = fn.__name__, fn.__module__, fn.__doc__
        return op

    return decorate


def define(qualname: str, fn: Fn | None, text: str | None, tags: tuple[Any, ...] = ()) -> CustomOp:
    """Define an op and enter it in `global_registry`."""
    name = name_to_define(qualname, fn)
    op = define_op(name, fn, text, tags)
    rule = op._rules.autograd
    assert isinstance(rule, _autograd.GatedAutograd)
    return CustomOp._of(op, rule.pair, None)


def find(qualname: str, *, also_others: bool = False) -> CustomOp:
    """The `CustomOp` of a name; `also_others` makes one for an op that the legacy API did not define."""
    with lock:
        known = global_registry.get(qualname)
        if known is not None and known._is_current:
            return known
        if not also_others:
            raise UnregisteredError("Could not find an op of the legacy API by this name", op=qualname)
        overload = get_op(qualname)
        if known is not None:
            known._destroy()
        op = default.adopt(overload)
        library = Library(overload.namespace, "FRAGMENT")
        return CustomOp._of(op, _autograd.Pair(qualname, op.schema), library)


def get_op(qualname: str) -> Any:
    """The default OpOverload of a registered op, also if it was not defined with this API."""
    overload = _torch.library.find_overload(parse_name(qualname).packet)
    if overload is None:
        raise DefinitionError(
            "Could not find the operator", op=qualname, fix="define it first, or import the library that does"
        )
    return overload


def get_abstract_impl(qualname: str) -> Fn | None:
    """The fake impl that was registered for an op of the legacy API, or None."""
    known = global_registry.get(qualname)
    return known._op._abstract_fn if known is not None else None
