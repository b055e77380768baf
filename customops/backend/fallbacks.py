"""What runs where the device has no kernel: the CPU's kernel on the same memory, counted, or an error."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from customops import _torch
from customops._places import user_stacklevel, users_frame
from customops._schema.parse import from_dispatcher
from customops._torch.trees import tensors_in, tree_map
from customops.backend import _compat
from customops.backend.device_memory import HandleMemory, Loan
from customops.backend.device_module import DeviceModule
from customops.backend.errors import BackendError, BackendNameError, NoKernelError, WrongDeviceError
from customops.backend.memory import Memory
from customops.backend.substitutes import SUBSTITUTES

# How an op of the device is run by the CPU's kernel: read off its schema once, then followed in each call -------------

#: Arguments that may be CPU tensors, whatever their shape.
ON_CPU = {
    f"aten::{op}": argument
    for argument, ops in {
        "indices": "index.Tensor index.Tensor_out _unsafe_index.Tensor index_put index_put_ _index_put_impl_ "
        "_unsafe_index_put",
        "src": "_foreach_copy _foreach_copy_ _foreach_copy.out",
        "scalars": "_foreach_addcdiv.Tensor _foreach_addcdiv_.Tensor _foreach_addcdiv.Tensor_out "
        "_foreach_addcmul.Tensor _foreach_addcmul_.Tensor _foreach_addcmul.Tensor_out",
        "lengths": "_pack_padded_sequence",
        "the_template": "resize_as resize_as_",
        "other": "is_same_size",
    }.items()
    for op in ops.split()
}

#: Ops that copy between devices.
COPIES = {f"aten::{op}" for op in "_copy_from _copy_from_and_resize _to_copy copy_ copy copy.out".split()}

#: Arguments that an op writes to and returns, without its schema saying so.
RETURNED = {"aten::_copy_from": 1, "aten::_copy_from_and_resize": 1}

#: The same, of ops that do not return them: the batch norms, whose running statistics are updated.
UNDECLARED = {
    f"aten::{op}": ("running_mean", "running_var")
    for op in "native_batch_norm native_batch_norm.out _batch_norm_impl_index batch_norm_update_stats".split()
}


class FallbackPlan:
    """What the schema of an op says about running it on the CPU. Arguments are known by position or name."""

    def __init__(self, op: Any) -> None:
        schema, name = from_dispatcher(_torch.schema.schema_of(op)), _torch.library.name_of_overload(op)
        keys = {a.name: a.name if a.kwarg_only else position for position, a in enumerate(schema.arguments)}
        self.op, self.name, self.schema, self.is_view = op, name, schema, schema.is_view
        #: The op itself, or what stands in for it where the CPU has no kernel.
        self.run: Callable[..., Any] = SUBSTITUTES.get(name, op)
        self.writes = (*(keys[a.name] for a in schema.mutated), *(keys[a] for a in UNDECLARED.get(name, ())))
        self.outs = tuple(a.name for a in schema.mutated if a.kwarg_only and a.type == "Tensor")
        takes_numbers = _compat.numbers_are_tensors(name.partition("::")[2].partition(".")[0])
        #: Arguments of type Tensor, of which a number has to be made one.
        self.tensors = set() if takes_numbers else {keys[a.name] for a in schema.arguments if a.is_tensor}
        self.on_cpu = keys[ON_CPU[name]] if name in ON_CPU else None  #: the argument that may be on the CPU
        #: Does it take several tensors, all of the device? An op of a library may take some of the CPU, and one that
        #: torch makes out of others leaves it to these.
        several = sum(1 if a.is_tensor else 2 for a in schema.arguments if a.holds_tensors) > 1
        is_made = _torch.dispatcher.has_kernel(name, "CompositeImplicitAutograd")
        self.takes_several = several and name.startswith("aten::") and name not in COPIES and not is_made
        self.device = next((keys[a.name] for a in schema.arguments if a.type.startswith("Device")), None)
        self.generator = next((keys[a.name] for a in schema.arguments if a.type.startswith("Generator")), None)
        #: Does it draw random numbers, and take no generator?
        self.draws = self.generator is None and torch.Tag.nondeterministic_seeded in op.tags
        of_alias_set = {a.alias: keys[a.name] for a in reversed(schema.mutated)}
        #: The mutated argument that a return is, or None for a new value.
        self.returns = tuple(of_alias_set.get(r.alias) if r.is_mutated else None for r in schema.returns)
        if name in RETURNED:
            self.returns = (RETURNED[name],)


def elsewhere(plan: FallbackPlan, name: str, index: int, key: int | str, tensor: Tensor) -> WrongDeviceError:
    """The error for a tensor that is not where the others are, on ``<name>:<index>``."""
    wanted, found, others = f"{name}:{index}", "found at least two devices", ""
    if tensor.is_cpu:
        wanted, found, others = name, "one is on the CPU", ", or a CPU tensor of no dimensions"
    problem = f"Expected all tensors to be on the same device, but {found}"
    argument = key if isinstance(key, str) else plan.schema.arguments[key].name
    expected, fix = f"a tensor on {wanted}{others}", f".to({wanted!r})"
    got = None if tensor.is_cpu else f"one on {tensor.device}"
    return WrongDeviceError(problem, op=plan.name, argument=argument, expected=expected, got=got, fix=fix)


def check_on_device(plan: FallbackPlan, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a CPU tensor among those of the device, as other devices do. (`Fallback` sees for itself.)"""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in given:
        for tensor in tensors_in((value,)) if key != plan.on_cpu else ():
            if tensor.is_cpu and tensor.ndim:
                raise elsewhere(plan, name, 0, key, tensor)


