"""torch's own tools on our ops, and the two frameworks side by side."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, List, Optional, Tuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._library.simple_registry import singleton as torch_fakes
from torch._library.utils import has_fake_kernel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import customops
from customops import Registry
from customops.errors import UnregisteredError

ROOT = Path(__file__).parents[1]


def double_fn(x: Tensor) -> Tensor:
    return x * 2


def scale_fn(x: Tensor, by: float = 3.0) -> Tensor:
    return x * by


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def slope(op: Any) -> float:
    x = leaf(1.0)
    op(x).backward()
    assert x.grad is not None
    return x.grad.item()


def run(script: str, *paths: Path) -> str:
    """Run a script in a fresh interpreter and return what it prints; a crash fails the test."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(map(str, [ROOT, *paths])), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def double(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::double", double_fn, mutates_args=())


# torch.library's functions on an op of ours ---------------------------------------------------------------------------


@pytest.fixture(params=["name", "overload"])
def handle(request: pytest.FixtureRequest, double: Any) -> Any:
    return double._qualname if request.param == "name" else double._opoverload


def test_torch_registers_a_kernel(double: Any, handle: Any) -> None:
    torch.library.register_kernel(handle, "cpu", lambda x: x * 5)
    assert double(torch.ones(1)).item() == 5.0

    @torch.library.register_kernel(handle, ["cpu", "cuda"])
    def kernel(x: Tensor) -> Tensor:
        return x * 6

    assert double(torch.ones(1)).item() == 6.0
    double.register_kernel("cpu", lambda x: x * 7)
    assert double(torch.ones(1)).item() == 7.0
    torch.library.register_kernel(handle, "cpu", lambda x: x)
    with pytest.raises(RuntimeError, match="may not alias"):  # it is a kernel like any of ours
        double(torch.ones(1))


