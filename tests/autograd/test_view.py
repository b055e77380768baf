"""View ops: results that share memory with their input, and tell autograd so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

import customops
from customops import Registry
from customops.errors import AutogradError

SCHEMA = "(Tensor(a) t, int idx) -> Tensor(a)"


def select(t: Tensor, idx: int) -> Tensor:
    """What the ops here do; `torch.select` is the oracle."""
    return t[idx]


def save(ctx: Any, inputs: Any, output: Any) -> None:
    t, ctx.idx = inputs
    ctx.shape = t.shape
    ctx._is_pure_view = True


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    rows = [grad if i == ctx.idx else torch.zeros_like(grad) for i in range(ctx.shape[0])]
    return torch.stack(rows), None


def define(registry: Registry, ns: str, fn: Callable[..., Any] = select, *, differentiable: bool = True) -> Any:
    op = registry.custom_op(f"{ns}::select", fn, mutates_args=(), schema=SCHEMA)
    op.register_fake(select)
    if differentiable:
        op.register_autograd(backward, setup_context=save)
    return op


class Wrapper(Tensor):
    """Wraps a tensor. Runs what is called on the wrapped one, and custom ops by `handlers`."""

    inner: Tensor
    handlers: dict[Any, Callable[..., Any]] = {}  # noqa: RUF012
    seen: list[Any] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> Any:
        wrapper: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=requires_grad,
        )
        wrapper.inner = inner
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)

        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        kwargs = kwargs or {}
        run = cls.handlers.get(func, func)
        result = run(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        result = tree_map(lambda value: Wrapper(value) if isinstance(value, Tensor) else value, result)
        if func in cls.handlers:
            return result
        return return_and_correct_aliasing(func, args, kwargs, result)


def never(t: Tensor, idx: int) -> Tensor:
    raise AssertionError("the subclass handles the op")


@pytest.fixture
def wrapped(registry: Registry, ns: str) -> Any:
    """A view op whose kernel must not run, and that `Wrapper` handles."""
    op = define(registry, ns, never)
    Wrapper.handlers, Wrapper.seen = {op._opoverload: lambda t, idx: torch.select(t, 0, idx)}, []
    yield op
    Wrapper.handlers, Wrapper.seen = {}, []


def leaf() -> Tensor:
    return torch.arange(6.0).reshape(3, 2).clone().requires_grad_()


# Views of plain tensors -----------------------------------------------------------------------------------------


@pytest.mark.parity(26)
def test_the_result_is_a_view_of_the_input(registry: Registry, ns: str) -> None:
    op, t = define(registry, ns), torch.randn(3, 2)
    y = op(t, 1)
    assert_close(y, torch.select(t, 0, 1))
    assert y.data_ptr() == t[1].data_ptr()
    assert y._is_view()
    assert y._base is t
    y.zero_()
    assert t[1].tolist() == [0, 0]
    assert t._version == y._version == 1


@pytest.mark.parity(26)
def test_the_result_for_an_input_that_requires_grad(registry: Registry, ns: str) -> None:
    op, t = define(registry, ns), leaf()
    y = op(t, 1)
    assert y.requires_grad
    assert y._is_view()
    assert y._base is t
    y.pow(3).sum().backward()
    other = leaf()
    torch.select(other, 0, 1).pow(3).sum().backward()
    assert_close(t.grad, other.grad)


@pytest.mark.parity(26)
def test_writing_to_the_view_reaches_a_base_that_is_no_leaf_and_its_gradient(registry: Registry, ns: str) -> None:
    op = define(registry, ns)

    def program(select: Callable[[Tensor, int], Tensor], t: Tensor) -> tuple[Tensor, Tensor]:
        base = t * 2
        view = select(base, 1)
        view.mul_(view.detach() + 1)
        return base, view

    got_leaf, expected_leaf = leaf(), leaf()
    got = program(op, got_leaf)
    expected = program(lambda t, idx: torch.select(t, 0, idx), expected_leaf)
    assert_close(got, expected)
    assert got[1]._base is got[0]
    assert got[0]._version == expected[0]._version
    got[0].pow(2).sum().backward()
    expected[0].pow(2).sum().backward()
    assert_close(got_leaf.grad, expected_leaf.grad)


@pytest.mark.parity(26)
def test_a_view_of_a_leaf_is_not_written_to(registry: Registry, ns: str) -> None:
    op = define(registry, ns)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        op(leaf(), 1).mul_(2)
    with torch.no_grad():
        t = leaf()
        op(t, 1).mul_(2)
    assert t[1].tolist() == [4, 6]


@pytest.mark.parity(26)
def test_without_the_pure_view_flag_writing_is_refused(registry: Registry, ns: str) -> None:
    def save_without(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, inputs, output)
        ctx._is_pure_view = False

    op = define(registry, ns, differentiable=False)
    op.register_autograd(backward, setup_context=save_without)
    view = op(leaf() * 1, 1)
    assert_close(view.detach(), torch.tensor([2.0, 3.0]))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        view.mul_(2)


@pytest.mark.parity(26)
def test_a_view_op_without_a_formula(registry: Registry, ns: str) -> None:
    op, t = define(registry, ns, differentiable=False), leaf()
    y = op(t, 1)
    assert y._is_view()
    assert y.requires_grad
    with pytest.raises(AutogradError, match="no autograd formula"):
        y.sum().backward()


@pytest.mark.parity(26)
def test_a_view_of_a_view(registry: Registry, ns: str) -> None:
    op, base = define(registry, ns), torch.arange(24.0).view(24).clone()
    t = base.view(2, 3, 4)
    y = op(op(t, 1), 2)
    assert_close(y, base.view(2, 3, 4).select(0, 1).select(0, 2))
    assert y._base is base
    y.fill_(0)
    assert base[-4:].tolist() == [0, 0, 0, 0]


@pytest.mark.parity(26)
def test_a_method_and_a_function_register_the_gradient(registry: Registry, ns: str) -> None:
    op, t = define(registry, ns, differentiable=False), leaf()
    customops.register_autograd(op, backward, setup_context=save)
    op(t, 2).sum().backward()
    assert_close(t.grad, torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))


@pytest.mark.parity(26)
def test_several_views_in_a_list(registry: Registry, ns: str) -> None:
    def rows(t: Tensor) -> list[Tensor]:
        return list(t.unbind())

    op = registry.custom_op(f"{ns}::rows", rows, mutates_args=(), schema="(Tensor(a) t) -> Tensor(a)[]")
    t = torch.randn(3, 2)
    got = op(t)
    assert_close(got, list(torch.unbind(t)))
    assert all(row._is_view() and row._base is t for row in got)
    with pytest.raises(RuntimeError):
        op(leaf() * 1)[0].mul_(2)  # what aten's unbind says as well: one of many views


@pytest.mark.parity(26)
@pytest.mark.parametrize(
    ("schema", "fn", "args"),
    [
        ("(Tensor(a) t, SymInt idx) -> Tensor(a)", select, (1,)),
        ("(Tensor(a) t, SymInt[] size) -> Tensor(a)", lambda t, size: t.view(size), ([6],)),
    ],
)
def test_symbolic_integers_are_refused(registry: Registry, ns: str, schema: str, fn: Any, args: Any) -> None:
    op = registry.custom_op(f"{ns}::f", fn, mutates_args=(), schema=schema)
    with pytest.raises(RuntimeError, match=r"Custom ops that are views do not support SymInt\."):
        op(torch.zeros(3, 2), *args)


def test_a_view_op_that_also_writes_is_refused_where_views_are_tracked(registry: Registry, ns: str) -> None:
    def stamp(t: Tensor, count: Tensor) -> Tensor:
        count += 1
        return t[0]

    schema = "(Tensor(a) t, Tensor(b!) count) -> Tensor(a)"
    op = registry.custom_op(f"{ns}::stamp", stamp, mutates_args=("count",), schema=schema)
    with pytest.raises(NotImplementedError, match=f"{ns}::stamp: an op cannot both return a view and write"):
        op(torch.zeros(3, 2), torch.zeros(()))
    with torch.inference_mode():
        t, count = torch.randn(3, 2), torch.zeros(())
        assert_close(op(t, count), torch.select(t, 0, 0))
        assert count.item() == 1


def test_kernels_of_a_view_op_may_be_replaced(registry: Registry, ns: str) -> None:
    op, t = define(registry, ns), torch.randn(3, 2)
    op.register_kernel(["cpu", "cuda"], lambda t, idx: t[-1 - idx])
    y = op(t, 0)
    assert_close(y, torch.select(t, 0, 2))
    assert y._base is t
    with op.set_kernel_enabled("cpu", False):
        assert_close(op(t, 0), torch.select(t, 0, 0))


# Views of a subclass --------------------------------------------------------------------------------------------


@pytest.mark.parity(26)
def test_a_subclass_handles_the_op_instead_of_the_function(wrapped: Any) -> None:
    t = Wrapper(torch.randn(3, 2))
    y = wrapped(t, 1)
    assert type(y) is Wrapper
    assert_close(y.inner, t.inner[1])
    assert Wrapper.seen == [wrapped._opoverload]
    assert y._is_view()
    assert y._base is t


@pytest.mark.parity(26)
def test_backward_flows_into_the_subclass(wrapped: Any) -> None:
    t = Wrapper(torch.randn(3, 2), requires_grad=True)
    y = wrapped(t, 1)
    assert y._is_view()
    assert y._base is t
    (y * 3).sum().backward()
    assert type(t.grad) is Wrapper
    assert_close(t.grad.inner, torch.tensor([[0.0, 0.0], [3.0, 3.0], [0.0, 0.0]]))


@pytest.mark.parity(26)
def test_writing_to_a_view_of_the_subclass(wrapped: Any) -> None:
    values = torch.arange(6.0).reshape(3, 2)
    t = Wrapper(values.clone(), requires_grad=True)
    base = t * 2
    assert not base.is_leaf
    view = wrapped(base, 1)
    assert view._base is base
    view.mul_(5)
    assert_close(base.inner, torch.tensor([[0.0, 2.0], [20.0, 30.0], [8.0, 10.0]]))
    assert_close(view.inner, torch.tensor([20.0, 30.0]))
    assert base._version == view._version == 1
    base.sum().backward()
    assert type(t.grad) is Wrapper
    assert_close(t.grad.inner, torch.tensor([[2.0, 2.0], [10.0, 10.0], [2.0, 2.0]]))


@pytest.mark.parity(26)
def test_a_plain_subclass(registry: Registry, ns: str) -> None:
    class Plain(Tensor):
        pass

    op, t = define(registry, ns), torch.randn(3, 2).as_subclass(Plain)
    y = op(t, 1)
    assert type(y) is Plain
    assert y._base is t._base
    assert_close(y.as_subclass(Tensor), torch.select(t.as_subclass(Tensor), 0, 1))


# Modes, transforms, compilation ---------------------------------------------------------------------------------


def test_inference_mode_and_no_grad(registry: Registry, ns: str) -> None:
    op, t = define(registry, ns), leaf()
    with torch.no_grad():
        y = op(t, 1)
        z = torch.select(t, 0, 1)
        assert (y._is_view(), y._base is t, y.requires_grad, y.grad_fn) == (True, True, z.requires_grad, z.grad_fn)
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode and is being modified inplace"):
        y.mul_(2)
    with torch.inference_mode():
        y = op(torch.zeros(3, 2), 1)
        assert (y.is_inference(), y.tolist()) == (True, [0, 0])


def test_a_dispatch_mode(registry: Registry, ns: str) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    op, t = define(registry, ns), leaf()
    with Mode():
        y = op(t, 1)
    assert seen == [op._opoverload]
    assert y._base is t


def test_fake_and_meta_tensors(registry: Registry, ns: str) -> None:
    op = define(registry, ns)
    with FakeTensorMode():
        t = torch.empty(3, 2)
        y = op(t, 1)
        assert (y.shape, y._is_view(), y._base is t) == ((2,), True, True)
    t = torch.empty(3, 2, device="meta")
    y = op(t, 1)
    assert (y.shape, y.storage_offset(), y._base is t) == ((2,), 2, True)


def test_function_transforms(registry: Registry, ns: str) -> None:
    op, t = define(registry, ns), torch.randn(3, 2)

    def of_op(t: Tensor) -> Tensor:
        return op(t, 1).pow(3).sum()

    def of_aten(t: Tensor) -> Tensor:
        return torch.select(t, 0, 1).pow(3).sum()

    assert_close(torch.func.grad(of_op)(t), torch.func.grad(of_aten)(t))
    assert_close(torch.func.jacrev(of_op)(t), torch.func.jacrev(of_aten)(t))
    assert_close(torch.func.grad(lambda t: torch.func.grad(of_op)(t).sum())(t), 6 * t * torch.tensor([[0.0], [1], [0]]))


@pytest.mark.compile
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dynamo_takes_it(registry: Registry, ns: str, requires_grad: bool) -> None:
    op, t = define(registry, ns), torch.randn(3, 2, requires_grad=requires_grad)
    compiled = torch.compile(lambda t: op(t, 1) * 2, fullgraph=True, backend="eager")
    assert_close(compiled(t), torch.select(t, 0, 1) * 2)


@pytest.mark.compile
@pytest.mark.parity(98)
def test_aot_refuses_it(registry: Registry, ns: str) -> None:
    op = define(registry, ns)
    phrase = "We only support functionalizing operators whose outputs do not have alias annotations"
    with pytest.raises(RuntimeError, match=phrase):
        torch.compile(lambda t: op(t, 1) * 2, fullgraph=True, backend="aot_eager")(torch.randn(3, 2))
