"""opcheck as a whole: its results and errors, and operators of many kinds that pass all checks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import customops
from customops import Registry, legacy
from customops.checks import CHECKS, DEFAULT_CHECKS, Outcome, _memory, opcheck, run_check
from customops.checks._inputs import tensors_in
from customops.errors import CheckError, OpCheckError

aten = torch.ops.aten
SUCCESS = dict.fromkeys(DEFAULT_CHECKS, "SUCCESS")


class Ops:
    """Defines operators in a namespace of its own."""

    def __init__(self, ns: str) -> None:
        self.ns = ns
        self.lib = torch.library.Library(ns, "FRAGMENT")

    def __call__(self, schema: str, **kernels: Callable[..., Any]) -> Any:
        name = schema.partition("(")[0]
        self.lib.define(schema)
        for key, kernel in kernels.items():
            self.lib.impl(name, kernel, key)
        packet = getattr(getattr(torch.ops, self.ns), name.partition(".")[0])
        return getattr(packet, name.partition(".")[2] or "default")


@pytest.fixture
def define(ns: str) -> Iterator[Ops]:
    ops = Ops(ns)
    yield ops
    ops.lib._destroy()


@pytest.fixture
def bad(define: Ops) -> Any:
    """An operator that is right but for its schema."""
    return define("bad(Tensor x) -> Tensor", CompositeExplicitAutograd=lambda x: x[:])


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3)


# -- results and errors ------------------------------------------------------------------------


def test_the_table() -> None:
    assert DEFAULT_CHECKS == (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    assert set(CHECKS) == {*DEFAULT_CHECKS, "test_aot_dispatch_static"}


def test_results_are_in_order(x: torch.Tensor) -> None:
    assert list(opcheck(aten.sin.default, (x,)).items()) == list(SUCCESS.items())


@pytest.mark.parametrize("names", ["test_schema", ["test_faketensor", "test_schema"], ("test_schema",), [], "ALL"])
def test_chosen_checks(x: torch.Tensor, names: Any) -> None:
    expected = list(CHECKS) if names == "ALL" else [names] if isinstance(names, str) else list(names)
    assert list(opcheck(aten.sin.default, [x], test_utils=names)) == expected


def test_failures_are_raised(bad: Any, x: torch.Tensor) -> None:
    with pytest.raises(OpCheckError, match="is not defined to alias output") as caught:
        opcheck(bad, (x,))
    assert str(caught.value).startswith(f"opcheck(op, ...): test_schema failed with {bad.name()}: Argument x")
    assert isinstance(caught.value.__cause__, CheckError)


def test_failures_are_stored(bad: Any, x: torch.Tensor) -> None:
    results = opcheck(bad, (x,), raise_exception=False)
    assert isinstance(results.pop("test_schema"), RuntimeError)
    assert results == {name: "SUCCESS" for name in DEFAULT_CHECKS if name != "test_schema"}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 2


def permuted(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


# item 80: what is wrong, the kernels that make it so, and the phrase that names it
FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "write": (
        "Tensor x",
        {"CompositeExplicitAutograd": lambda x: x.add_(1).clone()},
        "Argument x is not defined as mutable but was mutated",
    ),
    "alias": (
        "Tensor x",
        {"CompositeExplicitAutograd": lambda x: x[:]},
        "Argument x is not defined to alias output but was aliasing",
    ),
    "shape": ("Tensor x", {"CPU": torch.clone, "Meta": lambda x: x.new_empty(7)}, "Shapes .* are not equal"),
    "stride": ("Tensor x", {"CPU": permuted, "Meta": lambda x: x.new_empty(x.shape)}, "Stride mismatch"),
    "no fake": ("Tensor x", {"CPU": torch.clone}, r"NS\.f\.default"),
    "alias annotation": (
        "Tensor(a) x",
        {"CPU": lambda x: x.view_as(x), "Meta": lambda x: x.view_as(x)},
        "We only support functionalizing operators whose outputs do not have alias annotations",
    ),
    "formula below autograd": (
        "Tensor x",
        {"CPU": Double.apply, "Meta": torch.empty_like},
        "does not have an autograd kernel",
    ),
    "formula below autograd, by device": (
        "Tensor x",
        {"CPU": Double.apply, "CUDA": Double.apply, "Meta": torch.empty_like},
        "does not have an autograd kernel",
    ),
}


@pytest.mark.parametrize(("argument", "kernels", "phrase"), FAULTS.values(), ids=FAULTS)
def test_faults_are_found(define: Ops, argument: str, kernels: dict[str, Any], phrase: str) -> None:
    returns = "Tensor(a)" if "(a)" in argument else "Tensor"
    op = define(f"f({argument}) -> {returns}", **kernels)
    with pytest.raises(OpCheckError, match=phrase.replace("NS", define.ns)):
        opcheck(op, (torch.rand(3, 2, requires_grad="autograd" in phrase),))


# item 80
def test_an_op_of_the_older_api_without_a_formula_is_found(ns: str) -> None:
    legacy.custom_op(f"{ns}::f", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::f", func=torch.clone)
    legacy.impl_abstract(f"{ns}::f", func=torch.empty_like)
    op = getattr(torch.ops, ns).f.default
    with pytest.raises(OpCheckError, match="Autograd has not been implemented for operator"):
        opcheck(op, (torch.ones(2, requires_grad=True),))
    assert opcheck(op, (torch.ones(2),)) == SUCCESS
    legacy._destroy(f"{ns}::f")


# item 78
@pytest.mark.parametrize("requires_grad", [False, True])
def test_every_handle_to_an_op_of_ours(registry: Registry, ns: str, requires_grad: bool) -> None:
    op = registry.custom_op(f"{ns}::f", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad * torch.cos(*ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    for handle in (op, op._opoverload, getattr(torch.ops, ns).f):
        assert customops.opcheck(handle, (torch.rand(3, requires_grad=requires_grad),)) == SUCCESS
        assert customops.opcheck(handle, (), {"x": torch.rand(3)}) == SUCCESS


def test_the_comparison_stays_reachable(define: Ops) -> None:
    calls: list[int] = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + 0.1 * len(calls)

    op = define("f(Tensor x) -> Tensor", CompositeImplicitAutograd=kernel)
    with pytest.raises(OpCheckError, match="eager-mode PyTorch vs AOTDispatcher") as caught:
        opcheck(op, (torch.tensor(1.0),))
    context = caught.value.__context__
    assert context is not None
    assert "Absolute difference:" in str(context.__context__)
    assert opcheck(op, (torch.tensor(1.0),), atol=3, rtol=0.01) == SUCCESS


@pytest.mark.parametrize("tolerance", [{"atol": 0.0}, {"rtol": 1e-3}])
def test_tolerances_go_together(x: torch.Tensor, tolerance: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give both"):
        opcheck(aten.sin.default, (x,), **tolerance)


@pytest.mark.parametrize("op", [torch.sin, "aten::sin", None, object()])
def test_what_is_no_operator(op: Any, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="OpOverload"):
        opcheck(op, (x,))


def test_packets(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x) -> Tensor", CompositeImplicitAutograd=torch.sin)
    packet = getattr(torch.ops, define.ns).f
    assert opcheck(packet, (x,)) == SUCCESS
    assert op.overloadpacket is packet
    with pytest.raises(ValueError, match=r"aten.sin has \d overloads") as caught:
        opcheck(aten.sin, (x,))
    assert "default, out" in str(caught.value)
    assert "aten.sin.default" in str(caught.value)


def test_unknown_checks(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="test_utils to be subset of") as caught:
        opcheck(aten.sin.default, (x,), test_utils=["test_schema", "test_vibes"])
    assert "got:      'test_vibes'" in str(caught.value)


def test_args_are_a_tuple(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="args holds the arguments of one call") as caught:
        opcheck(aten.sin.default, x)  # type: ignore[arg-type]
    assert "(x,)" in str(caught.value)


def test_outcomes(bad: Any, x: torch.Tensor) -> None:
    passed = run_check("test_schema", aten.sin.default, (x,))
    assert passed == Outcome("test_schema", "passed", seconds=passed.seconds)
    assert passed.seconds > 0
    failed = run_check("test_schema", bad, (x,), {}, None, None)
    assert failed.status == "failed"
    assert isinstance(failed.error, CheckError)
    skipped = run_check("test_autograd_registration", aten.sin.default, (x,))
    assert (skipped.status, skipped.reason) == ("not exercised", "no input has requires_grad=True")


@pytest.mark.parametrize("name", CHECKS)
def test_abstract_inputs(name: str) -> None:
    x = torch.empty(3, device="meta", requires_grad=True)
    assert opcheck(aten.sin.default, (x,), test_utils=name) == {name: "SUCCESS"}
    assert run_check(name, aten.sin.default, (x,)).status == "not exercised"


def test_inputs_and_random_state_are_left_alone(define: Ops) -> None:
    def kernel(x: torch.Tensor, ys: list[torch.Tensor]) -> torch.Tensor:
        x.zero_()
        ys[0].zero_()
        return torch.rand(3)

    op = define("f(Tensor x, Tensor(a!)[] ys) -> Tensor", CPU=kernel)
    x, y = torch.randn(3), torch.randn(3, requires_grad=True)
    before, state = (x.clone(), y.detach().clone()), torch.get_rng_state()
    opcheck(op, (x, [y]), raise_exception=False, test_utils="ALL")
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert y.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_but_torch_is_needed() -> None:
    script = """
