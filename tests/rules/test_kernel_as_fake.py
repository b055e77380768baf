"""``register_fake("kernel")``: the function of an op as its fake impl."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from customops import Registry, opcheck
from customops.errors import CallbackError, KernelError, RegistrationError


def looks(tensors: Any) -> list[Any]:
    return [(tuple(each.shape), each.stride(), each.dtype, each.device.type) for each in tensors]


def test_the_kernel_as_fake(registry: Registry, ns: str) -> None:
    def f(x: Tensor, n: int = 2) -> tuple[Tensor, Tensor]:
        return x.sin().repeat(n, 1), x.argmax(0)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=(), device_types="cpu")
    op.register_fake("kernel")
    x = torch.rand(3, 4)
    with FakeTensorMode() as mode:
        fakes = op(mode.from_tensor(x))
    assert looks(fakes) == looks(f(x))
    assert set(opcheck(op, (x,), test_utils=("test_schema", "test_faketensor")).values()) == {"SUCCESS"}
    op.register_kernel("cpu", lambda x, n: (x, x))
    assert looks(op(x.to("meta")))[1][0] == (4,)


def test_ops_that_only_write_need_none(registry: Registry, ns: str) -> None:
    def clear(x: Tensor) -> None:
        x.zero_()

    op = registry.custom_op(f"{ns}::clear", clear, mutates_args={"x"})
    with FakeTensorMode() as mode:
        assert op(mode.from_tensor(torch.ones(2))) is None
    compiled = torch.compile(lambda x: (op(x), x + 1)[1], fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [1, 1]


def doubled_by_transforms(x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf * leaf).sum(), leaf)
    return torch.vmap(lambda row: row / 2)(gradient) + torch.func.grad(lambda z: (z * z).sum() / 2)(x)


@pytest.mark.compile
def test_the_kernel_is_traced_in_the_state_of_a_kernel(registry: Registry, ns: str) -> None:
    """It may use autograd and `torch.func`, also where AOTAutograd has left them out."""
    op = registry.custom_op(f"{ns}::f", doubled_by_transforms, mutates_args=())
    op.register_fake("kernel")
    compiled = torch.compile(lambda x: op(x) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (2, 3):
        torch.testing.assert_close(compiled(torch.ones(size)), torch.full((size,), 3.0))


def test_an_error_of_the_kernel_as_a_fake_names_the_kernel(registry: Registry, ns: str) -> None:
    def forgotten(x: Tensor) -> Tensor:
        return None  # type: ignore[return-value]

    op = registry.custom_op(f"{ns}::f", forgotten, mutates_args=())
    op.register_fake("kernel")
    with pytest.raises(KernelError) as caught:
        op(torch.ones(2, device="meta"))
    assert "forgotten" in str(caught.value.where)


def test_other_values_are_rejected(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", doubled_by_transforms, mutates_args=())
    for wrong in ("kernels", 3, (), (torch.empty_like,), [None]):
        with pytest.raises(CallbackError, match='must be callable, or "kernel"'):
            op.register_fake(wrong)
    library = torch.library.Library(ns, "FRAGMENT")
    library.define("g(Tensor x) -> Tensor")
    with pytest.raises(RegistrationError, match="it was defined without one"):
        registry.adopt(f"{ns}::g").register_fake("kernel")
