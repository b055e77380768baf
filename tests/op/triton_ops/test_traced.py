"""What compilers see of an op of Triton kernels: the kernels, but where the op has to be kept whole.

There is no GPU here, so the graphs are looked at. Triton's interpreter runs them, in the place of the GPU.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.isolated import isolated
from helpers.warm import PYTHON
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import customops
from customops import Tag
from customops.errors import ArgumentError, UnsupportedError

pytestmark = [pytest.mark.process, pytest.mark.slow]

ops: Any = None  # helpers.triton_ops and helpers.triton_driver, where the tests run
driver: Any = None


def setup() -> None:
    global ops, driver
    os.environ.pop("TRITON_INTERPRET", None)
    ops = importlib.import_module("helpers.triton_ops")
    driver = importlib.import_module("helpers.triton_driver")
    driver.install()


traced = isolated(setup)


@pytest.fixture(autouse=True)
def _triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")


class Graphs:
    """A backend that keeps the graphs which AOTAutograd makes, and runs them with interpreted kernels."""

    def __init__(self) -> None:
        self.seen: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.seen.append(graph)

        def run(*args: Any) -> Any:
            driver.interpret_captured()
            return graph(*args)

        return run

    def compile(self, fn: Any, **options: Any) -> Any:
        return torch.compile(fn, fullgraph=True, backend=aot_autograd(fw_compiler=self), **options)

    def launches(self, number: int = -1) -> list[torch.fx.Node]:
        functional = torch.ops.higher_order.triton_kernel_wrapper_functional
        return [node for node in self.seen[number].graph.nodes if node.target is functional]

    def calls(self, overload: Any, number: int = -1) -> int:
        return sum(node.target is overload for node in self.seen[number].graph.nodes)


@traced
def test_the_kernel_is_in_the_graph() -> None:
    graphs = Graphs()
    fn = graphs.compile(lambda x, y: ops.add(x, y).sin())
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    torch.testing.assert_close(fn(x, y), (x + y).sin())
    (launch,) = graphs.launches()
    assert launch.kwargs["grid"] == [(3, 1, 1)]
    assert launch.kwargs["tensors_to_clone"] == ["out"]
    assert not graphs.calls(torch.ops.triton_ops.add.default)


@traced
def test_sizes_are_symbols() -> None:
    graphs = Graphs()
    fn = graphs.compile(lambda x, y: ops.add(x, y).sin(), dynamic=True)
    for rows in (5, 6, 7):
        x, y = torch.randn(rows, 7), torch.randn(rows, 7)
        torch.testing.assert_close(fn(x, y), (x + y).sin())
    assert len(graphs.seen) == 1
    assert isinstance(graphs.launches()[0].kwargs["kwargs"]["n"], torch.fx.Node)


@traced
def test_an_op_that_writes() -> None:
    graphs = Graphs()

    def writes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        before = x * 1
        ops.rotary_(x, cos, sin)
        return x - before

    fn = graphs.compile(writes)
    x, cos, sin = ops.rotary_inputs()
    before, expected = x.clone(), ops.rotary_in_torch(x, cos, sin)
    torch.testing.assert_close(fn(x, cos, sin), expected - before)
    torch.testing.assert_close(x, expected)
    assert graphs.launches()[0].kwargs["tensors_to_clone"] == ["x"]


@traced
def test_gradients() -> None:
    graphs = Graphs()
    fn = graphs.compile(lambda x, y: ops.add(x, y).square())
    x, y = (torch.randn(5, 7, requires_grad=True) for _ in range(2))
    torch.testing.assert_close(torch.autograd.grad(fn(x, y).sum(), (x, y)), (2 * (x + y).detach(),) * 2)
    assert len(graphs.launches(0)) == 1


@traced
def test_a_kernel_for_the_device_is_not_traced() -> None:
    graphs = Graphs()
    fn = graphs.compile(lambda x, y: ops.add(x, y).sin())
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    fn(x, y)
    with customops.default_registry.scope():
        ops.add.register_kernel("cpu", lambda x, y: x - y)
        torch.testing.assert_close(fn(x, y), (x - y).sin())
        assert not graphs.launches()
        with ops.add.set_kernel_enabled("cpu", False):
            torch.testing.assert_close(fn(x, y), (x + y).sin())
    torch.testing.assert_close(fn(x, y), (x + y).sin())
    assert len(graphs.launches()) == 1
    library = torch.library.Library("triton_ops", "IMPL")
    library.impl("add", lambda x, y: x * y, "CPU", allow_override=True)
    torch._dynamo.reset()
    torch.testing.assert_close(graphs.compile(lambda x, y: ops.add(x, y))(x, y), x * y)
    library._destroy()


@traced
def test_an_export_keeps_the_op() -> None:
    program = torch.export.export(Add(), (torch.randn(5, 7), torch.randn(5, 7)))
    kept = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert kept == [torch.ops.triton_ops.add.default]
    lower = program.run_decompositions(decompose_custom_triton_ops=True).graph
    assert torch.ops.higher_order.triton_kernel_wrapper_functional in [node.target for node in lower.nodes]


class Add(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ops.add(x, y)


@traced
def test_defaults_and_a_schema_of_ones_own() -> None:
    wrap_triton = customops.wrap_triton

    @customops.triton_op("triton_ops::plus", mutates_args=(), schema="(Tensor x, Tensor? y=None, *, int n=3) -> Tensor")
    def plus(x, y=None, *, n=3):  # type: ignore[no-untyped-def]
        out = torch.empty_like(x)
        grid = (x.numel(),)
        wrap_triton(ops.add_kernel)[grid](x, x if y is None else y, out, x.numel(), ops.wide(x), BLOCK=1)
        return out * n

    assert str(plus.schema) == "(Tensor x, Tensor? y=None, *, int n=3) -> Tensor"
    graphs, x = Graphs(), torch.randn(5)
    torch.testing.assert_close(graphs.compile(lambda x: plus(x))(x), 6 * x)
    torch.testing.assert_close(graphs.compile(lambda x: plus(x, x, n=2))(x), 4 * x)
    assert graphs.launches(0)
    assert graphs.launches(1)


@traced
def test_an_op_that_returns_what_it_writes_and_types_that_are_lowered() -> None:
    @customops.triton_op("triton_ops::twice_", mutates_args=("x",), tags=Tag.inplace)
    def twice_(x: Tensor, times: Times = Times.ONCE) -> Tensor:
        for _ in range(times.value):
            customops.wrap_triton(ops.add_kernel)[(1,)](x, x, x, x.numel(), ops.wide(x), BLOCK=16)
        return x

    graphs, x = Graphs(), torch.randn(5)
    fn = graphs.compile(lambda x: twice_(x, Times.TWICE) + x)
    before = x.clone()
    torch.testing.assert_close(fn(x), 8 * before)
    torch.testing.assert_close(x, 4 * before)
    assert len(graphs.launches()) == 2


class Times(enum.Enum):
    ONCE = 1
    TWICE = 2


@traced
def test_a_subclass_has_the_first_say() -> None:
    graphs = Graphs()
    a, b, c, d = (torch.randn(5, 7) for _ in range(4))
    result = graphs.compile(lambda x, y: ops.add(x, y))(TwoTensor(a, b), TwoTensor(c, d))
    torch.testing.assert_close((result.a, result.b), (a + c, b + d))
    assert len(graphs.launches()) == 2


@traced
def test_a_launch_outside_of_an_op() -> None:
    def plain(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        customops.wrap_triton(ops.add_kernel)[(3,)](x, y, out, x.numel(), ops.wide(x), BLOCK=16)
        return out

    graph = make_fx(plain, tracing_mode="fake")(torch.randn(5, 7), torch.randn(5, 7))
    mutation = torch.ops.higher_order.triton_kernel_wrapper_mutation
    assert mutation in [node.target for node in graph.graph.nodes]
    with torch._subclasses.FakeTensorMode():
        assert plain(torch.empty(5, 7), torch.empty(5, 7)).shape == (5, 7)


@traced
def test_autotuned_kernels_and_heuristics() -> None:
    triton = ops.triton
    configs = [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})]
    tuned = triton.autotune(configs, key=["n"])(ops.add_kernel)
    chosen = triton.heuristics({"BLOCK": lambda args: 32})(ops.add_kernel)

    def launch(kernel: Any, x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)  # noqa: E731
        customops.wrap_triton(kernel)[grid](x, y, out, x.numel(), WIDE=ops.wide(x))
        return out

    for kernel in (tuned, chosen):
        graph = make_fx(functools.partial(launch, kernel), tracing_mode="fake")(torch.randn(5, 7), torch.randn(5, 7))
        mutation = torch.ops.higher_order.triton_kernel_wrapper_mutation
        assert mutation in [node.target for node in graph.graph.nodes]


@traced
def test_errors() -> None:
    x = torch.randn(3, 5)
    with pytest.raises(
        UnsupportedError, match=r"(?s)add_kernel: this Triton does not compile for the CPU.*register_kernel"
    ):
        ops.add(x, x)
    with pytest.raises(ArgumentError, match=r"(?s)takes a Triton kernel.*expected: what triton.jit.*got: +<function"):
        customops.wrap_triton(test_errors)
    with pytest.raises(customops.errors.DefinitionError, match="traceable must be True or False"):
        customops.custom_op("triton_ops::never", lambda x: x, schema="(Tensor x) -> Tensor", traceable=1)
    with pytest.raises(customops.errors.DefinitionError, match="a triton_op is always traceable"):
        customops.triton_op("triton_ops::never", traceable=False)
    interpreted = importlib.import_module("triton.runtime.interpreter").InterpretedFunction(ops.add_kernel.fn)

    def plain(x: Tensor) -> None:
        customops.wrap_triton(interpreted)[(3,)](x, x, x, 15, ops.wide(x), BLOCK=16)

    with pytest.raises(UnsupportedError, match=r"(?s)interpreter runs cannot be traced.*fix:"):
        make_fx(plain, tracing_mode="fake")(x)


class Recorder:
    """A kernel that notes the current device; the tensors say that they are on others."""

    def __init__(self) -> None:
        self.current = 0
        self.seen: list[int] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args: self.seen.append(self.current)

    def guard(self, device: torch.device) -> Any:
        return _on(self, device.index)


class _on:
    def __init__(self, recorder: Recorder, index: int) -> None:
        self.recorder, self.index = recorder, index

    def __enter__(self) -> None:
        self.recorder.current, self.index = self.index, self.recorder.current

    def __exit__(self, *_: Any) -> None:
        self.recorder.current = self.index


class OnDevice(Tensor):
    """A tensor that says it is on another device."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


