"""test_aot_dispatch_*: operators and functions that behave otherwise once traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.libraries import Ops

import customops
from customops.checks import NotExercised, Trial, _memory, aot_autograd_check, aot_dispatch_check
from customops.checks._inputs import tensors_in
from customops.checks.aot_dispatch import check_backward
from customops.errors import CheckError

aten = torch.ops.aten
dynamic_and_static = pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 3, requires_grad=True)


# -- failures ----------------------------------------------------------------------------------


class Counter:
    """Makes an operator whose result depends on how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.clone() * self.calls


@dynamic_and_static
def test_hidden_state(define: Ops, dynamic: bool) -> None:
    op = define("f(Tensor x) -> Tensor", Counter(), key="CompositeImplicitAutograd")
    with pytest.raises(CheckError, match="eager-mode PyTorch vs AOTDispatcher") as caught:
        aot_dispatch_check(op, (torch.tensor(1.0, requires_grad=True),), dynamic=dynamic)
    assert "output 0 differs" in str(caught.value)
    assert "Absolute difference: " in str(caught.value)
    assert "between two calls in eager mode, too" in str(caught.value)
    assert isinstance(caught.value.__cause__, AssertionError)


def test_value_read_while_tracing(define: Ops, x: torch.Tensor) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_compiling() or type(x) is not torch.Tensor else x * 3

    op = define("f(Tensor x) -> Tensor", kernel, key="CompositeImplicitAutograd")
    with pytest.raises(CheckError, match="output 0 differs") as caught:
        aot_dispatch_check(op, (x,), dynamic=True)
    assert "a trace is made once" in str(caught.value)


class WrongOnceTraced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad if type(grad) is torch.Tensor else grad * 2


def test_gradients_that_differ(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x) -> Tensor", WrongOnceTraced.apply, key="CompositeImplicitAutograd")
    with pytest.raises(CheckError, match="the gradient of x differs in eager-mode PyTorch vs AOTDispatcher"):
        aot_dispatch_check(op, (x,), dynamic=True)
    aot_dispatch_check(op, (x.detach(),), dynamic=True)


