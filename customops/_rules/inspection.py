"""Inspect the first call of a kernel: whether it writes, returns and calls only what its op declares."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.callbacks import Fn
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.results import given
from customops._places import where
from customops._rules.choice import PLAIN
from customops._rules.expected import Expected, results_by_fake
from customops._torch.library import OpOverload
from customops._torch.trees import tensors_in
from customops.errors import KernelError, UnsupportedError

#: The devices whose tensors are inspected. Others may lack the operations for it.
_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})
_SAMPLE = 4096


class Inspection:
    """Replaces a kernel until a call passes, and raises if the kernel does not do what its op declares.

    Args:
        compiled: compare the results with those of the fake impl, on which compiled code relies.
    """

    def __init__(self, current: CurrentKernel, operator: OperatorHandle, *, compiled: bool) -> None:
        self.current, self.overload, self.compiled = current, operator.overload, compiled
        self.__wrapped__ = current.registered
        self.calls_torch = operator.spec.kernel_calls_torch or isinstance(current.registered, CallingTorch)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        current, fn = self.current, self.__wrapped__
        assert current.schema is not None
        read: list[tuple[str, Tensor, int | None, Tensor | None]] = []
        written = set()
        for argument, value in given(current.schema, args, kwargs):
            for x in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(x, Tensor):
                    continue
                if type(x) not in PLAIN or x.device.type not in _DEVICES:
                    return fn(*args, **kwargs)
                if argument.is_mutated:
                    written.add(_torch.memory.memory_id(x))
                else:
                    read.append((argument.name, x, _torch.autograd.version_of(x), _sample(x)))
        result = fn(*args, **kwargs) if self.calls_torch else self._without_torch(*args, **kwargs)
        for name, x, version, sample in read:
            is_counted = _torch.autograd.version_of(x) != version and _torch.memory.memory_id(x) not in written
            if is_counted and _differs(_sample(x), sample):
                raise KernelError(
                    "the kernel writes to an argument, and the schema does not say so: compilers and autograd would "
                    "use the old value",
                    op=current.op,
                    argument=name,
                    where=where(fn),
                    fix=f"work on a copy ({name}.clone()), or declare it: mutates_args=({name!r},)",
                )
        results, expected = result if isinstance(result, (list, tuple)) else (result,), None
        if self.compiled:
            with suppress(UnsupportedError):  # sizes that depend on data
                expected = results_by_fake(self.overload, current.op, args, kwargs)
                results = tensors_in(results)
        if expected is not None and not (len(expected) == len(results) and all(map(Expected.fits, expected, results))):
            record = _torch.library.fake_record(current.op)
            raise KernelError(
                "the kernel returned something else than the fake impl says, on which compiled code relies",
                op=current.op,
                expected=", ".join(map(str, expected)),
                got=", ".join(str(Expected.like(x)) for x in results),
                where=where(fn),
                fix=f"correct the fake impl ({record.source})" if record is not None else "correct the fake impl",
            )
        current.passed()
        return result

    def _without_torch(self, *args: Any, **kwargs: Any) -> Any:
        """Call a kernel, and raise if it calls an operation of torch whose result depends on the caller's state."""
        watch = _WatchOperations()  # type: ignore[no-untyped-call]
        result = _torch.dispatcher.call_plainly_writing(watch.call, self.__wrapped__, *args, **kwargs)
        if watch.found is not None:
            raise KernelError(
                "the kernel calls an operation of torch, and its op is defined with kernel_calls_torch=False: the "
                "operation would depend on the autocast and gradient mode of the caller",
                op=self.current.op,
                got=watch.found,
                where=where(self.__wrapped__),
                fix="leave kernel_calls_torch out of the definition, or register this kernel with calls_torch=True",
            )
        return result


#: Operations whose results do not depend on autocast and gradient mode, beside views.
_INDEPENDENT = frozenset(
    f"aten::{name}"
    for name in """empty_like new_empty new_empty_strided zeros_like new_zeros ones_like new_ones full_like new_full
    clone copy_ _to_copy fill_ zero_ resize_ set_ _local_scalar_dense record_stream is_pinned _pin_memory""".split()
)


class _WatchOperations(_torch.dispatcher.TorchDispatchMode):
    """Finds the first operation that depends on the state in which it is called."""

    supports_higher_order_operators = True
    found: str | None = None

    def call(self, fn: Fn, /, *args: Any, **kwargs: Any) -> Any:
        with self:
            return fn(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found is None and not (isinstance(func, OpOverload) and _is_independent(func)):
            self.found = func.name().removesuffix(".default")
        return func(*args, **(kwargs or {}))


def _is_independent(op: OpOverload) -> bool:
    schema = op._schema
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    is_view = any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)
    return is_view or torch.Tag.inplace_view in op.tags or not takes_tensors or schema.name in _INDEPENDENT


class CallingTorch:
    """A kernel that calls operations of torch, for an op with ``kernel_calls_torch=False``: it sets its state."""

    def __init__(self, fn: Fn, *, writes: bool) -> None:
        self.__wrapped__ = fn
        self.call = _torch.dispatcher.call_plainly_writing if writes else _torch.dispatcher.call_plainly

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.__wrapped__, *args, **kwargs)


def _sample(tensor: Tensor) -> Tensor | None:
    """Return a copy of some elements: a kernel that writes to a tensor changes some of these."""
    if tensor.layout is not torch.strided or tensor.is_inference():
        return None
    most = max(1, int(_SAMPLE ** (1 / max(1, tensor.dim()))))
    some = tuple([slice(None, None, -(-size // most) or 1) for size in tensor.shape])
    return tensor.detach()[some].clone().resolve_conj().resolve_neg()


def _differs(now: Tensor | None, before: Tensor | None) -> bool:
    if now is None or before is None or now.shape != before.shape:
        return now is not before
    return not torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (now, before)))
