"""register_kernel: which kernel runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers.kernels import constant, define, located, which
from torch import Tensor
from torch.testing import assert_close

import customops
from customops import Registry
from customops.errors import CallbackError, DefinitionError, RegistrationError

# Which kernel runs ----------------------------------------------------------------------------------------------


@pytest.mark.parity(21)
@pytest.mark.parametrize("device_types", ["cpu", ("cpu",), ["cpu"]])
def test_a_function_for_cpu_and_a_kernel_for_cuda(registry: Registry, ns: str, device_types: Any) -> None:
    op = define(registry, ns, constant(1), device_types=device_types)
    op.register_kernel("cuda", constant(2))
    assert op(torch.zeros(())).item() == 1
    assert (which(op, "CPU"), which(op, "CUDA")) == (1, 2)
    with pytest.raises(NotImplementedError):
        which(op, "XPU")


@pytest.mark.parity(21)
def test_a_function_for_several_devices(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1), device_types=("cpu", "cuda"))
    assert (which(op, "CPU"), which(op, "CUDA")) == (1, 1)
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{ns}::f", key)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"{ns}::f", "CompositeExplicitAutograd")


@pytest.mark.parity(22)
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


@pytest.mark.parity(22)
def test_overriding_a_device_the_op_was_defined_for(registry: Registry, ns: str) -> None:
    op = define(registry, ns, constant(1), device_types=("cpu", "cuda"))
    op.register_kernel("cuda", constant(2))
    assert (which(op, "CPU"), which(op, "CUDA")) == (1, 2)
    op.register_kernel("cpu", constant(3))
    assert (which(op, "CPU"), which(op, "CUDA")) == (3, 2)


@pytest.mark.parity(22)
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


@pytest.mark.parity(22)
def test_registering_for_every_device_replaces_the_default_only(registry: Registry, ns: str) -> None:
    op = define(registry, ns)
    op.register_kernel("cuda", constant(1))
    op.register_kernel(None, constant(2))
    assert (which(op, "CPU"), which(op, "XPU"), which(op, "CUDA")) == (2, 2, 1)


@pytest.mark.parity(22)
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


@pytest.mark.parity(22)
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


def test_a_kernel_of_a_factory_that_torch_refuses_leaves_nothing(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel for one device is installed at the device's key, and the choice of the device at BackendSelect."""

    def ones(n: int, device: torch.device) -> Tensor:
        return torch.ones(n, device=device)

    op = registry.custom_op(f"{ns}::ones", ones, mutates_args=())
    handle = type(op._definition)
    real = handle.impl

    def refuse(self: Any, fn: Any, key: str, **options: Any) -> Any:
        if key == "BackendSelect":
            raise ValueError("no")
        return real(self, fn, key, **options)

    with monkeypatch.context() as patch:
        patch.setattr(handle, "impl", refuse)
        with pytest.raises(ValueError, match="no"):
            op.register_kernel(["cpu", "cuda"], ones)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(op._qualname, "CPU")
    op.register_kernel("cpu", lambda n, device: torch.full((n,), 2.0))
    assert op(2, device=torch.device("cpu")).tolist() == [2, 2]
