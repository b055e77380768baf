"""Kernels, for a device type or for all others, and which of them are enabled. `choice` has several for one device."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from customops import _torch
from customops._codegen.kernel import kernel as generate_kernel
from customops._dispatch import preference
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.devices import ANY_DEVICE, DeviceTypes, check_devices, device_list
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo, lock, nothing
from customops._dispatch.rule import Rule
from customops._places import user_stacklevel
from customops._rules import choice
from customops._rules.choice import (
    ARGUMENTS,
    DEFAULT,
    REFERENCE,
    Alternative,
    Chooser,
    StoredChoices,
    alternative,
    chooser_of,
    device_of,
    hidden_in,
    in_order,
)
from customops._rules.inspection import CallingTorch, Inspection
from customops._rules.out import is_stub
from customops._rules.reference import Reference
from customops._schema.defaults import filler
from customops.errors import RegistrationError

log = logging.getLogger("customops")


class KernelRule(Rule[tuple[str | None, str], Alternative]):
    """The kernels of one op, and the reference: device type, or None for all others, and name -> kernel."""

    #: The function that the op was defined from.
    default: Fn | None = None
    #: Device types and flags, of the contexts of `enabled` that are open now: the newest one counts.
    switches: tuple[tuple[str, bool], ...] = ()

    @property
    def kernels(self) -> dict[str | None, Fn]:
        """Device type -> the kernel that comes first there."""
        devices = dict.fromkeys(device for device, name in self.values if name != REFERENCE)
        return {device: in_order(self._own(device), ())[0].fn for device in devices}

    def alternatives(
        self, device_type: str | None, values: Mapping[tuple[str | None, str], Alternative] | None = None
    ) -> tuple[Alternative, ...]:
        """Return what may run on a device, in the order without a preference, of `values` or what is registered."""
        general = self._own(None, values)
        if self._disabled(device_type):
            return in_order((), [each for each in general if each.name != REFERENCE])
        found = in_order(self._own(device_type, values) if device_type is not None else (), general)
        if self.operator.schema.returns:
            others = tuple(each for each in found if each.fn is not self.default or not is_stub(each.fn))
            found = others if any(each.name != REFERENCE for each in others) else found
        return found

    def _own(
        self, device_type: str | None, values: Mapping[tuple[str | None, str], Alternative] | None = None
    ) -> list[Alternative]:
        found = (self.values if values is None else values).items()
        return [each for (device, name), each in found if device == device_type]

    def names(self) -> list[str]:
        """Return the names of the kernels."""
        return list(dict.fromkeys(name for _, name in self.values))

    def bind(self, operator: OperatorHandle) -> None:
        """Install the function that the op was defined from, and everything registered so far."""
        self._current_kernels: dict[str | None, CurrentKernel] = {}
        self._choosers: dict[str | None, Chooser] = {}
        self._take_out: dict[str | None, Undo] = {}
        operator.choose_in_trace = self.choose_in_trace
        self._unselect: Undo | None = None  # takes the BackendSelect trampoline out, if it is in
        spec = operator.spec
        if self.default is None and spec.fn is not None:
            assert spec.kernel is not None
            self.default = bind_kernel(spec.kernel, spec.schema, spec.qualname, "kernel", warn=True)
            for device in device_list(spec.device_types, spec.qualname):
                self.preset((device, DEFAULT), Alternative(self.default))
            self._with_op = tuple(self._entries)
        super().bind(operator)
        preference.listen(self)

    def register(
        self,
        device_types: DeviceTypes,
        fn: Fn,
        calls_torch: bool = False,
        name: str | None = None,
        when: Fn | None = None,
        priority: float = 0,
        key: Any = ARGUMENTS,
    ) -> Registration:
        spec, schema, op = self.operator.spec, self.operator.schema, self.operator.qualname
        devices = check_devices(device_types, schema, op)
        ours = self.operator.library is not None
        fn = bind_kernel(fn, schema, op, "kernel", warn=ours)
        if calls_torch and not spec.kernel_calls_torch:
            fn = CallingTorch(fn, writes=bool(schema.mutated))
        made = alternative(self.operator, fn, name, when, priority, key)
        self._warn_of_hidden(devices, made)
        return self.set_all([(device, made.name) for device in devices], made)

    def _warn_of_hidden(self, devices: Sequence[str | None], made: Alternative) -> None:
        """Warn of other kernels that could run, and cannot once `made` is registered."""
        values = {**self.values, **{(device, made.name): made for device in devices}}
        for device in dict.fromkeys(device for device, _ in values):
            before, after = self.alternatives(device), self.alternatives(device, values)
            known = hidden_in(before)
            hidden = [each for each in hidden_in(after) if each in before and each not in known]
            if hidden:
                names = " and ".join(each.name for each in hidden)
                lowest = min(each.priority for each in hidden)
                warnings.warn(
                    f"{self.operator.qualname}: the kernel {made.name} takes all arguments and is asked before "
                    f"{names}, so that {names} will run only if preferred or tuned. Register it with when=, or with "
                    f"priority={lowest - 1}.",
                    UserWarning,
                    stacklevel=user_stacklevel(),
                )
                return

    def follow(self, reference: Reference) -> Registration:
        """Let the reference be the last alternative, where there are several."""
        return self.set((None, REFERENCE), Alternative(self._of(reference), REFERENCE), is_derived=True)

    def _of(self, reference: Reference) -> Fn:
        spec, fn = self.operator.spec, reference.shown(reference.kernel)
        return fn if spec.kernel_calls_torch else CallingTorch(fn, writes=bool(spec.schema.mutated))

    def derive(self, reference: Reference) -> Registration:
        """Run the reference on devices without a kernel."""
        return self.set((None, DEFAULT), Alternative(self._of(reference)), is_derived=True)

    @contextmanager
    def enabled(self, device_type: str, enabled: bool) -> Iterator[None]:
        """Switch a kernel on or off while the context lasts; see `CustomOpDef.set_kernel_enabled`."""
        switch, action = (device_type, enabled), "enable" if enabled else "disable"
        with lock:
            if device_type not in self.kernels:
                text = "%s: cannot %s the kernel for %s: no kernel was registered for this device type"
                log.warning(text, self.operator.qualname, action, device_type)
            elif self._disabled(device_type) != enabled:
                log.warning("%s: the kernel for %s is already %sd", self.operator.qualname, device_type, action)
            self.switches += (switch,)
            self._changed()
        try:
            yield
        finally:
            with lock:  # contexts of several threads may end in any order
                self.switches = tuple([each for each in self.switches if each is not switch])
                self._changed()

    def _changed(self) -> None:
        """Let every trampoline call what is registered and switched on now."""
        recompile = self.operator.spec.traceable
        for device_type, current_kernel in list(self._current_kernels.items()):
            fn = self._active(device_type)
            if fn is not current_kernel.registered:
                current_kernel.set(fn)
            old, new = self._choosers.pop(device_type, None), chooser_of(current_kernel)
            recompile = recompile or (new is not old and self.operator.options.choose_when_traced)
            if new is not None:
                self._choosers[device_type] = new
            if new is not old:  # graphs call one of its kernels
                self.operator.fast_path.in_graphs.clear()
        if recompile:
            self.operator.recompile()

    def preferences_changed(self) -> None:
        """Follow preferences for ops that had none."""
        if self.operator.removed is None and preference.concerns(self.operator.qualname):
            self._changed()

    def choices_changed(self, ops: set[str]) -> None:
        """Follow new stored choices for these ops."""
        if self.operator.removed is None and self.operator.qualname in ops:
            self._changed()

    def stored(self, device_type: str | None) -> StoredChoices | None:
        """Return the stored choices for a device."""
        return choice.stored_choices(self.operator.qualname, self.operator.schema, device_type)

    def traced(self) -> Any:
        """Return the kernels of a traceable op, and what compilers choose by among several."""
        kernels = {key: self._active(key) for key in self.kernels} if self.operator.spec.traceable else {}
        choices = {device: chooser.digested() for device, chooser in self._choosers.items()}
        return (kernels, choices) if choices else kernels

    def _disabled(self, device_type: str | None) -> bool:
        return next((not enabled for device, enabled in reversed(self.switches) if device == device_type), False)

    def choose_in_trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return the name of the kernel that a graph calls for these fakes, with guards, or None: each call chooses."""
        operator = self.operator
        if not self._choosers or not operator.options.choose_when_traced:
            return None
        if torch.compiler.is_exporting():
            return None
        chooser = self.chooser_for(args, kwargs)
        return None if chooser is None else chooser.traced(args, kwargs)

    def chooser_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Chooser | None:
        """Return the chooser of the kernel of a call, or None if there is nothing to choose."""
        device = device_of(self.operator.schema, args, kwargs)
        if device is None:
            return None
        return chooser_of(self.operator.kernel_on(_torch.dispatcher.device_key(device.type)))

    def _active(self, device_type: str | None) -> Fn:
        """Return the function that a device runs: a kernel, or one that chooses among several."""
        if len(self.values) == 1 and not self.switches:
            ((_, only),) = self.values.items()
            if only.when is None:
                return only.fn
        found = self.alternatives(device_type)
        if found and found[0].when is None and not preference.concerns(self.operator.qualname):
            found = found[:1] if self.stored(device_type) is None else found
        if len(found) > 1 or (found and found[0].when is not None):
            fn: Fn = self._chooser(device_type, found).fn
            return fn
        return found[0].fn if found else self._missing(device_type)

    def _chooser(self, device_type: str | None, found: tuple[Alternative, ...]) -> Chooser:
        operator, stored = self.operator, self.stored(device_type)
        fns = [each.fn for each in found]
        old = self._choosers.get(device_type)
        if old is not None and old.stored is stored:
            before = [(each, current.registered) for each, current in old.kernels]
            if before == list(zip(found, fns, strict=True)):
                return old
        kernels = [
            CurrentKernel(fn, operator.qualname, device_type, operator.schema, self._inspection, each.name)
            for each, fn in zip(found, fns, strict=True)
        ]
        return Chooser(operator, list(zip(found, kernels, strict=True)), stored)

    def _inspection(self, current: CurrentKernel, compiled: bool) -> Fn | None:
        chooser = chooser_of(current)
        if chooser is None:
            is_checked = self.operator.options.check != "never"
            return Inspection(current, self.operator, compiled=compiled) if is_checked else None
        chooser.current = current
        for _, each in chooser.kernels:
            each.inspect(compiled=compiled)
        return None

    def _missing(self, device_type: str | None) -> Fn:
        op = self.operator.qualname

        def no_kernel(*args: Any, **kwargs: Any) -> Any:
            raise RegistrationError(
                f"there is no kernel for {device_type}, and no function for every device to fall back to",
                op=op,
                fix=f"op.register_kernel({device_type!r}), or enable its kernel again",
            )

        return self.default or no_kernel

    def _install(self, at: tuple[str | None, str], own_library: bool) -> Undo:
        (device_type, name), operator = at, self.operator
        if name == REFERENCE:
            return nothing
        if device_type in self._current_kernels:
            return functools.partial(self._uninstall_last, device_type)
        schema = operator.schema
        current = CurrentKernel(self._active(device_type), operator.qualname, device_type, schema, self._inspection)
        key = ANY_DEVICE if device_type is None else _torch.dispatcher.device_key(device_type)
        kernel = generate_kernel(operator, current)
        others_write = bool(schema.mutated) and operator.library is None
        if not (schema.is_view or others_write):  # what calls it directly skips keys, which else have more to do
            current.direct = generate_kernel(operator, current, bump=True) if schema.mutated else kernel
        undo = operator.impl(kernel, key, own_library=own_library, current_kernel=current)
        self._current_kernels[device_type] = current

        def uninstall() -> None:
            del self._current_kernels[device_type], self._take_out[device_type]
            self._choosers.pop(device_type, None)
            undo()
            if self._unselect is not None and not any(self._current_kernels):
                self._unselect()
                self._unselect = None

        self._take_out[device_type] = uninstall
        if device_type is not None and not schema.tensors and self._unselect is None:
            try:
                select = _selector(self, operator)
                self._unselect = operator.impl(select, "BackendSelect", with_keyset=True, own_library=own_library)
            except BaseException:
                uninstall()
                raise
        return functools.partial(self._uninstall_last, device_type)

    def _uninstall_last(self, device_type: str | None) -> None:
        """Take out what is installed for a device, with the last of its kernels."""
        if not any(device == device_type and name != REFERENCE for device, name in self._uninstall):
            self._take_out[device_type]()


def _selector(rule: KernelRule, operator: OperatorHandle) -> Callable[..., Any]:
    """Return the function at BackendSelect: without tensors, dispatch follows the `device` argument."""
    argument = operator.schema.device_argument
    assert argument is not None
    position = None if argument.kwarg_only else operator.schema.positional.index(argument)
    fill, overload, name = filler(operator.schema), operator.overload, operator.name

    def select(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        all_args, all_kwargs = fill(args, kwargs) if fill else (args, kwargs)
        device = torch.device(all_kwargs["device"] if position is None else all_args[position])
        key = _torch.dispatcher.device_key(device.type)
        if not {device.type, None} & {*rule._current_kernels}:
            try:  # there may be a kernel of others
                _torch.dispatcher.computed_kernel(str(name), key)
            except RuntimeError:
                raise RegistrationError(
                    f"{name.local} does not have a kernel registered for {device.type}",
                    op=str(name),
                    got=f"device={device}",
                    fix=f'op.register_kernel("{device.type}")',
                ) from None
        return overload.redispatch(_torch.dispatcher.key_set(key), *args, **kwargs)

    return _torch.dynamo.outside_dynamo(select)
