"""Kernels: which one runs, what it may return, switching them off, factory ops."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.types import ConvertFrameReturn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import customops
from customops import Registry
from customops.errors import AliasError, CallbackError, DefinitionError, KernelError, RegistrationError


def run_at(op: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that sits at a dispatch key, whatever the device of the tensors: no hardware is needed."""
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return op._opoverload.redispatch(keyset, *args, **kwargs)


def constant(value: float) -> Callable[[Tensor], Tensor]:
    """A kernel that can be told from others."""
    return lambda x: torch.full_like(x, value)


def which(op: Any, key: str = "CPU") -> float:
    """The value that the kernel at `key` gives."""
    result: float = run_at(op, key, torch.zeros(())).item()
    return result


def define(registry: Registry, ns: str, fn: Any = None, **options: Any) -> Any:
    options = {"schema": "(Tensor x) -> Tensor", "mutates_args": ()} | options
    return registry.custom_op(f"{ns}::f", fn or constant(0), **options)


def located(fn: Any) -> str:
    """How errors name a function of this file."""
    return f"{fn.__name__} ({__file__}:{fn.__code__.co_firstlineno})"


# Which kernel runs ----------------------------------------------------------------------------------------------


# item 21
@pytest.mark.parametrize("device_types", ["cpu", ("cpu",), ["cpu"]])
def test_a_function_for_cpu_and_a_kernel_for_cuda(registry: Registry, ns: str, device_types: Any) -> None:
    op = define(registry, ns, constant(1), device_types=device_types)
    op.register_kernel("cuda", constant(2))
    assert op(torch.zeros(())).item() == 1
    assert (which(op, "CPU"), which(op, "CUDA")) == (1, 2)
    with pytest.raises(NotImplementedError):
        which(op, "XPU")


# item 21
def test_a_function_for_several_devices(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1), device_types=("cpu", "cuda"))
    assert (which(op, "CPU"), which(op, "CUDA")) == (1, 1)
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{ns}::f", key)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"{ns}::f", "CompositeExplicitAutograd")


# item 22
@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_overriding_one_of_several_devices_leaves_the_others(
    registry: Registry, ns: str, first: str, second: str
) -> None:
    op = define(registry, ns)
    op.register_kernel([first, second, "xpu"], constant(1))
    op.register_kernel(first, constant(2))
    assert (which(op, first.upper()), which(op, second.upper()), which(op, "XPU")) == (2, 1, 1)
    op.register_kernel(second, constant(3))
    assert (which(op, first.upper()), which(op, second.upper()), which(op, "XPU")) == (2, 3, 1)
    op.register_kernel([second, first], constant(4))
    assert (which(op, first.upper()), which(op, second.upper()), which(op, "XPU")) == (4, 4, 1)
    assert which(op, "MPS") == 0


# item 22
def test_overriding_a_device_the_op_was_defined_for(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1), device_types=("cpu", "cuda"))
    op.register_kernel("cuda", constant(2))
    assert (which(op, "CPU"), which(op, "CUDA")) == (1, 2)
    op.register_kernel("cpu", constant(3))
    assert (which(op, "CPU"), which(op, "CUDA")) == (3, 2)


# item 22
@pytest.mark.parametrize("form", ["object", "name", "overload", "method"])
@pytest.mark.parametrize("decorator", [False, True])
@pytest.mark.parametrize("device_types", ["cpu", ["cpu"], ("cpu", "cuda"), None, [None, "xpu"]])
def test_every_way_to_register(registry: Registry, ns: str, form: str, decorator: bool, device_types: Any) -> None:
    op, kernel = define(registry, ns), constant(7)
    target = {"object": op, "name": f"{ns}::f", "overload": op._opoverload}.get(form)
    args = (device_types,) if target is None else (target, device_types)
    register = op.register_kernel if target is None else customops.register_kernel
    returned = register(*args)(kernel) if decorator else register(*args, kernel)
    assert returned is kernel
    assert which(op, "CPU") == 7
    assert which(op, "CUDA") == (0 if device_types in ("cpu", ["cpu"]) else 7)


# item 22
def test_registering_for_every_device_replaces_the_default_only(registry: Registry, ns: str) -> None:
    op = define(registry, ns)
    op.register_kernel("cuda", constant(1))
    op.register_kernel(None, constant(2))
    assert (which(op, "CPU"), which(op, "XPU"), which(op, "CUDA")) == (2, 2, 1)


# item 22
@pytest.mark.parametrize("form", ["name", "overload"])
def test_kernels_of_an_op_that_torch_defined(registry: Registry, ns: str, form: str) -> None:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x, float by=2.5) -> Tensor")
        op = getattr(torch.ops, ns).f.default
        target = f"{ns}::f" if form == "name" else op

        @customops.register_kernel(target, "cpu", lib=lib)
        def _(x: Tensor, by: float) -> Tensor:
            return x * by

        x = torch.randn(3)
        assert_close(op(x), x * 2.5)
        assert_close(op(x, 4.0), x * 4)
        customops.register_kernel(target, ["cpu", "cuda"], lambda x, by: x - by, lib=lib)
        assert_close(op(x), x - 2.5)


