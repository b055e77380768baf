"""Out variants: kernels that write their results into tensors of the caller.

A functional op ``ns::f`` and its out variant ``ns::f.out`` are two ops in the dispatcher, each with its kernels. One
may be made of the other: where the out variant has no kernel for a device, it copies what the functional op returns;
where the functional op has none, it allocates what its fake impl says, and lets the out variant fill that. The batching
rule and autocast of the functional op count for both; gradients go through the functional op alone, as in torch.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor

from customops import _torch
from customops._codegen.lowering import Lowering
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.devices import DeviceTypes, check_devices
from customops._dispatch.names import Name
from customops._dispatch.operator import OperatorHandle, OpSpec
from customops._dispatch.options import Options
from customops._dispatch.registrations import Registration, RegistrationGroup
from customops._places import innermost, user_source, where
from customops._rules.expected import FACTS, Expected, ExpectedResults, split_call
from customops._schema.model import Alias, Argument, Names, Return, Schema, tensor_names
from customops._schema.structure import Group, Leaf, Node, Parameter, Signature, TupleForm
from customops._schema.tags import normalize_tags
from customops._torch.schema import Tag
from customops._torch.trees import tensors_in
from customops.errors import (
    AliasError,
    ArgumentError,
    KernelError,
    MissingFakeError,
    RegistrationError,
    UnregisteredError,
    UnsupportedError,
    describe,
)

__tracebackhide__ = True  # pytest leaves the frames out

# The schema and the signature of an out variant: those of a functional op, and the tensors to write to ----------------


def check_has_outs(schema: Schema, tags: tuple[torch.Tag, ...], op: str) -> None:
    """Raise RegistrationError unless an op has nothing but new tensors as results, of sizes known before the call."""
    problem = fix = None
    if not schema.is_functional:
        problem, fix = "it is not functional", "an op that writes, or returns a view, allocates no results to plan"
    elif any(ret.type != "Tensor" for ret in schema.returns):
        problem, fix = "it returns something else than tensors, one or a fixed number of them", "return each by itself"
    elif torch.Tag.dynamic_output_shape in tags:
        problem, fix = "the sizes of its results depend on data", "return tensors of the largest size, and the sizes"
    elif taken := [argument.name for argument in schema.arguments if argument.name in ("out", *out_names(schema))]:
        problem, fix = f"it has an argument {taken[0]}", f"rename {taken[0]}"
    if problem is not None:
        raise RegistrationError(f"the op cannot have an out variant: {problem}", op=op, got=str(schema), fix=fix)


def out_names(schema: Schema) -> tuple[str, ...]:
    """The names of the arguments that an out variant writes to: ``out``, or ``out0``, ``out1`` and so on."""
    count = len(schema.returns)
    return ("out",) if count == 1 else tuple(f"out{i}" for i in range(count))


def out_schema(schema: Schema) -> Schema:
    """``(Tensor x) -> Tensor``: ``(Tensor x, *, Tensor(a0!) out) -> Tensor(a0!)``."""
    aliases = [Alias(frozenset({f"a{i}"}), write=True) for i in range(len(schema.returns))]
    outs = (Argument("Tensor", a, name, kwarg_only=True) for name, a in zip(out_names(schema), aliases, strict=True))
    return Schema((*schema.arguments, *outs), tuple(Return("Tensor", alias) for alias in aliases))


def out_signature(signature: Signature | None, schema: Schema) -> Signature | None:
    """Return the signature of the out variant of an op, with ``out`` of the form of the result; None: the schema's."""
    if signature is None:
        if len(schema.returns) == 1:
            return None
        fields: dict[str, Node] = {str(i): Leaf(f"result_{i}", f"[{i}]", "Tensor") for i in range(len(schema.returns))}
        result: Node = Group("result", "", TupleForm(tuple, tuple(fields)), fields)
        parameters = []
        for each in schema.arguments:
            kind = inspect.Parameter.KEYWORD_ONLY if each.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
            leaf = Leaf(each.name, each.name, each.type, default=each.default)
            parameters.append(Parameter(each.name, kind, leaf, each.default))
        signature = Signature(tuple(parameters), result, returns_plainly=True)
    assert signature.result is not None
    out = Parameter("out", inspect.Parameter.KEYWORD_ONLY, _outs(signature.result, iter(out_names(schema))))
    before = [each for each in signature.parameters if each.stars != "**"]
    after = [each for each in signature.parameters if each.stars == "**"]
    return replace(signature, parameters=(*before, out, *after))


