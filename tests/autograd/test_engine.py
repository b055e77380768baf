"""Grad modes, hooks, checkpoints and threads of eager autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.formulas import assert_same_gradients, combine_setup, exp_fn, gradients, plain, slow_vmap, weighted_sum
from helpers.tensors import leaf
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from customops import Registry

# Modes and engines of eager autograd ----------------------------------------------------------------------------------


def test_values_and_gradients_are_those_of_the_plain_function(product: Any) -> None:
    for x, y in [
        (torch.rand(3), torch.rand(3)),
        (torch.rand(2, 3).t(), torch.rand(3, 2)),
        (torch.rand(0), torch.rand(0)),
        (torch.tensor(2.0), torch.tensor(3.0)),
    ]:
        assert torch.allclose(product(x, y), plain(x, y))
        assert_same_gradients(product, plain, x, y)
        assert_same_gradients(lambda x, y=y: product(x, y), lambda x, y=y: plain(x, y), x)
        assert_same_gradients(lambda y, x=x: product(x, y), lambda y, x=x: plain(x, y), y)


@slow_vmap
def test_gradcheck_of_all_orders(product: Any) -> None:
    inputs = [torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(product, inputs, check_batched_grad=True, check_undefined_grad=False)
    assert torch.autograd.gradgradcheck(product, inputs, check_batched_grad=True, check_undefined_grad=False)


def test_gradcheck_of_complex_inputs(registry: Registry, ns: str) -> None:
    square = registry.custom_op(f"{ns}::square", lambda z: z * z, mutates_args=(), schema="(Tensor z) -> Tensor")
    square.register_autograd(
        lambda ctx, grad: grad * 2 * ctx.saved_tensors[0].conj(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    z = torch.rand(3, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(square, (z,))
    assert torch.autograd.gradgradcheck(square, (z,))


def test_lazily_conjugated_inputs(registry: Registry, ns: str) -> None:
    square = registry.custom_op(f"{ns}::square", lambda z: z * z, mutates_args=(), schema="(Tensor z) -> Tensor")
    square.register_autograd(
        lambda ctx, grad: grad * 2 * ctx.saved_tensors[0].conj(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    z = torch.rand(3, dtype=torch.complex64)
    for view in lambda z: z.conj(), lambda z: z.conj().imag:
        got, wanted = (torch.view_as_real(z).clone().requires_grad_() for _ in range(2))
        square(view(torch.view_as_complex(got))).abs().sum().backward()
        (view(torch.view_as_complex(wanted)) ** 2).abs().sum().backward()
        assert got.grad is not None
        assert torch.allclose(got.grad, wanted.grad)


def test_no_grad_and_inference_mode(product: Any) -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    with torch.no_grad():
        z = product(x, y)
        assert not z.requires_grad
        with torch.enable_grad():
            assert product(x, y).requires_grad
    with torch.inference_mode():
        z = product(x, y)
        assert z.is_inference()
        assert not z.requires_grad
        assert z.tolist() == [3.0, 16.0]
    with torch.set_grad_enabled(False):
        assert not product(x, y).requires_grad


def test_backward_twice(product: Any) -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    z = product(x, y).sum()
    z.backward(retain_graph=True)
    z.backward()
    for got, wanted in zip([x.grad, y.grad], gradients(lambda x, y: 2 * plain(x, y).sum(), x, y), strict=True):
        assert torch.equal(got, wanted)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        z.backward()


def test_create_graph(product: Any) -> None:
    x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)

    def mixed(f: Callable[..., Tensor]) -> list[Tensor]:
        """All second derivatives of a function of `f` which has more than a constant Hessian."""
        first = torch.autograd.grad((f(f(x, y), y) ** 2).sum(), (x, y), create_graph=True)
        return [d for g in first for d in torch.autograd.grad((g**2).sum(), (x, y), retain_graph=True)]

    for got, wanted in zip(mixed(product), mixed(plain), strict=True):
        assert torch.allclose(got, wanted)


def test_once_differentiable(double: Any) -> None:
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy() * 2)

    double.register_autograd(backward)
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad((double(x) ** 2).sum(), x, create_graph=True)
    assert gradient.tolist() == [8.0, 8.0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(gradient.sum(), x, allow_unused=True)  # of what torch's decorator makes, this is None


def test_hooks(product: Any) -> None:
    events: list[str] = []
    x, y = leaf(1.0), leaf(2.0)
    x.register_hook(lambda g: (events.append("x"), g * 10)[1])
    z = product(x, y)
    z.register_hook(lambda g: (events.append("z"), g * 2)[1])
    z.grad_fn.register_prehook(lambda grads: events.append("before"))
    z.grad_fn.register_hook(lambda ins, outs: events.append(f"after {len([g for g in ins if g is not None])}"))
    x.register_post_accumulate_grad_hook(lambda t: events.append(f"accumulated {t.grad.item()}"))
    z.backward()
    assert events[:2] in (["z", "before"], ["before", "z"])
    assert events[2:] == ["after 2", "x", "accumulated 80.0"]
    assert y.grad is not None
    assert y.grad.item() == 2.0


def test_saved_tensor_hooks(product: Any, exp: Any) -> None:
    packed: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Any:
        packed.append(tuple(t.shape))
        return t.numpy(force=True)

    x, y = torch.rand(3), torch.rand(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        assert_same_gradients(lambda x, y: product(exp(x), y), lambda x, y: plain(x.exp(), y), x, y)
        assert packed[:3] == [(3,)] * 3
    with torch.autograd.graph.save_on_cpu():
        assert_same_gradients(product, plain, x, y)
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        assert_same_gradients(product, plain, x, y)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(product: Any, exp: Any, reentrant: bool) -> None:
    calls = []
    exp.register_kernel("cpu", lambda x: calls.append(1) or exp_fn(x))

    def block(f: Any, g: Any) -> Callable[..., Tensor]:
        return lambda x, y: f(g(f(x, y)), y)

    ours = block(product, exp)
    assert_same_gradients(
        lambda x, y: checkpoint(ours, x, y, use_reentrant=reentrant),
        block(plain, torch.exp),
        torch.rand(3),
        torch.rand(3),
    )
    assert len(calls) == 2  # once more in backward


def test_threads(product: Any, exp: Any, combine: Any) -> None:
    combine.register_autograd(lambda ctx, grad: [grad * f for f in ctx.factors], setup_context=combine_setup)
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return product(exp(x), combine([x, y]))

    def reference(x: Tensor, y: Tensor) -> Tensor:
        return plain(x.exp(), weighted_sum([x, y]))

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            barrier.wait()
            for _ in range(30):
                x, y = torch.rand(2, 2, generator=generator)
                assert_same_gradients(ours, reference, x, y)
                with torch.no_grad():
                    assert not ours(x.clone().requires_grad_(), y).requires_grad
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.compile
def test_formulas_that_call_ops(registry: Registry, ns: str) -> None:
    """sin and cos in numpy, each the derivative of the other."""
    sin = registry.custom_op(f"{ns}::sin", lambda x: torch.from_numpy(np.sin(x.numpy(force=True))),
                             mutates_args=(), schema="(Tensor x) -> Tensor")  # fmt: skip
    cos = registry.custom_op(f"{ns}::cos", lambda x: torch.from_numpy(np.cos(x.numpy(force=True))),
                             mutates_args=(), schema="(Tensor x) -> Tensor")  # fmt: skip
    for op, derivative in (sin, cos), (cos, lambda x: -sin(x)):
        op.register_autograd(
            lambda ctx, grad, derivative=derivative: grad * derivative(*ctx.saved_tensors),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        op.register_fake(torch.empty_like)
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sin, (x,))
    assert torch.autograd.gradgradcheck(sin, (x,))

    def nth(f: Callable[[Tensor], Tensor], order: int) -> Callable[[Tensor], Tensor]:
        for _ in range(order):
            f = torch.func.grad(lambda x, f=f: f(x).sum())
        return f

    x = x.detach()
    for order in range(1, 5):
        assert torch.allclose(nth(lambda x: sin(x) ** 3, order)(x), nth(lambda x: torch.sin(x) ** 3, order)(x))
    compiled = torch.compile(lambda x: sin(x) ** 3, backend="aot_eager", fullgraph=True)
    assert_same_gradients(compiled, lambda x: torch.sin(x) ** 3, x)


def test_ops_inside_kernels(registry: Registry, ns: str, exp: Any) -> None:
    """A kernel that calls another op: that one's formula does not count, the outer one's does."""

    @registry.custom_op(f"{ns}::outer", mutates_args=())
    def outer(x: Tensor) -> Tensor:
        return exp(x) * 2

    outer.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    assert_same_gradients(outer, lambda x: torch.exp(x) * 2, torch.rand(3))
