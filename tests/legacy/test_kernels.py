"""Kernels and fakes by the old functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.legacies import op_of, signature, sine
from helpers.tensors import leaf
from torch import Tensor
from torch._library.utils import has_fake_kernel
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.library import Library
from torch.testing import assert_close

import customops
from customops import legacy
from customops.legacy import objects


@pytest.fixture(autouse=True)
def _clean(ns: str) -> Iterator[None]:
    """Destroy what a test leaves in the global registry, as users' fixtures do."""
    yield
    for key in [key for key in objects.global_registry if key.startswith(f"{ns}")]:
        objects.global_registry[key]._destroy()


# Kernels and fakes ----------------------------------------------------------------------------------------------


@pytest.mark.parity(70)
@pytest.mark.parametrize("device_types", ["cpu", ["cpu"], ("cpu", "cuda"), {"cuda", "cpu"}, iter(["cpu"])])
def test_a_kernel(ns: str, device_types: Any) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x, float by) -> Tensor")

    def kernel(x: Tensor, by: float) -> Tensor:
        return torch.from_numpy(x.numpy() * by)

    assert legacy.impl(f"{ns}::foo", device_types=device_types)(kernel) is kernel
    assert op_of(ns)(torch.ones(2), 2.5).tolist() == [2.5, 2.5]


