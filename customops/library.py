"""The function forms: each resolves its op with `adopt` and calls the method of the same name.

`define` and `impl` also have the forms with a Library in front, where the library does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import torch
from torch.library import Library as Library
from torch.library import get_ctx as _current_ctx
from typing_extensions import Unpack

from customops import _torch
from customops._autograd.layout import BackwardOptions, GradientOptions
from customops._dispatch.callbacks import Fn
from customops._dispatch.devices import DeviceTypes
from customops._op.callback_types import (
    AnySetupContext,
    Backward,
    KernelOptions,
    Lib,
    ResultAndDims,
    Strategy,
    TakesModeAndCall,
)
from customops._op.definitions import OnConflict
from customops._op.op import CustomOpDef
from customops._op.registry import ImplConflict, default
from customops._places import entry
from customops._rules.reference import ReferenceOptions
from customops._schema.model import Names
from customops._schema.tags import Tags
from customops.errors import RegistrationError

Op = CustomOpDef[Any, Any] | _torch.library.OpOverload | str
F = TypeVar("F", bound=Callable[..., Any])

custom_op = default.custom_op
adopt = default.adopt


@overload
def define(
    qualname: str, /, schema: str, *, lib: Lib = None, tags: Tags = (), on_conflict: OnConflict = "error"
) -> None: ...
@overload
def define(lib: Library, /, schema: str, alias_analysis: str = "") -> Callable[[F], F]: ...
@entry
def define(first: str | Library, /, *args: Any, **kwargs: Any) -> Any:
    """Define an op by its schema, as `Registry.define` does.

    With a Library as the first argument, as in torch's older API, it returns a decorator that defines the op in this
    Library and registers the function as its kernel.
    """
    form: Fn = _define_in if isinstance(first, Library) else default.define
    return form(first, *args, **kwargs)


@overload
def impl(
    qualname: str, /, types: Names, func: None = None, *, lib: Lib = None, on_conflict: ImplConflict = "replace"
) -> Callable[[F], F]: ...
@overload
def impl(qualname: str, /, types: Names, func: F, *, lib: Lib = None, on_conflict: ImplConflict = "replace") -> F: ...
@overload
def impl(lib: Library, /, name: str, dispatch_key: str = "") -> Callable[[F], F]: ...
@entry
def impl(first: str | Library, /, *args: Any, **kwargs: Any) -> Any:
    """Register a kernel without a wrapper, as `Registry.impl` does.

    With a Library as the first argument, as in torch's older API, return a decorator that registers it there.
    """
    form: Fn = _impl_in if isinstance(first, Library) else default.impl
    return form(first, *args, **kwargs)


def _define_in(lib: Library, schema: str, alias_analysis: str = "") -> Callable[[F], F]:
    return lambda fn: _impl_in(lib, lib.define(schema, alias_analysis))(fn)


def _impl_in(lib: Library, name: str, dispatch_key: str = "") -> Callable[[F], F]:
    def register(fn: F) -> F:
        lib.impl(name, fn, dispatch_key)
        return fn

    return register


@overload
def register_kernel(
    op: Op, device_types: DeviceTypes, fn: None = None, /, **options: Unpack[KernelOptions]
) -> Callable[[F], F]: ...
@overload
def register_kernel(op: Op, device_types: DeviceTypes, fn: F, /, **options: Unpack[KernelOptions]) -> F: ...
@entry
def register_kernel(
    op: Op,
    device_types: DeviceTypes,
    fn: Fn | None = None,
    /,
    *,
    calls_torch: bool = False,
    name: str | None = None,
    when: Callable[..., bool | str] | None = None,
    priority: float = 0,
    key: Callable[..., Any] | Literal["arguments"] | None = "arguments",
    lib: Lib = None,
) -> Any:
    """Register a kernel of any op for some device types, as `CustomOpDef.register_kernel` does."""
    options: Any = {"name": name, "when": when, "priority": priority, "key": key}
    return adopt(op).register_kernel(device_types, fn, calls_torch=calls_torch, lib=lib, **options)


@overload
def register_fake(op: Op, fn: None = None, /, *, lib: Lib = None, allow_override: bool = True) -> Callable[[F], F]: ...
@overload
def register_fake(op: Op, fn: F, /, *, lib: Lib = None, allow_override: bool = True) -> F: ...
@overload
def register_fake(op: Op, fn: Literal["kernel"], /, *, lib: Lib = None, allow_override: bool = True) -> str: ...
@entry
def register_fake(op: Op, fn: Any = None, /, *, lib: Lib = None, allow_override: bool = True) -> Any:
    """Register the fake impl of any op, as `CustomOpDef.register_fake` does."""
    return adopt(op).register_fake(fn, lib=lib, allow_override=allow_override)


@entry
def register_autograd(
    op: Op, backward: Backward, /, *, setup_context: AnySetupContext[Any] = None, lib: Lib = None,
    **options: Unpack[BackwardOptions],
) -> None:  # fmt: skip
    """Register the gradient formula of any op, as `CustomOpDef.register_autograd` does."""
    adopt(op).register_autograd(backward, setup_context=setup_context, lib=lib, **options)


@entry
def register_jvp(
    op: Op, jvp: Backward, /, *, setup_context: AnySetupContext[Any] = None, lib: Lib = None,
    **options: Unpack[GradientOptions],
) -> None:  # fmt: skip
    """Register the forward-mode formula of any op, as `CustomOpDef.register_jvp` does."""
    adopt(op).register_jvp(jvp, setup_context=setup_context, lib=lib, **options)


@entry
def register_reference(op: Op, fn: Fn | None = None, /, *, lib: Lib = None, **options: Unpack[ReferenceOptions]) -> Any:
    """Register the plain function that any op computes, as `CustomOpDef.register_reference` does."""
    return adopt(op).register_reference(fn, lib=lib, **options)


@entry
def register_flops(op: Op, fn: Fn | None = None, /, *, lib: Lib = None) -> Any:
    """Register the number of floating-point operations of any op, as `CustomOpDef.register_flops` does."""
    return adopt(op).register_flops(fn, lib=lib)


@entry
def register_autocast(op: Op, device_type: str, cast_inputs: torch.dtype, /, *, lib: Lib = None) -> None:
    """Register the autocast rule of any op, as `CustomOpDef.register_autocast` does."""
    adopt(op).register_autocast(device_type, cast_inputs, lib=lib)


@overload
def register_vmap(op: Op, fn: None = None, /, *, lib: Lib = None) -> Callable[[ResultAndDims], ResultAndDims]: ...
@overload
def register_vmap(op: Op, fn: Strategy, /, *, lib: Lib = None) -> Strategy: ...
@overload
def register_vmap(op: Op, fn: ResultAndDims, /, *, lib: Lib = None) -> ResultAndDims: ...
@entry
def register_vmap(op: Op, fn: Any = None, /, *, lib: Lib = None) -> Any:
    """Register the batching rule of any op, as `CustomOpDef.register_vmap` does."""
    return adopt(op).register_vmap(fn, lib=lib)


@overload
def register_torch_dispatch(
    op: Op, torch_dispatch_class: type, fn: None = None, /, *, lib: Lib = None
) -> Callable[[TakesModeAndCall], TakesModeAndCall]: ...
@overload
def register_torch_dispatch(
    op: Op, torch_dispatch_class: type, fn: TakesModeAndCall, /, *, lib: Lib = None
) -> TakesModeAndCall: ...
@entry
def register_torch_dispatch(op: Op, torch_dispatch_class: type, fn: Any = None, /, *, lib: Lib = None) -> Any:
    """Register a function for any op and a mode or subclass, as `CustomOpDef.register_torch_dispatch` does."""
    return adopt(op).register_torch_dispatch(torch_dispatch_class, fn, lib=lib)


@entry
def register_out(
    op: Op, fn: Fn | None = None, /, *, device_types: DeviceTypes = None, inplace: Names = (), lib: Lib = None
) -> Any:
    """Register an out kernel of any op, as `CustomOpDef.register_out` does."""
    return adopt(op).register_out(fn, device_types=device_types, inplace=inplace, lib=lib)


@overload
def register_sharding(op: Op, rule: None = None, /, *, lib: Lib = None) -> Callable[[F], F]: ...
@overload
def register_sharding(op: Op, rule: F, /, *, lib: Lib = None) -> F: ...
@entry
def register_sharding(op: Op, rule: Any = None, /, *, lib: Lib = None) -> Any:
    """Register the sharding rule of any op, as `CustomOpDef.register_sharding` does."""
    return adopt(op).register_sharding(rule, lib=lib)


@entry
def register_effect(op: Op, effect: Any) -> None:
    """Mark any op as having a side effect, or none, as `CustomOpDef.register_effect` does."""
    adopt(op).register_effect(effect)


@entry
def get_ctx() -> Any:
    """The context of the running fake impl. Its ``new_dynamic_size(min=0, max=None)`` makes a data-dependent size.

    Raises:
        RegistrationError: it is not called inside a fake impl.
    """
    ctx = _current_ctx()
    if ctx is None:
        raise RegistrationError("get_ctx() has a context only inside a fake impl", fix="call it in register_fake's fn")
    return ctx
