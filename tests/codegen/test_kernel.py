"""Generated kernels: whose kernel is called, what it sees, names and defaults."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.generated_kernels import ROOT, plus, value
from helpers.warm import PYTHON
from torch import Tensor
from torch.library import Library

from customops import Registry
from customops.errors import UnsupportedError


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
        other.impl("f", plus(2), key, allow_override=True)
    elif how == "keywords":
        other.impl(op_name="f", fn=plus(2), dispatch_key=key, allow_override=True)
    elif how == "qualified":
        other.impl(f"{ns}::f", plus(2), key, allow_override=True)
    elif inspect.signature(Library.impl).parameters["allow_override"].default:
        torch.library.impl(op._qualname, key, plus(2), lib=other)
    else:
        pytest.skip("torch.library.impl does not override kernels before torch 2.13")
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
    other.impl("write", seen.append, "ADInplaceOrView", allow_override=True)
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


@pytest.mark.process
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
        [PYTHON, "-W", "ignore", "-c", script],
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
    with pytest.raises(UnsupportedError, match="cannot be named 'from'"):
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


def test_ops_whose_schemas_read_alike_keep_their_own_defaults(registry: Registry, ns: str) -> None:
    def limited(x: Tensor, limit: float) -> Tensor:
        return x.clamp(max=limit)

    schemas, results = set(), []
    for name, default in (("up", math.inf), ("down", -math.inf)):  # schema text has a word for neither
        limited.__defaults__ = (default,)
        op = registry.custom_op(f"{ns}::{name}", limited, mutates_args=())
        schemas.add(str(op.schema))
        results.append(op(torch.ones(1)).item())
    assert schemas == {"(Tensor x, float? limit=None) -> Tensor"}
    assert results == [1, -math.inf]
