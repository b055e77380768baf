"""What compilers may do with an op: decompositions and lowerings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from customops import Registry
from customops.errors import CallbackError, RegistrationError, UnsupportedError

pytestmark = pytest.mark.compile

CALLS: list[str] = []


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    CALLS.append("kernel")
    return x * by


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    CALLS.clear()
    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: (op(grad, ctx.by), None), setup_context=save)
    return op


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.by = inputs[1]


class Size(NamedTuple):
    rows: int
    columns: int


def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


def compiled(f: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, **options)


def runs_kernel(f: Callable[..., Any], *args: Any) -> bool:
    CALLS.clear()
    f(*args)
    return bool(CALLS)


def register(op: Any, kind: str, fn: Any = scaled) -> None:
    (op.register_decomposition if kind == "decomposition" else op.register_lowering)(fn)


KINDS = pytest.mark.parametrize("kind", ["decomposition", "lowering"])


@KINDS
def test_inductor_calls_no_kernel(op: Any, kind: str) -> None:
    program = lambda x: op(x.sin()).cos() + op(x, 3.0)  # noqa: E731
    before = compiled(program)
    x = torch.randn(4)
    assert runs_kernel(before, x)
    register(op, kind)
    for f in (before, compiled(program), compiled(program, dynamic=True)):  # what was compiled is compiled anew
        for n in (4, 5):
            x = torch.randn(n)
            assert_close(f(x), (x.sin() * 2).cos() + x * 3)
            assert not runs_kernel(f, x)
    assert runs_kernel(op, x)
    assert runs_kernel(compiled(program, backend="aot_eager"), x)


@KINDS
def test_gradients(op: Any, kind: str) -> None:
    register(op, kind)
    f = compiled(lambda x: op(x, 3.0).sin())
    x = torch.randn(4, requires_grad=True)
    CALLS.clear()
    (grad,) = torch.autograd.grad(f(x).sum(), x)
    assert_close(grad, 3 * (3 * x).cos())
    assert not CALLS


@KINDS
def test_it_may_decline(op: Any, kind: str) -> None:
    register(op, kind, lambda x, by: scaled(x, by) if x.dim() == 2 else NotImplemented)
    f = compiled(lambda x: op(x.sin(), 3.0) + 1)
    for x, declined in ((torch.randn(3, 2), False), (torch.randn(3), True), (torch.randn(2, 3).t(), False)):
        assert_close(f(x), x.sin() * 3 + 1)
        assert runs_kernel(f, x) is declined
    # Both in one graph, and the declined one with the strides that the program gave it.
    g = compiled(lambda x, y: (op(x), op(y.permute(2, 1, 0))))
    x, y = torch.randn(2, 2), torch.randn(2, 3, 4)
    assert_close(g(x, y), (x * 2, y.permute(2, 1, 0) * 2))
    assert runs_kernel(g, x, y)


@KINDS
def test_it_ends(registry: Registry, op: Any, kind: str) -> None:
    f = compiled(lambda x: op(x) + 1)
    x = torch.randn(3)
    with registry.scope():
        register(op, kind, lambda x, by: x * 10)
        assert_close(f(x), x * 10 + 1)
    assert_close(f(x), x * 2 + 1)
    assert runs_kernel(f, x)
    with registry.scope():
        register(op, kind, lambda x, by: x * 10)
        register(op, kind, lambda x, by: x * 20)
        assert_close(f(x), x * 20 + 1)
    assert runs_kernel(f, x)


@KINDS
def test_an_op_that_is_replaced_and_comes_back(registry: Registry, op: Any, kind: str) -> None:
    register(op, kind, lambda x, by: x * 10)
    packet = getattr(torch.ops, op._qualname.partition("::")[0])
    f = compiled(lambda x: packet.scale(x, 2.0))
    x = torch.randn(3)
    assert_close(f(x), x * 10)
    with registry.scope():
        other = registry.custom_op(op._qualname, lambda x, by: x + by, schema="(Tensor x, float by) -> Tensor")
        other.register_fake(lambda x, by: torch.empty_like(x))
        assert_close(f(x), x + 2)
    assert_close(f(x), x * 10)


def test_a_predicate(op: Any) -> None:
    op.register_decomposition(scaled, when=lambda x, by: x.dtype == torch.float64 and by > 2)
    f = compiled(lambda x, by: op(x, by) + 1)
    for dtype, by, kept in ((torch.float64, 3.0, False), (torch.float32, 3.0, True), (torch.float64, 1.0, True)):
        torch._dynamo.reset()
        f = compiled(lambda x, by=by: op(x, by) + 1)
        x = torch.randn(3, dtype=dtype)
        assert_close(f(x), x * by + 1)
        assert runs_kernel(f, x) is kept


def targets(program: Any) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # run_decompositions copies them
def test_export(op: Any) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = op(x.sin(), 3.0)
            return result

    x = torch.randn(3)
    name = str(op._opoverload)
    op.register_decomposition(lambda x, by: x * 10, when="inductor")
    assert name in targets(torch.export.export(Module(), (x,)).run_decompositions())
    op.register_decomposition(scaled, when="export")
    program = torch.export.export(Module(), (x,))
    assert name in targets(program)
    assert name in targets(program.run_decompositions({}))
    decomposed = program.run_decompositions()
    assert name not in targets(decomposed)
    assert_close(decomposed.module()(x), x.sin() * 3)
    assert not runs_kernel(decomposed.module(), x)
    op.register_decomposition(scaled, when=lambda x, by: by == 2.0)
    assert name in targets(torch.export.export(Module(), (x,)).run_decompositions())


def test_reductions_are_fused(registry: Registry, ns: str) -> None:
    """As many kernels of inductor as for the plain code: what is around the op is fused with it."""

    def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    op = registry.custom_op(f"{ns}::norm", lambda *args: 1 / 0, schema="(Tensor x, Tensor w, float eps=1e-6) -> Tensor")
    op.register_fake(lambda x, w, eps: torch.empty_like(x))
    op.register_lowering(norm)
    metrics = importlib.import_module("torch._inductor.metrics")
    x, w, counts = torch.randn(4, 8), torch.randn(8), []
    for normalize in (op, norm):
        metrics.reset()
        f = compiled(lambda x, w, normalize=normalize: normalize(x.sin(), w).cos())
        assert_close(f(x, w), norm(x.sin(), w).cos())
        counts.append(metrics.generated_kernel_count)
    assert counts[0] == counts[1]


def test_several_results(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::both", lambda *args, **kwargs: 1 / 0, schema="(Tensor x, *, int n=2) -> (Tensor, Tensor[])"
    )
    op.register_fake(lambda x, *, n: (torch.empty_like(x), [torch.empty_like(x) for _ in range(n)]))
    for register in (op.register_lowering, op.register_decomposition):
        with registry.scope():
            register(lambda x, *, n: (x + n, [x * i for i in range(n)]))
            x = torch.randn(3)
            for n in (2, 3):
                assert_close(compiled(lambda x, n=n: op(x, n=n))(x), (x + n, [x * i for i in range(n)]))


def test_what_is_refused(registry: Registry, ns: str, op: Any) -> None:
    writes = registry.custom_op(f"{ns}::add", lambda x: None, schema="(Tensor(a!) x) -> ()")
    view = registry.custom_op(f"{ns}::view", lambda x: x[:], schema="(Tensor(a) x) -> Tensor(a)")
    for other in (writes, view):
        for register in (other.register_lowering, other.register_decomposition):
            with pytest.raises(UnsupportedError, match="return new tensors and write nothing"):
                register(lambda x: x)
    with pytest.raises(CallbackError, match="decomposition"):
        op.register_decomposition(lambda x, y, z: x)
    with pytest.raises(CallbackError, match="predicate"):
        op.register_decomposition(scaled, when=lambda: True)
    with pytest.raises(CallbackError, match="lowering"):
        op.register_lowering(lambda: 1)
    with pytest.raises(RegistrationError, match=r"when= has an invalid value"):
        op.register_decomposition(scaled, when="aot_eager")

    @registry.custom_op(f"{ns}::add_size", mutates_args=())
    def add_size(x: Tensor, size: Size) -> Tensor:
        return x + size.rows

    with pytest.raises(UnsupportedError, match="when= cannot be a predicate") as caught:
        add_size.register_decomposition(lambda x, size: x + size.rows, when=lambda x, size: True)
    assert (caught.value.op, caught.value.argument) == (f"{ns}::add_size", "when")
    assert caught.value.expected == "an op whose parameters are one schema argument each"
    assert caught.value.fix == 'when="inductor" or when="export"'
    assert runs_kernel(compiled(lambda x: op(x)), torch.ones(2))
