"""Ops made of Triton kernels: `triton_op`, and `wrap_triton` for the kernels in them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from customops import _torch
from customops._op.definitions import DefinitionOptions
from customops._op.op import CustomOpDef
from customops._op.registry import Registry, default
from customops.errors import ArgumentError, DefinitionError, UnsupportedError, brief

P = ParamSpec("P")
R = TypeVar("R")

#: Triton's interpreter changes its own modules while it runs a kernel: one thread at a time.
_interpreter = threading.RLock()


@overload
def triton_op(
    name: str, fn: None = None, /, *, registry: Registry = default, **options: Unpack[DefinitionOptions]
) -> Callable[[Callable[P, R]], CustomOpDef[P, R]]: ...
@overload
def triton_op(
    name: str, fn: Callable[P, R], /, *, registry: Registry = default, **options: Unpack[DefinitionOptions]
) -> CustomOpDef[P, R]: ...
def triton_op(
    name: str, fn: Any = None, /, *, registry: Registry = default, **options: Unpack[DefinitionOptions]
) -> Any:
    """Turn a function that launches Triton kernels into an op that compilers trace into.

    This is `custom_op` with ``traceable=True``. In eager mode and in exported programs the op is like any other. Under
    `torch.compile` the function itself is traced, so that inductor sees each torch op and each kernel that is launched
    through `wrap_triton`. The function is also the fake impl: on tensors without data, a launch does nothing.

    The function may call torch's ops, and kernels through `wrap_triton`; it must not read the data of tensors. On a
    device with its own kernel (`CustomOpDef.register_kernel`), and under Triton's interpreter, compilers do not trace
    into the op: compiled code calls that kernel, or the interpreted one.

    Args:
        name: ``namespace::name``.
        fn: the function. Without it, a decorator is returned.
        registry: the registry that owns the op.
        options: the options of `custom_op`, such as ``mutates_args`` and ``schema``.

    Raises:
        SchemaError, DefinitionError, CallbackError: as for `custom_op`.

    Example:
        >>> @triton_op("mylib::add", mutates_args=())
        ... def add(x: Tensor, y: Tensor) -> Tensor:
        ...     out = torch.empty_like(x)
        ...     grid = (triton.cdiv(out.numel(), 1024),)
        ...     wrap_triton(add_kernel)[grid](x, y, out, out.numel(), BLOCK=1024)
        ...     return out
    """
    if options.setdefault("traceable", True) is not True:
        raise DefinitionError(
            "a triton_op is always traceable", op=name, fix="use custom_op for an op that is kept whole"
        )
    define: Any = registry.custom_op
    return define(name, fn, **options)


def wrap_triton(kernel: Any, /) -> WrappedKernel:
    """Wrap a Triton kernel so that compilers trace its launches: ``wrap_triton(kernel)[grid](...)``.

    Args:
        kernel: a kernel made by ``triton.jit``, ``triton.autotune`` or ``triton.heuristics``.

    Raises:
        ArgumentError: `kernel` is something else.

    Example:
        >>> wrap_triton(add_kernel)[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    """
    if isinstance(kernel, WrappedKernel) or torch.compiler.is_dynamo_compiling():
        return kernel  # type: ignore[no-any-return]  # Dynamo knows kernels as they are
    return WrappedKernel(kernel)


class WrappedKernel:
    """A Triton kernel wrapped by `wrap_triton`. A launch does one of three things.

    - While a compiler traces, the launch is recorded in the graph.
    - On tensors without data, it does nothing.
    - Otherwise the kernel runs on the device of its tensors, which is the current device during the launch.
    """

    __slots__ = ("kernel",)

    def __init__(self, kernel: Any) -> None:
        if not _torch.dynamo.is_kernel(kernel):
            raise ArgumentError(
                "wrap_triton takes a Triton kernel",
                argument="kernel",
                expected="what triton.jit, triton.autotune or triton.heuristics made",
                got=brief(kernel),
            )
        self.kernel = kernel

    def __repr__(self) -> str:
        return f"wrap_triton({_name(self.kernel)})"

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def run(self, /, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch the kernel; with `warmup`, only compile it."""
        if warmup:
            return self.kernel.run(*args, grid=grid, warmup=True, **kwargs)
        return self._launch(grid, *args, **kwargs)

    def _launch(self, grid: Any, /, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if _torch.dynamo.is_traced(tensors):
            if _torch.dynamo.is_interpreted(self.kernel):
                raise UnsupportedError(
                    "a kernel that Triton's interpreter runs cannot be traced",
                    op=_name(self.kernel),
                    fix="launch it in an op of triton_op, and have TRITON_INTERPRET=1 set while that is compiled, too; "
                    "or decorate the kernel without it",
                )
            return _torch.dynamo.capture(self.kernel, grid, args, kwargs)
        if _torch.dynamo.is_fake(tensors):
            return None
        if _torch.dynamo.is_interpreted(self.kernel):
            with _interpreter:
                try:
                    return self.kernel[grid](*args, **kwargs)
                except Exception as error:
                    if "Cannot call @triton.jit'd" not in str(error):
                        raise
                    raise UnsupportedError(
                        "an interpreted kernel calls a Triton function that is not interpreted",
                        op=_name(self.kernel),
                        fix="set TRITON_INTERPRET=1 before triton is first imported, also if torch.compile imports it",
                    ) from error
        guard = self._guard(tensors)
        if guard is None:
            return self.kernel[grid](*args, **kwargs)
        with guard:
            return self.kernel[grid](*args, **kwargs)

    def _guard(self, tensors: list[Tensor]) -> Any:
        """A context in which the device of the tensors is the current one, or None if it is."""
        devices = {tensor.device for tensor in tensors}
        on_cpu = torch.device("cpu")
        if devices == {on_cpu} or not devices:
            if tensors and not _torch.dynamo.runs_on_cpu() and not any(tensor.is_pinned() for tensor in tensors):
                raise UnsupportedError(
                    "this Triton does not compile for the CPU",
                    op=_name(self.kernel),
                    expected="tensors on the device that Triton compiles for",
                    got="CPU tensors",
                    fix='x.to("cuda"); op.register_kernel("cpu", fn); or, to try the kernel without a device, '
                    "TRITON_INTERPRET=1 in the environment before triton is imported",
                )
            return None
        devices.discard(on_cpu)  # memory that is pinned, or else Triton's own error
        if len(devices) > 1:
            raise ArgumentError(
                "a Triton kernel runs on one device",
                op=_name(self.kernel),
                expected="tensors of one device",
                got=", ".join(sorted(map(str, devices))),
                fix=f'move them: x.to("{min(map(str, devices))}")',
            )
        return _torch.dynamo.on_device(devices.pop())


def _name(kernel: Any) -> str:
    """The name of the function behind a kernel."""
    while _torch.dynamo.is_kernel(getattr(kernel, "fn", None)):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", kernel))
