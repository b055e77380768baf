"""Graphs of inductor, whose calls of an op run its kernel without the dispatcher where that cannot be told apart."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.modes import DispatchLog, FunctionLog
from helpers.processes import Program, outputs
from torch import Tensor
from torch.testing import assert_close

from customops import Registry, Tag
from customops.errors import AliasError, DefinitionError

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[3]
CALLERS: list[str] = []


def note_caller() -> None:
    frame = sys._getframe(2)
    if frame.f_code.co_name == "__call__" and frame.f_back is not None:  # first calls are inspected
        frame = frame.f_back
    CALLERS.append(frame.f_code.co_name)


def callers(f: Callable[..., Any], *args: Any) -> set[str]:
    """The functions that call the kernels when `f` runs. In its first call, kernels are in another dispatch state."""
    f(*args)
    CALLERS.clear()
    f(*args)
    return set(CALLERS)


def scale(x: Tensor, by: float) -> Tensor:
    note_caller()
    return x * by


def add_to(x: Tensor, y: Tensor) -> None:
    note_caller()
    x.add_(y)


def add_(x: Tensor, y: Tensor) -> Tensor:
    note_caller()
    return x.add_(y)


def add_out(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
    note_caller()
    return out.copy_(x + y)


def parts(xs: list[Tensor], n: int = 2) -> tuple[Tensor, list[Tensor]]:
    note_caller()
    return torch.cat(xs) * n, [x + n for x in xs]


def repeat(x: Tensor, n: int) -> Tensor:
    note_caller()
    return x.repeat(n)


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    return define_scale(registry, ns)


def define_scale(registry: Registry, ns: str, **options: Any) -> Any:
    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=(), **options)
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: (grad * ctx.by, None), setup_context=save)
    return op


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.by = inputs[1]


def compiled(f: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, **options)


def test_calls_are_direct(op: Any) -> None:
    program = compiled(lambda x: op(op(x, 2.0) + 1, 3.0))
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            x = torch.randn(4)
            assert_close(program(x), (x * 2 + 1) * 3)
            assert callers(program, x) == {"graph_call"}


def test_gradients(op: Any) -> None:
    program = compiled(lambda x: op(x, 2.0).sin())
    for _ in range(2):
        CALLERS.clear()
        x = torch.randn(4, requires_grad=True)
        (grad,) = torch.autograd.grad(program(x).sum(), x)
        assert_close(grad, 2 * (x * 2).cos())
    assert set(CALLERS) == {"graph_call"}


def test_dynamic_shapes(registry: Registry, ns: str, op: Any) -> None:
    other = registry.custom_op(f"{ns}::repeat", repeat, mutates_args=())
    other.register_fake(lambda x, n: x.new_empty(x.shape[0] * n))
    program = compiled(lambda x: op(other(x, x.shape[0] + 1), 2.0), dynamic=True)
    for n in (3, 4, 5):
        x = torch.randn(n)
        assert_close(program(x), x.repeat(n + 1) * 2)
    assert callers(program, x) == {"graph_call"}


@pytest.mark.parametrize("kind", ["mutates", "in place", "out"])
def test_writes(registry: Registry, ns: str, kind: str) -> None:
    if kind == "mutates":
        add: Any = registry.custom_op(f"{ns}::add", add_to, mutates_args={"x"})
    elif kind == "in place":
        add = registry.custom_op(f"{ns}::add_", add_, mutates_args={"x"}, tags=Tag.inplace)
    else:
        op = registry.custom_op(f"{ns}::add_out", add_out, mutates_args={"out"}, tags=Tag.out)
        add = lambda x, y: op(x, y, out=x)  # noqa: E731

    def program(x: Tensor, y: Tensor) -> Tensor:
        z = y * 2
        add(z, y)
        add(x, z)
        return x + z

    f = compiled(program)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            x, y = torch.randn(4), torch.randn(4)
            expected = x + 3 * y
            version = 0 if x.is_inference() else x._version
            assert_close(f(x, y), expected + 3 * y)
            assert_close(x, expected)
            assert x.is_inference() or x._version > version
    assert callers(f, *torch.randn(2, 4)) == {"graph_call"}


def test_lists_and_several_results(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::parts", parts, mutates_args=())
    op.register_fake(lambda xs, n: (torch.cat(xs), [torch.empty_like(x) for x in xs]))
    f = compiled(lambda x, y: op([x, y.sin(), x], 3))
    x, y = torch.randn(4), torch.randn(3)
    for _ in range(2):
        assert_close(f(x, y), (torch.cat([x, y.sin(), x]) * 3, [x + 3, y.sin() + 3, x + 3]))
    assert callers(f, x, y) == {"graph_call"}


def test_subgraphs(op: Any) -> None:
    def program(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: op(x, 2.0), lambda x: op(x, 3.0), (x,)) + op(x, 1.0)

    f = compiled(program)
    for x in (torch.ones(3), -torch.ones(3)):
        assert_close(f(x), program(x))
        assert callers(f, x) == {"graph_call"}


@pytest.mark.parametrize("mode_type", [DispatchLog, FunctionLog])
def test_modes_that_are_active_when_the_graph_runs(op: Any, mode_type: Any) -> None:
    """Those that are entered after compiling; Dynamo compiles anew for modes of `TorchFunctionMode`."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(importlib.import_module("torch._inductor.compile_fx").compile_fx(graph, inputs))
        return graphs[-1]

    x = torch.randn(3)
    torch.compile(lambda x: op(x, 2.0), fullgraph=True, backend=backend)(x)
    (graph,) = graphs
    assert callers(graph, x) == {"graph_call"}
    with mode_type() as mode:
        (result,) = graph(x)
    assert_close(result, x * 2)
    assert any(op.__name__ in str(each) for each in mode.seen)


