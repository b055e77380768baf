"""What the tests of fakes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._library.simple_registry import singleton as torch_fakes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_shape(op: Any, *args: Any) -> list[int]:
    """The shape of the op's result on FakeTensors made of `args`."""
    with FakeTensorMode() as mode:
        result = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
    assert isinstance(result, FakeTensor)
    return list(result.shape)


def meta_shape(op: Any, *args: Any) -> list[int]:
    result = op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
    assert result.is_meta
    return list(result.shape)


def source_of(op: Any) -> str:
    """Where torch's registry believes the newest fake to have been written."""
    kernel = torch_fakes.find(op._qualname).fake_impl.kernel
    assert kernel is not None
    return kernel.source


def rows(n: int) -> Callable[[Tensor], Tensor]:
    """A fake by which it shows: its result has `n` elements."""
    return lambda x: x.new_empty(n)
