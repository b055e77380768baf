"""Out variants: kernels that write their results into tensors of the caller.

A functional op ``ns::f`` and its out variant ``ns::f.out`` are two ops in the dispatcher, each with its kernels. One
may be made of the other: where the out variant has no kernel for a device, it copies what the functional op returns;
where the functional op has none, it allocates what its fake impl says, and lets the out variant fill that. The batching
rule and autocast of the functional op count for both; gradients go through the functional op alone, as in torch.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any, Literal, NamedTuple

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
from customops._schema.model import Alias, Argument, Names, Return, Schema, tensor_names
from customops._schema.structure import Group, Leaf, Node, Parameter, Signature, TupleForm
from customops._schema.tags import normalize_tags
from customops._torch.library import OpOverload
from customops._torch.schema import Tag
from customops._torch.tensors import tensors_in
from customops.errors import (
    AliasError,
    ArgumentError,
    KernelError,
    MissingFakeError,
    RegistrationError,
    UnregisteredError,
    UnsupportedError,
    describe,
    innermost,
    user_source,
    where,
)

__tracebackhide__ = True  # pytest leaves the frames out

# What the results of a call will be, by the fake impl: shapes, strides, dtypes, devices -------------------------------

#: So many results are remembered of an op, and so many accepted calls.
_MOST, _MOST_ACCEPTED = 256, 8

#: What of a call the fake impl may go by.
Key = tuple[Any, ...]
_FACTS = attrgetter("shape", "dtype", "device")

#: Is a fake impl being asked by `asked`, and for no compiler?
asking: ContextVar[bool] = ContextVar("customops.asking_fake", default=False)


class Expected(NamedTuple):
    """A tensor that is to come."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> Expected:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def allocate(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def fits(self, tensor: Tensor) -> bool:
        """Has a tensor this shape and dtype, on this device? (Strides are another matter.)"""
        return tensor.shape == self.shape and tensor.dtype is self.dtype and tensor.device == self.device

    def check(self, op: str, argument: str, out: Tensor) -> None:
        """Raise unless an out tensor fits."""
        if not self.fits(out):
            raise ArgumentError(
                "an out tensor does not match the result, and is neither resized nor cast",
                op=op,
                argument=argument,
                expected=str(self),
                got=str(Expected.like(out)),
                fix=f'{argument}=torch.empty({tuple(self.shape)}, dtype={self.dtype}, device="{self.device}")',
            )

    def is_laid_out(self, tensor: Tensor) -> bool:
        """Has a tensor of this shape these strides, where they matter?"""
        given = tensor.stride()
        if given == self.stride or 0 in self.shape:
            return True
        return all(n == 1 or a == b for n, a, b in zip(self.shape, given, self.stride, strict=True))

    def __str__(self) -> str:
        return f"a tensor of shape {tuple(self.shape)}, {self.dtype}, on {self.device}"


class Foresight:
    """Asks the fake impl of the op of a rule, once for all calls with the same shapes and numbers."""

    def __init__(self, rule: OutRule) -> None:
        self._rule = rule
        self._known_of: Any = None
        #: What is expected in calls, by the keys of their arguments.
        self._known: dict[Key, tuple[Expected, ...]] = {}
        #: The last calls whose out tensors were found to be as expected.
        self._accepted: list[tuple[_torch.dispatcher.Guard, list[Any]]] = []

    def _follow_fake(self) -> None:
        fake = self._rule.op._rules.fake.fn
        if fake is not self._known_of:
            self.forget()
            self._known_of = fake

    def accepts(self, tensors: Sequence[Tensor], rest: list[Any]) -> bool:
        """Was a call like this accepted? `tensors` are those of its arguments and its out tensors: see `_split`."""
        self._follow_fake()
        if True not in [tensor.is_nested for tensor in tensors]:  # a guard must not look at one
            for looks_same, of_call in self._accepted:
                if rest == of_call and looks_same(*tensors):
                    return True
        return False

    def accept(self, tensors: Sequence[Tensor], rest: list[Any]) -> None:
        """From now on `accepts` is true of calls like this."""
        looks_same = _torch.dispatcher.exact_guard_of(tensors)
        if looks_same is not None:
            self._accepted = [(looks_same, rest), *self._accepted[: _MOST_ACCEPTED - 1]]

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Expected, ...] | None:
        """What the results of a call will be, or None if the op has no fake impl.

        Raises:
            UnsupportedError: that depends on data.
        """
        self._follow_fake()
        tensors, rest = _split(args, kwargs)
        key: Key | None = None
        found = None
        with contextlib.suppress(RuntimeError, TypeError):  # of a layout without strides; of an argument without a hash
            whole = (*((*_FACTS(tensor), tensor.stride()) for tensor in tensors), *rest)
            found = self._known.get(whole)
            key = whole
        if found is None:
            found = asked(self._rule.operator.overload, self._rule.operator.qualname, args, kwargs)
            if key is not None and found is not None:
                if len(self._known) >= _MOST:
                    self._known.clear()
                self._known[key] = found
        return found

    def forget(self) -> None:
        """A fake impl may go by more than its arguments, which then is not what it was."""
        self._known.clear()
        self._accepted = []