# item 22
def test_a_kernel_registered_with_a_library_goes_with_it(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        op.register_kernel(["cpu", "cuda"], constant(2), lib=lib)
        op.register_kernel("cuda", constant(3), lib=lib)
        assert (which(op, "CPU"), which(op, "CUDA")) == (2, 3)
    assert (which(op, "CPU"), which(op, "CUDA")) == (1, 1)


def test_registering_in_a_scope_ends_with_it(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with registry.scope():
        op.register_kernel(["cpu", "cuda"], constant(3))
        op.register_kernel("cuda", constant(4))
        assert (which(op, "CPU"), which(op, "CUDA")) == (3, 4)
    assert (which(op, "CPU"), which(op, "CUDA")) == (2, 1)
    op.register_kernel("cuda", constant(5))
    assert (which(op, "CPU"), which(op, "CUDA")) == (2, 5)


def test_a_scope_leaves_what_other_threads_registered_meanwhile(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))

    def register_elsewhere(*args: Any) -> None:
        thread = threading.Thread(target=op.register_kernel, args=args)
        thread.start()
        thread.join(60)

    with registry.scope():
        op.register_kernel(["cpu", "cuda", "mps"], constant(2))
        register_elsewhere("xpu", constant(3))
        register_elsewhere("cuda", constant(4))
        assert [which(op, key) for key in ("CPU", "CUDA", "XPU", "MPS")] == [2, 4, 3, 2]
    assert [which(op, key) for key in ("CPU", "CUDA", "XPU", "MPS")] == [1, 4, 3, 1]
    register_elsewhere("cuda", constant(5))
    assert which(op, "CUDA") == 5


def test_torch_finds_the_kernels(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1), device_types="cpu")
    op.register_kernel("cuda", constant(2))
    kernel = torch.library.get_kernel(f"{ns}::f", "CUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    assert kernel.call_boxed(keys, torch.zeros(())).item() == 2
    with pytest.raises(RuntimeError, match="no kernel for XPU"):
        torch.library.get_kernel(f"{ns}::f", "XPU")


def test_a_kernel_that_does_not_fit_is_refused(registry: Registry, ns: str) -> None:
    op = define(registry, ns)

    def two(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    with pytest.raises(CallbackError, match="the kernel does not fit the operator") as caught:
        op.register_kernel("cpu", two)
    assert caught.value.op == f"{ns}::f"
    assert caught.value.where == located(two)
    with pytest.raises(CallbackError, match="the kernel must be callable"):
        op.register_kernel("cpu", 3)
    assert which(op) == 0


@pytest.mark.parametrize(
    ("device_types", "problem"),
    [
        ("nothing", "unknown device type: Expected one of cpu, cuda"),
        (["cpu", "nothing"], "unknown device type"),
        ([3], "a device type must be a string"),
        (3, "a device type must be a string"),
        (torch.device("cpu"), "a device type must be a string"),
        ([], "device_types is empty"),
    ],
)
def test_bad_device_types(registry: Registry, ns: str, device_types: Any, problem: str) -> None:
    op = define(registry, ns, constant(1))
    with pytest.raises((RegistrationError, DefinitionError), match=problem) as caught:
        op.register_kernel(device_types, constant(2))
    assert caught.value.op == f"{ns}::f"
    assert which(op) == 1
    with pytest.raises((RegistrationError, DefinitionError), match=problem):
        registry.custom_op(
            f"{ns}::g", constant(1), mutates_args=(), schema="(Tensor x) -> Tensor", device_types=device_types
        )


# Switching kernels off ------------------------------------------------------------------------------------------


# item 24
def test_a_disabled_kernel_leaves_the_call_to_the_default(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with op.set_kernel_enabled("cpu", enabled=False):
        assert op(torch.zeros(())).item() == 1
    assert op(torch.zeros(())).item() == 2


# item 24
def test_disabling_one_of_several_devices(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel(["cpu", "cuda"], constant(2))
    with op.set_kernel_enabled("cpu", False):
        assert (which(op, "CPU"), which(op, "CUDA")) == (1, 2)
    with op.set_kernel_enabled("cuda", False):
        assert (which(op, "CPU"), which(op, "CUDA")) == (2, 1)
        op.register_kernel("cpu", constant(3))
        assert (which(op, "CPU"), which(op, "CUDA")) == (3, 1)
    assert (which(op, "CPU"), which(op, "CUDA")) == (3, 2)


# item 24
def test_switches_nest(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    seen = []
    with op.set_kernel_enabled("cpu", False):
        seen.append(which(op))
        with op.set_kernel_enabled("cpu", True):
            seen.append(which(op))
            with op.set_kernel_enabled("cpu", False):
                seen.append(which(op))
            seen.append(which(op))
        seen.append(which(op))
    assert [*seen, which(op)] == [1, 2, 1, 2, 1, 2]


# item 24
def test_the_switch_goes_back_after_an_error(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with pytest.raises(ZeroDivisionError), op.set_kernel_enabled("cpu", False):
        raise ZeroDivisionError
    assert which(op) == 2


# item 24
def test_a_kernel_registered_while_switched_off_stays_off(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with op.set_kernel_enabled("cpu", False):
        op.register_kernel("cpu", constant(3))
        assert which(op) == 1
    assert which(op) == 3


# item 24
@pytest.mark.parametrize(
    ("device_type", "enabled", "phrase"),
    [
        ("xpu", False, "no kernel was registered for this device type"),
        ("xpu", True, "no kernel was registered for this device type"),
        ("cpu", True, "already enabled"),
    ],
)
def test_a_switch_without_effect_is_logged(
    registry: Registry, ns: str, caplog: pytest.LogCaptureFixture, device_type: str, enabled: bool, phrase: str
) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with caplog.at_level(logging.INFO, "customops"), op.set_kernel_enabled(device_type, enabled):
        assert (which(op, "CPU"), which(op, "XPU")) == (2, 1)
    (record,) = [record for record in caplog.records if record.name == "customops"]
    assert phrase in record.getMessage()
    assert f"{ns}::f" in record.getMessage()
    assert record.levelno >= logging.INFO
    assert (which(op, "CPU"), which(op, "XPU")) == (2, 1)


# item 24
def test_disabling_twice_is_logged(registry: Registry, ns: str, caplog: pytest.LogCaptureFixture) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with op.set_kernel_enabled("cpu", False), caplog.at_level(logging.INFO, "customops"):
        assert not caplog.records
        with op.set_kernel_enabled("cpu", False):
            assert which(op) == 1
        assert which(op) == 1
    assert "already disabled" in caplog.text
    assert which(op) == 2


# item 24
def test_an_op_without_a_default_says_so_when_its_kernel_is_off(registry: Registry, ns: str) -> None:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x) -> Tensor")
        op = registry.adopt(f"{ns}::f")
        op.register_kernel("cpu", constant(2))
        with op.set_kernel_enabled("cpu", False), pytest.raises(RuntimeError, match="there is no kernel for cpu"):
            which(op)
        assert which(op) == 2


# item 24
def test_contexts_of_two_threads_may_end_in_any_order(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    entered, leave = threading.Event(), threading.Event()

    def switch_off() -> None:
        with op.set_kernel_enabled("cpu", False):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=switch_off)
    with op.set_kernel_enabled("cpu", False):
        thread.start()
        assert entered.wait(60)
    assert which(op) == 1  # the other thread has it switched off still
    leave.set()
    thread.join(60)
    assert which(op) == 2


# item 24
def test_the_default_is_the_newest_one(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    with op.set_kernel_enabled("cpu", False):
        with registry.scope():
            op.register_kernel(None, constant(3))
            assert (which(op, "CPU"), which(op, "XPU")) == (3, 3)
        assert (which(op, "CPU"), which(op, "XPU")) == (1, 1)
    assert (which(op, "CPU"), which(op, "XPU")) == (2, 1)


# item 24
def test_the_default_of_an_op_that_torch_defined(registry: Registry, ns: str) -> None:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x) -> Tensor")
        op = registry.adopt(f"{ns}::f")
        op.register_kernel(None, constant(1))
        op.register_kernel("cpu", constant(2))
        with op.set_kernel_enabled("cpu", False):
            assert which(op) == 1
        assert which(op) == 2


# item 24
def test_the_switch_reaches_compiled_code_and_other_threads(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1))
    op.register_kernel("cpu", constant(2))
    op.register_fake(torch.empty_like)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    x, seen = torch.zeros(2), []
    assert compiled(x).tolist() == [2, 2]
    with op.set_kernel_enabled("cpu", False):
        assert compiled(x).tolist() == [1, 1]
        thread = threading.Thread(target=lambda: seen.append(which(op)))
        thread.start()
        thread.join(60)
    assert seen == [1]
    assert compiled(x).tolist() == [2, 2]


# What kernels may do --------------------------------------------------------------------------------------------


class Mine(Exception):
    """An error of a kernel."""


def test_an_error_in_a_kernel_comes_through(registry: Registry, ns: str) -> None:
    def kernel(x: Tensor, fail: bool) -> Tensor:
        if fail:
            raise Mine("as it is")
        return x + 1

    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=())
    op.register_fake(lambda x, fail: torch.empty_like(x))
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    x = torch.zeros(2)
    for call in (op, getattr(torch.ops, ns).f, compiled):
        with pytest.raises(Mine, match=r"^as it is$"):
            call(x, True)
        assert call(x, False).tolist() == [1, 1]


def test_a_kernel_may_call_its_own_op(registry: Registry, ns: str) -> None:
    def power(x: Tensor, n: int) -> Tensor:
        return x.clone() if n == 1 else op(x, n - 1) * x

    def gradient(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1), None

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.n = inputs
        ctx.save_for_backward(x)

    op: Any = registry.custom_op(f"{ns}::power", power, mutates_args=())
    op.register_autograd(gradient, setup_context=save)
    x = torch.randn(3, requires_grad=True)
    result = op(x, 4)
    assert_close(result, x**4)
    assert_close(torch.autograd.grad(result.sum(), x)[0], 4 * x**3)


def test_a_kernel_may_replace_itself(registry: Registry, ns: str) -> None:
    def first(x: Tensor) -> Tensor:
        op.register_kernel(["cpu", "cuda"], constant(2))
        return torch.ones_like(x)

    op = define(registry, ns)
    op.register_kernel(["cpu", "cuda"], first)
    assert [which(op, key) for key in ("CPU", "CPU", "CUDA")] == [1, 2, 2]


def test_a_replaced_kernel_is_let_go(registry: Registry, ns: str) -> None:
    op, kernel = define(registry, ns), constant(1)
    alive = weakref.ref(kernel)
    op.register_kernel(["cpu", "cuda"], kernel)
    del kernel
    op.register_kernel(["cpu", "cuda"], constant(2))
    gc.collect()
    assert alive() is None


def test_ops_without_tensors(registry: Registry, ns: str) -> None:
    nothing = define(registry, ns, lambda: torch.ones(2), schema="() -> Tensor")
    assert nothing().tolist() == [1, 1]
    number = define(registry, ns, lambda n, s: n + len(s), schema="(int n, str s) -> int")
    assert number(3, "four") == 7
    with torch.inference_mode():
        assert number(3, s="") == 3


def test_conjugate_and_negative_views_arrive_resolved(registry: Registry, ns: str) -> None:
    seen = []

    def kernel(x: Tensor) -> Tensor:
        seen.append((x.is_conj(), x.is_neg()))
        return torch.from_numpy(x.numpy() * 2)

    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=())
    z = torch.randn(3, dtype=torch.complex64)
    assert_close(op(z.conj()), (z * 2).conj().resolve_conj())
    assert_close(op(z.conj().imag), z.imag * -2)
    assert seen == [(False, False), (False, False)]


# From several threads -------------------------------------------------------------------------------------------


def test_registering_while_other_threads_call(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(0))
    stop, wrong, seen = threading.Event(), [], set()

    def call() -> None:
        x = torch.zeros(3)
        try:
            while not stop.is_set():
                values = set(op(x).tolist())
                assert len(values) == 1
                seen.update(values)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(1, 200):
            op.register_kernel(["cpu", "cuda"], constant(i))
            with registry.scope():
                op.register_kernel("cpu", constant(-i))
                op.register_kernel(None, constant(-i))
            with op.set_kernel_enabled("cpu", False):
                assert op(torch.zeros(())).item() == 0
            assert op(torch.zeros(())).item() == i
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert seen <= set(range(-199, 200))


# What a kernel returns ------------------------------------------------------------------------------------------

T = torch.zeros(2)
GOOD = [
    ("Tensor", T),
    ("Tensor?", T),
    ("Tensor?", None),
    ("Tensor[]", [T, T + 1]),
    ("Tensor[]", []),
    ("SymInt", 3),
    ("SymInt", np.int64(3)),
    ("int", 3),
    ("float", 0.5),
    ("float", 2),
    ("bool", True),
    ("Scalar", 1),
    ("Scalar", 1.5),
    ("Scalar", 1j),
    ("Scalar", True),
    ("(Tensor, Tensor)", (T, T + 1)),
    ("(Tensor, Tensor)", [T, T + 1]),
    ("(Tensor[], SymInt, float, bool)", ([T], 1, 2.0, False)),
    ("(Tensor, Tensor?)", (T, None)),
    ("()", None),
]


@pytest.mark.parametrize(("returns", "value"), GOOD)
def test_results_that_fit(registry: Registry, ns: str, returns: str, value: Any) -> None:
    op = define(registry, ns, lambda x: value, schema=f"(Tensor x) -> {returns}")
    result = op(torch.zeros(1))
    assert_close(result, tuple(value) if returns.startswith("(") and value is not None else value, check_dtype=False)


A = np.zeros(2)
MISFITS = [
    ("Tensor", None, "None"),
    ("Tensor", A, r"numpy\.ndarray"),
    ("Tensor", 1.0, "float"),
    ("Tensor", (T,), r"tuple of 1 \(Tensor\)"),
    ("Tensor", [T], r"list of 1 \(Tensor\)"),
    ("Tensor?", A, r"numpy\.ndarray"),
    ("Tensor[]", None, "None"),
    ("Tensor[]", T, "Tensor"),
    ("Tensor[]", A, r"numpy\.ndarray"),
    ("Tensor[]", [T, None], r"list of 2 \(Tensor, None\)"),
    ("Tensor[]", [T, A], r"numpy\.ndarray"),
    ("Tensor[]", {"a": T}, "dict"),
    ("SymInt", None, "None"),
    ("SymInt", 1.0, "float"),
    ("SymInt", "1", "str"),
    ("SymInt", A, r"numpy\.ndarray"),
    ("SymInt", (1,), "tuple of 1"),
    ("float", None, "None"),
    ("float", "1", "str"),
    ("float", 1j, "complex"),
    ("float", A, r"numpy\.ndarray"),
    ("float", T, "Tensor"),
    ("bool", None, "None"),
    ("bool", 1, "int"),
    ("bool", A, r"numpy\.ndarray"),
    ("Scalar", None, "None"),
    ("Scalar", "1", "str"),
    ("Scalar", A, r"numpy\.ndarray"),
    ("Scalar", np.float32(1), r"numpy\.float32"),
    ("(Tensor, Tensor)", None, "None"),
    ("(Tensor, Tensor)", T, "Tensor"),
    ("(Tensor, Tensor)", (T,), "tuple of 1"),
    ("(Tensor, Tensor)", (T, T, T), "tuple of 3"),
    ("(Tensor, Tensor)", (T, A), r"numpy\.ndarray"),
    ("(Tensor, SymInt)", (T, 1.5), "float"),
    ("(Tensor[], Tensor)", (T, T), r"tuple of 2 \(Tensor, Tensor\)"),
    ("(Tensor, float, bool)", (T, 1.0, 1), "int"),
    ("()", T, "Tensor"),
    ("()", 0, "int"),
    ("()", (), "tuple of 0"),
]


@pytest.mark.parametrize(("returns", "value", "got"), MISFITS)
def test_results_that_do_not_fit(registry: Registry, ns: str, returns: str, value: Any, got: str) -> None:
    def bad(x: Tensor) -> Any:
        return value

    op = define(registry, ns, bad, schema=f"(Tensor x) -> {returns}")
    with pytest.raises(KernelError, match=rf"(?s){ns}::f: the kernel returned something .* got: +.*{got}") as caught:
        op(torch.zeros(1))
    assert caught.value.op == f"{ns}::f"
    assert caught.value.where == located(bad)
    assert isinstance(caught.value, RuntimeError)


def test_a_tuple_of_one(registry: Registry, ns: str) -> None:
    def good(x: Tensor) -> tuple[Tensor]:
        return (x + 1,)

    def bad(x: Tensor) -> tuple[Tensor]:
        return x + 1  # type: ignore[return-value]

    (result,) = registry.custom_op(f"{ns}::good", good, mutates_args=())(torch.zeros(2))
    assert result.tolist() == [1, 1]
    with pytest.raises(KernelError, match="does not fit the schema"):
        registry.custom_op(f"{ns}::bad", bad, mutates_args=())(torch.zeros(2))


def test_results_are_checked_whichever_kernel_runs(registry: Registry, ns: str) -> None:
    op = define(registry, ns)

    def bad(x: Tensor) -> None:
        return None

    op.register_kernel("cuda", bad)
    with pytest.raises(KernelError, match="does not fit the schema") as caught:
        run_at(op, "CUDA", torch.zeros(1))
    assert caught.value.where == located(bad)
    assert caught.value.fix is not None


def test_the_hint_to_a_misfit_helps(registry: Registry, ns: str) -> None:
    for value, hint in ((A, "torch.from_numpy"), (None, "return the result"), ((T,), "return the value itself")):
        op = define(registry, ns, lambda x, value=value: value, schema="(Tensor x) -> Tensor")
        with pytest.raises(KernelError, match=hint):
            op(torch.zeros(1))


# Results share no memory ----------------------------------------------------------------------------------------


ALIASES: list[tuple[str, Any, str]] = [
    ("(Tensor x) -> Tensor", lambda x: x, "the return is argument 'x'"),
    ("(Tensor x) -> Tensor", lambda x: x[:1], "the return shares memory with argument 'x'"),
    ("(Tensor x) -> Tensor", lambda x: x.detach(), "the return shares memory with argument 'x'"),
    ("(Tensor x, *, int n=0) -> Tensor", lambda x, *, n: x.view(-1), "the return shares memory with argument 'x'"),
    ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x), "return 1 is argument 'x'"),
    ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x.t(), x + 1), "return 0 shares memory with argument 'x'"),
    ("(Tensor x) -> Tensor[]", lambda x: [x + 1, x[0]], r"the return\[1\] shares memory with argument 'x'"),
    ("(Tensor x) -> (Tensor, Tensor[])", lambda x: (x + 1, [x + 1, x]), r"return 1\[1\] is argument 'x'"),
]


