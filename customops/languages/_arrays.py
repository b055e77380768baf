"""Functions of the arrays of NumPy, CuPy and JAX, functions of TVM-FFI, and kernels of Warp.

The table has a row for each language. A `from_` function has the conversions that its language alone needs.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from customops._places import innermost, name_of, where
from customops._torch.trees import tensors_in
from customops.errors import ArgumentError, KernelError, brief
from customops.languages._arguments import Arguments, Language

F = TypeVar("F", bound=Callable[..., Any])
_text = functools.cache(str)  #: for dtypes: it takes time

NUMPY = Language("NumPy", "numpy", devices=("cpu",))
CUPY = Language("CuPy", "cupy", devices=("cuda",))
JAX = Language("JAX", "jax")
TVM_FFI = Language("TVM-FFI", "tvm_ffi", package="apache-tvm-ffi")
WARP = Language("Warp", "warp", package="warp-lang", devices=("cpu", "cuda"))


@overload
def from_numpy(fn: F, /, *, writable: str | Iterable[str] = ()) -> F: ...
@overload
def from_numpy(fn: None = None, /, *, writable: str | Iterable[str] = ()) -> Callable[[F], F]: ...
def from_numpy(fn: Any = None, /, *, writable: str | Iterable[str] = ()) -> Any:
    """Wrap a function of NumPy arrays so that it takes and returns CPU tensors.

    Functions made by ``numba.njit`` and ``numba.vectorize`` are supported too.

    The arrays share the memory of the tensors and have their strides. They are read-only, except those named in
    `writable`; a write to a read-only array raises. If `fn` returns a NumPy scalar, the result is a 0-dimensional
    tensor, or a Python number if the return hint of `fn` is a number.

    Args:
        fn: takes arrays for tensors, and other arguments unchanged, and returns new arrays. Without it, a decorator is
            returned. If `fn` has the type hints of an op, the result has them too.
        writable: names of the arguments that `fn` writes to, as in the op's ``mutates_args``. A function that Numba
            compiled for explicit types does not take read-only arrays: name all of its array arguments here.

    Raises:
        ArgumentError: `writable` names an argument that `fn` does not have.
        UnsupportedError: in a call, a tensor is on another device, or NumPy does not have its dtype (bfloat16).
        KernelError: in a call, `fn` returns an array that cannot become a tensor: it has negative strides, is
            read-only, or has a dtype that torch does not have.

    Example:
        >>> @custom_op("mylib::sin", mutates_args=())
        ... @from_numpy
        ... def sin(x: Tensor) -> Tensor:
        ...     return np.sin(x)
    """
    if fn is None:
        return functools.partial(from_numpy, writable=writable)
    arguments, numpy = Arguments(fn, NUMPY), NUMPY.load()
    names = frozenset((writable,) if isinstance(writable, str) else writable)
    if arguments.names and (unknown := names - set(arguments.names)):
        problem = "writable names a parameter that the function does not have"
        expected, got = f"some of {', '.join(arguments.names)}", ", ".join(sorted(unknown))
        raise ArgumentError(problem, op=name_of(fn), argument="writable", expected=expected, got=got)

    def array(name: str, tensor: Tensor) -> Any:
        try:
            made = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        except (TypeError, RuntimeError):  # only then look why: NumPy's conversion is the fastest
            made = arguments.converted(name, arguments.plain(name, tensor), Tensor.numpy)
        if name not in names:
            made.setflags(False)  # type: ignore[call-arg]  # by position: a fifth of the time
        return made

    try:
        hints = typing.get_type_hints(innermost(fn)).get("return")
    except (NameError, TypeError):  # `custom_op` reports an unknown name; and a callable may have no hints
        hints = None
    if typing.get_origin(hints) is tuple:
        hints = typing.get_args(hints)
    return arguments.adapter(array, functools.partial(_from_array, fn, numpy), hints)


def _from_array(fn: Callable[..., Any], numpy: Any, value: Any, hint: Any) -> Any:
    """Return a tensor of the memory of a NumPy array, and for a scalar a number where the hint is one."""
    if isinstance(value, numpy.generic):
        if hint in (bool, int, float, complex):
            return value.item()
        value = numpy.asarray(value)
    if not isinstance(value, numpy.ndarray):
        return value
    problem = "the array is read-only: it is a view of an argument, or is broadcast"
    if value.flags.writeable or value.base is None:
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            problem = f"no tensor can be this array: {' '.join(str(error).split())}"
    got = f"dtype {value.dtype}, shape {value.shape}, strides {value.strides}"
    fix = "return array.copy(), or array.astype(...) for the dtype"
    raise KernelError(problem, op=name_of(fn), got=got, where=where(fn), fix=fix)


def from_cupy(fn: F, /) -> F:
    """Wrap a function of CuPy arrays so that it takes and returns CUDA tensors.

    It is `customops.languages.from_numpy` for the GPU. The arrays share the memory of the tensors and have their
    strides. CuPy has no read-only arrays, so a write to an argument that the op does not declare as mutated does not
    raise; `opcheck` finds such writes. The function runs on torch's current stream, with the device of the tensors as
    the current device.

    Args:
        fn: takes arrays for tensors, and other arguments unchanged, and returns new arrays.

    Raises:
        UnsupportedError: in a call, a tensor is on another device, or CuPy does not have its dtype.

    Example:
        >>> @custom_op("mylib::sin", mutates_args=(), device_types="cuda")
        ... @from_cupy
        ... def sin(x: Tensor) -> Tensor:
        ...     return cupy.sin(x)
    """
    arguments, cupy = Arguments(fn, CUPY), CUPY.load()

    def array(name: str, tensor: Tensor) -> Any:
        return arguments.converted(name, arguments.plain(name, tensor), cupy.from_dlpack)

    on_arrays = arguments.adapter(array, lambda value, hint: _from_dlpack(cupy.ndarray, value))

    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((*args, *kwargs.values()))
        if tensors and not tensors[0].is_cuda:
            arguments.explain(*args, **kwargs)
        stream = torch.cuda.current_stream(tensors[0].device if tensors else None)
        if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
            same = cupy.cuda.Stream.from_external(stream)
        else:
            same = cupy.cuda.ExternalStream(stream.cuda_stream, stream.device.index)
        with cupy.cuda.Device(stream.device.index), same:
            return on_arrays(*args, **kwargs)

    return kernel  # type: ignore[return-value]


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
    arguments, jax = Arguments(fn, JAX), JAX.load()

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
        if tensor.is_contiguous() or _strides_are_read(jax):
            array = arguments.converted(name, tensor, jax.dlpack.from_dlpack)
        else:
            array = arguments.converted(name, tensor.permute(order), jax.dlpack.from_dlpack)
            array = array.transpose([order.index(dim) for dim in range(tensor.dim())])
        if _text(array.dtype) != _text(tensor.dtype).removeprefix("torch."):
            fix = 'jax.config.update("jax_enable_x64", True) before JAX is first used, or a narrower dtype'
            expected = f"a dtype that JAX has now: it would make {array.dtype} of this one"
            raise arguments.wrong_dtype(name, tensor, fix, expected=expected)
        return array

    # `block_until_ready`: until then, JAX reads the memory of the tensors.
    return arguments.adapter(array, lambda value, hint: _from_dlpack(jax.Array, jax.block_until_ready(value)))


@functools.cache
def _strides_are_read(jax: Any) -> bool:
    """Return whether JAX reads the strides of a transposed tensor. JAX 0.6 takes its memory for contiguous."""
    tensor = torch.arange(6, dtype=torch.int32, device="cpu").view(2, 3).t()
    return bool((jax.dlpack.from_dlpack(tensor) == tensor.numpy()).all())


def from_tvm_ffi(fn: Any, /) -> Callable[..., Any]:
    """Wrap a ``tvm_ffi.Function`` so that it takes tensors. It gets them as DLPack tensors of the same memory.

    Tensors may have any device, dtype and strides; the kernel itself raises for those that it does not support. On a
    GPU it runs on torch's current stream. A returned tensor becomes a torch.Tensor; an array of tensors becomes a
    tuple.

    Args:
        fn: a function of a loaded module (``tvm_ffi.load_module(path).f``), a global one, or one made by a compiler.

    Raises:
        ArgumentError: `fn` is not a ``tvm_ffi.Function``; or, in a call, arguments are passed by keyword.
        UnsupportedError: in a call, the memory of a tensor does not hold its values (it is sparse or conjugated).

    Example:
        >>> add = from_tvm_ffi(tvm_ffi.load_module("add.so").add)
        >>> @custom_op("mylib::add", mutates_args=())
        ... def add_op(x: Tensor, y: Tensor) -> Tensor:
        ...     out = torch.empty_like(x)
        ...     add(x, y, out)
        ...     return out
    """
    tvm_ffi = TVM_FFI.load()
    if not isinstance(fn, tvm_ffi.Function):
        problem = "from_tvm_ffi takes a function of TVM-FFI"
        fix = "tvm_ffi.load_module(path).name, or tvm_ffi.get_global_func(name)"
        raise ArgumentError(problem, argument="fn", expected="a tvm_ffi.Function", got=brief(fn), fix=fix)
    arguments = Arguments(fn, TVM_FFI, names=())

    def tensors(value: Any, hint: Any = None) -> Any:
        if isinstance(value, (tvm_ffi.Array, tvm_ffi.List)):
            return tuple(map(tensors, value))
        return _from_dlpack(tvm_ffi.Tensor, value)

    # It takes tensors of torch, also those that require a gradient.
    return arguments.adapter(arguments.plain, tensors, as_is=True)


def from_warp(kernel: Any, /) -> Callable[..., None]:
    """Make a function that launches a Warp kernel: ``launch(dim, *args)``, with tensors for the arrays.

    The arrays share the memory of the tensors and have their strides, so the kernel can write to the tensors. It runs
    on their device; on a GPU, on torch's current stream. For an array of vectors or matrices, the last dimensions of
    the tensor hold their elements.

    Args:
        kernel: a kernel made by ``warp.kernel``, without generic type hints.

    Raises:
        ArgumentError: `kernel` is not a Warp kernel.
        UnsupportedError: in a call, a tensor does not have the dtype of the array.

    Example:
        >>> launch = from_warp(axpy_kernel)
        >>> @custom_op("mylib::axpy", mutates_args=("y",))
        ... def axpy(a: float, x: Tensor, y: Tensor) -> None:
        ...     launch(x.numel(), a, x, y)
    """
    warp = WARP.load()
    if not isinstance(kernel, warp.Kernel):
        raise ArgumentError("from_warp takes a kernel of Warp", argument="kernel", got=brief(kernel))
    warp.init()
    parameters = kernel.adj.args
    cpu = warp.get_device("cpu")

    @functools.wraps(kernel.func)
    def launch(dim: int | Sequence[int], /, *inputs: Any) -> None:
        device = next((value.device for value in inputs if isinstance(value, warp.array)), cpu)
        stream = warp.stream_from_torch(warp.device_to_torch(device)) if device.is_cuda else None
        warp.launch(kernel, dim=dim, inputs=inputs, device=device, stream=stream)

    arguments = Arguments(launch, WARP, names=["dim", *[each.label for each in parameters]])
    types = {each.label: getattr(each.type, "dtype", None) for each in parameters}
    scalars = {name: getattr(kind, "_wp_scalar_type_", kind) for name, kind in types.items() if kind}
    dtypes = {name: warp.dtype_to_torch(scalar) for name, scalar in scalars.items()}

    def array(name: str, tensor: Tensor) -> Any:
        tensor, wanted = arguments.plain(name, tensor), dtypes.get(name)
        if wanted is None:
            raise arguments.refusal(name, "the kernel takes no array here", got="a tensor")
        if wanted != tensor.dtype:
            raise arguments.wrong_dtype(name, tensor, f"{name}.to({wanted})", expected=str(wanted))
        return warp.from_torch(tensor, dtype=types[name], requires_grad=False)

    return arguments.adapter(array, lambda value, hint: value)


def _from_dlpack(kind: type, value: Any) -> Any:
    return torch.from_dlpack(value) if isinstance(value, kind) else value  # type: ignore[attr-defined]
