"""Every kind of op, in every context."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import pytest
import torch
from helpers.modes import FunctionLog
from helpers.ops import define_functional, save_scale, scale, scale_gradient
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from customops import Registry, Tag


def wait_for(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


# Every kind of op, and a small program that uses it ---------------------------------------------------------------
#
# A program takes and returns tensors, so that it can be compiled, transformed and run in any context; `expected` is
# the same program made of aten ops only.


class Kind(NamedTuple):
    define: Callable[[Registry, str], Any]
    program: Callable[[Any, Tensor], Tensor]
    expected: Callable[[Tensor], Tensor]
    functional: bool = True  # writes to nothing, returns fresh memory
    differentiable: bool = True

    @property
    def takes_aot(self) -> bool:
        """Torch functionalizes no view ops but its own."""
        return self.define is not define_view


def define_with_device_kernel(registry: Registry, ns: str) -> Any:
    def everywhere(x: Tensor, by: float = 2.0) -> Tensor:
        raise AssertionError("the CPU has a kernel of its own")

    op = registry.custom_op(f"{ns}::scale", everywhere, mutates_args=())
    op.register_kernel(["cpu", "cuda"], scale)
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(scale_gradient, setup_context=save_scale)
    return op


def define_mutating(registry: Registry, ns: str) -> Any:
    def add_into(x: Tensor, rest: list[Tensor], maybe: Optional[Tensor], by: float) -> None:
        x.add_(by)
        for item in rest:
            item.mul_(by)
        if maybe is not None:
            maybe.sub_(by)

    return registry.custom_op(f"{ns}::add_into", add_into, mutates_args=("x", "rest", "maybe"))


def use_mutating(op: Any, x: Tensor) -> Tensor:
    a, b, c, d = x.clone(), x + 1, x + 2, x + 3
    op(a, [b, c], None, 4.0)
    op(a, [], d, 0.5)
    return torch.cat([a, b, c, d])


def define_inplace(registry: Registry, ns: str) -> Any:
    def add_(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    return registry.custom_op(f"{ns}::add_", add_, mutates_args=("x",), tags=Tag.inplace)


def use_inplace(op: Any, x: Tensor) -> Tensor:
    y = x.clone()
    return torch.cat([op(y, x), y])


def define_out(registry: Registry, ns: str) -> Any:
    def halves(x: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        low.copy_(x - 1)
        high.copy_(x + 1)
        return low, high

    return registry.custom_op(f"{ns}::halves", halves, mutates_args=("low", "high"), tags=Tag.out)


def use_out(op: Any, x: Tensor) -> Tensor:
    low, high = torch.empty_like(x), torch.empty_like(x)
    first, second = op(x, low=low, high=high)
    return torch.cat([first, second, low, high])


def define_view(registry: Registry, ns: str) -> Any:
    def pick(x: Tensor, index: int) -> Tensor:
        return x[index]

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shape, ctx.index = inputs[0].shape, inputs[1]
        ctx._is_pure_view = True

    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.ops.aten.select_backward(grad, ctx.shape, 0, ctx.index), None

    op = registry.custom_op(f"{ns}::pick", pick, mutates_args=(), schema="(Tensor(a) x, int index) -> Tensor(a)")
    op.register_fake(pick)
    op.register_autograd(backward, setup_context=save)
    return op


def define_factory(registry: Registry, ns: str) -> Any:
    def ramp(n: int, step: float, device: torch.device) -> Tensor:
        return torch.arange(n, device=device) * step

    op = registry.custom_op(f"{ns}::ramp", ramp, mutates_args=(), device_types="cpu")
    op.register_fake(lambda n, step, device: torch.empty(n, device=device))
    return op


def define_list(registry: Registry, ns: str) -> Any:
    def negate_all(xs: Sequence[Tensor]) -> list[Tensor]:
        return [-x for x in xs]

    op = registry.custom_op(f"{ns}::negate_all", negate_all, mutates_args=())
    op.register_fake(lambda xs: [torch.empty_like(x) for x in xs])
    op.register_autograd(lambda ctx, grads: [-grad for grad in grads])
    return op


def define_overloads(registry: Registry, ns: str) -> Any:
    def square(x: Tensor) -> Tensor:
        return x * x

    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def square_gradient(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad * ctx.saved_tensors[0]

    def product_gradient(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    one = registry.custom_op(f"{ns}::times", square, mutates_args=())
    two = registry.custom_op(f"{ns}::times.pair", product, mutates_args=())
    one.register_fake(torch.empty_like)
    two.register_fake(lambda x, y: torch.empty_like(x))
    one.register_autograd(square_gradient, setup_context=save)
    two.register_autograd(product_gradient, setup_context=save)
    return getattr(torch.ops, ns).times


def define_by_schema(registry: Registry, ns: str) -> Any:
    def total(x, dims, *, keep):  # type: ignore[no-untyped-def]
        return x.sum(dims, keep)

    def save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.shape = inputs[0].shape

    schema = "(Tensor x, int[] dims, *, bool keep=False) -> Tensor"
    op = registry.custom_op(f"{ns}::total", total, mutates_args=(), schema=schema)
    op.register_fake(total)
    op.register_autograd(lambda ctx, grad: (grad.expand(ctx.shape), None), setup_context=save)
    return op


def define_several_returns(registry: Registry, ns: str) -> Any:
    def parts(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x * 2, [x + 1, x - 1]

    op = registry.custom_op(f"{ns}::parts", parts, mutates_args=())
    op.register_fake(lambda x: (torch.empty_like(x), [torch.empty_like(x), torch.empty_like(x)]))
    op.register_autograd(lambda ctx, grad, grads: 2 * grad + grads[0] + grads[1])
    return op


def use_several_returns(op: Any, x: Tensor) -> Tensor:
    double, (more, less) = op(x)
    return torch.stack([double, more, less])


KINDS = {
    "functional": Kind(define_functional, lambda op, x: op(x) + op(x, 3.0), lambda x: x * 5),
    "device kernel": Kind(define_with_device_kernel, lambda op, x: op(x) + op(x, by=3.0), lambda x: x * 5),
    "mutating": Kind(
        define_mutating,
        use_mutating,
        lambda x: torch.cat([x + 4.5, (x + 1) * 4, (x + 2) * 4, x + 2.5]),
        functional=False,
        differentiable=False,
    ),
    "in-place": Kind(
        define_inplace,
        use_inplace,
        lambda x: torch.cat([x * 2, x * 2]),
        functional=False,
        differentiable=False,
    ),
    "out": Kind(
        define_out,
        use_out,
        lambda x: torch.cat([x - 1, x + 1, x - 1, x + 1]),
        functional=False,
        differentiable=False,
    ),
    "view": Kind(define_view, lambda op, x: op(x.clone(), 1) * 3, lambda x: x[1] * 3, functional=False),
    "factory": Kind(
        define_factory,
        lambda op, x: x + op(4, 0.5, x.device),
        lambda x: x + torch.tensor([0.0, 0.5, 1.0, 1.5]),
        differentiable=False,
    ),
    "list": Kind(
        define_list, lambda op, x: torch.stack(op([x, x + 1])), lambda x: torch.stack([torch.neg(x), torch.neg(x + 1)])
    ),
    "overloads": Kind(define_overloads, lambda op, x: op(x) + op(x, x + 1), lambda x: x**2 + x * (x + 1)),
    "manual schema": Kind(
        define_by_schema,
        lambda op, x: op(x, [0]) + op(x, [0, 1], keep=True),
        lambda x: torch.sum(x, 0) + torch.sum(x).reshape(1, 1),
    ),
    "several returns": Kind(
        define_several_returns, use_several_returns, lambda x: torch.stack([x + x, x + torch.ones(()), x - 1])
    ),
}


def kinds(keep: Callable[[Kind], bool]) -> Any:
    chosen = {name.replace(" ", "-"): kind for name, kind in KINDS.items() if keep(kind)}
    return pytest.mark.parametrize("kind", chosen.values(), ids=chosen)


every_kind = kinds(lambda kind: True)


def sample() -> Tensor:
    return torch.randn(3, 4)


@every_kind
def test_eager(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample()
    assert_close(kind.program(op, x), kind.expected(x))


@every_kind
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(registry: Registry, ns: str, kind: Kind, context: Any) -> None:
    op = kind.define(registry, ns)
    with context():
        x = sample()
        result = kind.program(op, x)
        assert_close(result, kind.expected(x))
        assert not result.requires_grad
        assert result.is_inference() == torch.is_inference_mode_enabled()


@every_kind
def test_no_grad_and_inference_mode_with_tensors_that_require_grad(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample().requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            result = kind.program(op, x)
        assert_close(result, kind.expected(x.detach()))
        assert not result.requires_grad


@pytest.mark.compile
@pytest.mark.parity(27)
@every_kind
def test_compiled(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample()
    check_compiled(torch.compile(functools.partial(kind.program, op), fullgraph=True, backend="eager"), kind, x)


@pytest.mark.compile
@pytest.mark.parity(27)
@kinds(lambda kind: kind.takes_aot)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_by_aot(registry: Registry, ns: str, kind: Kind, dynamic: bool) -> None:
    program = functools.partial(kind.program, kind.define(registry, ns))
    check_compiled(torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=dynamic), kind, sample())


def check_compiled(compiled: Callable[[Tensor], Tensor], kind: Kind, x: Tensor) -> None:
    assert_close(compiled(x), kind.expected(x))
    with torch.no_grad():
        assert_close(compiled(x), kind.expected(x))
    with torch.inference_mode():
        assert_close(compiled(x), kind.expected(x))


# One compilation for all kinds, as inductor takes seconds for each. Those that return what they write to
# have one of their own in test_inplace.py and test_out.py: inductor may hand their buffers out again too early.
@pytest.mark.compile
@pytest.mark.parity(27)
def test_compiled_by_inductor(registry: Registry, ns: str) -> None:
    names = KINDS.keys() - {"view", "in-place", "out"}
    kinds = {f"{ns}_{i}": KINDS[name] for i, name in enumerate(sorted(names))}
    ops = [(kind.program, kind.define(registry, name)) for name, kind in kinds.items()]

    def everything(x: Tensor) -> list[Tensor]:
        return [program(op, x) for program, op in ops]

    x = sample()
    expected = [kind.expected(x) for kind in kinds.values()]
    assert_close(torch.compile(everything, fullgraph=True)(x), expected)


@pytest.mark.compile
@kinds(lambda kind: kind.takes_aot and kind.differentiable)
def test_compiled_gradients(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample().requires_grad_()
    compiled = torch.compile(functools.partial(kind.program, op), fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(x).pow(2).sum(), x)
    (expected,) = torch.autograd.grad(kind.expected(x).pow(2).sum(), x)
    assert_close(got, expected)


@every_kind
def test_fake_tensors(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample()
    expected = kind.expected(x)
    with FakeTensorMode() as mode:
        result = kind.program(op, mode.from_tensor(x))
    assert (result.shape, result.dtype, result.device) == (expected.shape, expected.dtype, expected.device)
    on_meta = kind.program(op, x.to("meta"))
    assert (on_meta.shape, on_meta.device.type) == (expected.shape, "meta")


@kinds(lambda kind: kind.differentiable)
def test_function_transforms(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample()

    def of_op(x: Tensor) -> Tensor:
        return kind.program(op, x).pow(3).sum()

    def of_aten(x: Tensor) -> Tensor:
        return kind.expected(x).pow(3).sum()

    assert_close(torch.func.grad(of_op)(x), torch.func.grad(of_aten)(x))
    assert_close(torch.func.jacrev(torch.func.grad(of_op))(x), torch.func.hessian(of_aten)(x))
    value, pull_back = torch.func.vjp(of_op, x)
    assert_close(value, of_aten(x))
    assert_close(pull_back(torch.tensor(2.0))[0], 2 * torch.func.grad(of_aten)(x))


@kinds(lambda kind: kind.functional and kind.takes_aot)
def test_functionalize(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample()
    assert_close(torch.func.functionalize(functools.partial(kind.program, op))(x), kind.expected(x))


@every_kind
def test_wrapper_subclass(registry: Registry, ns: str, kind: Kind) -> None:
    op, x, y = kind.define(registry, ns), sample(), sample()
    result = kind.program(op, TwoTensor(x, y))
    assert type(result) is TwoTensor
    assert_close(result.a, kind.expected(x))
    assert_close(result.b, kind.expected(y))


class Plain(Tensor):
    """A subclass without a __torch_dispatch__: its instances reach the kernels."""


@every_kind
def test_plain_subclass(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample()
    result = kind.program(op, x.as_subclass(Plain))
    assert type(result) is Plain
    assert_close(result.as_subclass(Tensor), kind.expected(x))


class Recorder(TorchDispatchMode):
    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == self.namespace:
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


@every_kind
def test_dispatch_mode(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample()
    with Recorder(ns) as recorder:
        result = kind.program(op, x)
    assert_close(result, kind.expected(x))
    assert set(recorder.seen) == {op._opoverload for op in registry}
    assert len(recorder.seen) <= 2  # once for each call


@every_kind
def test_function_mode(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample()
    with FunctionLog() as recorder:
        result = kind.program(op, x)
    assert_close(result, kind.expected(x))
    called = {getattr(func, "_overloadpacket", func) for func in recorder.seen}
    assert {op._opoverload._overloadpacket for op in registry} <= called


@every_kind
def test_from_several_threads(registry: Registry, ns: str, kind: Kind) -> None:
    op = kind.define(registry, ns)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            x = torch.full((3, 4), float(seed))
            for _ in range(50):
                assert_close(kind.program(op, x), kind.expected(x))
        except BaseException as error:
            wrong.append(error)

    wait_for([threading.Thread(target=work, args=(seed,)) for seed in range(4)])
    assert not wrong