def test_profilers_see_the_calls(op: Any) -> None:
    f = compiled(lambda x: op(op(x, 2.0), 3.0))
    x = torch.randn(3)
    f(x)
    with torch.profiler.profile() as profile:
        f(x)
    assert sum(event.name == op._qualname for event in profile.events()) == 2
    assert callers(f, x) == {"graph_call"}


class Wrapper(Tensor):
    """A tensor that holds another, and says so to AOTAutograd."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return Wrapper(inner["inner"])

    def __repr__(self, **_: Any) -> str:
        return f"Wrapper({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda x: x.inner if isinstance(x, Wrapper) else x  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, Wrapper, func(*args, **kwargs))


def test_subclasses(op: Any) -> None:
    f = compiled(lambda x: op(x, 2.0) + 1)
    x = torch.randn(3)
    for _ in range(2):
        result = f(Wrapper(x))
        assert type(result) is Wrapper
        assert_close(result.inner, x * 2 + 1)
    assert callers(f, Wrapper(x)) == {"graph_call"}


def test_autocast(op: Any) -> None:
    op.register_autocast("cpu", torch.bfloat16)
    f = compiled(lambda x: op(x, 2.0))
    x = torch.randn(3)
    for _ in range(2):
        assert f(x).dtype == torch.float32
        with torch.autocast("cpu"):
            assert f(x).dtype == torch.bfloat16
            assert_close(f(x), op(x, 2.0))


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
def test_conjugate_views(op: Any) -> None:
    f = compiled(lambda x: op(x, 2.0))
    x = torch.randn(3, dtype=torch.complex64)
    assert_close(f(x.conj()).resolve_conj(), x.conj() * 2)
    assert "graph_call" not in callers(f, x.conj())


def test_a_kernel_that_is_registered_again(registry: Registry, op: Any) -> None:
    f = compiled(lambda x: op(x, 2.0) + 1)
    x = torch.ones(2)
    assert f(x).tolist() == [3, 3]
    with registry.scope():
        op.register_kernel("cpu", lambda x, by: x * 10)
        assert f(x).tolist() == [11, 11]
        with op.set_kernel_enabled("cpu", False):
            assert f(x).tolist() == [3, 3]
    with registry.scope():
        registry.impl(op._qualname, "CPU", lambda x, by: x * 20)
        assert f(x).tolist() == [21, 21]
    assert f(x).tolist() == [3, 3]
    assert callers(f, x) == {"graph_call"}


def test_results_are_checked(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::same", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    with pytest.raises(AliasError):
        compiled(op)(torch.ones(2))


def test_threads(op: Any) -> None:
    f = compiled(lambda x: op(x, 2.0) + 1)
    x = torch.ones(2)
    f(x)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(f(x).tolist())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[3, 3]] * 4


def test_off(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the option of an op, of its registry, and by the environment, which decides."""
    x = torch.ones(2)

    def is_direct(registry: Registry, **options: Any) -> bool:
        op = define_scale(registry, ns, **options)
        return callers(compiled(lambda x: op(x, 2.0)), x) == {"graph_call"}

    assert not is_direct(registry, direct_in_graphs=False)
    other = Registry(direct_in_graphs=False)
    assert not is_direct(other)
    assert is_direct(other, direct_in_graphs=True)
    other.clear()
    monkeypatch.setenv("CUSTOMOPS_DIRECT_IN_GRAPHS", "0")
    assert not is_direct(registry, direct_in_graphs=True)
    monkeypatch.setenv("CUSTOMOPS_DIRECT_IN_GRAPHS", "1")
    assert is_direct(registry, direct_in_graphs=False)
    monkeypatch.setenv("CUSTOMOPS_DIRECT_IN_GRAPHS", "yes")
    with pytest.raises(DefinitionError, match="CUSTOMOPS_DIRECT_IN_GRAPHS"):
        define_scale(registry, ns)
    monkeypatch.delenv("CUSTOMOPS_DIRECT_IN_GRAPHS")
    with pytest.raises(DefinitionError, match="direct_in_graphs"):
        define_scale(registry, ns, direct_in_graphs=1)


