"""Kernels: one function for each device type, one for all others, and which of them are switched off."""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional

from customops import _torch
from customops._codegen.kernel import kernel as generate_kernel
from customops._dispatch.callbacks import Fn, bind_kernel, filler
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.devices import _ANY_DEVICE, DeviceTypes, check_devices, device_list
from customops._dispatch.fingerprint import uses_in
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, RegistrationGroup, Slots, Undo, lock
from customops._dispatch.spec import OpSpec
from customops._rules.out import Inspection
from customops._torch.library import OpOverload
from customops.errors import RegistrationError, user_source, user_stacklevel, where

log = logging.getLogger("customops")

#: Functions of torch that draw random numbers, and methods of tensors that do.
_FUNCTIONS = frozenset(
    """rand rand_like randn randn_like randint randint_like randperm normal bernoulli multinomial poisson gumbel_softmax
    dropout dropout1d dropout2d dropout3d""".split()
)
_IN_PLACE = frozenset(
    "normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_ dropout_".split()
)
_METHODS = _IN_PLACE | {"bernoulli", "multinomial"}
_DRAWS = _FUNCTIONS | _METHODS

#: A function with one of these may draw the same numbers each time.
_SEEDS = frozenset("Generator default_generator manual_seed fork_rng set_rng_state set_state".split())


class Switch:
    """An open `set_kernel_enabled`."""

    __slots__ = ("device_type", "enabled")

    def __init__(self, device_type: str, enabled: bool) -> None:
        self.device_type = device_type
        self.enabled = enabled