# item 19
@pytest.mark.parametrize(("schema", "kernel", "phrase"), ALIASES)
def test_outputs_that_alias_an_input(registry: Registry, ns: str, schema: str, kernel: Any, phrase: str) -> None:
    op = define(registry, ns, kernel, schema=schema)
    with pytest.raises(RuntimeError, match=f"{ns}::f: {phrase}; an output may not alias") as caught:
        op(torch.zeros(3))
    assert isinstance(caught.value, AliasError)
    assert caught.value.argument is not None
    assert caught.value.argument.strip("'") == "x"
    assert caught.value.where == located(kernel)
    assert caught.value.fix is not None


# item 19
def test_an_output_that_aliases_an_item_of_a_list(registry: Registry, ns: str) -> None:
    op = define(registry, ns, lambda xs: xs[1], schema="(Tensor[] xs) -> Tensor")
    with pytest.raises(AliasError, match=r"the return is argument 'xs'\[1\]; an output may not alias"):
        op([torch.zeros(3), torch.zeros(3)])
    op = define(registry, ns, lambda xs: [xs[0].clone(), xs[2]], schema="(Tensor?[] xs) -> Tensor[]")
    with pytest.raises(AliasError, match=r"the return\[1\] is argument 'xs'\[2\]; an output may not alias"):
        op([torch.zeros(3), None, torch.zeros(3)])


