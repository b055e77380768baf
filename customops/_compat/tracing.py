"""Fake tensors, pytrees and AOTAutograd, as the checks use them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from customops._compat.late import when_imported

__tracebackhide__ = True  # pytest leaves the frames out

_fake_tensor: Any = torch._subclasses.fake_tensor

#: What FakeTensorMode raises: for a tensor without a fake, an operator without a fake impl, one that must see data.
NoFakeTensor: Any = _fake_tensor.UnsupportedFakeTensorException

NoFakeImpl: Any = _fake_tensor.UnsupportedOperatorException

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

tree_flatten = torch.utils._pytree.tree_flatten

tree_unflatten = torch.utils._pytree.tree_unflatten

tree_leaves = torch.utils._pytree.tree_leaves

tree_map = torch.utils._pytree.tree_map


def needs_data(error: BaseException) -> bool:
    """Was something asked of a fake tensor that only data can tell?"""
    return reads_data(error) or isinstance(error, _fake_tensor.DynamicOutputShapeException)


def reads_data(error: BaseException) -> bool:
    """The same, and it is no size of a result: for one, Dynamo may be set to make it up."""
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    kinds = (_fake_tensor.DataDependentOutputException, symbolic_shapes.GuardOnDataDependentSymNode)
    return isinstance(error, kinds)


def fake_mode() -> Any:
    """A FakeTensorMode in which sizes that depend on data may be made up."""
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return torch._subclasses.FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv())


def call_on_fakes(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``op(*args, **kwargs)`` on fakes of the tensors: nothing is computed. Sizes that depend on data raise."""
    mode = torch._subclasses.FakeTensorMode()
    # Of a tensor with a graph torch would look at `grad`, which warns.
    fake = lambda x: mode.from_tensor(x if x.is_leaf else x.detach()) if isinstance(x, torch.Tensor) else x  # noqa: E731
    args, kwargs = tree_map(fake, (args, kwargs))
    with torch.no_grad(), mode:
        return op(*args, **kwargs)


def aot_function(fn: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    """`fn` run through AOTAutograd when called: traced, functionalized, partitioned, and executed as traced."""
    aot = importlib.import_module("torch._functorch.aot_autograd")  # torch's AOT stack, with dynamo
    partitioners = importlib.import_module("torch._functorch.partitioners")
    return aot.aot_function(  # type: ignore[no-any-return]
        fn,
        fw_compiler=lambda graph, _inputs: aot.make_boxed_func(graph),
        partition_fn=partitioners.min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
        dynamic=dynamic,
    )


def ignoring_aliases() -> Any:
    """Context manager: AOTAutograd does not look for undeclared aliases (else it warns, and raises where CI is set)."""
    return importlib.import_module("torch._functorch.config").patch(check_custom_op_aliasing=False)


class Wrapper(torch.Tensor):
    """A tensor that wraps another, and passes what is done with it on to that."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        args, kwargs = tree_unflatten([leaf.inner if isinstance(leaf, Wrapper) else leaf for leaf in leaves], spec)
        results, spec = tree_flatten(func(*args, **kwargs))
        return tree_unflatten([Wrapper(r) if isinstance(r, torch.Tensor) else r for r in results], spec)


def fresh_copy(function: Any) -> Any:
    """The same function with code of its own: what Dynamo keeps with the code goes when the copy goes."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling` says yes, as it does while Dynamo runs a fake impl."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """torch does not log what fake impls raise."""
    log = _fake_tensor.log
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _leave_arguments_out(module: Any) -> None:
    """`make_fx` wants a value for each parameter of the function that an op wraps, those with a default included."""
    tracer = module._MakefxTracer
    trace = tracer._trace_inner

    def trace_inner(self: Any, f: Any, *args: Any) -> Any:
        return trace(self, functools.partial(f) if hasattr(f, "_opoverload") else f, *args)  # which wraps nothing

    tracer._trace_inner = trace_inner


when_imported("torch.fx.experimental.proxy_tensor", _leave_arguments_out)
