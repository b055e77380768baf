"""The results of a call, as the fake impl predicts them: shapes, strides, dtypes and devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._torch.library import OpOverload
from customops._torch.trees import tensors_in
from customops.errors import ArgumentError, MissingFakeError, UnsupportedError

__tracebackhide__ = True  # pytest leaves the frames out

#: Maximum numbers of results and of accepted calls that are kept for an op.
_MOST, _MOST_ACCEPTED = 256, 8

#: The facts about a call that the fake impl may use.
Key = tuple[Any, ...]
FACTS = attrgetter("shape", "dtype", "device")

#: Whether `results_by_fake` calls the fake impl, and no compiler does.
asking_fake: ContextVar[bool] = ContextVar("customops.asking_fake", default=False)


class Expected(NamedTuple):
    """The shape, strides, dtype and device of a result."""

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
        """Return whether a tensor has this shape, dtype and device, with whatever strides."""
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
        """Return whether a tensor of this shape has these strides, in dimensions of more than one element."""
        given = tensor.stride()
        if given == self.stride or 0 in self.shape:
            return True
        return all(n == 1 or a == b for n, a, b in zip(self.shape, given, self.stride, strict=True))

    def __str__(self) -> str:
        return f"a tensor of shape {tuple(self.shape)}, {self.dtype}, on {self.device}"


class ExpectedResults:
    """Results by the fake impl of an op, which `fake` returns; one call serves all of equal shapes and numbers."""

    def __init__(self, operator: OperatorHandle, fake: Callable[[], Fn | None]) -> None:
        self._operator, self._fake = operator, fake
        self._known_of: Fn | None = None
        #: Key of the arguments -> results.
        self._known: dict[Key, tuple[Expected, ...]] = {}
        #: The last calls whose out tensors were as expected.
        self._accepted: list[tuple[_torch.dispatcher.Guard, list[Any]]] = []

    def _follow_fake(self) -> None:
        fake = self._fake()
        if fake is not self._known_of:
            self.forget()
            self._known_of = fake

    def accepts(self, tensors: Sequence[Tensor], rest: list[Any]) -> bool:
        """Return whether such a call was accepted. `tensors` and `rest` are those of `split_call`, with out tensors."""
        self._follow_fake()
        if True not in [tensor.is_nested for tensor in tensors]:  # a guard must not look at one
            for looks_same, of_call in self._accepted:
                if rest == of_call and looks_same(*tensors):
                    return True
        return False

    def accept(self, tensors: Sequence[Tensor], rest: list[Any]) -> None:
        """Let `accepts` be True for such calls."""
        looks_same = _torch.dispatcher.exact_guard_of(tensors)
        if looks_same is not None:
            self._accepted = [(looks_same, rest), *self._accepted[: _MOST_ACCEPTED - 1]]

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Expected, ...] | None:
        """Return the results of a call, or None if the op has no fake impl.

        Raises:
            UnsupportedError: the results depend on data.
        """
        self._follow_fake()
        tensors, rest = split_call(args, kwargs)
        key: Key | None = None
        found = None
        with contextlib.suppress(RuntimeError, TypeError):  # of a layout without strides; of an argument without a hash
            whole = (*((*FACTS(tensor), tensor.stride()) for tensor in tensors), *rest)
            found = self._known.get(whole)
            key = whole
        if found is None:
            found = results_by_fake(self._operator.overload, self._operator.qualname, args, kwargs)
            if key is not None and found is not None:
                if len(self._known) >= _MOST:
                    self._known.clear()
                self._known[key] = found
        return found

    def forget(self) -> None:
        """Forget all results: a fake impl may use more than its arguments, which may have changed."""
        self._known.clear()
        self._accepted = []


def split_call(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """Return the tensors of a call, and all else that the fake impl may use, which is equal if only tensors differ."""
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


def results_by_fake(
    overload: OpOverload, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Expected, ...] | None:
    """Return the tensors that a call returns by the fake impl, or None if the op has no fake impl.

    Raises:
        UnsupportedError: the tensors depend on data.
    """
    if asking_fake.get():  # a kernel runs in the place of the fake impl: there is none
        return None
    token = asking_fake.set(True)
    try:
        with _torch.fakes.quiet_fakes():
            results = _torch.fakes.call_on_fakes(overload, args, kwargs)
    except (MissingFakeError, _torch.fakes.NoFakeImpl):
        return None
    except Exception as error:
        if _torch.fakes.needs_data(error):
            raise UnsupportedError(
                "an out variant of an op whose result sizes depend on data: they are unknown before the call",
                op=op,
                fix="return tensors of the largest size, and the sizes",
            ) from error
        raise
    finally:
        asking_fake.reset(token)
    return tuple(map(Expected.like, tensors_in(results if isinstance(results, (list, tuple)) else (results,))))
