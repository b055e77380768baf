"""JAX: functions of its arrays, by DLPack."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
import torch
from torch import Tensor

from customops.languages import Arguments

F = TypeVar("F", bound=Callable[..., Any])
_text = functools.cache(str)  #: for dtypes: it takes time


@overload
def from_jax(fn: F, /, *, copy: bool = False) -> F: ...
@overload
def from_jax(fn: None = None, /, *, copy: bool = False) -> Callable[[F], F]: ...
def from_jax(fn: Any = None, /, *, copy: bool = False) -> Any:
    """Wrap a function of JAX arrays so that it takes and returns tensors, on the devices that JAX supports.

    The function cannot write to the tensors. It reads their memory, so a call returns only when JAX has finished. It
    must return arrays that it computed in the call: a constant of the module would share memory with a tensor, which
    torch may write to.

    Args:
        fn: takes arrays for tensors, and other arguments unchanged, and returns new arrays; usually made by
            ``jax.jit``. Without it, a decorator is returned. If `fn` has the type hints of an op, the result has them
            too.
        copy: if True, pass a contiguous copy of a tensor whose strides JAX does not support, instead of raising. JAX
            supports permutations of contiguous memory.

    Raises:
        UnsupportedError: in a call, JAX does not support the strides of a tensor, or would narrow its dtype: float64
            and int64, unless ``jax_enable_x64`` is set.

    Example:
        >>> @custom_op("mylib::gelu", mutates_args=())
        ... @from_jax
        ... def gelu(x: Tensor) -> Tensor:
        ...     return jax.nn.gelu(x)
    """
    if fn is None:
        return functools.partial(from_jax, copy=copy)
    arguments = Arguments(fn, "JAX")

    def array(name: str, tensor: Tensor) -> Any:
        tensor = arguments.plain(name, tensor)
        # The dimensions from that of the largest stride to that of the smallest.
        keys = list(zip(tensor.stride(), tensor.shape, strict=True))
        order = sorted(range(tensor.dim()), key=keys.__getitem__, reverse=True)
        if not (tensor.is_contiguous() or tensor.permute(order).is_contiguous()):
            if not copy:
                problem = "JAX takes contiguous memory, or a permutation of it"
                shown = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                raise arguments.refusal(name, problem, got=shown, fix=f"{name}.contiguous(), or from_jax(copy=True)")
            tensor = tensor.contiguous()
        try:
            if tensor.is_contiguous() or _strides_are_read():
                array = jax.dlpack.from_dlpack(tensor)
            else:
                array = jax.dlpack.from_dlpack(tensor.permute(order))
                array = array.transpose([order.index(dim) for dim in range(tensor.dim())])
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            got = f"{tensor.dtype}, shape {tuple(tensor.shape)}, on {tensor.device}"
            raise arguments.refusal(name, f"JAX does not take the tensor: {error}", got=got) from error
        if _text(array.dtype) != _text(tensor.dtype).removeprefix("torch."):
            fix = 'jax.config.update("jax_enable_x64", True) before JAX is first used, or a narrower dtype'
            expected = f"a dtype that JAX has now: it would make {array.dtype} of this one"
            raise arguments.wrong_dtype(name, tensor, fix, expected=expected)
        return array

    return arguments.adapter(array, _tensor)


@functools.cache
def _strides_are_read() -> bool:
    """Does JAX read a transposed tensor as it is? Versions such as 0.6 take its memory for contiguous."""
    tensor = torch.arange(6, dtype=torch.int32, device="cpu").view(2, 3).t()
    return bool((jax.dlpack.from_dlpack(tensor) == tensor.numpy()).all())


def _tensor(value: Any, _hint: Any) -> Any:
    value = jax.block_until_ready(value)  # it still reads the memory of the tensors
    return torch.from_dlpack(value) if isinstance(value, jax.Array) else value  # type: ignore[attr-defined]