class KernelRule:
    """The kernels of one op."""

    operator: OperatorHandle

    def __init__(self) -> None:
        #: The function the op was defined from.
        self.default: Fn | None = None
        self.switches: list[Switch] = []  # of the contexts that are open now
        self._slots: Slots[str | None, Fn] = Slots(self._install_at, self._sync)
        self._with_op: tuple[str | None, ...] = ()  # the devices of the default, in the op's definition
        self._current_kernels: dict[str | None, CurrentKernel] = {}
        self._unselect: Undo | None = None  # takes the BackendSelect trampoline out, if it is in

    @property
    def kernels(self) -> dict[str | None, Fn]:
        """device type, or None for all others -> kernel"""
        return self._slots.values

    def bind(self, operator: OperatorHandle) -> None:
        """Install the function that the op was defined from, and everything registered so far."""
        self.operator, self._current_kernels, self._unselect = operator, {}, None
        if self.default is None and operator.spec.fn is not None:
            self._preset(operator.spec)
        self._slots.reset(self._with_op)

    def _preset(self, spec: OpSpec) -> None:
        assert spec.kernel is not None
        self.default = bind_kernel(spec.kernel, spec.schema, spec.qualname, "kernel", warn=True)
        _warn_if_random(spec.fn, spec)
        self._with_op = device_list(spec.device_types, spec.qualname)
        for device_type in self._with_op:
            self._slots.preset(device_type, self.default)

    def register(self, device_types: DeviceTypes, fn: Fn) -> Registration:
        schema, op = self.operator.schema, self.operator.qualname
        devices = check_devices(device_types, schema, op)
        ours = self.operator.library is not None
        if ours:
            _warn_if_random(fn, self.operator.spec)
        fn = bind_kernel(fn, schema, op, "kernel", warn=ours)
        return RegistrationGroup([self._slots.set(device_type, fn) for device_type in devices])

    @contextmanager
    def enabled(self, device_type: str, enabled: bool) -> Iterator[None]:
        """Switch a kernel on or off while the context lasts; see `CustomOpDef.set_kernel_enabled`."""
        switch = Switch(device_type, enabled)
        with lock:
            self._warn_if_no_change(device_type, enabled)
            self._update(self.switches.append, switch)
        try:
            yield
        finally:
            self._update(self.switches.remove, switch)

    def _update(self, change: Callable[[Switch], object], switch: Switch) -> None:
        with lock:
            change(switch)
            self._sync()

    def _sync(self) -> None:
        """Let every trampoline call what is registered and switched on now."""
        for device_type, current_kernel in self._current_kernels.items():
            fn = self._active(device_type)
            if fn is not current_kernel.registered:
                current_kernel.set(fn)
        if self.operator.spec.traceable:
            self.operator.recompile()

    def traced(self) -> dict[str | None, Fn]:
        """The kernels of an op that compilers trace into: of another they see none."""
        return {key: self._active(key) for key in self.kernels} if self.operator.spec.traceable else {}

    def _disabled(self, device_type: str | None) -> bool:
        """The newest switch counts. Contexts of several threads may end in any order."""
        return next((not s.enabled for s in reversed(self.switches) if s.device_type == device_type), False)

    def _warn_if_no_change(self, device_type: str, enabled: bool) -> None:
        action = "enable" if enabled else "disable"
        if device_type not in self.kernels:
            log.warning(
                "%s: cannot %s the kernel for %s: no kernel was registered for this device type",
                self.operator.qualname,
                action,
                device_type,
            )
        elif self._disabled(device_type) != enabled:
            log.warning("%s: the kernel for %s is already %sd", self.operator.qualname, device_type, action)

    def _active(self, device_type: str | None) -> Fn:
        if self.switches and self._disabled(device_type):
            return self.kernels.get(None) or self.default or self._no_default(device_type)
        return self._slots.values[device_type]

    def _no_default(self, device_type: str | None) -> Fn:
        error = RegistrationError(
            f"there is no kernel for {device_type}, and no function for every device to fall back to",
            op=self.operator.qualname,
            fix=f"op.register_kernel({device_type!r}), or enable its kernel again",
        )
        return _Raise(error)

    def _install_at(self, device_type: str | None, own_library: bool) -> Undo:
        operator = self.operator
        current_kernel = CurrentKernel(
            self._active(device_type), operator.qualname, device_type, operator.schema, self._inspection
        )
        key = _ANY_DEVICE if device_type is None else _torch.dispatcher.device_key(device_type)
        undo = operator.impl(
            self._trampoline(current_kernel), key, own_library=own_library, current_kernel=current_kernel
        )
        self._current_kernels[device_type] = current_kernel
        if device_type is not None and not operator.schema.takes_tensors and self._unselect is None:
            select = _selector(self, operator)
            self._unselect = operator.impl(select, "BackendSelect", with_keyset=True, own_library=own_library)
        return functools.partial(self._uninstall, device_type, undo)

    def _inspection(self, current_kernel: CurrentKernel, compiled: bool) -> Fn | None:
        if self.operator.when == "never":
            return None
        return Inspection(current_kernel, self.operator.overload, compiled=compiled)

    def _trampoline(self, current_kernel: CurrentKernel) -> Fn:
        """The function at a device's key; in the cell, what does the same for a call that skips the keys above."""
        operator = self.operator
        schema = operator.schema
        kernel = generate_kernel(operator, current_kernel)
        others_write = bool(schema.mutated) and operator.library is None
        if not (schema.is_view or others_write):  # else keys between have more to do
            current_kernel.direct = generate_kernel(operator, current_kernel, bump=True) if schema.mutated else kernel
        return kernel

    def _uninstall(self, device_type: str | None, undo: Undo) -> None:
        del self._current_kernels[device_type]
        undo()
        if self._unselect is not None and not any(self._current_kernels):
            self._unselect()
            self._unselect = None


def _warn_if_random(fn: Any, spec: OpSpec) -> None:
    """Warn if a kernel surely draws random numbers that nothing seeds, and its op has no tag that says so."""
    code = getattr(fn, "__code__", None)
    if code is None or _DRAWS.isdisjoint(code.co_names) or torch.Tag.nondeterministic_seeded in spec.tags:
        return
    function = None if spec.traceable else _random_function_in(fn, code)
    if function is not None:
        warnings.warn(
            f"{spec.qualname}: the kernel at {where(fn)} draws random numbers by {function}, and the op has no tag "
            "that says so: a compiler may take two calls for one, or run one again in the backward, with other "
            "numbers. Define it with tags=torch.Tag.nondeterministic_seeded.",
            UserWarning,
            stacklevel=user_stacklevel(),
        )


