"""AOTAutograd, symbolic sizes and Dynamo's state, for `customops.checks` alone."""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from customops._torch.trees import tree_flatten, tree_unflatten

__tracebackhide__ = True  # pytest leaves the frames out


#: Without: opcheck does not work
def aot_function(fn: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    """`fn` run through AOTAutograd when called: traced, functionalized, partitioned, and executed as traced."""
    aot = importlib.import_module("torch._functorch.aot_autograd")  # torch's AOT stack, with dynamo
    partitioners = importlib.import_module("torch._functorch.partitioners")
    return aot.aot_function(  # type: ignore[no-any-return]
        fn,
        fw_compiler=lambda graph, _inputs: aot.make_boxed_func(graph),
        partition_fn=partitioners.default_partition,
        keep_inference_input_mutations=True,
        dynamic=dynamic,
    )


def ignoring_aliases() -> Any:
    """Context manager: AOTAutograd does not look for undeclared aliases (else it warns, and raises where CI is set)."""
    return importlib.import_module("torch._functorch.config").patch(check_custom_op_aliasing=False)


def without_cache_of_fakes() -> Any:
    """Context manager: fake modes made in it keep no results. With symbolic sizes, to look one up takes longer."""
    return importlib.import_module("torch._dynamo.config").patch(fake_tensor_cache_enabled=False)


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


def wrapped_by(tensor: Any) -> list[torch.Tensor] | None:
    """The tensors inside a wrapper subclass, or None for other tensors."""
    if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return None
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


class SymbolicRun:
    """Makes fake tensors with a symbol for each size of two and more, no two of them the same."""

    def __init__(self) -> None:
        self._shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        self._source: Any = importlib.import_module("torch._dynamo.source").ConstantSource
        self._integer: Any = importlib.import_module("sympy").Integer
        self.env: Any = self._shapes.ShapeEnv(duck_shape=False)
        with without_cache_of_fakes():
            self.mode: Any = torch._subclasses.FakeTensorMode(shape_env=self.env)
        self._inputs: list[Any] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """As where torch traces: with the implementations in Python of what C++ has for numbers alone."""
        with self.mode, importlib.import_module("torch._dispatch.python").enable_python_dispatcher():
            yield

    def fake(self, tensor: torch.Tensor) -> Any:
        """A fake of a tensor."""
        dims = tensor.dim()
        context = self._shapes.StatelessSymbolicContext(
            dynamic_sizes=[self._shapes.DimDynamic.DYNAMIC] * dims, constraint_sizes=[None] * dims
        )
        source = self._source(f"input_{len(self._inputs)}")
        fake = self.mode.from_tensor(tensor, symbolic_context=context, source=source)
        # An operator may change the sizes of what it writes: remember them as they are.
        self._inputs.append([size.node.expr if isinstance(size, torch.SymInt) else None for size in fake.shape])
        return fake

    def values(self, tensors: list[torch.Tensor]) -> dict[Any, Any]:
        """The symbols with their values, for inputs of other sizes in the order in which fakes were made."""
        found: dict[Any, Any] = {}
        for expressions, tensor in zip(self._inputs, tensors, strict=True):
            for expression, size in zip(expressions, tensor.shape, strict=True):
                if expression is not None and expression.is_symbol:
                    found[expression] = self._integer(size)
        return found

    def holds_for(self, values: dict[Any, Any]) -> bool:
        """Do these sizes pass the guards, so that compiled code would be used for them again?"""
        return all(self._value(guard.expr, values) is not False for guard in self.env.guards)

    def evaluate(self, value: Any, values: dict[Any, Any]) -> Any:
        """A size of a result with these sizes of the inputs; None if it depends on something else."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        return self._value(value.node._expr, values)

    def _value(self, expression: Any, values: dict[Any, Any]) -> Any:
        known = expression.xreplace(values) if hasattr(expression, "xreplace") else expression
        for kind, plain in (("is_Integer", int), ("is_Boolean", bool), ("is_Number", float)):
            if getattr(known, kind, False) and not getattr(known, "free_symbols", None):
                return plain(known)
        return None

    def made_constant(self) -> list[tuple[int, str, int, str]]:
        """Sizes that became numbers while the operator ran: the number, and the file, line and text where that was."""
        found = []
        for guard in self.env.guards:
            numbers = [self.env.replacements.get(symbol) for symbol in guard.expr.free_symbols]
            place: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
            is_number = len(numbers) == 1 and getattr(numbers[0], "is_Integer", False)
            if is_number and type(guard.expr).__name__ == "Equality" and hasattr(place, "filename"):
                found.append((int(numbers[0]), place.filename, place.lineno, place.line or ""))
        return found


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