# item 19
def test_an_output_that_aliases_a_keyword_argument(registry: Registry, ns: str) -> None:
    def kernel(x: Tensor, *, y: Tensor) -> Tensor:
        return y

    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x, *, Tensor y) -> Tensor")
        op = registry.adopt(f"{ns}::f")
        op.register_kernel("cpu", kernel, lib=lib)
        with pytest.raises(AliasError, match="the return is argument 'y'; an output may not alias") as caught:
            op(torch.zeros(3), y=torch.zeros(3))
        assert caught.value.where == located(kernel)


# item 19
def test_two_outputs_that_alias_each_other(registry: Registry, ns: str) -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y

    def halves(x: Tensor) -> list[Tensor]:
        return list((x + 1).split(1))

    op = registry.custom_op(f"{ns}::twice", twice, mutates_args=())
    with pytest.raises(AliasError, match="return 1 is return 0; an output may not alias"):
        op(torch.zeros(2))
    op = registry.custom_op(f"{ns}::halves", halves, mutates_args=())
    with pytest.raises(
        AliasError, match=r"the return\[1\] shares memory with the return\[0\]; an output may not alias"
    ):
        op(torch.zeros(2))


# item 19
def test_a_mutated_input_may_not_be_returned(registry: Registry, ns: str) -> None:
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return y.add_(1)

    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=("y",))
    with pytest.raises(RuntimeError, match="the return is argument 'y'; an output may not alias") as caught:
        op(torch.zeros(2), torch.zeros(2))
    assert caught.value.where == located(kernel)  # type: ignore[attr-defined]