@pytest.mark.parity(70)
def test_kernels_go_to_their_devices(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    for i, device in enumerate(objects.SUPPORTED_DEVICE_TYPE_TO_KEY):
        legacy.impl(f"{ns}::foo", device_types=device, func=lambda x, i=i: torch.full((1,), float(i)))
    for i, key in enumerate(objects.SUPPORTED_DEVICE_TYPE_TO_KEY.values()):
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        assert op_of(ns).redispatch(keys, torch.zeros(1)).item() == i


@pytest.mark.parity(70)
@pytest.mark.gpu
def test_a_kernel_on_cuda(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=lambda x: x + 1)
    assert op_of(ns)(torch.zeros(1, device="cuda")).item() == 1


@pytest.mark.parity(70)
@pytest.mark.parametrize("device_types", ["xpu", "meta", ["cpu", "xpu"], "CPU", ""])
def test_other_device_types(ns: str, device_types: Any) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    with pytest.raises(ValueError, match="we only support device_type"):
        legacy.impl(f"{ns}::foo", device_types=device_types)(torch.sin)
    with pytest.raises(ValueError, match="we only support device_type"):
        objects.global_registry[f"{ns}::foo"].impl(device_types)
    with pytest.raises(NotImplementedError):  # nothing was registered
        op_of(ns)(torch.ones(1))


@pytest.mark.parity(70)
def test_a_kernel_for_an_op_of_a_library(ns: str, lib: Library) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", func=lambda x: x * 2)
    assert op_of(ns)(torch.ones(1)).item() == 2
    legacy._destroy(f"{ns}::foo")
    assert f"{ns}::foo" not in objects.global_registry
    with pytest.raises(NotImplementedError, match="Could not run"):  # the op is still there, the kernel is not
        op_of(ns)(torch.ones(1))
    legacy.impl(f"{ns}::foo", func=lambda x: x * 3)
    assert op_of(ns)(torch.ones(1)).item() == 3


@pytest.mark.parity(70)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("key", ["", "CompositeImplicitAutograd", "CompositeExplicitAutograd"])
def test_an_op_of_a_library_with_a_kernel(ns: str, lib: Library, key: str, device: str) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    lib.impl("foo", lambda x: x + 1, key or device.upper())
    for devices in (device, ["cpu", "cuda"]):
        with pytest.raises(RuntimeError, match="already has an implementation"):
            legacy.impl(f"{ns}::foo", device_types=devices)(lambda x: x * 2)
    if not key:
        other = {"cpu": "cuda", "cuda": "cpu"}[device]
        legacy.impl(f"{ns}::foo", device_types=other)(lambda x: x * 2)


def test_a_second_kernel_for_a_device(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::foo", device_types="cpu", func=torch.sin)
    with pytest.raises(RuntimeError, match="already has a cpu impl"):
        legacy.impl(f"{ns}::foo", func=torch.cos)
    legacy.impl(f"{ns}::foo", device_types="cuda", func=torch.cos)
    assert_close(op_of(ns)(torch.ones(1)), torch.ones(1).sin())


def test_an_op_that_does_not_exist(ns: str) -> None:
    for register in (legacy.impl, legacy.impl_abstract, legacy.impl_save_for_backward, legacy.impl_backward):
        with pytest.raises(ValueError, match="Could not find the operator"):
            register(f"{ns}::foo")(lambda x: x)


@pytest.mark.parity(71)
def test_missing_kernels(ns: str) -> None:
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    legacy.custom_op(f"{ns}::many", "(Tensor[] xs) -> Tensor")
    for args, name in ((torch.ones(3), "foo"), ([torch.ones(3)], "many")):
        with pytest.raises(NotImplementedError, match="cpu impl registered"):
            op_of(ns, name)(args)
        with torch.inference_mode(), pytest.raises(NotImplementedError, match="cpu impl registered"):
            op_of(ns, name)(args)
    with pytest.raises(NotImplementedError, match="no fake impl or Meta kernel"):
        op_of(ns)(torch.ones(3, device="meta"))
    legacy.impl(f"{ns}::foo", device_types="cuda", func=torch.sin)
    with pytest.raises(NotImplementedError, match="cpu impl registered"):
        op_of(ns)(torch.ones(3))


@pytest.mark.parity(71)
def test_no_tensor_inputs(ns: str) -> None:
    def foo(sizes: Sequence[int]) -> Tensor:
        raise NotImplementedError

    legacy.custom_op(f"{ns}::foo", foo)
    with pytest.raises(NotImplementedError, match="no Tensor inputs"):
        op_of(ns)((1, 2, 3))
    legacy.custom_op(f"{ns}::many", "(Tensor[] xs) -> Tensor")
    legacy.impl(f"{ns}::many", func=lambda xs: torch.zeros(1))
    with pytest.raises(NotImplementedError, match="no Tensor inputs"):
        op_of(ns, "many")([])


def test_a_factory(ns: str) -> None:
    ones = objects.custom_op(f"{ns}::ones", "(int n) -> Tensor")(lambda_named("ones", lambda n: None))
    ones.impl_factory()(torch.ones)
    assert ones(3).tolist() == [1, 1, 1]


def lambda_named(name: str, fn: Any) -> Any:
    fn.__name__ = name
    return fn


def test_a_fake(ns: str) -> None:
    op = sine(ns)
    assert not has_fake_kernel(op)
    with FakeTensorMode(), pytest.raises(UnsupportedOperatorException):
        op(torch.ones(2))
    fake = legacy.impl_abstract(f"{ns}::foo")(lambda x: torch.empty_like(x))
    assert objects.get_abstract_impl(f"{ns}::foo") is fake
    assert has_fake_kernel(op)
    assert op(torch.ones(2, 3, device="meta")).shape == (2, 3)
    with FakeTensorMode():
        assert op(torch.ones(4)).shape == (4,)


def test_an_op_that_goes_before_its_entry(ns: str) -> None:
    for factor in (2, 3):
        lib = Library(ns, "FRAGMENT")
        lib.define("foo(Tensor x) -> Tensor")
        legacy.impl(f"{ns}::foo", func=lambda x, factor=factor: x * factor)
        legacy.impl_abstract(f"{ns}::foo", func=torch.empty_like)
        legacy.impl_save_for_backward(f"{ns}::foo", func=lambda inputs, output: None)
        legacy.impl_backward(f"{ns}::foo", func=lambda ctx, saved, grad, factor=factor: {"x": grad * factor})
        x = leaf(1.0)
        op_of(ns)(x).backward()
        assert x.grad is not None
        assert x.grad.item() == factor
        lib._destroy()  # the second time round, the entry of the first is found stale
    objects.global_registry[f"{ns}::foo"]._destroy()
    assert f"{ns}::foo" not in objects.global_registry


def test_an_op_that_was_unregistered_before_its_entry(ns: str, lib: Library) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    for _ in range(2):
        legacy.impl(f"{ns}::foo", func=torch.sin)
        customops.adopt(f"{ns}::foo").unregister()
        objects.global_registry[f"{ns}::foo"]._destroy()
        with pytest.raises(NotImplementedError, match="Could not run"):
            op_of(ns)(torch.ones(1))


def test_get_abstract_impl_without_one(ns: str) -> None:
    assert objects.get_abstract_impl(f"{ns}::foo") is None
    legacy.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")
    assert objects.get_abstract_impl(f"{ns}::foo") is None


def test_a_fake_of_an_op_of_a_library_goes_with_its_entry(ns: str, lib: Library) -> None:
    lib.define("foo(Tensor x) -> Tensor")
    legacy.impl_abstract(f"{ns}::foo", func=torch.empty_like)
    assert op_of(ns)(torch.ones(2, device="meta")).shape == (2,)
    legacy._destroy(f"{ns}::foo")
    with pytest.raises(NotImplementedError):
        op_of(ns)(torch.ones(2, device="meta"))


@pytest.mark.compile
def test_get_ctx_makes_sizes(ns: str) -> None:
    def foo(x: Tensor) -> Tensor:
        raise NotImplementedError

    foo_op = objects.custom_op(f"{ns}::foo")(foo)

    @foo_op.impl_abstract()
    def abstract(x: Tensor) -> Tensor:
        return x.new_empty([objects.get_ctx().new_dynamic_size(), x.dim()], dtype=torch.long)

    foo_op.impl("cpu")(lambda x: torch.from_numpy(np.argwhere(x.numpy())))
    x = torch.tensor([0.0, 1.0, 2.0])
    assert foo_op(x).tolist() == [[1], [2]]
    graph = torch.export.export(Calls(foo_op), (x,)).graph_module
    assert_close(graph(x)[0], torch.nonzero(x))
    assert legacy.get_ctx is objects.get_ctx


class Calls(torch.nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


def test_the_object_takes_one_fake(ns: str) -> None:
    foo = objects.custom_op(f"{ns}::foo", "(Tensor x) -> Tensor")(signature("x"))
    foo.impl_abstract()(torch.empty_like)
    with pytest.raises(RuntimeError, match="already has a fake impl"):
        foo.impl_abstract()(torch.empty_like)
