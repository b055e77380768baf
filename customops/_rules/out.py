"""Out variants: kernels that write their results into tensors of the caller.

A functional op ``ns::f`` and its out variant ``ns::f.out`` are two ops in the dispatcher, each with its kernels. One
may be made of the other: where the out variant has no kernel for a device, it copies what the functional op returns;
where the functional op has none, it allocates what its fake impl says, and lets the out variant fill that. The batching
rule and autocast of the functional op count for both; gradients go through the functional op alone, as in torch.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.devices import DeviceTypes, check_devices
from customops._dispatch.expected import Expected, Foresight
from customops._dispatch.fill_defaults import filler
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.out_call import Checked, ReturnsOut, check_given, misfit
from customops._dispatch.registrations import Group, Registration
from customops._dispatch.spec import OpSpec
from customops._lowering.lowering import Lowering
from customops._schema.differentiability import Names, tensor_names
from customops._schema.outs import check_has_outs, out_names, out_schema, out_signature, out_tags
from customops.errors import (
    MissingFakeError,
    RegistrationError,
    UnregisteredError,
    UnsupportedError,
    innermost,
    user_source,
)

__tracebackhide__ = True  # pytest leaves the frames out

#: Defines the variant, of an `OpSpec`; returns its `CustomOpDef`.
Define = Callable[[OpSpec], Any]


class OutRule:
    """The out variant of one op: an op of its own, which is there as long as a kernel is registered for it."""

    operator: OperatorHandle
    #: The functional op, a `CustomOpDef`, once it has a variant.
    op: Any = None
    #: The `CustomOpDef` of the variant.
    variant: Any = None

    def __init__(self) -> None:
        self._registered: list[_OutRegistration] = []

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        self.foresight = Foresight(operator.overload, operator.qualname, self._fake)

    def _fake(self) -> Fn | None:
        fake: Fn | None = self.op._rules.fake.fn
        return fake

    @property
    def is_there(self) -> bool:
        return self.variant is not None and self.variant._definition.removed is None

    def register(self, op: Any, define: Define, device_types: DeviceTypes, fn: Fn, inplace: Names) -> Registration:
        """Register a kernel of the out variant of `op`, a `CustomOpDef`. For the first one `define` makes the variant.

        Nothing is left behind where that fails.
        """
        schema, qualname = self.operator.schema, self.operator.qualname
        check_has_outs(schema, self.operator.tags, qualname)
        spec = self._spec(fn)
        devices = check_devices(device_types, spec.schema, spec.qualname)
        replaced = tensor_names(inplace, "inplace", schema, qualname)
        kernel = Checked(_lowered(spec, fn), schema, spec.qualname, self, replaced)
        self.op = op
        members: list[Registration] = []
        variant, is_new = self.variant, not self.is_there
        if is_new:
            _refuse_taken(spec)
            variant = self.variant = define(spec)
        try:
            if is_new:
                variant._rules.vmap.without_rule = Batched(self, spec.qualname)
                variant._rules.fake.default = Faked(self, spec.qualname)
            members.append(variant._rules.kernel.register(device_types, kernel))
            members += self._derive(devices)
        except BaseException:
            for member in members:
                member.unregister()
            if is_new:
                variant.unregister()
            raise
        self.operator.recompile()
        self._registered.append(_OutRegistration(self, members))
        return self._registered[-1]

    def _spec(self, fn: Fn) -> OpSpec:
        spec = self.operator.spec
        name = spec.name._replace(overload=f"{spec.name.overload}_out" if spec.name.overload else "out")
        return OpSpec(
            name,
            out_schema(spec.schema),
            out_tags(spec.tags),
            fn=fn,
            signature=out_signature(spec.signature, spec.schema),
            lowered_fn=Copies(self, str(name)),
            check=spec.check,
            source=user_source(),
        )

    def _derive(self, devices: tuple[str | None, ...]) -> list[Registration]:
        """Kernels of the functional op for the devices for which it has none."""
        missing = [device for device in devices if not self.functional_computes(device)]
        return [self.op._rules.kernel.register(missing, Allocates(self))] if missing else []

    def functional_computes(self, device: str | None) -> bool:
        """Has the functional op a kernel for a device (None: for all), which is not made of the out variant?"""
        kernels, op = self.op._rules.kernel.kernels, self.operator.qualname
        known = [kernels[each] for each in {device, None} if each in kernels]
        if any(not isinstance(fn, Allocates) and not is_stub(fn) for fn in known):
            return True
        keys = [] if None in kernels else [*_FOR_ALL]
        if device is not None and device not in kernels:
            keys.append(_compat.dispatch.device_key(device))
        return any(_compat.dispatch.has_kernel(op, key) for key in keys)

    def end(self, error: UnregisteredError | None) -> None:
        """The op goes, and the variant with it."""
        if self.is_there:
            self.variant._owner.drop(self.variant, error)
        else:
            self.variant = None

    def restore(self) -> None:
        """The op is back."""
        if self.variant is not None:
            self.variant._owner.restore(self.variant)

    def _unregister(self, registration: _OutRegistration) -> None:
        if registration in self._registered:
            self._registered.remove(registration)
            for member in registration.members:
                member.unregister()
            self.operator.recompile()
        if not self._registered and self.is_there:
            self.variant.unregister()


def _refuse_taken(spec: OpSpec) -> None:
    if _compat.libraries.find_overload(spec.name.packet, spec.name.overload) is not None:
        raise RegistrationError(
            "an op with the name of the out variant exists",
            op=spec.qualname,
            got=f"defined at {_compat.schemas.defined_at(spec.qualname)}",
            fix="unregister that op, or do without register_out: inductor finds an out variant by its name",
        )


#: Where an op has a kernel for all devices.
_FOR_ALL = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def is_stub(fn: Fn) -> bool:
    """Has a function no body but ``...``, ``pass`` or a docstring? As a kernel of a functional op it is none."""
    fn = innermost(fn)
    if not isinstance(fn, types.FunctionType):
        return False
    steps = [each for each in dis.get_instructions(fn) if each.opname not in ("RESUME", "NOP")]
    return len(steps) <= 2 and steps[0].opname in ("LOAD_CONST", "RETURN_CONST") and steps[0].argval is None


class _OutRegistration(Group):
    """The registration of a kernel of an out variant. With the last one, the variant goes."""

    def __init__(self, rule: OutRule, members: list[Registration]) -> None:
        super().__init__(members)
        self.rule = rule

    def unregister(self) -> None:
        self.rule._unregister(self)


def _lowered(spec: OpSpec, fn: Fn) -> Fn:
    """A kernel of the user as one that takes and returns what the schema says. Its ``return`` may be left out."""
    if spec.signature is None:
        return ReturnsOut(bind_kernel(fn, spec.schema, spec.qualname, "kernel", warn=True), spec.qualname)
    lowering = Lowering(spec.signature, spec.schema, spec.qualname)
    bound = bind_kernel(fn, lowering.parameters, spec.qualname, "kernel", warn=True)
    return lowering.kernel(ReturnsOut(bound, spec.qualname))


# One made of the other ------------------------------------------------------------------------------------------


class Copies:
    """The kernel of an out variant without one of its own: it copies what the functional op returns."""

    def __init__(self, rule: OutRule, op: str) -> None:
        self.rule, self.op, self.names = rule, op, out_names(rule.operator.schema)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        outs = tuple(kwargs.pop(name) for name in self.names)
        check_given(self.op, self.names, outs)
        device = outs[0].device.type
        if not self.rule.functional_computes(device):  # else it would call the variant
            raise UnsupportedError(
                f"neither the op nor its out variant has a kernel for {device}",
                op=self.op,
                fix=f'op.register_out(fn, device_types="{device}")',
            )
        results = self.rule.operator.overload(*args, **kwargs)
        for name, out, result in zip(self.names, outs, results if len(outs) > 1 else (results,), strict=True):
            expected = Expected.like(result)
            if not expected.fits(out):
                raise misfit(self.op, name, expected, out)
            out.copy_(result)
        return outs[0] if len(outs) == 1 else outs


class Allocates:
    """The kernel of a functional op that has none of its own: it lets the out variant fill new tensors."""

    def __init__(self, rule: OutRule) -> None:
        self.rule, self.names = rule, out_names(rule.operator.schema)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        expected = self.rule.foresight.of(args, kwargs)
        if expected is None:
            raise MissingFakeError(
                "only the out variant has a kernel, and no fake impl says which tensors to allocate",
                op=self.rule.operator.qualname,
                fix="op.register_fake(fn), or op.register_kernel(None, fn)",
            )
        outs = tuple(each.allocate() for each in expected)
        self.rule.variant._opoverload(*args, **kwargs, **dict(zip(self.names, outs, strict=True)))
        return outs[0] if len(outs) == 1 else outs


class Faked:
    """The fake impl of an out variant: nothing is to be known but whether it will refuse the tensors."""

    def __init__(self, rule: OutRule, op: str) -> None:
        self.rule, self.op, self.names = rule, op, out_names(rule.operator.schema)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        outs = tuple(kwargs.pop(name) for name in self.names)
        try:
            result = self.rule.operator.overload(*args, **kwargs)
        except (MissingFakeError, _compat.tracing.NoFakeImpl):
            return outs[0] if len(outs) == 1 else outs
        for name, out, each in zip(self.names, outs, (result,) if len(outs) == 1 else result, strict=True):
            expected = Expected.like(each)
            if not expected.fits(out):
                raise misfit(self.op, name, expected, out)
        return outs[0] if len(outs) == 1 else outs


# vmap -----------------------------------------------------------------------------------------------------------


class Batched:
    """What an out variant does on batched tensors: the batching rule of the functional op, and a copy."""

    def __init__(self, rule: OutRule, op: str) -> None:
        self.rule, self.op, self.names = rule, op, out_names(rule.operator.schema)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        outs = tuple(kwargs.pop(name) for name in self.names)
        result = self.rule.operator.overload(*args, **kwargs)
        results = (result,) if isinstance(result, Tensor) else result
        for name, out, each in zip(self.names, outs, results, strict=True):
            expected = Expected.like(each)
            if not expected.fits(out):
                raise misfit(self.op, name, expected, out)
            if _compat.functorch.Batch(each).is_batched and not _compat.functorch.Batch(out).is_batched:
                raise UnsupportedError(
                    "vmap over an out variant with an out tensor that is not batched itself",
                    op=self.op,
                    argument=name,
                    fix="batch that tensor too, or call the op without out",
                )
            out.copy_(each)
        return outs[0] if len(outs) == 1 else outs


# Samples --------------------------------------------------------------------------------------------------------


def samples_with_out(op: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The samples of an op, a `CustomOpDef`, with tensors to write to: those of its out variant."""
    variant, names, fill = op._rules.out_variant, out_names(op.schema), filler(op.schema)
    for sample in op.samples():
        lowered = op.lower(*sample.args, **sample.kwargs)
        args, kwargs = _compat.tracing.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, lowered)
        if fill is not None:
            args, kwargs = fill(args, kwargs)
        results = op._opoverload(*args, **kwargs)
        outs = map(torch.zeros_like, results if len(names) > 1 else (results,))
        kwargs = kwargs | dict(zip(names, outs, strict=True))
        yield (args, kwargs) if variant._lowering is None else variant._lowering.restored_call(*args, **kwargs)
