"""Ops as objects: definition, every kind of op in every context torch has, metadata, compiled calls."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from modes import FunctionLog
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import customops
from customops import CustomOpDef, Registry
from customops.errors import CallbackError, DefinitionError, SchemaError


def run_at(op: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that sits at a dispatch key, whatever the device of the tensors: no hardware is needed."""
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return op._opoverload.redispatch(keyset, *args, **kwargs)


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


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


def scale_gradient(ctx: Any, grad: Tensor) -> Any:
    return grad * ctx.by, None


def save_scale(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.by = inputs[1]


def define_functional(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(scale_gradient, setup_context=save_scale)
    return op


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

    return registry.custom_op(f"{ns}::add_", add_, mutates_args=("x",), tags=torch.Tag.inplace)


def use_inplace(op: Any, x: Tensor) -> Tensor:
    y = x.clone()
    return torch.cat([op(y, x), y])


def define_out(registry: Registry, ns: str) -> Any:
    def halves(x: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        low.copy_(x - 1)
        high.copy_(x + 1)
        return low, high

    return registry.custom_op(f"{ns}::halves", halves, mutates_args=("low", "high"), tags=torch.Tag.out)


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


# item 27
@every_kind
def test_compiled(registry: Registry, ns: str, kind: Kind) -> None:
    op, x = kind.define(registry, ns), sample()
    check_compiled(torch.compile(functools.partial(kind.program, op), fullgraph=True, backend="eager"), kind, x)


# item 27
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


# item 27; one compilation for all kinds, as inductor takes seconds for each. Those that return what they write to
# have one of their own in test_inplace_out.py: inductor may hand their buffers out again too early.
def test_compiled_by_inductor(registry: Registry, ns: str) -> None:
    names = KINDS.keys() - {"view", "in-place", "out"}
    kinds = {f"{ns}_{i}": KINDS[name] for i, name in enumerate(sorted(names))}
    ops = [(kind.program, kind.define(registry, name)) for name, kind in kinds.items()]

    def everything(x: Tensor) -> list[Tensor]:
        return [program(op, x) for program, op in ops]

    x = sample()
    expected = [kind.expected(x) for kind in kinds.values()]
    assert_close(torch.compile(everything, fullgraph=True)(x), expected)


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


# Definition -----------------------------------------------------------------------------------------------------


def increment(x: Tensor) -> Tensor:
    return x + 1


# item 14
def test_a_definition_gives_a_callable_that_torch_ops_has_too(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::increment", increment, mutates_args=())
    x = torch.tensor([1.0, 2.0])
    assert isinstance(op, CustomOpDef)
    assert repr(op) == f"<CustomOpDef({ns}::increment)>"
    assert op._opoverload is getattr(torch.ops, ns).increment.default
    assert isinstance(op._opoverload, torch._ops.OpOverload)
    for call in (op, op._opoverload, getattr(torch.ops, ns).increment):
        assert call(x).tolist() == [2.0, 3.0]
    assert str(op._opoverload._schema) == f"{ns}::increment(Tensor x) -> Tensor"


# item 14
def test_a_definition_is_a_decorator_without_the_function(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    assert isinstance(double, CustomOpDef)
    assert double(torch.tensor(3.0)).item() == 6.0


# item 14
@pytest.mark.parametrize("key", ["CPU", "CUDA", "XPU", "MPS", "PrivateUse1", "SparseCPU"])
def test_without_device_types_the_function_serves_every_device(registry: Registry, ns: str, key: str) -> None:
    op = registry.custom_op(f"{ns}::increment", increment, mutates_args=())
    assert run_at(op, key, torch.tensor(1.0)).item() == 2.0


# item 14
def test_a_kernel_for_cpu_takes_over_on_cpu(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::increment", increment, mutates_args=())
    op.register_kernel("cpu")(lambda x: x + 10)
    assert op(torch.tensor(1.0)).item() == 11.0
    assert run_at(op, "CUDA", torch.tensor(1.0)).item() == 2.0


# item 15
def test_defining_a_name_again_replaces_the_op_silently(
    registry: Registry, ns: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry.custom_op(f"{ns}::f", increment, mutates_args=())
    new = registry.custom_op(f"{ns}::f", lambda x: x - 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert new(torch.tensor(1.0)).item() == 0.0
    assert getattr(torch.ops, ns).f(torch.tensor(1.0)).item() == 0.0
    assert not [record for record in caplog.records if record.name.startswith("customops")]


# item 15
def test_overloads(registry: Registry, ns: str) -> None:
    one = registry.custom_op(f"{ns}::f", increment, mutates_args=())
    two = registry.custom_op(f"{ns}::f.overload", torch.sub, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    packet = getattr(torch.ops, ns).f
    x = torch.tensor(3.0)
    assert packet(x).item() == one(x).item() == 4.0
    assert packet(x, x).item() == two(x, x).item() == 0.0
    assert repr(two) == f"<CustomOpDef({ns}::f.overload)>"
    assert two._opoverload is packet.overload
    assert sorted(packet.overloads()) == ["default", "overload"]


# item 15
def test_an_overload_is_redefined_without_touching_the_other(registry: Registry, ns: str) -> None:
    registry.custom_op(f"{ns}::f", increment, mutates_args=())
    registry.custom_op(f"{ns}::f.overload", torch.sub, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    registry.custom_op(f"{ns}::f.overload", torch.mul, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    packet, x = getattr(torch.ops, ns).f, torch.tensor(3.0)
    assert packet(x).item() == 4.0
    assert packet(x, x).item() == 9.0


# item 16
def test_manual_schemas(registry: Registry, ns: str) -> None:
    def f(x):  # type: ignore[no-untyped-def]
        return x.cos()

    def g(x):  # type: ignore[no-untyped-def]
        x.sin_()

    functional = registry.custom_op(f"{ns}::f", f, mutates_args=(), schema="(Tensor x) -> Tensor")
    mutating = registry.custom_op(f"{ns}::g", g, mutates_args=["x"], schema="(Tensor(a!) x) -> ()")
    x = torch.randn(3)
    assert_close(functional(x), torch.cos(x))
    y = x.clone()
    assert mutating(y) is None
    assert_close(y, torch.sin(x))


# item 16
@pytest.mark.parametrize(
    ("mutates_args", "schema"), [((), "(Tensor(a!) x) -> ()"), (("x", "y"), "(Tensor(a!) x) -> ()")]
)
def test_a_manual_schema_must_agree_with_mutates_args(
    registry: Registry, ns: str, mutates_args: Any, schema: str
) -> None:
    with pytest.raises(ValueError, match=r"the op mutates \{'x'\}") as caught:
        registry.custom_op(f"{ns}::f", lambda x: None, mutates_args=mutates_args, schema=schema)
    assert isinstance(caught.value, SchemaError)
    assert ns not in vars(torch.ops) or not hasattr(getattr(torch.ops, ns), "f")


# item 16
def test_mutates_args_without_a_write_in_the_manual_schema(registry: Registry, ns: str) -> None:
    with pytest.raises(ValueError, match="the op mutates"):
        registry.custom_op(f"{ns}::f", lambda x: None, mutates_args=("x",), schema="(Tensor x) -> ()")


FIRST_CPU = torch.device("cpu:0")


def with_defaults(
    x: Tensor,
    a: Optional[int] = None,
    b: float = 3.14,
    c: bool = True,
    d: int = 3,
    e: str = "foo",
    f: torch.dtype = torch.float,
    g: torch.dtype = torch.float32,
    h: torch.dtype = torch.int,
    i: torch.device = FIRST_CPU,
    j: torch.device = "cpu",  # type: ignore[assignment]
) -> Tensor:
    received.append((a, b, c, d, e, f, g, h, i, j))
    return x.clone()


received: list[Any] = []


# item 17
def test_defaults_reach_the_kernel_in_python_form(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", with_defaults, mutates_args=())
    received.clear()
    op(torch.randn(3))
    expected = (None, 3.14, True, 3, "foo", torch.float32, torch.float32, torch.int32, torch.device("cpu:0"), "cpu")
    assert received == [expected]
    assert type(received[0][-1]) is str
    values = [argument.default_value for argument in op._opoverload._schema.arguments[1:]]
    assert values == [None, 3.14, True, 3, "foo", 6, 6, 3, torch.device("cpu:0"), torch.device("cpu")]
    op(torch.randn(3), 1, d=4, h=torch.int64)
    assert received[1] == (1, 3.14, True, 4, "foo", *expected[5:7], torch.int64, *expected[8:])


# item 17
def test_defaults_reach_every_callback(registry: Registry, ns: str) -> None:
    seen = {}

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        seen["setup_context"] = inputs[1:]

    def fake(x: Tensor, *rest: Any) -> Tensor:
        seen["fake"] = rest
        return torch.empty_like(x)

    op = registry.custom_op(f"{ns}::f", with_defaults, mutates_args=())
    op.register_fake(fake)
    op.register_autograd(lambda ctx, grad: (grad,) + (None,) * 10, setup_context=save)
    received.clear()
    op(torch.randn(3, requires_grad=True))
    op(torch.randn(3, device="meta"))
    assert seen["setup_context"] == seen["fake"] == received[0]


# item 17
def test_keyword_only_defaults(registry: Registry, ns: str) -> None:
    def f(x: Tensor, *, dtype: torch.dtype = torch.float64, by: float = math.inf) -> Tensor:
        return x.to(dtype).clamp(max=by)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    x = torch.tensor([1.0, 2.0])
    assert_close(op(x), x.double())
    assert_close(op(x, by=1.5, dtype=torch.float32), torch.tensor([1.0, 1.5]))


# item 25
@pytest.mark.parametrize(
    "tags",
    [
        torch.Tag.pointwise,
        [torch.Tag.pointwise],
        (torch.Tag.pointwise,),
        [torch.Tag.pointwise, torch.Tag.pt2_compliant_tag],
        [torch.Tag.pt2_compliant_tag, torch.Tag.pointwise, torch.Tag.pointwise],
    ],
)
def test_tags(registry: Registry, ns: str, tags: Any) -> None:
    op = registry.custom_op(f"{ns}::f", increment, mutates_args=(), tags=tags)
    assert set(op._opoverload.tags) == {torch.Tag.pointwise, torch.Tag.pt2_compliant_tag}
    assert len(op._opoverload.tags) == 2
    assert op.tags == list(op._opoverload.tags)


# item 25
@pytest.mark.parametrize("tags", [None, (), [], torch.Tag.pt2_compliant_tag])
def test_pt2_compliant_tag_is_always_there_once(registry: Registry, ns: str, tags: Any) -> None:
    op = registry.custom_op(f"{ns}::f", increment, mutates_args=(), tags=tags)
    assert op._opoverload.tags == [torch.Tag.pt2_compliant_tag]


@pytest.mark.parametrize("tags", ["pointwise", 3, [None]])
def test_tags_must_be_tags(registry: Registry, ns: str, tags: Any) -> None:
    with pytest.raises((DefinitionError, TypeError)):
        registry.custom_op(f"{ns}::f", increment, mutates_args=(), tags=tags)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "needs a namespace"),
        ("aten::f", "reserved namespace"),
        ("ns::f.default", '"default" is taken'),
        ("ns::f g", "no valid part"),
        ("ns::", "no valid part"),
    ],
)
def test_bad_names(registry: Registry, name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        registry.custom_op(name, increment, mutates_args=())


def test_the_function_must_take_the_arguments_of_a_manual_schema(registry: Registry, ns: str) -> None:
    with pytest.raises(CallbackError, match="does not fit the operator") as caught:
        registry.custom_op(f"{ns}::f", increment, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    assert caught.value.where == f"increment ({__file__}:{increment.__code__.co_firstlineno})"
    assert len(registry) == 0


# Values of every type come through unchanged ------------------------------------------------------------------------


# item 13
@pytest.mark.parametrize("given", [[1, 2], (1, 2), torch.Size([1, 2]), torch.ones(1, 2).shape])
def test_any_sequence_arrives_as_a_list(registry: Registry, ns: str, given: Any) -> None:
    seen = []

    def f(x: Tensor, sizes: Sequence[int]) -> Tensor:
        seen.append(sizes)
        return x.new_zeros(sizes)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    assert op(torch.ones(1), given).shape == (1, 2)
    assert seen == [[1, 2]]
    assert type(seen[0]) is list


def test_numpy_in_a_kernel(registry: Registry, ns: str) -> None:
    def sine(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()))

    op = registry.custom_op(f"{ns}::sine", sine, mutates_args=(), device_types="cpu")
    op.register_fake(torch.empty_like)
    x = torch.randn(5)
    assert_close(op(x), torch.sin(x))
    assert_close(torch.compile(op, fullgraph=True, backend="aot_eager")(x), torch.sin(x))


# Metadata -------------------------------------------------------------------------------------------------------


def documented(x: Tensor, by: float = 2.0, *, shift: int = 0) -> Tensor:
    """Scale, then shift."""
    return x * by + shift


def test_an_op_looks_like_its_function(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::other_name", documented, mutates_args=())
    assert op.__name__ == "documented"
    assert op.__qualname__ == documented.__qualname__  # type: ignore[attr-defined]
    assert op.__module__ == __name__
    assert op.__doc__ == "Scale, then shift."
    assert op.__wrapped__ is documented  # type: ignore[attr-defined]
    assert inspect.signature(op) == inspect.signature(documented)
    assert inspect.unwrap(op) is documented
    assert op.source.startswith(__file__)


class Scaler:
    """A callable object, as kernels compiled ahead of time often are."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


@pytest.mark.parametrize("fn", [functools.partial(scale, by=3.0), Scaler(3.0), functools.partial(Scaler(3.0))])
def test_partials_and_callable_objects(registry: Registry, ns: str, fn: Any) -> None:
    op = registry.custom_op(f"{ns}::triple", fn, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert op(torch.tensor(2.0)).item() == 6.0
    assert op.__name__ == "triple"
    assert repr(op) == f"<CustomOpDef({ns}::triple)>"
    assert next(iter(inspect.signature(op).parameters)) == "x"


def test_attributes_of_the_function_do_not_reach_into_the_op(registry: Registry, ns: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1

    f._rules = f._opoverload = f._samples = "mine"  # type: ignore[attr-defined]
    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    op.register_kernel("cpu", lambda x: x + 2)
    assert op(torch.tensor(1.0)).item() == 3.0
    assert list(op.samples()) == []


def test_a_copy_of_an_op_is_the_op(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::increment", increment, mutates_args=())
    assert copy.copy(op) is op
    assert copy.deepcopy(op) is op
    assert copy.deepcopy([op, {"op": op}]) == [op, {"op": op}]


def test_an_op_is_pickled_by_name(registry: Registry, ns: str) -> None:
    op = customops.custom_op(f"{ns}::increment", increment, mutates_args=())
    try:
        assert pickle.loads(pickle.dumps(op)) is op
        assert pickle.loads(pickle.dumps([op, op])) == [op, op]
    finally:
        op.unregister()


def test_an_op_of_another_registry_is_pickled_by_name(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::increment", increment, mutates_args=())
    assert pickle.loads(pickle.dumps(op)) is op


class Holder(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.op(x) * self.weight
        return result


def test_a_module_may_hold_an_op(registry: Registry, ns: str) -> None:
    module = Holder(registry.custom_op(f"{ns}::increment", increment, mutates_args=()))
    module.op.register_fake(torch.empty_like)
    twin = copy.deepcopy(module)
    assert twin.op is module.op
    assert twin.weight is not module.weight
    assert list(module.state_dict()) == ["weight"]
    x = torch.ones(2)
    for program in (module, twin, torch.compile(module, fullgraph=True, backend="aot_eager")):
        assert_close(program(x), torch.full((2,), 4.0))
    (gradient,) = torch.autograd.grad(twin(x).sum(), twin.weight)
    assert gradient.item() == 4.0


# Compiled calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["object", "method", "packet", "overload"])
def test_a_call_in_a_compiled_function_is_one_node_and_compiles_once(registry: Registry, ns: str, form: str) -> None:
    op = define_functional(registry, ns)
    call: Any = {
        "object": op,
        "method": op.__call__,
        "packet": getattr(torch.ops, ns).scale,
        "overload": op._opoverload,
    }[form]
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def program(x: Tensor) -> Tensor:
        result: Tensor = call(x.sin()).cos()
        return result

    compiled = torch.compile(program, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            x = torch.full((3,), float(seed))
            assert_close(compiled(x), (x.sin() * 2).cos())
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert len(targets) == 1
    assert targets[0] in (op._opoverload, op._opoverload._overloadpacket)


def test_the_op_object_itself_can_be_compiled(registry: Registry, ns: str) -> None:
    op, counter = define_functional(registry, ns), torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(op, fullgraph=True, backend=counter)
    x = torch.randn(3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_close(compiled(x), x * 2)
        assert_close(compiled(x + 1), (x + 1) * 2)
    assert (counter.frame_count, counter.op_count) == (1, 1)


def test_one_compiled_function_with_two_ops_does_not_mix_them_up(registry: Registry, ns: str) -> None:
    one = registry.custom_op(f"{ns}::one", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    two = registry.custom_op(f"{ns}::two", lambda x: x * 5, mutates_args=(), schema="(Tensor x) -> Tensor")
    for op in (one, two):
        op.register_fake(torch.empty_like)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(op: Any, x: Tensor) -> Any:
        return op(x)

    x = torch.randn(3)
    assert_close(program(one, x), x + 1)
    assert_close(program(two, x), x * 5)
    assert_close(program(one, x), x + 1)


def test_a_kernel_registered_after_compilation_counts(registry: Registry, ns: str) -> None:
    op = define_functional(registry, ns)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    x = torch.randn(3)
    assert_close(compiled(x), x * 2)
    op.register_kernel("cpu", lambda x, by: x - by)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_close(compiled(x), x - 2)


def test_make_fx_and_export_record_the_call(registry: Registry, ns: str) -> None:
    op, x = define_functional(registry, ns), torch.randn(3)

    class Program(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = op(x, 3.0).cos()
            return result

    traced = make_fx(Program(), tracing_mode="symbolic")(x)
    exported = torch.export.export(Program(), (x,))
    for graph in (traced, exported.graph_module):
        assert op._opoverload in [node.target for node in graph.graph.nodes]
    assert_close(traced(x), (x * 3).cos())
    assert_close(exported.module()(x), (x * 3).cos())