# item 19
def test_aliasing_is_looked_for_in_every_call(registry: Registry, ns: str) -> None:
    op = define(registry, ns, lambda x: x.contiguous())
    x = torch.randn(3, 2)
    for _ in range(3):
        assert_close(op(x.t()), x.t())
        with pytest.raises(RuntimeError, match="may not alias"):
            op(x)


# item 19
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_aliasing_is_looked_for_in_every_mode(registry: Registry, ns: str, context: Any) -> None:
    op = define(registry, ns, lambda x: x.view_as(x))
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: grad)
    with context():
        for x in (torch.randn(3), torch.randn(3, requires_grad=True)):
            with pytest.raises(RuntimeError, match="may not alias"):
                op(x)
            with pytest.raises(RuntimeError, match="may not alias"):
                torch.compile(op, fullgraph=True, backend="aot_eager")(x)


# item 19
def test_the_error_names_the_kernel_that_ran(registry: Registry, ns: str) -> None:
    op = define(registry, ns)

    def special(x: Tensor) -> Tensor:
        return x

    op.register_kernel(["cpu", "cuda"], constant(1))
    op.register_kernel("cuda", special)
    assert which(op, "CPU") == 1
    with pytest.raises(AliasError) as caught:
        run_at(op, "CUDA", torch.zeros(1))
    assert caught.value.where == located(special)