def _random_function_in(fn: Any, code: types.CodeType) -> str | None:
    uses = uses_in(code)
    keywords = {name for names in code.co_consts if isinstance(names, tuple) for name in names}
    if "generator" in keywords | uses.names or not _SEEDS.isdisjoint(uses.names):
        return None
    of_results = _IN_PLACE & {*code.co_names} - set().union(*uses.of.values())  # of what a call returned
    found = {f"Tensor.{name}" for name in of_results}
    for variable, attributes in uses.of.items():
        value = fn.__globals__.get(variable)
        if variable in code.co_varnames:
            found |= {f"Tensor.{name}" for name in attributes & _METHODS}
        elif isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] == "torch":
            found |= {f"{value.__name__}.{name}" for name in attributes & _FUNCTIONS}
        elif variable in _FUNCTIONS and value in (getattr(torch, variable, 0), getattr(functional, variable, 0)):
            found.add(f"torch.{variable}")
    if 0 in code.co_consts:  # perhaps of dropout: training=False, p=0
        found = {name for name in found if "dropout" not in name}
    return min(found, default=None)


class _Raise:
    """A kernel that raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error


def _selector(rule: KernelRule, operator: OperatorHandle) -> Callable[..., Any]:
    """The function at BackendSelect: without tensors to tell, dispatch follows the `device` argument."""
    argument = operator.schema.device_argument
    assert argument is not None
    position = None if argument.kwarg_only else operator.schema.positional.index(argument)
    fill, overload, name = filler(operator.schema), operator.overload, operator.name

    def select(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        all_args, all_kwargs = fill(args, kwargs) if fill else (args, kwargs)
        device = torch.device(all_kwargs["device"] if position is None else all_args[position])
        key = _torch.dispatcher.device_key(device.type)
        if device.type not in rule.kernels and None not in rule.kernels and not _reaches_kernel(str(name), key):
            raise RegistrationError(
                f"{name.local} does not have a kernel registered for {device.type}",
                op=str(name),
                got=f"device={device}",
                fix=f'op.register_kernel("{device.type}")',
            )
        return overload.redispatch(_torch.dispatcher.key_set(key), *args, **kwargs)

    return _torch.dynamo.outside_dynamo(select)


def _reaches_kernel(op: str, key: str) -> bool:
    """Is there a kernel for `key`, whoever registered it?"""
    try:
        _torch.dispatcher.computed_kernel(op, key)
    except RuntimeError:
        return False
    return True


# Kernels of the user's own at dispatch keys, as they are --------------------------------------------------------------


class RawRule:
    """Kernels of the user's own at dispatch keys, as they are."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._kernels: list[_Raw] = []

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        for kernel in self._kernels:
            kernel.install()

    def register(self, keys: tuple[str, ...], fn: Fn) -> Registration:
        """Put `fn` at all of the keys, or at none."""
        kernel = _Raw(self, keys, fn)
        kernel.install()
        self._kernels.append(kernel)
        self.operator.recompile()  # at some keys, tracing goes through it
        return kernel

    def traced(self) -> list[Any]:
        """The kernels that tracing may go through, and their keys."""
        return [(kernel.keys, kernel.fn) for kernel in self._kernels]

    def _remove(self, kernel: _Raw) -> None:
        if kernel in self._kernels:
            self._kernels.remove(kernel)
            kernel.uninstall.close()
            self.operator.recompile()


def _call_traced(overload: OpOverload, op: str, fn: Fn, /, *args: Any, **kwargs: Any) -> Any:
    _torch.dynamo.traced(overload, op)
    return fn(*args, **kwargs)


class _Raw(Registration):
    """The registration of a kernel at several keys."""

    def __init__(self, rule: RawRule, keys: tuple[str, ...], fn: Fn) -> None:
        super().__init__()
        self.rule, self.keys, self.fn, self.source = rule, keys, fn, user_source()
        self.uninstall = ExitStack()

    def install(self) -> None:
        operator = self.rule.operator
        with ExitStack() as undos:  # if torch refuses a key, it is taken from the others again
            for key in self.keys:
                undos.callback(operator.impl(self._kernel_at(key), key, own_library=True, raw=True))
            self.uninstall = undos.pop_all()

    def _kernel_at(self, key: str) -> Fn:
        if key != "CompositeImplicitAutograd":
            return self.fn
        # Compilers trace such a kernel in the place of the op.
        return functools.partial(_call_traced, self.rule.operator.overload, self.rule.operator.qualname, self.fn)

    def unregister(self) -> None:
        self.rule._remove(self)
