"""Gradients of ops that also write to a counter, a cache or an output buffer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad
from helpers.compiling import BACKENDS
from helpers.tensors import X, leaf_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from customops import Registry
from customops.errors import AutogradError


def save_first(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.save_for_forward(inputs[0])


# A counter or a cache beside what is differentiable -------------------------------------------------------------


@pytest.fixture
def count(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::count", mutates_args={"counter"})
    def count(x: Tensor, counter: Tensor) -> Tensor:
        counter.add_(1)
        return x.sin()

    count.register_fake(lambda x, counter: torch.empty_like(x))
    count.register_autograd(lambda ctx, g: (g * ctx.saved_tensors[0].cos(), None), setup_context=save_first)
    count.register_jvp(lambda ctx, t, _: t * ctx.saved_tensors[0].cos(), setup_context=save_first)
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_counter(count: Any, dtype: torch.dtype) -> None:
    counter, x = torch.zeros((), dtype=dtype), leaf_of(X)
    result = count(x, counter)
    result.sum().backward()
    torch.testing.assert_close(x.grad, X.cos())
    assert counter == 1
    assert not counter.requires_grad
    assert counter.is_leaf


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_counter_compiled(count: Any, backend: str, dtype: torch.dtype) -> None:
    compiled = torch.compile(lambda x, counter: count(count(x, counter) * 2, counter), fullgraph=True, backend=backend)
    counter, x, y = torch.zeros((), dtype=dtype), leaf_of(X), leaf_of(X)
    compiled(x, counter).sum().backward()
    (y.sin() * 2).sin().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert counter == 2


@pytest.mark.parametrize(
    "transform",
    [grad, lambda f: grad(grad(f)), jacrev, jacfwd, hessian, lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(jacrev(f))],
)
def test_a_counter_transformed(count: Any, transform: Any) -> None:
    counter = torch.zeros(())
    for x in X:
        torch.testing.assert_close(transform(lambda x: count(x, counter))(x), transform(torch.sin)(x))
    assert counter >= 3


def test_a_counter_of_each_sample(count: Any) -> None:
    count.register_vmap("sequential")
    counters = torch.zeros(3)
    torch.testing.assert_close(vmap(grad(count))(X, counters), X.cos())
    assert counters.tolist() == [1, 1, 1]


def test_a_counter_that_requires_grad(count: Any) -> None:
    for counter in (leaf_of(torch.zeros(())), leaf_of(torch.zeros(())) * 1):
        with pytest.raises(AutogradError, match="its formula gives the new value no gradient") as raised:
            count(leaf_of(X), counter)
        assert raised.value.argument == "counter"
        assert counter == 0  # it was not written
        with torch.no_grad():
            count(leaf_of(X), counter)
        assert counter == 1


def test_checkpointing_writes_again(count: Any) -> None:
    counter, x = torch.zeros(()), leaf_of(X)
    checkpoint(lambda x: count(x, counter), x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, X.cos())
    assert counter == 2  # as any write that is run again


def test_from_several_threads(count: Any) -> None:
    leaves = [leaf_of(X + i) for i in range(8)]

    def work(x: Tensor) -> None:
        for _ in range(20):
            count(x, torch.zeros(())).sum().backward()

    threads = [threading.Thread(target=work, args=(x,)) for x in leaves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(leaves):
        torch.testing.assert_close(x.grad, 20 * (X + i).cos())


# Output buffers -------------------------------------------------------------------------------------------------


@pytest.fixture
def sin_into(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::sin_into", mutates_args={"out", "calls"})
    def sin_into(x: Tensor, out: Tensor, calls: Tensor) -> None:
        out.copy_(x.sin())
        calls.add_(1)

    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0].cos(), torch.zeros_like(g), None

    sin_into.register_autograd(backward, setup_context=save_first, nondiff_args="calls")
    return sin_into


def through_buffer(op: Any) -> Any:
    def f(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        op(x * 2, out, torch.zeros(()))
        return out * x

    return f


def plain_buffer(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out.copy_((x * 2).sin())
    return out * x


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_becomes_part_of_the_graph(sin_into: Any, backend: str) -> None:
    f = through_buffer(sin_into)
    compiled = f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
    x, y = leaf_of(X), leaf_of(X)
    result, expected = compiled(x), plain_buffer(y)
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_from_outside(sin_into: Any, backend: str) -> None:
    compiled = torch.compile(sin_into, fullgraph=True, backend=backend)
    x, out, calls = leaf_of(X), torch.zeros(3), torch.zeros(())
    compiled(x, out, calls)
    assert out.requires_grad
    assert not calls.requires_grad
    (out * 3).sum().backward()
    torch.testing.assert_close(x.grad, 3 * X.cos())


def test_a_buffer_transformed(sin_into: Any) -> None:
    f = through_buffer(sin_into)
    for transform in (jacrev, lambda f: jacrev(jacrev(f))):
        torch.testing.assert_close(transform(f)(X), transform(plain_buffer)(X))
    x = leaf_of(X.double())
    assert gradcheck(f, x)
    assert gradgradcheck(f, x)


def test_the_history_of_a_buffer(sin_into: Any) -> None:
    """What was in it before is overwritten: its gradient is the zeros that the formula says."""
    before, x = leaf_of(X), leaf_of(X)
    out = before * 2
    sin_into(x, out, torch.zeros(()))
    out.sum().backward()
    torch.testing.assert_close(before.grad, torch.zeros(3))
    torch.testing.assert_close(x.grad, X.cos())


def test_a_buffer_that_is_a_view(sin_into: Any) -> None:
    x = leaf_of(X)
    base = torch.zeros(2, 3)
    sin_into(x, base[1], torch.zeros(()))
    assert base.requires_grad
    (base * torch.tensor([[5.0], [7.0]])).sum().backward()
    torch.testing.assert_close(x.grad, 7 * X.cos())


@pytest.mark.parametrize("grads_of", [None, "acc", ("acc",)])
def test_returns_and_new_values(registry: Registry, ns: str, grads_of: Any) -> None:
    """An op that adds to what it is given, and returns something, too."""

    @registry.custom_op(f"{ns}::accumulate", mutates_args={"acc"})
    def accumulate(x: Tensor, acc: Tensor) -> Tensor:
        acc.add_(x * x)
        return x * 3

    if grads_of is None:
        accumulate.register_autograd(lambda ctx, g: (g * 3, None))
        with pytest.raises(AutogradError, match="grads_of"):
            accumulate(leaf_of(X), leaf_of(X) * 1)
        return

    def backward(ctx: Any, g: Tensor, g_acc: Tensor) -> Any:
        return g * 3 + g_acc * 2 * ctx.saved_tensors[0], g_acc

    accumulate.register_autograd(backward, setup_context=save_first, grads_of=grads_of)

    def ours(x: Tensor, y: Tensor) -> Tensor:
        acc = y * 2
        first = accumulate(x, acc)
        return first * accumulate(x, acc) + acc.exp()

    def plain(x: Tensor, y: Tensor) -> Tensor:
        return 9 * x * x + (y * 2 + 2 * x * x).exp()

    for transform in (jacrev, lambda f: jacrev(jacrev(f))):
        torch.testing.assert_close(transform(lambda x: ours(x, X))(X), transform(lambda x: plain(x, X))(X))
        torch.testing.assert_close(transform(lambda y: ours(X, y))(X), transform(lambda y: plain(X, y))(X))
    assert gradcheck(ours, (leaf_of(X.double()), leaf_of(X.double())))
    assert gradgradcheck(ours, (leaf_of(X.double()), leaf_of(X.double())))
