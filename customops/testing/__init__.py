"""Generated tests for operators: run the tests of a project, and check each operator call as `opcheck` does.

`generate_opcheck_tests` adds the tests to a test class. A `FailuresDict` lists those that are known to fail. The checks
can also be called one by one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from customops import _torch
from customops.checks import aot_autograd_check, autograd_registration_check, fake_check
from customops.checks._inputs import copy_tensors, seeded
from customops.errors import CheckError, OpCheckError
from customops.testing.failures import FailuresDict, FailuresDictError, validate_failures_dict_structure
from customops.testing.generate import (
    DEFAULT_TEST_UTILS,
    DEPRECATED_DEFAULT_TEST_UTILS,
    GenerationError,
    dontGenerateOpCheckTests,
    generate_opcheck_tests,
)
from customops.testing.isolation import Isolated, IsolationError, run_each_isolated, run_isolated
from customops.testing.watch import OpCheckMode, generate_repro, is_inside_opcheck_mode


class assert_raises_regex:
    """Context manager that asserts that the block raises `exception` with a message in which `regex` is found."""

    def __init__(self, exception: type[BaseException] | tuple[type[BaseException], ...], regex: str) -> None:
        self.exception = exception
        self.regex = regex

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        kinds = self.exception if isinstance(self.exception, tuple) else (self.exception,)
        expected = " or ".join(each.__name__ for each in kinds)
        if error is None:
            raise CheckError("Expected exception, but none was raised", expected=expected)
        if not isinstance(error, self.exception):
            if not isinstance(error, Exception):
                return False  # KeyboardInterrupt and the like are nobody's test result
            problem = f"Expected {expected} to be raised, instead got {type(error).__name__}"
            raise CheckError(problem, got=str(error)) from error
        if not re.search(self.regex, str(error)):
            raise CheckError("Expected exception to match regex", expected=self.regex, got=str(error)) from error
        return True


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
        inputs = copy_tensors(inputs)
        for value in _torch.trees.tree_leaves(inputs):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided:
                with torch.no_grad():
                    value.copy_(torch.rand(value.shape, dtype=value.dtype, device=value.device))
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


__all__ = [
    "DEFAULT_TEST_UTILS",
    "DEPRECATED_DEFAULT_TEST_UTILS",
    "FailuresDict",
    "FailuresDictError",
    "GenerationError",
    "Isolated",
    "IsolationError",
    "OpCheckError",
    "OpCheckMode",
    "aot_autograd_check",
    "assert_raises_regex",
    "autograd_registration_check",
    "dontGenerateOpCheckTests",
    "fake_check",
    "generate_opcheck_tests",
    "generate_repro",
    "is_inside_opcheck_mode",
    "make_fx_check",
    "run_each_isolated",
    "run_isolated",
    "validate_failures_dict_structure",
]