@traced
def test_the_device_of_the_tensors_is_the_current_one() -> None:
    recorder = Recorder()
    kernel = customops.wrap_triton(ops.add_kernel)
    kernel.kernel = recorder
    cuda: Any = torch.cuda
    cuda.current_device, cuda.device = (lambda: recorder.current), recorder.guard
    x = torch.Tensor._make_subclass(OnDevice, torch.randn(3))
    kernel[(1,)](x, 3)
    assert (recorder.seen, recorder.current) == ([1], 0)
    y = torch.Tensor._make_subclass(type("Other", (OnDevice,), {"device": torch.device("cuda", 2)}), torch.randn(3))
    with pytest.raises(ArgumentError, match=r"(?s)runs on one device.*cuda:1, cuda:2"):
        kernel[(1,)](x, y)


_DIGEST = """
import sys, torch
from helpers import triton_ops as ops
from customops._dispatch import fingerprint
print(fingerprint.fingerprint({"triton_ops::add"}))
"""


@pytest.fixture
def other_source(tmp_path: Any) -> Any:
    """A folder with the module of the ops, where one kernel multiplies."""
    spec = importlib.util.find_spec("helpers.triton_ops")
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as file:
        text = file.read().replace("(x + i, mask=mask).to(WIDE) +", "(x + i, mask=mask).to(WIDE) *")
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").touch()
    (tmp_path / "helpers" / "triton_ops.py").write_text(text)
    return tmp_path


def test_caches_tell_kernels_apart(other_source: Any) -> None:
    """The digest in the keys of compile caches is that of another process, unless a kernel is another."""
    tests = importlib.util.find_spec("helpers").submodule_search_locations[0]  # type: ignore[union-attr,index]
    found = []
    for folder in (f"{tests}/..", f"{tests}/..", other_source):
        script = f"import sys; sys.path.insert(0, {str(folder)!r})\n{_DIGEST}"
        run = subprocess.run([PYTHON, "-c", script], check=True, capture_output=True, text=True)
        found.append(run.stdout)
    assert found[0] == found[1] != found[2]
