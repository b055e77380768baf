"""kernel_calls_torch=False: kernels that call no torch are called in the state that there is, and are looked at."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import customops
from customops import Registry
from customops.errors import CheckError, DefinitionError, KernelError

X, Y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 4.0])
PRODUCT = np.array([0.5, -2.0, 12.0], dtype=np.float32)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def raw_product(x: Tensor, y: Tensor) -> Tensor:
    """As a C kernel does: memory of torch, numbers of another library."""
    result = torch.empty_like(x)
    with torch.no_grad():
        np.multiply(x.contiguous().numpy(), y.numpy(), out=result.numpy())
    return result


def product(registry: Registry, ns: str, fn: Callable[..., Tensor] = raw_product, **options: Any) -> Any:
    op = registry.custom_op(f"{ns}::product", fn, mutates_args=(), kernel_calls_torch=False, **options)
    op.register_fake(lambda x, y: torch.empty_like(x))

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


CALLERS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "mode": Passing,
}


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("check", ["always", "first", "never"])
@pytest.mark.parametrize("caller", CALLERS)
def test_values(registry: Registry, ns: str, caller: str, check: Any, bypass: bool) -> None:
    op = product(registry, ns, check=check, bypass=bypass)
    with CALLERS[caller]():
        for _ in range(3):
            np.testing.assert_array_equal(op(X, Y).numpy(), PRODUCT)
            np.testing.assert_array_equal(op._opoverload(X, y=Y).numpy(), PRODUCT)
    for text in ("_set_grad_enabled", "_autocast_is_on() or", "_call_plainly"):
        assert text not in op.explain_call()


@pytest.mark.parametrize("caller", ["plain", "autocast", "mode"])
def test_gradients(registry: Registry, ns: str, caller: str) -> None:
    op = product(registry, ns)
    for _ in range(2):
        x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
        with CALLERS[caller]():
            result = op(x, y)
        assert result.requires_grad
        result.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, Y)
        assert y.grad is not None
        assert torch.equal(y.grad, X)
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(checkpoint(op, x, Y, use_reentrant=False).sum(), x)
    assert torch.equal(grad, Y)


def test_transforms(registry: Registry, ns: str) -> None:
    op = product(registry, ns)
    op.register_vmap("sequential")
    grad = torch.func.grad(lambda x: op(x, Y).sum())(X)
    assert torch.equal(grad, Y)
    batched = torch.func.vmap(op, in_dims=(0, None))(torch.stack([X, 2 * X]), Y)
    np.testing.assert_array_equal(batched.numpy(), np.stack([PRODUCT, 2 * PRODUCT]))


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("direct", [True, False])
def test_compiled(registry: Registry, ns: str, backend: str, direct: bool) -> None:
    op = product(registry, ns, direct_in_graphs=direct)
    compiled = torch.compile(lambda x, y: op(x + 1, y) - 1, fullgraph=True, backend=backend, dynamic=True)
    for size in (3, 5):
        x, y = torch.arange(float(size), requires_grad=True), torch.full((size,), 2.0)
        result = compiled(x, y)
        np.testing.assert_array_equal(result.detach().numpy(), (np.arange(size) + 1) * 2 - 1)
        (grad,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(grad, y)
        with torch.no_grad():
            np.testing.assert_array_equal(compiled(x, y).numpy(), (np.arange(size) + 1) * 2 - 1)


def test_threads(registry: Registry, ns: str) -> None:
    op, found = product(registry, ns), list[bool]()

    def run(mode: Any) -> None:
        with mode():
            found.extend(np.array_equal(op(X, Y).numpy(), PRODUCT) for _ in range(200))

    threads = [threading.Thread(target=run, args=(mode,)) for mode in CALLERS.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 200 * len(CALLERS)


def test_writes(registry: Registry, ns: str) -> None:
    def add_(x: Tensor, y: Tensor) -> None:
        np.add(x.numpy(), y.numpy(), out=x.numpy())

    op = registry.custom_op(f"{ns}::add_", add_, mutates_args=("x",), kernel_calls_torch=False)
    for mode in (contextlib.nullcontext, torch.no_grad, Passing):
        x = X.clone()
        with mode():
            op(x, Y)
            op(x, Y)
        assert torch.equal(x, X + Y + Y)
        assert x._version == 2


# What the first call finds --------------------------------------------------------------------------------------------


def computes(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def conditional(x: Tensor, y: Tensor) -> Tensor:
    return torch.cond(torch.tensor(True), torch.clone, torch.clone, (x,))


CALLS = {
    "operator": (computes, "aten::mul.Tensor"),
    "higher order": (conditional, "cond"),
    "method": (lambda x, y: x.matmul(y).expand(3).clone(), "aten::dot"),
    "in place": (lambda x, y: x.clone().mul_(y), "aten::mul_.Tensor"),
}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("check", ["always", "first"])
@pytest.mark.parametrize("name", CALLS)
def test_an_operation_of_torch_raises(registry: Registry, ns: str, name: str, check: Any, caller: str) -> None:
    kernel, operation = CALLS[name]
    op = registry.custom_op(
        f"{ns}::f", kernel, schema="(Tensor x, Tensor y) -> Tensor", kernel_calls_torch=False, check=check
    )
    for _ in range(2):
        with CALLERS[caller](), pytest.raises(KernelError, match="kernel_calls_torch=False") as raised:
            op(X, Y)
        assert raised.value.got == operation
        assert __file__ in str(raised.value.where)
        assert "calls_torch=True" in str(raised.value.fix)


@pytest.mark.parametrize("caller", CALLERS)
def test_memory_and_views_are_no_operations(registry: Registry, ns: str, caller: str) -> None:
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        x, y = x.to(torch.float64).contiguous().view(-1), y.t().contiguous().flatten()
        out = torch.zeros(x.shape, dtype=x.dtype)
        assert torch.arange(3)[1:].tolist() == torch.tensor([1, 2]).tolist()
        out[:1].fill_(7)
        rest = torch.from_numpy(x.numpy()[1:] * y.numpy()[1:])
        out[1:].copy_(rest)
        return out.to(torch.float32).reshape(3)

    op = product(registry, ns, kernel)
    with CALLERS[caller]():
        assert op(X, Y).tolist() == [7.0, -2.0, 12.0]


def test_each_kernel_is_looked_at_and_one_may_call_torch(registry: Registry, ns: str) -> None:
    op = product(registry, ns)
    assert np.array_equal(op(X, Y).numpy(), PRODUCT)
    op.register_kernel("cpu", computes)
    with pytest.raises(KernelError, match="kernel_calls_torch=False"):
        op(X, Y)

    seen = []

    @op.register_kernel("cpu", calls_torch=True)
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return x[None] @ torch.diag(y) + torch.zeros(1)

    for caller in CALLERS.values():
        with caller():
            result = op(X, Y)
            assert result.dtype == torch.float32  # not what autocast makes of a product of matrices
            assert result.shape == (1, 3)
    assert seen == [(False, False)] * len(CALLERS)
    assert kernel(X, Y).shape == (1, 3)  # the function itself is as it was


def test_what_is_not_checked_is_not_looked_at(registry: Registry, ns: str) -> None:
    op = product(registry, ns, computes, check="never")
    assert np.array_equal(op(X, Y).numpy(), PRODUCT)


def test_an_argument_without_gradient(registry: Registry, ns: str) -> None:
    """It may require grad: nothing of it is recorded."""

    def second(x: Tensor, y: Tensor) -> Tensor:
        return y.clone()

    op = registry.custom_op(f"{ns}::second", second, mutates_args=(), kernel_calls_torch=False, nondiff_args="y")
    y = Y.clone().requires_grad_()
    for _ in range(2):
        assert not op(X, y).requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_calls_torch": "no"}, "kernel_calls_torch must be True or False"),
        ({"kernel_calls_torch": False, "traceable": True}, "traceable"),
    ],
)
def test_wrong_options(registry: Registry, ns: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        registry.custom_op(f"{ns}::f", computes, mutates_args=(), **options)
    assert f"{ns}::f" not in registry


def test_a_view_is_made_by_torch(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match="a view is made by an operation of torch"):
        registry.custom_op(f"{ns}::f", lambda x: x[0], schema="(Tensor(a) x) -> Tensor(a)", kernel_calls_torch=False)


def test_what_a_kernel_raises_is_raised(registry: Registry, ns: str) -> None:
    def fails(x: Tensor, y: Tensor) -> Tensor:
        raise ValueError(f"the first is {(x + y)[0]}")

    op = product(registry, ns, fails)
    with pytest.raises(ValueError, match=r"the first is 1\.5"):
        op(X, Y)


def test_a_kernel_by_function_of_the_library(registry: Registry, ns: str) -> None:
    """It may be registered for an op whose other kernels call torch, too."""
    for name, calls_torch in (("f", False), ("g", True)):
        op = registry.custom_op(f"{ns}::{name}", raw_product, mutates_args=(), kernel_calls_torch=calls_torch)
        op.register_kernel("cpu", computes, calls_torch=True)
        assert torch.equal(op(X, Y), X * Y)
        customops.register_kernel(op, "cpu", computes, calls_torch=True)
        assert torch.equal(op(X, Y), X * Y)


def test_the_checker_leaves_the_first_call_as_it_is(registry: Registry, ns: str) -> None:
    """A kernel that it found wrong is looked at again when it is called."""
    op = product(registry, ns, computes)
    outcome = customops.opcheck(op, (X, Y), test_utils="test_state", raise_exception=False)["test_state"]
    assert isinstance(outcome, CheckError)
    with pytest.raises(KernelError, match="kernel_calls_torch=False"):
        op(X, Y)


@pytest.mark.parametrize("check", ["always", "never"])
def test_the_checker_looks_at_every_input(registry: Registry, ns: str, check: Any) -> None:
    """The first call takes one branch, and nobody else would see the other."""

    def branching(x: Tensor, y: Tensor) -> Tensor:
        return raw_product(x, y) if x.numel() == 3 else x * y

    op = product(registry, ns, branching, check=check)
    op(X, Y)
    assert "kernel_calls_torch=False" in str(op.describe())
    sample = (torch.ones(4), torch.ones(4))
    outcome = customops.opcheck(op, sample, test_utils="test_state", raise_exception=False)["test_state"]
    assert isinstance(outcome, CheckError)
    assert "kernel_calls_torch=False" in str(outcome)
    assert outcome.got == "aten::mul.Tensor"
    right = product(registry, ns, check=check)
    assert customops.opcheck(right, sample, test_utils="test_state") == {"test_state": "SUCCESS"}
