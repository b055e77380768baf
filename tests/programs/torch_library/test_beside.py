"""The two frameworks beside and in each other, redefinition, and tools of torch."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.functions import double_fn
from helpers.interop import product_fn, scale_fn
from helpers.tensors import leaf, slope
from helpers.warm import PYTHON
from torch import Tensor
from torch._library.utils import has_fake_kernel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import customops
from customops import Registry
from customops.errors import UnregisteredError

ROOT = Path(__file__).parents[3]


def run(script: str, *paths: Path) -> str:
    """Run a script in a fresh interpreter and return what it prints; a crash fails the test."""
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(map(str, [ROOT, *paths])), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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


@pytest.mark.compile
@pytest.mark.compile
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


@pytest.mark.compile
@pytest.mark.compile
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


@pytest.mark.compile
@pytest.mark.compile
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


@pytest.mark.process
@pytest.mark.process
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


@pytest.mark.process
@pytest.mark.process
def test_an_exported_program_is_loaded_in_a_fresh_process(op_library: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    torch.export.save(exported(op_library), file)
    loaded = run_loaded(f"torch.export.load({str(file)!r}).module()", op_library, tmp_path)
    assert loaded == str([[5.0, 5.0]] * 3)


@pytest.mark.process
@pytest.mark.process
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++, and there is no g++")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_a_package_of_aotinductor_is_loaded_in_a_fresh_process(op_library: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "model.pt2")
    # For one program, to compile the headers beforehand takes longer than to read them.
    with torch._inductor.config.patch({"aot_inductor.precompile_headers": False}):
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


@pytest.mark.compile
@pytest.mark.compile
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


@pytest.mark.compile
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # compiled autograd looks at that of every input
def test_compiled_autograd(product: Any) -> None:
    x = leaf(1.0, 2.0)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        product(product(x, x), x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [7.0, 7 * 64.0]
