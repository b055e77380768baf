"""Out variants in compiled code: inductor calls them in the place of the op, and plans what they write to."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compiling import BACKENDS, compiled
from helpers.modes import DispatchLog
from helpers.out_variants import axpy, axpy_out, define_axpy, define_bounds
from helpers.processes import Program, outputs
from torch import Tensor
from torch.testing import assert_close

import customops
from customops import Registry, Tag
from customops._rules.compilers import direct_call
from customops.errors import ArgumentError, KernelError

pytestmark = pytest.mark.compile


def program_of(op: Any, bounds: Any) -> Any:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a = op(x.sin(), 2.0, y.cos())
        low, high = bounds([op(a, 3.0, x), a], scale=0.5)
        return low + high + bounds([a], 1)[0]

    return program


def counting(calls: list[Tensor]) -> Any:
    def kernel(x: Tensor, by: float, y: Tensor, *, out: Tensor) -> None:
        calls.append(out)
        axpy_out(x, by, y, out=out)

    return kernel


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_calls_the_variant(registry: Registry, ns: str, dynamic: bool) -> None:
    calls: list[Tensor] = []
    op, bounds = define_axpy(registry, ns, counting(calls)), define_bounds(registry, ns)
    program = program_of(op, bounds)
    run = torch.compile(program, fullgraph=True, dynamic=dynamic)
    for n in (4, 4, 7) if dynamic else (4, 4):
        x, y = torch.randn(n, n), torch.randn(n, n)
        calls.clear()
        actual = run(x, y)
        assert len(calls) == 2  # eager calls make none
        assert_close(actual, program(x, y))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_variant_itself(registry: Registry, ns: str, backend: str) -> None:
    op, bounds = define_axpy(registry, ns), define_bounds(registry, ns)

    def program(x: Tensor, out: Tensor, low: Tensor, high: Tensor) -> Tensor:
        a = op.out(x.sin(), 2.0, x, out=out)
        b, _ = bounds.out([x, a], out=(low, high))
        return (a + b) * 2

    x, run = torch.randn(3, 4), compiled(program, backend)
    for _ in range(2):
        outs = [torch.full((3, 4), torch.nan) for _ in range(3)]
        result = run(x, *outs)
        right = x.sin() * 2 + x
        assert_close(outs, [right, torch.minimum(x, right), torch.maximum(x, right)])
        assert_close(result, (right + outs[1]) * 2)


def test_memory_is_reused(registry: Registry, ns: str) -> None:
    calls: list[Tensor] = []
    op = define_axpy(registry, ns, counting(calls))

    def program(x: Tensor) -> Tensor:
        for by in range(6):
            x = op(x, float(by), x)
        return x

    x = torch.randn(8)
    assert_close(torch.compile(program, fullgraph=True)(x), program(x))
    assert len(calls) == 6
    assert len({out.data_ptr() for out in calls}) < 6


def callers(seen: list[str]) -> Any:
    """A kernel that notes which function of a graph, or of the dispatcher's keys, it is called by."""

    def kernel(x: Tensor, by: float, y: Tensor, *, out: Tensor) -> None:
        names = [frame.name for frame in traceback.extract_stack()]
        is_direct = {"graph_call", "call_if_allocated"} <= {*names} and "kernel" not in names[:-1]
        seen.append("graph" if is_direct else "key")
        axpy_out(x, by, y, out=out)

    return kernel


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_kernel_is_called_directly(registry: Registry, ns: str, direct: bool, dynamic: bool) -> None:
    seen: list[str] = []
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=(), direct_in_graphs=direct)
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    op.register_out(callers(seen))
    run = torch.compile(lambda x, y: op(op(x, 2.0, y), 3.0, y), fullgraph=True, dynamic=dynamic)
    for n in (4, 4, 6) if dynamic else (4, 4):
        x, y = torch.randn(n), torch.randn(n)
        assert_close(run(x, y), (x * 2 + y) * 3 + y)
    assert set(seen[2:]) == {"graph" if direct else "key"}  # the first calls are inspected


