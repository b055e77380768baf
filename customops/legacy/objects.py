"""The older object layer: a decorator that returns a `CustomOp`, on which kernels and rules are registered."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.library import Library
from torch.library import get_ctx as get_ctx

from customops import _torch
from customops._autograd.rule import AutogradRule
from customops._codegen import kernel as codegen
from customops._dispatch.callbacks import Fn, bind
from customops._dispatch.names import RESERVED_NAMESPACES, Name, own_name
from customops._dispatch.operator import OperatorHandle, OpSpec
from customops._dispatch.options import Options, check_policy
from customops._dispatch.registrations import Registration, lock
from customops._dispatch.scopes import record_in_scope
from customops._op.op import CustomOpDef
from customops._op.registry import default
from customops._places import location_of, user_source, where
from customops._rules import Rules
from customops._rules.fake import FakeRule
from customops._schema.annotations import show
from customops._schema.infer import infer_schema as infer_schema
from customops._schema.infer import read
from customops._schema.model import Schema
from customops._schema.parse import parse
from customops.errors import (
    AutogradError,
    DefinitionError,
    RegistrationError,
    SchemaError,
    UnregisteredError,
    UnsupportedError,
    brief,
)


class InvalidSchemaError(SchemaError, AssertionError):
    """Text that is no schema: an AssertionError too, as the parser of the old API raised."""


# The old form of a gradient, ``save(inputs, output)`` and ``backward(ctx, saved, *grads) -> dict``, on the new one ----


class Pair:
    """The two functions of one op, and what stands between them and `CustomOpDef.register_autograd`."""

    def __init__(self, op: str, schema: Schema) -> None:
        self.op = op
        self.schema = schema
        #: The namedtuple that `save` is given.
        names = [argument.name for argument in schema.arguments]
        self.inputs_type: Any = cast(Any, collections.namedtuple)(f"{op.rpartition(':')[2]}_inputs", names, rename=True)
        self.save: Fn | None = None
        self.backward: Fn | None = None
        self.differentiable: list[bool] | None = None

    def refuse_call(self, differentiated: bool) -> None:
        """Raise where a call needs a gradient formula, or where half of one was registered."""
        found = self.save or self.backward
        if found is not None:
            kinds = ("save_for_backward", "backward")
            has, lacks = kinds if self.backward is None else kinds[::-1]
            raise AutogradError(
                f"a {has!r} was registered, but we were unable to find a {lacks!r}",
                op=self.op,
                where=where(found),
                fix=f"register it, too: impl_{lacks}({self.op!r})",
            )
        if differentiated:
            raise AutogradError(
                f"Autograd has not been implemented for operator {self.op}, and an input requires grad",
                op=self.op,
                fix=f"impl_save_for_backward({self.op!r}) and impl_backward({self.op!r}), or call it under no_grad",
            )

    def setup_context(
        self, ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None
    ) -> None:
        assert self.save is not None
        values = self.schema.by_name(inputs, keyword_only_inputs or {})
        saved = self.save(self.inputs_type(*(values[a.name] for a in self.schema.arguments)), output)
        leaves, spec = _torch.trees.tree_flatten(saved)
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        ctx._legacy_saved = spec, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        ctx._legacy_lengths = {name: len(value) for name, value in values.items() if isinstance(value, (list, tuple))}
        if self.differentiable is None:
            return
        without: list[Tensor] = []
        outputs = output if isinstance(output, tuple) else (output,)
        for i, (is_differentiable, value) in enumerate(zip(self.differentiable, outputs, strict=True)):
            if is_differentiable and not isinstance(value, (Tensor, list, tuple)):
                raise AutogradError(
                    f"output {i} is not a Tensor, so output_differentiability cannot say that it is differentiable",
                    op=self.op,
                    got=f"{type(value).__name__}, output_differentiability={self.differentiable}",
                )
            if not is_differentiable:
                without += [leaf for leaf in _torch.trees.tree_leaves(value) if isinstance(leaf, Tensor)]
        ctx.mark_non_differentiable(*without)

    def run_backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        assert self.backward is not None
        spec, others = ctx._legacy_saved
        tensors = iter(ctx.saved_tensors)
        saved = _torch.trees.tree_unflatten([next(tensors) if other is None else other[0] for other in others], spec)
        gradients = self.backward(ctx, saved, *grads)
        self._check(gradients, ctx._legacy_lengths)
        return tuple(gradients.get(argument.name) for argument in self.schema.operands)

    def _check(self, gradients: Any, lengths: dict[str, int]) -> None:
        if not isinstance(gradients, dict):
            raise self._error("the result of backward is expected to be a dict", type(gradients).__name__)
        wanted = [argument.name for argument in self.schema.arguments if argument.holds_tensors]
        if set(gradients) != set(wanted):
            expected, got = (f"{{{', '.join(sorted(map(repr, names)))}}}" for names in (set(wanted), gradients))
            raise self._error(
                f"the dict that backward returns is expected to have keys {expected}, one for each input that is a "
                "Tensor or a list of them; inputs of non-Tensor-like types have none",
                got,
            )
        for name, gradient in gradients.items():
            items, problem = {name: gradient}, "a gradient is expected to be either None or a Tensor"
            if name in lengths:
                if not isinstance(gradient, (list, tuple)):
                    wrong = "a list of Tensors is expected to have a list of gradients"
                    raise self._error(wrong, type(gradient).__name__, name)
                if len(gradient) != lengths[name]:
                    wrong = f"the input is expected to have a list of {lengths[name]} gradients but got {len(gradient)}"
                    raise self._error(wrong, None, name)
                items = {f"{name}[{i}]": item for i, item in enumerate(gradient)}
                problem = "a list of gradients is expected to hold None or Tensor"
            for argument, item in items.items():
                if item is not None and not isinstance(item, Tensor):
                    raise self._error(problem, type(item).__name__, argument)

    def _error(self, problem: str, got: str | None, argument: str | None = None) -> AutogradError:
        assert self.backward is not None
        return AutogradError(problem, op=self.op, argument=argument, got=got, where=where(self.backward))


class GatedAutograd(AutogradRule):
    """Until there is a formula, differentiated calls raise before the op runs, not in backward."""

    _with_op = ()

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair

    def bind(self, operator: OperatorHandle) -> None:
        install_gate(operator, self.pair)
        super().bind(operator)


def install_gate(operator: OperatorHandle, pair: Pair) -> Registration:
    """Put the kernel that refuses calls at Autograd; a formula's takes its place."""
    overload, after = operator.overload, _torch.dispatcher.after_autograd
    any_requires_grad = codegen.any_requires_grad(operator.schema)

    def gate(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        has_tangent = _torch.autograd.forward_ad_active() and _torch.autograd.any_tangent((*args, *kwargs.values()))
        pair.refuse_call(has_tangent or (torch.is_grad_enabled() and any_requires_grad(*args, **kwargs)))
        with _torch.dispatcher.below_autograd():
            return overload.redispatch(keyset & after, *args, **kwargs)

    kernel = _torch.dynamo.outside_dynamo(gate)
    return Registration(operator.impl(kernel, "Autograd", with_keyset=True, own_library=True))


# Defining an op -------------------------------------------------------------------------------------------------------


class LateFake(FakeRule):
    """A fake that is put into the dispatcher when there is one.

    Until then FakeTensorMode sees a missing kernel as it does for ops of torch, and says so in its own way.
    """

    _with_op = ()


def missing_kernel(name: Name) -> Fn:
    """What runs where a kernel is missing: it raises, and says which one by the arguments."""
    op = str(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        leaves = _torch.trees.tree_leaves((args, kwargs))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
        device = min(devices - {"cpu"}, default="cpu")
        problem, fix = f"there is no {device} impl registered", f"@impl({op!r}, device_types={device!r})"
        if not devices:
            problem = "there were no Tensor inputs to tell which kernel to run"
            fix = "for an op that makes tensors from nothing, register with CustomOp.impl_factory"
        elif device == "meta":
            problem = "there is no fake impl or Meta kernel registered to run on meta tensors"
            fix = f"@impl_abstract({op!r})"
        raise UnsupportedError(problem, op=op, fix=fix)

    missing.__name__ = name.name
    return missing


def parse_name(qualname: str) -> Name:
    """``ns::name`` of an op to be found. Overloads are refused."""
    name = Name.parse(qualname)
    if name.overload:
        raise DefinitionError("the legacy API does not support overloads", op=qualname, fix=f"use {name.packet!r}")
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


def define(qualname: str, fn: Fn | None, text: str | None, tags: tuple[torch.Tag, ...] = ()) -> CustomOp:
    """Define an op without a kernel in the default registry and `global_registry`, from text or the hints of `fn`."""
    name = name_to_define(qualname, fn)
    op = str(name)
    if text is None:
        assert fn is not None
        schema, _, signature = read(fn, (), op=op)
        if signature is not None:  # what a schema alone cannot hold: the older API has no function to hand it to
            parameter = next((each for each in signature.parameters if not each.is_plain), None)
            hints = inspect.signature(fn)
            hint = hints.return_annotation if parameter is None else hints.parameters[parameter.name].annotation
            what = "the return" if parameter is None else f"parameter {parameter.name}"
            problem = f"{what} has unsupported type {hint if isinstance(hint, str) else show(hint)}"
            if parameter is not None and (parameter.node.is_plain or parameter.stars):
                problem = f"{what}: positional-only parameters, varargs and varkwargs are not supported"
            raise SchemaError(problem, op=op, where=where(fn), fix="customops.custom_op, which takes it")
    else:
        try:
            schema = parse(f"{name.name}{text}" if text.lstrip().startswith("(") else "")
        except SchemaError as error:
            problem, expected = f"Invalid function schema: {name.name}{text}", 'e.g. "(Tensor x) -> Tensor"'
            raise InvalidSchemaError(problem, op=op, expected=expected) from error
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
        _check_signature(fn, schema, op)
    options, tags = Options(check_policy(None, op)), tuple(dict.fromkeys((torch.Tag.pt2_compliant_tag, *tags)))
    spec = OpSpec(name, schema, tags, text, missing_kernel(name), options=options, source=user_source())
    pair = Pair(op, schema)
    with lock:
        if _torch.library.find_overload(name.packet) is not None:
            raise RegistrationError(
                "an op cannot be defined multiple times",
                op=op,
                got=f"one defined at {_torch.schema.defined_at(op)}",
                where=where(fn) if fn is not None else None,
                fix="choose another name, or remove that op first: customops.legacy._destroy",
            )
        return CustomOp._of(default._add(spec, Rules(LateFake(), GatedAutograd(pair))), pair, None)


def _check_signature(fn: Fn, schema: Schema, op: str) -> None:
    """Raise unless the parameters of `fn` are those of a schema given by hand, without annotations or defaults."""
    signature, empty = inspect.signature(fn), inspect.Parameter.empty
    parameters = list(signature.parameters.values())
    hints = [signature.return_annotation, *(p.annotation for p in parameters)]
    wanted = [(a.name, a.kwarg_only) for a in (*schema.positional, *schema.keyword_only)]
    if not {p.kind for p in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
        problem = "positional-only parameters, *args and **kwargs are not supported"
    elif any(hint is not empty for hint in hints):
        problem = "a function with a schema given by hand must have no annotations"
    elif any(p.default is not empty for p in parameters) or any(a.has_default for a in schema.arguments):
        problem = "neither the function nor the schema may have default arguments"
    elif wanted != [(p.name, p.kind is inspect.Parameter.KEYWORD_ONLY) for p in parameters]:
        problem = "the function is expected to have a signature to match the schema"
    else:
        return
    raise DefinitionError(problem, op=op, expected=str(schema), got=f"{signature}", where=location_of(fn))


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
    _qualname: str
    _op: CustomOpDef[Any, Any]
    _pair: Pair
    _library: Library | None  # of what was registered here on an op that is not ours
    _is_gated: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RegistrationError("the CustomOp constructor is private", fix="customops.legacy.objects.custom_op")

    @classmethod
    def _of(cls, op: CustomOpDef[Any, Any], pair: Pair, library: Library | None) -> CustomOp:
        made = cls.__new__(cls)
        made._op, made._pair, made._library, made._is_gated = op, pair, library, library is None
        made.__name__, made._qualname = op.__name__, op._qualname
        global_registry[op._qualname] = made
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._op(*args, **kwargs)

    def __repr__(self) -> str:
        return f'<CustomOp(op="{self._qualname}")>'

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
            op = self._qualname
            # On an op of ours, what is at CompositeExplicitAutograd says that kernels are missing.
            composites = ["CompositeImplicitAutograd", *(["CompositeExplicitAutograd"] if self._library else [])]
            with lock:
                from_python = self._op._rules.kernel.kernels
                for device in devices:
                    if device in from_python:
                        problem = f"the op already has a {device} impl registered from Python"
                        raise RegistrationError(problem, op=op, where=where(from_python[device]))
                    for key in (SUPPORTED_DEVICE_TYPE_TO_KEY[device], *composites):
                        if _torch.dispatcher.has_kernel(op, key):
                            problem = f"the op already has an implementation for {device}, registered at {key}"
                            raise RegistrationError(problem, op=op)
                self._op.register_kernel(devices, fn, lib=self._library)
            return fn

        return decorate

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
        return functools.partial(self._register_formula, "save", ("inputs", "output"), None)

    def impl_backward(self, output_differentiability: list[bool] | None = None) -> Callable[[F], F]:
        """Decorator that registers ``fn(ctx, saved, *grads)``, which returns a dict of gradients by name of the input.

        `output_differentiability` has a bool for each output; an output with False never requires grad.
        """
        value, outputs = output_differentiability, len(self._op.schema.returns)
        is_list = isinstance(value, list) and all(isinstance(item, bool) for item in value)
        if value is not None and not (is_list and len(value) == outputs):
            raise RegistrationError(
                "output_differentiability must be a list of bools, one for each output",
                op=self._qualname,
                expected=f"{outputs} bools",
                got=brief(value),
            )
        parameters = ("ctx", "saved", *(f"grad{i}" for i in range(outputs)))
        return functools.partial(self._register_formula, "backward", parameters, output_differentiability)

    def _register_formula(self, half: str, parameters: Iterable[str], differentiable: list[bool] | None, fn: F) -> F:
        """Set one of the two functions of the pair, and register the pair if it is whole."""
        pair, kind = self._pair, "save_for_backward" if half == "save" else half
        op, schema = self._qualname, self._op.schema
        reasons = {
            "non-functional operator: it writes to an argument": schema.mutated,
            "operator with no returns": not schema.returns,
            "operator that returns views": schema.is_view,
        }
        with lock:
            for reason, holds in reasons.items():
                if holds:
                    problem = f"a gradient cannot be registered with the legacy API on a {reason}"
                    raise RegistrationError(problem, op=op, got=str(schema))
            if (known := getattr(pair, half)) is not None:
                problem = f"the op already has a {kind} impl registered from Python"
                raise RegistrationError(problem, op=op, where=where(known))
            if not self._is_gated and _torch.dispatcher.has_kernel(op, "CompositeImplicitAutograd"):
                raise RegistrationError(
                    "the op has a CompositeImplicitAutograd kernel: it is differentiated through the ops it is made of",
                    op=op,
                    fix="register gradients for those ops",
                )
            for key in ("Autograd", "AutogradCPU", "AutogradCUDA"):
                if not self._is_gated and _torch.dispatcher.has_kernel(op, key):
                    raise RegistrationError(f"the op has a kernel for gradients already, at {key}", op=op)
            bind(fn, op, f"{kind} function" if half == "save" else kind, *parameters)
            setattr(pair, half, fn)
            if half == "backward":
                pair.differentiable = differentiable
            try:
                if pair.save is not None and pair.backward is not None:
                    self._op.register_autograd(pair.run_backward, setup_context=pair.setup_context, lib=self._library)
                elif not self._is_gated:
                    self._op._register(self._library, install_gate, self._op._definition, pair)
                    self._is_gated = True
            except BaseException:
                setattr(pair, half, None)
                raise
            record_in_scope(self._op._owner, Registration(functools.partial(setattr, pair, half, None)))
        return fn

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


def find(qualname: str, *, also_others: bool = False) -> CustomOp:
    """The `CustomOp` of a name; `also_others` makes one for an op that the legacy API did not define."""
    with lock:
        known = global_registry.get(qualname)
        if known is not None and known._op._definition.removed is None:
            if known._library is None or known._op._opoverload is _torch.library.find_overload(qualname):
                return known  # the op is still there, and still the one of its name
        if not also_others:
            raise UnregisteredError("Could not find an op of the legacy API by this name", op=qualname)
        overload = get_op(qualname)
        if known is not None:
            known._destroy()
        op = default.adopt(overload)
        library = Library(overload.namespace, "FRAGMENT")
        return CustomOp._of(op, Pair(qualname, op.schema), library)


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
