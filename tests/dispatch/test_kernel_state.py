"""Any caller, same numbers: what acts on the operations of a kernel, and what memory its results may not be."""

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
from torch.utils.flop_counter import FlopCounterMode

from customops import Registry, opcheck
from customops.errors import AliasError, KernelError, OpCheckError


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def product_with_conjugate(x: Tensor) -> Tensor:
    return x * x.conj()


def imaginary_negative(x: Tensor) -> Tensor:
    return torch._neg_view(x.imag) * 2


def batched(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.sin)(x)


def derived(x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: (y**3).sum())(x)


def derived_forward(x: Tensor) -> Tensor:
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


def multiplied(x: Tensor) -> Tensor:
    return x @ x


def recorded(x: Tensor) -> Tensor:
    """A gradient that is computed in the forward."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(leaf.sin().sum(), leaf)[0]


KERNELS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "conj": (product_with_conjugate, lambda x: x.abs().square().to(x.dtype)),
    "neg": (imaginary_negative, lambda x: x.imag * -2),
    "vmap": (batched, torch.sin),
    "grad": (derived, lambda x: 3 * x**2),
    "jvp": (derived_forward, torch.cos),
    "matmul": (multiplied, lambda x: (x[:, :, None] * x[None]).sum(1)),
    "recorded": (recorded, torch.cos),
}


CALLERS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "mode": Passing,
    "flops": lambda: FlopCounterMode(display=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
}


def transforms_work_in_inference_mode() -> bool:
    with torch.inference_mode():
        return bool(derived(torch.ones(1)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_same_numbers(registry: Registry, ns: str, kernel: str, caller: str, requires_grad: bool) -> None:
    if kernel == "recorded" and caller == "inference":
        pytest.skip("autograd does not record in inference mode, in an autograd.Function either")
    if kernel in ("grad", "jvp") and caller == "inference" and not transforms_work_in_inference_mode():
        pytest.skip("torch.func takes derivatives for zero in inference mode, without an op, too")
    fn, oracle = KERNELS[kernel]
    op = registry.custom_op(f"{ns}::f", fn, mutates_args=())
    op.register_autograd(lambda ctx, grad: grad)
    dtype = torch.cfloat if kernel in ("conj", "neg") else torch.float32
    x = torch.randn(3, 3, dtype=dtype)
    wanted = oracle(x)
    if requires_grad:
        x.requires_grad_()
    for call in (op, getattr(torch.ops, ns).f):
        for _ in range(2):
            with CALLERS[caller](), CALLERS[caller]():
                result = call(x)
            assert result.dtype == wanted.dtype
            torch.testing.assert_close(result.detach(), wanted)


@pytest.mark.compile
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("autocast", [False, True])
def test_same_numbers_compiled(registry: Registry, ns: str, kernel: str, backend: str, autocast: bool) -> None:
    """In the first call, in which the compiler runs, and in the second; autocast acts on neither."""
    if backend == "inductor" and autocast:
        pytest.skip("the same as aot_eager")
    fn, oracle = KERNELS[kernel]
    op = registry.custom_op(f"{ns}::f", fn, mutates_args=())
    dtype = torch.cfloat if kernel in ("conj", "neg") else torch.float32
    op.register_fake(lambda x: torch.empty(x.shape, dtype=torch.float32 if kernel == "neg" else x.dtype))
    x = torch.randn(3, 3, dtype=dtype)
    compiled = torch.compile(op, fullgraph=True, backend=backend)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            result = compiled(x)
            assert result.dtype == oracle(x).dtype
            torch.testing.assert_close(result, oracle(x))


def test_autocast_of_the_op_acts_on_its_inputs(registry: Registry, ns: str) -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append((x.dtype, torch.is_autocast_enabled("cpu"), (x @ x).dtype))
        return x.clone()

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    op.register_autocast("cpu", torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        assert op(torch.ones(2, 2)).dtype == torch.bfloat16
    assert seen == [(torch.bfloat16, False, torch.bfloat16)]


@pytest.mark.compile
def test_what_is_recorded_inside_stays_inside(registry: Registry, ns: str) -> None:
    """The value and its gradient in one kernel, and a formula that uses it."""

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = (leaf.sin() * 2).sum()
            (grad,) = torch.autograd.grad(value, leaf)
        return value.detach(), grad

    op = registry.custom_op(f"{ns}::loss", loss, mutates_args=(), differentiable=(True, False))
    op.register_fake(lambda x: (x.new_empty(()), torch.empty_like(x)))

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])

    op.register_autograd(lambda ctx, grad, _: grad * ctx.saved_tensors[0], setup_context=save)
    x = torch.randn(4, requires_grad=True)
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        value, grad = call(x)
        assert not grad.requires_grad
        torch.testing.assert_close(torch.autograd.grad(value * 3, x)[0], 6 * x.detach().cos())


def test_grad_mode_is_as_it_was(registry: Registry, ns: str) -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("in the kernel")

    op = registry.custom_op(f"{ns}::fail", fail, mutates_args=())
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            for _ in range(2):
                with pytest.raises(ValueError, match="in the kernel"):
                    op(torch.ones(1))
                assert torch.is_grad_enabled() is enabled


def test_the_state_does_not_leak_between_threads(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", multiplied, mutates_args=())
    x = torch.randn(3, 3)
    wanted, wrong = KERNELS["matmul"][1](x), []

    def run(caller: str) -> None:
        for _ in range(200):
            with CALLERS[caller]():
                result = op(x)
            if result.dtype != torch.float32 or not torch.allclose(result, wanted):
                wrong.append(caller)

    threads = [threading.Thread(target=run, args=(caller,)) for caller in CALLERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Aliases under another storage ----------------------------------------------------------------------------------

ALIASES = {
    "numpy": lambda x: torch.from_numpy(np.ascontiguousarray(x.numpy())),
    "dlpack": lambda x: torch.from_dlpack(x.numpy()),
    "set_": lambda x: torch.frombuffer(memoryview(x.numpy()), dtype=x.dtype),
}


@pytest.mark.parametrize("way", ALIASES)
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.inference_mode, Passing])
def test_the_bytes_of_an_argument(registry: Registry, ns: str, way: str, context: Any) -> None:
    def f(y: Tensor, x: Tensor) -> Tensor:
        return ALIASES[way](x)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    for _ in range(2):
        with context(), pytest.raises(AliasError, match="shares memory with argument 'x'"):
            op(torch.ones(2), torch.ones(3))


def test_the_bytes_of_another_result(registry: Registry, ns: str) -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x + 1
        return first, ALIASES["numpy"](first)

    def several(xs: list[Tensor]) -> list[Tensor]:
        return [ALIASES["numpy"](x) for x in xs]

    with pytest.raises(AliasError, match="return 1 shares memory with return 0"):
        registry.custom_op(f"{ns}::two", two, mutates_args=())(torch.ones(2))
    with pytest.raises(AliasError, match="shares memory with argument 'xs'"):
        registry.custom_op(f"{ns}::several", several, mutates_args=())([torch.ones(2), torch.ones(2)])


def test_a_part_of_the_bytes(registry: Registry, ns: str) -> None:
    """What starts elsewhere is found by opcheck."""

    def f(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy()[1:])

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    op.register_fake(lambda x: x.new_empty(x.shape[0] - 1))
    with pytest.raises(OpCheckError, match=r"shares memory|alias"):
        opcheck(op, (torch.ones(4),), test_utils="test_schema")


def test_nothing_is_no_alias(registry: Registry, ns: str) -> None:
    """Tensors without elements, equal arguments, and layouts without one address."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(0), y + 1 if y.numel() else y.new_empty(0)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    empty, x = torch.empty(0), torch.ones(2)
    for args in ((empty, empty), (empty, x), (x, x), (x, x[:1])):
        assert op(*args)[1].tolist() == (args[1] + 1).tolist()
    to_sparse = registry.custom_op(
        f"{ns}::sparse", lambda x: x.to_sparse(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert to_sparse(torch.eye(2)).layout is torch.sparse_coo


def test_the_advice_for_an_array(registry: Registry, ns: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x.numpy()  # type: ignore[return-value]

    with pytest.raises(KernelError, match=r"\.copy\(\) if it may be the memory of an argument"):
        registry.custom_op(f"{ns}::f", f, mutates_args=())(torch.ones(2))


@pytest.mark.parametrize("context", [contextlib.nullcontext, Passing])
def test_tangents_that_an_op_ignores(registry: Registry, ns: str, context: Any) -> None:
    def level(x: Tensor) -> Tensor:
        return x.sin()

    op = registry.custom_op(f"{ns}::level", level, mutates_args=(), differentiable=False)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with context():
            result = op(dual)
        assert torch.autograd.forward_ad.unpack_dual(result).tangent is None
