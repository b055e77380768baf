"""Fifteen ops with a kernel and a reference: all that follows, against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.covers import every
from helpers.reference_ops import ROWS, Row
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

import customops
from customops import Registry

CASES = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
DIFFERENTIABLE = pytest.mark.parametrize("row", [row for row in ROWS if row.differentiable], ids=lambda row: row.name)


def results(call: Callable[..., Any], args: tuple[Any, ...], row: Row) -> Any:
    """What a call of the op gives: its results, or what it wrote to a copy of the first argument."""
    if not row.mutates:
        return call(*args)
    written = args[0] * 1
    call(written, *args[1:])
    return written


def with_grad(args: tuple[Any, ...]) -> tuple[Any, ...]:
    def leaf(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x

    return tree_map(leaf, args)  # type: ignore[no-any-return]


def leaves(value: Any) -> list[Tensor]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]


def differentiable(value: Any) -> list[Tensor]:
    return [x for x in leaves(value) if x.is_floating_point()]


def gradients_of(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    args = with_grad(args)
    outputs = [x for x in differentiable(call(*args)) if x.requires_grad]
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in outputs]
    return torch.autograd.grad(outputs, differentiable(args), weights, allow_unused=True)


@CASES
def test_values(registry: Registry, ns: str, row: Row) -> None:
    op, args = row.define(registry, ns), row.make(5)
    torch.testing.assert_close(results(op, args, row), row.plain(*args))
    overload = getattr(torch.ops, ns).__getattr__(row.name)
    torch.testing.assert_close(results(overload, args, row), row.plain(*args))


@CASES
def test_fake(registry: Registry, ns: str, row: Row) -> None:
    op, args = row.define(registry, ns), row.make(5)
    if row.name == "nonzero":
        pytest.skip("its size depends on data: see test_compiled")
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, args)
        made = leaves(results(op, fakes, row))
    for fake, real in zip(made, leaves(results(op, args, row)), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    if not row.mutates and leaves(args):
        on_meta = leaves(op(*tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, args)))
        assert [x.shape for x in on_meta] == [x.shape for x in made]


@DIFFERENTIABLE
def test_gradients(registry: Registry, ns: str, row: Row) -> None:
    op, args = row.define(registry, ns), row.make(3)
    torch.testing.assert_close(gradients_of(lambda *args: results(op, args, row), args), gradients_of(row.plain, args))

    def function(*values: Tensor) -> list[Tensor]:
        given = iter(values)
        flat, spec = tree_flatten(args)
        chosen = [next(given) if isinstance(x, Tensor) and x.is_floating_point() else x for x in flat]
        return differentiable(results(op, tree_unflatten(chosen, spec), row))

    points = differentiable(with_grad(args))
    assert torch.autograd.gradcheck(function, points, check_forward_ad=True)
    if row.name != "attention":  # takes long
        assert torch.autograd.gradgradcheck(function, points)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("row", "backend"),
    every(3, itertools.product(ROWS, ["aot_eager", "inductor"])),
    ids=lambda value: getattr(value, "name", value),
)
def test_compiled(registry: Registry, ns: str, row: Row, backend: str) -> None:
    op, graphs = row.define(registry, ns), []

    def counted(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        compiled = torch.compile(lambda *args: results(op, args, row), fullgraph=True, dynamic=True, backend=counted)
        for n in (9, 11, 10):
            args = row.make(n)
            torch.testing.assert_close(compiled(*args), row.plain(*args))
        assert len(graphs) == 1 + (row.name == "ramp")  # a number is static in the first graph
        if row.differentiable:
            torch.testing.assert_close(
                gradients_of(torch.compile(lambda *args: results(op, args, row), backend=backend), args),
                gradients_of(row.plain, args),
            )
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False


@CASES
@pytest.mark.compile
def test_exported(registry: Registry, ns: str, row: Row) -> None:
    op, args = row.define(registry, ns), row.make(4)

    class Model(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return results(op, args, row)

    if not leaves(args):
        pytest.skip("no input is a tensor")
    program = torch.export.export(Model(), args)
    assert any(getattr(node.target, "namespace", "") == ns for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*args), row.plain(*args))


@pytest.mark.parametrize("row", [row for row in ROWS if row.in_dims], ids=lambda row: row.name)
def test_vmap(registry: Registry, ns: str, row: Row) -> None:
    op = row.define(registry, ns)
    args = row.make(4)
    flat, spec = tree_flatten(args)
    dims = tree_flatten(row.in_dims, is_leaf=lambda x: x is None)[0]
    dims += [None] * (len(flat) - len(dims))
    batched = [torch.stack([x, x.flip(0), x]) if dim == 0 else x for x, dim in zip(flat, dims, strict=True)]
    given, in_dims = tree_unflatten(batched, spec), tree_unflatten(dims, spec)
    expected = torch.vmap(row.plain, in_dims)(*given)
    torch.testing.assert_close(torch.vmap(lambda *args: results(op, args, row), in_dims)(*given), expected)
    if row.differentiable and not row.mutates:
        one = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.is_floating_point()]

        def per_sample(call: Callable[..., Any]) -> Any:
            def loss(*args: Any) -> Any:
                return sum(x.square().sum() for x in differentiable(call(*args)))

            return torch.vmap(torch.func.grad(loss, argnums=tuple(one)), in_dims)(*given)

        if one:
            torch.testing.assert_close(per_sample(op), per_sample(row.plain))


@CASES
def test_flops(registry: Registry, ns: str, row: Row) -> None:
    op, args = row.define(registry, ns), row.make(4)
    with FlopCounterMode(display=False) as plain:
        row.plain(*args)
    if row.name == "nonzero":
        assert op._flops(args, {}) is None  # its reference needs data
        return
    with FlopCounterMode(display=False) as counter:
        results(op, args, row)
    assert counter.get_total_flops() == plain.get_total_flops()


@CASES
def test_checked(registry: Registry, ns: str, row: Row) -> None:
    op = row.define(registry, ns)
    report = customops.check(op, effort="quick")
    assert not report.failures, report