def _outs(node: Node, names: Iterator[str]) -> Node:
    """What the result of an op is made of, as an argument."""
    if isinstance(node, Group):
        fields = {key: _outs(each, names) for key, each in node.fields.items()}
        return replace(node, name="out", path=f"out{node.path}", fields=fields)
    assert isinstance(node, Leaf)
    return replace(node, name=next(names), path=f"out{node.path}", is_mutated=True)


# A call of the kernel of an out variant: what it is given to write to, and what it returns ----------------------------
# The kernel gets tensors that it can just fill. Out tensors of another shape, dtype or device than the result raise.
# For those of other strides, or in memory that the kernel reads, the kernel fills new tensors, which are copied.


def check_given(op: str, names: Sequence[str], outs: Sequence[Tensor | None]) -> None:
    """Raise if an out tensor is None, which the dispatcher accepts as a tensor."""
    for name, out in zip(names, outs, strict=True):
        if out is None:
            raise ArgumentError("the out tensor is missing", op=op, argument=name, expected="a tensor", got="None")


class ReturnsOut:
    """A kernel of the user as one that returns ``out``: it may return nothing, or that."""

    def __init__(self, fn: Fn, op: str) -> None:
        self.fn, self.op = fn, op
        self.__wrapped__ = fn

    def __call__(self, /, *args: Any, out: Any, **kwargs: Any) -> Any:
        result = self.fn(*args, out=out, **kwargs)
        if result is None or result is out:
            return out
        are_lists = isinstance(result, (list, tuple)) and isinstance(out, (list, tuple))
        if not (are_lists and len(result) == len(out) and all(map(is_, result, out))):
            raise KernelError(
                "a kernel of an out variant returned something other than its out tensors",
                op=self.op,
                expected="out itself, or None",
                got=describe(result),
                where=where(self.fn),
                fix="write into out and end with `return out`, or without a return",
            )
        return out


