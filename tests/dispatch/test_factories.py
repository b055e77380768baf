"""Factory ops: kernels without a tensor argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from customops import Registry
from customops.errors import RegistrationError

# Factory ops ----------------------------------------------------------------------------------------------------


def full(n: int, value: float, device: torch.device) -> Tensor:
    return torch.full((n,), value, device="cpu")


def define_factory(registry: Registry, ns: str, fn: Any = full, **options: Any) -> Any:
    return registry.custom_op(f"{ns}::f", fn, mutates_args=(), **{"device_types": "cpu"} | options)


@pytest.mark.parity(23)
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


@pytest.mark.parity(23)
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


@pytest.mark.parity(23)
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


@pytest.mark.parity(23)
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


@pytest.mark.compile
@pytest.mark.parity(23)
def test_a_factory_without_a_device_argument_serves_every_device(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns, no_device, device_types=None)
    op.register_fake(no_device)
    assert op(3).tolist() == [0, 0, 0]
    op.register_kernel(None, lambda n: torch.ones(n))
    assert op(3).tolist() == [1, 1, 1]
    assert torch.compile(op, fullgraph=True, backend="aot_eager")(3).tolist() == [1, 1, 1]


@pytest.mark.parity(23)
def test_a_factory_for_every_device_with_a_kernel_for_one(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns, device_types=None)
    assert op(1, 3.0, "cuda").item() == 3
    op.register_kernel("cuda", lambda n, value, device: torch.full((n,), -value))
    assert op(1, 3.0, "cpu").item() == 3
    assert op(1, 3.0, "xpu").item() == 3
    assert op(1, 3.0, "cuda").item() == -3
    with op.set_kernel_enabled("cuda", False):
        assert op(1, 3.0, "cuda").item() == 3


@pytest.mark.parity(23)
def test_a_factory_kernel_that_comes_with_a_library_leaves_the_others(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns)
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        op.register_kernel("cuda", lambda n, value, device: torch.full((n,), -value), lib=lib)
        assert op(1, 3.0, "cuda").item() == -3
        assert op(1, 3.0, "cpu").item() == 3
    assert op(1, 3.0, "cpu").item() == 3
    with pytest.raises(RuntimeError, match="does not have a kernel registered for cuda"):
        op(1, 3.0, "cuda")


@pytest.mark.parity(23)
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


@pytest.mark.parity(23)
def test_a_factory_in_a_scope(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns, device_types=None)
    with registry.scope():
        op.register_kernel("cuda", lambda n, value, device: torch.full((n,), -value))
        assert op(1, 3.0, "cuda").item() == -3
    assert op(1, 3.0, "cuda").item() == 3
    op.register_kernel("cuda", lambda n, value, device: torch.full((n,), 5.0))
    assert op(1, 3.0, "cuda").item() == 5
    assert op(1, 3.0, "cpu").item() == 3


@pytest.mark.parity(23)
def test_a_factory_on_meta_and_fake_tensors(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns)
    op.register_fake(lambda n, value, device: torch.empty(n, device=device))
    assert op(2, 3.0, "meta").device.type == "meta"
    with FakeTensorMode():
        for device in ("cpu", "cuda", "meta"):
            result = op(2, 3.0, device)
            assert (result.shape, result.device.type) == ((2,), device)


@pytest.mark.parity(23)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_factory_in_every_grad_mode(registry: Registry, ns: str, context: Any) -> None:
    op = define_factory(registry, ns)
    with context():
        result = op(2, 3.0, "cpu")
        assert result.tolist() == [3, 3]
        assert result.is_inference() == torch.is_inference_mode_enabled()


@pytest.mark.parity(23)
def test_a_factory_takes_part_in_gradients_of_others(registry: Registry, ns: str) -> None:
    op = define_factory(registry, ns)
    x = torch.randn(2)
    assert_close(torch.func.grad(lambda x: (x * op(2, 3.0, "cpu")).sum())(x), torch.full((2,), 3.0))
    assert_close(torch.vmap(lambda x: x * op(2, 3.0, "cpu"))(torch.stack([x, x])), torch.stack([x, x]) * 3)


@pytest.mark.parity(23)
def test_a_list_of_tensors_is_a_tensor_input(registry: Registry, ns: str) -> None:
    def total(xs: Sequence[Tensor], n: int) -> Tensor:
        return sum(xs, torch.zeros(()))

    op = registry.custom_op(f"{ns}::f", total, mutates_args=(), device_types="cpu")
    assert op([torch.ones(()), torch.ones(())], 1).item() == 2