def test_aot_eager_and_export_are_as_they_were(op: Any) -> None:
    x = torch.randn(3)
    f = lambda x: op(x, 2.0) + 1  # noqa: E731
    assert "graph_call" not in callers(compiled(f, backend="aot_eager"), x)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = f(x)
            return result

    program = torch.export.export(Module(), (x,))
    assert op._opoverload in [node.target for node in program.graph.nodes]
    assert "graph_call" not in callers(program.module(), x)


@pytest.mark.slow
def test_a_wrapper_in_cpp_is_as_it_was(op: Any) -> None:
    x = torch.randn(3)
    options = {"cpp_wrapper": True, "cpp_cache_precompile_headers": False}  # which takes longer than one program
    f = compiled(lambda x: op(x, 2.0) + 1, options=options)
    for _ in range(2):
        assert_close(f(x), x * 2 + 1)
        assert "graph_call" not in callers(f, x)


PROGRAM = """
    import sys, torch
    from torch import Tensor
    from customops import custom_op

    @custom_op("direct_disk::scale", mutates_args=())
    def scale(x: Tensor, by: float) -> Tensor:
        callers.append(sys._getframe(1).f_code.co_name)
        return x * by

    callers = []
    scale.register_fake(lambda x, by: torch.empty_like(x))
    program = torch.compile(lambda x: scale(x, 2.0) + 1, fullgraph=True)
    program(torch.ones(3))
    callers.clear()
    print(program(torch.ones(3)).tolist())
    from torch._dynamo.utils import counters
    print(callers, counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.process
def test_the_cache_on_disk(tmp_path: Path) -> None:
    """Another process calls the kernels directly, too, and one that wants it otherwise finds nothing."""
    programs = [Program(PROGRAM, environment={"CUSTOMOPS_DIRECT_IN_GRAPHS": value}) for value in ("1", "1", "0", "0")]
    found = [output.split("\n")[:2] for output in outputs(programs, tmp_path)]
    values = "[3.0, 3.0, 3.0]"
    direct, dispatched = "['graph_call']", "['kernel']"
    assert found == [
        [values, f"{direct} 0"],
        [values, f"{direct} 1"],
        [values, f"{dispatched} 0"],
        [values, f"{dispatched} 1"],
    ]


def test_ops_of_like_names_are_told_apart(registry: Registry, ns: str) -> None:
    ops = []
    for name, factor in ((f"{ns}::f.x", 10), (f"{ns}::f_x", 100)):
        op = registry.custom_op(name, lambda x, factor=factor: x * factor, schema="(Tensor x) -> Tensor")
        op.register_fake(lambda x: torch.empty_like(x))
        ops.append(op)
    one, other = ops
    compiled = torch.compile(lambda x: one(x) - other(x), fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [-90.0, -90.0]


@pytest.mark.parametrize("lazy", ["negative view", "no memory"])
def test_gradients_are_plain_memory(registry: Registry, ns: str, lazy: str) -> None:
    seen: list[tuple[bool, bool]] = []

    @registry.custom_op(f"{ns}::backward", schema="(Tensor g) -> Tensor")
    def backward(g: Tensor) -> Tensor:
        seen.append((g.is_neg(), g._is_zerotensor()))
        return g * 2

    backward.register_fake(lambda g: torch.empty_like(g))
    op = registry.custom_op(f"{ns}::double", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(lambda ctx, g: backward(g), setup_context=lambda ctx, inputs, output: None)
    given = torch._neg_view(torch.tensor([-1.0, -2.0])) if lazy == "negative view" else torch._efficientzerotensor(2)

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return given

    compiled = torch.compile(lambda x: op(x), fullgraph=True)
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        x.grad = None
        Given.apply(compiled(x)).sum().backward()
        assert_close(x.grad, 2 * given.resolve_neg() if lazy == "negative view" else torch.zeros(2))
    assert seen[-1] == (False, False)