# item 19
def test_what_shares_no_memory_is_no_alias(registry: Registry, ns: str) -> None:
    op = define(registry, ns, lambda xs: [torch.empty(0) for _ in xs], schema="(Tensor[] xs) -> Tensor[]")
    assert [x.numel() for x in op([torch.empty(0), torch.empty(0)])] == [0, 0]
    schema, x = "(Tensor x, Tensor y) -> (Tensor, Tensor)", torch.zeros(3)
    op = define(registry, ns, lambda x, y: (x.clone(), y.clone()), schema=schema)
    assert_close(op(x, x), (x, x))  # the inputs may be one


# item 19
def test_aliasing_next_to_a_tensor_without_a_storage(registry: Registry, ns: str) -> None:
    op = define(registry, ns, lambda x, y: y, schema="(Tensor x, Tensor y) -> Tensor")
    with pytest.raises(RuntimeError, match="the return is argument 'y'; an output may not alias"):
        op(torch.eye(2).to_sparse(), torch.ones(2))


class Plain(Tensor):
    """A subclass whose instances reach the kernels."""


# item 19
def test_aliasing_of_a_plain_subclass(registry: Registry, ns: str) -> None:
    op = define(registry, ns, lambda x: x)
    with pytest.raises(AliasError, match="the return is argument 'x'"):
        op(torch.zeros(2).as_subclass(Plain))


# Dynamo stays out -----------------------------------------------------------------------------------------------


