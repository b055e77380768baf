"""What the results of a call will be, by the fake impl: shapes, strides, dtypes, devices; and calls that differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from customops import _compat
from customops._compat.libraries import OpOverload
from customops._dispatch.current_kernel import CurrentKernel
from customops._dispatch.results import given, tensors_in
from customops.errors import KernelError, MissingFakeError, UnsupportedError, where

__tracebackhide__ = True  # pytest leaves the frames out

#: So many calls are remembered of an op.
_MOST = 256

#: What of a call the fake impl may go by.
Key = tuple[Any, ...]
_FACTS = attrgetter("shape", "dtype", "device")

#: Is a fake impl being asked?
_asking: ContextVar[bool] = ContextVar("customops.asking_fake", default=False)


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

    def is_laid_out(self, tensor: Tensor) -> bool:
        """Has a tensor of this shape these strides, where they matter?"""
        given = tensor.stride()
        if given == self.stride or 0 in self.shape:
            return True
        return all(n == 1 or a == b for n, a, b in zip(self.shape, given, self.stride, strict=True))

    def __str__(self) -> str:
        return f"a tensor of shape {tuple(self.shape)}, {self.dtype}, on {self.device}"


Known = dict[Key | None, tuple[Expected, ...]]


class Foresight:
    """Asks the fake impl of an op, once for all calls with the same shapes and numbers.

    Args:
        fake: the fake impl that counts now; None if there is none to be known of. With another one, all is forgotten.
    """

    def __init__(self, overload: OpOverload, op: str, fake: Callable[[], Any]) -> None:
        self._overload, self._op, self._fake = overload, op, fake
        self._known: Known = {}
        self._known_of: Any = None
        #: What is expected in calls, by the keys of their arguments and of tensors that were found to be like it.
        self.accepted: Known = {}

    def key(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Key | None:
        """Equal for calls of which the fake impl says the same; None where that cannot be told."""
        fake = self._fake()
        if fake is not self._known_of or len(self.accepted) + len(self._known) >= _MOST:
            self.forget()
            self._known_of = fake
        key = [torch.get_default_dtype(), *kwargs]
        try:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor):
                    key += _FACTS(value)
                    key.append(value.stride())
                elif isinstance(value, (list, tuple)):
                    key += [
                        type(value),
                        *((*_FACTS(x), x.stride()) if isinstance(x, Tensor) else (type(x), x) for x in value),
                    ]
                else:
                    key += (type(value), value)
        except RuntimeError:  # of a layout without strides
            return None
        return tuple(key)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Expected, ...] | None:
        """What the results of a call will be, or None if the op has no fake impl.

        Raises:
            UnsupportedError: that depends on data.
        """
        key = self.key(args, kwargs)
        found = lookup(self._known, key)
        if found is None:
            found = asked(self._overload, self._op, args, kwargs)
            if found is not None:
                remember(self._known, key, found)
        return found

    def forget(self) -> None:
        """A fake impl may go by more than its arguments, which then is not what it was."""
        self._known, self.accepted = {}, {}


def asked(overload: OpOverload, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Expected, ...] | None:
    """What the fake impl says of the tensors that a call returns, or None if the op has none.

    Raises:
        UnsupportedError: that depends on data.
    """
    if is_asking():  # a kernel runs in the place of the fake impl: there is none
        return None
    token = _asking.set(True)
    try:
        with _compat.tracing.quiet_fakes():
            results = _compat.tracing.call_on_fakes(overload, args, kwargs)
    except (MissingFakeError, _compat.tracing.NoFakeImpl):
        return None
    except Exception as error:
        if _compat.tracing.needs_data(error):
            raise UnsupportedError(
                "an out variant of an op whose result sizes depend on data: they are unknown before the call",
                op=op,
                fix="return tensors of the largest size, and the sizes",
            ) from error
        raise
    finally:
        _asking.reset(token)
    return tuple(map(Expected.like, tensors_in(results if isinstance(results, (list, tuple)) else (results,))))


def is_asking() -> bool:
    """Does a fake impl run for `asked`, and for no compiler?"""
    return _asking.get()


def lookup(known: Known, key: Key | None) -> tuple[Expected, ...] | None:
    try:
        return known.get(key)
    except TypeError:  # an argument that cannot be hashed
        return None


def remember(known: Known, key: Key | None, expected: tuple[Expected, ...]) -> None:
    with contextlib.suppress(TypeError):
        if key is not None:
            known[key] = expected


#: Tensors on these devices are looked at; others may lack the operations for it.
_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})
_PLAIN = (Tensor, torch.nn.Parameter)
_SAMPLE = 4096


class Inspection:
    """Called in the place of a kernel, until a call passes: does it write what it says, and return what is expected?

    Args:
        compiled: compare with the fake impl, on which code that was compiled relies.
    """

    def __init__(self, current: CurrentKernel, overload: OpOverload, *, compiled: bool) -> None:
        self.current, self.overload, self.compiled = current, overload, compiled
        self.__wrapped__ = current.registered

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        current, fn = self.current, self.__wrapped__
        assert current.schema is not None
        read: list[tuple[str, Tensor, int | None, Tensor | None]] = []
        written = set()
        for argument, value in given(current.schema, args, kwargs):
            for x in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(x, Tensor):
                    continue
                if type(x) not in _PLAIN or x.device.type not in _DEVICES:
                    return fn(*args, **kwargs)
                if argument.is_mutated:
                    written.add(_memory(x))
                else:
                    read.append((argument.name, x, _compat.autograd.version_of(x), _sample(x)))
        result = fn(*args, **kwargs)
        for name, x, version, sample in read:
            is_counted = _compat.autograd.version_of(x) != version and _memory(x) not in written
            if is_counted and _differs(_sample(x), sample):
                raise KernelError(
                    "the kernel writes to an argument, and the schema does not say so: compilers and autograd would "
                    "use the old value",
                    op=current.op,
                    argument=name,
                    where=where(fn),
                    fix=f"work on a copy ({name}.clone()), or declare it: mutates_args=({name!r},)",
                )
        if self.compiled:
            self._compare(args, kwargs, tensors_in(result if isinstance(result, (list, tuple)) else (result,)))
        current.passed()
        return result

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> None:
        op = self.current.op
        try:
            expected = asked(self.overload, op, args, kwargs)
        except UnsupportedError:  # sizes that depend on data
            return
        if expected is None or (len(expected) == len(results) and all(map(Expected.fits, expected, results))):
            return
        record = _compat.registries.fake_record(op)
        raise KernelError(
            "the kernel returned something else than the fake impl says, on which compiled code relies",
            op=op,
            expected=", ".join(map(str, expected)),
            got=", ".join(str(Expected.like(x)) for x in results),
            where=where(self.__wrapped__),
            fix=f"correct the fake impl ({record.source})" if record is not None else "correct the fake impl",
        )


def _memory(tensor: Tensor) -> Any:
    """Equal for tensors of one storage, which may have one version."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _sample(tensor: Tensor) -> Tensor | None:
    """A copy of some elements. A write changes some of them; where not, it may have been undone."""
    if tensor.layout is not torch.strided or tensor.is_inference():
        return None
    most = max(1, int(_SAMPLE ** (1 / max(1, tensor.dim()))))
    some = tuple([slice(None, None, -(-size // most) or 1) for size in tensor.shape])
    return tensor.detach()[some].clone().resolve_conj().resolve_neg()


def _differs(now: Tensor | None, before: Tensor | None) -> bool:
    if now is None or before is None or now.shape != before.shape:
        return now is not before
    return not torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (now, before)))