def test_torch_registers_a_fake(double: Any, handle: Any) -> None:
    assert not has_fake_kernel(double._opoverload)
    torch.library.register_fake(handle, lambda x: x.new_empty(3))
    with FakeTensorMode():
        assert double(torch.ones(1)).shape == (3,)
    assert double(torch.ones(1, device="meta")).shape == (3,)
    assert has_fake_kernel(double._opoverload)

    @torch.library.register_fake(handle)
    def fake(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    compiled = torch.compile(lambda x: double(x) + 1, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]


def test_source_of_a_fake_that_torch_registers(double: Any, handle: Any) -> None:
    torch.library.register_fake(handle, lambda x: x.new_empty(3))
    line = sys._getframe().f_lineno - 1
    # 45: the user's file, not that of torch.
    assert torch_fakes.find(double._qualname).fake_impl.kernel.source == f"{__file__}:{line}"


def test_torch_registers_a_formula(double: Any, handle: Any) -> None:
    assert torch.library.register_autograd(handle, lambda ctx, grad: grad * 3) is None
    assert slope(double) == 3.0
    torch.library.register_autograd(
        handle,
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    assert slope(double) == 2.0
    assert torch.func.grad(lambda x: double(x).sum())(torch.tensor([4.0])).item() == 8.0


def test_torch_registers_autocast(double: Any, handle: Any) -> None:
    for dtype in torch.float16, torch.bfloat16:
        torch.library.register_autocast(handle, "cpu", dtype)
        with torch.autocast("cpu"):
            assert double(torch.ones(1)).dtype is dtype


def test_a_kernel_through_a_library(double: Any, ns: str) -> None:
    assert double(torch.ones(1)).item() == 2.0
    library = Library(ns, "IMPL")
    library.impl("double", lambda x: x * 9, "CPU")
    assert double(torch.ones(1)).item() == 9.0
    library._destroy()
    assert double(torch.ones(1)).item() == 2.0


def test_get_kernel(double: Any, ns: str) -> None:
    kernel = torch.library.get_kernel(double._qualname, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    assert kernel.call_boxed(keys, torch.ones(2)).tolist() == [2.0, 2.0]
    double.register_kernel(None, lambda x: x * 3)  # the kernel is a door to what is registered now
    assert kernel.call_boxed(keys, torch.ones(2)).tolist() == [3.0, 3.0]
    library = Library(ns, "FRAGMENT")
    double.register_kernel("cpu", lambda x: x * 4, lib=library)
    newer = torch.library.get_kernel(double._qualname, "CPU")
    assert newer.call_boxed(keys, torch.ones(2)).tolist() == [4.0, 4.0]
    library._destroy()
    with pytest.raises(RuntimeError, match="has been invalidated"):
        newer.call_boxed(keys, torch.ones(2))
    assert kernel.call_boxed(keys, torch.ones(2)).tolist() == [3.0, 3.0]


def test_get_kernel_of_a_device_without_one(registry: Registry, ns: str) -> None:
    registry.custom_op(f"{ns}::op", double_fn, mutates_args=(), device_types="cpu")
    with pytest.raises(RuntimeError, match="no kernel for CUDA for"):
        torch.library.get_kernel(f"{ns}::op", "CUDA")


# torch's opcheck ------------------------------------------------------------------------------------------------------


def product_fn(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(np.array(x.numpy(force=True) ** 2 * y.numpy(force=True), order="C"))


@pytest.fixture
def product(registry: Registry, ns: str) -> Any:
    """``x * x * y`` in numpy, with a fake and a formula."""
    op = registry.custom_op(f"{ns}::product", product_fn, mutates_args=())

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * 2 * x * y, grad * x * x

    op.register_fake(lambda x, y: x.new_empty(x.shape))
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


def assert_passes(op: Any, *args: Any, **kwargs: Any) -> None:
    results = torch.library.opcheck(op._opoverload, args, kwargs)
    assert results == dict.fromkeys(
        ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"], "SUCCESS"
    )


#: The harness looks at the gradient of what is no leaf.
torch_opcheck = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@torch_opcheck
def test_opcheck_of_an_op_with_a_formula(product: Any) -> None:
    assert_passes(product, torch.rand(3), torch.rand(3))
    assert_passes(product, leaf(1.0, 2.0), torch.rand(2))
    assert_passes(product, leaf(1.0, 2.0), leaf(3.0, 4.0))
    assert_passes(product, torch.rand(2, 3).t(), torch.rand(3, 2, requires_grad=True))


@torch_opcheck
def test_opcheck_of_lists_numbers_and_keywords(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(xs: List[Optional[Tensor]], y: Tensor, n: int = 2, *, scale: float = 3.0) -> Tuple[List[Tensor], Tensor]:
        return [x * scale for x in xs if x is not None], y * n

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.present = [x is not None for x in inputs[0]]
        ctx.n, ctx.scale = inputs[2], keyword_only_inputs["scale"]

    def backward(ctx: Any, grads: list[Tensor], grad: Tensor) -> Any:
        left = iter(grads)
        return [next(left) * ctx.scale if present else None for present in ctx.present], grad * ctx.n, None

    op.register_fake(
        lambda xs, y, n, *, scale: ([torch.empty_like(x) for x in xs if x is not None], torch.empty_like(y))
    )
    op.register_autograd(backward, setup_context=setup_context)
    assert_passes(op, [torch.rand(2), None], torch.rand(3))
    assert_passes(op, [leaf(1.0, 2.0), None, torch.rand(2)], leaf(3.0), 5, scale=1.5)
    assert_passes(op, [], leaf(3.0))


def test_opcheck_of_mutation(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::add_", mutates_args={"x", "rest"})
    def add_(x: Tensor, y: Tensor, rest: List[Tensor]) -> None:
        for t in x, *rest:
            t.add_(y)

    assert_passes(add_, torch.rand(2), torch.rand(2), [torch.rand(2), torch.rand(2)])


@torch_opcheck
def test_opcheck_of_overloads(registry: Registry, ns: str) -> None:
    ops = [
        registry.custom_op(f"{ns}::op", double_fn, mutates_args=()),
        registry.custom_op(f"{ns}::op.by", scale_fn, mutates_args=()),
    ]
    for op in ops:
        op.register_fake(lambda x, *rest: torch.empty_like(x))
    ops[0].register_autograd(lambda ctx, grad: grad * 2)
    ops[1].register_autograd(
        lambda ctx, grad: (grad * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1])
    )
    assert_passes(ops[0], leaf(1.0))
    assert_passes(ops[1], leaf(1.0), 4.0)
    assert (slope(ops[0]), slope(lambda x: ops[1](x, 4.0))) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (None, "no fake impl"),
        (lambda x, y: x.new_empty(7), "Shapes .* are not equal"),
        (lambda x, y: torch.empty_like(x, dtype=torch.float64), "Dtypes .* are not equal"),
    ],
)
def test_opcheck_sees_what_is_wrong(registry: Registry, ns: str, fake: Any, message: str) -> None:
    op = registry.custom_op(f"{ns}::op", product_fn, mutates_args=())
    if fake is not None:
        op.register_fake(fake)
    with pytest.raises(Exception, match=message):
        torch.library.opcheck(op._opoverload, (torch.rand(3), torch.rand(3)))


@torch_opcheck
def test_opcheck_sees_a_wrong_formula_when_traced(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", double_fn, mutates_args=())
    op.register_fake(torch.empty_like)
    calls = []
    op.register_autograd(lambda ctx, grad: calls.append(1) or grad * len(calls))  # not the same from call to call
    with pytest.raises(Exception, match=r"(?s)test_aot_dispatch_dynamic"):
        torch.library.opcheck(op._opoverload, (leaf(1.0),))


# The two frameworks beside and in each other --------------------------------------------------------------------------


@pytest.fixture
def theirs(ns: str) -> Iterator[Any]:
    """``exp`` made by torch.library.custom_op."""
    op = torch.library.custom_op(f"{ns}::theirs", lambda x: x.exp(), mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    yield op
    customops.default_registry.clear()


def test_ops_of_both_in_one_graph(product: Any, theirs: Any) -> None:
    def ours(x: Tensor) -> Tensor:
        return theirs(product(theirs(x), x))

    def plain(x: Tensor) -> Tensor:
        return (x.exp() ** 2 * x).exp()

    x = torch.rand(3) / 2
    for f in ours, torch.compile(ours, backend="aot_eager", fullgraph=True):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        f(a).sum().backward()
        plain(b).sum().backward()
        assert a.grad is not None
        assert torch.allclose(a.grad, b.grad)
        assert torch.allclose(f(x), plain(x))


def test_ops_of_each_inside_the_other(registry: Registry, product: Any, theirs: Any, ns: str) -> None:
    outer = registry.custom_op(f"{ns}::outer", lambda x: theirs(x) * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    outer.register_autograd(
        lambda ctx, grad: theirs(*ctx.saved_tensors) * grad * 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(outer, (x,))
    assert torch.autograd.gradgradcheck(outer, (x,))
    other = torch.library.custom_op(
        f"{ns}::other", lambda x: product(x, x), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    other.register_autograd(
        lambda ctx, grad: 3 * product(ctx.saved_tensors[0], grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert torch.autograd.gradcheck(other, (x,))
    assert torch.autograd.gradgradcheck(other, (x,))


# Redefinition ---------------------------------------------------------------------------------------------------------


def decorated(op: Any) -> Any:
    """`op` with every rule, none of which may reach an op that takes its place."""
    op.register_fake(lambda x: x.new_empty(77))
    op.register_autograd(lambda ctx, grad: grad * 77)
    op.register_autocast("cpu", torch.float16)
    op.register_kernel("cpu", lambda x: x * 77)
    return op


def assert_bare(op: Any, ns: str) -> None:
    """`op` is `scale_fn` and has no rules."""
    assert [f(torch.ones(1)).item() for f in (op, op._opoverload, getattr(torch.ops, ns).op)] == [3.0] * 3
    assert op(torch.ones(1), by=5.0).item() == 5.0
    with pytest.raises(RuntimeError, match="no autograd formula"):
        slope(op)
    with pytest.raises(RuntimeError, match="no fake impl"):
        op(torch.ones(1, device="meta"))
    with pytest.raises(RuntimeError, match="no fake impl"), FakeTensorMode():
        op(torch.ones(1))
    assert not has_fake_kernel(op._opoverload)
    with torch.autocast("cpu"):
        assert op(torch.ones(1)).dtype is torch.float32
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(
        lambda ctx, grad: (grad * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1])
    )
    compiled = torch.compile(lambda x: op(x, 4.0), backend="aot_eager", fullgraph=True)
    assert slope(compiled) == slope(lambda x: op(x, 4.0)) == 4.0


def test_torch_takes_over_our_name(registry: Registry, ns: str) -> None:
    ours = decorated(registry.custom_op(f"{ns}::op", double_fn, mutates_args=()))
    assert ours(torch.ones(1)).item() == 77.0
    overload, packet = ours._opoverload, getattr(torch.ops, ns).op
    theirs = torch.library.custom_op(f"{ns}::op", scale_fn, mutates_args=())
    assert_bare(theirs, ns)
    assert f"{ns}::op" not in registry
    for old in ours, overload, packet:
        with pytest.raises(UnregisteredError, match=r"torch\.library\.custom_op redefining its name"):
            old(torch.ones(1))
    with pytest.raises(UnregisteredError):
        ours.register_kernel("cpu", double_fn)
    assert theirs(torch.ones(1)).item() == 3.0


def test_we_take_over_a_name_of_torch(registry: Registry, ns: str) -> None:
    decorated(torch.library.custom_op(f"{ns}::op", double_fn, mutates_args=()))
    ours = registry.custom_op(f"{ns}::op", scale_fn, mutates_args=())
    assert_bare(ours, ns)
    assert registry[f"{ns}::op"] is ours


def test_back_and_forth(registry: Registry, ns: str) -> None:
    for _ in range(3):
        ours = registry.custom_op(f"{ns}::op", double_fn, mutates_args=())
        assert ours(torch.ones(1)).item() == 2.0
        theirs = torch.library.custom_op(f"{ns}::op", scale_fn, mutates_args=())
        assert theirs(torch.ones(1)).item() == 3.0
        assert len(registry) == 0
    ours = registry.custom_op(f"{ns}::op", double_fn, mutates_args=())
    assert getattr(torch.ops, ns).op(torch.ones(1)).item() == 2.0
    ours.unregister()
    assert not hasattr(getattr(torch.ops, ns), "op")


def test_old_handles_to_an_op_of_torch_raise() -> None:
    output = run("""
        import torch, customops
        op = torch.library.custom_op("ns::op", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
        handles = op, op._opoverload, torch.ops.ns.op
        new = customops.custom_op("ns::op", lambda x: x * 3, mutates_args=(), schema="(Tensor x) -> Tensor")
        new.unregister()
        for handle in handles:
            try:
                print(handle(torch.ones(1)))
            except customops.errors.UnregisteredError as error:
                print("refused")
    """)
    assert output.splitlines() == ["refused"] * 3


# Tools ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def op_library(tmp_path: Path, ns: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with an op and a model that calls it, as a user would import it; the op is gone afterwards."""
    (tmp_path / f"oplib_{ns}.py").write_text(
        textwrap.dedent(f"""
            import torch
            import customops

            def double(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
                return x * by

            op = customops.custom_op("{ns}::double", double, mutates_args=())
            op.register_fake(lambda x, by: torch.empty_like(x))

            class Model(torch.nn.Module):
                def forward(self, x):
                    return op(x, 3.0) + op(x)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    library = importlib.import_module(f"oplib_{ns}")
    yield library
    library.op.unregister()


def exported(library: Any) -> torch.export.ExportedProgram:
    rows = {0: torch.export.Dim("n")}
    program = torch.export.export(library.Model(), (torch.ones(4, 2),), dynamic_shapes=(rows,))
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert targets[:2] == [library.op._opoverload] * 2
    return program


def run_loaded(load: str, library: Any, path: Path) -> str:
    """What a model prints that is loaded in a fresh process, which has imported the op's module."""
    return run(
        f"""
        import torch, {library.__name__}
        program = {load}
        print(program(torch.ones(3, 2)).tolist())
        """,
        path,
    ).strip()


def test_an_exported_program_is_loaded_in_a_fresh_process(op_library: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    torch.export.save(exported(op_library), file)
    loaded = run_loaded(f"torch.export.load({str(file)!r}).module()", op_library, tmp_path)
    assert loaded == str([[5.0, 5.0]] * 3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++, and there is no g++")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_a_package_of_aotinductor_is_loaded_in_a_fresh_process(op_library: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(exported(op_library), package_path=file)
    loaded = run_loaded(f"torch._inductor.aoti_load_package({file!r})", op_library, tmp_path)
    assert loaded.splitlines()[-1] == str([[5.0, 5.0]] * 3)


def test_counting_flops(product: Any, ns: str) -> None:
    x, y = leaf(1.0, 2.0, 3.0), leaf(4.0, 5.0, 6.0)
    with FlopCounterMode(display=False) as counter:
        product(x, y).sum().backward()
    assert counter.get_total_flops() == 0  # nothing says how many it needs
    assert x.grad is not None
    assert x.grad.tolist() == [8.0, 20.0, 36.0]
    formula = {getattr(torch.ops, ns).product: lambda x, y, *args, out_shape=None, **kwargs: 2 * x[0]}
    with FlopCounterMode(display=False, custom_mapping=formula) as counter:
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
        product(x, product(x, y)).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 3 * 4 + 2 * (2 * 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing(product: Any, compiled: bool) -> None:
    calls: list[int] = []
    product.register_kernel("cpu", lambda x, y: calls.append(1) or product_fn(x, y))

    def block(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, y: f(torch.sin(f(x, y)), y)

    def gradient(f: Callable[..., Tensor]) -> Tensor:
        x = torch.tensor([0.3, 0.6], requires_grad=True)
        f(x, torch.tensor([1.0, 2.0])).sum().backward()
        assert x.grad is not None
        return x.grad

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([product._opoverload])

    def selective(x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(block(product), x, y, use_reentrant=False, context_fn=contexts)

    def plain(x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(block(product), x, y, use_reentrant=False)

    wanted = gradient(block(lambda x, y: x * x * y))
    run_selective = torch.compile(selective, backend="aot_eager_decomp_partition") if compiled else selective
    assert torch.allclose(gradient(run_selective), wanted)
    assert len(calls) == 2  # what it says to save is not computed again
    if not compiled:
        calls.clear()
        assert torch.allclose(gradient(plain), wanted)
        assert len(calls) == 4


def test_the_profiler_knows_our_ops(product: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        product(leaf(1.0), leaf(2.0)).backward()
    names = [event.name for event in profile.events()]
    assert product._qualname in names
    assert any("product" in name and "Backward" in name for name in names)


def test_symbolic_tracing_with_fx(product: Any) -> None:
    graph = torch.fx.symbolic_trace(lambda x: product(x, x) + 1)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"][0] is product._opoverload  # noqa: RUF015
    assert graph(torch.tensor([2.0])).item() == 9.0


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # compiled autograd looks at that of every input
def test_compiled_autograd(product: Any) -> None:
    x = leaf(1.0, 2.0)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        product(product(x, x), x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [7.0, 7 * 64.0]