def test_tolerance(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", Counter(), key="CompositeImplicitAutograd")
    args = (torch.tensor(1.0),)
    with pytest.raises(CheckError):
        aot_dispatch_check(op, args, dynamic=True)
    aot_dispatch_check(op, args, dynamic=True, atol=10.0, rtol=0.01)
    with pytest.raises(CheckError):
        aot_dispatch_check(op, args, dynamic=True, atol=0.0, rtol=0.0)


def test_zero_tolerance_is_exact(define: Ops) -> None:
    class Drift(Counter):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + 1e-7 * self.calls

    op = define("f(Tensor x) -> Tensor", Drift(), key="CompositeImplicitAutograd")
    args = (torch.ones(3),)
    aot_dispatch_check(op, args, dynamic=True)
    with pytest.raises(CheckError, match="output 0 differs"):
        aot_dispatch_check(op, args, dynamic=True, atol=0.0, rtol=0.0)


def test_returns_with_alias_annotations(define: Ops) -> None:
    op = define("f(Tensor(a!) x) -> Tensor(a!)", lambda x: x.sin_(), lambda x: x)
    message = "We only support functionalizing operators whose outputs do not have alias annotations"
    with pytest.raises(CheckError, match=message) as caught:
        aot_dispatch_check(op, (torch.ones(2),), dynamic=True)
    assert "fails when traced by AOTDispatcher" in str(caught.value)


def test_numpy_in_a_backward(registry: customops.Registry, ns: str) -> None:
    """The finding names the line of the formula, and what to do: it is traced, where there is no data."""

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.from_numpy(x.detach().numpy() * 2)

    op = registry.custom_op(f"{ns}::square", lambda x: x * x, schema="(Tensor x) -> Tensor", mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    with pytest.raises(CheckError) as caught:
        aot_dispatch_check(op._opoverload, (torch.ones(2, requires_grad=True),), dynamic=True)
    line = backward.__code__.co_firstlineno + 2
    assert caught.value.where == f"backward ({__file__}:{line})"
    assert "functions of torch" in str(caught.value.fix)


def test_no_fake(define: Ops, x: torch.Tensor) -> None:
    with pytest.raises(CheckError, match=f"{define.ns}.f.default"):
        aot_dispatch_check(define("f(Tensor x) -> Tensor", torch.clone), (x.detach(),), dynamic=True)


@torch.library.custom_op("checks_aot::no_backward", mutates_args=())
def no_backward(x: torch.Tensor) -> torch.Tensor:
    return x * 2


no_backward.register_fake(torch.empty_like)


def test_no_backward(x: torch.Tensor) -> None:
    with pytest.raises(CheckError, match="the operator's backward fails in eager mode") as caught:
        aot_dispatch_check(no_backward._opoverload, (x,), dynamic=True)
    assert "no autograd formula" in str(caught.value)
    aot_dispatch_check(no_backward._opoverload, (x.detach(),), dynamic=True)


def test_written_arguments_are_compared(define: Ops) -> None:
    counter = Counter()

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(counter(x))

    op = define("f(Tensor x, Tensor(a!) out) -> ()", kernel, lambda x, out: None)
    out = torch.zeros(3)
    with pytest.raises(CheckError, match="argument out after the call differs"):
        aot_dispatch_check(op, (torch.ones(3), out), dynamic=True)
    assert torch.equal(out, torch.zeros(3))


# -- what passes -------------------------------------------------------------------------------

square = torch.randn(4, 4)
graded = torch.randn(4, 4, requires_grad=True)
ATEN: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "sin": (aten.sin.default, (graded,), {}),
    "add_, leaf": (aten.add_.Tensor, (graded, square), {}),
    "add_, same": (aten.add_.Tensor, (square, square), {}),
    "sort": (aten.sort.default, (graded,), {}),
    "mm": (aten.mm.default, (graded, graded), {}),
    "mm_out": (aten.mm.out, (square, square), {"out": torch.empty(4, 4)}),
    "split": (aten.split.Tensor, (graded, 2), {}),
    "t_": (aten.t_.default, (square,), {}),
    "batch_norm": (
        aten.native_batch_norm.default,
        (graded, None, None, square[0], square[1].abs(), True, 0.1, 0.1),
        {},
    ),
    "dropout": (aten.dropout.default, (graded, 0.5, True), {}),
    "bernoulli_": (aten.bernoulli_.float, (square,), {}),
    "foreach": (aten._foreach_add_.Scalar, ([square, graded], 1), {}),
    "non-leaf": (aten.relu_.default, (graded * 2,), {}),
    "float8": (aten.clone.default, (graded.to(torch.float8_e5m2),), {}),
    "complex": (aten.mul.Tensor, (torch.randn(3, dtype=torch.complex64, requires_grad=True), 2), {}),
    "NaN": (aten.sqrt.default, (-square.abs(),), {}),
    "int": (aten.add.Tensor, (torch.arange(3), 1), {}),
    "gaps": (aten.add.Tensor, (graded[::2], graded.t()[::2]), {}),
    "expanded": (aten.sum.default, (square.expand(3, 4, 4),), {}),
    "overlapping": (aten.add.Tensor, (torch.arange(5).as_strided((3, 3), (1, 1)), 1), {}),
    "empty": (aten.add.Tensor, (graded[:0], graded[:0]), {}),
    "keywords": (aten.addmm.default, (), {"self": square, "mat1": graded, "mat2": square}),
    "list": (aten.cat.default, ([graded, graded[:2], square], 0), {}),
    "None": (
        aten.convolution.default,
        (torch.randn(1, 1, 4), torch.randn(1, 1, 2), None, [1], [0], [1], False, [0], 1),
        {},
    ),
    "factory": (aten.full.default, ([3], 2), {"device": torch.device("cpu")}),
    "random factory": (aten.rand.default, ([3],), {}),
    "unused input": (aten.where.self, (torch.ones(4, 4) > 0, graded, graded * 0), {}),
}


@dynamic_and_static
@pytest.mark.parametrize(("op", "args", "kwargs"), ATEN.values(), ids=ATEN)
def test_aten_passes(op: Any, args: Any, kwargs: Any, dynamic: bool) -> None:
    before = [_memory.bits(x).clone() for x in tensors_in((args, kwargs))]
    aot_dispatch_check(op, args, kwargs, dynamic=dynamic)
    assert all(map(torch.equal, before, map(_memory.bits, tensors_in((args, kwargs)))))


def test_output_sizes_that_depend_on_data() -> None:
    aot_dispatch_check(aten.nonzero.default, (square > 0,), dynamic=True)
    with pytest.raises(CheckError, match="DynamicOutputShapeException"):
        aot_dispatch_check(aten.nonzero.default, (square > 0,), dynamic=False)


def test_no_tensors_at_all(define: Ops) -> None:
    op = define("f(int x) -> (int, float, bool)", lambda x: (x, 0.5, True), key="CompositeExplicitAutograd")
    aot_dispatch_check(op, (3,), dynamic=True)


def test_hooks_and_gradients_of_the_inputs_are_left_alone(x: torch.Tensor) -> None:
    seen: list[torch.Tensor] = []
    x.register_hook(seen.append)
    aot_dispatch_check(aten.sin.default, (x,), dynamic=True)
    assert x.grad is None
    assert seen == []


def test_abstract_inputs_are_not_exercised() -> None:
    with pytest.raises(NotExercised, match="no data"):
        aot_dispatch_check(aten.sin.default, (torch.empty(3, device="meta"),), dynamic=True)


# -- functions ---------------------------------------------------------------------------------


@dynamic_and_static
@pytest.mark.parametrize("check_gradients", [False, "auto"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("func", [torch.clone, torch.detach])
def test_functions_without_gradients(func: Any, requires_grad: bool, check_gradients: Any, dynamic: bool) -> None:
    x = torch.randn(3, requires_grad=requires_grad)
    aot_autograd_check(func, (x,), {}, dynamic, check_gradients=check_gradients)


def test_gradients_that_are_not_there(x: torch.Tensor) -> None:
    with pytest.raises(CheckError, match="no gradients to check"):
        aot_autograd_check(torch.detach, (x,), {}, dynamic=True)
    aot_autograd_check(torch.sin, (x,), {}, dynamic=True)


def test_functions_of_nested_inputs(x: torch.Tensor) -> None:
    def func(xs: list[torch.Tensor], *, y: dict[str, torch.Tensor], scale: float) -> dict[str, Any]:
        xs[0].mul_(scale)
        return {"sum": xs[0] + y["y"], "shape": xs[0].shape[0], "dtype": xs[0].dtype, "none": None}

    aot_autograd_check(func, ([x],), {"y": {"y": x}, "scale": 2.0}, dynamic=True)


def test_functions_that_differ(x: torch.Tensor) -> None:
    counter = Counter()
    with pytest.raises(CheckError, match="output differs in eager-mode PyTorch vs AOTDispatcher"):
        aot_autograd_check(lambda x: counter(x), (x,), {}, dynamic=False)


# -- gradients that the sample does not ask for --------------------------------------------------


def sine(registry: customops.Registry, ns: str, fake_of_backward: Any) -> Any:
    def slope(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad * x.cos()

    backward = registry.custom_op(f"{ns}::sine_backward", slope, mutates_args=())
    backward.register_fake(fake_of_backward)
    op = registry.custom_op(f"{ns}::sine", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: backward(ctx.saved_tensors[0], grad), setup_context=save_first)
    return op


def save_first(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def test_a_backward_that_cannot_be_traced(registry: customops.Registry, ns: str) -> None:
    right = sine(registry, ns, lambda x, grad: torch.empty_like(x))
    check_backward(Trial(right._opoverload, (torch.randn(3, 4),)))
    wrong = sine(registry, f"{ns}_wrong", lambda x, grad: x.new_empty(x.shape[1:]))
    with pytest.raises(CheckError):
        check_backward(Trial(wrong._opoverload, (torch.randn(3, 4),)))


def test_a_backward_that_looks_at_values(registry: customops.Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::cube", lambda x: x**3, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x) if not grad.any() else 3 * x * x * grad

    op.register_autograd(backward, setup_context=save_first)
    with pytest.raises(CheckError, match="when traced"):
        check_backward(Trial(op._opoverload, (torch.randn(3),)))


def test_gradients_that_are_compared_elsewhere(registry: customops.Registry, ns: str, x: torch.Tensor) -> None:
    op = sine(registry, ns, lambda x, grad: torch.empty_like(x))
    with pytest.raises(NotExercised, match="test_aot_dispatch_dynamic"):
        check_backward(Trial(op._opoverload, (x,)))
    bare = registry.custom_op(f"{ns}::bare", torch.cos, mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(NotExercised):
        check_backward(Trial(bare._opoverload, (torch.randn(3),)))
