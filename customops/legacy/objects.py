"""The older object layer: a decorator that returns a `CustomOp`, on which kernels and rules are registered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.library import Library
from torch.library import get_ctx as get_ctx

from customops import _compat
from customops._dispatch.callbacks import Fn, bind
from customops._dispatch.name import RESERVED_NAMESPACES
from customops._dispatch.registrations import lock
from customops._op import CustomOpDef
from customops._registry import default
from customops._schema.infer import infer_schema as infer_schema
from customops.errors import DefinitionError, RegistrationError, UnregisteredError, brief, where
from customops.legacy import _autograd, _definition

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
        return self._library is None or self._op._opoverload is _compat.libraries.find_overload(self._qualname)

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
            if _compat.dispatch.has_kernel(self._qualname, key):
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
            if pair.is_whole:
                self._op.register_autograd(pair.run_backward, setup_context=pair.setup_context, lib=self._library)
            elif not self._is_gated:
                self._op._register(self._library, _autograd.install_gate, self._op._definition, pair)
                self._is_gated = True
        except BaseException:
            setattr(pair, half, None)
            raise
        self._op._record(functools.partial(setattr, pair, half, None))

    def _destroy(self) -> None:
        """Remove the op and its entry; from an op defined outside customops, what was registered here."""
        with lock:
            if global_registry.get(self._qualname) is self:
                del global_registry[self._qualname]
            if self._library is not None:
                _compat.libraries.destroy_library(self._library)
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
    name = _definition.name_to_define(qualname, fn)
    op = _definition.define(name, fn, text, tags)
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
    overload = _compat.libraries.find_overload(_definition.parse_name(qualname).packet)
    if overload is None:
        raise DefinitionError(
            "Could not find the operator", op=qualname, fix="define it first, or import the library that does"
        )
    return overload


def get_abstract_impl(qualname: str) -> Fn | None:
    """The fake impl that was registered for an op of the legacy API, or None."""
    known = global_registry.get(qualname)
    return known._op._abstract_fn if known is not None else None
