"""Check that a function does the same when traced by `make_fx`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from customops import _torch
from customops.checks._inputs import copy_tensors, seeded
from customops.errors import CheckError


def make_fx_check(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    tracing_mode: Literal["real", "fake", "symbolic"],
    assert_close: Callable[[Any, Any], object] = torch.testing.assert_close,
    randomize_data: bool = False,
) -> None:
    """Raise CheckError if ``func(*args, **kwargs)`` has different results when it is traced.

    Args:
        func: a function or an operator. It gets copies of the inputs.
        args, kwargs: its inputs. If the sizes of tensors are symbolic, so is a torch.Size among them.
        tracing_mode: "real", "fake" or "symbolic".
        assert_close: a function that raises an AssertionError if two results differ.
        randomize_data: if True, run the trace with other values than those it was made with, to find values that became
            constants of the trace. If `func` raises for the new values, nothing is compared.
    """
    named: dict[Any, Any] = {**dict(enumerate(args)), **(kwargs or {})}
    sizes = {key for key, value in named.items() if isinstance(value, torch.Size)}
    # make_fx makes sizes symbolic in tensors alone.
    inputs = {key: torch.empty(()).expand(value) if key in sizes else value for key, value in named.items()}
    call = functools.partial(_call, func, sizes)
    with seeded(inputs):
        traced = make_fx(call, tracing_mode=tracing_mode)(copy_tensors(inputs))
    if randomize_data:
        inputs = _randomized(inputs)
    try:
        expected = _run(call, inputs)
    except Exception:
        if randomize_data:
            return
        raise
    result = _run(traced, inputs)
    try:
        assert_close(result, expected)
    except AssertionError as difference:
        raise CheckError(
            "the function gives another result when traced by make_fx",
            op=getattr(func, "__qualname__", None) or str(func),
            got=" ".join(str(difference).split()),
            fix="look for a fake impl that differs from the kernel, for state outside of the arguments, and for "
            "values of tensors that are read while tracing",
        ) from difference


def _call(func: Callable[..., Any], sizes: set[Any], inputs: dict[Any, Any]) -> Any:
    values = {key: value.shape if key in sizes else value for key, value in inputs.items()}
    args = [value for key, value in values.items() if isinstance(key, int)]
    return func(*args, **{key: value for key, value in values.items() if not isinstance(key, int)})


def _run(function: Callable[..., Any], inputs: dict[Any, Any]) -> Any:
    with seeded(inputs):
        return function(copy_tensors(inputs))


def _randomized(inputs: dict[Any, Any]) -> dict[Any, Any]:
    values, spec = _torch.tensors.tree_flatten(copy_tensors(inputs))
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided:
            with torch.no_grad():
                value.copy_(torch.rand(value.shape, dtype=value.dtype, device=value.device))
    result: dict[Any, Any] = _torch.tensors.tree_unflatten(values, spec)
    return result