class Checked:
    """A kernel of an out variant, called with tensors that it can just fill: see above.

    Args:
        fn: takes what the schema of the variant says.
        schema: of the functional op.
        rule: has what is known of the results of the functional op.
        inplace: the arguments that ``out`` may be.
    """

    def __init__(self, fn: Fn, schema: Schema, op: str, rule: OutRule, inplace: frozenset[str]) -> None:
        self.fn, self.op, self.rule, self.inplace = fn, op, rule, inplace
        self.__wrapped__ = fn
        self.names = out_names(schema)
        self.positions = [i for i, argument in enumerate(schema.positional) if argument.name in inplace]
        self.keywords = [argument.name for argument in schema.keyword_only if argument.name in inplace]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        names, expected_results = self.names, self.rule.expected_results
        outs = [kwargs[name] for name in names]
        others = {}
        if len(kwargs) > len(names):
            others = {name: value for name, value in kwargs.items() if name not in names}
        tensors, rest = split_call(args, kwargs)
        accepted, targets = expected_results.accepts(tensors, rest), outs
        if not accepted:
            check_given(self.op, names, outs)
            expected = expected_results.of(args, others) or tuple(map(Expected.like, outs))
            if not all(map(Expected.fits, expected, outs)):
                expected_results.forget()
                expected = expected_results.of(args, others) or expected
                for name, each, out in zip(names, expected, outs, strict=True):
                    each.check(self.op, name, out)
            targets = [
                out if each.is_laid_out(out) else each.allocate() for each, out in zip(expected, outs, strict=True)
            ]
            if all(map(is_, targets, outs)):
                expected_results.accept(tensors, rest)
        if _torch.memory.any_alias(args, others, (*outs,)):
            targets = self._separate(args, others, outs, targets)
        elif accepted:
            return self.call_if_allocated(*args, **kwargs)
        self.call_if_allocated(*args, **others, **dict(zip(names, targets, strict=True)))
        for out, target in zip(outs, targets, strict=True):
            if target is not out:
                out.copy_(target)
        return outs[0] if len(outs) == 1 else outs

    def call_if_allocated(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel with tensors that it can just fill. Those that inductor allocates for a call are."""
        shapes = [kwargs[name].shape for name in self.names]
        result = self.fn(*args, **kwargs)
        for i, name in enumerate(self.names):
            shape = kwargs[name].shape
            if shape != shapes[i]:
                raise KernelError(
                    "the kernel of an out variant resized an out tensor",
                    op=self.op,
                    argument=name,
                    expected=f"shape {tuple(shapes[i])}, as before the call",
                    got=f"shape {tuple(shape)} after the call",
                    where=where(self.fn),
                    fix="write into the tensor without resizing it; if the new shape is right, correct the fake impl",
                )
        return result

    def _separate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Tensor], targets: list[Tensor]
    ) -> list[Tensor]:
        """Return tensors that the kernel can fill without writing over what it still has to read."""
        for i, out in enumerate(outs):
            if any(_overlap(out, other) for other in outs[:i]):
                raise AliasError(
                    "two out tensors share memory",
                    op=self.op,
                    argument=self.names[i],
                    fix="pass tensors with separate memory",
                )
        replaced = tensors_in([args[i] for i in self.positions if i < len(args)] + [*map(kwargs.get, self.keywords)])
        others = tensors_in([each for i, each in enumerate(args) if i not in self.positions])
        others += tensors_in([each for name, each in kwargs.items() if name not in self.keywords])

        def is_read(out: Tensor) -> bool:
            view = out.data_ptr(), *FACTS(out), out.stride()
            differs = (x for x in replaced if (x.data_ptr(), *FACTS(x), x.stride()) != view)
            return any(_overlap(out, x) for x in (*others, *differs))

        return [
            Expected.like(out).allocate() if target is out and is_read(out) else target
            for out, target in zip(outs, targets, strict=True)
        ]


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors may have an element in common."""
    return _torch.memory.overlap(one, other, one.data_ptr(), other.data_ptr())


# The rule -------------------------------------------------------------------------------------------------------------

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
        self.expected_results = ExpectedResults(operator, lambda: self.op._rules.fake.fn)

    @property
    def is_there(self) -> bool:
        return self.variant is not None and self.variant._definition.removed is None

    def register(self, op: Any, define: Define, device_types: DeviceTypes, fn: Fn, inplace: Names) -> Registration:
        """Register a kernel of the out variant of `op`, a `CustomOpDef`. For the first one, `define` the variant."""
        schema, of = self.operator.schema, self.operator.spec
        check_has_outs(schema, self.operator.tags, of.qualname)
        name = Name(of.name.namespace, of.name.name, f"{of.name.overload}_out" if of.name.overload else "out")
        spec = OpSpec(
            name,
            out_schema(of.schema),
            normalize_tags([*normalize_tags(of.tags), Tag.out]),
            fn=fn,
            signature=out_signature(of.signature, of.schema),
            lowered_fn=Copies(self, str(name)),
            options=Options(of.options.check, direct_in_graphs=of.options.direct_in_graphs),
            source=user_source(),
        )
        devices = check_devices(device_types, spec.schema, spec.qualname)
        replaced = tensor_names(inplace, "inplace", schema, of.qualname)
        # The kernel of the user as one that takes and returns what the schema says. Its ``return`` may be left out.
        lowering = Lowering(spec.signature, spec.schema, spec.qualname) if spec.signature is not None else None
        takes = spec.schema if lowering is None else lowering.parameters
        returning = ReturnsOut(bind_kernel(fn, takes, spec.qualname, "kernel", warn=True), spec.qualname)
        lowered = returning if lowering is None else lowering.kernel(returning)
        kernel = Checked(lowered, schema, spec.qualname, self, replaced)
        self.op = op
        members: list[Registration] = []
        variant, is_new = self.variant, not self.is_there
        if is_new:
            if _torch.library.find_overload(name.packet, name.overload) is not None:
                raise RegistrationError(
                    "an op with the name of the out variant exists",
                    op=spec.qualname,
                    got=f"defined at {_torch.schema.defined_at(spec.qualname)}",
                    fix="unregister that op, or do without register_out: inductor finds an out variant by its name",
                )
            variant = self.variant = define(spec)
        try:
            if is_new:
                variant._rules.vmap.without_rule = Copies(self, spec.qualname, "vmap rule")
                variant._rules.fake.default = Copies(self, spec.qualname, "fake impl")
            members.append(variant._rules.kernel.register(device_types, kernel))
            # The functional op gets kernels for the devices for which it has none.
            missing = [device for device in devices if not self.functional_computes(device)]
            if missing:
                members.append(op._rules.kernel.register(missing, Allocates(self)))
        except BaseException:
            for member in members:
                member.unregister()
            if is_new:
                variant.unregister()
            raise
        self.operator.recompile()
        self._registered.append(_OutRegistration(self, members))
        return self._registered[-1]

    def functional_computes(self, device: str | None) -> bool:
        """Return whether the functional op has a kernel of its own for a device (None: for all)."""
        kernels, op = self.op._rules.kernel.kernels, self.operator.qualname
        known = [kernels[each] for each in {device, None} if each in kernels]
        if any(not isinstance(fn, Allocates) and not is_stub(fn) for fn in known):
            return True
        keys = [] if None in kernels else [*_FOR_ALL]
        if device is not None and device not in kernels:
            keys.append(_torch.dispatcher.device_key(device))
        return any(_torch.dispatcher.has_kernel(op, key) for key in keys)

    def end(self, error: UnregisteredError | None) -> None:
        """The op goes, and the variant with it."""
        if self.is_there:
            self.variant._owner._drop(self.variant, error)
        else:
            self.variant = None

    def restore(self) -> None:
        """The op is back."""
        if self.variant is not None:
            self.variant._owner._restore(self.variant)


class _OutRegistration(RegistrationGroup):
    """The registration of a kernel of an out variant. With the last one, the variant goes."""

    def __init__(self, rule: OutRule, members: list[Registration]) -> None:
        super().__init__(members)
        self.rule = rule

    def unregister(self) -> None:
        rule = self.rule
        if self in rule._registered:
            rule._registered.remove(self)
            super().unregister()
            rule.operator.recompile()
        if not rule._registered and rule.is_there:
            rule.variant.unregister()


#: Where an op has a kernel for all devices.
_FOR_ALL = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")


_STUB_SIZE = 32  #: bytes of code, at the most. To disassemble a long function takes a millisecond.


def is_stub(fn: Fn) -> bool:
    """Return whether a function has only ``...``, ``pass`` or a docstring: a functional op has no such kernel."""
    fn = innermost(fn)
    if not isinstance(fn, types.FunctionType) or len(fn.__code__.co_code) > _STUB_SIZE:
        return False
    steps = [each for each in dis.get_instructions(fn) if each.opname not in ("RESUME", "NOP")]
    return len(steps) <= 2 and steps[0].opname in ("LOAD_CONST", "RETURN_CONST") and steps[0].argval is None


# One made of the other ------------------------------------------------------------------------------------------------


class Copies:
    """The kernel of an out variant that has none: it calls the functional op, and copies the results.

    As a fake impl, it only checks the out tensors. As a vmap rule, it calls the batching rule of the functional op.
    """

    def __init__(self, rule: OutRule, op: str, role: Literal["kernel", "fake impl", "vmap rule"] = "kernel") -> None:
        self.rule, self.op, self.role, self.names = rule, op, role, out_names(rule.operator.schema)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        outs = tuple(kwargs.pop(name) for name in self.names)
        returned = outs[0] if len(outs) == 1 else outs
        if self.role == "kernel":
            check_given(self.op, self.names, outs)
            device = outs[0].device.type
            if not self.rule.functional_computes(device):  # else it would call the variant
                raise UnsupportedError(
                    f"neither the op nor its out variant has a kernel for {device}",
                    op=self.op,
                    fix=f'op.register_out(fn, device_types="{device}")',
                )
        try:
            results = self.rule.operator.overload(*args, **kwargs)
        except (MissingFakeError, _torch.fakes.NoFakeImpl):
            if self.role == "fake impl":
                return returned
            raise
        for name, out, result in zip(self.names, outs, results if len(outs) > 1 else (results,), strict=True):
            Expected.like(result).check(self.op, name, out)
            is_batched = self.role == "vmap rule" and _torch.autograd.Batch(result).is_batched
            if is_batched and not _torch.autograd.Batch(out).is_batched:
                raise UnsupportedError(
                    "vmap over an out variant with an out tensor that is not batched itself",
                    op=self.op,
                    argument=name,
                    fix="batch that tensor too, or call the op without out",
                )
            if self.role != "fake impl":
                out.copy_(result)
        return returned


class Allocates:
    """The kernel of a functional op that has none of its own: it lets the out variant fill new tensors."""

    def __init__(self, rule: OutRule) -> None:
        self.rule, self.names = rule, out_names(rule.operator.schema)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        expected = self.rule.expected_results.of(args, kwargs)
        if expected is None:
            raise MissingFakeError(
                "only the out variant has a kernel, and no fake impl says which tensors to allocate",
                op=self.rule.operator.qualname,
                fix="op.register_fake(fn), or op.register_kernel(None, fn)",
            )
        outs = tuple(each.allocate() for each in expected)
        self.rule.variant._opoverload(*args, **kwargs, **dict(zip(self.names, outs, strict=True)))
        return outs[0] if len(outs) == 1 else outs
