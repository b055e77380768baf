"""Sizes that depend on data, and fakes in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import customops
from customops import Registry
from customops.errors import RegistrationError

# Sizes that depend on data --------------------------------------------------------------------------------------------


@pytest.fixture
def nonzero(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::nonzero", mutates_args=())
    def nonzero(x: Tensor) -> Tensor:
        return torch.from_numpy(np.stack(np.nonzero(x.numpy(force=True)), axis=1))

    @nonzero.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty([customops.get_ctx().new_dynamic_size(), x.dim()], dtype=torch.int64)

    return nonzero


@pytest.mark.parity(46)
def test_get_ctx_gives_an_unbacked_size(registry: Registry, nonzero: Any) -> None:
    x = torch.tensor([[0.0, 1, 2], [3, 0, 4]])
    assert torch.equal(nonzero(x), torch.nonzero(x))
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env) as mode:
        result = nonzero(mode.from_tensor(x))
    size, columns = result.shape
    assert isinstance(size, torch.SymInt)
    assert columns == 2
    assert not size.node.has_hint()
    assert shape_env.bound_sympy(size.node.expr).lower == 0


@pytest.mark.parity(46)
def test_bounds_of_a_dynamic_size(registry: Registry, nonzero: Any) -> None:
    shape_env = ShapeEnv()
    nonzero.register_fake(lambda x: x.new_empty(customops.get_ctx().new_dynamic_size(min=1, max=6)))
    with FakeTensorMode(shape_env=shape_env):
        (size,) = nonzero(torch.ones(6)).shape
    bounds = shape_env.bound_sympy(size.node.expr)
    assert (int(bounds.lower), int(bounds.upper)) == (1, 6)
    with FakeTensorMode(shape_env=ShapeEnv()):
        nonzero.register_fake(lambda x: x.new_empty(customops.get_ctx().new_dynamic_size(min=-1)))
        with pytest.raises(ValueError, match="greater than or equal to 0"):
            nonzero(torch.ones(6))


@pytest.mark.parity(46)
@pytest.mark.parametrize("bound", ["min", "max"])
def test_a_symbolic_bound_is_refused(nonzero: Any, bound: str) -> None:
    @nonzero.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(customops.get_ctx().new_dynamic_size(**{bound: x.shape[0]}))

    with pytest.raises(ValueError, match="SymInt"):
        make_fx(lambda x: nonzero(x), tracing_mode="symbolic")(torch.ones(5))


def test_get_ctx_is_for_fakes_only(double: Any) -> None:
    with pytest.raises(RegistrationError, match="only inside a fake impl"):
        customops.get_ctx()
    double.register_kernel(None, lambda x: customops.get_ctx())
    with pytest.raises(RegistrationError, match="only inside a fake impl"):
        double(torch.ones(2))


def test_a_dynamic_size_needs_a_shape_env(nonzero: Any) -> None:
    with pytest.raises(DynamicOutputShapeException), FakeTensorMode():
        nonzero(torch.ones(3))


@pytest.mark.parity(47)
def test_a_data_dependent_op_has_no_meta(nonzero: Any) -> None:
    with pytest.raises(RuntimeError, match="data-dependent shape"):
        nonzero(torch.ones(3, device="meta"))


@pytest.mark.parity(47)
@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_a_data_dependent_op_is_traced(nonzero: Any, ns: str, tracing_mode: str) -> None:
    graph = make_fx(lambda x: nonzero(x), tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(torch.ones(3))
    assert f"torch.ops.{ns}.nonzero.default(x_1)" in graph.code
    for x in torch.tensor([0.0, 1, 2, 0, 3]), torch.zeros(4), torch.ones(2):
        if tracing_mode == "symbolic":
            assert torch.equal(graph(x), torch.nonzero(x))


@pytest.mark.parity(46)
@pytest.mark.parametrize("x", [torch.tensor([0.0, 1, 2, 0, 3]), torch.zeros(4), torch.rand(2, 3)])
def test_a_data_dependent_op_passes_opcheck(nonzero: Any, x: Tensor) -> None:
    results = torch.library.opcheck(nonzero._opoverload, (x,))
    assert list(results.values()) == ["SUCCESS"] * 4


@pytest.mark.compile
@pytest.mark.parity(47)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiling_a_data_dependent_op_breaks_the_graph_once(nonzero: Any, dynamic: bool | None) -> None:
    graphs = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(x: Tensor) -> Tensor:
        return nonzero(x + 1) * 2

    x = torch.tensor([-1.0, 1, 2])
    assert torch.equal(torch.compile(run, backend=backend, dynamic=dynamic)(x), torch.nonzero(x + 1) * 2)
    assert len(graphs) == 2
    if dynamic is None:
        explanation = torch._dynamo.explain(run)(x)
        assert explanation.graph_break_count == 1
        # Dynamo's explanation, as for aten.nonzero.
        (reason,) = {str(r.reason) for r in explanation.break_reasons}
        assert "Dynamic shape operator" in reason
        assert "capture_dynamic_output_shape_ops = True" in reason


@pytest.mark.compile
def test_a_data_dependent_op_is_captured_on_request(nonzero: Any) -> None:
    def run(x: Tensor) -> Tensor:
        return nonzero(x + 1) * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch._dynamo.explain(run)(torch.ones(3)).graph_break_count == 0
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        for x in torch.tensor([-1.0, 1, 2]), torch.tensor([-1.0, -1, 2]):
            assert torch.equal(compiled(x), torch.nonzero(x + 1) * 2)


# Graphs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parity(48)
def test_symbolic_sizes_are_nodes_of_the_graph(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::view_copy", mutates_args=())
    def view_copy(x: Tensor, shape: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.copy(x.numpy().reshape(shape)))

    view_copy.register_fake(lambda x, shape: x.clone().view(shape).clone())
    x = torch.rand(2, 3, 4)
    graph = make_fx(lambda x: view_copy(x, [x.shape[0] * x.shape[1], x.shape[2]]), tracing_mode="symbolic")(x)
    assert graph.code.strip() == (
        "def forward(self, x_1):\n"
        "    sym_size_int = torch.ops.aten.sym_size.int(x_1, 0)\n"
        "    sym_size_int_1 = torch.ops.aten.sym_size.int(x_1, 1)\n"
        "    mul = sym_size_int * sym_size_int_1;  sym_size_int = sym_size_int_1 = None\n"
        "    sym_size_int_2 = torch.ops.aten.sym_size.int(x_1, 2)\n"
        f"    view_copy = torch.ops.{ns}.view_copy.default(x_1, [mul, sym_size_int_2]);  "
        "x_1 = mul = sym_size_int_2 = None\n"
        "    return view_copy"
    )
    other = torch.rand(5, 2, 3)
    assert torch.equal(graph(other), other.reshape(10, 3))


@pytest.mark.compile
@pytest.mark.parity(48)
def test_one_graph_serves_all_sizes(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return torch.cat([x, x])

    twice.register_fake(lambda x: x.new_empty([x.shape[0] * 2, *x.shape[1:]]))
    graphs = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: twice(x).sum(0) + x.shape[0], backend=backend, dynamic=True, fullgraph=True)
    for n in 3, 5, 8:
        x = torch.rand(n, 2)
        assert torch.allclose(compiled(x), 2 * x.sum(0) + n)
    assert len(graphs) == 1
