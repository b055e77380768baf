"""Plain torch code that is traced in the place of an operator: what it must not do, and what it has to return."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from customops._compat.kernel_state import call_plainly_in_trace
from customops._compat.memory import storage_id
from customops._compat.tracing import TorchDispatchMode, tree_flatten, tree_leaves, tree_unflatten

_C: Any = torch._C

#: Makes the error for a problem, of what was expected and got.
Fault = Callable[[str, str, str], Exception]


def substitute(
    overload: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fault: Fault, random: bool
) -> Any:
    """``fn(*args, **kwargs)`` on fake tensors that are being traced, made a functional operator.

    What `fn` writes to tensors of its own becomes functional. Results that share memory with an argument or with each
    other become copies. Raises the `fault` if `fn` writes to an argument, uses tensors with data, draws random numbers
    where they may not be (`random`), or returns other sizes, dtypes or devices than the operator's fake impl.
    """
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    declined = False

    def on_tensors(*given: torch.Tensor) -> Any:
        nonlocal declined
        for i, tensor in zip(places, given, strict=True):
            leaves[i] = tensor
        inner_args, inner_kwargs = tree_unflatten(leaves, spec)
        result = fn(*inner_args, **inner_kwargs)
        declined = result is NotImplemented
        return () if declined else result

    with _Watch(tensors, fault, random):
        result = call_plainly_in_trace(torch.func.functionalize(on_tensors), *tensors)
    if declined:
        return NotImplemented
    _compare(result, _expected(overload, args, kwargs), fault)
    return _without_aliases(result, tensors)


class _Watch(TorchDispatchMode):
    """Raises for what a function does that code in the place of an operator may not do."""

    def __init__(self, tensors: list[torch.Tensor], fault: Fault, random: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = {_memory(tensor) for tensor in tensors}
        self.fault, self.random = fault, random

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            self._look(func, args, kwargs)
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default  # of forward mode; inductor reads its memory, which it has none
        return func(*args, **kwargs)

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        if func._schema.is_mutable and any(_memory(tensor) in self.given for tensor in _written(func, args, kwargs)):
            raise self.fault("writes to an argument", "new tensors, and no writes to what it is given", str(func))
        if not self.random and torch.Tag.nondeterministic_seeded in func.tags:
            raise self.fault("draws random numbers", "code that does not; a decomposition may", str(func))
        if func is torch.ops.aten.lift_fresh.default:
            return  # torch.tensor(...)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dim():
                got = f"a tensor with data, of shape {tuple(tensor.shape)}, in {func}"
                raise self.fault("uses a tensor that is not an argument", "tensors that the op is given", got)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    named = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    positions = {argument.name: i for i, argument in enumerate(func._schema.arguments)}
    values = [kwargs.get(a.name, args[positions[a.name]] if positions[a.name] < len(args) else None) for a in named]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    """Which memory a tensor lies in: the same number for its views."""
    return storage_id(tensor) if tensor.layout is torch.strided and not tensor.is_nested else id(tensor)


def _without_aliases(result: Any, tensors: list[torch.Tensor]) -> Any:
    taken = {_memory(tensor) for tensor in tensors}
    leaves, spec = tree_flatten(result)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[i] = leaf.clone() if _memory(leaf) in taken else leaf
            taken.add(_memory(leaves[i]))
    return tree_unflatten(leaves, spec)


# What the fake impl says ---------------------------------------------------------------------------------------


def _expected(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    proxies: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch._subclasses.FakeTensor)]
    env = leaves[0].fake_mode.shape_env if leaves else None
    with proxies.disable_proxy_modes_tracing():
        if env is None:
            return overload(*args, **kwargs)
        with env.ignore_fresh_unbacked_symbols():
            return overload(*args, **kwargs)


def _compare(result: Any, expected: Any, fault: Fault) -> None:
    got_leaves, got_spec = tree_flatten(list(result) if isinstance(result, (list, tuple)) else result)
    leaves, spec = tree_flatten(list(expected) if isinstance(expected, (list, tuple)) else expected)
    if got_spec != spec:
        raise fault("returns another number of results", _count(expected), _count(result))
    for i, (got, want) in enumerate(zip(got_leaves, leaves, strict=True)):
        if not _is_like(got, want):
            where = f"result {i}: " if len(leaves) > 1 else ""
            raise fault("returns something else than the fake impl", where + _describe(want), where + _describe(got))


def _is_like(got: Any, want: Any) -> bool:
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) is isinstance(want, torch.Tensor)
    same = (got.dtype, got.device, got.dim()) == (want.dtype, want.device, want.dim())
    return same and not any(map(_differ, got.shape, want.shape))


def _differ(size: Any, other: Any) -> bool:
    """Are two sizes known to differ? Sizes that depend on data are not known."""
    sizes = [each.node.hint if isinstance(each, torch.SymInt) else each for each in (size, other)]
    return None not in sizes and sizes[0] != sizes[1]


def _count(result: Any) -> str:
    if isinstance(result, (list, tuple)):
        return f"a {type(result).__name__} of {len(result)}"
    return f"1 result ({_describe(result)})"


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
