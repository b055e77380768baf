"""Gradients of ops that write: counters, caches, output buffers, in-place ops. The oracle is torch's own ops."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from customops import Registry
from customops.errors import AutogradError, DefinitionError, RegistrationError

BACKENDS = ["eager", "aot_eager", "inductor"]
INPLACE = torch.Tag.inplace
X = torch.tensor([0.3, -1.2, 2.0])


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


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
    counter, x = torch.zeros((), dtype=dtype), leaf(X)
    result = count(x, counter)
    result.sum().backward()
    torch.testing.assert_close(x.grad, X.cos())
    assert counter == 1
    assert not counter.requires_grad
    assert counter.is_leaf


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_counter_compiled(count: Any, backend: str, dtype: torch.dtype) -> None:
    compiled = torch.compile(lambda x, counter: count(count(x, counter) * 2, counter), fullgraph=True, backend=backend)
    counter, x, y = torch.zeros((), dtype=dtype), leaf(X), leaf(X)
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
    for counter in (leaf(torch.zeros(())), leaf(torch.zeros(())) * 1):
        with pytest.raises(AutogradError, match="by its formula the new value has no gradient") as raised:
            count(leaf(X), counter)
        assert raised.value.argument == "counter"
        assert counter == 0  # it was not written
        with torch.no_grad():
            count(leaf(X), counter)
        assert counter == 1


def test_checkpointing_writes_again(count: Any) -> None:
    counter, x = torch.zeros(()), leaf(X)
    checkpoint(lambda x: count(x, counter), x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, X.cos())
    assert counter == 2  # as any write that is run again


def test_from_several_threads(count: Any) -> None:
    leaves = [leaf(X + i) for i in range(8)]

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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_becomes_part_of_the_graph(sin_into: Any, backend: str) -> None:
    f = through_buffer(sin_into)
    compiled = f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
    x, y = leaf(X), leaf(X)
    result, expected = compiled(x), plain_buffer(y)
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_from_outside(sin_into: Any, backend: str) -> None:
    compiled = torch.compile(sin_into, fullgraph=True, backend=backend)
    x, out, calls = leaf(X), torch.zeros(3), torch.zeros(())
    compiled(x, out, calls)
    assert out.requires_grad
    assert not calls.requires_grad
    (out * 3).sum().backward()
    torch.testing.assert_close(x.grad, 3 * X.cos())


def test_a_buffer_transformed(sin_into: Any) -> None:
    f = through_buffer(sin_into)
    for transform in (jacrev, lambda f: jacrev(jacrev(f))):
        torch.testing.assert_close(transform(f)(X), transform(plain_buffer)(X))
    x = leaf(X.double())
    assert gradcheck(f, x)
    assert gradgradcheck(f, x)


def test_the_history_of_a_buffer(sin_into: Any) -> None:
    """What was in it before is overwritten: its gradient is the zeros that the formula says."""
    before, x = leaf(X), leaf(X)
    out = before * 2
    sin_into(x, out, torch.zeros(()))
    out.sum().backward()
    torch.testing.assert_close(before.grad, torch.zeros(3))
    torch.testing.assert_close(x.grad, X.cos())


def test_a_buffer_that_is_a_view(sin_into: Any) -> None:
    x = leaf(X)
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
            accumulate(leaf(X), leaf(X) * 1)
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
    assert gradcheck(ours, (leaf(X.double()), leaf(X.double())))
    assert gradgradcheck(ours, (leaf(X.double()), leaf(X.double())))


# Several results, one of which is a view ------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


ANGLES = torch.linspace(0, 1, 2, dtype=torch.double)
QKV = torch.linspace(-1, 1, 24, dtype=torch.double).reshape(3, 2, 4)


def rope(registry: Registry, ns: str) -> tuple[Any, Any]:
    """Rotates q and k, which are views of one tensor."""

    @registry.custom_op(f"{ns}::rope_", mutates_args={"q", "k"})
    def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        for x in (q, k):
            x.copy_(rotated(x.clone(), cos, sin))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *(rotated(g, cos, -sin) for g in grads), None, None

    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return tuple(rotated(t, *ctx.saved_tensors) for t in tangents[:2])

    rope_.register_vmap("sequential")
    rope_.register_autograd(backward, setup_context=setup_context, nondiff_args=("cos", "sin"))
    rope_.register_jvp(jvp, setup_context=setup_context, nondiff_args=("cos", "sin"))

    def ours(qkv: Tensor) -> Tensor:
        qkv = qkv.sin()
        q, k, v = qkv[0], qkv[1], qkv[2]
        rope_(q, k, ANGLES.cos(), ANGLES.sin())
        return (q * k).sin().sum() + (qkv**3).sum() + (k * v).sum()

    def plain(qkv: Tensor) -> Tensor:
        qkv = qkv.sin()
        q, k, v = (*(rotated(x, ANGLES.cos(), ANGLES.sin()) for x in (qkv[0], qkv[1])), qkv[2])
        return (q * k).sin().sum() + (torch.stack([q, k, v]) ** 3).sum() + (k * v).sum()

    return ours, plain


def accumulate_into_a_view(registry: Registry, ns: str) -> tuple[Any, Any]:
    """Returns something, and its formula uses the new value of what it wrote."""

    @registry.custom_op(f"{ns}::grow_", mutates_args={"acc"})
    def grow_(x: Tensor, acc: Tensor) -> Tensor:
        acc.add_(x).exp_()
        return x * x

    grow_.register_fake(lambda x, acc: torch.empty_like(x))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    def backward(ctx: Any, g: Tensor, g_acc: Tensor) -> Any:
        x, acc = ctx.saved_tensors
        return 2 * g * x + g_acc * acc, g_acc * acc

    def jvp(ctx: Any, t: Tensor, t_acc: Tensor) -> Any:
        x, acc = ctx.saved_tensors
        return 2 * t * x, (t + t_acc) * acc

    grow_.register_vmap("sequential")
    grow_.register_autograd(backward, setup_context=setup_context, grads_of="acc")
    grow_.register_jvp(jvp, setup_context=setup_context, grads_of="acc")

    def ours(x: Tensor) -> Tensor:
        x = x * 1
        base = x.cos()
        return base.sum() + (grow_(x[0], base[1]) * base[0]).sum() + (base**3 * x).sum()

    def plain(x: Tensor) -> Tensor:
        before = x.cos()
        base = torch.stack([before[0], (before[1] + x[0]).exp(), before[2]])
        return before.sum() + (x[0] ** 2 * base[0]).sum() + (base**3 * x).sum()

    return ours, plain


def a_list_of_views(registry: Registry, ns: str) -> tuple[Any, Any]:
    @registry.custom_op(f"{ns}::powers_", mutates_args={"xs"})
    def powers_(xs: list[Tensor], y: Tensor) -> None:
        for x in xs:
            x.mul_(y)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], *inputs[0])
        ctx.save_for_forward(inputs[1], *inputs[0])

    def backward(ctx: Any, grads: list[Tensor]) -> Any:
        y, *xs = ctx.saved_tensors
        return [g * y for g in grads], sum((g * x).sum(0) for g, x in zip(grads, xs, strict=True))

    def jvp(ctx: Any, tangents: list[Tensor], t: Tensor) -> Any:
        y, *xs = ctx.saved_tensors
        return [of * y + x * t for of, x in zip(tangents, xs, strict=True)]

    powers_.register_vmap("sequential")
    powers_.register_autograd(backward, setup_context=setup_context, originals="xs")
    powers_.register_jvp(jvp, setup_context=setup_context, originals="xs")

    def ours(x: Tensor) -> Tensor:
        base, y = x.cos(), x[0, 0].exp()
        powers_([base[0], base[2], x.new_ones(2, 4)], y)
        return (base**2 * x).sum()

    def plain(x: Tensor) -> Tensor:
        base, y = x.cos(), x[0, 0].exp()
        return (torch.stack([base[0] * y, base[1], base[2] * y]) ** 2 * x).sum()

    return ours, plain


def first_and_second(f: Any) -> Any:
    x = leaf(QKV)
    y = f(x)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return y, g, torch.autograd.grad(g.square().sum(), x)[0]


def dual(f: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        y = f(torch.autograd.forward_ad.make_dual(QKV, QKV.cos()))
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def gradient(f: Any) -> Any:
    x = leaf(QKV)
    return torch.autograd.grad(f(x), x)


def compiled_gradient(backend: str, dynamic: bool | None = None) -> Any:
    return lambda f: gradient(torch.compile(f, fullgraph=True, backend=backend, dynamic=dynamic))


WAYS: dict[str, Any] = {
    "first and second": first_and_second,
    "no grad": lambda f: torch.no_grad()(f)(QKV),
    "checkpoint": lambda f: gradient(lambda x: checkpoint(f, x, use_reentrant=False)),
    "grad": lambda f: grad(f)(QKV),
    "vjp": lambda f: torch.func.vjp(f, QKV)[1](torch.tensor(2.0, dtype=torch.double)),
    "jvp": lambda f: torch.func.jvp(f, (QKV,), (QKV.cos(),)),
    "dual numbers": dual,
    "hessian": lambda f: hessian(f)(QKV),
    "jacrev(jacrev)": lambda f: jacrev(jacrev(f))(QKV),
    "vmap(grad)": lambda f: vmap(grad(f))(torch.stack([QKV, QKV.exp()])),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum())(torch.stack([QKV, QKV.exp()])),
    "aot_eager": compiled_gradient("aot_eager"),
    "dynamic shapes": compiled_gradient("aot_eager", dynamic=True),
    "inductor": compiled_gradient("inductor"),
    "compiled grad": lambda f: torch.compile(grad(f), fullgraph=True, backend="aot_eager")(QKV),
    "compiled jacfwd": lambda f: torch.compile(jacfwd(f), fullgraph=True, backend="aot_eager")(QKV),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("make", [rope, accumulate_into_a_view, a_list_of_views])
@pytest.mark.parametrize("way", WAYS)
def test_several_results_and_views(registry: Registry, ns: str, make: Any, way: str) -> None:
    ours, plain = make(registry, ns)
    torch.testing.assert_close(WAYS[way](ours), WAYS[way](plain))


@pytest.mark.parametrize("make", [rope, accumulate_into_a_view, a_list_of_views])
def test_several_results_and_views_by_finite_differences(registry: Registry, ns: str, make: Any) -> None:
    ours, _ = make(registry, ns)
    assert gradcheck(ours, (leaf(QKV),), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(ours, (leaf(QKV),))


def test_a_view_beside_another_result(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", lambda x, acc: acc.add_(x) * 2, mutates_args={"acc"},
                            schema="(Tensor x, Tensor(a!) acc) -> Tensor")  # fmt: skip
    op.register_autograd(lambda ctx, g, g_acc: (2 * g + g_acc, 2 * g + g_acc), grads_of="acc")
    base, x = torch.zeros(2, 3), leaf(X)
    memory, view = base.data_ptr(), base[0]
    result = op(x, view)
    assert (base.data_ptr(), view.data_ptr()) == (memory, memory)
    assert (base.requires_grad, view.requires_grad, view._base is base) == (True, True, True)
    (result.sum() + 5 * base.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 7.0))
    view = torch.zeros(2, 3).mul(leaf(X)).unbind()[0]
    with pytest.raises(AutogradError, match="a view is being modified in-place that autograd cannot follow") as raised:
        op(x, view)
    assert raised.value.argument == "acc"


def test_views_that_are_written_without_a_formula(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", lambda x, acc: acc.add_(x) * 2, mutates_args={"acc"},
                            schema="(Tensor x, Tensor(a!) acc) -> Tensor")  # fmt: skip
    base = torch.zeros(2, 3)
    op(leaf(X), base[0])
    with pytest.raises(AutogradError, match="no autograd formula was registered"):
        base.sum().backward()


def test_a_list_of_buffers(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::fan_out", mutates_args={"outs"})
    def fan_out(x: Tensor, outs: list[Tensor]) -> None:
        for i, out in enumerate(outs):
            out.copy_(x * (i + 1))

    def backward(ctx: Any, grads: list[Tensor]) -> Any:
        ctx.seen = ctx.needs_input_grad
        return sum(g * (i + 1) for i, g in enumerate(grads)), [torch.zeros_like(g) for g in grads]

    fan_out.register_autograd(backward)
    for backend in BACKENDS:

        def f(x: Tensor) -> Tensor:
            outs = [torch.empty_like(x) for _ in range(3)]
            fan_out(x, outs)
            return outs[0] * outs[1] + outs[2]

        compiled = f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
        x = leaf(X)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, 4 * X + 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_keyword_only_buffer(registry: Registry, ns: str, backend: str) -> None:
    @registry.custom_op(f"{ns}::scaled", mutates_args={"out"})
    def scaled(x: Tensor, *, by: float = 2.0, out: Tensor) -> None:
        out.copy_(x * by)

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.by = keyword_only_inputs["by"]

    scaled.register_autograd(lambda ctx, g: {"x": g * ctx.by, "out": torch.zeros_like(g)}, setup_context=setup_context)

    def f(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scaled(x, by=3.0, out=out)
        return out * out

    compiled = f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
    x = leaf(X)
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 18 * X)


# In-place ops ---------------------------------------------------------------------------------------------------


@pytest.fixture
def exp_(registry: Registry, ns: str) -> Any:
    """A formula from the result."""
    op = registry.custom_op(f"{ns}::exp_", lambda x: x.exp_(), mutates_args={"x"}, tags=INPLACE,
                            schema="(Tensor(a!) x) -> Tensor(a!)")  # fmt: skip

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    op.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0], setup_context=save)
    op.register_jvp(lambda ctx, t: t * ctx.saved_tensors[0], setup_context=save)
    return op


@pytest.fixture
def mul_(registry: Registry, ns: str) -> Any:
    """A formula that needs the value from before the write."""

    @registry.custom_op(f"{ns}::mul_", mutates_args={"x"}, tags=INPLACE)
    def mul_(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(y)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y, g * x

    def forward_mode(ctx: Any, t: Tensor, u: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return t * y + x * u

    mul_.register_autograd(backward, setup_context=save, originals="x")
    mul_.register_jvp(forward_mode, setup_context=save, originals="x")
    return mul_


def program(exp_: Any, mul_: Any) -> Any:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        z = exp_(y)
        return y * z + mul_(x.sin(), x) + mul_(mul_(z * 3, x), z)

    return f


PLAIN = program(torch.Tensor.exp_, torch.Tensor.mul_)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace(exp_: Any, mul_: Any, backend: str) -> None:
    f = program(exp_, mul_)
    compiled = f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
    x, y = leaf(X), leaf(X)
    result, expected = compiled(x), PLAIN(y)
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_the_result_is_the_argument_and_the_node_its_history(exp_: Any) -> None:
    x = leaf(X)
    y = x * 2
    version = y._version
    assert exp_(y) is y
    assert "exp_" in y.grad_fn.name()
    assert y._version > version


@pytest.mark.parametrize(
    "transform",
    [
        jacrev,
        lambda f: jacrev(jacrev(f)),
        jacfwd,
        lambda f: jacfwd(jacrev(f)),
        hessian,
        lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
        lambda f: lambda x: jvp(lambda x: jvp(f, (x,), (x.cos(),))[1], (x,), (x.sin(),)),
        lambda f: vmap(jacrev(f), in_dims=1),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_inplace_transformed(exp_: Any, mul_: Any, transform: Any) -> None:
    x = X[:, None].repeat(1, 2)
    torch.testing.assert_close(transform(program(exp_, mul_))(x), transform(PLAIN)(x))


def test_inplace_by_finite_differences(exp_: Any, mul_: Any) -> None:
    x = leaf(X.double())
    assert gradcheck(program(exp_, mul_), x, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(program(exp_, mul_), x, check_fwd_over_rev=True)


def test_a_view_is_written(exp_: Any, mul_: Any) -> None:
    def f(exp_: Any, mul_: Any, x: Tensor) -> Tensor:
        y = x * 2
        view = y[:2]
        exp_(view)
        z = y * 1
        mul_(z[1:], x[1:])
        return y * z[0] + z

    x, z = leaf(X), leaf(X)
    result, expected = f(exp_, mul_, x), f(torch.Tensor.exp_, torch.Tensor.mul_, z)
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close((result, x.grad), (expected, z.grad))


def test_only_another_argument_requires_grad(mul_: Any) -> None:
    x, y = X.clone(), leaf(X)
    assert mul_(x, y) is x
    assert x.requires_grad
    x.sum().backward()
    torch.testing.assert_close(y.grad, X)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x, "a leaf Variable that requires grad is being used in an in-place operation"),
        (lambda x: x[:2], "a view of a leaf Variable that requires grad is being used in an in-place operation"),
        (lambda x: (x * 1).unbind()[0], "a view is being modified in-place that autograd cannot follow"),
    ],
)
def test_writes_that_autograd_refuses(exp_: Any, make: Any, words: str) -> None:
    x = leaf(X)
    tensor = make(x)
    before = tensor.detach().clone()
    with pytest.raises(RuntimeError):
        tensor.exp_()
    with pytest.raises(AutogradError, match=words) as raised:
        exp_(tensor)
    assert raised.value.argument == "x"
    assert torch.equal(tensor.detach(), before)  # it was not written
    with torch.no_grad():
        exp_(tensor)
    torch.testing.assert_close(tensor.detach(), before.exp())


def test_a_saved_tensor_that_is_written_later(mul_: Any) -> None:
    x, y = leaf(X) * 1, leaf(X) * 1
    mul_(x, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


# From torch operations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace_from_torch_operations(registry: Registry, ns: str, backend: str) -> None:
    @registry.custom_op(f"{ns}::mul_", mutates_args={"x"}, tags=INPLACE)
    def mul_(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(y)

    mul_.register_autograd_from(lambda x, y: x * y)

    def f(x: Tensor) -> Tensor:
        return mul_(x.sin(), x.exp())

    compiled = f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
    x, y = leaf(X), leaf(X)
    compiled(x).sum().backward()
    (y.sin() * y.exp()).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    if backend == "eager":
        z = leaf(X.double())
        assert gradcheck(f, z, check_forward_ad=True)
        assert gradgradcheck(f, z, check_fwd_over_rev=True)


def test_a_buffer_from_torch_operations(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::norm", mutates_args={"out"})
    def norm(out: Tensor, x: Tensor, *, weight: Tensor, eps: float = 1e-6) -> None:
        out.copy_(x * torch.rsqrt(x.square().mean() + eps) * weight)

    norm.register_autograd_from(lambda out, x, *, weight, eps: x * torch.rsqrt(x.square().mean() + eps) * weight)

    def f(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        norm(out, x, weight=weight, eps=1e-3)
        return out.exp()

    x, weight = leaf(X.double()), leaf(X.double() + 1)
    assert gradcheck(f, (x, weight), check_forward_ad=True)
    assert gradgradcheck(f, (x, weight))


def test_a_counter_and_a_formula_from_torch_operations(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::count", mutates_args={"counter"})
    def count(x: Tensor, counter: Tensor) -> Tensor:
        counter.add_(1)
        return x * x * counter

    count.register_autograd_from(lambda x, counter: x * x * (counter + 1))
    x, counter = leaf(X), torch.ones(())
    count(x, counter).sum().backward()
    torch.testing.assert_close(x.grad, 4 * X)
    assert counter == 2


# What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"grads_of": "x"}, RegistrationError, "the op does not write to it"),
        ({"grads_of": ("n",)}, DefinitionError, "names an argument that is no tensor"),
        ({"grads_of": "acc", "nondiff_args": "acc"}, RegistrationError, "it is one of nondiff_args"),
        ({"originals": "z"}, DefinitionError, "originals= names an argument that is no tensor"),
        ({"originals": "x"}, RegistrationError, "originals= names an argument, but the op does not write to it"),
    ],
)
def test_options_that_do_not_fit(registry: Registry, ns: str, options: Any, error: Any, words: str) -> None:
    op = registry.custom_op(f"{ns}::op", lambda x, acc, n: x * n, mutates_args={"acc"},
                            schema="(Tensor x, Tensor(a!) acc, int n) -> Tensor")  # fmt: skip
    for register in (op.register_autograd, op.register_jvp):
        with pytest.raises(error, match=words) as raised:
            register(lambda ctx, *grads: None, **options)
        assert f"{ns}::op" in str(raised.value)
    with pytest.raises(AutogradError, match="no autograd formula was registered"):  # nothing was registered
        op(leaf(X), torch.zeros(3), 2).sum().backward()


def test_the_result_of_an_inplace_op_is_no_new_value(exp_: Any) -> None:
    with pytest.raises(RegistrationError, match="it is returned, so backward gets a gradient for it already"):
        exp_.register_autograd(lambda ctx, g: g, grads_of="x")
