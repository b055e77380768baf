"""torch.library's functions and opcheck, on ops of ours."""

from __future__ import annotations

import sys
from typing import Any, List, Optional, Tuple

import pytest
import torch
from helpers.functions import double_fn
from helpers.interop import product_fn, scale_fn
from helpers.tensors import leaf, slope
from torch import Tensor
from torch._library.simple_registry import singleton as torch_fakes
from torch._library.utils import has_fake_kernel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library

from customops import Registry

# torch.library's functions on an op of ours ---------------------------------------------------------------------------


@pytest.fixture(params=["name", "overload"])
def handle(request: pytest.FixtureRequest, double: Any) -> Any:
    return double._qualname if request.param == "name" else double._opoverload


def test_torch_registers_a_kernel(double: Any, handle: Any) -> None:
    torch.library.register_kernel(handle, "cpu", lambda x: x * 5)
    assert double(torch.ones(1)).item() == 5.0

    @torch.library.register_kernel(handle, ["cpu", "cuda"])
    def kernel(x: Tensor) -> Tensor:
        return x * 6

    assert double(torch.ones(1)).item() == 6.0
    double.register_kernel("cpu", lambda x: x * 7)
    assert double(torch.ones(1)).item() == 7.0
    torch.library.register_kernel(handle, "cpu", lambda x: x)
    with pytest.raises(RuntimeError, match="may not alias"):  # it is a kernel like any of ours
        double(torch.ones(1))


