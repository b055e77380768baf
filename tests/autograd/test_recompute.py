"""Gradients that a reference gives: the derivatives of a function in torch operations."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Optional

import pytest
import torch
import torch.autograd.forward_ad
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import customops
from customops import Registry, Tag
from customops.errors import AutogradError, CallbackError, RegistrationError, UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated"),
]


def test_only_what_is_needed_is_derived(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x, y: x * y, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    needed = []

    def reference(x: Tensor, y: Tensor) -> Tensor:
        needed.append((x.requires_grad, y.requires_grad))
        return x * y

    customops.register_reference(op, reference, gives="gradients")
    x, y = torch.rand(3, requires_grad=True), torch.rand(3)
    (grad,) = torch.autograd.grad(op(x, y).sum(), x)
    assert torch.equal(grad, y)
    assert needed == [(True, False)]


def test_what_is_refused(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(CallbackError, match="reference does not fit the operator"):
        op.register_reference(lambda: 0, gives="gradients")
    op.register_reference(lambda x: (x * 2).sum(), gives="gradients")
    x = torch.rand(3, requires_grad=True)
    with pytest.raises(AutogradError, match="does not return what the op does"):
        op(x).sum().backward()
    view = registry.custom_op(f"{ns}::g", lambda x: x[:1], mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    view.register_reference(lambda x: x[:1], gives="gradients")
    assert view._rules.autograd.formulas.keys() == {"backward"}  # a view has no rule for forward mode
    nothing = registry.custom_op(f"{ns}::h", lambda x: None, mutates_args=(), schema="(Tensor x) -> ()")
    with pytest.raises(RegistrationError, match="non-functional"):
        nothing.register_reference(lambda x: None, gives="gradients")
    assert nothing.reference is None


# Saved instead of run again -------------------------------------------------------------------------------------


def wave(registry: Registry, ns: str, **options: Any) -> Any:
    """``sin(x) * y``, its result used in its own derivative; a function that counts its calls."""
    op = registry.custom_op(f"{ns}::wave", lambda x, y: x.sin() * y, mutates_args=(),
                            schema="(Tensor x, Tensor y) -> Tensor")  # fmt: skip
    op.register_fake(lambda x, y: torch.empty_like(x))
    op.calls = []

    @op.register_reference(gives="gradients", **options)
    def reference(x: Tensor, y: Tensor) -> Tensor:
        op.calls.append(1)
        return x.sin() * y

    return op


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(2, 3, dtype=torch.double, generator=generator)
    return x.requires_grad_(), y.requires_grad_()


def first(f: Any) -> Any:
    xs = leaves()
    return torch.autograd.grad(f(*xs).square().sum(), xs)


def accumulated(f: Any) -> Any:
    xs = leaves()
    f(*xs).square().sum().backward()
    return [x.grad for x in xs]


def second(f: Any) -> Any:
    xs = leaves()
    found = torch.autograd.grad(f(*xs).square().sum(), xs, create_graph=True)
    return found, torch.autograd.grad(sum(x.square().sum() for x in found), xs)  # type: ignore[arg-type]


def on_cpu(f: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return second(f)


def packed(f: Any) -> Any:
    xs = leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True), torch.from_numpy):
        y = f(*xs).square().sum()
    return torch.autograd.grad(y, xs)


def twice(f: Any) -> Any:
    xs = leaves()
    y = f(*xs).square().sum()
    return torch.autograd.grad(y, xs, retain_graph=True), torch.autograd.grad(y, xs)


def in_inference_mode(f: Any) -> Any:
    """`backward` and `autograd.grad` there, with and without recording."""
    xs = leaves()
    y = f(*xs).square().sum()
    with torch.inference_mode():
        found = torch.autograd.grad(y, xs, retain_graph=True)
        with torch.enable_grad():
            recorded = torch.autograd.grad(y, xs, create_graph=True)
        y.backward(inputs=xs)
    return found, recorded, [x.grad for x in xs]


def batched(f: Any) -> Any:
    xs = leaves()
    return torch.autograd.grad(f(*xs), xs, torch.eye(3, dtype=torch.double), is_grads_batched=True)


def dual(f: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        xs = [torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)) for x in leaves()]
        found = torch.autograd.grad(f(*xs).square().sum(), xs)
        return [torch.autograd.forward_ad.unpack_dual(x).tangent for x in found]


WAYS: dict[str, Any] = {
    "first": first,
    "second": second,
    "save_on_cpu": on_cpu,
    "hooks": packed,
    "twice": twice,
    "inference mode": in_inference_mode,
    "batched": batched,
    "forward over reverse": dual,
    "checkpoint": lambda f: first(lambda *xs: checkpoint(f, *xs, use_reentrant=False)),
    "reentrant checkpoint": lambda f: accumulated(lambda *xs: checkpoint(f, *xs, use_reentrant=True)),
    "one input": lambda f: first(lambda x, y: f(x, y.detach()) + y),
    "hessian": lambda f: torch.func.hessian(lambda x, y: f(x, y).square().sum(), (0, 1))(*leaves()),
    "aot_eager": lambda f: first(torch.compile(f, fullgraph=True, backend="aot_eager")),
    "inductor": lambda f: first(torch.compile(f, fullgraph=True, backend="inductor")),
    "dynamic": lambda f: first(torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)),
    "compiled jvp": lambda f: torch.compile(
        lambda x, y: torch.func.jvp(f, (x, y), (y, x)), fullgraph=True, backend="aot_eager"
    )(*(x.detach() for x in leaves())),
    "compiled hessian": lambda f: torch.compile(
        torch.func.hessian(lambda x, y: f(x, y).square().sum()), fullgraph=True, backend="aot_eager"
    )(*(x.detach() for x in leaves())),
}


@pytest.mark.compile
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_ways(registry: Registry, ns: str, way: str, recompute: bool) -> None:
    op = wave(registry, ns, recompute=recompute)
    found, expected = (WAYS[way](lambda x, y, f=f: f(x.cos(), y)) for f in (op, lambda x, y: x.sin() * y))
    torch.testing.assert_close(found, expected)


# Random numbers ---------------------------------------------------------------------------------------------------


def noisy_fn(x: Tensor, p: float, *, generator: Optional[torch.Generator] = None) -> Tensor:
    return x * x * (torch.rand(x.shape, generator=generator) > p)


def noisy(registry: Registry, ns: str, recompute: bool, **options: Any) -> Any:
    op = registry.custom_op(f"{ns}::noisy", noisy_fn, mutates_args=(), **options)
    op.register_fake(lambda x, p, *, generator: torch.empty_like(x))
    op.register_reference(noisy_fn, recompute=recompute, gives="gradients")
    return op


def noisy_without_generator(registry: Registry, ns: str, recompute: bool, **options: Any) -> Any:
    def fn(x: Tensor, p: float) -> Tensor:
        return noisy_fn(x, p)

    op = registry.custom_op(f"{ns}::noisy", fn, mutates_args=(), **options)
    op.register_fake(lambda x, p: torch.empty_like(x))
    op.register_reference(fn, recompute=recompute, gives="gradients")
    return op


def slope(y: Tensor, x: Tensor) -> Tensor:
    """The derivative of what `noisy_fn` returned."""
    return 2 * y / x


def noisy_second(op: Any, x: Tensor) -> Any:
    y = op(x, 0.5)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return (first, second), (slope(y, x), slope(y, x) / x)


def noisy_batch(op: Any, x: Tensor) -> Any:
    xs = x.detach().expand(3, -1).clone().requires_grad_()
    y = torch.vmap(lambda x: op(x, 0.5), randomness="different")(xs)
    return torch.autograd.grad(y.sum(), xs)[0], slope(y, xs)


def noisy_checkpoint(op: Any, x: Tensor) -> Any:
    y = checkpoint(lambda x: op(x, 0.5), x, use_reentrant=False)
    return torch.autograd.grad(y.sum(), x)[0], slope(y, x)


def noisy_backward(op: Any, x: Tensor) -> Any:
    y = op(x, 0.5)
    torch.rand(3)
    return torch.autograd.grad(y.sum(), x)[0], slope(y, x)


def noisy_jvp(op: Any, x: Tensor) -> Any:
    y, tangent = torch.func.jvp(lambda x: op(x, 0.5), (x.detach(),), (torch.ones_like(x),))
    return tangent, slope(y, x)


def noisy_func(op: Any, x: Tensor) -> Any:
    gradient, y = torch.func.grad(lambda x: (lambda y: (y.sum(), y))(op(x, 0.5)), has_aux=True)(x.detach())
    return gradient, slope(y, x)


NOISY = [noisy_backward, noisy_second, noisy_jvp, noisy_func, noisy_batch, noisy_checkpoint]
SEEDED: dict[str, Any] = {"tags": torch.Tag.nondeterministic_seeded}


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("way", NOISY)
def test_the_function_draws_the_numbers_of_the_kernel(registry: Registry, ns: str, way: Any, recompute: bool) -> None:
    op = noisy_without_generator(registry, ns, recompute, **SEEDED)
    torch.testing.assert_close(*way(op, torch.rand(50).add(1).requires_grad_()))


@pytest.mark.parametrize("recompute", [True, False])
def test_each_number_is_drawn_once(registry: Registry, ns: str, recompute: bool) -> None:
    op, x = noisy(registry, ns, recompute), torch.rand(50).add(1).requires_grad_()
    for given in (None, torch.Generator().manual_seed(3)):
        generator = given or torch.default_generator
        before = generator.get_state()
        y = op(x, 0.5, generator=given)
        after = generator.get_state()
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], slope(y, x))
        assert torch.equal(generator.get_state(), after)
        generator.set_state(before)
        noisy_fn(x, 0.5, generator=given)
        assert torch.equal(generator.get_state(), after)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("way", NOISY)
def test_a_random_function_of_an_op_without_the_tag(registry: Registry, ns: str, way: Any, recompute: bool) -> None:
    op = noisy_without_generator(registry, ns, recompute)
    with pytest.raises(AutogradError, match=r"(?s)draws random numbers.*tags=torch\.Tag\.nondeterministic_seeded"):
        way(op, torch.rand(50).add(1).requires_grad_())


def test_numbers_that_another_thread_draws(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")

    @op.register_reference(gives="gradients")
    def double(x: Tensor) -> Tensor:
        if not threads:  # before it was seen that the state has changed
            threads.append(threading.Thread(target=torch.rand, args=(3,)))
            threads[0].start()
            threads[0].join()
        return x * 2

    threads: list[threading.Thread] = []
    x = torch.ones(3, requires_grad=True)
    op(x).sum().backward()
    assert threads
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("recompute", [True, False])
def test_random_numbers_inside_vmap_are_refused(registry: Registry, ns: str, recompute: bool) -> None:
    op = noisy_without_generator(registry, ns, recompute, **SEEDED)
    with pytest.raises(UnsupportedError, match=r"(?s)inside vmap.*return the numbers"):
        torch.vmap(torch.func.grad(lambda x: op(x, 0.5).sum()), randomness="different")(torch.rand(2, 50))


@pytest.mark.compile
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("is_tagged", [True, False])
def test_random_numbers_in_a_graph_are_refused(registry: Registry, ns: str, is_tagged: bool, recompute: bool) -> None:
    op = noisy_without_generator(registry, ns, recompute, **(SEEDED if is_tagged else {}))
    compiled = torch.compile(lambda x: op(x, 0.5), fullgraph=True, backend="aot_eager")
    match = "in a graph.*return the numbers" if is_tagged else "draws random numbers.*tags="
    with pytest.raises(Exception, match=f"(?s){match}"):
        noisy_backward(lambda x, p: compiled(x), torch.rand(50, requires_grad=True))
    with torch.no_grad():
        assert compiled(torch.rand(50)).shape == (50,)


@pytest.mark.compile
def test_attention_is_not_random(registry: Registry, ns: str) -> None:
    """The operators that it consists of have the tag, and a probability that is 0."""
    attention = torch.nn.functional.scaled_dot_product_attention
    op = registry.custom_op(f"{ns}::attention", lambda q, k, v: attention(q, k, v), mutates_args=(),
                            schema="(Tensor q, Tensor k, Tensor v) -> Tensor")  # fmt: skip
    op.register_fake(lambda q, k, v: torch.empty_like(q))
    op.register_reference(lambda q, k, v: attention(q, k, v), gives="gradients")
    xs = [torch.rand(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
    for f in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        found, expected = (torch.autograd.grad(each(*xs).sum(), xs) for each in (f, attention))
        torch.testing.assert_close(found, expected)


def test_when_the_function_runs(registry: Registry, ns: str) -> None:
    op = wave(registry, ns, recompute=False)
    x, y = leaves()
    out = op(x, y)
    assert len(op.calls) == 1
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert len(op.calls) == 1
    torch.testing.assert_close(x.grad, (2 * x.cos() * y).detach())
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()
    with torch.no_grad():
        op(x, y)
    assert len(op.calls) == 1


def test_what_is_saved_is_freed_by_backward(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x.exp().exp(), mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_reference(lambda x: x.exp().exp(), recompute=False, gives="gradients")
    x = torch.rand(3, dtype=torch.double, requires_grad=True)
    saved: list[Any] = []

    class Packed:
        def __init__(self, x: Tensor) -> None:
            self.x = x.detach()

    def pack(x: Tensor) -> Packed:
        saved.append(weakref.ref(value := Packed(x)))
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.x):
        out = op(x).sum()
    assert len(saved) == 3  # the input, and what exp saves
    assert all(ref() is not None for ref in saved)
    out.backward()
    assert all(ref() is None for ref in saved)  # although `out` is there


def test_a_written_argument_that_is_saved(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::mul_", lambda x, y: x.mul_(y), mutates_args={"x"}, tags=Tag.inplace,
                            schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)")  # fmt: skip
    op.register_reference(lambda x, y: x * y, recompute=False, gives="gradients")

    def f(x: Tensor, y: Tensor) -> Tensor:
        x = x.cos()
        op(x, y)
        return x

    for way in (first, second, in_inference_mode):
        torch.testing.assert_close(way(f), way(lambda x, y: x.cos() * y))


def test_a_function_that_returns_something_else_with_its_graph(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_reference(lambda x: (x * 2).sum(), recompute=False, gives="gradients")
    with pytest.raises(AutogradError, match="does not return what the op does"):
        op(torch.rand(3, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("recompute", [True, False])
def test_inputs_and_outputs_without_a_part(registry: Registry, ns: str, recompute: bool) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x, y: (x * 2, torch.ones(2)), mutates_args=(),
                            schema="(Tensor x, Tensor y) -> (Tensor, Tensor)")  # fmt: skip
    op.register_reference(lambda x, y: (x * 2, torch.ones(2)), recompute=recompute, gives="gradients")
    x, y = leaves()
    one, two = op(x.float(), y.float())
    found = torch.autograd.grad(one.sum() + two.sum(), (x, y))
    torch.testing.assert_close(found, (torch.full_like(x, 2), torch.zeros_like(y)))