def test_what_acts_while_a_graph_runs(registry: Registry, ns: str) -> None:
    """A mode sees the variant, a profiler the kernel, and a kernel that is registered later is called."""
    seen: list[str] = []
    op = define_axpy(registry, ns, callers(seen))
    run = torch.compile(lambda x: op(x, 2.0, x), fullgraph=True)
    x = torch.randn(4)
    assert_close(run(x), x * 3)
    with torch.profiler.profile() as profile:
        assert_close(run(x), x * 3)
    assert any(f"{ns}::axpy" in event.name for event in profile.events())
    with torch.inference_mode():
        assert_close(run(x), x * 3)
    out = torch.empty(4)
    with DispatchLog() as log:
        direct_call(f"{ns}::axpy.out", "CPU", allocated=True)(x, 2.0, x, out=out)
    assert log.seen[0] == f"{ns}.axpy.out"
    assert_close(out, x * 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype is torch.float32
    op.register_out(lambda x, by, y, *, out: out.fill_(7))
    assert run(x).tolist() == [7] * 4


def test_a_kernel_that_resizes(registry: Registry, ns: str) -> None:
    op = define_axpy(registry, ns)
    run = torch.compile(lambda x: op(x, 2.0, x), fullgraph=True)
    x = torch.randn(4)
    for _ in range(2):
        assert_close(run(x), x * 3)
    op.register_out(lambda x, by, y, *, out: out.resize_(2))
    for _ in range(2):
        with pytest.raises(KernelError, match="resized an out tensor"):
            run(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_tensors_of_the_program_are_looked_at(registry: Registry, ns: str, backend: str) -> None:
    """What the program gives may lie in memory that the kernel reads."""

    def kernel(x: Tensor, by: float, y: Tensor, *, out: Tensor) -> None:
        out.fill_(0)  # destroys x, where that is the same memory
        out.add_(x, alpha=by).add_(y)

    op = define_axpy(registry, ns, kernel)

    def program(x: Tensor, y: Tensor) -> Tensor:
        x = x + 1
        op.out(x[:-1], 2.0, y, out=x[1:])
        return x

    run, y = compiled(program, backend), torch.ones(3)
    for _ in range(3):
        x = torch.randn(4)
        assert_close(run(x, y), torch.cat([x[:1] + 1, (x[:-1] + 1) * 2 + 1]))


def test_gradients(registry: Registry, ns: str) -> None:
    calls: list[Tensor] = []
    op = define_axpy(registry, ns, counting(calls))
    op.register_autograd(lambda ctx, grad: (op(grad, 1.0, grad), None, grad))
    x = torch.randn(4, requires_grad=True)
    run = torch.compile(lambda x: op(x * 2, 2.0, x).sin().sum(), fullgraph=True)
    (actual,) = torch.autograd.grad(run(x), x)
    assert len(calls) == 2
    (expected,) = torch.autograd.grad(op(x * 2, 2.0, x).sin().sum(), x)
    assert_close(actual, expected)


def test_strides_of_the_fake(registry: Registry, ns: str) -> None:
    seen: list[Any] = []

    def kernel(x: Tensor, *, out: Tensor) -> None:
        seen.append(out.stride())
        torch.mul(x, 2, out=out)

    @registry.custom_op(f"{ns}::double", mutates_args=())
    def double(x: Tensor) -> Tensor: ...

    double.register_fake(lambda x: torch.empty_strided(x.shape, (1, x.shape[0])))
    double.register_out(kernel)
    x = torch.randn(3, 4)
    actual = torch.compile(lambda x: double(x + 1) * 2, fullgraph=True)(x)
    assert_close(actual, (x + 1) * 4)
    assert_close(double(x), x * 2)
    assert seen == [(1, 3), (1, 3)]


def test_sizes_from_data_go_without(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::positive", positive, mutates_args=())
    op.register_fake(lambda x: x.new_empty(customops.get_ctx().new_dynamic_size()))
    op.register_out(lambda x, *, out: torch.masked_select(x, x > 0, out=out))
    x = torch.randn(6)
    assert_close(torch.compile(lambda x: op(x) * 2, fullgraph=True)(x), x[x > 0] * 2)


def positive(x: Tensor) -> Tensor:
    return x[x > 0]


def test_coming_and_going(registry: Registry, ns: str) -> None:
    calls: list[Tensor] = []
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    run, x = torch.compile(lambda x: op(x, 2.0, x), fullgraph=True), torch.randn(4)
    for expected in (0, 1):
        assert_close(run(x), x * 3)
        assert len(calls) == expected
        if not expected:
            op.register_out(counting(calls))
    op.register_out(lambda x, by, y, *, out: out.fill_(7))
    assert_close(run(x), torch.full((4,), 7.0))  # without being compiled anew
    op.out.unregister()
    assert_close(run(x), x * 3)


def test_a_pair_of_two_definitions(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    calls: list[Tensor] = []

    def variant(x: Tensor, by: float, y: Tensor, *, out: Tensor) -> Tensor:
        calls.append(out)
        axpy_out(x, by, y, out=out)
        return out

    registry.custom_op(f"{ns}::axpy.out", variant, mutates_args={"out"}, tags=Tag.out)
    x = torch.randn(4)
    # torch passes both tensors, then the number.
    assert_close(torch.compile(lambda x: op(x.sin(), 2.0, x), fullgraph=True)(x), x.sin() * 2 + x)
    assert len(calls) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_other_tensors_are_refused(registry: Registry, ns: str, backend: str) -> None:
    op, x = define_axpy(registry, ns), torch.randn(4)
    run = torch.compile(lambda x, out: op.out(x, 2.0, x, out=out) + 1, backend=backend)
    for out in (torch.empty(3), torch.empty(4, dtype=torch.float64)):
        with pytest.raises(Exception, match="neither resized nor cast") as caught:
            run(x, out)
        assert isinstance(caught.value, ArgumentError) or "ArgumentError" in repr(caught.value) + str(caught.value)


def test_export(registry: Registry, ns: str) -> None:
    op = define_axpy(registry, ns)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, 2.0, x)

    x = torch.randn(4)
    program = torch.export.export(Module(), (x,))
    assert [str(node.target) for node in program.graph.nodes if "axpy" in str(node.target)] == [f"{ns}.axpy.default"]
    assert_close(program.module()(x), x * 3)


SCRIPT = """
import sys, torch
from torch import Tensor
import customops

@customops.custom_op("out_cache::axpy", mutates_args=())
def axpy(x: Tensor, by: float, y: Tensor) -> Tensor:
    return x * by + y

axpy.register_fake(lambda x, by, y: torch.empty_like(x))
calls = []

def out_kernel(x, by, y, *, out):
    calls.append("out")
    torch.add(y, x, alpha=by, out=out)

if sys.argv[1] == "with":
    axpy.register_out(out_kernel)
x = torch.arange(4.0)
assert torch.equal(torch.compile(lambda x: axpy(x, 2.0, x), fullgraph=True)(x), x * 3)
hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
print(len(calls), hits + torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] > 0)
"""


@pytest.mark.process
def test_caches_tell_an_op_with_a_variant_from_one_without(tmp_path: Path) -> None:
    programs = [Program(SCRIPT, (option,)) for option in ("with", "without", "with")]
    found = [output.split() for output in outputs(programs, tmp_path)]
    assert [calls for calls, _ in found] == ["1", "0", "1"]
    assert found[2][1] == "True"


@pytest.mark.parametrize("name", ["mode", "by"])
def test_arguments_with_names_that_functionalization_uses(registry: Registry, ns: str, name: str) -> None:
    """The variant that inductor calls has other names for them."""
    schema = f"(Tensor x, *, int {name}) -> Tensor"
    op = registry.custom_op(f"{ns}::times", lambda x, **by: x * by[name], schema=schema)
    op.register_fake(lambda x, **by: torch.empty_like(x))
    calls: list[int] = []
    op.register_out(lambda x, *, out, **by: (calls.append(by[name]), torch.mul(x, by[name], out=out))[0])
    x = torch.rand(3)
    assert_close(compiled(lambda x: op(x.sin(), **{name: 3}) + 1, "inductor")(x), x.sin() * 3 + 1)
    assert calls == [3]
