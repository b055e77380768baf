"""What backward returned, checked against the arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from helpers.compiling import BACKENDS, compiled, dynamo
from helpers.tensors import X, leaf_of
from torch import Tensor
from torch.func import grad
from torch.nested._internal.nested_tensor import NestedTensor

from customops import Registry, Tag
from customops.errors import AutogradError, UnsupportedError

# What backward returned -----------------------------------------------------------------------------------------


def add_bias(registry: Registry, ns: str, backward: Any, **options: Any) -> Any:
    op = registry.custom_op(f"{ns}::add_bias", lambda x, bias: x + bias, mutates_args=(),
                            schema="(Tensor x, Tensor bias) -> Tensor", **options)  # fmt: skip
    op.register_autograd(backward)
    return op


WRONG: list[tuple[Any, str, str, str]] = [
    (lambda g: (g, g.sum()), "bias", "shape [3]", "gradient.expand([3])"),
    (lambda g: (g, g.sum(1)), "bias", "shape [3]", "shape [2]"),
    (lambda g: (g, g.sum(0).to("meta")), "bias", "cpu", "at:"),
    (lambda g: (g.t(), g.sum(0)), "x", "shape [2, 3]", "shape [3, 2]"),
    (lambda g: (g, [g]), "bias", "a Tensor or None", "list of 1"),
    (lambda g: (g, None), "bias", "its gradient, or a tensor of zeros", 'nondiff_args=("bias",)'),
]


@pytest.mark.parametrize(("wrong", "argument", "expected", "words"), WRONG)
def test_gradients_that_do_not_fit(
    registry: Registry, ns: str, wrong: Any, argument: str, expected: str, words: str
) -> None:
    op = add_bias(registry, ns, lambda ctx, g: wrong(g))
    for differentiate in (
        lambda: op(leaf_of(torch.ones(2, 3)), leaf_of(torch.ones(3))).sum().backward(),
        lambda: grad(lambda x, b: op(x, b).sum(), (0, 1))(torch.ones(2, 3), torch.ones(3)),
    ):
        with pytest.raises(AutogradError) as raised:
            differentiate()
        assert (raised.value.op, raised.value.argument) == (f"{ns}::add_bias", argument)
        assert expected in str(raised.value.expected)
        assert words in str(raised.value)
        assert "test_gradient_checks.py" in str(raised.value.where)


def test_a_gradient_of_another_dtype_under_autocast(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::double", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd(lambda ctx, g: (g.view(1, -1) @ torch.eye(3) * 2).view(-1))  # a bfloat16 product
    x = leaf_of(X)
    with torch.autocast("cpu", torch.bfloat16):
        op(x).sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [2, 2, 2])


AUTOGRAD_TAKES: dict[str, Any] = {
    "not summed": lambda g: (g, g),
    "not summed, more dimensions": lambda g: (g.expand(4, 2, 3) / 4, g.expand(4, 2, 3) / 4),
    "double": lambda g: (g.double(), g.double()),
    "half": lambda g: (g.half(), g.sum(0).half()),
    "integers": lambda g: (g.long(), g.sum(0).long()),
}


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["one by one", "a list"])
@pytest.mark.parametrize("returned", AUTOGRAD_TAKES)
def test_gradients_that_autograd_takes(registry: Registry, ns: str, returned: str, kind: str, backend: str) -> None:
    make = AUTOGRAD_TAKES[returned]

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
            return x + bias

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
            return make(g)

    if kind == "a list":
        of_list = registry.custom_op(f"{ns}::add", lambda xs: xs[0] + xs[1], mutates_args=(),
                                     schema="(Tensor[] xs) -> Tensor")  # fmt: skip
        of_list.register_autograd(lambda ctx, g: list(make(g)))
        of_list.register_fake(lambda xs: torch.empty_like(xs[0]))
        op: Any = lambda x, bias: of_list([x, bias])  # noqa: E731
    else:
        op = add_bias(registry, ns, lambda ctx, g: make(g))
        op.register_fake(lambda x, bias: torch.empty_like(x))
    results = []
    for f in (compiled(lambda x, bias: op(x, bias) * 2, backend), lambda x, bias: Reference.apply(x, bias) * 2):
        x, bias = leaf_of(torch.ones(2, 3)), leaf_of(torch.ones(3))
        f(x, bias).sum().backward()
        results.append((x.grad, bias.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    expected = torch.autograd.grad((x + bias).mul(2).sum(), (x, bias))
    torch.testing.assert_close(results[0], expected)
    if backend == "eager":
        found = torch.func.grad(lambda x, bias: (op(x, bias) * 2).sum(), (0, 1))(torch.ones(2, 3), torch.ones(3))
        torch.testing.assert_close(found, expected)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])  # inductor warns of complex numbers
def test_a_complex_gradient_of_a_real_tensor(registry: Registry, ns: str, backend: str) -> None:
    op = registry.custom_op(f"{ns}::turn", lambda z, r: z * r, mutates_args=(),
                            schema="(Tensor z, Tensor r) -> Tensor")  # fmt: skip
    op.register_fake(lambda z, r: torch.empty_like(z))
    op.register_autograd(
        lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0].conj()),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    z, r = torch.randn(2, 3, dtype=torch.complex64).requires_grad_(), leaf_of(X)
    weight = torch.randn(2, 3, dtype=torch.complex64)
    f = compiled(lambda z, r: (op(z, r) * weight).abs().sum(), backend)
    found = torch.autograd.grad(f(z, r), (z, r))
    torch.testing.assert_close(found, torch.autograd.grad((z * r * weight).abs().sum(), (z, r)))


def test_gradients_that_are_not_summed_have_gradients(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::mul", lambda x, y: x * y, mutates_args=(),
                            schema="(Tensor x, Tensor y) -> Tensor")  # fmt: skip
    op.register_autograd(
        lambda ctx, g: tuple(op(g, x) for x in reversed(ctx.saved_tensors)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x, y = torch.rand(2, 1, dtype=torch.double).requires_grad_(), torch.rand(3, dtype=torch.double).requires_grad_()
    assert torch.autograd.gradcheck(op, (x, y))
    assert torch.autograd.gradgradcheck(op, (x, y))
    ours, theirs = (
        grad(lambda x, f=f: grad(lambda x: f(x, y.detach()).square().sum())(x).sum())(x.detach())
        for f in (op, torch.mul)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_view_that_is_mutated_are_summed(registry: Registry, ns: str, backend: str) -> None:
    op = registry.custom_op(f"{ns}::add_", lambda x, y: x.add_(y), mutates_args={"x"}, tags=Tag.inplace,
                            schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)")  # fmt: skip
    op.register_autograd(lambda ctx, g: (g.double().expand(2, 3) / 2, g.expand(2, 3).double()))

    def f(x: Tensor, y: Tensor) -> Tensor:
        x = x * 2
        op(x[0], y)
        return (x * x).sum()

    def reference(x: Tensor, y: Tensor) -> Tensor:
        x = x * 2
        x[0].add_(y * 2)
        return (x * x).sum()

    x, y = torch.rand(2, 3), torch.zeros(3)
    found, expected = (
        torch.autograd.grad(g(*xs), xs) for g in (compiled(f, backend), reference) for xs in [(leaf_of(x), leaf_of(y))]
    )
    torch.testing.assert_close(found, expected)


def test_when_gradients_are_compared(registry: Registry, ns: str) -> None:
    x, bias = leaf_of(torch.ones(2, 3)), leaf_of(torch.ones(3))
    wrong = lambda g: (g, g.sum(1))  # noqa: E731
    with pytest.raises(RuntimeError, match="invalid gradient at index") as raised:  # torch's own
        add_bias(registry, ns, lambda ctx, g: wrong(g), check="never")(x, bias).sum().backward()
    assert not isinstance(raised.value, AutogradError)

    results = [lambda g: (g, g), lambda g: (g, g.sum(0)), wrong]
    once = add_bias(registry, ns, lambda ctx, g: results.pop(0)(g), check="first")
    once(x, bias).sum().backward()  # summed, so the next one is compared
    once(x, bias).sum().backward()
    with pytest.raises(RuntimeError, match="invalid gradient at index"):
        once(x, bias).sum().backward()
    once = add_bias(registry, ns, lambda ctx, g: wrong(g), check="first")
    with pytest.raises(AutogradError):
        once(x, bias).sum().backward()


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_for_integers_take_no_memory(registry: Registry, ns: str, backend: str) -> None:
    @registry.custom_op(f"{ns}::order", mutates_args=(), differentiable=(True, True, False))
    def order(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, x.argsort(), x + 1

    order.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=torch.int64), torch.empty_like(x)))
    seen: list[Any] = []

    def backward(ctx: Any, g: Tensor, *zeros: Tensor) -> Tensor:
        seen.extend((z.dtype, z.shape, z.stride()) for z in zeros)
        return g * 2 + sum(zeros)

    order.register_autograd(backward)
    x = leaf_of(X)
    compiled(lambda x: order(x)[0].sum(), backend)(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    assert seen[-2:] == [(torch.int64, (3,), (0,)), (torch.float32, (3,), (0,))]


def test_none_where_the_gradient_was_none_too(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::both", mutates_args=())
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3

    both.register_autograd(
        lambda ctx, g, h: (None if g is None else g * 2, None if h is None else h * 3), materialize_grads=False
    )
    x, y = leaf_of(X), leaf_of(X)
    both(x, y)[0].sum().backward()
    assert x.grad is not None
    assert (x.grad.tolist(), y.grad) == ([2, 2, 2], None)


@pytest.mark.compile
@pytest.mark.parametrize("is_summed", [True, False])
def test_gradients_with_symbolic_shapes(registry: Registry, ns: str, is_summed: bool) -> None:
    op = add_bias(registry, ns, lambda ctx, g: (g, g.sum(0) if is_summed else g))
    op.register_fake(lambda x, bias: x.new_empty(x.shape))
    f = torch.compile(lambda x, b: op(x, b).sum(), fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (2, 3, 5):
        x, bias = leaf_of(torch.ones(size, size + 1)), leaf_of(torch.ones(size + 1))
        f(x, bias).backward()
        assert bias.grad is not None
        assert bias.grad.tolist() == [size] * (size + 1)


@pytest.mark.compile
def test_gradients_with_symbolic_shapes_for_a_fixed_one(registry: Registry, ns: str) -> None:
    op = add_bias(registry, ns, lambda ctx, g: (g, g))
    op.register_fake(lambda x, bias: x.new_empty(x.shape))
    frames = dynamo("testing").CompileCounterWithBackend("aot_eager")
    f = torch.compile(lambda x, b: op(x, b).sum(), fullgraph=True, backend=frames)
    bias = leaf_of(torch.ones(3))
    for size in (3, 4, 5, 6):  # as long as the bias at first: that is no reason for another graph
        bias.grad, x = None, torch.ones(size, 3, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        f(x, bias).backward()
        assert bias.grad is not None
        assert bias.grad.tolist() == [size] * 3
    assert frames.frame_count == 1


def test_gradients_of_nested_tensors(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::double", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd(lambda ctx, g: g * 2)
    op.register_torch_dispatch(NestedTensor, lambda cls, func, types, args, kwargs: args[0] * 2)
    x = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged, requires_grad=True)
    op(x).values().sum().backward()
    assert x.grad is not None
    assert [part.tolist() for part in x.grad.unbind()] == [[2, 2, 2], [2, 2]]


def test_zeros_for_a_nested_tensor_that_is_not_used(registry: Registry, ns: str) -> None:
    schema = "(Tensor x) -> (Tensor, Tensor, int)"
    op = registry.custom_op(f"{ns}::two", lambda x: (x * 2, x * 3, 3), schema=schema)
    op.register_torch_dispatch(NestedTensor, lambda cls, func, types, args, kwargs: (args[0] * 2, args[0] * 3, 3))
    op.register_autograd(lambda ctx, g, h, _: g * 2 + h * 3)
    x = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged, requires_grad=True)
    with pytest.raises(UnsupportedError, match="zeros for the gradient of a nested tensor") as caught:
        op(x)[0].values().sum().backward()
    assert caught.value.fix is not None
    assert caught.value.fix.startswith("register_autograd(..., materialize_grads=False)")
    seen = []
    op.register_autograd(lambda ctx, g, h, _: (seen.append(h), g * 2)[1], materialize_grads=False)
    op(x)[0].values().sum().backward()
    assert seen == [None]
