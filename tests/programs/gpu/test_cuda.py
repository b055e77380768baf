"""Ops on a CUDA device: streams, graphs, threads of backward, inductor. The oracles are ops of aten."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import customops
from customops import Registry
from customops.errors import OpCheckError, UnsupportedError

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.compile]
# What torch warns of in its own code, or of the machine.
pytestmark += [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (
        "TensorFloat32 tensor cores",
        "The CUDA Graph is empty",
        ".*LeafSpec",
        "The AccumulateGrad node's stream",
    )
]

#: How an op is defined in most tests here: calls by way of the dispatcher, and past it.
WAYS = pytest.mark.parametrize("options", [{}, {"bypass": True}], ids=["dispatcher", "bypass"])


def cuda(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, device="cuda", **options)


def scale_op(registry: Registry, ns: str, **options: Any) -> Any:
    """``sin(x) * by``, with a formula for its gradient that uses another op."""

    @registry.custom_op(f"{ns}::cos_times", mutates_args=(), **options)
    def cos_times(x: Tensor, grad: Tensor, by: float) -> Tensor:
        return x.cos() * grad * by

    cos_times.register_fake(lambda x, *_: torch.empty_like(x))

    @registry.custom_op(f"{ns}::scale", mutates_args=(), **options)
    def scale(x: Tensor, by: float = 2.0) -> Tensor:
        return x.sin() * by

    scale.register_fake(lambda x, *_: torch.empty_like(x))
    scale.register_autograd(_backward(cos_times), setup_context=_setup_context)
    return scale


def _setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.by = inputs[1]


def _backward(cos_times: Any) -> Any:
    return lambda ctx, grad: (cos_times(ctx.saved_tensors[0], grad, ctx.by), None)


def store_op(registry: Registry, ns: str, **options: Any) -> Any:
    @registry.custom_op(f"{ns}::store", mutates_args={"cache"}, **options)
    def store(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
        cache.index_copy_(0, slots, rows)

    return store


# Kernels ----------------------------------------------------------------------------------------------------------


def test_kernels_by_device(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::where_am_i", mutates_args=(), device_types="cpu")
    def where(x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    with pytest.raises(UnsupportedError, match=r'register_kernel\("cuda", fn\)'):
        where(cuda(2))
    where.register_kernel("cuda", torch.ones_like)
    assert where(cuda(2)).tolist() == [1, 1]
    assert where(torch.randn(2)).tolist() == [0, 0]
    with where.set_kernel_enabled("cuda", enabled=False):  # the function that it was defined from
        assert where(cuda(2)).tolist() == [0, 0]


def test_tensors_of_two_devices(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::add", lambda x, y: x + y, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    assert_close(op(cuda(3).zero_(), torch.tensor(2.0)), torch.full((3,), 2.0, device="cuda"))


@WAYS
def test_calls_and_gradients(registry: Registry, ns: str, options: Any) -> None:
    op, x = scale_op(registry, ns, **options), cuda(5, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(op(x, 3.0), x.sin() * 3)
    for fn in (op, torch.compile(op, fullgraph=True)):
        (grad,) = torch.autograd.grad(fn(x, 3.0).sum(), x)
        assert_close(grad, x.cos() * 3)
    torch.autograd.gradcheck(op, cuda(4, dtype=torch.float64, requires_grad=True))


@WAYS
def test_transforms(registry: Registry, ns: str, options: Any) -> None:
    op, x = scale_op(registry, ns, **options), cuda(4)
    assert_close(torch.func.grad(lambda z: op(z).sum())(x), x.cos() * 2)
    op.register_vmap(lambda info, dims, x, by: (op(x, by), dims[0]))
    assert_close(torch.vmap(op)(cuda(3, 4).fill_(1.0)), torch.full((3, 4), 1.0, device="cuda").sin() * 2)


@WAYS
def test_backward_runs_in_a_thread_of_its_own(registry: Registry, ns: str, options: Any) -> None:
    """What surrounds the call is that of the thread which calls backward; modes there are none."""
    seen = []

    @registry.custom_op(f"{ns}::watched", mutates_args=(), **options)
    def watched(x: Tensor) -> Tensor:
        seen.append((threading.get_ident(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x.clone()

    watched.register_fake(torch.empty_like)
    watched.register_autograd(lambda ctx, grad: watched(grad))
    x = cuda(3, requires_grad=True)
    (grad,) = torch.autograd.grad(watched(x).sum(), x, create_graph=True)
    assert_close(grad, torch.ones_like(x))
    watched(x).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, torch.ones_like(x))
    assert len(seen) == 4
    assert {(grad, inference) for _, grad, inference in seen} == {(False, False)}


def test_saved_tensors_are_freed(registry: Registry, ns: str) -> None:
    op, x = scale_op(registry, ns, bypass=True), cuda(1 << 20, requires_grad=True)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        torch.autograd.grad(op(x).sum(), x)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_autocast(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::mm", mutates_args=())
    def mm(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    mm.register_fake(lambda x, y: x.new_empty(x.shape[0], y.shape[1]))
    mm.register_autocast("cuda", torch.bfloat16)
    mm.register_autograd(
        lambda ctx, grad: (mm(grad, ctx.saved_tensors[1].t()), mm(ctx.saved_tensors[0].t(), grad)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x, y = cuda(4, 3, requires_grad=True), cuda(3, 5, requires_grad=True)
    for fn in (mm, torch.compile(mm, fullgraph=True)):
        with torch.autocast("cuda", torch.bfloat16):
            ours, theirs = fn(x, y), x @ y
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert_close(ours, theirs)
        got = torch.autograd.grad(ours.float().sum(), (x, y))
        assert_close(got, torch.autograd.grad(theirs.float().sum(), (x, y)), rtol=2e-2, atol=2e-2)


def test_checkpoint_draws_the_same_numbers(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::dropout", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    def dropout(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.rand_like(x) < 0.5
        return x * mask, mask

    dropout.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)))
    dropout.register_autograd(
        lambda ctx, grad, _: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
    )
    x = cuda(1000, requires_grad=True)
    out = checkpoint(lambda x: dropout(x)[0] * 3, x, use_reentrant=False)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_close(grad, (out != 0) * 3.0)


# Streams and CUDA graphs ------------------------------------------------------------------------------------------


@WAYS
def test_streams(registry: Registry, ns: str, options: Any) -> None:
    op = scale_op(registry, ns, **options)
    stream = torch.cuda.Stream()
    x = cuda(1 << 22, requires_grad=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = x
        for _ in range(5):
            result = op(result)
        (grad,) = torch.autograd.grad(result.sum(), x)
    torch.cuda.current_stream().wait_stream(stream)
    expected = x
    for _ in range(5):
        expected = expected.sin() * 2
    assert_close(result, expected)
    assert_close(grad, torch.autograd.grad(expected.sum(), x)[0])


@WAYS
def test_capture(registry: Registry, ns: str, options: Any) -> None:
    op, store = scale_op(registry, ns, **options), store_op(registry, ns, **options)
    x, cache = cuda(2, 3), torch.zeros(4, 3, device="cuda")
    slots = torch.tensor([2, 0], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        op(x)
        with torch.cuda.graph(graph):
            y = op(x)
            store(cache, y, slots)
    x.mul_(2)
    graph.replay()
    assert_close(y, x.sin() * 2)
    assert_close(cache[slots], x.sin() * 2)
    assert_close(cache[[1, 3]], torch.zeros(2, 3, device="cuda"))


@WAYS
def test_compiled_to_cuda_graphs(registry: Registry, ns: str, options: Any) -> None:
    op, store = scale_op(registry, ns, **options), store_op(registry, ns, **options)

    def step(x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        y = op(x + 1, 3.0)
        store(cache, y, slots)
        return cache.mean(0) + y.sum(0)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    ours, theirs = torch.zeros(4, 8, device="cuda"), torch.zeros(4, 8, device="cuda")
    slots = torch.tensor([3, 1], device="cuda")
    with torch.no_grad():
        for _ in range(4):
            x = cuda(2, 8)
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(x, ours, slots).clone()
            theirs.index_copy_(0, slots, (x + 1).sin() * 3)
            assert_close(got, theirs.mean(0) + ((x + 1).sin() * 3).sum(0))
            assert_close(ours, theirs)


@WAYS
def test_training_with_cuda_graphs(registry: Registry, ns: str, options: Any) -> None:
    op = scale_op(registry, ns, **options)
    model = nn.Linear(8, 8, device="cuda")
    compiled = torch.compile(lambda x: op(model(x)).sum(), mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = cuda(4, 8)
        torch.compiler.cudagraph_mark_step_begin()
        got = torch.autograd.grad(compiled(x), model.weight)[0].clone()
        expected = torch.autograd.grad((model(x).sin() * 2).sum(), model.weight)[0]
        assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_an_op_that_graphs_must_not_hold(registry: Registry, ns: str) -> None:
    calls = []

    @registry.custom_op(f"{ns}::unsafe", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
    def unsafe(x: Tensor) -> Tensor:
        calls.append(float(x.sum()))  # waits for the device, which a capture does not allow
        return x * 2

    unsafe.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: unsafe(x.sin()).cos(), mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            x = cuda(4)
            assert_close(compiled(x).clone(), (x.sin() * 2).cos())
    assert len(calls) == 4


def test_dynamic_shapes(registry: Registry, ns: str) -> None:
    op = scale_op(registry, ns)
    compiled = torch.compile(lambda x: op(x * 2).cumsum(0), fullgraph=True, dynamic=True)
    for n in (3, 7, 100):
        x = cuda(n, 4)
        assert_close(compiled(x), (x * 2).sin().mul(2).cumsum(0))


def test_gradients_of_one_op_from_several_threads(registry: Registry, ns: str) -> None:
    op = scale_op(registry, ns, bypass=True)
    failures = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                x = torch.full((1000,), float(seed), device="cuda", requires_grad=True)
                for _ in range(50):
                    (grad,) = torch.autograd.grad(op(x, float(seed)).sum(), x)
                assert_close(grad, x.cos() * seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures


# Tools ------------------------------------------------------------------------------------------------------------


def test_checks(registry: Registry, ns: str) -> None:
    op = scale_op(registry, ns)
    assert set(customops.opcheck(op, (cuda(3, requires_grad=True),)).values()) == {"SUCCESS"}
    op.register_kernel("cuda", lambda x, by=2.0: x.sin() * by + 1)
    op.register_fake(lambda x, by=2.0: x.new_empty(7))
    with pytest.raises(OpCheckError, match="the fake impl promises"):
        customops.opcheck(op, (cuda(3),), test_utils="test_faketensor")


def test_a_kernel_that_computes_something_else_there(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::scale", mutates_args=())
    def scale(x: Tensor) -> Tensor:
        return x * 2

    scale.register_fake(torch.empty_like)
    scale.register_kernel("cuda", lambda x: x * 2 + 1e-2)
    report = customops.check(scale, [(torch.randn(3),)])
    assert any("cuda" in str(failure) for failure in report.failures), report


def test_the_profiler_names_kernels(registry: Registry, ns: str) -> None:
    op = scale_op(registry, ns)
    op.register_kernel("cuda", lambda x, by=2.0: x.sin() * by)
    with torch.profiler.profile() as profile, torch.no_grad():
        op(cuda(3))
    assert any(event.key.startswith(f"{ns}::scale[cuda: test_cuda.py:") for event in profile.key_averages())
    with torch.autograd.profiler.emit_nvtx():  # nothing reads the ranges here; they must not be in the way
        assert_close(op(torch.ones(2, device="cuda")), torch.ones(2, device="cuda").sin() * 2)


def test_describe_and_explain(registry: Registry, ns: str) -> None:
    op = scale_op(registry, ns)
    op.register_kernel("cuda", lambda x, by=2.0: x.sin() * by)
    assert "cuda" in str(op.describe())
    assert "test_cuda.py" in str(op.explain(cuda(3)))


def test_aotinductor(registry: Registry, ns: str, tmp_path: Any) -> None:
    op = scale_op(registry, ns)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x + 1).cos()

    x = cuda(3, 4)
    with torch.no_grad():
        program = torch.export.export(Model(), (x,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        assert_close(loaded(x), ((x + 1).sin() * 2).cos())
