"""What the results of a call will be, by the fake impl: shapes, strides, dtypes, devices."""

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
from customops.errors import MissingFakeError, UnsupportedError

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
            found = self._ask(args, kwargs)
            if found is not None:
                remember(self._known, key, found)
        return found

    def forget(self) -> None:
        """A fake impl may go by more than its arguments, which then is not what it was."""
        self._known, self.accepted = {}, {}

    def _ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Expected, ...] | None:
        if _asking.get():  # a kernel runs in the place of the fake impl: there is none
            return None
        token = _asking.set(True)
        try:
            with _compat.tracing.quiet_fakes():
                results = _compat.tracing.call_on_fakes(self._overload, args, kwargs)
        except (MissingFakeError, _compat.tracing.NoFakeImpl):
            return None
        except Exception as error:
            if _compat.tracing.needs_data(error):
                raise UnsupportedError(
                    "an out variant of an op whose result sizes depend on data: they are unknown before the call",
                    op=self._op,
                    fix="return tensors of the largest size, and the sizes",
                ) from error
            raise
        finally:
            _asking.reset(token)
        tensors = results if isinstance(results, (list, tuple)) else (results,)
        return tuple(map(Expected.like, tensors))


def lookup(known: Known, key: Key | None) -> tuple[Expected, ...] | None:
    try:
        return known.get(key)
    except TypeError:  # an argument that cannot be hashed
        return None


def remember(known: Known, key: Key | None, expected: tuple[Expected, ...]) -> None:
    with contextlib.suppress(TypeError):
        if key is not None:
            known[key] = expected