@pytest.mark.compile
def test_torch_registers_a_fake(double: Any, handle: Any) -> None:
    assert not has_fake_kernel(double._opoverload)
    torch.library.register_fake(handle, lambda x: x.new_empty(3))
    with FakeTensorMode():
        assert double(torch.ones(1)).shape == (3,)
    assert double(torch.ones(1, device="meta")).shape == (3,)
    assert has_fake_kernel(double._opoverload)

    @torch.library.register_fake(handle)
    def fake(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    compiled = torch.compile(lambda x: double(x) + 1, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]


@pytest.mark.parity(45)
def test_source_of_a_fake_that_torch_registers(double: Any, handle: Any) -> None:
    torch.library.register_fake(handle, lambda x: x.new_empty(3))
    line = sys._getframe().f_lineno - 1
    # The user's file, not that of torch.
    assert torch_fakes.find(double._qualname).fake_impl.kernel.source == f"{__file__}:{line}"


def test_torch_registers_a_formula(double: Any, handle: Any) -> None:
    assert torch.library.register_autograd(handle, lambda ctx, grad: grad * 3) is None
    assert slope(double) == 3.0
    torch.library.register_autograd(
        handle,
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    assert slope(double) == 2.0
    assert torch.func.grad(lambda x: double(x).sum())(torch.tensor([4.0])).item() == 8.0


def test_torch_registers_autocast(double: Any, handle: Any) -> None:
    for dtype in torch.float16, torch.bfloat16:
        torch.library.register_autocast(handle, "cpu", dtype)
        with torch.autocast("cpu"):
            assert double(torch.ones(1)).dtype is dtype


def test_a_kernel_through_a_library(double: Any, ns: str) -> None:
    assert double(torch.ones(1)).item() == 2.0
    library = Library(ns, "IMPL")
    library.impl("double", lambda x: x * 9, "CPU")
    assert double(torch.ones(1)).item() == 9.0
    library._destroy()
    assert double(torch.ones(1)).item() == 2.0


@pytest.mark.parity(98)
def test_get_kernel(double: Any, ns: str) -> None:
    kernel = torch.library.get_kernel(double._qualname, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    assert kernel.call_boxed(keys, torch.ones(2)).tolist() == [2.0, 2.0]
    double.register_kernel(None, lambda x: x * 3)  # the kernel is a door to what is registered now
    assert kernel.call_boxed(keys, torch.ones(2)).tolist() == [3.0, 3.0]
    library = Library(ns, "FRAGMENT")
    double.register_kernel("cpu", lambda x: x * 4, lib=library)
    newer = torch.library.get_kernel(double._qualname, "CPU")
    assert newer.call_boxed(keys, torch.ones(2)).tolist() == [4.0, 4.0]
    library._destroy()
    with pytest.raises(RuntimeError, match="has been invalidated"):
        newer.call_boxed(keys, torch.ones(2))
    assert kernel.call_boxed(keys, torch.ones(2)).tolist() == [3.0, 3.0]


@pytest.mark.parity(98)
def test_get_kernel_of_a_device_without_one(registry: Registry, ns: str) -> None:
    registry.custom_op(f"{ns}::op", double_fn, mutates_args=(), device_types="cpu")
    with pytest.raises(RuntimeError, match="no kernel for CUDA for"):
        torch.library.get_kernel(f"{ns}::op", "CUDA")


# torch's opcheck ------------------------------------------------------------------------------------------------------


def assert_passes(op: Any, *args: Any, **kwargs: Any) -> None:
    results = torch.library.opcheck(op._opoverload, args, kwargs)
    assert results == dict.fromkeys(
        ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"], "SUCCESS"
    )


#: The harness looks at the gradient of what is no leaf.
torch_opcheck = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@torch_opcheck
def test_opcheck_of_an_op_with_a_formula(product: Any) -> None:
    assert_passes(product, torch.rand(3), torch.rand(3))
    assert_passes(product, leaf(1.0, 2.0), torch.rand(2))
    assert_passes(product, leaf(1.0, 2.0), leaf(3.0, 4.0))
    assert_passes(product, torch.rand(2, 3).t(), torch.rand(3, 2, requires_grad=True))


@torch_opcheck
def test_opcheck_of_lists_numbers_and_keywords(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(xs: List[Optional[Tensor]], y: Tensor, n: int = 2, *, scale: float = 3.0) -> Tuple[List[Tensor], Tensor]:
        return [x * scale for x in xs if x is not None], y * n

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.present = [x is not None for x in inputs[0]]
        ctx.n, ctx.scale = inputs[2], keyword_only_inputs["scale"]

    def backward(ctx: Any, grads: list[Tensor], grad: Tensor) -> Any:
        left = iter(grads)
        return [next(left) * ctx.scale if present else None for present in ctx.present], grad * ctx.n, None

    op.register_fake(
        lambda xs, y, n, *, scale: ([torch.empty_like(x) for x in xs if x is not None], torch.empty_like(y))
    )
    op.register_autograd(backward, setup_context=setup_context)
    assert_passes(op, [torch.rand(2), None], torch.rand(3))
    assert_passes(op, [leaf(1.0, 2.0), None, torch.rand(2)], leaf(3.0), 5, scale=1.5)
    assert_passes(op, [], leaf(3.0))


def test_opcheck_of_mutation(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::add_", mutates_args={"x", "rest"})
    def add_(x: Tensor, y: Tensor, rest: List[Tensor]) -> None:
        for t in x, *rest:
            t.add_(y)

    assert_passes(add_, torch.rand(2), torch.rand(2), [torch.rand(2), torch.rand(2)])


@torch_opcheck
def test_opcheck_of_overloads(registry: Registry, ns: str) -> None:
    ops = [
        registry.custom_op(f"{ns}::op", double_fn, mutates_args=()),
        registry.custom_op(f"{ns}::op.by", scale_fn, mutates_args=()),
    ]
    for op in ops:
        op.register_fake(lambda x, *rest: torch.empty_like(x))
    ops[0].register_autograd(lambda ctx, grad: grad * 2)
    ops[1].register_autograd(
        lambda ctx, grad: (grad * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1])
    )
    assert_passes(ops[0], leaf(1.0))
    assert_passes(ops[1], leaf(1.0), 4.0)
    assert (slope(ops[0]), slope(lambda x: ops[1](x, 4.0))) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (None, "no fake impl"),
        (lambda x, y: x.new_empty(7), "Shapes .* are not equal"),
        (lambda x, y: torch.empty_like(x, dtype=torch.float64), "Dtypes .* are not equal"),
    ],
)
def test_opcheck_sees_what_is_wrong(registry: Registry, ns: str, fake: Any, message: str) -> None:
    op = registry.custom_op(f"{ns}::op", product_fn, mutates_args=())
    if fake is not None:
        op.register_fake(fake)
    with pytest.raises(Exception, match=message):
        torch.library.opcheck(op._opoverload, (torch.rand(3), torch.rand(3)))


@torch_opcheck
def test_opcheck_sees_a_wrong_formula_when_traced(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", double_fn, mutates_args=())
    op.register_fake(torch.empty_like)
    calls = []
    op.register_autograd(lambda ctx, grad: calls.append(1) or grad * len(calls))  # not the same from call to call
    with pytest.raises(Exception, match=r"(?s)test_aot_dispatch_dynamic"):
        torch.library.opcheck(op._opoverload, (leaf(1.0),))
