"""Generated functions: their checks, their text, and where errors point."""

from __future__ import annotations

import functools
import gc
import linecache
import subprocess
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.generated_kernels import ROOT, plus
from helpers.processes import Program, run
from helpers.warm import PYTHON
from torch import Tensor

import customops
from customops import Registry
from customops._codegen import function
from customops._dispatch.operator import _fast_paths
from customops._schema.parse import parse
from customops.errors import AliasError, DefinitionError, KernelError
from customops.testing import run_each_isolated

# Checks ---------------------------------------------------------------------------------------------------------


def returns(result: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: result(x)


def checked(registry: Registry, ns: str, check: Any, fn: Any, schema: str = "(Tensor x) -> Tensor") -> Any:
    return registry.custom_op(f"{ns}::f", fn, mutates_args=(), schema=schema, check=check)


def test_always_is_the_default(registry: Registry, ns: str) -> None:
    fresh = [True]
    for check in (None, "always"):
        op = checked(registry, ns, check, lambda x: x.clone() if fresh else x)
        op(torch.ones(1))
        fresh.clear()
        with pytest.raises(AliasError):
            op(torch.ones(1))
        fresh.append(True)


def test_first(registry: Registry, ns: str) -> None:
    """The first call of each kernel is checked, until it passes."""
    results: list[Any] = []
    op = checked(registry, ns, "first", lambda x: results.pop() if results else x)
    x = torch.ones(1)
    for _ in range(2):
        with pytest.raises(AliasError):
            op(x)
    results.append(torch.ones(1))
    op(x)
    assert op(x) is x
    op.register_kernel("cpu", lambda x: None)
    with pytest.raises(KernelError, match="does not fit the schema"):
        op(x)


def test_never(registry: Registry, ns: str) -> None:
    op = checked(registry, ns, "never", lambda x: x)
    x = torch.ones(1)
    assert op(x) is x
    op.register_kernel("cpu", lambda x: 3)
    with pytest.raises(RuntimeError):  # torch's own, when it converts the result
        op(x)
    pair = checked(registry, ns, "never", lambda x: (x + 1, x + 2), "(Tensor x) -> (Tensor, Tensor)")
    assert [y.item() for y in pair(x)] == [2, 3]


@pytest.mark.parametrize("check", ["sometimes", "", False, True, 0, ["never"]])
def test_a_value_there_is_not(registry: Registry, ns: str, check: Any) -> None:
    with pytest.raises(DefinitionError, match="check= has an invalid value"):
        checked(registry, ns, check, plus(1))
    assert not hasattr(getattr(torch.ops, ns), "f")


#: Of ``CUSTOMOPS_CHECK`` and ``check=``: what a call of an op prints that returns its argument.
ENVIRONMENTS = [
    ("never", "always", "returned"),
    ("always", "never", "AliasError"),
    ("first", None, "AliasError"),
    ("", None, "AliasError"),
    ("", "never", "returned"),
    ("yes", None, "DefinitionError the environment variable CUSTOMOPS_CHECK has an invalid value"),
]


@pytest.mark.process
def test_the_environment_decides() -> None:
    script = """
        import torch, customops
        try:
            op = customops.custom_op("ns::f", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor", check={!r})
            op(torch.ones(1))
            print("returned")
        except customops.CustomOpsError as error:
            print(type(error).__name__, error)
    """
    programs = [Program(script.format(check), (), {"CUSTOMOPS_CHECK": value}) for value, check, _ in ENVIRONMENTS]
    found = run_each_isolated([functools.partial(run, program) for program in programs])
    for each, (_, _, printed) in zip(found, ENVIRONMENTS, strict=True):
        each.get()
        assert printed in each.stdout.replace("ns::f: ", "")


# Reading it -----------------------------------------------------------------------------------------------------


def test_kernels_of_others_are_not_printed(registry: Registry, ns: str, op: Any) -> None:
    """Also not of a module with a name that ours use."""
    module = {"become": functools.partial(print)}
    exec("def kernel(x):\n    return x + 1", module)
    before = op.explain_call()
    registry.impl(f"{ns}::f", "CPU", module["kernel"])
    assert op.explain_call() == before


def test_one_shape_is_compiled_once(registry: Registry, ns: str) -> None:
    ops = [registry.custom_op(f"{ns}::f{i}", plus(i), mutates_args=(), schema="(Tensor x) -> Tensor") for i in range(2)]
    first, second = (op._definition._kernels["Autograd"][0].fn for op in ops)
    assert first.__code__ is second.__code__
    assert first is not second


@pytest.mark.slow
def test_nothing_of_an_op_is_kept(registry: Registry, ns: str) -> None:

    gc.collect()
    before = len(_fast_paths)
    for i in range(20):
        op = registry.custom_op(f"{ns}::f{i}", plus(i), mutates_args=(), schema="(Tensor x) -> Tensor")
        op(torch.ones(1))
        op.unregister()
    del op
    gc.collect()
    assert len(_fast_paths) <= before


def test_partial_as_a_kernel(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::f", functools.partial(torch.add, alpha=2), mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor"
    )
    assert op(torch.ones(1), torch.ones(1)).item() == 3
    assert customops.adopt(f"{ns}::f") is op


@pytest.mark.process
def test_where_code_cannot_be_marked_functions_are_wrapped() -> None:
    """As on a torch in which Dynamo has no way to skip a code object."""
    script = """
import torch, torch._dynamo
del torch._C._dynamo.eval_frame.set_code_exec_strategy
import customops
op = customops.custom_op("ns::f", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
op.register_autograd(lambda ctx, grad: grad * 2)
x = torch.zeros(1, requires_grad=True)
for _ in range(2):
    print(op(x.detach()).item(), *torch.autograd.grad(op(x), x)[0].tolist())
print("def autograd" in op.explain_call(), "def kernel" in op.explain_call())
"""
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", script],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1.0 2.0\n1.0 2.0\nTrue True\n"


# What setup_context is given ------------------------------------------------------------------------------------


def seen_by_setup_context(op: Any, *args: Any) -> tuple[Any, Any]:
    """The inputs and the output that it sees, where the kernel may have been called directly."""
    seen: list[Any] = []
    op.register_autograd(
        lambda ctx, *grads: (grads[0], *[None] * (len(args) - 1)),
        setup_context=lambda ctx, inputs, output: seen.append((inputs, output)),
    )
    op(torch.ones(2), *args[1:])
    op(*args)
    (call,) = seen
    return call  # type: ignore[no-any-return]


def test_lists_are_those_of_the_caller(registry: Registry, ns: str) -> None:
    def f(x: Tensor, sizes: list[int]) -> Tensor:
        sizes.append(9)
        return x * 2

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    inputs, _ = seen_by_setup_context(op, torch.ones(2, requires_grad=True), [1])
    assert inputs[1] == [1]


@pytest.mark.parametrize(
    ("returns", "result", "types"),
    [
        ("Tensor[]", lambda x: (x * 2, x * 3), (list, Tensor, Tensor)),
        ("(Tensor, float)", lambda x: (x * 2, 1), (tuple, Tensor, float)),
        ("(Tensor, Tensor)", lambda x: torch.max(x, 0), (tuple, Tensor, Tensor)),
        ("(Tensor, Tensor)", lambda x: [x * 2, x * 3], (tuple, Tensor, Tensor)),
    ],
)
@pytest.mark.parametrize("check", ["always", "never"])
def test_outputs_have_the_types_of_the_schema(
    registry: Registry, ns: str, returns: str, result: Any, types: Any, check: Any
) -> None:
    if check == "never" and returns == "(Tensor, Tensor)" and isinstance(result(torch.ones(1)), list):
        pytest.skip("torch takes no list for several returns, and nobody looks before")
    op = registry.custom_op(f"{ns}::f", result, mutates_args=(), schema=f"(Tensor x) -> {returns}", check=check)
    _, output = seen_by_setup_context(op, torch.ones(2, requires_grad=True))
    assert (type(output), *map(type, output)) == types


# Lines of generated functions -----------------------------------------------------------------------------------


def test_tracebacks_show_the_lines(registry: Registry, ns: str) -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("here")

    op = registry.custom_op(f"{ns}::fails", fails, mutates_args=())
    for x in (torch.ones(1), torch.ones(1, requires_grad=True)):
        for _ in range(2):  # the first call writes the functions
            try:
                op(x)
            except ValueError as error:
                text = "".join(traceback.format_exception(error))
        assert "_result = _fn(x)" in text
        frames = [frame for frame in traceback.extract_tb(error_of(op, x)) if frame.filename.startswith("<customops")]
        assert frames
        assert all(frame.line for frame in frames)


def error_of(op: Any, x: Tensor) -> Any:
    with pytest.raises(ValueError, match="here") as caught:
        op(x)
    return caught.tb


def test_lines_are_kept_as_long_as_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "_compiled", functools.lru_cache(maxsize=1)(function._compiled.__wrapped__))

    def made(number: int) -> Any:
        source = function.Source("made", parse("(Tensor x) -> Tensor"))
        source.template = f"def made():\n    return {number}\n"
        return source.build()

    def lines(fn: Any) -> str:
        return linecache.getline(fn.__code__.co_filename, 2)

    first = made(1)
    assert (first(), lines(first)) == (1, "    return 1\n")
    second, again = made(2), made(1)
    assert first.__code__.co_filename == again.__code__.co_filename != second.__code__.co_filename
    file = first.__code__.co_filename
    del first
    gc.collect()
    assert linecache.getline(file, 2) == "    return 1\n"  # `again` has it
    made(3)  # what the cache of code holds is another one now
    del again
    gc.collect()
    assert file not in linecache.cache
