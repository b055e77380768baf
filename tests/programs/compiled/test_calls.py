"""Calls of an op in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.compiling import dynamo
from helpers.functions import double_fn
from helpers.ops import define_functional
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from customops import Registry

pytestmark = pytest.mark.compile


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


@pytest.mark.parity(27)
def test_the_op_object_itself_can_be_compiled(registry: Registry, ns: str) -> None:
    op, counter = define_functional(registry, ns), dynamo("testing").CompileCounter()
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


@pytest.mark.parametrize("of_class", [False, True])
def test_an_op_that_an_object_or_a_class_holds(registry: Registry, ns: str, of_class: bool) -> None:
    op = registry.custom_op(f"{ns}::f", double_fn, mutates_args=())
    op.register_fake(torch.empty_like)

    class Holder:
        held = op if of_class else None

    holder = Holder()
    if not of_class:
        holder.held = op
    x = torch.ones(3)
    compiled = torch.compile(lambda x: holder.held(x) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), 2 * x + 1)
    assert torch.equal(compiled(torch.ones(5)), torch.full((5,), 3.0))