def _split(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """The tensors of a call, and whatever else the fake impl may go by: equal in calls that differ in tensors alone."""
    tensors: list[Tensor] = []
    rest = [torch.get_default_dtype(), *kwargs]
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
            rest.append(Tensor)
        elif isinstance(value, (list, tuple)):
            tensors += [x for x in value if isinstance(x, Tensor)]
            rest += (type(value), len(value), *(Tensor if isinstance(x, Tensor) else (type(x), x) for x in value))
        else:
            rest += (type(value), value)
    return tensors, rest


def asked(overload: OpOverload, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Expected, ...] | None:
    """What the fake impl says of the tensors that a call returns, or None if the op has none.

    Raises:
        UnsupportedError: that depends on data.
    """
    if asking.get():  # a kernel runs in the place of the fake impl: there is none
        return None
    token = asking.set(True)
    try:
        with _torch.tensors.quiet_fakes():
            results = _torch.tensors.call_on_fakes(overload, args, kwargs)
    except (MissingFakeError, _torch.tensors.NoFakeImpl):
        return None
    except Exception as error:
        if _torch.tensors.needs_data(error):
            raise UnsupportedError(
                "an out variant of an op whose result sizes depend on data: they are unknown before the call",
                op=op,
                fix="return tensors of the largest size, and the sizes",
            ) from error
        raise
    finally:
        asking.reset(token)
    return tuple(map(Expected.like, tensors_in(results if isinstance(results, (list, tuple)) else (results,))))


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
    """The signature of the out variant of an op that has this one; None if it is just what the schema says.

    It has one parameter ``out``, of the form of the result: a tuple where the op returns a tuple.
    """
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
# The kernel gets tensors that it can just fill. What the caller gave is looked at before: tensors of another shape,
# dtype or device than the result are refused. Where they have other strides than the fake impl says, or lie in memory
# that the kernel reads, it gets tensors of its own, and the result is copied.


def check_given(op: str, names: Sequence[str], outs: Sequence[Tensor | None]) -> None:
    """Raise if one is None: the dispatcher takes that for a tensor."""
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
        names, foresight = self.names, self.rule.foresight
        outs = [kwargs[name] for name in names]
        others = {}
        if len(kwargs) > len(names):
            others = {name: value for name, value in kwargs.items() if name not in names}
        tensors, rest = _split(args, kwargs)
        accepted, targets = foresight.accepts(tensors, rest), outs
        if not accepted:
            check_given(self.op, names, outs)
            expected = foresight.of(args, others) or tuple(map(Expected.like, outs))
            if not all(map(Expected.fits, expected, outs)):
                foresight.forget()
                expected = foresight.of(args, others) or expected
                for name, each, out in zip(names, expected, outs, strict=True):
                    each.check(self.op, name, out)
            targets = [
                out if each.is_laid_out(out) else each.allocate() for each, out in zip(expected, outs, strict=True)
            ]
            if all(map(is_, targets, outs)):
                foresight.accept(tensors, rest)
        if _torch.tensors.any_alias(args, others, (*outs,)):
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
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: list[Tensor],
        targets: list[Tensor],
    ) -> list[Tensor]:
        """What the kernel is to fill, where it may not write over what it still has to read."""
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
            view = out.data_ptr(), *_FACTS(out), out.stride()
            differs = (x for x in replaced if (x.data_ptr(), *_FACTS(x), x.stride()) != view)
            return any(_overlap(out, x) for x in (*others, *differs))

        return [
            Expected.like(out).allocate() if target is out and is_read(out) else target
            for out, target in zip(outs, targets, strict=True)
        ]


def _overlap(one: Tensor, other: Tensor) -> bool:
    """May two tensors have an element in common?"""
    return _torch.tensors.overlap(one, other, one.data_ptr(), other.data_ptr())


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
        self.foresight = Foresight(self)

    @property
    def is_there(self) -> bool:
        return self.variant is not None and self.variant._definition.removed is None

    def register(self, op: Any, define: Define, device_types: DeviceTypes, fn: Fn, inplace: Names) -> Registration:
        """Register a kernel of the out variant of `op`, a `CustomOpDef`. For the first one `define` makes the variant.

        Nothing is left behind where that fails.
        """
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
        """Has the functional op a kernel for a device (None: for all), which is not made of the out variant?"""
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
    """Has a function no body but ``...``, ``pass`` or a docstring? As a kernel of a functional op it is none."""
    fn = innermost(fn)
    if not isinstance(fn, types.FunctionType) or len(fn.__code__.co_code) > _STUB_SIZE:
        return False
    steps = [each for each in dis.get_instructions(fn) if each.opname not in ("RESUME", "NOP")]
    return len(steps) <= 2 and steps[0].opname in ("LOAD_CONST", "RETURN_CONST") and steps[0].argval is None


# One made of the other ------------------------------------------------------------------------------------------------


class Copies:
    """What an out variant without a function of its own does: it calls the functional op, and copies what that returns.

    As a fake impl it copies nothing: all that is to be known is whether the variant will refuse the tensors. As a vmap
    rule it calls the batching rule of the functional op.
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
        except (MissingFakeError, _torch.tensors.NoFakeImpl):
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