import json, sys, torch
from customops.checks import opcheck
early = "torch._dynamo" in sys.modules
@torch.library.custom_op("fresh::f", mutates_args=())
def f(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
f.register_fake(torch.empty_like)
results = opcheck(f, (torch.randn(3),), test_utils="ALL")
print(json.dumps([early, list(results.values()), sorted(sys.modules)]))
"""
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    early, results, modules = json.loads(run.stdout)
    assert not early, "dynamo is loaded when the AOT check runs, not before"
    assert results == ["SUCCESS"] * len(CHECKS)
    tests_only = {"expecttest", "hypothesis", "numpy.testing", "pytest", "torch.testing._internal.common_utils"}
    assert not tests_only & set(modules)


# -- operators that pass: autograd and fakes of the usual kinds ----------------------------------


def to_numpy(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()


@torch.library.custom_op("checks_opcheck::cube", mutates_args=())
def cube(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(to_numpy(x) ** 3), torch.tensor(3 * to_numpy(x) ** 2)


cube.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))


def cube_backward(ctx: Any, grad: torch.Tensor, grad_slope: torch.Tensor) -> torch.Tensor:
    x, slope = ctx.saved_tensors
    result: torch.Tensor = mul(grad, slope) + 6 * mul(grad_slope, x)
    return result


cube.register_autograd(
    cube_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1])
)


@torch.library.custom_op("checks_opcheck::mul", mutates_args=())
def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tensor(to_numpy(x) * to_numpy(y))


def mul_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    x, y = ctx.saved_tensors
    return grad * y if ctx.needs_input_grad[0] else None, grad * x if ctx.needs_input_grad[1] else None


mul.register_fake(lambda x, y: (x * y).contiguous())
mul.register_autograd(mul_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("checks_opcheck::mul_scalar", mutates_args=())
def mul_scalar(x: torch.Tensor, *, scalar: float) -> torch.Tensor:
    return torch.tensor(to_numpy(x) * scalar)


def mul_scalar_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.scalar = keyword_only_inputs["scalar"]


mul_scalar.register_fake(lambda x, *, scalar: (x * scalar).contiguous())
mul_scalar.register_autograd(lambda ctx, grad: grad * ctx.scalar, setup_context=mul_scalar_setup)


@torch.library.custom_op("checks_opcheck::sort", mutates_args=())
def sort(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order = np.argsort(to_numpy(x), axis=dim)
    values = np.take_along_axis(to_numpy(x), order, axis=dim)
    return torch.tensor(values), torch.tensor(order), torch.tensor(np.argsort(order, axis=dim))


def sort_fake(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64), torch.empty_like(x, dtype=torch.int64)


def sort_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dim = inputs[1]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def sort_backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
    order, inverse = ctx.saved_tensors
    return take(grad, inverse, order, ctx.dim), None


sort.register_fake(sort_fake)
sort.register_autograd(sort_backward, setup_context=sort_setup)


@torch.library.custom_op("checks_opcheck::take", mutates_args=())
def take(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.tensor(np.take_along_axis(to_numpy(x), to_numpy(order), dim))


def take_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dim = inputs[3]
    ctx.save_for_backward(inputs[1], inputs[2])


def take_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    order, inverse = ctx.saved_tensors
    return take(grad, inverse, order, ctx.dim), None, None, None


take.register_fake(lambda x, order, inverse, dim: torch.empty_like(x))
take.register_autograd(take_backward, setup_context=take_setup)


@torch.library.custom_op("checks_opcheck::nonzero", mutates_args=())
def nonzero(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(np.stack(np.nonzero(to_numpy(x)), axis=1))


@nonzero.register_fake
def nonzero_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.dim()), dtype=torch.int64)


@torch.library.custom_op("checks_opcheck::nms", mutates_args=())
def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    corners, left, kept = to_numpy(boxes), list(np.argsort(-to_numpy(scores))), []
    while left:
        best, *rest = left
        kept.append(best)
        size = np.minimum(corners[rest, 2:], corners[best, 2:]) - np.maximum(corners[rest, :2], corners[best, :2])
        shared = np.prod(np.maximum(size, 0), axis=1)
        areas = np.prod(corners[:, 2:] - corners[:, :2], axis=1)
        left = [i for i, s in zip(rest, shared, strict=True) if s <= threshold * (areas[best] + areas[i] - s)]
    return torch.tensor(kept)


@nms.register_fake
def nms_fake(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


@torch.library.custom_op("checks_opcheck::view_copy", mutates_args=())
def view_copy(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.tensor(to_numpy(x).reshape(shape).copy())


def view_copy_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape = inputs[0].shape


view_copy.register_fake(lambda x, shape: x.clone().view(shape).clone())
view_copy.register_autograd(lambda ctx, grad: (view_copy(grad, ctx.shape), None), setup_context=view_copy_setup)


@torch.library.custom_op("checks_opcheck::cat", mutates_args=())
def cat(xs: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.tensor(np.concatenate([to_numpy(x) for x in xs], axis=dim))


def cat_setup(ctx: Any, inputs: Any, output: Any) -> None:
    xs, ctx.dim = inputs
    ctx.sizes = [x.shape[ctx.dim] for x in xs]


def cat_backward(ctx: Any, grad: torch.Tensor) -> tuple[list[torch.Tensor], None]:
    return split_copy(grad, list(np.cumsum(ctx.sizes)[:-1]), ctx.dim), None


cat.register_fake(lambda xs, dim: torch.cat(xs, dim))
cat.register_autograd(cat_backward, setup_context=cat_setup)


@torch.library.custom_op("checks_opcheck::split_copy", mutates_args=())
def split_copy(x: torch.Tensor, splits: Sequence[int], dim: int) -> list[torch.Tensor]:
    return [torch.tensor(part) for part in np.split(to_numpy(x), splits, axis=dim)]


def split_copy_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dim = inputs[2]


split_copy.register_fake(lambda x, splits, dim: [part.clone() for part in torch.tensor_split(x, splits, dim)])
split_copy.register_autograd(lambda ctx, grads: (cat(grads, ctx.dim), None, None), setup_context=split_copy_setup)


@torch.library.custom_op("checks_opcheck::split_copy_with_int", mutates_args=())
def split_copy_with_int(x: torch.Tensor, splits: Sequence[int], dim: int) -> tuple[list[torch.Tensor], int]:
    return split_copy(x, splits, dim), len(splits)


split_copy_with_int.register_fake(
    lambda x, splits, dim: ([part.clone() for part in torch.tensor_split(x, splits, dim)], len(splits))
)
split_copy_with_int.register_autograd(
    lambda ctx, grads, _: (cat(grads, ctx.dim), None, None), setup_context=split_copy_setup
)


@torch.library.custom_op("checks_opcheck::write_all", mutates_args={"x", "ys", "z"})
def write_all(x: torch.Tensor, ys: Sequence[torch.Tensor], z: torch.Tensor | None = None, scale: float = 2.0) -> None:
    for tensor in [x, *ys] if z is None else [x, *ys, z]:
        tensor.mul_(scale)


@torch.library.custom_op("checks_opcheck::noise", mutates_args=())
def noise(shape: Sequence[int], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.rand(shape, device=device, dtype=dtype)


noise.register_fake(lambda shape, device, dtype=None: torch.empty(shape, device=device, dtype=dtype))


def rand(*size: int, grad: bool = True) -> torch.Tensor:
    return torch.rand(*size, requires_grad=grad)


order = torch.argsort(torch.rand(3, 5), dim=1)
boxes = torch.rand(20, 4).cumsum(dim=1)
CUSTOM: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "cube": (cube, (rand(3),), {}),
    "cube, no grad": (cube, (rand(3, grad=False),), {}),
    "cube, empty": (cube, (rand(0, 2),), {}),
    "mul": (mul, (rand(2, 3), rand(3)), {}),
    "mul, one grad": (mul, (rand(2, 3), rand(3, grad=False)), {}),
    "mul, same": (mul, (boxes, boxes), {}),
    "mul_scalar": (mul_scalar, (rand(4),), {"scalar": 3.14}),
    "sort": (sort, (rand(3, 5), 1), {}),
    "sort, negative dim": (sort, (rand(3, 5), -2), {}),
    "take": (take, (rand(3, 5), order, torch.argsort(order, dim=1), 1), {}),
    "nonzero": (nonzero, (torch.tensor([[0.0, 1.0], [2.0, 3.0]]),), {}),
    "nms": (nms, (boxes, torch.rand(20), 0.3), {}),
    "view_copy": (view_copy, (rand(2, 3, 4), [2, 12]), {}),
    "cat": (cat, ([rand(2, 3), rand(4, 3), rand(5, 3, grad=False)], 0), {}),
    "split_copy": (split_copy, (rand(2, 9), [1, 3, 6], 1), {}),
    "split_copy_with_int": (split_copy_with_int, (rand(2, 9), [1, 3, 6], 1), {}),
    "write_all": (write_all, (rand(3, grad=False), [rand(2, grad=False)]), {"z": rand(4, grad=False)}),
    "write_all, defaults": (write_all, (rand(3, grad=False), []), {}),
    "noise": (noise, ([3, 4], torch.device("cpu")), {"dtype": torch.float64}),
}


@pytest.mark.parametrize(("op", "args", "kwargs"), CUSTOM.values(), ids=CUSTOM)
def test_custom_ops_pass(op: Any, args: Any, kwargs: Any) -> None:
    before = [_memory.bits(x).clone() for x in tensors_in((args, kwargs))]
    assert opcheck(op, args, kwargs) == SUCCESS
    assert all(map(torch.equal, before, map(_memory.bits, tensors_in((args, kwargs)))))


ATEN: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "sin": (aten.sin.default, (rand(3),), {}),
    "add_": (aten.add_.Tensor, (rand(3, grad=False), rand(3, grad=False)), {"alpha": 2}),
    "sort": (aten.sort.default, (rand(3, 4),), {}),
    "mm": (aten.mm.default, (rand(2, 3), rand(3, 4)), {}),
    "mm.out": (aten.mm.out, (rand(2, 3, grad=False), rand(3, 4, grad=False)), {"out": torch.empty(2, 4)}),
    "view": (aten.view.default, (rand(2, 3), [6]), {}),
    "split": (aten.split.Tensor, (rand(4, 3), 2), {}),
    "composite": (aten.silu.default, (rand(3),), {}),
}


@pytest.mark.parametrize(("op", "args", "kwargs"), ATEN.values(), ids=ATEN)
def test_aten_passes(op: Any, args: Any, kwargs: Any) -> None:
    assert opcheck(op, args, kwargs) == SUCCESS


@pytest.mark.gpu
@pytest.mark.parametrize("requires_grad", [False, True])
def test_on_a_gpu(define: Ops, requires_grad: bool) -> None:
    x = torch.rand(3, 4, device="cuda", requires_grad=requires_grad)
    for op, args in [
        (aten.sin.default, (x,)),
        (aten.sort.default, (x[:, ::2],)),
        (aten.dropout.default, (x, 0.5, True)),
        (aten.mul.Tensor, (x, torch.tensor(2.0))),
    ]:
        assert opcheck(op, args) == SUCCESS
    with pytest.raises(OpCheckError, match="is not defined as mutable but was mutated"):
        opcheck(define("f(Tensor x) -> Tensor", CUDA=lambda x: x.mul_(2) + 1), (x.detach(),))


@pytest.mark.gpu
def test_random_state_of_a_gpu_is_left_alone() -> None:
    x = torch.rand(8, device="cuda")
    state = torch.cuda.get_rng_state()
    assert opcheck(aten.bernoulli.p, (x, 0.5)) == SUCCESS
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.gpu
def test_pinned_memory_stays_pinned(define: Ops) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        assert x.is_pinned()
        return x.clone()

    op = define("f(Tensor x) -> Tensor", CPU=kernel)
    assert opcheck(op, (torch.rand(3).pin_memory(),), test_utils="test_schema") == {"test_schema": "SUCCESS"}


# What pytest prints ---------------------------------------------------------------------------------------------

FAILURES = """
import customops
import torch
from torch import Tensor


@customops.custom_op("{ns}::hidden_write", mutates_args=())
def hidden_write(x: Tensor) -> Tensor:
    x.add_(1)
    return x.clone()


@customops.custom_op("{ns}::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x.clone()


@customops.custom_op("{ns}::other_shape", mutates_args=())
def other_shape(x: Tensor) -> Tensor:
    return x.clone()


@customops.custom_op("{ns}::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    raise ValueError("of the kernel")


@customops.custom_op("{ns}::other_type", mutates_args=())
def other_type(x: Tensor) -> Tensor:
    return x.numpy()


@customops.custom_op("{ns}::other_result", mutates_args=(), tags=torch.Tag.needs_fixed_stride_order)
def other_result(x: Tensor) -> Tensor:
    return torch.rand(x.shape)


other_shape.register_fake(lambda x: x.new_empty(7))
other_result.register_fake(torch.empty_like)


def test_hidden_write():
    customops.opcheck(hidden_write, (torch.ones(2),))


def test_without_fake():
    customops.opcheck(without_fake, (torch.ones(2),))


def test_other_shape():
    customops.opcheck(other_shape, (torch.ones(2),))


def test_fails():
    customops.opcheck(fails, (torch.ones(2),))


def test_backward():
    other_shape.register_autograd(lambda ctx, grad: (grad, grad))
    other_shape.register_fake(torch.empty_like)
    customops.opcheck(other_shape, (torch.ones(2, requires_grad=True),))


def test_call():
    fails(torch.ones(2, requires_grad=True))


def test_type():
    other_type(torch.ones(2))
"""


def test_a_failure_under_pytest_is_short(tmp_path: Path, ns: str) -> None:
    (tmp_path / "test_them.py").write_text(FAILURES.replace("{ns}", ns))
    command = [sys.executable, "-m", "pytest", "test_them.py", "-p", "no:cacheprovider", "--no-header", "-rN"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    parts = re.split(r"_{5,} (test_\w+) _{5,}\n", run.stdout)
    printed = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(printed) == set(re.findall(r"def (test_\w+)", FAILURES))
    for name, text in printed.items():
        assert len(text.splitlines()) < 40, text
        assert f"in {name}" in text or f"def {name}" in text
        assert "customops/checks" not in text
        assert "customops/_op.py" not in text
    assert ">       raise ValueError" in printed["test_fails"]  # the line of the kernel
    assert ">       raise ValueError" in printed["test_call"]
