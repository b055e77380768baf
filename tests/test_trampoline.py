"""The functions that are written for an op, and the direct call of a kernel."""

from __future__ import annotations

import functools
import gc
import inspect
import linecache
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor
from torch.library import Library

import customops
from customops import Registry
from customops._codegen import function
from customops._codegen.function import source_of
from customops._dispatch.fast_path import _direct
from customops._schema.parse import parse
from customops.errors import AliasError, DefinitionError, KernelError, UnsupportedError

ROOT = Path(__file__).parents[1]


def plus(n: float) -> Callable[[Tensor], Tensor]:
    """A kernel; each call makes another function."""
    return lambda x: x + n


def entered(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """The written functions that a call enters."""
    names = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith("<customops"):
            names.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        f(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return names


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    made = registry.custom_op(f"{ns}::f", plus(1), mutates_args=(), schema="(Tensor x) -> Tensor")
    assert made(torch.zeros(1)).item() == 1  # the direct kernel is known from here on
    return made


def value(op: Any) -> float:
    """What the op makes of 0, called each way."""
    results = {op(torch.zeros(1)).item() for _ in range(2)} | {op._opoverload(torch.zeros(1)).item()}
    with torch.inference_mode():
        results.add(op(torch.zeros(1)).item())
    (result,) = results
    return float(result)


# Whose kernel is called -----------------------------------------------------------------------------------------


def test_what_is_registered_later_counts_at_once(op: Any) -> None:
    op.register_kernel("cpu", plus(2))
    assert value(op) == 2
    op.register_kernel("cpu", plus(3))
    assert value(op) == 3
    torch.library.register_kernel(op._qualname, "cpu", plus(4))
    assert value(op) == 4
    with op.set_kernel_enabled("cpu", False):
        assert value(op) == 1
    assert value(op) == 4


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd"])
@pytest.mark.parametrize("how", ["library", "keywords", "function", "qualified"])
def test_a_kernel_of_somebody_else_counts_at_once(op: Any, ns: str, key: str, how: str) -> None:
    other = Library(ns, "FRAGMENT")
    if how == "library":
        other.impl("f", plus(2), key)
    elif how == "keywords":
        other.impl(op_name="f", fn=plus(2), dispatch_key=key)
    elif how == "qualified":
        other.impl(f"{ns}::f", plus(2), key)
    else:
        torch.library.impl(op._qualname, key, plus(2), lib=other)
    assert value(op) == 2
    other._destroy()
    assert value(op) == 1


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_kernel_of_somebody_else_by_its_overload(op: Any, ns: str) -> None:
    other = Library(ns, "FRAGMENT")
    other.impl(op._opoverload, plus(2), "CPU")
    assert value(op) == 2
    other._destroy()


def test_a_kernel_between_counts(op: Any, ns: str) -> None:
    """Somebody watches the op from a key that it has nothing at itself."""
    seen = []

    def watch(keyset: Any, x: Tensor) -> Any:
        seen.append(x)
        return op._opoverload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, x)

    other = Library(ns, "FRAGMENT")
    other.impl("f", watch, "ADInplaceOrView", with_keyset=True)
    x = torch.zeros(1)
    assert op(x).item() == 1
    assert seen == [x]
    other._destroy()
    assert op(x).item() == 1
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_watch_over_writes_counts(registry: Registry, ns: str) -> None:
    def write(x: Tensor) -> None:
        x.add_(1)

    write_op = registry.custom_op(f"{ns}::write", write, mutates_args={"x"})
    x = torch.zeros(1)
    write_op(x)
    seen = []
    other = Library(ns, "FRAGMENT")
    other.impl("write", seen.append, "ADInplaceOrView")
    write_op(x)
    assert len(seen) == 1
    other._destroy()
    write_op(x)
    assert x.item() == 2


def test_a_watch_by_impl_counts(registry: Registry, ns: str) -> None:
    write_op = registry.custom_op(f"{ns}::write", lambda x: None, mutates_args={"x"}, schema="(Tensor(a!) x) -> ()")
    x = torch.zeros(1)
    write_op(x)
    seen: list[Any] = []
    with registry.scope():
        registry.impl(f"{ns}::write", "ADInplaceOrView", seen.append)
        for _ in range(3):
            write_op(x)
        assert len(seen) == 3
    before = x._version
    write_op(x)
    assert (len(seen), x._version) == (3, before + 1)
    assert entered(write_op, x) == ["autograd"]


def test_it_is_called_directly(op: Any) -> None:
    assert entered(op, torch.zeros(1)) == ["autograd"]


def test_registering_while_others_call(op: Any) -> None:
    """Each call sees one kernel or the other; and once a registration is done, the new one."""
    stop, failures = threading.Event(), []

    def call() -> None:
        x = torch.zeros(1)
        while not stop.is_set():
            result = op(x).item()
            if result not in (1, 2, 3):
                failures.append(result)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(300):
            op.register_kernel("cpu", plus(2 + i % 2))
            assert op(torch.zeros(1)).item() == 2 + i % 2
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_while_another_thread_registers() -> None:
    script = """
import os, signal, threading, time
import torch, customops
from customops._dispatch.registrations import lock

op = customops.custom_op("ns::f", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
held = threading.Event()

def register():
    with lock:
        held.set()
        time.sleep(0.5)

threading.Thread(target=register).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(int(op(torch.ones(())).item()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
op.register_kernel("cpu", lambda x: x)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2\n"


# What the kernel sees -------------------------------------------------------------------------------------------


def test_no_graph_is_recorded_inside(registry: Registry, ns: str) -> None:
    """A kernel may use a parameter of its own; the op has no gradient for that. Recording is off as in a forward."""
    weight = torch.ones(1, requires_grad=True)
    seen = []

    def scale(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), (x * weight).requires_grad))
        return x * weight

    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    assert not op(torch.ones(1)).requires_grad
    assert not op(torch.ones(1)).requires_grad
    assert seen == [(False, False)] * 2


def test_a_kernel_that_raises_leaves_autograd_on(registry: Registry, ns: str) -> None:
    def fail(x: Tensor) -> Tensor:
        raise KeyError("kernel")

    op = registry.custom_op(f"{ns}::fail", fail, mutates_args=())
    kept = []
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            op(torch.ones(1))
        kept.append(caught)
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad


def test_forward_mode_raises_also_directly(op: Any) -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.zeros(1), torch.ones(1))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            op(dual)


def test_recursion(registry: Registry, ns: str) -> None:
    def factorial(x: Tensor, n: int) -> Tensor:
        return x * 1 if n == 0 else n * op(x, n - 1)

    op = registry.custom_op(f"{ns}::factorial", factorial, mutates_args=())
    assert op(torch.ones(1), 5).item() == 120
    x = torch.ones(1, requires_grad=True)
    op.register_autograd(lambda ctx, grad: (grad * 120, None))
    assert torch.autograd.grad(op(x, 5), x)[0].item() == 120


def test_none_for_a_tensor(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::f", lambda x, y: x + 1 if y is None else x + y, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor"
    )
    for _ in range(2):
        assert op(torch.zeros(1), None).item() == 1
        assert op(torch.zeros(1), torch.full((1,), 3.0)).item() == 3


# Names and defaults ---------------------------------------------------------------------------------------------

NAMES = "_fn, _result, __x, fn, cell, list, type, isinstance, len, tuple, keyset, _keyset, None_, source, customops"


@pytest.mark.parametrize("star", ["", "*, "])
def test_arguments_of_any_name(registry: Registry, ns: str, star: str) -> None:
    names = NAMES.split(", ")
    schema = f"(Tensor self_, {star}{', '.join(f'int {name}={i}' for i, name in enumerate(names))}) -> Tensor"
    got: list[Any] = []

    def fn(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        got.append([*args, *kwargs.values()])
        return x.clone()

    op = registry.custom_op(f"{ns}::f", fn, mutates_args=(), schema=schema)
    for x in (torch.ones(1), torch.ones(1, requires_grad=True)):
        op(x)
        op(x, **{names[0]: 10, names[-1]: 11})
    assert got == [list(range(len(names))), [10, *range(1, len(names) - 1), 11]] * 2


def test_keywords_of_python_as_names(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::f",
        lambda a, b, c: a * b + c,
        mutates_args=(),
        schema="(Tensor from, float __debug__, float await=1) -> Tensor",
    )
    assert op(torch.ones(1), 2.0).item() == 3
    assert op(torch.ones(1), 2.0, 5.0).item() == 7
    with pytest.raises(UnsupportedError, match="cannot be called 'from'"):
        registry.custom_op(
            f"{ns}::g", lambda x, **kw: x.clone(), mutates_args=(), schema="(Tensor x, *, int from) -> Tensor"
        )
    assert not hasattr(getattr(torch.ops, ns), "g")


def test_a_default_before_an_argument_without(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::f",
        lambda a, b, x: x * a + b,
        mutates_args=(),
        schema="(float a=2, float b=3, Tensor? x=None) -> Tensor",
    )
    assert op(4.0, 5.0, torch.ones(1)).item() == 9
    assert op(x=torch.ones(1)).item() == 5


def test_lists_that_are_defaults_are_new_each_time(registry: Registry, ns: str) -> None:
    def f(x: Tensor, sizes: list[int] = [1, 2], *, more: list[int] = [3]) -> Tensor:  # noqa: B006
        sizes.append(4)
        more.append(5)
        return x + len(sizes) + len(more)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    assert [op(torch.zeros(1)).item() for _ in range(3)] == [5, 5, 5]


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
    with pytest.raises(DefinitionError, match="check= has no such value"):
        checked(registry, ns, check, plus(1))
    assert not hasattr(getattr(torch.ops, ns), "f")


@pytest.mark.parametrize(
    ("value", "check", "printed"),
    [
        ("never", "always", "returned"),
        ("always", "never", "AliasError"),
        ("first", None, "AliasError"),
        ("", None, "AliasError"),
        ("", "never", "returned"),
        ("yes", None, "DefinitionError the environment variable CUSTOMOPS_CHECK has no such value"),
    ],
)
def test_the_environment_decides(value: str, check: Optional[str], printed: str) -> None:
    script = f"""
import torch, customops
try:
    op = customops.custom_op("ns::f", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor", check={check!r})
    op(torch.ones(1))
    print("returned")
except customops.CustomOpsError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={"CUSTOMOPS_CHECK": value, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed in done.stdout.replace("ns::f: ", "")


# Reading it -----------------------------------------------------------------------------------------------------


def test_the_code_can_be_printed(registry: Registry, ns: str) -> None:
    def add_(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
        return x.add_(y, alpha=alpha)

    op = registry.custom_op(f"{ns}::add_", add_, mutates_args={"x"}, tags=torch.Tag.inplace)
    text = op.explain_call()
    sections = [line for line in text.splitlines() if line.startswith("#")]
    assert sections == [
        "# Autograd",
        "# CompositeExplicitAutograd",
        "# CompositeExplicitAutograd, called directly",
        "# Autograd, apply",
        "# Autograd, forward",
    ]
    for line in (
        "def autograd(_keyset, /, x, y, *_rest):",
        "def kernel(x, y, alpha=_default_2):",
        "if _result is not x:",
        "_increment_version((x,))",
    ):
        assert line in text
    compile(text, "text", "exec")


def test_the_code_of_a_gradient_can_be_printed(registry: Registry, ns: str, op: Any) -> None:
    op.register_autograd(lambda ctx, grad: grad)
    sections = [line for line in op.explain_call().splitlines() if line.startswith("#")]
    assert sections[-2:] == ["# Autograd, forward", "# Autograd, backward"]
    assert "_result = _fn(_seen, *_grads)" in op.explain_call()


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


def test_nothing_of_an_op_is_kept(registry: Registry, ns: str) -> None:

    gc.collect()
    before = len(_direct)
    for i in range(20):
        op = registry.custom_op(f"{ns}::f{i}", plus(i), mutates_args=(), schema="(Tensor x) -> Tensor")
        op(torch.ones(1))
        op.unregister()
    del op
    gc.collect()
    assert len(_direct) <= before


def test_partial_as_a_kernel(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::f", functools.partial(torch.add, alpha=2), mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor"
    )
    assert op(torch.ones(1), torch.ones(1)).item() == 3
    assert customops.adopt(f"{ns}::f") is op


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
        [sys.executable, "-W", "ignore", "-c", script],
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


def test_the_source_of_a_generated_function_is_found(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op(torch.ones(1))
    for kernel in op._definition.newest_kernels().values():
        fn = kernel.fn
        if fn.__code__.co_filename.startswith("<customops"):
            linecache.checkcache()
            assert inspect.getsource(fn.__code__) == source_of(fn)
    bypass = registry.custom_op(
        f"{ns}::g", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor", bypass=True
    )
    assert "is_dynamo_compiling" in inspect.getsource(type(bypass).__call__)


def test_lines_are_kept_as_long_as_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "_compiled", functools.lru_cache(maxsize=1)(function._compiled.__wrapped__))

    def made(number: int) -> Any:
        source = function.Source("made", parse("(Tensor x) -> Tensor"))
        source.line(f"return {number}")
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