# ----------------------------------------------------------------------------------------------------------------------
# Dtypes that accelerators compute in and the CPU does not: the op runs in a wider one, and its results are rounded
# Float16, bfloat16 and complex32 are taken so by any op, as accelerators compute in float32 inside. Other dtypes by
# those ops alone that accelerators have for them: the rest refuse them everywhere.

#: How kernels of the CPU say so.
_REFUSED = re.compile(r"not implemented for '|doesn't support tensors of type")
_FLOATING = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_INTEGERS = {dtype: torch.float64 for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)}
_BOOLS = {torch.bool: torch.uint8}
_FLOAT8 = {getattr(torch, f"float8_{kind}"): torch.float32 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}

#: By the name of an op, without overload.
_OTHERS: dict[str, dict[torch.dtype, torch.dtype]] = {
    "aten::histc": _INTEGERS,
    "aten::abs": _BOOLS,
    "aten::abs_": _BOOLS,
    "aten::trace": _BOOLS,
    "aten::scatter": _FLOAT8,
    "aten::scatter_": _FLOAT8,
}


def run_wider(plan: FallbackPlan, compute: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What ``compute(args, kwargs)`` would return and write, if the CPU had it; NotImplemented if nothing is wider."""
    dtypes = _FLOATING | _OTHERS.get(plan.name.partition(".")[0], {})
    widened = False

    def widen(value: Any) -> Any:
        nonlocal widened
        dtype = value.dtype if isinstance(value, Tensor) else value
        if not isinstance(dtype, torch.dtype) or dtype not in dtypes:
            return value
        widened = True
        return value.to(dtypes[dtype]) if isinstance(value, Tensor) else dtypes[dtype]

    wide_args, wide_kwargs = tree_map(widen, (args, kwargs))
    if not widened:
        return NotImplemented
    try:
        expected, _ = on_meta(plan, args, kwargs)
    except NotImplementedError:  # torch cannot tell the dtypes of the results
        return NotImplemented
    result = compute(wide_args, wide_kwargs)
    for key in plan.writes:
        given, wide = (kwargs[key], wide_kwargs[key]) if isinstance(key, str) else (args[key], wide_args[key])
        if wide is not given:
            given.resize_(wide.shape).copy_(wide)
    return _narrow(result, expected)


def _narrow(result: Any, expected: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_narrow(*pair) for pair in zip(result, expected, strict=True)]
    return result.to(expected.dtype) if isinstance(result, Tensor) else result


def as_meta(value: Any) -> Any:
    """An argument of a call that computes sizes and dtypes alone."""
    if isinstance(value, Tensor):  # without an op of the device, which may have a kernel that asks for this
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return {torch.Generator: None, torch.device: torch.device("meta")}.get(type(value), value)


def on_meta(plan: FallbackPlan, args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What a call returns, without memory, and its outs; RuntimeError where torch cannot tell."""
    args, metas = tree_map(as_meta, (tuple(args), kwargs))
    return plan.op(*args, **metas), metas


# A record of what ran where, and what it took, for the coverage report ------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """The cost of some calls."""

    calls: int = 0
    seconds: float = 0.0  #: without the ops that a call itself calls
    nbytes: int = 0  #: of the tensors of the device that they read and wrote

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.calls + other.calls, self.seconds + other.seconds, self.nbytes + other.nbytes)