def test_kernels_are_not_traced(registry: Registry, ns: str) -> None:
    """Between two graphs the op runs while Dynamo listens to every frame, kernels included."""
    seen: dict[str, bool] = {}
    targets: list[Any] = []

    def note(name: str) -> None:
        seen[name] = torch.compiler.is_compiling()

    def kernel(x: Tensor, by: int = 1) -> Tensor:
        note("kernel")
        return helper(x)

    def helper(x: Tensor) -> Tensor:
        return x.nonzero().to(x.dtype).sinh()

    def fake(x: Tensor, by: int = 1) -> Tensor:
        note("fake")
        n = customops.get_ctx().new_dynamic_size()
        return x.new_empty(n, x.dim())

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=())
    op.register_fake(fake)

    def program(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        result: Tensor = op(y).cos()
        return result

    x = torch.tensor([0.0, 1.0, 2.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        compiled = torch.compile(program, backend=backend)
        for _ in range(2):
            assert_close(compiled(x), torch.tensor([[1.0], [2.0]]).sinh().cos())
    assert seen["kernel"] is False
    assert {"sin", "cos"} <= set(targets)
    assert not {"sinh", "nonzero", torch.sinh} & set(targets)


@contextlib.contextmanager
def frames_offered_to_dynamo() -> Iterator[list[str]]:
    """The names of all functions that Dynamo would trace if it compiled what runs inside."""
    names: list[str] = []

    def listen(frame: Any, cache: Any, state: Any) -> Any:
        names.append(frame.f_code.co_name)
        return ConvertFrameReturn()

    before = set_eval_frame(listen)
    try:
        yield names
    finally:
        set_eval_frame(before)


def test_dynamo_is_offered_none_of_the_frames_below_a_call(registry: Registry, ns: str) -> None:
    """Kernels with and without defaults, selection by device, version counting, fakes, gradients."""

    def helper(x: Tensor) -> Tensor:
        return x.tanh()

    def factory(n: int, device: torch.device) -> Tensor:
        return helper(torch.ones(n, device=device))

    def mutating(x: Tensor, by: float = 1.0) -> None:
        x.copy_(helper(x + by))

    def functional(x: Tensor) -> Tensor:
        return helper(x)

    def fake(x: Tensor) -> Tensor:
        return helper(x)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(helper(inputs[0]))

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return helper(grad)

    make = registry.custom_op(f"{ns}::factory", factory, mutates_args=(), device_types="cpu")
    change = registry.custom_op(f"{ns}::mutating", mutating, mutates_args=("x",))
    apply = registry.custom_op(f"{ns}::functional", functional, mutates_args=())
    apply.register_fake(fake)
    apply.register_autograd(backward, setup_context=save)
    apply.register_autocast("cpu", torch.bfloat16)
    x = torch.randn(2, requires_grad=True)
    y, meta = torch.randn(2), torch.empty(2, device="meta")
    with frames_offered_to_dynamo() as names:
        made = make._opoverload(2, "cpu")
        change._opoverload(y)
        applied = apply._opoverload(x)
        apply._opoverload(meta)
        with torch.autocast("cpu", torch.bfloat16):
            apply._opoverload(y)
        torch.autograd.backward(applied, torch.ones(2))
    one = torch.ones(2)
    assert_close([made, applied, x.grad], [one.tanh(), x.tanh(), one.tanh()])
    assert "backward" in names  # torch.autograd.backward itself: Dynamo was listening
    ours = {function.__name__ for function in (helper, factory, mutating, functional, fake, save)}
    ours |= {"kernel", "kernel_with_defaults", "check", "one_tensor", "select", "bump", "autograd", "autocast"}
    assert not ours & set(names)
    assert names.count("backward") == 1


# Factory ops ----------------------------------------------------------------------------------------------------


def full(n: int, value: float, device: torch.device) -> Tensor:
    return torch.full((n,), value, device="cpu")


def define_factory(registry: Registry, ns: str, fn: Any = full, **options: Any) -> Any:
    return registry.custom_op(f"{ns}::f", fn, mutates_args=(), **{"device_types": "cpu"} | options)


# item 23
def test_the_device_argument_chooses_the_kernel(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns)
    op.register_kernel("cuda", lambda n, value, device: torch.full((n,), -value))
    op.register_kernel("xpu")(lambda n, value, device: torch.full((n,), 100 * value))
    for cpu in ("cpu", "cpu:0", torch.device("cpu")):
        assert op(2, 3.0, cpu).tolist() == [3, 3]
        assert op(2, 3.0, device=cpu).tolist() == [3, 3]
    for cuda in ("cuda", "cuda:1", torch.device("cuda", 0)):
        assert op(2, 3.0, cuda).tolist() == [-3, -3]
    assert op(device="xpu", n=1, value=1.0).tolist() == [100]
    op.register_kernel("cuda", lambda n, value, device: torch.full((n,), 7.0))
    assert op(1, 3.0, "cuda").tolist() == [7]
    assert op(1, 3.0, "cpu").tolist() == [3]


# item 23
@pytest.mark.parametrize("default", ["cpu", torch.device("cpu"), "cuda"])
@pytest.mark.parametrize("keyword_only", [False, True])
def test_a_default_device(registry: Registry, ns: str, default: Any, keyword_only: bool) -> None:
    def by_position(n: int, device: torch.device = default) -> Tensor:
        return torch.zeros(n)

    def by_name(n: int, *, device: torch.device = default) -> Tensor:
        return torch.zeros(n)

    op = define_factory(registry, ns, by_name if keyword_only else by_position)
    if keyword_only:
        op.register_kernel("cuda", lambda n, *, device: torch.ones(n))
    else:
        op.register_kernel("cuda", lambda n, device: torch.ones(n))
    assert op(1).item() == (1 if default == "cuda" else 0)
    assert op(1, device="cpu").item() == 0
    assert op(1, device="cuda:3").item() == 1


# item 23
@pytest.mark.parametrize("keyword_only", [False, True])
def test_a_device_without_a_kernel(registry: Registry, ns: str, keyword_only: bool) -> None:
    def f(n: int, *, device: torch.device) -> Tensor:
        return torch.zeros(n, device=device)

    op = define_factory(registry, ns, f) if keyword_only else define_factory(registry, ns)
    args = (1,) if keyword_only else (1, 2.0)
    with pytest.raises(RuntimeError, match="f does not have a kernel registered for cuda") as caught:
        op(*args, device="cuda")
    assert isinstance(caught.value, RegistrationError)
    assert caught.value.op == f"{ns}::f"
    assert caught.value.fix == 'op.register_kernel("cuda")'


def no_device(n: int) -> Tensor:
    return torch.zeros(n)


def other_name(n: int, where: torch.device) -> Tensor:
    return torch.zeros(n)


def optional_device(n: int, device: Optional[torch.device] = None) -> Tensor:
    return torch.zeros(n)


NEEDS_DEVICE = "Functions without tensor inputs are required to have a `device: torch.device` argument"


# item 23
@pytest.mark.parametrize("fn", [no_device, other_name, optional_device])
def test_a_factory_needs_a_device_argument_for_kernels_by_device(registry: Registry, ns: str, fn: Any) -> None:
    with pytest.raises(ValueError, match=NEEDS_DEVICE):
        define_factory(registry, ns, fn)
    assert len(registry) == 0
    op = define_factory(registry, ns, fn, device_types=None)
    with pytest.raises(ValueError, match=NEEDS_DEVICE):
        op.register_kernel("cpu", fn)
    with pytest.raises(ValueError, match=NEEDS_DEVICE):
        op.register_kernel("cpu")(fn)


# item 23
def test_a_factory_without_a_device_argument_serves_every_device(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns, no_device, device_types=None)
    op.register_fake(no_device)
    assert op(3).tolist() == [0, 0, 0]
    op.register_kernel(None, lambda n: torch.ones(n))
    assert op(3).tolist() == [1, 1, 1]
    assert torch.compile(op, fullgraph=True, backend="aot_eager")(3).tolist() == [1, 1, 1]


# item 23
def test_a_factory_for_every_device_with_a_kernel_for_one(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns, device_types=None)
    assert op(1, 3.0, "cuda").item() == 3
    op.register_kernel("cuda", lambda n, value, device: torch.full((n,), -value))
    assert op(1, 3.0, "cpu").item() == 3
    assert op(1, 3.0, "xpu").item() == 3
    assert op(1, 3.0, "cuda").item() == -3
    with op.set_kernel_enabled("cuda", False):
        assert op(1, 3.0, "cuda").item() == 3


# item 23
def test_a_factory_kernel_that_comes_with_a_library_leaves_the_others(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns)
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        op.register_kernel("cuda", lambda n, value, device: torch.full((n,), -value), lib=lib)
        assert op(1, 3.0, "cuda").item() == -3
        assert op(1, 3.0, "cpu").item() == 3
    assert op(1, 3.0, "cpu").item() == 3
    with pytest.raises(RuntimeError, match="does not have a kernel registered for cuda"):
        op(1, 3.0, "cuda")


# item 23
def test_a_factory_kernel_for_an_op_that_torch_defined(registry: Registry, ns: str) -> None:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(int n, Device device) -> Tensor")
        lib.impl("f", lambda n, device: torch.zeros(n), "CPU")
        op = registry.adopt(f"{ns}::f")
        op.register_kernel("cuda", lambda n, device: torch.ones(n), lib=lib)
        assert op(1, "cuda").item() == 1
        assert op(1, "cpu").item() == 0
        with pytest.raises(RuntimeError, match="does not have a kernel registered for xpu"):
            op(1, "xpu")


# item 23
def test_a_factory_in_a_scope(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns, device_types=None)
    with registry.scope():
        op.register_kernel("cuda", lambda n, value, device: torch.full((n,), -value))
        assert op(1, 3.0, "cuda").item() == -3
    assert op(1, 3.0, "cuda").item() == 3
    op.register_kernel("cuda", lambda n, value, device: torch.full((n,), 5.0))
    assert op(1, 3.0, "cuda").item() == 5
    assert op(1, 3.0, "cpu").item() == 3


# item 23
def test_a_factory_on_meta_and_fake_tensors(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns)
    op.register_fake(lambda n, value, device: torch.empty(n, device=device))
    assert op(2, 3.0, "meta").device.type == "meta"
    with FakeTensorMode():
        for device in ("cpu", "cuda", "meta"):
            result = op(2, 3.0, device)
            assert (result.shape, result.device.type) == ((2,), device)


# item 23
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_factory_in_every_grad_mode(registry: Registry, ns: str, context: Any) -> None:
    op = define_factory(registry, ns)
    with context():
        result = op(2, 3.0, "cpu")
        assert result.tolist() == [3, 3]
        assert result.is_inference() == torch.is_inference_mode_enabled()


# item 23
def test_a_factory_takes_part_in_gradients_of_others(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns)
    x = torch.randn(2)
    assert_close(torch.func.grad(lambda x: (x * op(2, 3.0, "cpu")).sum())(x), torch.full((2,), 3.0))
    assert_close(torch.vmap(lambda x: x * op(2, 3.0, "cpu"))(torch.stack([x, x])), torch.stack([x, x]) * 3)


# item 23
def test_a_list_of_tensors_is_a_tensor_input(registry: Registry, ns: str) -> None:
    def total(xs: Sequence[Tensor], n: int) -> Tensor:
        return sum(xs, torch.zeros(()))

    op = registry.custom_op(f"{ns}::f", total, mutates_args=(), device_types="cpu")
    assert op([torch.ones(()), torch.ones(())], 1).item() == 2