#: By op, and by ``file:line`` of the user.
Ran: TypeAlias = "collections.defaultdict[tuple[str, str], Spent]"


@dataclass
class Journal:
    """What each op took in kernels of the device, and in those of the CPU, and what raised there."""

    native: Ran = field(default_factory=lambda: collections.defaultdict(Spent))
    fallback: Ran = field(default_factory=lambda: collections.defaultdict(Spent))
    failed: dict[str, str] = field(default_factory=dict)  #: op -> the first line of its last error
    seconds: float = 0.0  #: what the whole program took

    def add(self, other: Journal) -> None:
        for mine, others in ((self.native, other.native), (self.fallback, other.fallback)):
            for key, spent in others.items():
                mine[key] += spent
        self.failed.update(other.failed)


#: The journal that is being written, or none. There is one device in a process, and it may not be registered yet.
open_journals: list[Journal] = []


class _Inner(threading.local):
    """What the measured calls of a thread have taken so far."""

    depth, seconds = 0, 0.0


_inner = _Inner()


class Measured:
    """A call of an op while a journal is open."""

    def __init__(self, op: str) -> None:
        self.journal, self.op, self.before = open_journals[0], op, _inner.seconds
        _inner.depth += 1
        self.start = time.perf_counter()

    def fail(self, error: BaseException) -> None:
        _inner.depth -= 1
        self.journal.failed[self.op] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def end(self, ran: Ran, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note that the call is over; one that was left to another kernel is not counted."""
        _inner.depth -= 1
        if result is NotImplemented:
            return
        if not _inner.depth:
            torch.accelerator.synchronize()  # what is launched counts for the op that launched it
        own = time.perf_counter() - self.start - (_inner.seconds - self.before)
        frame = users_frame()
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
        values = (*args, *kwargs.values(), result)
        tensors = {id(tensor): tensor for tensor in tensors_in(values) if not tensor.is_cpu}
        ran[self.op, place] += Spent(1, own, sum(tensor.nbytes for tensor in tensors.values()))
        _inner.seconds = self.before + time.perf_counter() - self.start  # with what measuring took


def start() -> Journal:
    """Begin a journal; what happens from now on is in it."""
    open_journals[:] = [Journal()]
    return open_journals[0]


# The fallback ---------------------------------------------------------------------------------------------------------

Policy = Literal["cpu", "warn", "error"]


def check_policy(policy: object) -> Policy:
    if policy not in get_args(Policy):
        expected = " or ".join(map(repr, get_args(Policy)))
        raise BackendNameError("unknown fallback policy", expected=expected, got=repr(policy))
    return policy  # type: ignore[return-value]


class Fallback:
    """The boxed kernel at the device's key, for every op that has none there."""

    def __init__(self, memory: Memory, module: DeviceModule, policy: Policy) -> None:
        self.name = memory.name
        self.memory = memory
        self.module = module
        self.base_policy: Policy = policy
        #: What counts in its place in some context: of this thread, and of no other.
        self._policy_here: contextvars.ContextVar[Policy | None] = contextvars.ContextVar("policy", default=None)
        self.counts: collections.Counter[str] = collections.Counter()
        self.plan: Callable[[Any], FallbackPlan] = functools.cache(FallbackPlan)
        self._warned: set[str] = set()

    @property
    def policy(self) -> Policy:
        return self._policy_here.get() or self.base_policy

    @contextlib.contextmanager
    def with_policy(self, policy: Policy) -> Iterator[None]:
        before = self._policy_here.set(policy)
        try:
            yield
        finally:
            self._policy_here.reset(before)

    @_torch.dynamo.outside_dynamo
    def __call__(self, op: Any, /, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan(op)
        if plan.is_view:  # moves no data, and a view of a lent tensor would be no view of this one
            return op.redispatch(_compat.CPU_KEYS, *args, **kwargs)
        measured = Measured(plan.name) if open_journals else None
        try:
            if self.policy != "cpu":
                fix = f"{self.remedy(plan.name)}, or fallback_policy = 'cpu'"
                if self.policy == "error":
                    problem = f"no kernel for {self.name!r}, and no fallback to the CPU"
                    raise NoKernelError(problem, op=plan.name, fix=fix)
                if plan.name not in self._warned:
                    self._warned.add(plan.name)
                    warned = f"no kernel for {self.name!r}; it runs on the CPU (said once per op). To end this: {fix}"
                    warnings.warn(f"{plan.name}: {warned}", stacklevel=user_stacklevel())
            result = FallbackCall(self, plan, args, kwargs).run()
        except Exception as error:
            if measured is not None:
                measured.fail(error)
            raise
        self.counts[plan.name] += 1
        if measured is not None:
            measured.end(measured.journal.fallback, args, kwargs, result)
        return result

    def remedy(self, op: str) -> str:
        return f"@backend.kernel({op!r})" if op.startswith("aten::") else f"register_kernel({self.name!r}) on the op"


@dataclass(slots=True, eq=False)
class FallbackCall:
    """One call on its way to the CPU's kernel and back."""

    fallback: Fallback
    plan: FallbackPlan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    host_args: list[Any] = field(init=False)
    host_kwargs: dict[str, Any] = field(init=False)
    index: int = -1
    reference: Tensor | None = None  #: the first tensor, whose dtype numbers are promoted with
    together: dict[int, Tensor] = field(default_factory=dict)  #: by id, what lends tensors that share memory
    loan: Loan | None = None  #: copies, of memory that is not the host's
    results_here: bool = True  #: are results to be tensors of the device?

    def run(self) -> Any:
        plan, memory = self.plan, self.fallback.memory
        if isinstance(memory, HandleMemory):
            here = [each for each in tensors_in((*self.args, *self.kwargs.values())) if each.device.type == memory.name]
            self.loan = Loan(memory, here)
            self.together = self.loan.hosts
        self._lend_all()
        if plan.writes and self.loan is None:
            tensors = [tensor for tensor in tensors_in((*self.args, *self.kwargs.values())) if not tensor.is_cpu]
            if len(tensors) > 1:
                written = [tensor for tensor in tensors_in(map(self._given, plan.writes)) if not tensor.is_cpu]
                # Lend once more where tensors share memory: the CPU's kernels check for overlap by their storages.
                if memory.overlap(written, tensors):
                    self.together = dict(zip(map(id, tensors), memory.lend_together(tensors), strict=True))
                    self._lend_all()
        if plan.device is not None or self.index < 0:
            # An op that makes a tensor is told where: it makes it on the CPU.
            device = self._given(plan.device) if plan.device is not None else None
            self.results_here = device is None or device.type == memory.name
            if plan.device is not None and device is not None and self.results_here:
                self._put(plan.device, torch.device("cpu"))
            if self.results_here and device is not None and device.index is not None:
                self.index = memory.check_index(device.index)
            elif self.index < 0:
                self.index = memory.current.index
            if self.kwargs.get("pin_memory"):
                raise memory.cannot_pin(plan.name)
        if plan.generator is not None and self._given(plan.generator) is None:
            self._put(plan.generator, self.fallback.module.default_generators[self.index])
        fresh = self._fresh_outs(only_empty=True) if plan.outs else {}
        try:
            result = self._compute(self.host_args, self.host_kwargs)
        except RuntimeError as error:
            fresh = self._fresh_outs(only_empty=False)
            result = self._compute_otherwise(error)
        if plan.writes:
            self._write_back(fresh)
        returns = plan.returns
        if not returns:
            return None
        if len(returns) == 1:
            return self._given(returns[0]) if returns[0] is not None else self._place(result)
        return tuple(
            self._given(key) if key is not None else self._place(value)
            for key, value in zip(returns, result, strict=True)
        )

    def _given(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self.kwargs.get(key)
        return self.args[key] if key < len(self.args) else None

    def _put(self, key: int | str, value: Any) -> None:
        """Change an argument of the call to the CPU's kernel."""
        if isinstance(key, str):
            self.host_kwargs[key] = value
            return
        left_out = self.plan.schema.arguments[len(self.host_args) : key + 1]  # by the dispatcher: trailing defaults
        self.host_args += [argument.default for argument in left_out]
        self.host_args[key] = value

    def _lend_all(self) -> None:
        lend = self._lend
        self.host_args = [lend(i, value) for i, value in enumerate(self.args)]
        self.host_kwargs = {name: lend(name, value) for name, value in self.kwargs.items()}

    def _lend(self, key: int | str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._lend_tensor(key, value)
        if isinstance(value, (list, tuple)):
            if value and any(isinstance(item, Tensor) for item in value):
                return [self._lend_tensor(key, item) if isinstance(item, Tensor) else item for item in value]
        elif isinstance(value, (int, float, complex)) and key in self.plan.tensors:
            dtype = torch.result_type(self.reference, value) if self.reference is not None else None
            return torch.tensor(value, dtype=dtype, device="cpu")
        return value

    def _lend_tensor(self, key: int | str, tensor: Tensor) -> Tensor:
        if tensor.is_cpu:
            if tensor.ndim and key != self.plan.on_cpu:
                raise self._elsewhere(key, tensor)
            return tensor
        index = tensor.get_device()
        if index != self.index:
            if self.index >= 0:
                raise self._elsewhere(key, tensor)
            self.index, self.reference = index, tensor
        if id(tensor) in self.together:
            return self.together[id(tensor)]
        try:
            return self.fallback.memory.lend(tensor)
        except BackendError:
            raise
        except (BufferError, RuntimeError) as error:
            if tensor.device.type != self.fallback.name:
                raise self._elsewhere(key, tensor) from None
            raise self.fallback.memory.cannot_hold(tensor) from error

    def _elsewhere(self, key: int | str, tensor: Tensor) -> WrongDeviceError:
        return elsewhere(self.plan, self.fallback.name, self.index, key, tensor)

    def _fresh_outs(self, *, only_empty: bool) -> dict[str, Tensor]:
        """Outs of the CPU's own: a lent tensor cannot grow."""
        fresh = {}
        for name in self.plan.outs:
            out = self.kwargs.get(name)
            if isinstance(out, Tensor) and not (only_empty and out.numel()):
                fresh[name] = self.host_kwargs[name] = torch.empty(0, dtype=out.dtype, device="cpu")
        return fresh

    def _compute(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.plan.draws:
            with _compat.lent_generator(self.fallback.module.default_generators[self.index]):
                return self.plan.run(*args, **kwargs)
        return self.plan.run(*args, **kwargs)

    def _compute_otherwise(self, error: RuntimeError) -> Any:
        """What can be done about an error of the CPU's kernel. Each out is one of its own now, of no elements."""
        plan, text = self.plan, str(error)
        if plan.outs and "not resizable" in text:  # as lent tensors are
            return self._compute(self.host_args, self.host_kwargs)
        if _REFUSED.search(text):
            result = run_wider(plan, self._compute, self.host_args, self.host_kwargs)
            if result is not NotImplemented:
                return result
        if isinstance(error, NotImplementedError) and f"Could not run '{plan.name}'" in text:
            problem = f"neither {self.fallback.name!r} nor the CPU has a kernel"
            raise NoKernelError(problem, op=plan.name, fix=self.fallback.remedy(plan.name)) from None
        raise error

    def _write_back(self, fresh: dict[str, Tensor]) -> None:
        """The op wrote to the memory itself; sizes, strides and the conj and neg bits have to be carried over."""
        if self.loan is not None:
            kept = [self._given(key) for key in self.plan.writes if key not in fresh]
            self.loan.give_back(tensor for tensor in tensors_in(kept) if not tensor.is_cpu)
        for key in self.plan.writes:
            tensor, host = self._given(key), (self.host_kwargs if isinstance(key, str) else self.host_args)[key]  # type: ignore[index]
            if not isinstance(tensor, Tensor) or tensor.is_cpu:
                continue
            if key in fresh:
                made = self.fallback.memory.place(host, tensor.get_device())
                tensor.set_(made.untyped_storage(), 0, made.size(), made.stride())
                continue
            if host.shape != tensor.shape or host.stride() != tensor.stride():
                if self.loan is not None:
                    start: Any = self.loan.shifts[id(tensor)]
                else:
                    start = 0 if id(tensor) in self.together else tensor.storage_offset()
                offset = host.storage_offset() + start
                tensor.set_(tensor.untyped_storage(), offset, host.size(), host.stride())
            if host.is_conj() != tensor.is_conj():
                _compat.set_conj(tensor, host.is_conj())
            if host.is_neg() != tensor.is_neg():
                _compat.set_neg(tensor, host.is_neg())

    def _place(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._place(item) for item in value]
        is_placed = self.results_here and isinstance(value, Tensor)
        return self.fallback.memory.place(value, self.index) if is_placed else value
